"""FSDP2: what is sharded, in which precision, and checkpoints that other scripts read."""

import atexit
import os
import runpy
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.resnet import BasicBlock

import tasks.images
from tasks.images.parts import blocks_of
from tasks.images.small_models import ResNet20
from tasks.images.weights import freeze_backbone
from tests.forked import assert_resumes, fork_script, same_bits
from tests.processes import ROOT, free_port, run_ranks, run_script
from tests.utils.test_checkpoint import checkpointer, in_fork, outcome, pair, save
from utils.checkpoint import read_checkpoint
from utils.config import Config, ConfigError
from utils.errors import UserError
from utils.optim import build_optimizer, build_scheduler
from utils.rungs.fsdp import (
    CompareShards,
    FsdpSettings,
    check_same_weights,
    exit_process,
    fsdp_kwargs,
    shard_batchnorms,
)
from utils.sync_batchnorm import convert_sync_batchnorm


@dataclass(frozen=True)
class FsdpConfig(FsdpSettings, Config):
    """What load_config() makes of both."""


PLAIN = FsdpConfig(epochs=9, warmup_epochs=0, device="cpu")


def test_ranks_with_other_weights_are_refused():
    """FSDP would shard each rank's own weights into one model; DDP broadcasts rank 0's."""

    def body(rank):
        torch.manual_seed(5)
        check_same_weights(nn.Linear(2, 3))
        torch.manual_seed(rank)
        with pytest.raises(UserError, match=r"set_seed\(cfg.seed\)"):
            check_same_weights(nn.Linear(2, 3))

    assert run_ranks(body, 2) == [None, None]


def test_settings_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="--fsdp-size 3"):
        FsdpConfig(fsdp_size=3).resolved()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    FsdpConfig(fsdp_offload=True, clip_norm=1.0, device="cpu").resolved()
    with pytest.raises(ConfigError, match="--clip-norm 0"):
        FsdpConfig(fsdp_offload=True, clip_norm=1.0).resolved()


# What is sharded


def shard(model, cfg):
    """As train_fsdp.py does."""
    shard_batchnorms(model, cfg)
    for block in blocks_of(model):
        fully_shard(block, **fsdp_kwargs(cfg))
    return fully_shard(model, **fsdp_kwargs(cfg, root=True))


def computed_dtypes(model):
    """The dtypes of the weights of a model's convolutions and BatchNorms, and of its outputs."""
    dtypes = {"conv": set(), "norm": set()}
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda m, _: dtypes["conv"].add(m.weight.dtype))
        elif hasattr(module, "running_var"):
            module.register_forward_pre_hook(lambda m, _: dtypes["norm"].add(m.weight.dtype))
    dtypes["output"] = {model(torch.randn(4, 3, 8, 8)).dtype}
    return dtypes


def test_batchnorms_stay_in_float32():
    def body(rank):
        dtypes = []
        for model in (convert_sync_batchnorm(ResNet20(10)), freeze_backbone(ResNet20(10))):
            shard(model, FsdpConfig(fsdp_dtype="bfloat16", device="cpu"))
            assert all(p.dtype is torch.float32 for p in model.parameters())
            local = sum(p.to_local().numel() for p in model.parameters())
            assert local < 0.6 * sum(p.numel() for p in model.parameters())
            dtypes.append(computed_dtypes(model))
        return dtypes

    half, single = {torch.bfloat16}, {torch.float32}
    expected = {"conv": half, "norm": single, "output": single}
    assert run_ranks(body, 2) == [[expected, expected]] * 2


def test_gradients_are_summed_in_float32():
    """1 + 1/256 needs one bit more than bfloat16 has."""

    def body(rank):
        model = shard(nn.Linear(1, 1, bias=False), FsdpConfig(fsdp_dtype="bfloat16"))
        model(torch.tensor([[(1.0, 1 / 256)[rank]]])).sum().backward()
        return model.weight.grad.full_tensor().item()

    assert run_ranks(body, 2) == [(1 + 1 / 256) / 2] * 2


def test_batchnorms_that_nothing_synchronizes_are_refused():
    """DDP broadcasts their statistics before each forward pass, FSDP does not."""

    def body(rank):
        cfg = FsdpConfig(sync_bn=False)
        shard_batchnorms(nn.Sequential(nn.GroupNorm(2, 4)), cfg)
        shard_batchnorms(nn.Sequential(nn.BatchNorm2d(4)), cfg)

    for error in run_ranks(body, 2):
        assert "BatchNorm" in str(error) and "--sync-bn" in str(error)
    assert run_ranks(body, 1) == [None]


# Runs


@pytest.mark.slow
def test_offload_changes_no_bit_and_bfloat16_differs_by_rounding(tmp_path):
    def train(name, **flags):
        flags |= {"synthetic_samples": 24, "image_size": 8, "epochs": 1}
        run = fork_script("train_fsdp.py", 2, output_dir=tmp_path / name, **flags)
        assert (run.code, run.stderr) == (0, "")
        return run.rows[0], read_checkpoint(tmp_path / name / "last.pt")["model"]

    row, model = train("float32")
    _, offloaded = train("offload", fsdp_offload=True)
    assert same_bits(offloaded, model)
    half, trained = train("bfloat16", fsdp_dtype="bfloat16", fsdp_offload=True)
    for name in ("train_loss", "val_loss"):
        assert 0 < abs(half[name] / row[name] - 1) < 2**-5
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32, torch.int64}


def test_killed_and_resumed_run_matches_an_uninterrupted_one(tmp_path, monkeypatch):
    def build_model(cfg, train_set):
        blocks = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)]
        return nn.Sequential(nn.Conv2d(3, 4, 3), blocks, *head)

    monkeypatch.setattr(tasks.images, "build_model", build_model)
    flags = {"clip_norm": 1.0, "save_sharded": True, "epochs": 1}
    assert_resumes(tmp_path, "train_fsdp.py", 2, **flags)


@pytest.mark.slow
def test_bfloat16_run_of_nothing_but_shards_is_resumed(tmp_path):
    """There is no replica to compare, and the shards are on the CPU."""
    flags = {"model": "resnet20_gn", "optimizer": "adamw", "lr": 0.001, "epochs": 1}
    flags |= {"fsdp_dtype": "bfloat16", "fsdp_offload": True}
    assert_resumes(tmp_path, "train_fsdp.py", 2, **flags)


# What the ranks use


class Heads(nn.Module):
    """Runs the heads that it is told to run, in that order."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, points, numbers):
        points = self.body(points)
        return points.sum() + sum(self.heads[number](points).sum() for number in numbers)


def watch(model, optimizer):
    """A guard that has started, and what it gets."""
    guard, checkpoint = CompareShards(), SimpleNamespace(model=model, optimizer=optimizer)
    guard.at_start(checkpoint)
    return guard, checkpoint


def train_heads(rank, used, blocks, compiles=False):
    """Train on what `used` says of each step: the heads of each rank. Returns the step in which the
    ranks are refused and the message, or None and ""."""
    torch.manual_seed(0)
    model = Heads()
    if compiles:
        model.compile(backend="eager")
    for block in model.heads if blocks else ():
        fully_shard(block, **fsdp_kwargs(PLAIN))
    fully_shard(model, **fsdp_kwargs(PLAIN, root=True))
    optimizer = build_optimizer(model, PLAIN)
    guard, checkpoint = watch(model, optimizer)
    for step, numbers in enumerate(used, 1):
        optimizer.zero_grad()
        model(torch.ones(2, 3) + rank, numbers[rank]).backward()
        optimizer.step()
        kind, text = outcome(lambda: guard.after_step(checkpoint))
        if kind:
            return step, text
    _, text = outcome(lambda: guard.before_save(checkpoint, between_steps=False))
    return (len(used), text) if text else (None, "")


BOTH, FIRST, SECOND = ([0, 1], [0, 1]), ([0], [0]), ([1], [1])


def test_parameters_that_only_some_ranks_use_are_refused():
    """Their gradients, and the halves of their weights, would be mixed up without an error."""
    cases = [
        ([BOTH, FIRST, SECOND, BOTH, ([], [])], None),  # all ranks alike
        ([BOTH, BOTH, ([0], [1]), BOTH], 4),  # in the next step, so that no rank waits
        ([BOTH, ([0], [1])], 2),  # before a save
    ]
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # since torch 2.14
        cases.append(([([0, 1], [1]), BOTH], 2))  # messages of different sizes end older ones

    def body(rank):
        for used, expected in cases:
            step, text = train_heads(rank, used, blocks=False)
            assert step == expected and ("weight" in text) == bool(step)

    assert run_ranks(body, 2) == [None, None]


def test_hooks_of_shards_are_refused():
    """FSDP sets their gradients without autograd, which would call the hooks."""

    def body(rank):
        model = fully_shard(nn.Linear(3, 2), **fsdp_kwargs(PLAIN, root=True))
        model.weight.register_hook(lambda gradient: 0 * gradient)
        watch(model, build_optimizer(model, PLAIN))
        model(torch.ones(2, 3))

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError) and "weight" in str(error)


def test_parameters_that_no_rank_uses_stay():
    """Gradients of zero would move them, by weight decay and momentum."""

    def body(rank):
        torch.manual_seed(0)
        model = Heads()
        fully_shard(model.heads[0], **fsdp_kwargs(PLAIN))
        fully_shard(model, **fsdp_kwargs(PLAIN, root=True))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        guard, checkpoint = watch(model, optimizer)
        for used in ([0, 1], [0], [1]):
            before = [head.weight.full_tensor().clone() for head in model.heads]
            optimizer.zero_grad()
            model(torch.ones(2, 3), used).backward()
            optimizer.step()
            guard.after_step(checkpoint)
            for number, head in enumerate(model.heads):
                is_same = head.weight.full_tensor().equal(before[number])
                assert is_same == (number not in used)

    assert run_ranks(body, 2) == [None, None]


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_that_the_ranks_run_in_a_different_order_are_refused(compiles):
    """Parts of equal size would be combined without an error."""

    def body(rank):
        assert train_heads(rank, [BOTH, FIRST, BOTH], True, compiles) == (None, "")
        step, text = train_heads(rank, [([0, 1], [1, 0]), BOTH], True, compiles)
        assert step == 2 and "heads.0" in text and "heads.1" in text

    assert run_ranks(body, 2) == [None, None]


class Writing(nn.Module):
    """Calls write(its parameter) before it uses it."""

    def __init__(self, write):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.write = write

    def forward(self, points):
        with torch.no_grad():
            self.write(self.scale)
        return points * self.scale


@pytest.mark.parametrize("is_block", [False, True], ids=["root", "block"])
def test_writes_into_gathered_parameters_are_refused(is_block):
    """Such as of a momentum teacher, or of nn.Embedding(max_norm=...)."""

    def train(write):
        model = nn.Sequential(nn.Linear(3, 2), Writing(write))
        if is_block:
            fully_shard(model[1], **fsdp_kwargs(PLAIN))
        fully_shard(model, **fsdp_kwargs(PLAIN, root=True))
        guard, checkpoint = watch(model, build_optimizer(model, PLAIN))
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            guard.after_step(checkpoint)

    def body(rank):
        train(lambda scale: scale.sum())
        with pytest.raises(UserError, match="scale"):
            train(lambda scale: scale.clamp_(max=9))  # without effect in these steps
        with pytest.raises(UserError, match="scale"):
            train(lambda scale: scale.data.mul_(0.9))

    assert run_ranks(body, 2) == [None, None]


# Checkpoints


def make_state(wrap, seed=0):
    """The state of a run that has taken two steps. wrap: plain, ddp or fsdp."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 3))
    if wrap == "fsdp":
        fully_shard(model[0], **fsdp_kwargs(PLAIN))
        model = fully_shard(model, **fsdp_kwargs(PLAIN, root=True))
    else:
        model = model.to(memory_format=torch.channels_last)
        model = DistributedDataParallel(model) if wrap == "ddp" else model
    optimizer = build_optimizer(model, PLAIN)
    scheduler = build_scheduler(optimizer, PLAIN, steps_per_epoch=5)
    for _ in range(2):
        model(torch.randn(4, 3, 3, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return pair(model, optimizer) | {"scheduler": scheduler}


def test_checkpoint_is_read_with_any_wrapper_on_any_number_of_ranks(tmp_path):
    """Each continues what the one before has saved, and saves it again."""

    def save_first(rank):
        save(tmp_path, make_state("fsdp"), save_sharded=True)

    def save_again(rank, epoch, wrap, sharded):
        state = make_state(wrap, seed=1)
        assert checkpointer(tmp_path, state, save_sharded=sharded).load() == epoch - 1
        save(tmp_path, state, epoch, save_sharded=sharded)
        state["model"](torch.randn(4, 3, 3, 3)).square().sum().backward()
        state["optimizer"].step()

    path = tmp_path / "last.pt"
    assert run_ranks(save_first, 2) == [None, None]
    first = read_checkpoint(path)
    assert {file.name[:4] for file in tmp_path.glob("*.parts/*")} == {"__0_", "__1_", ".met"}
    runs = [("fsdp", 3, False), ("ddp", 2, True), ("plain", 1, True), ("fsdp", 2, True)]
    for epoch, (wrap, ranks, sharded) in enumerate(runs, 2):
        assert run_ranks(save_again, ranks, epoch, wrap, sharded) == [None] * ranks
        assert ("parts" in read_checkpoint(path, join_parts=False)) == sharded
        found = read_checkpoint(path)
        assert found["epoch"] == epoch
        assert same_bits(found["model"], first["model"])
        assert same_bits(found["optimizer"]["state"], first["optimizer"]["state"])
        (ours,), (theirs,) = (c["optimizer"]["param_groups"] for c in (found, first))
        assert ours["lr"] == theirs["lr"]


# The end of the process


def test_process_that_exits_leaves_nothing_undone(tmp_path):
    """What atexit calls is called, and what was printed is written."""

    def body():
        sys.stdout = (tmp_path / "stdout").open("w")
        atexit.register((tmp_path / "called").touch)
        print("the last line", end="")
        exit_process()

    assert in_fork(body) == 0
    assert (tmp_path / "called").exists()
    assert (tmp_path / "stdout").read_text() == "the last line"


def test_exit_code_of_a_failed_script_is_kept(monkeypatch, tmp_path):
    def body():
        os.dup2(os.open(tmp_path / "stderr", os.O_CREAT | os.O_WRONLY), 2)
        runpy.run_path(str(ROOT / "train_fsdp.py"), run_name="__main__")

    monkeypatch.setattr(sys, "argv", ["train_fsdp.py", "--epochs=0"])
    assert in_fork(body) == 2


COUNT_THREADS = """
import atexit, os, sys
def count():
    tasks, caller = "/proc/self/task/", sys._getframe().f_back
    names = [open(f"{{tasks}}{{task}}/comm").read() for task in os.listdir(tasks)]
    alive = sum(name.startswith(("pt_gloo", "gloo")) for name in names)
    skipped = caller is not None and caller.f_code.co_name == "exit_process"
    with open({log!r}, "a") as log:
        print("skipped" if skipped else alive, file=log)
if "RANK" in os.environ:
    atexit.register(count)  # the first to be registered is the last to be called
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "found"), [("train_ddp.py", "0"), ("train_fsdp.py", "skipped")])
def test_no_thread_of_a_process_group_is_left_to_abort_the_exit(script, found, tmp_path):
    """Either none lives when Python has finished its exit, or C++'s teardown is skipped."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(COUNT_THREADS.format(log=str(tmp_path / "log")))
    environment = {"PYTHONPATH": str(hooks), "MASTER_PORT": str(free_port())}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    flags = {"output_dir": tmp_path / "run", "epochs": 1, "synthetic_samples": 12}
    run = run_script(script, environment=environment, **flags)
    assert (run.code, run.stderr) == (0, "")
    assert (tmp_path / "log").read_text().split() == [found]
