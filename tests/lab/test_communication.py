"""What the scripts hand to collectives in a step is what the formulas say."""

import json

import pytest

from lab.communication import RESULT, ROWS, formula, measure, table

TWO = [row for row in ROWS if row[2] == 2]


def test_published_bytes_are_those_of_the_formulas():
    """On two and on four ranks."""
    result = json.loads(RESULT.read_text())
    assert [(row["task"], row["script"], row["ranks"]) for row in result["rows"]] == ROWS
    for row in result["rows"]:
        assert row["bytes"] == formula(row["task"], row["script"], row["ranks"])
    assert table(result).count("the same") == len(ROWS)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(("task", "script", "ranks"), TWO)
def test_bytes_of_a_step_are_those_of_the_formula(task, script, ranks, tmp_path):
    assert measure(task, script, ranks, tmp_path) == formula(task, script, ranks)
