"""Checkpoints: plain contents, complete or absent on the disk, rejected if they do not fit."""

import collections
import datetime
import errno
import itertools
import os
import random
import resource
import signal
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torchvision.tv_tensors import Image

import utils.checkpoint
from tests.forked import FORK
from tests.processes import run_ranks
from utils.checkpoint import Checkpointer, unwrap
from utils.checkpoint_file import FORMAT, read_checkpoint, save_atomically
from utils.config import Config
from utils.errors import PeerError, UserError
from utils.finite import RefuseNonFinite
from utils.hooks import Hook
from utils.optim import Schedule
from utils.options.sharded import ShardedFiles
from utils.run_folder import lock_folder
from utils.rungs.fsdp import FsdpSettings
from utils.rungs.model_parallel import MicroBatches


class Steps:
    """What a Checkpointer needs of a loader."""

    def __init__(self, length=5):
        self.length, self.step = length, 0

    def __len__(self):
        return self.length

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def make_state(width=3, seed=0, lr=0.1):
    """The state of a run that has taken one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = Schedule(optimizer, lambda step: 1 / (1 + step), steps_per_epoch=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.randn(4, 2)).sum()).backward()
    scaler.step(optimizer)
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    return state | {"loader": Steps(), "data": {"classes": ["a", "b"]}}


def checkpointer(folder, state=None, hooks=(), **settings):
    cfg = Config(output_dir=str(folder), **settings)
    hooks = [*hooks, ShardedFiles()] if cfg.save_sharded else hooks
    return Checkpointer(cfg, state or make_state(), hooks)


def save(folder, state, epoch=1, is_best=False, hooks=(), **settings):
    """Save and wait until the file is written."""
    folder.mkdir(exist_ok=True)
    writer = checkpointer(folder, state, hooks, **settings)
    writer.save(epoch, is_best=is_best)
    writer.wait()


def same_model(ours, theirs):
    pairs = zip(*(s["model"].state_dict().values() for s in (ours, theirs)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def no_space(_):
    raise OSError(28, "No space left on device")


def outcome(function):
    """The type and text of the error that a function raises, or (None, "")."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None, ""


# What is in a checkpoint


def test_saved_state_is_loaded(tmp_path):
    state = make_state()
    state["loader"].step = 2
    save(tmp_path, state, epoch=3, lr=0.25)
    plain = torch.load(tmp_path / "last.pt", weights_only=True)
    assert list(plain["model"]) == list(state["model"].state_dict())
    assert set(plain["optimizer"]["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert (plain["epoch"], plain["format"]) == (3, FORMAT)
    assert plain["data"] == {"classes": ["a", "b"]}
    assert plain["config"] == vars(Config(output_dir=str(tmp_path), lr=0.25))

    other = make_state(seed=1)
    assert not same_model(other, state)
    assert checkpointer(tmp_path, other, lr=0.25).load() == 3
    assert same_model(other, state) and other["loader"].step == 2
    for name in ("optimizer", "scheduler", "scaler"):
        assert str(other[name].state_dict()) == str(state[name].state_dict())


def test_saved_state_is_a_copy(tmp_path, monkeypatch):
    """Training continues while the thread writes: the next step must not show in the file."""
    go, write = threading.Event(), save_atomically
    monkeypatch.setattr(
        utils.checkpoint, "save_atomically", lambda *args: go.wait(60) and write(*args)
    )
    state = make_state()
    weight = state["model"][0].weight.detach()
    momentum = state["optimizer"].state[state["model"][0].weight]["momentum_buffer"]
    before = weight.clone(), momentum.clone()
    writer = checkpointer(tmp_path, state)
    writer.save(1)  # returns before the file is written
    weight.zero_(), momentum.zero_(), state["data"]["classes"].append("c")
    assert not list(tmp_path.iterdir())
    go.set()
    writer.wait()
    saved = read_checkpoint(tmp_path / "last.pt")
    assert torch.equal(saved["model"]["0.weight"], before[0])
    assert torch.equal(saved["optimizer"]["state"]["0.weight"]["momentum_buffer"], before[1])
    assert saved["data"] == {"classes": ["a", "b"]}


def test_last_save_of_a_run_is_waited_for(tmp_path, monkeypatch):
    write = save_atomically
    monkeypatch.setattr(
        utils.checkpoint, "save_atomically", lambda *args: time.sleep(0.3) or write(*args)
    )
    checkpointer(tmp_path, epochs=2).save(2)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 2


def test_wrappers_leave_no_trace(tmp_path):
    model = make_state()["model"]
    model.compile()
    for wrapped in (model, nn.DataParallel(model), nn.DataParallel(MicroBatches(model, 2))):
        assert unwrap(wrapped) is model

    def body(rank):
        state = make_state(seed=rank)
        state["model"] = DistributedDataParallel(state["model"])
        save(tmp_path, state)
        return checkpointer(tmp_path, make_state(seed=2)).load()

    assert run_ranks(body, 2) == [1, 1]
    saved = read_checkpoint(tmp_path / "last.pt")
    assert list(saved["model"]) == list(model.state_dict())


class OwnModule(nn.Module):
    """A model that calls its body `module`, as DistributedDataParallel does."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, inputs):
        return self.head(self.module(inputs))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_models_own_attribute_module_is_no_wrapper(frozen, wrapped, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = OwnModule()
        model.head.requires_grad_(not frozen)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "loader": Steps()}

    def body(rank):
        state = make(seed=0)
        if wrapped:
            state["model"] = DistributedDataParallel(state["model"])
        save(tmp_path, state)
        return {name: value.tolist() for name, value in make(seed=0)["model"].state_dict().items()}

    (expected,) = run_ranks(body, 1)
    saved = read_checkpoint(tmp_path / "last.pt")
    assert {name: value.tolist() for name, value in saved["model"].items()} == expected
    assert list(expected) == ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert list(saved["optimizer"]["state"]) == list(expected)[: 2 if frozen else 4]
    loaded = make(seed=1)
    assert checkpointer(tmp_path, loaded).load() == 1
    assert same_model(loaded, make(seed=0))


def test_loading_runs_no_backward_pass_and_compares_nothing(tmp_path, monkeypatch):
    """What a script wants of that, it says."""
    save(tmp_path / "run", make_state(seed=2))

    def body(rank, folder):
        state = make_state(seed=rank) | {"data": {"classes": [f"of rank {rank}"]}}
        state["model"] = DistributedDataParallel(state["model"], init_sync=False)
        before = [parameter.clone() for parameter in state["model"].parameters()]
        monkeypatch.setattr(torch.autograd, "backward", None)
        epoch = checkpointer(folder, state, allow_config_change=True, lr=1.0 + rank).load()
        pairs = zip(before, state["model"].parameters(), strict=True)
        return epoch, all(torch.equal(a, b) for a, b in pairs)

    assert run_ranks(body, 2, tmp_path / "empty") == [(0, True)] * 2
    assert run_ranks(body, 2, tmp_path / "run") == [(1, False)] * 2


def test_momentum_keeps_the_parameters_memory_format(tmp_path):
    """A fused step expects both alike; a checkpoint of FSDP is contiguous."""

    def convolution(seed, memory_format):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(2, 3, 5, 5)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "loader": Steps()}

    saved = convolution(0, torch.contiguous_format)
    save(tmp_path, saved)
    loaded = convolution(1, torch.channels_last)
    checkpointer(tmp_path, loaded).load()
    weight = loaded["model"].weight
    momentum = loaded["optimizer"].state[weight]["momentum_buffer"]
    assert momentum.stride() == weight.stride() == (27, 1, 9, 3)
    theirs = saved["optimizer"].state[saved["model"].weight]["momentum_buffer"]
    assert torch.equal(momentum, theirs) and torch.equal(weight, saved["model"].weight)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd without momentum", "frozen"])
def test_optimizer_states_of_other_kinds(kind, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        model[0].requires_grad_(kind != "frozen")
        parameters = [p for p in model.parameters() if p.requires_grad]
        if kind.startswith("adam"):
            optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        else:
            momentum = 0.9 * (kind == "frozen")
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, fused=True)
        return {"model": model, "optimizer": optimizer, "loader": Steps()}

    def step(state):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()

    saved, loaded = make(0), make(1)
    step(saved)
    save(tmp_path, saved)
    checkpointer(tmp_path, loaded).load()
    assert same_model(saved, loaded)
    for state in (saved, loaded):
        step(state)
    assert same_model(saved, loaded)
    a, b = (state["optimizer"].state_dict()["state"] for state in (saved, loaded))
    assert str(a) == str(b)


def test_parameter_without_a_gradient_has_no_state(tmp_path):
    """Such as a head that is not used yet: the state of the others is loaded nevertheless."""

    def make(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "loader": Steps()}

    saved, loaded = make(0), make(1)
    save(tmp_path, saved)
    assert checkpointer(tmp_path, loaded).load() == 1
    states = [s["optimizer"].state[s["model"]["used"].weight] for s in (saved, loaded)]
    assert torch.equal(states[0]["exp_avg"], states[1]["exp_avg"])
    assert same_model(saved, loaded)


def test_learning_rate_continues_from_the_current_peak(tmp_path):
    """After an allowed change, from the very first step."""
    saved = make_state()
    saved["optimizer"].step()
    saved["scheduler"].step()
    assert saved["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1 / 3)
    save(tmp_path, saved)
    for peak in (0.1, 0.6, 0.0):
        loaded = make_state(seed=1, lr=peak)
        checkpointer(tmp_path, loaded).load()
        (group,) = loaded["optimizer"].param_groups
        assert group["lr"] == pytest.approx(peak / 3)
        loaded["optimizer"].step()
        loaded["scheduler"].step()
        assert group["lr"] == pytest.approx(peak / 4)
    (tmp_path / "zero").mkdir()
    save(tmp_path / "zero", make_state(lr=0.0))
    checkpointer(tmp_path / "zero", make_state(lr=0.0)).load()


def test_run_may_have_no_scheduler(tmp_path):
    state = make_state()
    save(tmp_path, state)
    del state["scheduler"], state["optimizer"].param_groups[0]["initial_lr"]
    assert checkpointer(tmp_path, state).load() == 1
    save(tmp_path, state, 2)
    assert checkpointer(tmp_path, make_state()).load() == 2


def test_how_to_compute_is_not_taken_from_the_file(tmp_path):
    """FSDP's parameters have no fused step, DDP's do: each script keeps its own choice."""
    for fused in (True, False):
        folder, (saved, loaded) = tmp_path / str(fused), (make_state(), make_state(seed=1))
        saved["optimizer"].param_groups[0]["fused"] = fused
        save(folder, saved)
        loaded["optimizer"].param_groups[0]["fused"] = not fused
        checkpointer(folder, loaded).load()
        assert loaded["optimizer"].param_groups[0]["fused"] is not fused
        assert loaded["optimizer"].param_groups[0]["lr"] == 0.05  # of the step


class StateInGroups(torch.optim.Optimizer):
    """Keeps what it knows in its groups of parameters, as Prodigy and schedule-free optimizers do:
    a number, a tensor, and a value that is there only after a step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0, "d": torch.tensor(1.0, dtype=torch.double)})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"].mul_(1.5)
            group["largest"] = max(group.get("largest", 0.0), group["k"] % 3)
            for p in group["params"]:
                size = group["lr"] * group["d"] * (1 + group["largest"]) / group["k"]
                p.data.sub_(size * p.grad)
                self.state[p]["seen"] = torch.ones(1)


def no_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


def cyclic(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 0.1, step_size_up=4)


class WeightDecay:
    """A schedule of weight decay, as of DINO, and of a key of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 1.5 * group["weight_decay"] + 0.01
            group["mine"] = group.get("mine", 0) + 1


GROUPS = {
    "momentum of OneCycleLR": (torch.optim.SGD, {"momentum": 0.9}, one_cycle),
    "betas of OneCycleLR": (torch.optim.AdamW, {}, one_cycle),
    "momentum of CyclicLR": (torch.optim.SGD, {"momentum": 0.9}, cyclic),
    "weight decay": (torch.optim.SGD, {"weight_decay": 0.01}, WeightDecay),
    "state in groups": (StateInGroups, {}, no_schedule),
}


def make_groups(kind, seed=0, **changed):
    """The state of a run with two groups of parameters, and the function that takes a step."""
    build_optimizer, options, build_schedule = GROUPS[kind]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = build_optimizer(groups, **{"lr": 0.01} | options | changed)
    schedule = build_schedule(optimizer)
    state = {"model": model, "optimizer": optimizer, "loader": Steps()}
    if hasattr(schedule, "state_dict"):
        state["scheduler"] = schedule

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 2).double()).square().sum().backward()
        optimizer.step()
        schedule.step()

    return state, step


@pytest.mark.parametrize("kind", GROUPS)
def test_whatever_a_group_of_parameters_holds_is_restored(kind, tmp_path):
    straight, step = make_groups(kind)
    writer = checkpointer(tmp_path, straight)
    assert writer.load() == 0
    for _ in range(7):
        step()
    writer.save(1)
    writer.wait()
    resumed, step_again = make_groups(kind, seed=1)
    assert checkpointer(tmp_path, resumed).load() == 1
    for _ in range(5):
        step(), step_again()
    assert same_model(straight, resumed)
    groups = [state["optimizer"].state_dict()["param_groups"] for state in (straight, resumed)]
    assert str(groups[0]) == str(groups[1])


def test_changed_setting_of_a_group_takes_effect(tmp_path):
    """The others of the group continue."""
    saved, step = make_groups("momentum of OneCycleLR", weight_decay=0.25)
    writer = checkpointer(tmp_path, saved)
    step(), writer.save(1), writer.wait()
    before = saved["optimizer"].param_groups[0]
    for is_old in (False, True):
        if is_old:  # one that does not tell how the groups were at the start
            contents = read_checkpoint(tmp_path / "last.pt")
            del contents["initial_groups"]
            save_atomically(contents, tmp_path / "last.pt")
        resumed, _ = make_groups("momentum of OneCycleLR", seed=1, weight_decay=0.5)
        checkpointer(tmp_path, resumed, lr=0.2, allow_config_change=True).load()
        after = resumed["optimizer"].param_groups[0]
        assert (after["weight_decay"], after["lr"]) == (0.5, before["lr"])
        assert (after["momentum"] == before["momentum"]) is not is_old


def test_optimizer_of_another_kind_starts_with_its_own_groups(tmp_path):
    save(tmp_path, make_groups("weight decay")[0])
    resumed, _ = make_groups("state in groups", seed=1)
    checkpointer(tmp_path, resumed, optimizer="adamw", allow_config_change=True).load()
    group = resumed["optimizer"].param_groups[0]
    assert (group["k"], group["d"].item()) == (0, 1.0)
    assert "momentum" not in group and "nesterov" not in group


@pytest.mark.parametrize("sizes", [(2, 2), (4, 0)])
def test_another_number_of_groups_is_refused(sizes, tmp_path):
    state = make_state()
    save(tmp_path, state)
    parameters = list(state["model"].parameters())
    groups = [{"params": parameters[: sizes[0]]}, {"params": parameters[sizes[0] :]}]
    state["optimizer"] = torch.optim.SGD(groups, lr=0.1)
    for folder, others in ((tmp_path, state), (tmp_path / "two", make_state())):
        if folder != tmp_path:
            save(folder, state)
        with pytest.raises(UserError, match=r"last\.pt .*[12] groups .*[12]: .*--resume never"):
            checkpointer(folder, others).load()


# Which files there are


def test_keeps_last_best_and_newest(tmp_path, monkeypatch):
    state = make_state()
    for epoch, is_best in enumerate([True, True, False, False], start=1):
        save(tmp_path, state, epoch, is_best, keep_last=2)
    names = ["best.pt", "epoch-0003.pt", "epoch-0004.pt", "last.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 2
    assert (tmp_path / "last.pt").samefile(tmp_path / "epoch-0004.pt")  # no second copy

    def refuse(*names):
        raise OSError("no links on this file system")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, state, 5, is_best=True, keep_last=1)
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 5
    names = ["best.pt", "epoch-0005.pt", "last.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_leftover_link_does_not_overwrite_another_checkpoint(tmp_path):
    """A run that was killed between two system calls leaves one."""
    state = make_state()
    save(tmp_path, state, 1)
    os.link(tmp_path / "epoch-0001.pt", tmp_path / "last.tmp")
    save(tmp_path, state, 2)
    assert read_checkpoint(tmp_path / "epoch-0001.pt")["epoch"] == 1
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 2


@pytest.mark.parametrize("name", ["best.pt", "epoch-0002.pt", "last.pt"])
def test_best_is_not_lost_if_the_run_ends_between_two_renames(name, tmp_path, monkeypatch):
    """It is replaced first: a run that resumes from whatever file repeats the epoch, which is the
    best again."""
    state = make_state()
    save(tmp_path, state, 1, is_best=True)
    replace = os.replace

    def fail(source, target):
        if target == tmp_path / name:
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="Input/output error"):
        save(tmp_path, state, 2, is_best=True)
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == (1 if name == "best.pt" else 2)
    assert (tmp_path / "epoch-0002.pt").exists() == (name == "last.pt")
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_checkpoints_of_later_epochs_do_not_count(tmp_path, capsys):
    """Damaged ones, after the run went back to an older one: each good one would be removed."""
    state = make_state()
    for epoch in (11, 12):
        save(tmp_path, state, epoch)
    for epoch in range(4, 7):
        save(tmp_path, state, epoch, keep_last=2)
        good = [path.name for path in sorted(tmp_path.glob("epoch-*"))]
        assert good == [f"epoch-{n:04d}.pt" for n in (epoch - 1, epoch) if n > 3]
    aside = sorted(path.name for path in tmp_path.glob("previous-*"))
    assert aside == ["previous-epoch-0011.pt", "previous-epoch-0012.pt"]
    warning = capsys.readouterr().err
    assert warning.count("/epoch-0011.pt ") == 1
    assert warning.count(" previous-epoch-0011.pt") == 1


def test_epoch_that_was_saved_before_the_run_was_killed_is_replaced(tmp_path):
    """If last.pt was not: the run repeats this epoch, and nothing is set aside."""
    state = make_state()
    save(tmp_path, state, 1)
    os.link(tmp_path / "epoch-0001.pt", tmp_path / "epoch-0002.pt")
    state["loader"].step = 2
    writer = checkpointer(tmp_path, state)
    writer.save(1, between_steps=True)
    writer.save(2)
    writer.wait()
    names = ["epoch-0001.pt", "epoch-0002.pt", "last.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_save_between_steps_replaces_last_alone(tmp_path):
    state = make_state()
    save(tmp_path, state, 1, is_best=True)
    state["loader"].step = 3
    writer = checkpointer(tmp_path, state)
    writer.save(1, between_steps=True)
    writer.wait()
    names = ["best.pt", "epoch-0001.pt", "last.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    steps = [read_checkpoint(tmp_path / name)["loader"]["step"] for name in names]
    assert steps == [0, 0, 3]
    resumed = make_state(seed=1)
    assert checkpointer(tmp_path, resumed).load() == 1 and resumed["loader"].step == 3


def test_only_rank_0_writes(tmp_path, monkeypatch):
    def writers(everyone):
        folder = tmp_path / str(everyone)
        folder.mkdir()

        def body(rank):
            def write(checkpoint, path):
                (folder / f"rank-{rank}").touch()
                path.touch()

            monkeypatch.setattr(utils.checkpoint, "save_atomically", write)
            if everyone:
                monkeypatch.setattr(utils.checkpoint, "is_main_process", lambda: True)
            writer = checkpointer(folder / f"run-{rank}")
            writer.folder.mkdir()
            writer.save(1)
            writer.wait()

        assert run_ranks(body, 3) == [None] * 3
        return sorted(path.name for path in folder.glob("rank-*"))

    assert writers(everyone=False) == ["rank-0"]
    assert writers(everyone=True) == ["rank-0", "rank-1", "rank-2"]  # the test would notice


# Damaged files, and others that do not fit


@pytest.mark.parametrize("part", [0, 0.01, 0.5, 0.99])
def test_truncated_file_is_passed_over(part, tmp_path, capsys):
    state = make_state()
    save(tmp_path, state, 1)
    save(tmp_path, state, 2)
    os.truncate(tmp_path / "last.pt", int(part * (tmp_path / "last.pt").stat().st_size))
    assert checkpointer(tmp_path, state).load() == 1
    assert "last.pt cannot be read" in (text := capsys.readouterr().err)
    assert text.startswith("warning: ") and "checkpoint before" in text
    os.truncate(tmp_path / "epoch-0001.pt", 10)
    with pytest.raises(UserError, match="pass --resume never"):
        checkpointer(tmp_path, state).load()


def test_lack_of_memory_is_not_taken_for_damage(tmp_path, monkeypatch):
    def load(*_, **__):  # what PyTorch raises is not a MemoryError
        raise RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried")

    save(tmp_path, make_state())
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(UserError, match=r"last\.pt cannot be read now: no memory"):
        checkpointer(tmp_path, make_state()).load()


@pytest.mark.parametrize("number", ["EIO", "ESTALE", "EMFILE", "EACCES"])
def test_file_that_cannot_be_read_now_is_not_passed_over(number, tmp_path, monkeypatch):
    """It may be whole: to continue from an older one would lose work, without need."""
    state, number = make_state(), getattr(errno, number)
    save(tmp_path, state, 1)
    save(tmp_path, state, 2)

    def fail(path):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZipFile", fail)
        text = rf"last\.pt cannot be read now: {os.strerror(number)}; .* remove the file"
        with pytest.raises(UserError, match=text):
            checkpointer(tmp_path, state).load()
    assert checkpointer(tmp_path, state).load() == 2


def test_missing_module_for_sharded_checkpoints_is_named(tmp_path, monkeypatch):
    save(tmp_path, make_state(), save_sharded=True)
    monkeypatch.setitem(sys.modules, "utils.options.sharded", None)
    with pytest.raises(UserError, match=r"last\.pt .*options/sharded\.py.*--with sharded"):
        read_checkpoint(tmp_path / "last.pt")
    other = tmp_path / "other"
    save(other, make_state())  # without it, nothing but sharded checkpoints is lost
    assert checkpointer(other, make_state(seed=1)).load() == 1


def test_resume_always_needs_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match=rf"no checkpoint .*{tmp_path}"):
        checkpointer(tmp_path, resume="always").load()
    save(tmp_path, make_state())
    assert checkpointer(tmp_path, resume="always").load() == 1


def test_best_is_read_if_no_other_can_be(tmp_path):
    """With --keep-last 1, last.pt and the newest epoch are the same file."""
    state = make_state()
    save(tmp_path, state, 1, is_best=True, keep_last=1)
    save(tmp_path, state, 2, keep_last=1)
    (tmp_path / "last.pt").write_bytes(b"damaged")
    (tmp_path / "epoch-0002.pt").write_bytes(b"damaged")
    assert checkpointer(tmp_path, state).load() == 1


def test_other_settings_are_named(tmp_path):
    save(tmp_path, make_state())
    free = {"keep_last": 5, "num_workers": 3, "timeout": 7.0, "save_steps": 2}
    assert checkpointer(tmp_path, **free).load() == 1
    changed = {"lr": 0.2, "optimizer": "adamw"}
    with pytest.raises(UserError) as caught:
        checkpointer(tmp_path, **changed).load()
    text = str(caught.value)
    assert "optimizer 'adamw', not 'sgd'" in text and "lr 0.2, not 0.1" in text
    for flag in ("--resume never", "--output-dir", "--allow-config-change"):
        assert flag in text
    assert checkpointer(tmp_path, allow_config_change=True, **changed).load() == 1


@pytest.mark.parametrize("step", [0, 2])
def test_order_of_the_samples_stays_within_an_epoch(step, tmp_path):
    """With a different seed or different data, the rest of the epoch would repeat some samples and
    leave out others."""
    state = make_state()
    state["loader"].step = step
    save(tmp_path, state)
    other = make_state() | {"data": {"classes": ["a", "b", "c"]}}
    for changed, settings, text in (
        (make_state(), {"seed": 1}, "seed 1, not 0"),
        (other, {}, r"classes \['a', 'b', 'c'\], not"),
    ):
        resumed = checkpointer(tmp_path, changed, allow_config_change=True, lr=0.2, **settings)
        if step == 0:
            assert resumed.load() == 1
        else:
            with pytest.raises(UserError, match=rf"last.pt .*within an epoch.*\(now {text}"):
                resumed.load()


def test_another_model_is_named_by_its_tensors(tmp_path):
    save(tmp_path, make_state())
    with pytest.raises(UserError, match=r"last\.pt .*different model: .*0\.weight.*3, 2.*4, 2"):
        checkpointer(tmp_path, make_state(width=4)).load()
    state = make_state() | {"model": nn.Linear(2, 3)}
    state["optimizer"] = torch.optim.SGD(state["model"].parameters())
    with pytest.raises(UserError, match=r"last\.pt .*different model: .*missing.* bias, weight"):
        checkpointer(tmp_path, state).load()


# Several ranks


def test_all_ranks_raise_and_nodes_must_share_the_folder(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"disk-{rank}").mkdir()
    save(tmp_path / "disk-0" / "run", make_state())

    def body(rank, shared):
        os.chdir(tmp_path / f"disk-{0 if shared else rank}")
        return outcome(checkpointer(Path("run"), make_state(width=3 + shared)).load)

    apart = run_ranks(body, 2, False)
    assert [kind for kind, _ in apart] == [PeerError, UserError]
    assert "last.pt " in apart[1][1] and "share output_dir" in apart[1][1]
    assert [kind for kind, _ in run_ranks(body, 2, True)] == [UserError, UserError]


def test_ranks_that_read_different_files_of_one_name_are_told(tmp_path):
    """As a file system of several nodes may show them, from a cache. Even of one epoch: the id."""
    for rank in (0, 1):
        save(tmp_path / f"{rank}", make_state())

    def body(rank, name):
        os.chdir(tmp_path / name[rank])
        return outcome(checkpointer(Path(), make_state()).load)

    for kind, text in run_ranks(body, 2, "01"):
        assert kind is UserError
        assert "last.pt " in text and "epoch 1 on rank 0" in text
        assert "rank 1" in text and "run again" in text
    assert [text for _, text in run_ranks(body, 2, "00")] == ["", ""]


def test_nodes_may_mount_the_folder_under_different_names(tmp_path):
    save(tmp_path / "run-0", make_state())
    for rank in (0, 1):
        (tmp_path / f"node-{rank}").mkdir()
        (tmp_path / f"node-{rank}" / f"run-{rank}").symlink_to(tmp_path / "run-0")

    def body(rank):
        os.chdir(tmp_path / f"node-{rank}")
        return checkpointer(Path(f"run-{rank}"), make_state(seed=1)).load()

    assert run_ranks(body, 2) == [1, 1]


class ExtraState(nn.Linear):
    """A layer with state that is no tensor; Transformer Engine has such layers."""

    def __init__(self):
        super().__init__(2, 3)
        self.extra = {"recipe": "x", "scales": [torch.ones(2)]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("is_sharded", [False, True])
def test_extra_state_of_any_kind_is_saved(is_sharded, tmp_path):
    def make():
        model = nn.Sequential(ExtraState())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "loader": Steps()}

    saved, loaded = make(), make()
    layer = saved["model"][0]
    layer.extra = {"recipe": "y", "scales": [torch.full((2,), 3.0)]}
    save(tmp_path, saved, save_sharded=is_sharded)
    assert checkpointer(tmp_path, loaded).load() == 1
    assert str(loaded["model"][0].extra) == str(layer.extra)
    (scale,) = layer.extra["scales"]
    scale[0] = float("nan")
    with pytest.raises(UserError, match=r"0\._extra_state .* 1 tensors .*--clip-norm"):
        save(tmp_path, saved, 2, hooks=[RefuseNonFinite()], save_sharded=is_sharded)


class Held:
    """An entry of `state` that holds a value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": [self.value]}

    def load_state_dict(self, state):
        (self.value,) = state["value"]


@pytest.mark.parametrize("place", ["an entry", "data", "a hook", "the model", "a group"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (numpy.arange(2), "numpy.ndarray"),
        (datetime.date(2026, 1, 1), "datetime.date"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (lambda: None, "lambda"),
        (Image(torch.zeros(1, 2, 2)), "tv_tensors"),
    ],
    ids=["array", "date", "defaultdict", "function", "image"],
)
def test_value_that_could_not_be_read_is_refused_before_the_first_step(
    place, value, kind, tmp_path
):
    """The file would be written, and never be read."""
    state, hooks = make_state(), []
    if place == "an entry":
        state["mine"] = Held(value)
    elif place == "data":
        state["data"] = {"classes": [value]}
    elif place == "a hook":
        hooks.append(Hook())
        hooks[0].state_dict = lambda: {"value": value}
    elif place == "the model":
        state["model"].append(ExtraState())
        state["model"][-1].extra = {"value": value}
    else:
        state["optimizer"].param_groups[0]["mine"] = value
    writer = checkpointer(tmp_path, state, hooks)
    if (place, kind) != ("the model", "collections.defaultdict"):  # becomes a dict
        with pytest.raises(UserError, match=kind):
            writer.load()
        with pytest.raises(UserError, match=f"{kind}|function"):  # a value that is there later
            writer.save(1)
        assert not [*tmp_path.iterdir()]


def test_tensor_of_which_each_rank_has_a_part_is_refused_in_a_hook(tmp_path):
    """Such as the average of parameters in train_fsdp.py: each rank would load rank 0's part."""
    state = make_state()
    state["model"].register_buffer("image", Image(torch.zeros(1, 2, 2)))
    with pytest.raises(UserError, match=r"'model', .*tv_tensors"):
        checkpointer(tmp_path, state).load()

    def body(rank):
        hook = Hook()
        part = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        hook.state_dict = lambda: {"average": part}
        return outcome(checkpointer(tmp_path, make_state(), [hook]).load)

    for kind, text in run_ranks(body, 2):
        assert kind is UserError and "'hooks'" in text and "full_tensor()" in text


def test_large_tensors_are_not_written_to_memory_to_try_that(tmp_path, monkeypatch):
    ema = nn.Linear(1000, 100)
    written, write = [], torch.save

    def spy(value, file):
        write(value, file)
        written.append(file.tell())

    monkeypatch.setattr(torch, "save", spy)
    checkpointer(tmp_path, make_state() | {"ema": ema, "more": {"x": [torch.ones(10**5)]}}).load()
    assert written and max(written) < 10**5


def test_numbers_of_numpy_become_those_of_python(tmp_path):
    """A schedule that is computed with NumPy puts them into the groups of parameters."""

    def make():
        state = make_state() | {"data": {"classes": [numpy.str_("a")], numpy.str_("n"): 1}}
        optimizer = state["optimizer"]
        optimizer.param_groups[0]["mine"] = (numpy.int64(1), {"x": numpy.float32(0.5)})
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step))
        return state | {"scheduler": schedule, "mine": Held(numpy.float64(0.25))}

    saved, loaded = make(), make()
    for _ in range(3):
        saved["optimizer"].step()
        saved["scheduler"].step()
    save(tmp_path, saved)
    assert checkpointer(tmp_path, loaded).load() == 1
    (group,) = loaded["optimizer"].param_groups
    assert type(group["lr"]) is float and group["lr"] == saved["scheduler"].get_last_lr()[0]
    assert group["mine"] == (1, {"x": 0.5}) and type(group["mine"][0]) is int
    assert loaded["mine"].value == 0.25
    assert read_checkpoint(tmp_path / "last.pt")["data"] == {"classes": ["a"], "n": 1}


def test_plain_facts_are_saved(tmp_path):
    facts = {"a": 1, "b": [2.5, None, ("x", True)], "c": {"d": {}}}
    save(tmp_path, make_state() | {"data": facts})
    assert read_checkpoint(tmp_path / "last.pt")["data"] == facts


def test_saves_when_steps_are_over_but_not_at_the_end_of_an_epoch(tmp_path, monkeypatch):
    state, saved = make_state(), []
    writer = checkpointer(tmp_path, state, save_steps=2)
    monkeypatch.setattr(writer, "save", lambda epoch, **kw: saved.append(state["loader"].step))
    for step in range(1, 5):
        state["loader"].step = step
        writer.step()
    assert saved == [2, 4]
    state["loader"].length = 4
    writer.step()  # the end of the epoch, where the script saves
    assert saved == [2, 4]


def test_epochs_are_left_out_unless_they_are_due_the_best_or_the_last(tmp_path):
    state = make_state()
    writer = checkpointer(tmp_path, state, save_epochs=3, epochs=7, keep_last=9, save_steps=2)
    for epoch in range(1, 8):
        writer.save(epoch, is_best=epoch in (2, 3))
    writer.wait()
    files = sorted(path.name for path in tmp_path.glob("epoch-*"))
    assert files == [f"epoch-000{epoch}.pt" for epoch in (2, 3, 6, 7)]
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 3
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 7


def test_epoch_is_saved_if_a_save_is_due_at_its_last_step(tmp_path):
    """Otherwise, a run with one step per epoch would never stop after a signal."""

    state = make_state()
    writer = checkpointer(tmp_path, state, save_epochs=3, epochs=7)
    for epoch, step in ((0, 5), (1, 1), (1, 5)):  # an epoch has 5 steps
        state["loader"].step = step
        if (epoch, step) == (1, 5):
            writer.request_save(ends_run=False)
        writer.step()
        if step == 5:
            writer.save(epoch + 1)
            writer.wait()
        assert (tmp_path / "last.pt").exists() == (epoch + step == 6)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 2


def test_main_process_decides_which_epoch_is_the_best(tmp_path):
    """The others do not know it, and must not wait for a save that it leaves out."""

    def body(rank):
        writer = checkpointer(tmp_path, save_epochs=3)
        for epoch, is_best in ((1, rank == 1), (2, rank == 0)):
            writer.save(epoch, is_best=is_best)
        writer.wait()
        return writer.epoch

    assert run_ranks(body, 2) == [2, 2]
    assert [path.name for path in tmp_path.glob("epoch-*")] == ["epoch-0002.pt"]


def test_cuda_tensors_are_copied_without_waiting_for_each(tmp_path, monkeypatch):
    """On the CPU, with tensors that claim to be on a GPU and copies that are off by one."""
    state, order = make_state(), []
    writer = checkpointer(tmp_path, state)
    expected = [tensor + 1 for tensor in state["model"].state_dict().values()]
    real_to = torch.Tensor.to

    def copy_to(tensor, *args, **options):
        if options != {"non_blocking": True}:
            return real_to(tensor, *args, **options)
        order.append(*args)
        return tensor + 1

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: order.append("waits"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        patch.setattr(torch.Tensor, "to", copy_to)
        writer.save(1)
    writer.wait()
    assert order == ["cpu"] * 11 + ["waits"]  # 7 of the model, 4 momentum buffers
    saved = read_checkpoint(tmp_path / "last.pt")
    assert all(torch.equal(a, b) for a, b in zip(saved["model"].values(), expected, strict=True))
    momentum = state["optimizer"].state[state["model"][0].weight]["momentum_buffer"]
    states = saved["optimizer"]["state"]
    assert torch.equal(states["0.weight"]["momentum_buffer"], momentum + 1)


def test_model_on_several_devices_is_not_loaded_as_full_tensors(tmp_path, monkeypatch):
    """PyTorch refuses full_state_dict for a model on several devices, and FSDP needs it."""
    seen = []
    for name in ("set_model_state_dict", "set_optimizer_state_dict"):
        real = getattr(utils.checkpoint.dsd, name)

        def spy(*args, real=real, options):
            seen.append(options.full_state_dict)
            real(*args, options=options)

        monkeypatch.setattr(utils.checkpoint.dsd, name, spy)
    save(tmp_path, make_state())
    assert checkpointer(tmp_path, make_state(seed=1)).load() == 1
    assert seen == [False, False]


# Saves that fail or are interrupted


def test_failed_save_raises_on_all_ranks_at_the_next_one(tmp_path, monkeypatch):
    def body(rank):
        writer = checkpointer(tmp_path)
        writer.save(1)
        writer.wait()
        monkeypatch.setattr(os, "fsync", no_space)
        writer.save(2)  # fails in the background
        return outcome(lambda: writer.save(3))

    results = run_ranks(body, 2)
    assert [kind for kind, _ in results] == [UserError, PeerError]
    text = results[0][1]
    assert "No space left" in text and str(tmp_path / "epoch-0002.pt") in text
    assert sorted(os.listdir(tmp_path)) == ["epoch-0001.pt", "last.pt"]
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_failed_last_save_raises_at_once(tmp_path, monkeypatch):
    def body(rank):
        monkeypatch.setattr(os, "fsync", no_space)
        return outcome(lambda: checkpointer(tmp_path, epochs=2).save(2))

    assert [kind for kind, _ in run_ranks(body, 2)] == [UserError, PeerError]
    assert not os.listdir(tmp_path)


def test_full_disk_keeps_the_checkpoint_before(tmp_path):
    """A file may not grow beyond 100 kB: torch.save then raises an error about positions."""

    def body(queue):
        state = make_state()
        save(tmp_path, state)
        state["large"] = torch.zeros(10**5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
        queue.put(outcome(lambda: save(tmp_path, state, epoch=2)))

    queue = FORK.Queue()
    process = FORK.Process(target=body, args=(queue,))
    process.start()
    kind, text = queue.get(timeout=30)
    process.join()
    assert kind is UserError and text.endswith("epoch-0002.pt: File too large")
    assert sorted(os.listdir(tmp_path)) == ["epoch-0001.pt", "last.pt"]
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_other_errors_of_the_writer_are_not_hidden(tmp_path, monkeypatch):
    state = make_state() | {"bad": lambda: None}  # cannot be pickled
    with pytest.raises(Exception, match=r"pickle|lambda"):
        save(tmp_path, state)


def killed_in_fsync(folder):
    """A run that is killed while it writes its second checkpoint."""
    state = make_state()
    checkpointer(folder, state).load()
    save(folder, state, epoch=1)
    os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
    save(folder, state, epoch=2)


def test_run_killed_while_saving_keeps_the_checkpoint_before(tmp_path):
    process = FORK.Process(target=killed_in_fsync, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["epoch-0002.pt.tmp"]
    assert checkpointer(tmp_path).load() == 1
    lock_folder(Config(output_dir=str(tmp_path)))  # at the next start
    assert not list(tmp_path.glob("*.tmp"))


def saves_until_killed(folder):
    writer = checkpointer(folder, make_state(width=30_000), epochs=10**6)
    for epoch in itertools.count(1):
        writer.save(epoch, is_best=True)


def test_run_killed_at_any_moment_leaves_a_good_checkpoint(tmp_path):
    chance = random.Random(0)
    for _ in range(5):
        process = FORK.Process(target=saves_until_killed, args=(tmp_path,))
        process.start()
        end = time.monotonic() + 60
        while not (tmp_path / "last.pt").exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(chance.random() / 4)
        process.kill()
        process.join()
        for name in ("last.pt", "best.pt"):
            if name == "last.pt" or (tmp_path / name).exists():
                assert read_checkpoint(tmp_path / name)["epoch"] >= 1
        assert checkpointer(tmp_path, make_state(width=30_000), epochs=10**6).load() >= 1


@pytest.mark.parametrize("end", ["end", "error"])
def test_file_is_finished_when_the_process_ends(end, tmp_path):
    """The writer is not a daemon thread: a run that ends, even by an error, completes its file."""

    def body():
        write = save_atomically
        utils.checkpoint.save_atomically = lambda *args: time.sleep(0.5) or write(*args)
        checkpointer(tmp_path).save(1)
        if end == "error":
            sys.exit(3)

    process = FORK.Process(target=body)
    process.start()
    process.join(30)
    assert process.exitcode == (3 if end == "error" else 0)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_sigterm_leaves_the_checkpoint_before(tmp_path):
    writing = FORK.Event()

    def body():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # coverage has a handler
        save(tmp_path, make_state(), epoch=1)
        utils.checkpoint.save_atomically = lambda *args: writing.set() or time.sleep(60)
        checkpointer(tmp_path).save(2)
        time.sleep(60)

    process = FORK.Process(target=body)
    process.start()
    assert writing.wait(30)
    process.terminate()
    process.join(10)
    assert process.exitcode == -signal.SIGTERM
    assert checkpointer(tmp_path).load() == 1


def test_checkpoint_with_settings_of_a_script_is_read_by_others(tmp_path):
    """A script without these settings ignores them."""

    @dataclass(frozen=True)
    class RunConfig(FsdpSettings, Config):
        pass

    cfg = RunConfig(output_dir=str(tmp_path))
    for settings in (cfg, replace(cfg, fsdp_offload=True)):
        writer = Checkpointer(settings, make_state())
        writer.save(1)
        writer.wait()
        assert checkpointer(tmp_path).load() == 1
    with pytest.raises(UserError, match="fsdp_dtype 'bfloat16', not 'none'"):
        Checkpointer(replace(cfg, fsdp_dtype="bfloat16"), make_state()).load()
