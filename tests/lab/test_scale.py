"""lab.scale: thousands of ranks in a fake process group."""

from concurrent.futures import ProcessPoolExecutor

import pytest

from lab import scale
from tests.forked import FORK
from tools.lib.ladder import ROOT


def run_one_rank(*arguments, **flags):
    """scale.run_one_rank(), which changes its process for good, in a fork of this one."""
    with ProcessPoolExecutor(1, FORK) as pool:
        return pool.submit(scale.run_one_rank, *arguments, **flags).result()


@pytest.mark.parametrize("world_size", [1, 3, 8, 64, 1024])
def test_ranks_partition_every_global_batch(world_size):
    assert scale.check_partition(world_size) >= 0


def test_shared_samples_are_noticed(monkeypatch):
    real = scale.DistributedSampler
    monkeypatch.setattr(
        scale, "DistributedSampler", lambda data, n, rank, **kw: real(data, n, rank // 2, **kw)
    )
    with pytest.raises(AssertionError, match="shared or missing"):
        scale.check_partition(8)


@pytest.mark.slow
def test_steps_gather_no_objects_and_the_page_lists_those_who_do():
    """A gather's cost grows with the number of ranks, so it must not be part of a step."""
    counts = []
    for steps in (scale.STEPS, 2 * scale.STEPS):
        samples = {"synthetic_samples": 64 * steps, "save_steps": 0}
        gathers = run_one_rank(64, **samples)["gathers"]
        counts.append({site: call["count"] for site, call in gathers.items()})
    assert counts[0] == counts[1]
    page = (ROOT / "docs" / "scale.md").read_text()
    assert not [site for site in counts[0] if f"`{site}`" not in page]
    results = {64: run_one_rank(64)}
    assert "| 64 | " in "\n".join(scale.tables(results, {64: 0.001}))
