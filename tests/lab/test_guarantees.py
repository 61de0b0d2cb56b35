"""What readers of streams guarantee is what lab/results/guarantees.md says."""

import json

import pytest

from lab import mixtures
from lab.guarantees import READERS, RESULT, measure


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", READERS)
def test_published_answers_are_measured(name):
    if READERS[name].package:
        pytest.importorskip(READERS[name].package)
    published = json.loads(RESULT.read_text())
    assert measure([name])[name] == published["readers"][name], published["versions"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", mixtures.READERS)
def test_published_answers_about_mixtures_are_measured(name):
    reader = mixtures.READERS[name]
    if reader is mixtures.OfTables:
        pytest.importorskip("torchdata")
    if not mixtures.is_installed(reader):
        pytest.skip(f"{reader.package} is not installed")
    published = json.loads(mixtures.RESULT.read_text())
    assert mixtures.measure([name])[name] == published["readers"][name], published["versions"]
