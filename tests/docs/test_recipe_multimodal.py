"""docs/recipes/multimodal.md: the ranks of a step have images, or some of them, or none."""

import sys
from functools import partial

import pytest
import torch

from tests.forked import killed_at, largest_difference
from tests.recipes import applied, apply, import_new, run_to_end, with_task

TOWERS = "tests.towers_task"


def state_of(checkpoint):
    """The optimizer's tensors, by name."""
    states = checkpoint["optimizer"]["state"]
    return {f"{name} {key}": value for name, s in states.items() for key, value in s.items()}


@pytest.mark.slow
def test_ranks_that_have_images_by_turns(monkeypatch, tmp_path):
    order = [torch.randperm(60, generator=torch.Generator().manual_seed(e)) for e in range(2)]
    uses = (torch.stack(order).view(20, 3, 2) % 9 == 0).any(1).sum(1)
    assert set(uses.tolist()) == {0, 1, 2}  # of two ranks, so many have images

    folder = applied("multimodal", tmp_path / "copy")
    assert not apply("unused-parameters", folder)
    import_new("utils.optional_tower", folder, monkeypatch)
    monkeypatch.delitem(sys.modules, TOWERS, raising=False)  # it may have that of another test
    flags = {"optimizer": "adamw", "weight_decay": 0.1, "global_batch_size": 6, "lr": 0.01}
    train = partial(run_to_end, save_steps=2, **flags)
    _, one = train(with_task(folder / "train_1gpu.py", TOWERS), None, tmp_path / "one")
    for name in ("train_ddp.py", "train_fsdp.py"):
        script = with_task(folder / name, TOWERS)
        train(script, 2, tmp_path / name, killed_at(1, 5))
        _, end = train(script, 3, tmp_path / name)
        assert largest_difference(end["model"], one["model"]) < 1e-12  # measured: 2e-16
        assert largest_difference(state_of(end), state_of(one)) < 1e-12
