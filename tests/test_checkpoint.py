"""Checkpoints: plain inside, whole or absent on the disk, refused where they do not fit."""

import os
import random
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import utils.checkpoint
from tests.launch import ROOT, run_ranks, save_now
from utils.checkpoint import load_checkpoint, read_checkpoint, unwrap
from utils.distributed import PeerError, UserError


def make_state(width=3, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler.scale(model(torch.randn(4, 2)).sum()).backward()
    scaler.step(optimizer)
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    return state | {"config": {"lr": 0.1, "model": "m"}}


def same(ours, theirs):
    return all(
        torch.equal(a, b)
        for a, b in zip(*(s["model"].state_dict().values() for s in (ours, theirs)), strict=True)
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    state = make_state()
    save_now(tmp_path, state, epoch=3)
    plain = torch.load(tmp_path / "last.pt", weights_only=True)
    assert list(plain["model"]) == list(state["model"].state_dict())
    assert (plain["epoch"], plain["world_size"], plain["config"]) == (3, 1, state["config"])
    other = make_state(seed=1)
    assert not same(other, state)
    assert load_checkpoint(tmp_path, other) == 3
    assert same(other, state)
    for name in ("optimizer", "scheduler", "scaler"):
        assert str(other[name].state_dict()) == str(state[name].state_dict())


def test_no_wrapper_leaves_a_trace(tmp_path):
    model = make_state()["model"]
    wrapped = torch.nn.DataParallel(torch.compile(model))
    assert unwrap(wrapped) is model

    def body(rank):
        state = make_state(seed=rank)
        state["model"] = DistributedDataParallel(state["model"])
        save_now(tmp_path, state, 1)
        return load_checkpoint(tmp_path, state | {"model": make_state()["model"]})

    assert run_ranks(body, 2) == [1, 1]
    checkpoint = read_checkpoint(tmp_path / "last.pt")
    assert list(checkpoint["model"]) == list(model.state_dict())
    assert checkpoint["world_size"] == 2


def test_last_best_and_the_newest_few(tmp_path, monkeypatch):
    state = make_state()
    for epoch, is_best in enumerate([True, True, False, False], start=1):
        save_now(tmp_path, state, epoch, is_best, keep_last=2)
    names = ["best.pt", "epoch-0003.pt", "epoch-0004.pt", "last.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 2
    monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError("no links here")))
    save_now(tmp_path, state, 5, is_best=True, keep_last=1)
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.pt",
        "epoch-0005.pt",
        "last.pt",
    ]


@pytest.mark.parametrize("part", [0, 0.01, 0.5, 0.99])
def test_a_torn_file_is_passed_over(part, tmp_path, capsys):
    state = make_state()
    save_now(tmp_path, state, 1)
    save_now(tmp_path, state, 2)
    os.truncate(tmp_path / "last.pt", int(part * (tmp_path / "last.pt").stat().st_size))
    assert load_checkpoint(tmp_path, state) == 1
    assert "last.pt cannot be read" in (text := capsys.readouterr().err)
    assert f"resuming from {tmp_path / 'epoch-0001.pt'}" in text
    os.truncate(tmp_path / "epoch-0001.pt", 10)
    with pytest.raises(UserError, match=r"Pass --resume never"):
        load_checkpoint(tmp_path, state)


def test_a_flipped_bit_is_refused_where_torch_load_is_blind(tmp_path):
    path = tmp_path / "last.pt"
    save_now(tmp_path, make_state(), 1)
    with zipfile.ZipFile(path) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
    data = bytearray(path.read_bytes())
    weight = make_state()["model"][0].weight.detach().numpy().tobytes()
    data[data.index(weight, record.header_offset)] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)
    with pytest.raises(UserError, match=r"cannot be read|is damaged"):
        read_checkpoint(path)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/evil-was-here",)


@pytest.mark.parametrize(
    ("content", "message"), [({"format": 1, "x": Evil()}, "cannot be read"), ([1], "not a checkp")]
)
def test_what_is_no_checkpoint_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=message):
        read_checkpoint(tmp_path / "x.pt")
    assert not os.path.exists("/tmp/evil-was-here")


def test_resume_always_and_never(tmp_path):
    state = make_state()
    with pytest.raises(UserError, match=r"no checkpoint in .* to resume from"):
        load_checkpoint(tmp_path, state, resume="always")
    save_now(tmp_path, state, 1)
    assert load_checkpoint(tmp_path, state, resume="always") == 1
    for number in (1, 2):
        assert load_checkpoint(tmp_path, state, resume="never") == 0
        save_now(tmp_path, state, 1)
        assert (tmp_path / f"previous-{number}" / "last.pt").exists()


def test_other_settings_are_named(tmp_path):
    state = make_state()
    save_now(tmp_path, state, 1)
    assert load_checkpoint(tmp_path, state, must_match={"lr": 0.1, "new": 1}) == 1
    with pytest.raises(UserError, match=r"lr was 0.1 and is 0.2; model was 'm' and is 'n'"):
        load_checkpoint(tmp_path, state, must_match={"lr": 0.2, "model": "n"})


def test_another_model_is_named_tensor_by_tensor(tmp_path):
    save_now(tmp_path, make_state(), 1)
    with pytest.raises(UserError, match=r"0\.weight is \(3, 2\), here \(4, 2\).* and 1 more"):
        load_checkpoint(tmp_path, make_state(width=4))
    state = make_state() | {"model": torch.nn.Linear(2, 3)}
    with pytest.raises(UserError, match=r"weight is missing.*0\.weight is not in this model"):
        load_checkpoint(tmp_path, state)


def test_one_run_a_folder(tmp_path):
    code = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from utils.checkpoint import load_checkpoint
load_checkpoint({str(tmp_path)!r}, {{}}); print("mine", flush=True); time.sleep(60)
"""
    (tmp_path / "epoch-0009.pt.tmp").touch()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(UserError, match="another run is writing to"):
        load_checkpoint(tmp_path, make_state())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert load_checkpoint(tmp_path, make_state()) == 0


def test_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        load_checkpoint(tmp_path / "file" / "run", make_state())


def test_all_ranks_raise_and_nodes_must_share_the_folder(tmp_path):
    save_now(tmp_path / "rank0", make_state(), 1)

    def body(rank, same_folder):
        folder = tmp_path / ("rank0" if same_folder else f"rank{rank}")
        try:
            return load_checkpoint(folder, make_state(width=3 + same_folder))
        except Exception as error:
            return error

    apart = run_ranks(body, 2, False)
    assert [type(error) for error in apart] == [PeerError, UserError]
    assert "file system that all nodes share" in str(apart[1])
    assert [type(error) for error in run_ranks(body, 2, True)] == [UserError, UserError]


SAVING = """
import sys; sys.path.insert(0, {root!r})
import torch
from utils.checkpoint import save_checkpoint
state = {{"model": torch.nn.Linear(700, 700)}}
for epoch in range(1, 10**6):
    save_checkpoint({folder!r}, state, epoch)
"""


def test_killed_while_saving_leaves_a_good_file(tmp_path):
    code = SAVING.format(root=str(ROOT), folder=str(tmp_path))
    chance = random.Random(0)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", code])
        for path in tmp_path.iterdir():
            path.unlink()
        end = time.monotonic() + 60
        while not (tmp_path / "last.pt").exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(chance.random() / 4)
        process.kill()
        process.wait()
        assert read_checkpoint(tmp_path / "last.pt")["epoch"] >= 1
        state = {"model": torch.nn.Linear(700, 700)}
        assert load_checkpoint(tmp_path, state) >= 1
    assert utils.checkpoint.FORMAT == 1
