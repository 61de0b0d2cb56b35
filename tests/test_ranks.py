"""What several processes must do together: meet, wait, fail, count, save."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import utils.distributed as d
from tests.launch import ROOT, free_port, run_ranks
from utils.config import load_config
from utils.datasets import build_datasets
from utils.distributed import PeerError, UserError
from utils.loaders import build_loader
from utils.metrics import Meter, MetricLogger, evaluate, read_metrics
from utils.plan import announce

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GOOD = dict(zip(NAMES, ("0", "0", "1", "127.0.0.1", "1"), strict=True))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*NAMES, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_process_group_the_world_has_one_rank():
    assert (d.get_rank(), d.get_world_size(), d.get_local_rank(), d.is_main_process()) == (
        0,
        1,
        0,
        True,
    )
    assert d.all_gather_object("x") == ["x"]
    assert d.all_reduce(torch.tensor(3)).item() == 3
    with d.main_process_first(), d.fail_together():
        pass


@pytest.mark.parametrize("subset", range(2**5 - 1))
def test_an_incomplete_environment_names_all_that_is_missing(subset, monkeypatch):
    given = [name for bit, name in enumerate(NAMES) if subset >> bit & 1]
    for name in given:
        monkeypatch.setenv(name, GOOD[name])
    with pytest.raises(UserError, match="torchrun --standalone --nproc_per_node=N") as caught:
        d.init_distributed("cpu")
    if given:
        missing = ", ".join(name for name in NAMES if name not in given)
        assert f"but not {missing}:" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "x"},
        {"RANK": "-1"},
        {"RANK": "1"},
        {"LOCAL_RANK": "1"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"MASTER_PORT": "http"},
    ],
    ids=str,
)
def test_a_contradictory_environment_is_refused(wrong, monkeypatch):
    for name, value in (GOOD | wrong).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=next(iter(wrong)).removeprefix("LOCAL_WORLD_")):
        d.init_distributed("cpu")


def test_nobody_at_the_master_address(monkeypatch):
    wrong = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    for name, value in (GOOD | wrong).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="cannot meet the others"):
        d.init_distributed("cpu", timeout=1)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert d.get_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="'gpu' is not one of"):
        d.get_device("gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="but 1 are visible"):
        d.get_device("cuda:3")
    for name, value in (GOOD | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--nproc_per_node=1, or pass --device cpu"):
        d.init_distributed("cuda")
    with pytest.raises(UserError, match="WORLD_SIZE is 4"):
        d.get_device("cpu")
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    assert d._use_device("cuda", 0, 1) == torch.device("cuda", 0) == used[0]


def test_cores_are_cut_by_the_cgroup(monkeypatch):
    def cpu_max(text):
        monkeypatch.setattr(d.Path, "read_text", lambda path: text)
        return d.available_cores()

    assert cpu_max("50000 100000") == 1
    assert cpu_max("max 100000") == len(os.sched_getaffinity(0))


def test_the_timeout_is_the_groups():
    def body(rank):
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1))
        else:
            time.sleep(4)
        return time.monotonic() - start

    def outer(rank):
        seconds = body(rank)
        raise ValueError(seconds)  # the group is broken: no barrier at the end

    seconds = run_ranks(outer, 2, timeout=2)[0].args[0]
    assert 1.5 < seconds < 4


def test_one_process_a_node_goes_first():
    def body(rank, folder):
        with d.main_process_first():
            name = folder / str(rank // 2)
            found = name.exists()
            time.sleep(0.2)
            name.touch()
        return found

    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(body, 4, Path(folder), local_world_size=2)
    assert found == [False, True, False, True]


def test_the_others_fail_fast_when_the_first_process_raises():
    def body(rank):
        ran = False
        start = time.monotonic()
        try:
            with d.main_process_first():
                ran = True
                raise OSError("no network")
        except Exception as error:
            return type(error), ran, time.monotonic() - start

    results = run_ranks(body, 3)
    assert [kind for kind, _, _ in results] == [OSError, PeerError, PeerError]
    assert [ran for _, ran, _ in results] == [True, False, False]
    assert max(seconds for _, _, seconds in results) < 5


FAILING = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch
from utils.distributed import UserError, all_reduce, init_distributed, report_errors
@report_errors
def main():
    init_distributed("cpu", 20)
    for step in range(9):
        all_reduce(torch.zeros(1))
        if step == 5 and os.environ["RANK"] == "1":
            raise {error}
main()
"""


@pytest.mark.parametrize(
    ("error", "message", "tracebacks"),
    [
        ("UserError('what, where, what to do')", "error (rank 1): what, where, what to do\n", 0),
        ("ValueError('a bug')", "ValueError: a bug", 1),
        ("KeyboardInterrupt", "interrupted\n", 0),
    ],
)
def test_only_the_rank_that_fails_speaks(error, message, tracebacks):
    code = FAILING.format(root=str(ROOT), error=error)
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ
            | GOOD
            | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "3", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in (0, 1, 2)
    ]
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert message in texts[1]
    assert "".join(texts).count("Traceback (most recent call last)") == tracebacks
    assert not any(text.startswith("error") for text in (texts[0], texts[2]))


class Numbered(Dataset):
    """Sample i shows i; its label is i % 3."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i % 3


class Guess(torch.nn.Module):
    """Says class 1, as loudly as the sample's number; counts its calls."""

    calls = 0

    def forward(self, images):
        self.calls += 1
        return torch.cat([images * 0, images, images * 0], dim=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 11])
def test_evaluation_counts_every_sample_exactly_once(count, world_size):
    def body(rank):
        data, model = Numbered(count), Guess()
        sampler = DistributedSampler(data, shuffle=False)
        result = evaluate(model, DataLoader(data, 2, sampler=sampler), torch.device("cpu"))
        return {**result, "calls": model.calls}

    images = torch.arange(count).float()[:, None]
    labels = torch.arange(count) % 3
    outputs = Guess()(images)
    for result in run_ranks(body, world_size):
        assert result["samples"] == count
        assert result["accuracy"] == (outputs.argmax(1) == labels).float().mean().item() or (
            abs(result["accuracy"] - (outputs.argmax(1) == labels).double().mean()) < 1e-12
        )
        loss = torch.nn.functional.cross_entropy(outputs, labels).item()
        assert result["loss"] == pytest.approx(loss, rel=1e-5)
        assert result["calls"] == -(-max(1, -(-count // world_size)) // 2)  # alike on all ranks


def test_planted_padding_counted_and_mean_of_means_give_other_numbers():
    def body(rank):
        data, device = Numbered(5), torch.device("cpu")
        sampler = DistributedSampler(data, shuffle=False)
        padded = Meter(device)
        for images, labels in DataLoader(data, 5, sampler=sampler):
            outputs = Guess()(images)
            loss = torch.nn.functional.cross_entropy(outputs, labels)
            padded.update(loss, outputs, labels)
            left = len(range(rank, 5, 2))
            correct = (outputs.argmax(1) == labels)[:left].float().mean()
        exact = evaluate(Guess(), DataLoader(data, 5, sampler=sampler), device)
        return exact, padded.compute(), d.all_reduce(correct).item() / 2

    exact, padded, mean_of_means = run_ranks(body, 2)[0]
    assert (exact["samples"], exact["accuracy"]) == (5, 0.6)
    assert (padded["samples"], padded["accuracy"]) != (5, 0.6)
    assert abs(mean_of_means - 0.6) > 0.01


def test_the_log_is_written_by_one_rank_and_continued(tmp_path):
    result = {"loss": 1.0, "accuracy": 0.5, "samples": 4, "seconds": 1.0}

    def body(rank, start, accuracies):
        metrics = MetricLogger(tmp_path, start)
        return [
            metrics.log(start + i, result, result | {"accuracy": a}, lr=0.1)
            for i, a in enumerate(accuracies)
        ]

    assert run_ranks(body, 2, 0, (0.3, 0.5, 0.4))[0] == [True, True, False]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "tr')  # a crash
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert run_ranks(body, 2, 2, (0.45, 0.6))[0] == [False, True]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["epoch"], row["val_accuracy"]) for row in rows] == [
        (0, 0.3),
        (1, 0.5),
        (2, 0.45),
        (3, 0.6),
    ]
    with pytest.raises(UserError, match="training loss is nan"):
        MetricLogger(tmp_path, 4).log(4, result | {"loss": float("nan")}, result, lr=0.1)


def plan(tmp_path, *flags):
    cfg = load_config(
        ["--dataset=synthetic", "--synthetic-samples=50", f"--output-dir={tmp_path}", *flags]
    )
    train_set, val_set = build_datasets(cfg)
    sampler = DistributedSampler(train_set, d.get_world_size(), d.get_rank(), drop_last=True)
    loaders = [
        build_loader(train_set, sampler, cfg, torch.device("cpu"), train=True),
        build_loader(val_set, range(len(val_set)), cfg, torch.device("cpu")),
    ]
    announce(cfg, {"model": torch.nn.Linear(2, 3), "loader": loaders[0]}, loaders[1], 1)
    return cfg


def test_the_plan_says_what_will_happen(tmp_path, capsys):
    cfg = plan(tmp_path, "--global-batch-size=8", "--epochs=1")
    said = capsys.readouterr().out
    for part in ("9 parameters", "50 + 12 images", "world size 1", "8 = 1 x 8", "6 steps"):
        assert part in said
    assert "2 samples dropped" in said and "nothing left to do" in said
    assert load_config([f"--config={tmp_path / 'config.yaml'}"]) == cfg
    plan(tmp_path, "--per-process-batch-size=8", "--lr=0.1")
    assert "peak lr 0.1 (linear lr rule)" in capsys.readouterr().out


def test_ranks_that_disagree_are_stopped_and_told_in_what(tmp_path):
    def body(rank):
        try:
            plan(tmp_path, "--global-batch-size=8", f"--lr={0.1 + rank}")
        except UserError as error:
            return str(error)

    assert "lr 1.1, not 0.1" in run_ranks(body, 2)[0]
