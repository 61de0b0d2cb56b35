"""docs/recipes: each page applies to the scripts as they are, and does what it promises."""

import itertools
import re
from functools import partial

import pytest
import torch
from torch import nn

from tasks.images.inference import load_trained
from tests import experts_task
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import PAGES, RUN, applied, run_to_end, with_task
from tools.lib import recipes
from tools.lib.ladder import ROOT, RUNGS
from tools.lib.runs import load_script
from tools.verify.run import project_with_task
from utils.checkpoint import Checkpointer

EXPERTS = "tests.experts_task"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_is_a_patch_for_git_of_at_most_40_lines_per_file(page, tmp_path):
    """git ignores what is around the diffs."""
    applied(page.stem, tmp_path / "copy")
    diffs = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    assert diffs
    for diff in diffs:
        assert sum(line[0] in "+-" for line in diff.splitlines()[2:]) <= 40


def test_recipes_apply_together_except_for_the_pairs_that_are_listed():
    def apply(name, changed):
        """The texts of the files that a recipe changes, which another has changed before."""

        def read(path):
            file = ROOT / path
            return changed.get(path) or (file.read_text() if file.exists() else None)

        scripts = [diff.path for diff in recipes.diffs_of(name) if diff.path in RUNGS]
        return recipes.apply(name, scripts, read)

    index = (ROOT / "docs" / "recipes" / "README.md").read_text()
    listed = {frozenset(pair) for pair in re.findall(r"^\| \[(.*?)\].* \| \[(.*?)\]", index, re.M)}
    refused = set()
    for first, second in itertools.permutations(recipes.NAMES, 2):
        try:
            apply(second, apply(first, {}))
        except recipes.CannotApply:
            refused.add(frozenset((first, second)))
    assert refused == listed
    assert len(listed) == 8


def saved_at_the_end():
    """For fork_script(before=...): a save between epochs would gather and free all parameters."""
    real = Checkpointer.save

    def save(checkpoint, epoch, **options):
        if epoch == checkpoint.cfg.epochs:
            real(checkpoint, epoch, **options)
        for loader in checkpoint.loaders:
            loader.end_epoch()

    Checkpointer.save = save


def averages(checkpoint):
    return {name: s["average"] for name, s in checkpoint["optimizer"]["state"].items()}


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(
    "flags",
    [{"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}, {"optimizer": "adamw"}],
    ids=str,
)
def test_exponential_moving_average(flags, tmp_path):
    train = partial(run_to_end, lr=0.01, **flags)
    folder = applied("ema", tmp_path / "copy")
    ddp, fsdp = folder / "train_ddp.py", folder / "train_fsdp.py"
    plain, plain_end = train("train_ddp.py", 1, tmp_path / "plain")
    one, end = train(ddp, 1, tmp_path / "one")
    assert largest_difference(end["model"], plain_end["model"]) == 0  # the training is the same
    trained = {name: end["model"][name] for name in averages(end)}
    assert largest_difference(averages(end), trained) > 1e-4
    used = load_trained(one.output_dir / "last.pt").model.state_dict()  # by predict and export
    for name, average in averages(end).items():
        assert torch.equal(used[name], average)
    losses = [row["val_loss"] for row in one.rows]
    assert losses[-1] != plain.rows[-1]["val_loss"]

    train(ddp, 2, tmp_path / "killed", killed_at(1, 3), save_steps=2)
    resumed = train(fsdp, 2, tmp_path / "killed")
    whole = train(fsdp, 2, tmp_path / "fsdp", saved_at_the_end)
    for run, checkpoint in (resumed, whole):
        assert largest_difference(checkpoint["model"], end["model"]) < ROUNDING
        assert largest_difference(averages(checkpoint), averages(end)) < ROUNDING
        assert [row["val_loss"] for row in run.rows] == pytest.approx(losses, rel=ROUNDING)


def test_averages_of_parameters_without_gradients(tmp_path):
    """Adam takes any state of a parameter for its own."""
    recipe = load_script(applied("ema", tmp_path / "copy") / "train_ddp.py")
    used, unused = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW([*used.parameters(), *unused.parameters()])
    optimizer.register_step_post_hook(recipe.update_averages)
    for layers, averaged in (([used], 2), ([used, unused], 4), ([used], 4)):
        optimizer.zero_grad()
        sum(layer(torch.ones(1, 1)).sum() for layer in layers).backward()
        optimizer.step()
        assert len(recipe.averages_of(optimizer)) == averaged


def test_skipped_step_moves_no_average(tmp_path):
    """A fused optimizer is told to skip by found_inf."""
    recipe = load_script(applied("ema", tmp_path / "copy") / "train_ddp.py")
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=True)
    optimizer.register_step_post_hook(recipe.update_averages)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    before = recipe.averages_of(optimizer)[layer.weight].clone()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()
    assert torch.equal(recipe.averages_of(optimizer)[layer.weight], before)

    del optimizer.found_inf, optimizer.grad_scale
    optimizer.zero_grad()  # others have no gradients then
    optimizer.step()
    assert torch.equal(recipe.averages_of(optimizer)[layer.weight], before)


@pytest.mark.slow
def test_unused_parameters(tmp_path):
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    chosen = experts_task.chosen(experts_task.Points(60, 0).points)[order]
    ranks = (chosen.view(5, 6, 2).sum(1) > 0).sum(1)  # that use the second expert, in each step
    assert set(ranks.tolist()) == {0, 1, 2}
    plain = project_with_task("images", tmp_path / "plain")
    script = with_task(plain / "train_1gpu.py", EXPERTS)
    _, one = run_to_end(script, None, tmp_path / "one")
    copy = applied("unused-parameters", tmp_path / "copy")
    script = with_task(copy / "train_ddp.py", EXPERTS)
    run_to_end(script, 2, tmp_path / "two", killed_at(1, 3), save_steps=2)
    _, two = run_to_end(script, 2, tmp_path / "two")
    assert largest_difference(two["model"], one["model"]) < ROUNDING


@pytest.mark.slow
def test_fsdp_refuses_parameters_that_only_some_ranks_use(tmp_path):
    """With a sample per rank, each uses one of two experts of the same size: PyTorch does not
    notice that they differ."""
    script = with_task(project_with_task("images", tmp_path / "copy") / "train_fsdp.py", EXPERTS)
    flags = RUN | {"global_batch_size": 2, "output_dir": tmp_path / "run"}
    run = fork_script(script, 2, **flags)
    assert run.code == 1 and "experts.0.weight" in run.stderr
    assert run.rows == [] and not (tmp_path / "run" / "last.pt").exists()


def counting(log):
    """For fork_script(before=...): write the sizes of all tensors that autograd saves to a file."""

    def before():
        file = log.open("w", buffering=1)

        def pack(tensor):
            print(tensor.nbytes, file=file)
            return tensor

        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor).__enter__()

    return before


def saved_bytes(log):
    return sum(map(int, log.read_text().split()))


def compile_without_inductor():
    """For fork_script(before=...): all that torch.compile does, but for generating code."""
    compile_module = nn.Module.compile
    nn.Module.compile = lambda module, mode: compile_module(module, backend="aot_eager")


@pytest.fixture(scope="module")
def checkpointing(tmp_path_factory):
    """A copy with the page, and the weights without it."""
    folder = tmp_path_factory.mktemp("checkpointing")
    log = folder / "saved.log"
    _, end = run_to_end("train_ddp.py", 1, folder / "run", counting(log), model="vit_tiny")
    return applied("activation-checkpointing", folder / "copy"), end["model"], saved_bytes(log)


@pytest.mark.slow
def test_activation_checkpointing(checkpointing, tmp_path):
    copy, weights, saved = checkpointing
    train = partial(run_to_end, model="vit_tiny")
    log = tmp_path / "saved.log"
    _, one = train(copy / "train_ddp.py", 1, tmp_path / "one", counting(log))
    assert largest_difference(one["model"], weights) == 0
    assert saved_bytes(log) < saved / 5
    train(copy / "train_ddp.py", 2, tmp_path / "two", killed_at(1, 3), save_steps=2)
    _, two = train(copy / "train_fsdp.py", 2, tmp_path / "two")
    assert largest_difference(two["model"], weights) < ROUNDING


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_activation_checkpointing_of_a_compiled_model(script, checkpointing, tmp_path):
    copy, weights, _ = checkpointing
    flags = {"model": "vit_tiny", "compile": "default", "timeout": 600}
    _, end = run_to_end(copy / script, 2, tmp_path / "run", compile_without_inductor, **flags)
    assert largest_difference(end["model"], weights) < ROUNDING
