"""Batches of any shape: collated, moved, and divided into inputs and targets."""

from collections import OrderedDict, UserDict
from typing import NamedTuple

import numpy
import pytest
import torch
from PIL import Image
from torch.distributions import Normal
from torch.utils.data import default_collate

from utils.batches import as_pair, collate, dtype_for, map_tensors, on_device_of, tensors_of
from utils.errors import UserError


class Point(NamedTuple):
    x: torch.Tensor
    name: str


def plain(batch):
    """With lists in place of tensors, which compare element by element."""
    return map_tensors(lambda tensor: (tensor.dtype, tensor.tolist()), batch)


@pytest.mark.parametrize(
    "samples",
    [
        [{"ids": torch.arange(3), "label": 1}, {"ids": torch.arange(3) + 1, "label": 0}],
        [Point(torch.zeros(1), "a"), Point(torch.ones(1), "b")],
    ],
    ids=["dicts", "named tuples"],
)
def test_batches_are_those_of_pytorch(samples):
    ours, theirs = collate(samples), default_collate(samples)
    assert plain(ours) == plain(theirs) and type(ours) is type(theirs)


def test_batch_of_tuples_is_a_tuple():
    images, labels, names = collate([(torch.zeros(2), 0.5, "a"), (torch.ones(2), 1.5, "b")])
    assert (images.shape, labels.tolist(), names) == ((2, 2), [0.5, 1.5], ("a", "b"))
    assert type(collate([(1, numpy.int32(3)), (2, numpy.int32(4))])) is tuple


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([(Image.new("RGB", (4, 4)), 1)] * 2, "Image"),
        ([torch.zeros(3), torch.zeros(4)], "equal size"),
        ([{"a": 1, "b": 2}, {"a": 1}], "b"),
    ],
    ids=["image", "shapes", "keys"],
)
def test_what_cannot_be_combined_names_the_remedy(samples, found):
    with pytest.raises(UserError, match="collate_fn") as caught:
        collate(samples)
    assert found in str(caught.value) and "\n" not in str(caught.value)


NESTED = {
    "a": (torch.tensor([1]), [torch.tensor([2.0]), "text"]),
    "b": Point(torch.tensor([3]), "name"),
    "c": {"d": None, "e": 5, "f": torch.tensor([6.0])},
}


def test_tensors_are_mapped_and_other_values_stay():
    assert map_tensors(lambda tensor: 10 * tensor.item(), NESTED) == {
        "a": (10, [20.0, "text"]),
        "b": Point(30, "name"),
        "c": {"d": None, "e": 5, "f": 60.0},
    }
    assert type(map_tensors(torch.clone, NESTED)["b"]) is Point
    assert map_tensors(torch.sum, UserDict(x=torch.ones(2))) == {"x": 2.0}
    assert [tensor.item() for tensor in tensors_of(NESTED)] == [1, 2.0, 3, 6.0]


def test_integers_stay_and_complex_numbers_stay_complex():
    assert dtype_for(torch.zeros(1, dtype=torch.half), torch.float32) == torch.float32
    assert dtype_for(torch.zeros(1, dtype=torch.complex64), torch.float64) == torch.complex128
    for kept in (torch.int64, torch.uint8, torch.bool):
        assert dtype_for(torch.zeros(1, dtype=kept), torch.float64) == kept


def test_targets_follow_the_outputs_to_their_device():
    targets, logits = {"label": torch.tensor([1]), "name": ["a"]}, torch.zeros(1, device="meta")
    for outputs in (logits, (None, [logits]), OrderedDict(logits=logits, loss=None)):
        moved = on_device_of(outputs, targets)
        assert moved["label"].device.type == "meta" and moved["name"] == ["a"]
    for outputs in (torch.zeros(1), Normal(torch.zeros(1), 1.0)):
        assert on_device_of(outputs, targets)["label"] is targets["label"]


def test_two_values_are_a_pair_and_all_else_is_both():
    x, y, z = torch.zeros(3, 1).unbind()
    assert as_pair((x, y)) == as_pair([x, y]) == (x, y)
    for batch in ((x, y, z), [x, y, z], {"a": x, "b": y}, torch.zeros(2, 3), (x,)):
        inputs, targets = as_pair(batch)
        assert inputs is targets is batch
