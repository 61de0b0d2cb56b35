"""Checkpoints: what is saved comes back, files are whole, and what does not fit is refused."""

import os
import resource
import signal
import time

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import utils.checkpoint
from tests.forked import FORK, same_bits
from tests.processes import run_ranks
from utils.checkpoint import (
    FORMAT,
    Checkpointer,
    epoch_checkpoints,
    newest_good_checkpoint,
    read_checkpoint,
    save_atomically,
    unwrap,
)
from utils.config import Config
from utils.errors import PeerError, UserError
from utils.guards import Guard
from utils.optim import Schedule
from utils.rungs.model_parallel import MicroBatches


class Steps:
    """What a Checkpointer needs of a loader, of five steps per epoch."""

    step = 0

    def __len__(self):
        return 5

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def train(model, optimizer, steps=1):
    """Steps on random inputs."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()


def make_state(seed=0, width=3, lr=0.1):
    """The state of a run that has taken one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = Schedule(optimizer, lambda step: 1 / (1 + step), steps_per_epoch=10)
    train(model, optimizer)
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return state | {"loader": Steps(), "data": {"classes": ["a", "b"]}}


def pair(model, optimizer):
    """A state of nothing but a model and its optimizer."""
    return {"model": model, "optimizer": optimizer, "loader": Steps(), "data": {}}


def checkpointer(folder, state=None, guards=(), **settings):
    return Checkpointer(Config(output_dir=str(folder), **settings), state or make_state(), guards)


def save(folder, state, epoch=1, is_best=False, guards=(), **settings):
    """Save, and wait until the file is written."""
    folder.mkdir(exist_ok=True)
    writer = checkpointer(folder, state, guards, **settings)
    writer.save(epoch, is_best=is_best)
    writer.wait()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def outcome(function):
    """The type and the text of the error that a function raises, or (None, "")."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def in_fork(body):
    """The exit code of a fork of this process that runs body()."""
    process = FORK.Process(target=body)
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode


# What is saved comes back


def test_loaded_run_is_the_saved_one(tmp_path):
    saved, loaded = make_state(), make_state(seed=1)
    saved["loader"].step = 2
    save(tmp_path, saved, epoch=3, lr=0.25)
    contents = torch.load(tmp_path / "last.pt", weights_only=True)
    assert (contents["format"], contents["epoch"]) == (FORMAT, 3)
    assert contents["config"]["lr"] == 0.25
    assert contents["data"] == {"classes": ["a", "b"]}
    assert list(contents["model"])[:2] == ["0.weight", "0.bias"]
    assert list(contents["optimizer"]["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert checkpointer(tmp_path, loaded, lr=0.25).load() == 3
    assert loaded["loader"].step == 2
    for name in ("model", "optimizer", "scheduler"):
        assert same_bits(loaded[name].state_dict(), saved[name].state_dict()), name


def test_training_continues_while_the_file_is_written(tmp_path, monkeypatch):
    slow = FORK.Event()
    monkeypatch.setattr(os, "fsync", lambda file: slow.wait(60))
    state = make_state()
    weight = state["model"][0].weight
    before = weight.detach().clone()
    writer = checkpointer(tmp_path, state)
    writer.save(1)
    weight.data.zero_()
    assert not (tmp_path / "last.pt").exists()
    slow.set()
    writer.wait()
    assert torch.equal(read_checkpoint(tmp_path / "last.pt")["model"]["0.weight"], before)


def test_wrappers_leave_no_trace_but_a_models_own_module_does(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(2, 1)})
    wrapped = nn.DataParallel(MicroBatches(model, 2))
    assert unwrap(model) is unwrap(wrapped) is model
    save(tmp_path, pair(wrapped, torch.optim.SGD(model.parameters(), 0.1)))
    assert list(read_checkpoint(tmp_path / "last.pt")["model"]) == ["module.weight", "module.bias"]


def test_states_of_guards_are_saved(tmp_path):
    class Counts(Holds, Guard):
        pass

    resumed = Counts(0)
    save(tmp_path, make_state(), guards=[Counts(7)])
    assert read_checkpoint(tmp_path / "last.pt")["guards"] == {"Counts": {"value": 7}}
    assert checkpointer(tmp_path, guards=[Guard(), resumed]).load() == 1
    assert resumed.value == 7
    assert checkpointer(tmp_path).load() == 1  # a run without it
    with pytest.raises(UserError, match="second"):  # they would have one name
        checkpointer(tmp_path, guards=[Counts(7), Counts(8)])


# Optimizers


def build(kind, seed=0):
    """A pair of a model and an optimizer of this kind, which has taken a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return pair(model, kind(model))


KINDS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.1),
    "fused adam": lambda model: torch.optim.Adam(model.parameters(), 0.1, fused=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 0.1),
    "part of the model": lambda model: torch.optim.AdamW(model[1].parameters(), 0.1),
}


@pytest.mark.parametrize("kind", ["fused adam", "adafactor", "part of the model"])
def test_next_steps_are_those_of_the_saved_run(kind, tmp_path):
    saved, loaded = build(KINDS[kind]), build(KINDS[kind], seed=1)
    train(saved["model"], saved["optimizer"], steps=2)
    save(tmp_path, saved)
    checkpointer(tmp_path, loaded).load()
    for state in (saved, loaded):
        torch.manual_seed(5)
        train(state["model"], state["optimizer"], steps=2)
    for name in ("model", "optimizer"):
        assert same_bits(loaded[name].state_dict(), saved[name].state_dict())


def test_states_keep_their_dtypes(tmp_path):
    """As of an 8-bit optimizer, or of float32 averages of bfloat16 parameters. PyTorch's function
    would cast them, and take a step."""
    saved, loaded = build(KINDS["adamw"]), build(KINDS["adamw"])
    for state in (saved, loaded):
        state["model"].bfloat16()
    weight = saved["model"][0].weight
    values = {"average": torch.rand(3, 2), "codes": torch.ones(3, 2, dtype=torch.uint8), "n": 3}
    saved["optimizer"].state[weight] = values
    save(tmp_path, saved)
    loaded["optimizer"].register_step_pre_hook(lambda *args: pytest.fail("a step"))
    checkpointer(tmp_path, loaded).load()
    assert same_bits(loaded["optimizer"].state[loaded["model"][0].weight], values)


def test_states_have_the_memory_format_of_their_parameters(tmp_path):
    """A fused step expects it."""
    states = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.randn(1, 3, 5, 5)).sum().backward()
        optimizer.step()
        states.append(pair(model, optimizer))
    save(tmp_path, states[0])
    checkpointer(tmp_path, states[1]).load()
    momenta = [s["optimizer"].state[s["model"].weight]["momentum_buffer"] for s in states]
    assert torch.equal(*momenta)
    assert momenta[1].stride() == states[1]["model"].weight.stride() != momenta[0].stride()


def test_names_are_those_without_activation_checkpointing(tmp_path):
    saved = build(KINDS["momentum"])
    train(saved["model"], saved["optimizer"])
    save(tmp_path, saved)
    loaded = build(KINDS["momentum"], seed=1)
    loaded["model"][0] = checkpoint_wrapper(loaded["model"][0])
    checkpointer(tmp_path, loaded).load()
    momentum = loaded["optimizer"].state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(momentum, saved["optimizer"].state_dict()["state"][0]["momentum_buffer"])


def test_groups_come_back_but_not_how_a_step_is_computed(tmp_path):
    """OneCycleLR changes the betas. FSDP's parameters have no fused SGD, DDP's do."""
    saved, loaded = build(KINDS["fused adam"]), build(KINDS["adamw"])
    saved["optimizer"].param_groups[0]["betas"] = (0.8, 0.9)
    save(tmp_path, saved)
    checkpointer(tmp_path, loaded).load()
    (group,) = loaded["optimizer"].param_groups
    assert group["betas"] == (0.8, 0.9)
    assert not group["fused"]


def test_different_groups_are_refused(tmp_path):
    save(tmp_path, build(KINDS["momentum"]))
    state = build(lambda model: torch.optim.SGD([{"params": m.parameters()} for m in model], 0.1))
    with pytest.raises(UserError, match=r"1 .*groups"):
        checkpointer(tmp_path, state).load()


# Files


def test_best_last_and_the_newest_epochs_are_kept(tmp_path):
    for epoch in range(1, 5):
        save(tmp_path, make_state(), epoch, is_best=epoch == 2, keep_last=2)
    assert names_in(tmp_path) == ["best.pt", "epoch-0003.pt", "epoch-0004.pt", "last.pt"]
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 2
    assert (tmp_path / "last.pt").samefile(tmp_path / "epoch-0004.pt")  # no second copy


def test_files_are_copied_where_links_do_not_work(tmp_path, monkeypatch):
    def refuse(*names):
        raise OSError("no links on this file system")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, make_state(), epoch=1, is_best=True)
    assert names_in(tmp_path) == ["best.pt", "epoch-0001.pt", "last.pt"]
    assert [read_checkpoint(path)["epoch"] for path in tmp_path.iterdir()] == [1, 1, 1]


def test_save_between_steps_replaces_last_alone(tmp_path):
    state = make_state()
    save(tmp_path, state, 1, is_best=True)
    state["loader"].step = 3
    writer = checkpointer(tmp_path, state)
    writer.save(1, between_steps=True)
    writer.wait()
    assert names_in(tmp_path) == ["best.pt", "epoch-0001.pt", "last.pt"]
    assert read_checkpoint(tmp_path / "epoch-0001.pt")["loader"]["step"] == 0
    assert read_checkpoint(tmp_path / "last.pt")["loader"]["step"] == 3


def test_leftover_of_a_killed_run_is_no_second_name_of_a_checkpoint(tmp_path):
    save(tmp_path, make_state(), 1)
    os.link(tmp_path / "epoch-0001.pt", tmp_path / "epoch-0002.pt.tmp")
    save(tmp_path, make_state(), 2)
    assert read_checkpoint(tmp_path / "epoch-0001.pt")["epoch"] == 1


@pytest.mark.parametrize("name", ["best.pt", "epoch-0002.pt", "last.pt"])
def test_run_that_ends_between_two_files_repeats_the_epoch(name, tmp_path, monkeypatch):
    """The best is replaced first: the repeated epoch is the best again."""
    save(tmp_path, make_state(), 1, is_best=True)
    replace = os.replace

    def fail(source, target):
        if target == tmp_path / name:
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=name):
        save(tmp_path, make_state(), 2, is_best=True)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == (1 if name == "best.pt" else 2)
    assert not [*tmp_path.glob("*.tmp")]


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "epoch-0001-mine.pt").touch()
    save(tmp_path, make_state(), 9999)
    save(tmp_path, make_state(), 10_000, keep_last=1)
    assert [path.name for path in epoch_checkpoints(tmp_path)] == ["epoch-10000.pt"]
    assert "epoch-0001-mine.pt" in names_in(tmp_path)


# Damage


def test_run_killed_while_writing_keeps_the_file_before(tmp_path):
    save(tmp_path, make_state(), 1)

    def body():
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        save(tmp_path, make_state(), 2)

    assert in_fork(body) == -signal.SIGKILL
    assert names_in(tmp_path) == ["epoch-0001.pt", "epoch-0002.pt.tmp", "last.pt"]
    assert checkpointer(tmp_path).load() == 1


def test_file_before_a_damaged_one_is_used(tmp_path, capsys):
    save(tmp_path, make_state(), 1)
    save(tmp_path, make_state(), 2)
    os.truncate(tmp_path / "last.pt", 1000)  # and so epoch-0002.pt
    assert checkpointer(tmp_path).load() == 1
    assert f"{tmp_path}/last.pt" in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1  # a finished run saves no more
    for name in ("last.pt", "epoch-0001.pt"):
        os.truncate(tmp_path / name, 0)
    with pytest.raises(UserError, match="--output-dir"):
        checkpointer(tmp_path).load()


def test_flipped_bit_is_noticed(tmp_path):
    """torch.load alone would not."""
    path, state = tmp_path / "last.pt", make_state()
    save(tmp_path, state)
    content = bytearray(path.read_bytes())
    content[content.index(state["model"][0].weight.detach().numpy().tobytes())] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    with pytest.raises(UserError, match=r"last\.pt"):
        read_checkpoint(path)


def test_file_that_cannot_be_read_now_is_not_passed_over(tmp_path, monkeypatch):
    """Stale handles and lost servers pass; an older checkpoint would lose work."""
    save(tmp_path, make_state())

    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(utils.checkpoint.zipfile, "ZipFile", fail)
    with pytest.raises(OSError, match="Input/output"):
        newest_good_checkpoint(tmp_path)


class Malicious:
    """A pickle that would run code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_file_of_a_different_kind_is_refused(tmp_path):
    path, malicious = tmp_path / "x.pt", Malicious(tmp_path / "ran")
    for content in ([1], {"format": FORMAT - 1}, {"format": FORMAT, "x": malicious}):
        torch.save(content, path)
        with pytest.raises(UserError, match=r"x\.pt"):
            read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


# Errors of writing


def no_space(file):
    raise OSError(28, "No space left on device")


def test_error_surfaces_at_the_next_save(tmp_path, monkeypatch):
    def body(rank):
        writer = checkpointer(tmp_path)
        writer.save(1)
        writer.wait()
        monkeypatch.setattr(os, "fsync", no_space)
        writer.save(2)
        return outcome(lambda: writer.save(3))

    (kind, text), (other, _) = run_ranks(body, 2)
    assert (kind, other) == (UserError, PeerError)
    assert "epoch-0002.pt" in text and "No space left" in text
    assert names_in(tmp_path) == ["epoch-0001.pt", "last.pt"]


def test_last_save_of_a_run_raises_its_error_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match="No space left"):
        checkpointer(tmp_path, epochs=2).save(2)


@pytest.mark.parametrize("free", [0, 10**5])
def test_full_disk_is_one_line(free, tmp_path):
    """torch.save raises an error about positions, before or after that of the disk."""
    texts = FORK.Queue()

    def body():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, free))
        texts.put(outcome(lambda: save_atomically(torch.zeros(10**6), tmp_path / "a.pt")))

    assert in_fork(body) == 0
    kind, text = texts.get(timeout=10)
    assert kind is UserError
    assert "a.pt" in text and "too large" in text and "\n" not in text
    assert not names_in(tmp_path)


class Holds:
    """An entry of `state` that holds a value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_file_that_torch_load_refuses_replaces_none(tmp_path):
    save(tmp_path, make_state())
    before = names_in(tmp_path)
    writer = checkpointer(tmp_path, make_state() | {"mine": Holds(numpy.arange(2))})
    writer.save(1, between_steps=True)
    with pytest.raises(UserError, match="numpy") as caught:
        writer.wait()
    assert "\n" not in str(caught.value)
    assert names_in(tmp_path) == before and read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_part_of_a_tensor_is_refused(tmp_path):
    """As of averaged parameters under FSDP: each rank would load rank 0's part."""

    def body(rank):
        mesh = init_device_mesh("cpu", (1,))
        part = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        save(tmp_path, make_state() | {"mine": Holds(part)})

    (error,) = run_ranks(body, 1)
    assert isinstance(error, UserError) and "full_tensor" in str(error)


# When it saves


def test_steps_are_saved_but_not_the_last_of_an_epoch(tmp_path):
    state, steps = make_state(), []
    writer = checkpointer(tmp_path, state, save_steps=2)
    writer.save = lambda epoch, between_steps: steps.append(state["loader"].step)
    for state["loader"].step in range(1, 6):
        writer.step()
    assert steps == [2, 4]


def test_epochs_are_left_out_unless_due_best_or_last(tmp_path):
    writer = checkpointer(tmp_path, save_epochs=3, epochs=7, keep_last=9)
    for epoch in range(1, 8):
        writer.save(epoch, is_best=epoch == 2)
    names = ["best.pt", *(f"epoch-000{n}.pt" for n in (2, 3, 6, 7)), "last.pt"]
    assert names_in(tmp_path) == names


def test_requested_save_follows_its_step_once(tmp_path):
    state = make_state()
    writer = checkpointer(tmp_path, state)
    writer.request_save()
    for state["loader"].step in (1, 2):
        writer.step()
    writer.wait()
    assert read_checkpoint(tmp_path / "last.pt")["loader"]["step"] == 1


def test_request_in_the_last_step_of_an_epoch_saves_the_epoch(tmp_path):
    """Although save_epochs leaves it out: a run of one step per epoch could not be stopped."""
    state = make_state()
    writer = checkpointer(tmp_path, state, save_epochs=9)
    state["loader"].step = 5
    writer.request_save()
    writer.step()
    assert not names_in(tmp_path)
    writer.save(1)
    writer.save(2)
    writer.wait()
    assert names_in(tmp_path) == ["epoch-0001.pt", "last.pt"]


# What does not fit


def test_changed_settings_are_named(tmp_path):
    save(tmp_path, make_state())
    assert checkpointer(tmp_path, keep_last=5, num_workers=3).load() == 1
    with pytest.raises(UserError) as caught:
        checkpointer(tmp_path, lr=0.2, optimizer="adamw").load()
    for part in ("lr", "0.2", "0.1", "adamw", "sgd", "--allow-config-change"):
        assert part in str(caught.value)
    assert "momentum" not in str(caught.value)
    with pytest.raises(UserError, match="classes"):
        checkpointer(tmp_path, make_state() | {"data": {"classes": ["a"]}}).load()


def test_allowed_change_takes_effect_at_the_same_place_of_the_schedule(tmp_path):
    saved = make_state()  # after one step, of which the rate is halved
    saved["optimizer"].param_groups[0]["weight_decay"] = 0.5
    save(tmp_path, saved)
    loaded = make_state(seed=1, lr=0.6)
    checkpointer(tmp_path, loaded, lr=0.6, allow_config_change=True).load()
    (group,) = loaded["optimizer"].param_groups
    assert group["lr"] == pytest.approx(0.3)
    assert group["weight_decay"] == 0
    assert same_bits(loaded["model"].state_dict(), saved["model"].state_dict())


@pytest.mark.parametrize("save_sharded", [False, True])
def test_optimizer_of_a_different_kind_starts_afresh(save_sharded, tmp_path):
    save(tmp_path, build(KINDS["momentum"]), save_sharded=save_sharded)
    loaded = build(KINDS["adagrad"])
    before = loaded["optimizer"].state_dict()
    checkpointer(tmp_path, loaded, optimizer="adamw", allow_config_change=True).load()
    assert same_bits(loaded["optimizer"].state_dict(), before)


def test_order_of_the_samples_stays_within_an_epoch(tmp_path):
    """The rest of the epoch would repeat some samples, and leave out others."""
    state = make_state()
    save(tmp_path, state)
    assert checkpointer(tmp_path, seed=1, allow_config_change=True).load() == 1
    state["loader"].step = 2
    save(tmp_path, state)
    with pytest.raises(UserError, match="seed"):
        checkpointer(tmp_path, seed=1, allow_config_change=True).load()


def test_different_model_is_named(tmp_path):
    save(tmp_path, make_state())
    with pytest.raises(UserError, match=r"0\.bias"):
        checkpointer(tmp_path, make_state(width=4)).load()


def test_entries_of_state_are_compared_by_name(tmp_path):
    state = make_state()
    save(tmp_path, state | {"average": Holds(1)})
    for entries, name in (({}, "average"), ({"ema": Holds(1)}, "average, ema")):
        with pytest.raises(UserError, match=name):
            checkpointer(tmp_path, state | entries).load()
    disabled = torch.amp.GradScaler("cpu", enabled=False)  # has no state
    entries = {"average": Holds(0), "scaler": disabled}
    assert checkpointer(tmp_path, state | entries).load() == 1
    assert entries["average"].value == 1


def test_entry_that_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(UserError, match="mine"):
        checkpointer(tmp_path, make_state() | {"mine": [1]})


def test_resume_never_and_always(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=str(tmp_path)):
        checkpointer(tmp_path, resume="always").load()
    assert checkpointer(tmp_path, resume="never").load() == 0
    save(tmp_path, make_state())
    assert checkpointer(tmp_path, resume="always").load() == 1
    with pytest.raises(UserError, match=str(tmp_path)):
        checkpointer(tmp_path, resume="never").load()
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")  # the job has written these files itself
            assert checkpointer(tmp_path, resume="never").load() == 1


# Several ranks


def test_slow_disk_may_outlast_the_timeout_but_not_a_rank_that_takes_no_part(tmp_path):
    def body(rank):
        writer = checkpointer(tmp_path, timeout=4.0)
        writer.writer.submit(time.sleep, 6)  # the file is written after that
        writer.save(1)
        writer.wait()
        if rank == 0:
            writer.save(2)
        raise PeerError  # rank 1 takes no part, but its connections stay open

    first, _ = run_ranks(body, 2, timeout=4)
    assert isinstance(first, RuntimeError)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_nodes_that_see_different_files_are_refused(tmp_path):
    save(tmp_path / "0", make_state(), 1)
    save(tmp_path / "1", make_state(), 2)

    def body(rank):
        os.chdir(tmp_path / str(rank))
        with pytest.raises(UserError, match=r"rank 1.*share"):
            checkpointer(".").load()

    assert run_ranks(body, 2) == [None, None]
