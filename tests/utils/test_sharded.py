"""Checkpoints in parts: saved by any number of ranks, read by any other."""

import os
import pickle
import zlib

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.forked import same_bits
from tests.processes import run_ranks
from tests.utils.test_checkpoint import Malicious, checkpointer, no_space, pair, save
from utils.checkpoint import read_checkpoint
from utils.errors import UserError
from utils.options.sharded import (
    check_parts,
    join_parts,
    join_tensors,
    remove_unused_parts,
    split_tensors,
)


def build(seed=0, is_divided=False):
    """A run that has taken two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if is_divided:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return pair(model, optimizer)


def save_parts(folder, epoch=1, **settings):
    save(folder, build(), epoch, save_sharded=True, **settings)


def parts_of(path):
    return path.parent / torch.load(path)["parts"]["folder"]


def test_tensors_are_split_off_and_joined_again():
    tensor = torch.ones(2)
    extra = {"recipe": "x", "scale": tensor}  # of get_extra_state()
    state = {"a/b.c": {"momentum_buffer": tensor, "step": 3}}
    contents = {
        "model": {"a/b.c": tensor, "_extra_state": extra},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]},
        "epoch": 1,
    }
    tensors, rest = split_tensors(contents)
    assert len(tensors) == 2
    assert rest["model"] == {"_extra_state": extra}
    assert rest["optimizer"]["state"]["a/b.c"] == {"step": 3}
    assert join_tensors(tensors, rest) == contents


def test_run_continues_from_parts_without_the_flag_and_back(tmp_path, recwarn):
    save_parts(tmp_path)
    state = build(seed=1)
    assert checkpointer(tmp_path, state).load() == 1
    for name in ("model", "optimizer"):
        assert same_bits(state[name].state_dict(), build()[name].state_dict())
    save(tmp_path, state, 2)
    assert "parts" not in torch.load(tmp_path / "last.pt")
    assert checkpointer(tmp_path, build(seed=2), save_sharded=True).load() == 2
    assert not [w for w in recwarn if "torch.distributed" in str(w.message)]


def test_stage_of_a_pipeline_reads_only_its_part(tmp_path):
    save_parts(tmp_path)
    contents = read_checkpoint(tmp_path / "last.pt", join_parts=False)
    stage = nn.Sequential(nn.Linear(5, 7))
    joined = join_parts(tmp_path, contents, stage)
    assert torch.equal(joined["model"]["0.weight"], build()["model"][0].weight)
    assert joined["model"]["2.weight"].is_meta and joined["model"]["2.weight"].shape == (3, 7)
    assert joined["optimizer"]["state"]["0.weight"]["step"] == 2
    assert joined["optimizer"]["state"]["2.weight"]["exp_avg"].is_meta


def test_damaged_and_missing_parts_are_passed_over(tmp_path, capsys):
    for epoch in (1, 2, 3):
        save_parts(tmp_path, epoch, keep_last=3)
    os.truncate(parts_of(tmp_path / "epoch-0003.pt") / "__0_0.distcp", 100)
    os.unlink(parts_of(tmp_path / "epoch-0002.pt") / "__0_0.distcp")
    assert checkpointer(tmp_path, build()).load() == 1
    text = capsys.readouterr().err
    assert "damaged" in text and "missing" in text


def test_unused_parts_are_removed(tmp_path):
    (tmp_path / "of-a-killed-run.parts").mkdir()
    for epoch in (1, 2, 3):
        save_parts(tmp_path, epoch, keep_last=2)
    used = {parts_of(path) for path in tmp_path.glob("*.pt")}
    assert len(used) == 2 and set(tmp_path.glob("*.parts")) == used
    torch.save(nn.Linear(1, 1), tmp_path / "model.pt")  # of the user
    for path in tmp_path.glob("[el]*.pt"):
        path.unlink()
    remove_unused_parts(tmp_path)
    assert not list(tmp_path.glob("*.parts"))


def test_file_that_cannot_be_read_may_need_its_parts(tmp_path, capsys):
    save_parts(tmp_path)
    for path in tmp_path.glob("*.pt"):
        os.truncate(path, 500)
    remove_unused_parts(tmp_path)
    assert len(list(tmp_path.glob("*.parts"))) == 1
    assert "warning" in capsys.readouterr().err


def test_full_disk_ends_all_ranks_and_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    def body(rank):
        state = build(is_divided=True)
        save(tmp_path, state, 1, save_sharded=True)
        monkeypatch.setattr(filesystem.os, "fsync", no_space)
        save(tmp_path, state, 2, save_sharded=True)

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError) and "No space left" in str(error)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1
    assert len(list(tmp_path.glob("*.parts"))) == 1  # nothing is left to keep the disk full


# Files from elsewhere


def replace_part(path, name, content):
    """Replace a part of the checkpoint in the file `path`, and its checksum."""
    contents = torch.load(path)
    (parts_of(path) / name).write_bytes(content)
    contents["parts"]["files"][name] = zlib.crc32(content)
    torch.save(contents, path)


def test_malicious_index_is_refused(tmp_path):
    save_parts(tmp_path)
    replace_part(tmp_path / "last.pt", ".metadata", pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(UserError, match=r"posix\.mkdir"):
        read_checkpoint(tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"posix\.mkdir"):
        checkpointer(tmp_path, build()).load()
    assert not (tmp_path / "ran").exists()


def test_index_cannot_name_what_pytorch_unpickles(tmp_path):
    save_parts(tmp_path)
    path = tmp_path / "last.pt"
    index = FileSystemReader(parts_of(path)).read_metadata()
    disguised = BytesStorageMetadata()
    vars(disguised).update(vars(index.state_dict_metadata["model/0.bias"]))
    index.state_dict_metadata["model/0.bias"] = disguised
    replace_part(path, "__0_0.distcp", pickle.dumps(Malicious(tmp_path / "ran")))
    replace_part(path, ".metadata", pickle.dumps(index))
    with pytest.raises(UserError, match="BytesStorageMetadata"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_index_cannot_lead_to_other_files(tmp_path):
    save_parts(tmp_path)
    path = tmp_path / "last.pt"
    index = FileSystemReader(parts_of(path)).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = str(path)
    replace_part(path, ".metadata", pickle.dumps(index))
    with pytest.raises(UserError, match=str(path)):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["../x.parts", "..", "/x.parts"])
def test_parts_of_a_checkpoint_are_beside_it(tmp_path, name):
    for parts in ({"folder": name, "files": {}}, {"folder": "x.parts", "files": {name: 0}}):
        with pytest.raises(UserError, match=name):
            check_parts(tmp_path, {"parts": parts})
        with pytest.raises(UserError, match=name):
            join_parts(tmp_path, {"parts": parts})
