"""What readers of streams guarantee is what docs/results/guarantees.md says."""

import json

import pytest

from lab.guarantees import READERS, RESULT, measure


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_published_answers_are_measured(name):
    if READERS[name].package:
        pytest.importorskip(READERS[name].package)
    published = json.loads(RESULT.read_text())
    assert measure([name])[name] == published["readers"][name], published["versions"]
