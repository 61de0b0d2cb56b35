"""The benchmarks: parts of a step, limits, interleaved runs, ratios with intervals."""

import json
import random
from unittest.mock import Mock, call

import pytest
import torch

import lab.bench.__main__ as bench
from lab.bench import checkpoint, loader, peer, peers, report, split, streams, watching
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


def test_jobs_take_turns_and_one_that_failed_has_no_more():
    job = Mock()
    job.b.side_effect = RuntimeError("out of memory")
    samples, errors = take_turns({"a": job.a, "b": job.b, "c": job.c}, 2)
    assert job.mock_calls == [call.a(), call.b(), call.c(), call.a(), call.c()]
    assert samples == {"a": [job.a()] * 2, "b": [], "c": [job.c()] * 2}
    assert errors == {"b": "out of memory"}


def test_interrupted_loop_keeps_its_samples():
    interrupted = Mock(side_effect=[2.0, KeyboardInterrupt])
    samples, errors = take_turns({"a": lambda: 1.0, "b": interrupted}, 3)
    assert samples == {"a": [1.0, 1.0], "b": [2.0]}
    assert not errors


# The table of the scripts


@pytest.mark.slow
@pytest.mark.rare
def test_divided_models_are_measured(tmp_path):
    flags = {"schedule": "1F1B", "micro_batches": 4, "global_batch_size": 16, "image_size": 16}
    flags |= {"synthetic_samples": 64, "device": "cpu"}
    sample = split.measure("train_pp.py", flags, tmp_path / "pp")
    parameters, gradients, state = (sum(sample[kind]) for kind in split.KINDS)
    assert parameters == gradients == state / 2 == 4 * 138_954
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
    assert sample["updates"] == len(sample["steps"]) == 3
    assert sample["start_up"] > 0
    assert sum(sample["parts"]) >= 0.5 * sample["step_seconds"] > 0
    assert sample["global_batch_size"] == 16
    assert sample["samples"] == 3 * 16
    ((key, (limits,)),) = measurements["limits"].items()
    assert key == "x2 global_batch_size=16"
    assert limits.keys() == {"data", "compute", "communication"}
    assert all(speed > 0 for speed in limits.values())
    assert "DDP x2, 8 each" in (tmp_path / "bench.md").read_text()
    # Of a single run, there is no interval.
    assert "DDP x2, 8 each: 1.00\n" in report.compared(measurements, measurements) + "\n"


def test_bottlenecks():
    limits = {"data": 500.0, "compute": 100.0}
    waiting, parts = [6, 30, 60, 4, 0], [1, 30, 60, 9, 0]
    assert report.bottleneck(waiting, limits, 0.9).startswith("input")
    assert report.bottleneck(parts, limits, 0.9) == "compute"
    assert report.bottleneck(parts, limits, 0.5).startswith("overhead")
    limits["communication"] = 50.0
    assert report.bottleneck(parts, limits, 0.5).startswith("communication")


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


# What it costs to watch a run


def test_watching_compares_neighbors():
    """The machine gets slower all the time: the medians of all blocks would be misleading."""
    without = [1.0 + 0.1 * n for n in range(20)]
    middle, low, high = watching.paired(without, [1.02 * s for s in without])
    assert (middle, low, high) == pytest.approx((1.02, 1.02, 1.02))


# The probe


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


def test_ratio_is_to_the_fastest_peer_on_as_many_processes():
    rows = {}
    for contestant in contestants([1, 2], [0, 4]):
        facts = contestant.facts()
        speed = {"ours": 200, "bare": 210, "peer": 100}[facts["kind"]]
        rows[contestant.key] = facts | {"samples": [{"images_per_second": speed}]}
    rows["fabric x1 float32 4"]["samples"] = [{"images_per_second": 10_000}]
    result = {"contestants": rows}
    assert ratio(result, rows["ours, 1 device float32"]) == "0.02 of float32"
    text = ratio(result, rows["ours, DDP x2, BatchNorm per rank bfloat16"])
    assert text == "2.00 of bfloat16; 2.00 of float32"
    assert "0.95" in ratio(result, rows["bare loop, our loader float32"])
    assert ratio(result, rows["fabric x1 float32 0"]) == ""


@pytest.mark.slow
@pytest.mark.rare
def test_bare_loop_trains(tmp_path):
    flags = ["--processes=1", "--repeats=1", "--steps=2", "--workers=0", f"--output={tmp_path}"]
    flags += ["--set=global_batch_size=8", "--set=image_size=8", "--set=device=cpu"]
    run_main(peers, "--only=bare", "--set=model=resnet20", *flags)
    measurements = json.loads((tmp_path / "peers.json").read_text())["contestants"]
    assert list(measurements) == ["bare loop, our loader float32"]
    (sample,) = measurements["bare loop, our loader float32"]["samples"]
    assert sample["images_per_second"] > 0 and 0 <= sample["train_accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", ["tutorial", "tuned"])
def test_peer_trains_on_the_same_images(name, tmp_path):
    flags = flag_list(SMALL | {"model": "shufflenet_v2_x0_5", "image_size": 32})
    run_main(peer, str(tmp_path), name, "0", "bfloat16", *flags)
    result = json.loads((tmp_path / "peer-0.json").read_text())
    assert result["samples"] == SMALL["synthetic_samples"] and 0 <= result["accuracy"] <= 1


def test_peers_are_repeated_with_their_best_numbers_of_workers(tmp_path, monkeypatch):
    speeds = {"0": 10.0, "1": 12.0, "2": 11.0, "4": 5.0}
    runs = []

    def sample(runner, contestant):
        runs.append(contestant.key)
        return {"images_per_second": speeds[contestant.workers], "train_accuracy": 0.1}

    monkeypatch.setattr(peers, "sample", sample)
    flags = ["--processes=2", "--workers=0,1,2,4", "--only=fabric x2 float32"]
    run_main(peers, "--repeats=3", f"--output={tmp_path}", *flags)
    counts = [runs.count(f"fabric x2 float32 {workers}") for workers in speeds]
    assert counts == [1, 3, 3, 1]
    assert " | 4 | " not in (tmp_path / "peers.md").read_text()


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
    ours, reference = loader.ours(flags, 0, normalized=True), loader.reference(flags, 0)
    for batches, count in (ours, reference):
        assert count == 16
        images, _ = next(iter(batches))
        assert (images.shape, images.dtype) == ((4, 3, 32, 32), torch.float32)
    speeds = loader.compare(ours, reference, repeats=2)
    assert all(min(each) > 0 for each in speeds.values())


@pytest.mark.slow
def test_checkpoint_costs_are_measured(tmp_path):
    flags = ["--models=resnet20", "--steps=3", "--repeats=1", f"--output={tmp_path}"]
    run_main(checkpoint, *flags, "--set=global_batch_size=4", "--set=device=cpu")
    measurements = json.loads((tmp_path / "checkpoint.json").read_text())["models"]["resnet20"]
    assert measurements["load"] > 0
    assert measurements["bytes"] > 1e6
    assert [len(measurements["runs"][mode]) for mode in checkpoint.MODES] == [1, 1]


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
    for workers in (0, 2):
        for name in streams.READERS:
            assert result["rows"][f"tar {workers} {name}"] > [0]
            assert f"jsonl {workers} {name}" in result["rows"] or name == "WebDataset"
    assert set(result["seconds"]) == {"random", "LengthBuckets"}
