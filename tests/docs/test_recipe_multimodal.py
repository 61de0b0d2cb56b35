"""docs/recipes/multimodal.md: the ranks of a step have images, or some of them, or none."""

import sys
from functools import partial

import pytest
import torch

from tests.forked import killed_at, largest_difference
from tests.recipes import applied, apply, import_new, run_to_end, with_task

TOWERS = "tests.towers_task"
FLAGS = {"optimizer": "adamw", "weight_decay": 0.1, "global_batch_size": 6, "lr": 0.01}
FLAGS |= {"save_steps": 2}
train = partial(run_to_end, **FLAGS)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A function that returns the path of a script that trains the towers."""
    folder = applied("multimodal", tmp_path / "copy")
    assert not apply("unused-parameters", folder)
    import_new("utils.optional_tower", folder, monkeypatch)
    monkeypatch.delitem(sys.modules, TOWERS, raising=False)  # it may have that of another test
    return lambda name: with_task(folder / name, TOWERS)


def tensors(checkpoint):
    """Of the model, and of the optimizer's state."""
    states = checkpoint["optimizer"]["state"]
    state = {(name, key): value for name, s in states.items() for key, value in s.items()}
    return checkpoint["model"] | state


@pytest.mark.slow
def test_ranks_that_have_images_by_turns(scripts, tmp_path):
    order = [torch.randperm(60, generator=torch.Generator().manual_seed(e)) for e in range(2)]
    uses = (torch.stack(order).view(20, 3, 2) % 9 == 0).any(1).sum(1)
    assert set(uses.tolist()) == {0, 1, 2}  # of two ranks, so many have images
    one = tensors(train(scripts("train_1gpu.py"), None, tmp_path / "one")[1])
    for script in ("train_ddp.py", "train_fsdp.py"):
        folder = tmp_path / script
        train(scripts(script), 2, folder, killed_at(1, 5))
        ours = tensors(train(scripts(script), 3, folder)[1])
        assert largest_difference(ours, one) < 1e-12  # measured: 2e-16


@pytest.mark.slow
@pytest.mark.rare
def test_dummy_image_trains_another_model(scripts, tmp_path, monkeypatch):
    """Or no rows, in steps in which no rank has an image: gradients of zero, in place of none."""
    script = scripts("train_1gpu.py")
    one = train(script, None, tmp_path / "one")[1]
    module = sys.modules["utils.optional_tower"]
    monkeypatch.setattr(module, "all_reduce", lambda tensor: tensor.fill_(1))
    other = train(script, None, tmp_path / "dummy")[1]
    assert largest_difference(other["model"], one["model"]) > 1e-5
