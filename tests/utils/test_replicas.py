"""The ranks run the same code on the same data, and hold the same model, bit for bit."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run_ranks
from tests.utils.test_checkpoint import Steps, make_state, outcome
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
        found = {}
        for name in tensors_of(make_state()):
            state = make_state()
            if rank == 1:
                tensors_of(state)[name].view(-1).view(torch.uint8)[0] ^= 1
            found[name] = outcome(lambda s=state: compare_replicas(s["model"], s["optimizer"]))
        return found

    for found in run_ranks(body, 2):
        assert len(found) == 8
        for name, (kind, text) in found.items():
            assert kind is UserError
            assert "rank 1" in text and f" {name}." in text


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
        found = [outcome(lambda b=b: compare_replicas(model, optimizer, b)) for b in (True, False)]
        del local.local_buffers
        return [*found, outcome(lambda: compare_replicas(model, optimizer, True))]

    for within, (_, at_end), (_, other) in run_ranks(body, 2):
        assert within == (None, "")
        assert " 0.running_mean." in at_end
        assert " 1.seen." in other


def test_copies_of_a_shard_are_compared():
    """As of HSDP, and of FSDP across the replicas of tensor parallelism."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        whole = torch.arange(7.0)  # unevenly divided
        tensors = {
            "own": distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)]),
            "copied": distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
            "sliced": distribute_tensor(whole, mesh["data"], [Shard(0)]),
        }
        found = []
        for name, tensor in tensors.items():
            model = nn.ParameterDict({name: nn.Parameter(tensor)})
            optimizer = torch.optim.SGD(model.parameters())
            found.append(outcome(lambda m=model, o=optimizer: compare_replicas(m, o))[1])
            tensor.to_local().add_(float(rank == 3))
            found.append(outcome(lambda m=model, o=optimizer: compare_replicas(m, o))[1])
        return found

    for own, changed_own, copied, changed_copied, sliced, changed_sliced in run_ranks(body, 4):
        assert own == changed_own == copied == sliced == ""
        assert "rank 3" in changed_copied and " copied." in changed_copied
        assert "rank 3" in changed_sliced and " sliced." in changed_sliced


def test_compared_at_the_start_before_a_save_and_after_the_last_step():
    def body(rank):
        guard, checkpoint = CompareReplicas(), running()
        guard.at_start(checkpoint)
        checkpoint.state["model"][0].weight.data += rank
        guard.after_step(checkpoint)  # of which none is the last
        found = [outcome(lambda: guard.at_start(checkpoint))]
        found += [outcome(lambda: guard.before_save(checkpoint, between_steps=True))]
        checkpoint.state["loader"].step = len(checkpoint.state["loader"])
        return [*found, outcome(lambda: guard.after_step(checkpoint))]

    for found in run_ranks(body, 2):
        assert all("rank 1 differs in 0.weight" in text for _, text in found)


# Settings, data, code, counts


def test_ranks_that_are_about_to_train_different_things_are_refused(monkeypatch):
    class Longer(Steps):
        def __len__(self):
            return 7

    def body(rank):
        cases = [running(lr=0.1 + rank), running(save_steps=rank), running(), running()]
        cases[2].state["data"] = {"classes": [f"of rank {rank}"]}
        cases[3].state["loader"] = Longer() if rank else Steps()
        found = [outcome(lambda c=case: CompareSetup().at_start(c)) for case in cases]
        found += [outcome(lambda: CompareSetup().at_start(running(device=f"cuda:{rank}")))]
        monkeypatch.setattr(torch, "__version__", f"2.{rank}")
        return [*found, outcome(lambda: CompareSetup().at_start(running()))]

    for rate, saves, data, steps, device, version in run_ranks(body, 2):
        assert "lr" in rate[1] and "0.1" in rate[1] and "1.1" in rate[1]
        assert "save_steps" in saves[1]
        assert "classes" in data[1]
        assert "steps per epoch" in steps[1]
        assert device == (None, "")
        assert "torch" in version[1]


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

    def found(rank, *epochs):
        guard, checkpoint, texts = CompareSetup(), running(), []
        meter, loader = checkpoint.state["meter"], checkpoint.state["loader"]
        meter.count = 100.0 * rank
        guard.at_start(checkpoint)
        for checkpoint.epoch, steps in enumerate(epochs):
            for loader.step, count in steps:
                meter.count += count
                texts.append(outcome(lambda: guard.after_step(checkpoint))[1])
            meter.count = 0.0
        return texts

    def body(rank):
        ended_by_break = [(1, 4 + rank), (2, 4 - rank)]
        epochs = found(rank, ended_by_break, [(5, 4)], [(5, 4 + rank)])
        return found(rank, [(1, 4), (2, 4 + rank)]), epochs

    for (first, second), (*equal, last) in run_ranks(body, 2):
        assert first == "" and "count()" in second and "tensor" in second
        assert equal == ["", "", ""]
        assert "count()" in last
