"""Pairs of scripts that agree in `make verify` are equal to `check diff`."""

import pytest

from check.diff.command import ENVIRONMENT
from check.processes import Processes
from lab.check_diff import pairs, row_of

AGREE = [pair for pair in pairs() if pair.group == "agree"]


@pytest.fixture(scope="module")
def processes():
    with Processes(ENVIRONMENT) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("pair", AGREE, ids=lambda pair: pair.name)
def test_pair_that_agrees_is_equal(pair, processes):
    row = row_of(pair, processes, {})
    assert row["verdict"] == "right" and row["compared"] > 100, row


def test_expectations_name_planted_bugs():
    names = {pair.name for pair in pairs()}
    assert len(AGREE) > 90 and {"loss-divided-twice", "one-file-seed-per-rank"} <= names
