"""Batches of any shape: collated, moved, and described."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
import pytest
import torch
from PIL import Image
from torch.distributions import Normal
from torch.utils.data import default_collate

from utils.batches import as_pair, collate, describe, map_tensors, on_device_of, tensors_of
from utils.errors import UserError


class Point(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass(frozen=True)
class Sample:
    """Refuses what is no pixels, as users' classes may."""

    pixels: torch.Tensor
    label: int
    extra: dict

    def __post_init__(self):
        assert self.pixels.dtype == torch.uint8


@dataclass
class Outputs(OrderedDict):
    """As Hugging Face's ModelOutput: a dataclass that is a dict as well."""

    logits: torch.Tensor = None
    hidden: tuple | None = None


def sample(i):
    extra = {"weight": float(i), "boxes": [torch.tensor([i, 1])]}
    return Sample(torch.full((2, 3), i, dtype=torch.uint8), i, extra)


def assert_equal(ours, theirs):
    """The same values, types and dtypes, at any depth. PyTorch makes lists of tuples."""
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return
    if type(theirs) not in (list, tuple):
        assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, tuple | list):
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other)
    else:
        assert ours == theirs


# collate()


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(3), torch.ones(3)],
        [(torch.zeros(2, 2), 1), (torch.ones(2, 2), 4)],
        [(torch.zeros(2), 0.5, "a"), (torch.ones(2), 1.5, "b")],
        [{"ids": torch.arange(3), "label": 1}, {"ids": torch.arange(3) + 1, "label": 0}],
        [({"a": (1, {"b": 2.0})}, True), ({"a": (3, {"b": 4.0})}, False)],
        [(numpy.ones(2, "float32"), numpy.int32(3)), (numpy.zeros(2, "float32"), numpy.int32(4))],
        [Point(torch.zeros(1), "a"), Point(torch.ones(1), "b")],
        [5, 6],
    ],
    ids=describe,
)
def test_batches_are_those_of_pytorch(samples):
    assert_equal(collate(samples), default_collate(samples))


def test_dataclasses_are_batches_too():
    batch = collate([sample(1), sample(2)])
    assert type(batch) is Sample
    assert batch.pixels.tolist() == [[[1] * 3] * 2, [[2] * 3] * 2]
    assert batch.label.tolist() == [1, 2] and batch.extra["weight"].tolist() == [1.0, 2.0]
    assert batch.extra["boxes"][0].tolist() == [[1, 1], [2, 1]]
    pair = collate([(sample(1), 3), (sample(2), 4)])
    assert type(pair[0]) is Sample and pair[1].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("samples", "found", "reason"),
    [
        ([(Image.new("RGB", (4, 4)), 1)] * 2, "(Image, int)", "found <class 'PIL.Image.Image'>"),
        ([(torch.zeros(3), None)] * 2, "(float32 (3,), NoneType)", "found <class 'NoneType'>"),
        ([torch.zeros(3), torch.zeros(4)], "float32 (3,)", "equal size"),
        (
            [{"ids": [1, 2], "label": 0}, {"ids": [1, 2, 3], "label": 0}],
            "{'ids': [int, int], 'label': int}",
            "longer than",
        ),
        ([{"a": 1, "b": 2}, {"a": 1}], "{'a': int, 'b': int}", "'b'"),
        ([(1, 2), (1, 2, 3)], "(int, int)", "longer than"),
        ([sample(1), Sample(torch.zeros(1, dtype=torch.uint8), 2, {})], "Sample", "equal size"),
        ([1, "a"], "int", ""),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_combined_is_refused_in_one_line(samples, found, reason):
    with pytest.raises(UserError) as caught:
        collate(samples)
    text = str(caught.value)
    assert text.startswith(f"samples such as {found} ")
    assert text.endswith(" collate_fn(samples)")
    assert reason in text and "\n" not in text and len(text) < 500


# map_tensors() and what uses it


NESTED = {
    "a": (torch.tensor([1]), [torch.tensor([2.0]), "text"]),
    "b": Point(torch.tensor([3]), "name"),
    "c": {"d": None, "e": 5, "f": torch.tensor([6.0])},
}


def test_tensors_are_mapped_and_other_values_stay():
    result = map_tensors(lambda tensor: tensor * 10, NESTED)
    expected = {
        "a": (torch.tensor([10]), [torch.tensor([20.0]), "text"]),
        "b": Point(torch.tensor([30]), "name"),
        "c": {"d": None, "e": 5, "f": torch.tensor([60.0])},
    }
    assert_equal(result, expected)
    assert type(result["a"]) is tuple and type(result["a"][1]) is list
    assert NESTED["a"][0].tolist() == [1]
    moved = map_tensors(lambda tensor: tensor + 1, collate([sample(1), sample(2)]))
    assert type(moved) is Sample and moved.pixels[:, 0, 0].tolist() == [2, 3]
    assert moved.extra["weight"].tolist() == [2.0, 3.0]
    mapping = map_tensors(lambda tensor: tensor + 1, UserDict(x=torch.tensor([1])))
    assert_equal(mapping, {"x": torch.tensor([2])})


def test_tensors_are_found_at_any_depth():
    assert [tensor.item() for tensor in tensors_of(NESTED)] == [1, 2.0, 3, 6.0]
    assert len(tensors_of(collate([sample(1), sample(2)]))) == 4  # its class looks at its fields
    assert tensors_of([1, "a", {}]) == []


@dataclass(frozen=True)
class Scaled:
    """Computes in __post_init__(), which must not run again."""

    pixels: torch.Tensor
    label: int
    area: torch.Tensor = field(init=False)
    unset: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "pixels", self.pixels / 255)
        object.__setattr__(self, "area", self.pixels.sum())


def test_dataclasses_are_initialized_once():
    samples = [Scaled(torch.full((2,), 255.0 * i), i) for i in (1, 2)]
    for batch in (collate(samples), map_tensors(torch.clone, collate(samples))):
        assert type(batch) is Scaled
        assert batch.pixels.tolist() == [[1, 1], [2, 2]] and batch.area.tolist() == [2, 4]
        assert batch.label.tolist() == [1, 2] and not hasattr(batch, "unset")
    assert samples[0].label == 1 and samples[0].pixels.tolist() == [1, 1]


def test_targets_follow_the_outputs_to_their_device():
    targets = {"label": torch.tensor([1]), "name": ["a"]}
    for outputs in (
        torch.zeros(1, device="meta"),
        {"logits": torch.zeros(1, device="meta"), "loss": None},
        (None, [torch.zeros(1, device="meta")]),
        Outputs(logits=torch.zeros(1, device="meta")),
    ):
        moved = on_device_of(outputs, targets)
        assert moved["label"].device.type == "meta" and moved["name"] == ["a"]
    for outputs in (torch.zeros(1), Normal(torch.zeros(1), 1.0)):  # without tensors that are seen
        assert on_device_of(outputs, targets)["label"] is targets["label"]


def test_two_values_are_a_pair_and_all_else_is_both():
    x, y, z = torch.zeros(3, 1).unbind()
    assert as_pair((x, y)) == (x, y)
    assert as_pair([x, y]) == (x, y)
    for batch in ((x, y, z), [x, y, z], {"a": x, "b": y}, sample(1), torch.zeros(2, 3), (x,)):
        inputs, targets = as_pair(batch)
        assert inputs is targets is batch


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((torch.zeros(3, 4, dtype=torch.uint8), 5), "(uint8 (3, 4), int)"),
        ({"ids": [1, 2], "x": torch.tensor(1.0)}, "{'ids': [int, int], 'x': float32 ()}"),
        (list(range(99)), "[int, int, int, int, ...]"),
        ((Image.new("RGB", (2, 2)), None), "(Image, NoneType)"),
        (sample(1), "Sample"),
        (numpy.zeros(3), "ndarray"),
    ],
    ids=lambda value: None,
)
def test_description(value, text):
    assert describe(value) == text
