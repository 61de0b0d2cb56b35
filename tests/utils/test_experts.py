"""Expert parallelism: together, the ranks' experts compute what one process computes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tasks.moe
from tests.forked import fork_script, largest_difference
from tests.processes import run_ranks
from tests.recipes import TEXT, run_text_to_end, with_task
from tools.verify.run import project_with_task
from utils.rungs.experts import divide_experts

TOLERANCE = 1e-12
CLIPPED = {"clip_norm": 0.5}  # below the norm of most steps
# How many of a rank's tokens each of four experts gets. Rank 1 has no token, or no token comes to
# its experts, the last two.
COUNTS = [[[5, 0, 0, 2], [0, 0, 0, 0]], [[3, 4, 0, 0], [0, 1, 0, 0]]]


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
    return tokens.requires_grad_()


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("counts", COUNTS, ids=["no token", "no expert"])
def test_divided_experts_compute_what_whole_ones_do(counts):
    """Outputs, and the gradients of the mean over the ranks of their losses, as of other layers."""

    def body(rank):
        whole, layer = Layer(), Layer()
        parameters = divide_experts(Task(), layer, init_device_mesh("cpu", (2,)))
        assert parameters == set(layer.parameters())
        assert {len(parameter.to_local()) for parameter in parameters} == {2}
        own = tokens_of(rank, counts[rank])
        outputs = layer.experts(own, torch.tensor(counts[rank]))
        outputs.square().sum().backward()
        for number in range(2):
            tokens = tokens_of(number, counts[number])
            expected = whole.experts(tokens, torch.tensor(counts[number]))
            (expected.square().sum() / 2).backward()
            if number == rank:
                assert_close(outputs, expected)
                assert_close(own.grad, 2 * tokens.grad)
        for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
            assert_close(ours.grad.full_tensor(), theirs.grad)

    assert run_ranks(body, 2) == [None, None]


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
