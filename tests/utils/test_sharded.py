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
from torch.distributed.tensor import DTensor

from tests.processes import run_ranks
from utils.checkpoint import Checkpointer, Weights, read_checkpoint
from utils.config import Config
from utils.errors import UserError
from utils.options.sharded import (
    ShardedWeights,
    check_parts,
    join_parts,
    join_tensors,
    remove_unused_parts,
    split_tensors,
)


class Steps:
    """What a Checkpointer needs of a loader."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def build(seed=0, is_divided=False):
    """A model, and an optimizer that has taken two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if is_divided:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


def checkpointer(folder, seed=0, is_divided=False, **settings):
    model, optimizer = build(seed, is_divided)
    cfg = Config(output_dir=str(folder), optimizer="adam", **settings)
    folder.mkdir(exist_ok=True)
    state = {"model": model, "optimizer": optimizer, "loader": Steps(), "data": {}}
    return Checkpointer(cfg, state)


def save(folder, epoch=1, **settings):
    checkpoint = checkpointer(folder, save_sharded=True, **settings)
    checkpoint.save(epoch)
    checkpoint.wait()


def parts_of(path):
    return path.parent / torch.load(path)["parts"]["folder"]


def full_tensors(weights):
    """{path: a whole tensor} of what Weights or a checkpoint hold."""
    tensors, _ = split_tensors(weights)
    full = {p: t.full_tensor() if isinstance(t, DTensor) else t for p, t in tensors.items()}
    return {path: tensor.detach() for path, tensor in full.items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for path, tensor in ours.items():
        assert torch.equal(tensor, theirs[path]) and tensor.dtype == theirs[path].dtype, path


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


def test_written_by_two_ranks_and_loaded_by_three(tmp_path):
    def write(rank):
        save(tmp_path, is_divided=True)

    def load(rank):
        found = []
        for is_sharded in (False, True):
            checkpoint = checkpointer(tmp_path, 1, is_divided=True, save_sharded=is_sharded)
            assert checkpoint.load() == 1
            weight = checkpoint.model[0].weight
            moments = checkpoint.optimizer.state[weight]["exp_avg"]
            assert len(weight.to_local()) <= 3 and len(moments.to_local()) <= 3  # of 7
            divided = Weights(checkpoint.model, checkpoint.optimizer, gather=False)
            tensors = full_tensors(divided.state_dict())
            found.append({path: tensor.numpy() for path, tensor in tensors.items()})
        return found

    assert run_ranks(write, 2) == [None, None]
    written = full_tensors(read_checkpoint(tmp_path / "last.pt"))
    names = {path.name[:4] for path in parts_of(tmp_path / "last.pt").iterdir()}
    assert names == {"__0_", "__1_", ".met"}
    for found in run_ranks(load, 3):
        for arrays in found:
            assert_same({path: torch.from_numpy(array) for path, array in arrays.items()}, written)


def test_run_continues_from_parts_without_the_flag_and_back(tmp_path, recwarn):
    save(tmp_path)
    ours = checkpointer(tmp_path, seed=1)
    assert ours.load() == 1
    saved = full_tensors(Weights(*build()).state_dict())
    assert_same(full_tensors(ours.weights.state_dict()), saved)
    ours.save(2)
    ours.wait()
    assert "parts" not in torch.load(tmp_path / "last.pt")
    assert checkpointer(tmp_path, seed=2, save_sharded=True).load() == 2
    assert not [w for w in recwarn if "torch.distributed" in str(w.message)]


def test_stage_of_a_pipeline_reads_only_its_part(tmp_path):
    save(tmp_path)
    contents = read_checkpoint(tmp_path / "last.pt", join_parts=False)
    stage = nn.Sequential(nn.Linear(5, 7))
    joined = join_parts(tmp_path, contents, stage)
    assert torch.equal(joined["model"]["0.weight"], build()[0][0].weight)
    assert joined["model"]["2.weight"].is_meta and joined["model"]["2.weight"].shape == (3, 7)
    assert joined["optimizer"]["state"]["0.weight"]["step"] == 2
    assert joined["optimizer"]["state"]["2.weight"]["exp_avg"].is_meta


def test_different_model_is_refused_by_name(tmp_path):
    save(tmp_path)
    checkpoint = checkpointer(tmp_path)
    checkpoint.model.append(nn.Linear(3, 3))
    with pytest.raises(UserError, match=r"3\.bias"):
        checkpoint.load()


def test_different_optimizer_starts_without_a_state(tmp_path):
    save(tmp_path)
    model, _ = build(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cfg = Config(output_dir=str(tmp_path), optimizer="sgd", allow_config_change=True)
    state = {"model": model, "optimizer": optimizer, "loader": Steps(), "data": {}}
    assert Checkpointer(cfg, state).load() == 1
    assert not any(optimizer.state.values())


def test_damaged_and_missing_parts_are_passed_over(tmp_path, capsys):
    for epoch in (1, 2, 3):
        save(tmp_path, epoch, keep_last=3)
    for epoch, damage in ((3, lambda path: os.truncate(path, 100)), (2, os.unlink)):
        parts = parts_of(tmp_path / f"epoch-000{epoch}.pt")
        damage(max(parts.iterdir(), key=lambda path: path.stat().st_size))
    assert checkpointer(tmp_path).load() == 1
    text = capsys.readouterr().err
    assert "damaged" in text and "missing" in text


def test_unused_parts_are_removed(tmp_path):
    (tmp_path / "of-a-killed-run.parts").mkdir()
    for epoch in (1, 2, 3):
        save(tmp_path, epoch, keep_last=2)
    used = {parts_of(path) for path in tmp_path.glob("*.pt")}
    assert len(used) == 2 and set(tmp_path.glob("*.parts")) == used
    torch.save(nn.Linear(1, 1), tmp_path / "model.pt")  # of the user
    for path in tmp_path.glob("[el]*.pt"):
        path.unlink()
    remove_unused_parts(tmp_path)
    assert not list(tmp_path.glob("*.parts"))


def test_file_that_cannot_be_read_may_need_its_parts(tmp_path, capsys):
    save(tmp_path)
    for path in tmp_path.glob("*.pt"):
        os.truncate(path, 500)
    remove_unused_parts(tmp_path)
    assert len(list(tmp_path.glob("*.parts"))) == 1
    assert "warning" in capsys.readouterr().err


def test_full_disk_ends_all_ranks_and_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    def no_space(file):
        raise OSError(28, "No space left on device")

    def body(rank):
        checkpoint = checkpointer(tmp_path, is_divided=True, save_sharded=True)
        checkpoint.save(1)
        checkpoint.wait()
        monkeypatch.setattr(filesystem.os, "fsync", no_space)
        checkpoint.save(2)

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError) and "No space left" in str(error)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1
    assert len(list(tmp_path.glob("*.parts"))) == 1  # nothing is left to keep the disk full


# Files from elsewhere


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def replace_part(path, name, content):
    """Replace a part of the checkpoint in the file `path`, and its checksum."""
    contents = torch.load(path)
    (parts_of(path) / name).write_bytes(content)
    contents["parts"]["files"][name] = zlib.crc32(content)
    torch.save(contents, path)


def test_malicious_index_is_refused(tmp_path):
    save(tmp_path)
    replace_part(tmp_path / "last.pt", ".metadata", pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(UserError, match=r"posix\.mkdir"):
        read_checkpoint(tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"posix\.mkdir"):
        checkpointer(tmp_path).load()
    assert not (tmp_path / "ran").exists()


def test_index_cannot_name_what_pytorch_unpickles(tmp_path):
    save(tmp_path)
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
    save(tmp_path)
    path = tmp_path / "last.pt"
    index = FileSystemReader(parts_of(path)).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = str(path)
    replace_part(path, ".metadata", pickle.dumps(index))
    with pytest.raises(UserError, match=str(path)):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["../x.parts", "..", "/x.parts", "x/y.parts"])
def test_parts_of_a_checkpoint_are_beside_it(tmp_path, name):
    for parts in ({"folder": name, "files": {}}, {"folder": "x.parts", "files": {name: 0}}):
        with pytest.raises(UserError, match=name):
            check_parts(tmp_path, {"parts": parts})
        with pytest.raises(UserError, match=name):
            join_parts(tmp_path, {"parts": parts})


def test_form_sees_the_tensors_before_they_are_put_into_parts(tmp_path):
    class Doubled:
        def __init__(self, weights):
            self.weights = weights

        def state_dict(self):
            contents = self.weights.state_dict()
            return contents | {"model": {n: 2 * t for n, t in contents["model"].items()}}

    model, optimizer = build()
    contents = ShardedWeights(Doubled(Weights(model, optimizer)), tmp_path).state_dict()
    assert contents["model"] == {}
    joined = join_parts(tmp_path, contents)
    assert torch.equal(joined["model"]["0.weight"], 2 * model[0].weight)
