"""Checkpoints in parts: saved by any number of ranks, read by any other."""

import errno
import os
import pickle
import re
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.processes import run_ranks
from tests.utils.test_checkpoint import checkpointer, make_state
from tests.utils.test_checkpoint import save as save_run
from tests.utils.test_checkpoint_file import Malicious
from utils.checkpoint_file import read_checkpoint
from utils.errors import UserError
from utils.options import sharded
from utils.options.sharded import (
    check_sharded,
    join_tensors,
    load_sharded,
    remove_unused_parts,
    save_sharded,
    split_tensors,
)


def make(seed, sharded=False):
    """A model and an optimizer that has taken two steps, as a checkpoint of live tensors."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    tensors, state = get_state_dict(model, optimizer)
    return {"epoch": 3, "model": tensors, "optimizer": state, "note": "x"}


def save(folder, checkpoint, name="last.pt"):
    """What Checkpointer does: the parts, and the file with everything else."""
    folder.mkdir(exist_ok=True)
    rest = save_sharded(checkpoint, folder)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(rest, folder / name)
    return rest


def read(path):
    checkpoint = torch.load(path, weights_only=True)
    check_sharded(path, checkpoint)
    return load_sharded(path, checkpoint)


def full(checkpoint):
    """The tensors by name, as a whole."""
    tensors, _ = split_tensors(checkpoint)
    return {
        name: t.full_tensor().detach() if isinstance(t, DTensor) else t.detach()
        for name, t in tensors.items()
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype, name


def test_tensors_are_split_off_and_joined_again():
    tensor = torch.ones(2)
    state = {"a/b.c": {"momentum_buffer": tensor, "step": 3}, "fc.weight": {"exp_avg": tensor}}
    checkpoint = {
        "model": {"a/b.c": tensor, "fc.weight": tensor, "model/x": tensor},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]},
        "epoch": 1,
    }
    tensors, rest = split_tensors(checkpoint)
    assert len(tensors) == 5 and all(value is tensor for value in tensors.values())
    assert rest["model"] == {} and rest["optimizer"]["state"]["a/b.c"] == {"step": 3}
    assert checkpoint["model"] and checkpoint["optimizer"]["state"] is state  # left as they were
    joined = join_tensors(tensors, rest)
    assert joined == checkpoint and joined["optimizer"]["state"] == state


def test_extra_state_that_is_no_tensor_stays_in_the_file():
    tensor = torch.ones(2)
    checkpoint = {
        "model": {"weight": tensor, "_extra_state": {"recipe": "x", "scale": tensor}},
        "optimizer": {"state": {}, "param_groups": []},
    }
    tensors, rest = split_tensors(checkpoint)
    assert list(tensors) == ["model/weight"]
    assert rest["model"] == {"_extra_state": checkpoint["model"]["_extra_state"]}
    assert join_tensors(tensors, rest) == checkpoint


def test_saved_by_two_ranks_read_by_one_and_by_three(tmp_path):
    def save_shards(rank):
        checkpoint = make(seed=0, sharded=True)
        save(tmp_path, checkpoint)
        rows = len(checkpoint["model"]["0.weight"].to_local())
        return rows, {name: t.numpy() for name, t in full(checkpoint).items()}

    (rows, expected), (other_rows, _) = run_ranks(save_shards, 2)
    assert rows + other_rows == 7 and rows != other_rows  # in parts indeed
    expected = {name: torch.from_numpy(array) for name, array in expected.items()}
    checkpoint = read(tmp_path / "last.pt")
    assert_same(full(checkpoint), expected)
    assert (checkpoint["epoch"], checkpoint["note"]) == (3, "x")
    assert checkpoint["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert {path.name[:4] for path in next(tmp_path.glob("*.parts")).iterdir()} == {
        *("__0_", "__1_", ".met")
    }

    plain = make(seed=1)
    like = plain["model"], plain["optimizer"]
    loaded = load_sharded(tmp_path / "last.pt", torch.load(tmp_path / "last.pt"), like)
    assert_same(full(loaded), expected)
    assert not torch.equal(plain["model"]["0.weight"], loaded["model"]["0.weight"])  # copies

    def load_shards(rank):
        checkpoint = make(seed=1, sharded=True)
        like = checkpoint["model"], checkpoint["optimizer"]
        loaded = load_sharded(tmp_path / "last.pt", torch.load(tmp_path / "last.pt"), like)
        weight = loaded["model"]["0.weight"]
        assert isinstance(weight, DTensor) and len(weight.to_local()) <= 3
        assert isinstance(loaded["optimizer"]["state"]["0.weight"]["exp_avg"], DTensor)
        return {name: t.numpy() for name, t in full(loaded).items()}

    for arrays in run_ranks(load_shards, 3):
        assert_same({name: torch.from_numpy(a) for name, a in arrays.items()}, expected)


def test_another_model_gets_the_stored_shapes(tmp_path, recwarn):
    """So that the caller can name the differences. A single process causes no warning."""
    save(tmp_path, make(seed=0))
    other = {"0.weight": torch.zeros(2, 2)}, {"state": {}, "param_groups": []}
    loaded = load_sharded(tmp_path / "last.pt", torch.load(tmp_path / "last.pt"), other)
    assert loaded["model"]["0.weight"].shape == (7, 5) and "2.bias" in loaded["model"]
    assert_same(full(loaded), full(read(tmp_path / "last.pt")))
    assert not [w for w in recwarn if "torch.distributed" in str(w.message)]


def test_damaged_and_missing_parts_are_named(tmp_path):
    save(tmp_path, make(seed=0))
    part = max(next(tmp_path.glob("*.parts")).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(UserError, match=rf"{part.name} is damaged"):
        read(tmp_path / "last.pt")
    part.unlink()
    with pytest.raises(UserError, match=rf"{part.name} is missing"):
        read(tmp_path / "last.pt")


def test_damaged_or_missing_part_of_a_sharded_checkpoint_is_passed_over(tmp_path, capsys):
    state = make_state()
    for epoch in (1, 2, 3):
        save_run(tmp_path, state, epoch, save_sharded=True, keep_last=3)
    assert len(list(tmp_path.glob("*.parts"))) == 3
    for epoch, damage in ((3, lambda path: os.truncate(path, 100)), (2, os.unlink)):
        folder = torch.load(tmp_path / f"epoch-000{epoch}.pt")["parts"]["folder"]
        damage(max((tmp_path / folder).iterdir(), key=lambda path: path.stat().st_size))
    assert checkpointer(tmp_path, make_state(seed=1)).load() == 1
    text = capsys.readouterr().err
    assert "is damaged; trying" in text and "is missing; trying" in text
    save_run(tmp_path, state, 4, keep_last=1)
    assert not list(tmp_path.glob("*.parts"))  # removed with the last checkpoint that used them


def test_unused_parts_are_removed(tmp_path):
    checkpoint = make(seed=0)
    for name in ("epoch-0001.pt", "last.pt", "last.pt"):
        save(tmp_path, checkpoint, name)
    (tmp_path / "of-a-killed-run.parts").mkdir()
    (tmp_path / "torn.pt").write_text("damaged, and without parts")
    remove_unused_parts(tmp_path)
    used = {torch.load(path)["parts"]["folder"] for path in tmp_path.glob("[el]*.pt")}
    assert {path.name for path in tmp_path.glob("*.parts")} == used and len(used) == 2
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    remove_unused_parts(tmp_path)
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        MemoryError("no memory"),
        RuntimeError("PytorchStreamReader failed reading file data/0: Input/output error"),
    ],
    ids=repr,
)
def test_error_of_reading_that_may_pass_removes_no_parts(error, tmp_path, monkeypatch, capsys):
    save(tmp_path, make(seed=0), "epoch-0001.pt")
    save(tmp_path, make(seed=0), "epoch-0002.pt")

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    remove_unused_parts(tmp_path)
    text = capsys.readouterr().err
    assert text.startswith("warning: no parts ") and text.count("\n") == 1
    monkeypatch.undo()
    for name in ("epoch-0001.pt", "epoch-0002.pt"):
        assert read(tmp_path / name)["epoch"] == 3
    (tmp_path / "epoch-0002.pt").unlink()
    remove_unused_parts(tmp_path)
    assert len(list(tmp_path.glob("*.parts"))) == 1


@pytest.mark.parametrize(
    "content", [b"", b"x", b"PK\x03\x04 and no end", None], ids=["empty", "text", "cut", "flipped"]
)
def test_damaged_file_needs_no_parts(content, tmp_path):
    save(tmp_path, make(seed=0), "epoch-0001.pt")
    path = tmp_path / "epoch-0001.pt"
    if content is None:
        content = path.read_bytes().replace(b"parts", b"PARTS")
    path.write_bytes(content)
    remove_unused_parts(tmp_path)
    assert not list(tmp_path.glob("*.parts"))


def test_deleted_folder_is_not_made_again(tmp_path):
    """It would be without its lock, config.yaml and best.pt."""
    with pytest.raises(UserError, match=r"cannot save .*\.parts: No such file"):
        save_sharded(make(seed=0), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("broken", ["_checksum", "remove_unused_parts"])
def test_error_of_the_disk_is_one_line(broken, tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sharded, broken, fail)
    with pytest.raises(UserError, match=r"cannot save .*\.parts: Input/output error"):
        save_sharded(make(seed=0), tmp_path)


def test_full_disk_ends_all_ranks_and_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    def body(rank):
        checkpoint = make(seed=rank, sharded=True)
        save(tmp_path, checkpoint)
        torch.distributed.barrier()
        monkeypatch.setattr(torch.distributed.checkpoint.filesystem.os, "fsync", no_space)
        save(tmp_path, checkpoint)

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError)
        assert "No space left" in str(error) and "checkpoint before" in str(error)
    assert read(tmp_path / "last.pt")["epoch"] == 3
    assert len(list(tmp_path.glob("*.parts"))) == 1  # nothing is left to keep the disk full


def test_parts_of_a_killed_run_make_room_for_the_next_save(tmp_path):
    (tmp_path / "epoch-0002-cut.parts").mkdir()
    save(tmp_path, make(seed=0))
    assert "epoch-0002-cut.parts" not in os.listdir(tmp_path)


def no_space(_):
    raise OSError(28, "No space left on device")


def test_disk_per_node_is_refused(tmp_path, monkeypatch):
    """Each rank writes to a different folder, which the other does not see."""

    def body(rank):
        monkeypatch.chdir((tmp_path / str(rank)).resolve())
        save_sharded(make(seed=0, sharded=True), Path("run"))

    for rank in range(2):
        (tmp_path / str(rank) / "run").mkdir(parents=True)
    first, _ = run_ranks(body, 2)
    assert isinstance(first, UserError), first
    assert "put output_dir" in str(first) and "all nodes share" in str(first)
    assert os.listdir(tmp_path / "1" / "run")


# Files from elsewhere


@pytest.fixture
def planted(tmp_path):
    """A good sharded checkpoint, as (path, a function that replaces a part, its checksum as well,
    and the place that a Malicious pickle would create)."""
    save_run(tmp_path, make_state(), save_sharded=True, keep_last=1)
    path = tmp_path / "last.pt"

    def replace(name, content, **parts):
        saved = torch.load(path)
        (tmp_path / saved["parts"]["folder"] / name).write_bytes(content)
        saved["parts"] |= parts
        saved["parts"]["files"][name] = zlib.crc32(content)
        torch.save(saved, path)

    return path, replace, tmp_path / "ran"


def outcomes(path):
    """What reading and resuming say; both raise UserError."""
    texts = []
    for read_it in (read_checkpoint, lambda path: checkpointer(path.parent).load()):
        with pytest.raises(UserError) as caught:
            read_it(path)
        texts.append(str(caught.value))
    return texts


def test_malicious_index_is_refused(planted):
    """Its checksum is in the same file, and right."""
    path, replace, place = planted
    for unused in path.parent.glob("[eb]*.pt"):
        unused.unlink()
    replace(".metadata", pickle.dumps(Malicious(place)))
    for text in outcomes(path):
        assert ".metadata" in text and "posix.mkdir" in text
    from tasks.images.weights import load_weights

    with pytest.raises(UserError, match=r"posix\.mkdir"):
        load_weights(nn.Sequential(nn.Linear(2, 3)), "resnet18", str(path))
    assert not place.exists()


def test_index_cannot_name_what_pytorch_unpickles(planted):
    path, replace, place = planted
    index = FileSystemReader(next(path.parent.glob("*.parts"))).read_metadata()
    entry = index.state_dict_metadata["model/0.bias"]
    disguised = BytesStorageMetadata()
    vars(disguised).update(vars(entry))
    index.state_dict_metadata["model/0.bias"] = disguised
    replace("__0_0.distcp", pickle.dumps(Malicious(place)))
    replace(".metadata", pickle.dumps(index))
    assert all("BytesStorageMetadata" in text for text in outcomes(path))
    assert not place.exists()


@pytest.mark.parametrize("name", ["../x.parts", "..", "/x.parts", "x/y.parts"])
def test_parts_of_a_checkpoint_are_beside_it(planted, name):
    path, replace, _ = planted
    replace(".metadata", b"", folder=name)
    with pytest.raises(UserError, match=f" {re.escape(name)}, .*not trust"):
        read_checkpoint(path)


def test_index_cannot_lead_to_other_files(planted):
    path, replace, _ = planted
    index = FileSystemReader(next(path.parent.glob("*.parts"))).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = str(path)
    replace(".metadata", pickle.dumps(index))
    assert all("other files" in text and str(path) in text for text in outcomes(path))
