"""The process group from torchrun's environment, and what only one process does."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.accelerators import visible_accelerators
from tests.processes import free_port, run_ranks
from tests.utils.test_checkpoint import outcome
from utils import distributed
from utils.distributed import (
    all_gather_object,
    all_reduce,
    available_cores,
    control_group,
    cores_per_rank,
    data_parallel_group,
    die_with_parent,
    dp_rank,
    dp_world_size,
    fail_together,
    get_local_world_size,
    init_distributed,
    is_main_process,
    launched_world_size,
    main_process_first,
    mean_over_replicas,
    select_device,
    set_data_parallel_group,
)
from utils.errors import PeerError, UserError
from utils.reports import a_rank_has_failed, is_first_to_fail
from utils.rungs.fsdp import FsdpSettings, fsdp_kwargs
from utils.rungs.pipeline import set_single_replica
from utils.rungs.tensor_parallel import init_mesh

GOOD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
GOOD |= {"MASTER_PORT": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*GOOD, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def environment(monkeypatch):
    """A function that sets GOOD, with changes, in the environment."""

    def change(**changes):
        for name, value in (GOOD | changes).items():
            monkeypatch.setenv(name, value)

    return change


def test_world_has_one_rank_without_a_process_group(environment):
    environment(RANK="3", LOCAL_RANK="3", WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    assert (dp_rank(), dp_world_size()) == (0, 1)
    assert get_local_world_size() == 1
    assert launched_world_size() == 4  # known before the ranks form a group
    assert is_main_process()
    assert all_gather_object("x") == ["x"]
    assert all_reduce(torch.tensor(3)).item() == 3
    assert mean_over_replicas(torch.tensor(3)).item() == mean_over_replicas(3) == 3
    assert control_group() is None
    with main_process_first(), fail_together():
        pass


class Outcome(Exception):
    """What a rank returns if it leaves a broken group behind: skips the barrier of run_ranks()."""


# Joining the group


def test_incomplete_environment_shows_all_that_is_missing(monkeypatch):
    for subset in range(2**6 - 1):
        texts = {name: text * (subset >> bit & 1) for bit, (name, text) in enumerate(GOOD.items())}
        with monkeypatch.context() as patch:
            for name, text in texts.items():
                patch.setenv(name, text) if text else patch.delenv(name, raising=False)
            with pytest.raises(UserError, match="torchrun --standalone --nproc_per_node=N") as e:
                init_distributed("cpu")
        found = ", ".join(f"{name}={text}" for name, text in texts.items()) if subset else "none"
        assert f"here: {found})" in str(e.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "x"},
        {"RANK": "-1"},
        {"RANK": "1"},
        {"LOCAL_RANK": "1"},
        {"LOCAL_RANK": "-1"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"MASTER_PORT": "http"},
    ],
    ids=str,
)
def test_contradictory_environment_is_refused(wrong, environment):
    environment(**wrong)
    ((name, text),) = wrong.items()
    with pytest.raises(UserError, match=f"torchrun.* {name}={text}[,)]"):
        init_distributed("cpu")


def test_unreachable_master_is_reported(environment):
    environment(RANK="1", WORLD_SIZE="2", MASTER_PORT=str(free_port()))
    with pytest.raises(UserError, match=r"MASTER_ADDR=.* GLOO_SOCKET_IFNAME"):
        init_distributed("cpu", timeout=1)


def test_unknown_interface_is_reported_with_the_existing_ones(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    (error,) = run_ranks(lambda rank: None, 1)
    assert isinstance(error, UserError)
    assert "for: eth99): check MASTER_ADDR=127.0.0.1, and set GLOO_SOCKET_IFNAME" in str(error)
    assert "one of lo" in str(error) and "\n" not in str(error)


def test_group_waits_for_a_missing_rank_no_longer_than_a_step(monkeypatch):
    """The control group, whose collectives may take hours, is created within the timeout, too."""
    new_group = dist.new_group

    def without_rank_1(**options):
        if dist.get_rank() == 0:
            return new_group(**options)
        time.sleep(8)  # the store must still accept the other rank's error
        raise Outcome

    monkeypatch.setattr(dist, "new_group", without_rank_1)
    error, _ = run_ranks(lambda rank: None, 2, timeout=3, limit=40)
    assert isinstance(error, UserError)
    text = str(error)
    assert "(wait timeout" in text
    assert "MASTER_ADDR=127.0.0.1" in text and "GLOO_SOCKET_IFNAME" in text


def test_ranks_know_their_place():
    def body(rank):
        total = all_reduce(torch.tensor(rank)).item()
        place = dp_rank(), dp_world_size(), get_local_world_size(), launched_world_size()
        gathered = all_gather_object(f"rank {rank}")
        assert not a_rank_has_failed() and dist.get_world_size(control_group()) == 4
        dist.barrier()
        firsts = all_gather_object(is_first_to_fail())  # so that only one rank reports
        assert firsts.count(True) == 1 and a_rank_has_failed()
        return place, total, gathered, is_main_process()

    gathered = [f"rank {rank}" for rank in range(4)]
    assert run_ranks(body, 4, local_world_size=2) == [
        ((rank, 4, 2, 4), 6, gathered, rank == 0) for rank in range(4)
    ]


def test_count_on_the_cpu_is_reduced_where_the_loss_is(monkeypatch):
    """NCCL reduces no CPU tensor, such as a sum of len()."""
    monkeypatch.setattr(distributed, "_device", torch.device("meta"))
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor)
    assert mean_over_replicas(torch.tensor(3)).is_meta
    assert mean_over_replicas(torch.empty((), device="meta")).is_meta


def test_mean_over_replicas():
    """A tensor is reduced, exactly; a number is taken to be the same everywhere."""

    def body(rank):
        large = 2**24 + 1  # not a float32
        tensors = [
            torch.tensor(large + 2 * rank),
            torch.tensor(rank, dtype=torch.int32),
            torch.tensor(rank == 0),
            torch.tensor(0.5 + rank),
            torch.tensor(0.1 * (rank + 1), dtype=torch.float64),
        ]
        before = [tensor.clone() for tensor in tensors]
        means = [mean_over_replicas(tensor) for tensor in tensors]
        assert {mean.dtype for mean in means} == {torch.float64}
        assert all(map(torch.equal, tensors, before))  # those of the task stay as they are
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", None)  # it is not called for numbers
            numbers = [mean_over_replicas(number) for number in (7, large, 2.5)]
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
        set_data_parallel_group(groups[rank % 2])  # as if ranks 0 and 2 held the only replicas
        return [mean.item() for mean in means], numbers, mean_over_replicas(tensors[0]).item()

    means = [2**24 + 3, 1.0, 1 / 3, 1.5, pytest.approx(0.2, abs=1e-16)]
    numbers = [7, 2**24 + 1, 2.5]
    assert run_ranks(body, 3) == [(means, numbers, 2**24 + 3)] * 3


def test_one_replica_has_nothing_to_reduce(monkeypatch):
    """The group of a rank that stands for it exists in name only: on GPUs, too, it is gloo's."""
    monkeypatch.setattr(dist, "all_reduce", None)

    def body(rank):
        if dist.get_world_size() > 1:
            set_single_replica()
        assert dist.get_backend(data_parallel_group()) == "gloo"
        return all_reduce(torch.tensor(3.0)).item(), mean_over_replicas(torch.tensor(5)).item()

    with pytest.MonkeyPatch.context() as patch:
        new_group = dist.distributed_c10d.new_group
        patch.setattr(  # as if the default were NCCL
            dist.distributed_c10d,
            "new_group",
            lambda backend=None, **options: new_group(backend=backend or "nccl", **options),
        )
        assert run_ranks(body, 2) == [(3.0, 5.0)] * 2
    assert run_ranks(body, 1) == [(3.0, 5.0)]


def test_timeout_ends_a_collective_but_not_a_download(monkeypatch):
    monkeypatch.setattr(distributed, "watch", lambda *args, **options: None)  # it is quicker

    def body(rank):
        with main_process_first():  # may take longer than a step's timeout
            time.sleep(5 if rank == 0 else 0)
        start = time.monotonic()
        if rank == 0:  # rank 1 takes no part, but its connections stay open
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1))
        raise Outcome(time.monotonic() - start)

    outcomes = run_ranks(body, 2, timeout=4)
    assert [type(outcome) for outcome in outcomes] == [Outcome, Outcome]
    assert 3.5 < outcomes[0].args[0] < 30


def test_second_attempt_of_a_job_meets_in_the_store_of_the_first(monkeypatch):
    """torchrun keeps its store over restarts: the addresses in it may be those of dead ranks."""
    attempts = []
    prefix_store = dist.PrefixStore
    monkeypatch.setattr(
        dist, "PrefixStore", lambda *args: attempts.append(args[0]) or prefix_store(*args)
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert run_ranks(lambda rank: "3" in attempts, 2) == [True, True]


# Devices and cores


def test_device_names(monkeypatch):
    visible_accelerators(monkeypatch, 0)
    assert select_device("auto") == select_device() == torch.device("cpu")
    assert select_device("cpu:0") == torch.device("cpu")
    for name in ("gpu", "meta", "xpu", "cuda:x", "cuda:257", "cpu0"):
        with pytest.raises(UserError, match=f"'{name}' .*device .*: cpu, cuda, cuda:0"):
            select_device(name)
    for kind in ("cuda", "xpu"):
        used = visible_accelerators(monkeypatch, 2, kind)
        with pytest.raises(UserError, match=rf"3 {kind} devices, .* 2 .*--device cpu"):
            select_device(f"{kind}:2")
        assert select_device("auto") == torch.device(kind, 0)
        assert select_device(f"{kind}:1") == torch.device(kind, 1)
        assert used == [torch.device(kind, 0), torch.device(kind, 1)]


def test_device_without_float64_is_not_the_default(monkeypatch):
    visible_accelerators(monkeypatch, 1, "mps")
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="mps has no float64"):
        select_device("mps")


def test_cpu_run_sees_no_gpu(monkeypatch):
    """DataParallel would use them, and refuse a model on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    select_device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_task_with_one_visible_gpu_takes_it(environment, monkeypatch):
    """As under srun --gpus-per-task=1. Under torchrun, all processes would share that GPU."""
    visible_accelerators(monkeypatch, 1)
    for name in ("cuda", "cuda:0"):
        assert select_device(name, 3, 4) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"2 cuda devices.* 1 .*--device cpu"):
        select_device("cuda:1", 3, 4)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match=r"4 processes .* 4 cuda devices.* 1 .*--device cpu"):
        select_device("cuda", 3, 4)


def test_each_rank_gets_a_gpu_of_its_own(environment, monkeypatch):
    visible_accelerators(monkeypatch, 2)
    environment(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    with pytest.raises(UserError, match=r"4 processes .* 4 cuda devices.* 2 .*--device cpu"):
        init_distributed("cuda")
    assert select_device("cuda", 1, 2) == torch.device("cuda", 1)
    assert select_device("cuda:0", 1, 4) == torch.device("cuda", 0)  # all share it


def test_cores_follow_affinity_and_cgroup_quota(monkeypatch):
    def cpu_max(text):
        monkeypatch.setattr(distributed.Path, "read_text", lambda path, **options: text)
        return available_cores()

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert cpu_max("max 100000") == 6
    assert cpu_max("350000 100000") == 3
    assert cpu_max("50000 100000") == 1
    assert cpu_max("9900000 100000") == 6
    assert cores_per_rank() == 6
    monkeypatch.setattr(distributed, "get_local_world_size", lambda: 4)
    assert cores_per_rank() == 1
    monkeypatch.setattr(distributed, "get_local_world_size", lambda: 8)
    assert cores_per_rank() == 1


def test_scripts_that_need_a_gpu_per_rank_say_so(monkeypatch):
    """FSDP, tensor parallelism and pipelines; ranks that share a GPU use gloo."""

    def body(rank):
        return [outcome(start) for start in starts]

    starts = (
        set_single_replica,
        lambda: init_mesh(torch.device("cpu"), 1),
        lambda: fsdp_kwargs(FsdpSettings()),
    )
    assert run_ranks(body, 1) == [[(None, "")] * 3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for kind, text in run_ranks(body, 1)[0]:
        assert kind is UserError
        assert "a GPU for each rank" in text and "--device cpu" in text


# What only one process does


@pytest.mark.parametrize("shared", [False, True])
def test_rank_0_goes_first_then_one_process_per_node(shared, tmp_path):
    def body(rank):
        with main_process_first():
            path = tmp_path / str(0 if shared else rank // 2)
            existed = path.exists()
            time.sleep(0.2)
            path.touch()
        return existed

    assert run_ranks(body, 4, local_world_size=2) == [False, True, shared, True]


def test_other_processes_fail_at_once_when_the_first_one_raises():
    def body(rank):
        ran, start = False, time.monotonic()
        try:
            with main_process_first():
                ran = True
                raise OSError("no network")
        except Exception as error:
            return type(error), ran, time.monotonic() - start

    results = run_ranks(body, 3)
    assert [kind for kind, _, _ in results] == [OSError, PeerError, PeerError]
    assert [ran for _, ran, _ in results] == [True, False, False]
    assert max(seconds for _, _, seconds in results) < 15  # the timeout is longer


def test_error_on_one_rank_is_raised_on_all():
    def body(rank):
        caught = []
        for failing in (1, 2):
            try:
                with fail_together():
                    if rank == failing:
                        raise ValueError("a bug")
            except Exception as error:
                caught.append(repr(error))
        return caught

    bug, peer = "ValueError('a bug')", "PeerError('rank {} failed')"
    assert run_ranks(body, 3) == [
        [peer.format(1), peer.format(2)],
        [bug, peer.format(2)],
        [peer.format(1), bug],
    ]


def test_rank_whose_launcher_is_dead_does_not_wait_for_it(monkeypatch):
    """Linux sends no signal for a parent that died before it was asked to: during the imports."""
    monkeypatch.setattr(distributed, "die_with_parent", lambda: None)
    environment = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"launcher .*{environment['MASTER_PORT']}"):
        init_distributed("cpu", timeout=300)


def test_process_ends_with_its_parent():
    """A killed torchrun, or a killed rank with loader workers, must not leave processes behind."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child == 0:
            die_with_parent()
            os.write(writing, b"ready")
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    start = time.monotonic()
    assert os.read(reading, 1) == b""  # all writing ends are closed: the child is gone, too
    assert time.monotonic() - start < 30  # it sleeps for 60
    os.close(reading)
