"""The process group from torchrun's environment, and what only one process does."""

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.accelerators import visible_accelerators
from tests.processes import run_ranks
from utils import distributed
from utils.distributed import (
    all_gather_object,
    all_reduce,
    control_group,
    cores_per_rank,
    current_device,
    die_with_parent,
    dp_rank,
    dp_world_size,
    fail_together,
    init_distributed,
    is_main_process,
    launched_world_size,
    main_process_first,
    mean_over_replicas,
    rebuild_ddp_buckets,
    require_same,
    select_device,
    set_data_parallel_group,
)
from utils.errors import PeerError, UserError
from utils.rungs.groups import require_gpu_per_rank


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


class Outcome(Exception):
    """What a rank returns if it leaves a broken group behind: skips the barrier of run_ranks()."""


# The group


def test_world_has_one_rank_without_a_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_world_size() == 4  # known before the ranks form a group
    assert (dp_rank(), dp_world_size(), is_main_process()) == (0, 1, True)
    assert all_gather_object("x") == ["x"]
    assert all_reduce(torch.tensor(3)).item() == 3
    assert mean_over_replicas(torch.tensor(3)).item() == mean_over_replicas(3) == 3
    with main_process_first(), fail_together():
        require_same(rank=0)


def test_script_that_torchrun_has_not_started_says_how():
    with pytest.raises(UserError, match="torchrun --standalone"):
        init_distributed("cpu")


def test_port_that_is_in_use_or_impossible_is_one_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with socket.create_server(("", 0)) as server:
        for port in (server.getsockname()[1], 70000):
            monkeypatch.setenv("MASTER_PORT", str(port))
            with pytest.raises(UserError, match=f"MASTER_PORT: .*{port}"):
                init_distributed("cpu", 5)


def test_ranks_know_their_place():
    def body(rank):
        assert (dp_rank(), dp_world_size(), launched_world_size()) == (rank, 2, 2)
        assert is_main_process() == (rank == 0)
        assert dist.get_world_size(control_group()) == 2
        return all_reduce(torch.tensor(1 + rank)).item(), all_gather_object(f"rank {rank}")

    assert run_ranks(body, 2) == [(3, ["rank 0", "rank 1"])] * 2


def test_timeout_ends_a_step_but_not_a_download():
    def body(rank):
        with main_process_first():
            time.sleep(3 if rank == 0 else 0)
        start = time.monotonic()
        if rank == 0:  # rank 1 takes no part, but its connections stay open
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1))
        raise Outcome(time.monotonic() - start)

    waited = run_ranks(body, 2, timeout=2)[0]
    assert 1.5 < waited.args[0] < 30


def test_restarted_job_does_not_meet_in_the_rooms_of_the_first(monkeypatch):
    """torchrun keeps its store: the addresses in it are those of dead ranks."""
    prefixes, real = [], dist.PrefixStore

    def note(prefix, store):
        prefixes.append(prefix)
        return real(prefix, store)

    monkeypatch.setattr(dist, "PrefixStore", note)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert run_ranks(lambda rank: "3" in prefixes, 1) == [True]


def test_process_ends_with_its_parent():
    """A killed torchrun must not leave ranks behind."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            die_with_parent()
            os.write(writing, b"ready")
        time.sleep(60)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    start = time.monotonic()
    assert os.read(reading, 1) == b""  # no writing end is open: the child has ended, too
    assert time.monotonic() - start < 30
    os.close(reading)


# Sums and means


def test_mean_over_replicas_is_exact():
    """A tensor is reduced; a number is taken to be the same everywhere."""

    def body(rank):
        large = 2**24 + 1  # not a float32
        counts = [torch.tensor(large + 2 * rank), torch.tensor(0.5 + rank, dtype=torch.float64)]
        before = [count.clone() for count in counts]
        means = [mean_over_replicas(count).item() for count in counts]
        assert means == [2**24 + 3, 1.5]
        assert mean_over_replicas(large) == large
        assert all(map(torch.equal, counts, before))  # those of the task stay as they are
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
        set_data_parallel_group(groups[rank % 2])  # as if ranks 0 and 2 held the only replicas
        return mean_over_replicas(torch.tensor(rank)).item()

    assert run_ranks(body, 3) == [1.0] * 3


def test_count_on_the_cpu_is_reduced_where_the_loss_is(monkeypatch):
    """NCCL reduces no CPU tensor, such as a sum of len()."""
    monkeypatch.setattr(distributed, "_devices", [torch.device("cpu"), torch.device("meta")])
    assert mean_over_replicas(torch.tensor(3)).is_meta


class Waves(nn.Module):
    """A model with a complex parameter, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, inputs):
        return (self.layers(inputs) + 0j) @ self.weight


def test_ddp_sums_gradients_in_the_same_order_at_every_step():
    """From three ranks on, the order matters: a resumed run must have it from its first step."""

    def body(rank, is_rebuilt):
        torch.manual_seed(0)
        model = DistributedDataParallel(Waves(), bucket_cap_mb=0.001)
        if is_rebuilt:
            rebuild_ddp_buckets(model)
            assert all(p.grad is None for p in model.parameters())
        torch.manual_seed(rank)
        inputs, gradients = torch.randn(5, 8), []
        for _ in range(2):
            model.zero_grad()
            model(inputs).abs().square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        return all(map(torch.equal, *gradients))

    assert run_ranks(body, 3, True) == [True] * 3
    assert run_ranks(body, 3, False) != [True] * 3  # the test would notice


def test_rebuilding_buckets_calls_no_forward_and_no_hook():
    def body(rank):
        calls, model = [], nn.Linear(2, 1)
        model.register_forward_pre_hook(lambda *args: calls.append("hook"))
        model.compile(backend=lambda graph, inputs: calls.append("graph") or graph.forward)
        wrapped = DistributedDataParallel(model)
        rebuild_ddp_buckets(wrapped)
        return calls, wrapped.module is model

    assert run_ranks(body, 1) == [([], True)]


# Devices and cores


def test_device_names(monkeypatch):
    visible_accelerators(monkeypatch, 0)
    assert select_device("auto") == select_device("cpu:0") == torch.device("cpu")
    for name in ("gpu", "cuda:x"):
        with pytest.raises(UserError, match=f"--device {name}"):
            select_device(name)
    for kind in ("cuda", "xpu"):
        used = visible_accelerators(monkeypatch, 2, kind)
        assert select_device("auto") == torch.device(kind, 0)
        assert select_device(f"{kind}:1") == current_device() == torch.device(kind, 1)
        assert used == [torch.device(kind, 0), torch.device(kind, 1)]
        with pytest.raises(UserError, match="3 devices, but 2"):
            select_device(f"{kind}:2")
    visible_accelerators(monkeypatch, 1, "mps")
    assert select_device("auto") == torch.device("cpu")  # mps has no float64


def test_cpu_run_sees_no_gpu(monkeypatch):
    """DataParallel would use them, and refuse a model on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    select_device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_each_rank_gets_a_gpu_of_its_own(monkeypatch):
    visible_accelerators(monkeypatch, 2)
    assert select_device("cuda", 1, 2) == torch.device("cuda", 1)
    assert select_device("cuda:0", 1, 4) == torch.device("cuda", 0)  # all share it
    with pytest.raises(UserError, match="4 devices, but 2"):
        select_device("cuda", 1, 4)
    visible_accelerators(monkeypatch, 1)
    assert select_device("cuda", 3, 4) == torch.device("cuda", 0)  # srun --gpus-per-task=1
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match="4 devices, but 1"):
        select_device("cuda", 3, 4)


def test_cores_follow_affinity_quota_and_ranks(monkeypatch):
    def cores(quota, ranks=1):
        monkeypatch.setattr(distributed.Path, "read_text", lambda path, **options: quota)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return cores_per_rank()

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert cores("max 100000") == cores("9900000 100000") == 6
    assert cores("350000 100000") == 3
    assert cores("50000 100000") == 1
    assert cores("max 100000", ranks=8) == 1
    assert cores("max 100000", ranks=3) == 2


def test_sharding_needs_a_gpu_per_rank(monkeypatch):
    def body(rank):
        require_gpu_per_rank()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and several ranks on one
        with pytest.raises(UserError, match="--device cpu"):
            require_gpu_per_rank()

    assert run_ranks(body, 1) == [None]


# What one process does, and what all must agree on


@pytest.mark.parametrize("is_shared", [False, True])
def test_rank_0_goes_first_then_one_process_per_node(is_shared, tmp_path):
    def body(rank):
        with main_process_first():
            path = tmp_path / str(0 if is_shared else rank // 2)
            existed = path.exists()
            time.sleep(0.1)
            path.touch()
        return existed

    assert run_ranks(body, 4, local_world_size=2) == [False, True, is_shared, True]


def test_error_on_one_rank_is_raised_on_all():
    def body(rank):
        ran = []
        for context in (fail_together, main_process_first):
            with pytest.raises(PeerError if rank else ValueError), context():
                ran.append(context)
                if rank == 0:
                    raise ValueError("a bug")
        return len(ran)

    assert run_ranks(body, 2) == [2, 1]  # rank 1 has not begun its turn


def test_error_of_a_rank_is_reported_also_if_a_peer_has_died(monkeypatch):
    def gather(*arguments):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    with pytest.raises(ValueError, match="a bug"), fail_together():
        raise ValueError("a bug")


def test_fact_that_differs_is_named_on_all_ranks():
    def body(rank):
        require_same(a=1, b=[2.5, "x"])
        with pytest.raises(UserError, match=r"b: 'of 0' on rank 0, .*'of 1' on rank 1: the remedy"):
            require_same(": the remedy", a=1, b=f"of {rank}")

    assert run_ranks(body, 2) == [None, None]
