"""Expert parallelism: together, the ranks' experts compute what one process computes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tasks.moe
from tests.forked import fork_script, killed_at, largest_difference
from tests.processes import run_ranks
from tests.recipes import TEXT, run_text_to_end, with_task
from tools.verify.run import project_with_task
from utils.rungs.experts import divide_experts

TOLERANCE = 1e-12
CLIPPED = {"clip_norm": 0.5}  # below the norm of most steps
# How many of a rank's tokens each of four experts gets: some get none, and rank 1 has no token.
COUNTS = [[5, 0, 0, 2], [0, 0, 0, 0], [0, 0, 3, 1], [1, 0, 0, 0]]


class Layer(nn.Module):
    """What the task of these tests divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = tasks.moe.Experts(4, 6).double()
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)


class Task:
    __name__ = "tests"

    def experts(self, model):
        return [model.experts]


def tokens_of(rank, counts):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(sum(counts), 6, dtype=torch.float64, generator=generator)
    return tokens.requires_grad_(), torch.tensor(counts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_experts_compute_what_whole_ones_do(ranks):
    """Outputs, and the gradients of the mean over the ranks of their losses, as of other layers."""

    def body(rank):
        whole = Layer()
        layer = copy.deepcopy(whole)
        parameters = divide_experts(Task(), layer, init_device_mesh("cpu", (ranks,)))
        assert parameters == set(layer.parameters())
        assert {len(p.to_local()) for p in parameters} == {4 // ranks}
        differences = []
        for number, counts in enumerate(COUNTS[:ranks]):
            tokens, counts = tokens_of(number, counts)
            expected = whole.experts(tokens, counts)
            (expected.square().sum() / ranks).backward()
            if number == rank:
                same, _ = tokens_of(rank, COUNTS[rank])
                outputs = layer.experts(same, counts)
                outputs.square().sum().backward()
                if len(same):
                    differences.append((outputs - expected).abs().max().item())
                    differences.append((same.grad - ranks * tokens.grad).abs().max().item())
        for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
            differences.append((ours.grad.full_tensor() - theirs.grad).abs().max().item())
        return max(differences)

    for difference in run_ranks(body, ranks):
        assert difference < TOLERANCE


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The path of a copy of a script, for the task of experts."""
    folder = project_with_task("images", tmp_path_factory.mktemp("project") / "copy")
    return lambda name: with_task(folder / name, "tasks.moe")


@pytest.fixture(scope="module")
def one(script, tmp_path_factory):
    """The last checkpoint of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return run_text_to_end(script("train_1gpu.py"), None, folder, **CLIPPED)[1]


def moments(checkpoint):
    """Of Adam, by name."""
    states = checkpoint["optimizer"]["state"].items()
    return {f"{name} {key}": state[key] for name, state in states for key in state}


def assert_same(ours, theirs):
    assert largest_difference(ours["model"], theirs["model"]) < TOLERANCE
    assert largest_difference(moments(ours), moments(theirs)) < TOLERANCE


def test_same_weights_on_several_ranks(script, one, tmp_path):
    run, end = run_text_to_end(script("train_ep.py"), 2, tmp_path / "run", **CLIPPED)
    assert run.stderr == "" and "ranks: 2, each with 2 of 4 experts" in run.stdout
    assert_same(end, one)


@pytest.mark.slow
def test_killed_run_is_resumed_by_any_script(script, one, tmp_path):
    folder, flags = tmp_path / "run", CLIPPED | {"save_steps": 2, "save_sharded": True}
    run_text_to_end(script("train_ep.py"), 4, folder, killed_at(0, 3), **flags)
    run, _ = run_text_to_end(script("train_ep.py"), 2, folder, killed_at(1, 3), **flags)
    assert "from epoch 0, step 2" in run.stdout
    run, end = run_text_to_end(script("train_1gpu.py"), None, folder, **CLIPPED)
    assert "from epoch 1, step 2" in run.stdout
    assert_same(end, one)


def choose_two():
    """For fork_script(before=...): no byte is given to the last two of four experts."""
    build_model = tasks.moe.build_model

    def build(cfg, train_set):
        model = build_model(cfg, train_set)
        for block in model.blocks:
            block.mixture.router.register_forward_hook(
                lambda module, inputs, outputs: outputs + torch.tensor([9.0, 9.0, 0.0, 0.0])
            )
        return model

    tasks.moe.build_model = build


@pytest.mark.slow
def test_rank_whose_experts_get_nothing_trains_the_same_weights(script, tmp_path):
    """Rank 1 of two has those that no byte is given to; their gradients are 0, not None."""
    one, two = tmp_path / "one", tmp_path / "two"
    _, expected = run_text_to_end(script("train_1gpu.py"), None, one, choose_two, **CLIPPED)
    _, found = run_text_to_end(script("train_ep.py"), 2, two, choose_two, **CLIPPED)
    assert_same(found, expected)
    assert not moments(expected)["blocks.0.mixture.experts.up exp_avg"][2:].any()


def test_what_cannot_be_divided_is_refused(script, tmp_path):
    ep = script("train_ep.py")

    def refused(nproc, script=ep, **flags):
        settings = TEXT | {"text_file": ""}
        run = fork_script(script, nproc, settings=settings, output_dir=tmp_path / "run", **flags)
        assert run.code == 1 and run.stderr.count("error") == 1
        return run.stderr

    line = refused(3)
    assert "4 experts" in line and "3 ranks" in line and "--experts" in line
    assert "tasks.moe" in refused(2, with_task(ep, "tasks.text"))
    assert "--fsdp-size" in refused(4, fsdp_size=2)
    assert "--fsdp-offload" in refused(2, fsdp_offload=True)
