"""Expert parallelism: together, the ranks' experts compute what one process computes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_divided_experts_compute_what_whole_ones_do(ranks):
    """Outputs, and the gradients of the mean over the ranks of their losses, as of other layers."""

    def body(rank):
        whole = Layer()
        layer = copy.deepcopy(whole)
        mesh = init_device_mesh("cpu", (ranks,))
        parameters = divide_experts(Task(), layer, mesh)
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
        gradients, others = (
            {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in named}
            for named in (layer.named_parameters(), whole.named_parameters())
        )
        return max([largest_difference(gradients, others), *differences])

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


def assert_same(ours, theirs):
    """Weights and Adam's moments."""
    assert largest_difference(ours["model"], theirs["model"]) < TOLERANCE
    states, others = (
        {
            (name, key): value
            for name, state in c["optimizer"]["state"].items()
            for key, value in state.items()
        }
        for c in (ours, theirs)
    )
    assert largest_difference(states, others) < TOLERANCE


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_same_weights_on_any_number_of_ranks(nproc, script, one, tmp_path):
    run, end = run_text_to_end(script("train_ep.py"), nproc, tmp_path / "run", **CLIPPED)
    assert run.stderr == "" and f"ranks: {nproc}, each with {4 // nproc} of 4 experts" in run.stdout
    assert_same(end, one)


@pytest.mark.parametrize(
    ("nproc", "name", "ranks", "flags"),
    [
        pytest.param(2, "train_ep.py", 4, {}, marks=pytest.mark.slow),
        (4, "train_ep.py", 2, {"save_sharded": True}),
        (4, "train_1gpu.py", None, {"save_sharded": True}),
        pytest.param(2, "train_ddp.py", 3, {}, marks=pytest.mark.slow),
        pytest.param(4, "train_fsdp.py", 3, {"save_sharded": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_run_is_resumed_by_any_script(nproc, name, ranks, flags, script, one, tmp_path):
    flags = flags | CLIPPED | {"save_steps": 2}
    run_text_to_end(script("train_ep.py"), nproc, tmp_path / "run", killed_at(1, 3), **flags)
    run, end = run_text_to_end(script(name), ranks, tmp_path / "run", **CLIPPED)
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


def test_rank_whose_experts_get_nothing_trains_the_same_weights(script, tmp_path):
    """Rank 1 of two has those that no byte is given to; their gradients are 0, not None."""
    ends = [
        run_text_to_end(script(name), nproc, tmp_path / name, choose_two, **CLIPPED)[1]
        for name, nproc in (("train_1gpu.py", None), ("train_ep.py", 2))
    ]
    assert_same(*ends)
    assert not ends[0]["optimizer"]["state"]["blocks.0.mixture.experts.up"]["exp_avg"][2:].any()


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
