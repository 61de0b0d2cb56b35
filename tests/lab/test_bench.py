"""The benchmarks: parts of a step, limits, interleaved runs, ratios with intervals."""

import json
import random
import statistics
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import lab.bench.__main__ as bench
from lab.bench import (
    checkpoint,
    limits,
    loader,
    peer,
    peers,
    report,
    split,
    streams,
    watching,
)
from lab.bench.hooks import PARTS
from lab.bench.operations import MODEL, SCRIPTS, measure
from lab.bench.peers import contestants, ratio
from lab.bench.probe import Probe
from lab.bench.rows import rows_for
from lab.bench.runner import take_turns
from tasks.images import Settings
from tests.processes import SMALL
from tools.lib.ladder import ROOT
from tools.lib.runs import flag_list
from utils.config import load_config


def run_main(module, *flags):
    """Run a benchmark's main() in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [module.__name__, *flags])
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        module.main()


# The loop that all benchmarks share


def lengths(samples):
    return {name: len(values) for name, values in samples.items()}


def test_jobs_take_turns_and_one_that_failed_has_no_more():
    order = []

    def run(name):
        order.append(name)
        if name == "b":
            raise RuntimeError("out of memory")

    jobs = {name: partial(run, name) for name in "abc"}
    samples, errors = take_turns(jobs, 2)
    assert order == ["a", "b", "c", "a", "c"]
    assert lengths(samples) == {"a": 2, "b": 0, "c": 2}
    assert errors == {"b": "out of memory"}


def test_interrupted_loop_keeps_its_samples():
    runs = []

    def interrupt():
        runs.append("b")
        if len(runs) == 2:
            raise KeyboardInterrupt

    samples, errors = take_turns({"a": lambda: 1.0, "b": interrupt}, 3)
    assert lengths(samples) == {"a": 2, "b": 1} and not errors


# The table of the scripts


@pytest.mark.slow
@pytest.mark.rare
def test_divided_models_are_measured(tmp_path):
    flags = {"schedule": "1F1B", "micro_batches": 4, "global_batch_size": 16, "image_size": 16}
    flags |= {"synthetic_samples": 64, "device": "cpu"}
    sample = split.measure("train_pp.py", flags, tmp_path / "pp")
    parameters, gradients, state = (sample[kind] for kind in split.KINDS)
    assert sum(parameters) == sum(gradients) == sum(state) / 2 == 4 * 138_954
    assert sample["bubble"] > 0


def test_rows_have_settings_that_their_scripts_know():
    for gpus in (0, 1, 8):
        for row in rows_for([1, 2], gpus, 256):
            row.load_config(row.flags)


@pytest.mark.slow
@pytest.mark.rare
def test_bench_measures_rows_and_limits(tmp_path):
    flags = ["--processes=1,2", "--repeats=1", "--steps=3", f"--output={tmp_path}"]
    settings = {"model": "resnet20", "image_size": 16, "global_batch_size": 8, "device": "cpu"}
    flags += [f"--set={name}={value}" for name, value in settings.items()]
    run_main(bench, "--only=DDP x2, 8 each", *flags)
    measurements = json.loads((tmp_path / "bench.json").read_text())
    ((name, (sample,)),) = measurements["rows"].items()
    assert name == "DDP x2, 8 each"
    assert sample["updates"] == 3 and len(sample["steps"]) == 3
    assert sample["step_seconds"] > 0 and sample["start_up"] > 0
    assert sum(sample["parts"]) >= 0.5 * sample["step_seconds"]
    assert sample["global_batch_size"] == 16 and sample["samples"] == 3 * 16
    ((key, (limits,)),) = measurements["limits"].items()
    assert key == "x2 global_batch_size=16"
    assert limits.keys() == {"data", "compute", "communication"}
    assert all(speed > 0 for speed in limits.values())
    assert "DDP x2, 8 each" in (tmp_path / "bench.md").read_text()
    assert "DDP x2, 8 each" in (tmp_path / "bench.html").read_text()
    # Of a single run, there is no interval.
    assert "DDP x2, 8 each: 1.00\n" in report.compared(measurements, measurements) + "\n"


def test_bottlenecks():
    limits = {"data": 500.0, "compute": 100.0}
    assert report.bottleneck([6, 30, 60, 4, 0], limits, 0.9).startswith("input")
    assert report.bottleneck([1, 30, 60, 9, 0], limits, 0.9) == "compute"
    assert report.bottleneck([1, 30, 60, 9, 0], limits, 0.5).startswith("overhead")
    limits |= {"communication": 50.0}
    assert report.bottleneck([1, 30, 60, 9, 0], limits, 0.5).startswith("communication")


def test_interval_contains_the_true_ratio():
    draw = random.Random(1)
    inside = 0
    for _ in range(60):
        before = [draw.gauss(100, 5) for _ in range(9)]
        after = [draw.gauss(110, 5) for _ in range(9)]
        middle, low, high = report.interval(before, after, draws=300)
        assert low <= middle <= high
        inside += low <= 1.1 <= high
    assert inside >= 50


def test_steps_of_a_gpu_are_timed_in_blocks(monkeypatch):
    """Waiting after each would hide that the host runs ahead."""
    waits, steps = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(steps)))
    monkeypatch.setattr(limits, "all_reduce", lambda tensor: tensor)
    monkeypatch.setattr(limits.torch, "zeros", lambda *args, device: None)
    seconds = limits.median_seconds(torch.device("cuda"), 45, lambda: steps.append(1))
    assert seconds < 1 and len(steps) == 20 * (limits.WARM_UP + 3)
    assert sorted(set(waits)) == list(range(0, 101, 20))


# What it costs to watch a run


def test_watching_compares_neighbors():
    """The machine gets slower all the time: the medians of all blocks would be misleading."""
    without = [1.0 + 0.1 * n for n in range(20)]
    middle, low, high = watching.paired(without, [1.02 * s for s in without])
    assert (middle, low, high) == pytest.approx((1.02, 1.02, 1.02))


# The probe


def test_probe_marks_nothing_in_a_graph(monkeypatch):
    """An event that is recorded during a capture has no time."""
    probe, recorded = Probe(), []
    probe.device, probe.epochs = "cuda", [[]]
    event = SimpleNamespace(record=lambda: recorded.append(1))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    answers = iter([True, False])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(answers))
    for _ in range(2):
        probe.mark("backward")
    assert len(recorded) == 1 and probe.epochs == [[("backward", event)]]


def test_parts_of_a_step_add_up():
    probe = Probe()
    probe.device = "cpu"
    marks = [("ask", 0.0), ("batch", 1.0), ("backward", 3.0), ("backward done", 6.0)]
    marks += [("backward", 7.0), ("backward done", 9.0)]  # a second micro-batch
    marks += [("step", 10.0), ("step done", 14.0), ("ask", 14.5), ("batch", 15.0)]
    first, second = probe.steps(marks)
    assert first == [1.0, 3.0, 5.0, 5.0, 0.5] and len(first) == len(PARTS)
    assert second == [0.5, 0, 0, 0, 0] and sum(map(sum, (first, second))) == 15.0


# The peers


def measured(**speeds):
    """A result of lab.bench.peers with these images/s for each kind of contestant."""
    result = {"contestants": {}}
    for contestant in contestants([1, 2], [0, 4]):
        facts = contestant.facts()
        speed = speeds.get(facts["kind"], 100)
        facts["samples"] = [{"images_per_second": speed} for _ in range(3)]
        result["contestants"][contestant.key] = facts
    return result


def test_ratio_is_to_the_fastest_peer_on_as_many_processes():
    result = measured(ours=200, bare=210)
    rows = result["contestants"]
    rows["fabric x1 float32 4"]["samples"][:] = [{"images_per_second": 1e4} for _ in range(3)]
    text = ratio(result, rows["ours, 1 device float32"])
    assert text == "0.02 of float32"
    text = ratio(result, rows["ours, DDP x2, BatchNorm per rank bfloat16"])
    assert text.startswith("2.0") and "of bfloat16; 2.0" in text
    assert "0.95" in ratio(result, rows["bare loop, our loader float32"])
    assert ratio(result, rows["fabric x1 float32 0"]) == ""


@pytest.mark.slow
def test_bare_loop_trains(tmp_path):
    flags = ["--processes=1", "--repeats=1", "--steps=2", "--workers=0", f"--output={tmp_path}"]
    flags += ["--set=global_batch_size=8", "--set=image_size=8", "--set=device=cpu"]
    run_main(peers, "--only=bare", "--set=model=resnet20", *flags)
    measurements = json.loads((tmp_path / "peers.json").read_text())["contestants"]
    assert list(measurements) == ["bare loop, our loader float32"]
    (sample,) = measurements["bare loop, our loader float32"]["samples"]
    assert sample["images_per_second"] > 0 and 0 <= sample["train_accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial", "tuned"])
def test_peer_trains_on_the_same_images(name, tmp_path):
    flags = flag_list(SMALL | {"model": "shufflenet_v2_x0_5", "image_size": 32})
    run_main(peer, str(tmp_path), name, "0", "bfloat16", *flags)
    result = json.loads((tmp_path / "peer-0.json").read_text())
    assert result["samples"] == SMALL["synthetic_samples"] and 0 <= result["accuracy"] <= 1


def test_peers_are_repeated_with_their_best_numbers_of_workers(tmp_path, monkeypatch):
    speeds, runs = {"0": 10.0, "1": 12.0, "2": 11.0, "4": 5.0}, []

    def sample(runner, contestant):
        runs.append(contestant.key)
        speed = speeds.get(contestant.workers, 10.0)
        return {"images_per_second": speed, "train_accuracy": 0.1}

    monkeypatch.setattr(peers, "sample", sample)
    monkeypatch.setattr(peers, "cores_per_rank", lambda: 4)
    run_main(peers, "--processes=1,2", "--repeats=3", f"--output={tmp_path}")
    for name in ("tutorial", "accelerate", "fabric", "trainer"):
        for n in (1, 2):
            for precision in ("float32", "bfloat16"):
                rows = [runs.count(f"{name} x{n} {precision} {w}") for w in ("0", "1", "2", "4")]
                assert rows == [1, 3, 3, 1]
    assert runs.count("ours, DDP x2 float32") == 3
    assert " | 4 | " not in (tmp_path / "peers.md").read_text()


def test_restarted_workers_are_timed_over_a_real_epoch():
    flags = {}

    def peer(name, world_size, own_flags, arguments):
        flags[arguments[1]] = own_flags
        return [{"samples": 1, "seconds": 1.0, "accuracy": 0.0}]

    for contestant in contestants([1], [0, 4]):
        if contestant.peer == "tutorial":
            peers.sample(SimpleNamespace(flags={}, peer=peer), contestant)
    assert set(flags) == {"10!", "0", "4"}
    assert flags["10!"]["synthetic_samples"] == 50_000
    assert not any("synthetic_samples" in flags[workers] for workers in ("0", "4"))


# The operations of a step


@pytest.mark.slow
@pytest.mark.rare
def test_budget_of_a_step():
    one_gpu, _, ddp_x1 = SCRIPTS
    alone, one, ddp = (measure(row) for row in (MODEL, one_gpu, ddp_x1))
    assert alone["counts"]["convolution"] == alone["counts"]["convolution_backward"] == 26
    # SqueezeNet's dropout is drawn by sample, in 6 operations more than nn.Dropout has.
    assert one["operations"] - alone["operations"] <= 21 + 6
    # DistributedDataParallel copies each of the 52 gradients, and reduces two buckets.
    assert ddp["operations"] - one["operations"] <= 52 + 2
    assert alone["reads"] == one["reads"] == ddp["reads"] == 0


# Loaders and checkpoints


def test_loader_and_reference_give_equal_batches(tmp_path):
    root = loader.make_photographs(tmp_path, 16, size=(60, 50))
    flags = ["--dataset=imagefolder", f"--data-dir={root}", "--augment=resized_crop"]
    flags += ["--image-size=32", "--global-batch-size=4", "--loader=workers"]
    pair = [loader.ours(flags, 0, normalized=True), loader.reference(flags, 0)]
    assert [images for _, images in pair] == [16, 16]
    batches = [next(iter(batches))[0] for batches, _ in pair]
    assert all(b.shape == (4, 3, 32, 32) and b.dtype == torch.float32 for b in batches)
    speeds = loader.compare(*pair, repeats=2)
    assert all(len(s) == 2 and min(s) > 0 for s in speeds.values())
    uint8, _ = loader.ours(flags, 0, normalized=False)
    assert next(iter(uint8))[0].dtype == torch.uint8


@pytest.mark.slow
def test_checkpoint_costs_are_measured(tmp_path):
    flags = ["--models=resnet20", "--steps=3", "--repeats=1", f"--output={tmp_path}"]
    run_main(checkpoint, *flags, "--set=global_batch_size=4", "--set=device=cpu")
    measurements = json.loads((tmp_path / "checkpoint.json").read_text())["models"]["resnet20"]
    assert measurements["load"] > 0 and measurements["bytes"] > 1e6
    assert all(len(measurements["runs"][mode]) == 1 for mode in checkpoint.MODES)
    assert statistics.median(measurements["runs"]["waiting"][0]) is not None
    assert not list(tmp_path.glob("checkpoint-*"))


def test_command_lines_of_the_gpu_page_exist():
    text = (ROOT / "docs" / "gpu.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for line in text.splitlines():
        if line.strip().startswith("make "):
            assert f"\n{line.split()[1]}:" in makefile, line
    flags = text.split("train_ddp_amp.py ")[1].split("```")[0].replace("\\\n", " ").split()
    flags = [flag.replace("configs/", f"{ROOT}/configs/") for flag in flags]
    cfg = load_config(Settings, None, flags)
    assert (cfg.model, cfg.dataset) == ("resnet50", "synthetic")


# Streams


@pytest.mark.slow
def test_readers_of_streams_are_compared(tmp_path):
    for package in ("datasets", "litdata", "webdataset"):
        pytest.importorskip(package)
    run_main(streams, f"--output={tmp_path}", "--samples=256", "--repeats=1", "--steps=1")
    result = json.loads((tmp_path / "streams.json").read_text())
    kinds, readers = streams.DECODE, streams.READERS
    names = {f"{kind} {n} {name}" for kind in kinds for n in (0, 2) for name in readers}
    assert set(result["rows"]) == names - {"jsonl 0 WebDataset", "jsonl 2 WebDataset"}
    assert all(speed > 0 for (speed,) in result["rows"].values())
    assert set(result["seconds"]) == {"random", "LengthBuckets"}
