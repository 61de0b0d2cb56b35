"""The ranks run the same code on the same data, and hold the same model, bit for bit."""

import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run_ranks
from tests.utils.test_checkpoint import make_state
from utils.config import Config
from utils.errors import UserError
from utils.guards import replicas
from utils.guards.replicas import CompareReplicas, CompareSetup, checksums, compare_replicas


def checksum(tensor):
    return checksums([tensor])[0]


def running(**settings):
    """What the guards need of a Checkpointer."""
    state = make_state() | {"meter": SimpleNamespace(count=0.0)}
    cfg = Config(output_dir="run", **settings)
    return SimpleNamespace(cfg=cfg, state=state, optimizer=state["optimizer"], epoch=0)


def refused(text):
    return pytest.raises(UserError, match=text)


# Checksums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool])
def test_checksum_changes_with_every_bit(dtype):
    for size in (1, 12, 15):  # 8 bytes at a time, or element by element
        tensor = torch.ones(size, dtype=dtype)
        before = checksum(tensor)
        for bit in range(8 * tensor.nbytes):
            tensor.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert checksum(tensor) != before
            tensor.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksum(tensor) == before


def test_checksum_changes_with_the_order_but_not_with_the_layout():
    tensor = torch.arange(12.0).view(3, 4)
    assert checksum(tensor.flip(0)) != checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    within = torch.arange(-1.0, 12.0)[1:]  # begins in the middle of 8 bytes
    assert checksum(within) == checksum(within.view(3, 4))
    long = torch.randint(-(2**62), 2**62, (0x30001,))  # is added in parts
    assert checksum(long) == (long * torch.arange(1, 2 * len(long), 2)).sum().item()


# What is compared


def test_tensor_that_differs_in_one_bit_is_named():
    def tensors_of(state):
        model, optimizer = state["model"], state["optimizer"]
        momentum = optimizer.state[model[0].bias]["momentum_buffer"]
        return model.state_dict() | {"0.bias (momentum_buffer)": momentum}

    def body(rank):
        names = list(tensors_of(make_state()))
        assert len(names) == 8
        for name in names:
            state = make_state()
            if rank == 1:
                tensors_of(state)[name].view(-1).view(torch.uint8)[0] ^= 1
            with refused(re.escape(f"rank 1 differs in {name}.")):
                compare_replicas(state["model"], state["optimizer"])

    assert run_ranks(body, 2) == [None, None]


def test_buffers_that_ddp_makes_equal_or_no_checkpoint_holds_may_differ():
    def body(rank):
        norm = nn.BatchNorm1d(2)
        norm.running_mean += rank
        model = nn.Sequential(norm, local := nn.Linear(2, 2))
        local.register_buffer("cache", torch.ones(3 + rank), persistent=False)
        local.register_buffer("seen", torch.tensor(rank))
        local.local_buffers = ("seen",)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = DistributedDataParallel(model, init_sync=False)
        compare_replicas(model, optimizer, between_steps=True)
        with refused(r" 0\.running_mean\."):
            compare_replicas(model, optimizer)
        del local.local_buffers
        with refused(r" 1\.seen\."):
            compare_replicas(model, optimizer, between_steps=True)

    assert run_ranks(body, 2) == [None, None]


def test_copies_of_a_shard_are_compared():
    """As of HSDP, and of FSDP across the replicas of tensor parallelism."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        whole = torch.arange(7.0)  # unevenly divided
        own = distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)])
        copied = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
        sliced = distribute_tensor(whole, mesh["data"], [Shard(0)])
        for tensor in (own, copied, sliced):
            model = nn.ParameterList([nn.Parameter(tensor)])
            optimizer = torch.optim.SGD(model.parameters())
            compare_replicas(model, optimizer)
            tensor.to_local().add_(float(rank == 3))
            if tensor is own:
                compare_replicas(model, optimizer)
            else:
                with refused("rank 3 differs in 0"):
                    compare_replicas(model, optimizer)

    assert run_ranks(body, 4) == [None] * 4


def test_compared_at_the_start_before_a_save_and_after_the_last_step():
    def body(rank):
        guard, checkpoint = CompareReplicas(), running()
        guard.at_start(checkpoint)
        checkpoint.state["model"][0].weight.data += rank
        guard.after_step(checkpoint)  # of which none is the last
        with refused("rank 1 differs in 0.weight"):
            guard.at_start(checkpoint)
        with refused("rank 1 differs in 0.weight"):
            guard.before_save(checkpoint, between_steps=True)
        checkpoint.state["loader"].step = len(checkpoint.state["loader"])
        with refused("rank 1 differs in 0.weight"):
            guard.after_step(checkpoint)

    assert run_ranks(body, 2) == [None, None]


# Settings, data, code, counts


def test_ranks_that_are_about_to_train_different_things_are_refused(monkeypatch):
    def body(rank):
        CompareSetup().at_start(running(device=f"cuda:{rank}"))
        with refused(r"lr: 0\.1 .* 1\.1"):
            CompareSetup().at_start(running(lr=0.1 + rank))
        with refused("save_steps"):
            CompareSetup().at_start(running(save_steps=rank))
        checkpoint = running()
        checkpoint.state["data"] = {"classes": [f"of rank {rank}"]}
        with refused("classes"):
            CompareSetup().at_start(checkpoint)
        checkpoint = running()
        checkpoint.state["loader"] = range(5 + rank)
        with refused("steps per epoch"):
            CompareSetup().at_start(checkpoint)
        monkeypatch.setattr(torch, "__version__", f"2.{rank}")
        with refused("torch"):
            CompareSetup().at_start(running())

    assert run_ranks(body, 2) == [None, None]


def test_different_code_is_noticed(tmp_path, monkeypatch):
    """Of the script, and of what it has imported from its folder, under whichever name."""
    facts = {}
    monkeypatch.setattr(replicas, "require_same", lambda **found: facts.update(found))

    def code(argv=tmp_path / "train.py"):
        monkeypatch.setattr(sys, "argv", [str(argv)])
        CompareSetup().at_start(running())
        return facts["code"]

    link = tmp_path.with_name("link")
    link.symlink_to(tmp_path)
    for name in ("train.py", "my_task.py", "notes.py", "site-packages/installed.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    for name in ("my_task.py", "site-packages/installed.py"):
        spec = importlib.util.spec_from_file_location("mine", link / name)
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    before = code()
    assert code(link / "train.py") == before
    for name, changes in (("train.py", True), ("my_task.py", True), ("notes.py", False)):
        (tmp_path / name).write_text("2")
        assert (code() != before) == changes
        before = code()
    (tmp_path / "site-packages/installed.py").write_text("2")
    assert code() == before


def test_plain_counts_that_differ_between_ranks_are_refused():
    """Each rank would divide by its own. A resumed run may begin with different sums."""

    def started(rank):
        guard, checkpoint = CompareSetup(), running()
        meter, loader = checkpoint.state["meter"], checkpoint.state["loader"]
        meter.count = 100.0 * rank
        guard.at_start(checkpoint)

        def step(epoch, number, count):
            if epoch > checkpoint.epoch:
                checkpoint.epoch, meter.count = epoch, 0.0
            loader.step = number
            meter.count += count
            guard.after_step(checkpoint)

        return step

    def body(rank):
        step = started(rank)
        step(0, 1, 4)
        with refused(r"count\(\).*tensor"):
            step(0, 2, 4 + rank)
        step = started(rank)
        step(0, 1, 4 + rank)
        step(0, 2, 4 - rank)  # a `break` ends the epoch
        step(1, 5, 4)
        with refused(r"count\(\)"):
            step(2, 5, 4 + rank)

    assert run_ranks(body, 2) == [None, None]
