"""How two tensors, or sets of tensors, differ: by a factor, a permutation, rounding."""

import math
import sys
from dataclasses import dataclass

import torch

EQUAL = 1e-9  # relative; in float64, rounding is below 1e-12, and a mistake above 1e-2
ROUNDED = 1e-4  # float32 somewhere in between
MOST_ROWS = 50_000
NOISE = 1e-3  # of the limit: next to the largest value, what is smaller is rounding
HALF = 3e-2  # or float16 or bfloat16


@dataclass
class Comparison:
    """The comparison of two tensors with the same name, in runs a and b."""

    name: str
    difference: float  # the largest, relative to the largest value; inf: not comparable
    how: str  # what is different, in words; "" if they are equal
    kind: str = ""  # the type of the module whose output it is


def relative(a, b):
    """The largest difference of two tensors of the same shape, relative to their largest value."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    scale = max(a.abs().max().item(), b.abs().max().item())
    difference = (a - b).abs().max().item()
    if math.isnan(difference):
        same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
        finite = a.isfinite() & b.isfinite()
        return relative(a[finite], b[finite]) if same else math.inf
    return difference / scale if scale else 0.0


def compare(name, a, b, limit, worlds, scale=0.0):
    """A Comparison. worlds: the numbers of ranks of the two runs. scale: the largest value of all
    tensors of this kind, next to which one may be nothing but rounding: the gradient of a bias
    before a BatchNorm is zero in exact arithmetic."""
    if a is None and b is None:
        return Comparison(name, 0.0, "")
    if a is None or b is None:
        present, absent = ("B", "A") if a is None else ("A", "B")
        value = b if a is None else a
        difference = 0.0 if not value.any() else math.inf
        how = "" if not difference else f"there is none in {absent}, but there is in {present}"
        return Comparison(name, difference, how)
    if a.shape != b.shape:
        return Comparison(name, math.inf, f"the shape is {[*a.shape]} in A, {[*b.shape]} in B")
    difference = relative(a, b)
    if difference <= limit:
        return Comparison(name, difference, "")
    largest = max(largest_of(a), largest_of(b), sys.float_info.min)
    if largest <= limit * NOISE * scale:
        return Comparison(name, largest / scale, "")
    return Comparison(name, difference, how_different(a.double(), b.double(), difference, worlds))


def largest_of(tensor):
    """The largest absolute value of a tensor; 0 if it has none, or not only finite ones."""
    value = tensor.abs().max().item() if tensor is not None and tensor.numel() else 0.0
    return value if math.isfinite(value) else 0.0


def how_different(a, b, difference, worlds):
    """What makes a out of b, in words."""
    factor = factor_of(a, b)
    if factor is not None and (a.numel() > 1 or _is_telling(factor, worlds)):
        return named(factor, worlds)
    if factor is not None:
        return f"{b.item():.6g} in B, {a.item():.6g} in A"
    if difference <= ROUNDED:
        return f"by {difference:.1e}: as if computed in float32 in one of the runs"
    if a.dim() and len(a) > 1:
        if relative(*(x.reshape(len(x), -1).sort(0).values for x in (a, b))) <= EQUAL:
            return "the same rows in a different order"
        rows = [relative(x, y) > EQUAL for x, y in zip(a, b, strict=True)]
        if 0 < sum(rows) <= len(rows) // 2 and len(rows) > 2:
            return f"{sum(rows)} of {len(rows)} rows differ, by {difference:.1e}"
    if difference <= HALF:
        return f"by {difference:.1e}: perhaps bfloat16 or float16 in one of the runs"
    return f"by {difference:.1e} of the largest value"


def order_of(a, b):
    """The order in which the rows of b equal a's, unless they are in it already; or None."""
    if (
        a is None
        or b is None
        or a.dim() < 2
        or a.shape != b.shape
        or len(a) > MOST_ROWS
        or torch.equal(a, b)
    ):
        return None
    rows = {tuple(row): number for number, row in enumerate(b.flatten(1).tolist())}
    if len(rows) < len(b):
        return None
    order = [rows.get(tuple(row)) for row in a.flatten(1).tolist()]
    return None if None in order else order


def _is_telling(factor, worlds):
    """Whether the factor of two numbers, which always have one, says something."""
    whole = max(abs(factor), abs(1 / factor)) if factor else 0.5
    return "ratio" in named(factor, worlds) or math.isclose(whole, round(whole), rel_tol=1e-9)


def factor_of(a, b):
    """The number k with b = k a, or None."""
    if not a.any():
        return None
    if not b.any():
        return 0.0
    k = (a * b).sum().item() / (a * a).sum().item()
    return k if relative(k * a, b) <= 1e-7 and abs(k - 1) > 1e-7 else None


def named(factor, worlds):
    """A factor, with what it may come from."""
    if factor == 0:
        return "zero in B"
    one, two = worlds
    reasons = {
        two / one: "the ratio of the numbers of ranks: a sum over ranks in place of a mean",
        one / two: "the inverse ratio of the numbers of ranks: divided once too often",
        -1: "the opposite sign",
        two**0.5 / one**0.5: "the square root of the ratio of the numbers of ranks",
    }
    text = f"B is {factor:.6g} times A"
    for number, reason in reasons.items():
        if abs(number - 1) > 1e-6 and math.isclose(factor, number, rel_tol=1e-6):
            return f"{text}: {reason}"
    return text


def common(comparisons):
    """What the comparisons that differ have in common, in words, or ""."""
    texts = {c.how for c in comparisons if c.how}
    return texts.pop() if len(texts) == 1 else ""
