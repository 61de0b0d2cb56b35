"""Pairs of scripts that agree in `make verify` are equal to `check diff`."""

import pytest

from check.diff.command import ENVIRONMENT
from check.processes import Processes
from lab.check_diff import pairs, row_of

AGREE = [pair for pair in pairs() if pair.group == "agree"]
# In CI; the others take an hour.
OFTEN = {"text: accum x3"}


@pytest.fixture(scope="module")
def processes():
    with Processes(ENVIRONMENT) as started:
        yield started


# The tool names parameters by a forward pass of the whole model, and these scripts make one only of
# a copy of it, before they divide it.
UNNAMED = pytest.mark.xfail(reason="parameters of parts of a model have no names", strict=True)


def marked(pair):
    marks = [pytest.mark.slow] if pair.name in OFTEN else [pytest.mark.slow, pytest.mark.rare]
    if pair.name in ("images: pp x2, interleaved", "text: cp x3"):
        marks.append(UNNAMED)
    return pytest.param(pair, id=pair.name, marks=marks)


@pytest.mark.parametrize("pair", [marked(pair) for pair in AGREE])
def test_pair_that_agrees_is_equal(pair, processes):
    row = row_of(pair, processes, {})
    assert row["verdict"] == "right" and row["compared"] > 100, row


def test_expectations_name_planted_bugs():
    names = {pair.name for pair in pairs()}
    assert len(AGREE) > 90 and {pair.name for pair in AGREE} >= OFTEN
    assert {"loss-divided-twice", "one-file-seed-per-rank"} <= names
