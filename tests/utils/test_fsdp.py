"""FSDP2: what is sharded, in which precision, and checkpoints that other scripts read."""

import atexit
import os
import runpy
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torchvision
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tasks.images
from tasks.images.parts import blocks_of
from tasks.images.small_models import ResNet20
from tasks.images.weights import freeze_backbone
from tests.forked import FIVE_STEPS, FORK, ROUNDING, assert_resumes, fork_script
from tests.processes import ROOT, free_port, run_ranks, run_script
from tests.utils.test_checkpoint import Steps, outcome
from utils.checkpoint import Checkpointer, read_checkpoint
from utils.config import Config, load_config
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


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 8), ("resnet50", 16), ("vit_b_16", 12), ("resnet20", 9)]
)
def test_blocks_are_the_members_of_sequentials(name, count):
    with torch.device("meta"):
        model = ResNet20(10) if name == "resnet20" else torchvision.models.get_model(name)
    blocks = tasks.images.blocks(model)
    assert len(blocks) == count
    inside = [parameter for block in blocks for parameter in block.parameters()]
    assert len(inside) == len(set(inside))  # no block inside another
    assert sum(p.numel() for p in inside) > 0.75 * sum(p.numel() for p in model.parameters())


def test_blocks_may_be_in_a_module_list():
    """As in most transformers that are not torchvision's."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Linear(3, 4)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(4, 2, dim_feedforward=8) for _ in range(3)
            )

    model = Encoder()
    assert tasks.images.blocks(model) == list(model.blocks)


def test_ranks_with_other_weights_are_refused():
    """FSDP would shard each rank's own weights into one model; DDP broadcasts rank 0's."""

    def body(rank, seeds):
        torch.manual_seed(seeds[rank])
        check_same_weights(nn.Linear(2, 3))

    assert run_ranks(body, 2, [5, 5]) == [None, None]
    for error in run_ranks(body, 2, [5, 6]):
        assert isinstance(error, UserError) and "set_seed(cfg.seed)" in str(error)


def test_settings_that_do_not_fit_are_refused(monkeypatch, capfd):
    def refused(*flags):
        with pytest.raises(SystemExit, match="2"):
            load_config(Config, FsdpSettings, flags)
        return capfd.readouterr().err

    # Gathered parameters have new addresses in every step.
    assert "--compile default" in refused("--compile=max-autotune")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "--fsdp-size 3" in refused("--fsdp-size=3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flags = ["--fsdp-offload", "--clip-norm=1"]
    assert load_config(Config, FsdpSettings, [*flags, "--device=cpu"]).fsdp_offload
    assert "--clip-norm 0" in refused(*flags)


# What is sharded


def shard(model, cfg):
    """As train_fsdp.py does."""
    shard_batchnorms(model, cfg)
    for block in blocks_of(model):
        fully_shard(block, **fsdp_kwargs(cfg))
    return fully_shard(model, **fsdp_kwargs(cfg, root=True))


def computed_dtypes(model):
    """The dtypes of the outputs of a model's convolutions, BatchNorms and of itself."""
    dtypes = {}
    for module in model.modules():
        kind = "conv" if isinstance(module, nn.Conv2d) else None
        kind = "norm" if hasattr(module, "running_var") else kind
        if kind:
            module.register_forward_pre_hook(
                lambda m, x, kind=kind: dtypes.setdefault(kind, set()).add(m.weight.dtype)
            )
    dtypes["output"] = {model(torch.randn(4, 3, 8, 8)).dtype}
    return dtypes


@pytest.mark.parametrize("frozen", [False, True])
def test_batchnorms_stay_in_float32(frozen):
    def body(rank):
        torch.manual_seed(0)
        result = []
        for dtype in ("none", "bfloat16"):
            cfg = FsdpConfig(fsdp_dtype=dtype, device="cpu")
            model = convert_sync_batchnorm(ResNet20(10))
            model = freeze_backbone(ResNet20(10)) if frozen else model
            model = shard(model, cfg)
            assert all(isinstance(p, DTensor) for p in model.parameters())
            assert all(p.dtype is torch.float32 for p in model.parameters())
            local = sum(p.to_local().numel() for p in model.parameters())
            assert local < 0.6 * sum(p.numel() for p in model.parameters())
            result.append(computed_dtypes(model))
        return result

    half, single = {torch.bfloat16}, {torch.float32}
    for plain, mixed in run_ranks(body, 2):
        assert plain == {"conv": single, "norm": single, "output": single}
        assert mixed == {"conv": half, "norm": single, "output": single}


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


def test_shards_are_updated_by_few_kernels_to_the_same_weights():
    def train(name, sharded):
        cfg = FsdpConfig(optimizer=name, lr=0.01, device="cpu", dtype="float64")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
        model = shard(model, cfg) if sharded else model
        optimizer = build_optimizer(model, cfg)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4).double()).square().sum().backward()
            optimizer.step()
        (group,) = optimizer.param_groups
        weights = [p.full_tensor() if sharded else p for p in model.parameters()]
        return group["fused"], group["foreach"], [w.detach().numpy() for w in weights]

    names = ("sgd", "sgd_nesterov", "adam", "adamw")
    ranks = run_ranks(lambda rank: [train(name, sharded=True) for name in names], 2)
    for number, name in enumerate(names):
        fused, foreach, expected = train(name, sharded=False)
        assert (fused, foreach) == (True, None)
        for results in ranks:
            fused, foreach, weights = results[number]
            assert (fused, foreach) == ((None, True) if "sgd" in name else (True, None))
            for ours, theirs in zip(weights, expected, strict=True):
                assert abs(ours - theirs).max() < ROUNDING


# Runs

ONE_EPOCH = FIVE_STEPS | {"epochs": 1}


@pytest.fixture(scope="module")
def float32_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float32") / "run"
    return fork_script("train_fsdp.py", 2, output_dir=folder, **ONE_EPOCH)


def test_bfloat16_and_offload_differ_by_rounding(float32_run, tmp_path):
    flags = ONE_EPOCH | {"fsdp_dtype": "bfloat16", "fsdp_offload": True}
    run = fork_script("train_fsdp.py", 2, output_dir=tmp_path / "run", **flags)
    assert (run.code, run.stderr) == (0, "")
    for name in ("train_loss", "val_loss"):
        assert 0 < abs(run.rows[0][name] / float32_run.rows[0][name] - 1) < 2**-5
    model = read_checkpoint(run.output_dir / "last.pt")["model"]
    assert {t.dtype for t in model.values()} == {torch.float32, torch.int64}


def test_offload_alone_changes_no_bit(float32_run, tmp_path):
    flags = ONE_EPOCH | {"fsdp_offload": True}
    run = fork_script("train_fsdp.py", 2, output_dir=tmp_path / "run", **flags)
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt") for r in (run, float32_run))
    assert all(torch.equal(ours["model"][k], theirs["model"][k]) for k in theirs["model"])


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        pytest.param(
            *(3, {"clip_norm": 1.0, "save_sharded": True, "epochs": 2}), marks=pytest.mark.slow
        ),
        (2, {"model": "resnet20_gn", "momentum": 0}),  # nothing but shards: no replica to compare
        pytest.param(2, {"momentum": 0, "save_sharded": True}, marks=pytest.mark.slow),
        (2, {"optimizer": "adamw", "lr": 0.001, "fsdp_dtype": "bfloat16", "fsdp_offload": True}),
    ],
    ids=str,
)
def test_killed_and_resumed_run_matches_an_uninterrupted_one(nproc, flags, tmp_path):
    assert_resumes(tmp_path, "train_fsdp.py", nproc, **{"epochs": 1} | flags)


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
    checkpoint = SimpleNamespace(model=model, optimizer=optimizer)
    guard = CompareShards()
    guard.at_start(checkpoint)
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
        ([([0], [1]), BOTH, BOTH], 2),  # in the next step, so that no rank waits
        ([BOTH, BOTH, ([0], [1]), BOTH], 4),
        ([BOTH, ([0], [1])], 2),  # before a save
        ([([0, 1], [1]), BOTH], 2),  # messages of different sizes
    ]

    def body(rank):
        return [train_heads(rank, used, blocks=False) for used, _ in cases]

    for returned in run_ranks(body, 2):
        for (step, text), (_, expected) in zip(returned, cases, strict=True):
            assert step == expected and ("weight" in text) == bool(step)


def test_hooks_of_shards_are_refused():
    """FSDP sets their gradients without autograd, which would call the hooks."""

    def body(rank):
        model = fully_shard(nn.Linear(3, 2), **fsdp_kwargs(PLAIN, root=True))
        model.weight.register_hook(lambda gradient: 0 * gradient)
        optimizer = build_optimizer(model, PLAIN)
        CompareShards().at_start(SimpleNamespace(model=model, optimizer=optimizer))
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
        guard, changes = CompareShards(), []
        checkpoint = SimpleNamespace(model=model, optimizer=optimizer)
        guard.at_start(checkpoint)
        for heads in ([0, 1], [0], [1]):
            before = [head.weight.full_tensor().clone() for head in model.heads]
            optimizer.zero_grad()
            model(torch.ones(2, 3), heads).backward()
            optimizer.step()
            guard.after_step(checkpoint)
            after = [head.weight.full_tensor() for head in model.heads]
            changes.append([not a.equal(b) for a, b in zip(before, after, strict=True)])
        return changes

    assert run_ranks(body, 2) == [[[True, True], [True, False], [False, True]]] * 2


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_blocks_that_the_ranks_run_in_a_different_order_are_refused(compiles):
    """Parts of equal size would be combined without an error."""

    def body(rank):
        used = [([0, 1], [1, 0]), BOTH]
        same = train_heads(rank, [BOTH, FIRST, BOTH], True, compiles)
        return same, train_heads(rank, used, True, compiles)

    for same, (step, text) in run_ranks(body, 2):
        assert same == (None, "")
        assert step == 2 and "heads.0" in text and "heads.1" in text


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


WRITES = {
    "clamp": lambda scale: scale.clamp_(max=9),  # without effect in these steps
    "data": lambda scale: scale.data.mul_(0.9),
    "new data": lambda scale: setattr(scale, "data", scale.data + 1),
    "read": lambda scale: scale.sum(),
}


@pytest.mark.parametrize("is_block", [False, True], ids=["root", "block"])
def test_writes_into_gathered_parameters_are_refused(is_block):
    """Such as of a momentum teacher, or of nn.Embedding(max_norm=...)."""

    def train(write):
        model = nn.Sequential(nn.Linear(3, 2), Writing(write))
        if is_block:
            fully_shard(model[1], **fsdp_kwargs(PLAIN))
        fully_shard(model, **fsdp_kwargs(PLAIN, root=True))
        optimizer = build_optimizer(model, PLAIN)
        guard = CompareShards()
        checkpoint = SimpleNamespace(model=model, optimizer=optimizer)
        guard.at_start(checkpoint)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            guard.after_step(checkpoint)

    def body(rank):
        return [outcome(lambda w=write: train(w)) for write in WRITES.values()]

    for outcomes in run_ranks(body, 2):
        for name, (kind, text) in zip(WRITES, outcomes, strict=True):
            assert (kind is None) == (name == "read"), (name, text)
            assert name == "read" or "scale" in text


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
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Steps()}
    return state | {"data": {}}


def checkpointer(folder, state, sharded=False):
    cfg = FsdpConfig(output_dir=str(folder), save_sharded=sharded)
    return Checkpointer(cfg, state)


def flat(checkpoint):
    """All tensors of a checkpoint by name, as numpy arrays."""
    momentum = checkpoint["optimizer"]["state"].items()
    tensors = checkpoint["model"] | {f"momentum of {k}": v["momentum_buffer"] for k, v in momentum}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("writer", ["fsdp", "ddp"])
def test_checkpoint_is_read_with_any_wrapper_on_any_number_of_ranks(writer, sharded, tmp_path):
    def write(rank):
        saver = checkpointer(tmp_path, make_state(writer), sharded)
        saver.save(1)
        saver.wait()

    def read(rank, wrap, folder):
        state = make_state(wrap, seed=1)
        assert checkpointer(tmp_path, state).load() == 1
        weight = state["model"].state_dict()
        weight = next(value for key, value in weight.items() if key.endswith("0.weight"))
        assert isinstance(weight, DTensor) == (wrap == "fsdp")
        (group,) = state["optimizer"].param_groups
        kernels = group["fused"], group["foreach"]  # how to compute is not in the file
        assert kernels == ((None, True) if wrap == "fsdp" else (True, None))
        for parameter, values in state["optimizer"].state.items():
            assert values["momentum_buffer"].stride() == parameter.stride()
        folder.mkdir(exist_ok=True)
        saver = checkpointer(folder, state)
        saver.save(1)
        saver.wait()
        make_steps(state)  # and the run continues
        return group["lr"]

    run_ranks(write, 2)
    saved = read_checkpoint(tmp_path / "last.pt")
    assert len(list(tmp_path.glob("*.parts"))) == sharded
    assert {"0.weight", "momentum of 3.bias"} < flat(saved).keys()
    (lr,) = (group["lr"] for group in saved["optimizer"]["param_groups"])
    for wrap, world_size in (("plain", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3)):
        folder = tmp_path / f"{wrap}-{world_size}"
        assert run_ranks(read, world_size, wrap, folder) == [lr] * world_size
        ours, theirs = flat(read_checkpoint(folder / "last.pt")), flat(saved)
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in theirs)


def make_steps(state):
    state["model"](torch.randn(4, 3, 3, 3)).square().sum().backward()
    state["optimizer"].step()


# The end of the process


def in_fork(function):
    """The exit code of a process that calls function(), without its stderr."""

    def body():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        function()

    process = FORK.Process(target=body)
    process.start()
    process.join(30)
    return process.exitcode


def test_process_that_exits_leaves_nothing_undone(tmp_path):
    """What atexit calls is called, and what was printed is written."""

    def body():
        sys.stdout = (tmp_path / "stdout").open("w")
        atexit.register((tmp_path / "called").touch)
        print("the last line", end="")
        exit_process()

    assert in_fork(body) == 0
    assert (tmp_path / "called").exists() and (tmp_path / "stdout").read_text() == "the last line"


@pytest.mark.parametrize("script", ["train_fsdp.py", "train_fsdp_tp.py"])
def test_exit_code_of_a_failed_script_is_kept(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--epochs=0"])
    assert in_fork(lambda: runpy.run_path(str(ROOT / script), run_name="__main__")) == 2


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


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_no_thread_of_a_process_group_is_left_to_abort_the_exit(script, tmp_path):
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
    expected = ["0"] if script == "train_ddp.py" else ["skipped"]
    assert (tmp_path / "log").read_text().split() == expected
