"""Tests that need a GPU (make test-gpu); skipped without one."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torchvision

import tasks.images as task
import train_ddp_amp
from lab.chaos.run import sha256
from tests.processes import planted, run_script
from tools.lib.runs import ROOT, finish_run, start_run
from tools.verify.cases import LINEAR
from utils.checkpoint import Checkpointer, read_checkpoint
from utils.config import Config, load_config
from utils.data import build_loader
from utils.metrics import Meter
from utils.rungs.graph import GraphedStep
from utils.sampler import EpochSampler

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu"
)

# On the null device, where tests/tools/test_null_gpu.py runs these tests, kernels compute nothing:
# what has been computed is not compared there, and tests that do nothing else are left out.
ON_NULL = "NULL_REPORT" in os.environ
needs_values = pytest.mark.skipif(ON_NULL, reason="needs what a GPU computes, or measures")
NAMES = ("train_loss", "val_loss", "val_accuracy")
TWO = "cuda:0,cuda:0"
RUNS = {  # script, processes of torchrun, flags; two processes share the GPU over gloo
    "1gpu": ("train_1gpu.py", None, {"device": "cuda"}),
    "graph": ("train_1gpu_graph.py", None, {"device": "cuda"}),
    "dp": ("train_dp.py", None, {"device": "cuda"}),
    "dp, on the CPU": ("train_dp.py", None, {"device": "cpu"}),
    "ddp, NCCL": ("train_ddp.py", 1, {"device": "cuda"}),
    "amp float16, NCCL": ("train_ddp_amp.py", 1, {"device": "cuda", "amp_dtype": "float16"}),
    "accum, NCCL": ("train_ddp_accum.py", 1, {"device": "cuda"}),
    "fsdp, NCCL": ("train_fsdp.py", 1, {"device": "cuda"}),
    "spawn, NCCL": ("train_ddp_spawn.py", None, {"device": "cuda", "spawn_processes": 1}),
    "mp, two stages on one GPU": ("train_mp.py", None, {"devices": TWO}),
    "mp, GPU and CPU": ("train_mp.py", None, {"devices": "cuda:0,cpu"}),
    "ddp, gloo x2": ("train_ddp.py", 2, {"device": "cuda:0"}),
    "ddp_mp, gloo x2": ("train_ddp_mp.py", 2, {"devices": TWO}),
}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """train_1gpu.py on the CPU, in float64: the reference of every run here."""
    run = run_script("train_1gpu.py", dtype="float64", output_dir=tmp_path_factory.mktemp("cpu"))
    assert run.code == 0, run.stderr
    return run


def numbers(run):
    """What a run has measured, once it has ended well. On the null device: nothing to compare."""
    assert run.code == 0, run.stderr
    if ON_NULL:
        return []
    return [row[name] for row in run.rows for name in NAMES]


@pytest.mark.parametrize("name", RUNS)
def test_every_script_matches_the_cpu(name, on_cpu, tmp_path):
    script, nproc, flags = RUNS[name]
    one = {"CUDA_VISIBLE_DEVICES": "0"} if name == "dp" else None  # two would change BatchNorm
    run = run_script(script, nproc, environment=one, dtype="float64", output_dir=tmp_path, **flags)
    assert numbers(run) == pytest.approx(numbers(on_cpu), rel=1e-7)


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")], ids=" then ".join)
def test_run_is_resumed_on_another_device(devices, on_cpu, tmp_path):
    first, second = devices
    begun = run_script("train_1gpu.py", dtype="float64", device=first, output_dir=tmp_path)
    for name in ("last.pt", "best.pt", "epoch-0002.pt"):
        (tmp_path / name).unlink()
    # On the null device, the samples that lie on it are all zeros: different ones.
    flags = {"device": second, "allow_config_change": ON_NULL}
    run = run_script("train_1gpu.py", dtype="float64", output_dir=tmp_path, **flags)
    assert run.rows[0] == begun.rows[0] and len(run.rows) == 2
    assert numbers(run) == pytest.approx(numbers(on_cpu), rel=1e-7)


def test_batches_match_the_cpu_bit_for_bit():
    flags = ["--dataset=synthetic", "--synthetic-samples=100", "--global-batch-size=30"]
    cfg, loaders = load_config(task.Settings, None, flags), []
    for device in ("cpu", "cuda"):
        train_set, _ = task.build_datasets(cfg)
        sampler = EpochSampler(train_set, seed=0)
        loaders.append(build_loader(train_set, sampler, 30, torch.device(device), cfg, train=True))
    for ours, theirs in zip(*loaders, strict=True):
        equal = [torch.equal(a, b.cpu()) for a, b in zip(ours, theirs, strict=True)]
        assert all(equal) or ON_NULL


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("loader", ["device", "workers"])
def test_graph_trains_the_same_weights(optimizer, loader, tmp_path):
    """A graph reads its learning rates as float32: those of LINEAR are not rounded."""
    flags = LINEAR | {"clip_norm": 1.0, "dtype": "float64", "device": "cuda", "loader": loader}
    flags |= {"optimizer": optimizer, "num_workers": 1, "log_steps": 1}
    files, losses = [], []
    for script in ("train_1gpu.py", "train_1gpu_graph.py"):
        run = run_script(script, output_dir=tmp_path / script, **flags)
        assert run.code == 0, run.stderr
        files.append(read_checkpoint(run.output_dir / "last.pt"))
        rows = (run.output_dir / "steps.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=1e-7)
    assert files[0]["optimizer"]["param_groups"] == files[1]["optimizer"]["param_groups"]
    for name, value in files[0]["model"].items():
        torch.testing.assert_close(files[1]["model"][name], value, rtol=1e-7, atol=1e-7)


def test_deterministic_runs_have_the_same_bits(tmp_path):
    flags = {"device": "cuda", "deterministic": True, "model": "resnet18", "epochs": 1}
    sums = []
    for name in ("first", "second"):
        run = run_script("train_1gpu.py", output_dir=tmp_path / name, **flags)
        assert run.code == 0, run.stderr
        sums.append(sha256(read_checkpoint(run.output_dir / "last.pt")["model"]))
    assert sums[0] == sums[1]


def test_dropout_of_a_graph_follows_the_seed_of_each_step():
    device = torch.device("cuda")
    layer = torch.nn.Dropout(0.5)
    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)

    def step(inputs, targets):
        outputs = layer(inputs) + weight
        optimizer.zero_grad()
        outputs.sum().backward()
        optimizer.step()
        return outputs.sum(), outputs - weight

    inputs, targets, zeros = torch.ones(64, 8, device=device), torch.zeros(64, device=device), []
    train_step = GraphedStep(step, optimizer, device)
    for i in range(6):
        torch.cuda.manual_seed_all(i % 5)  # eager, eager, eager, captured, replayed; then as first
        _, outputs = train_step(inputs, targets)
        zeros.append(outputs.round() == 0)
    assert train_step.graph is not None
    assert torch.equal(zeros[0], zeros[5])
    assert not torch.equal(zeros[3], zeros[4]) or ON_NULL


@pytest.mark.parametrize("script", ["train_1gpu.py", "train_1gpu_graph.py"])
def test_step_that_is_not_finite_is_skipped_on_the_device(script, tmp_path):
    """Also in a graph, which is replayed by then."""
    loop, runs = "    for inputs, targets in loader:", []
    bad = f"{loop}\n        inputs = inputs * (float('nan') if loader.read == 6 else 1.0)  #"
    copy = planted(tmp_path, script, loop, bad)
    for device in ("cpu", "cuda"):
        flags = {"device": device, "dtype": "float64", "max_skipped_steps": 2}
        run = run_script(copy, output_dir=tmp_path / device, **flags)
        assert run.stderr.count("warning: step 6 of epoch") == 2 or ON_NULL
        runs.append(run)
    assert [row["train_samples"] for row in runs[1].rows] == [84, 84] or ON_NULL  # of 96
    assert numbers(runs[1]) == pytest.approx(numbers(runs[0]), rel=1e-7)


class OneBatch(list):
    """A loader of one batch, with the attributes that Meter needs."""

    device, dataset = torch.device("cuda"), range(5)
    samples = started = 0
    train = counts = True


def test_overflow_skips_the_step_and_halves_the_scale(monkeypatch):
    device = torch.device("cuda")
    cfg = SimpleNamespace(autocast_dtype=torch.float16, clip_norm=1.0)
    checkpoint = SimpleNamespace(step=lambda: None)
    model = torch.nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    batch = torch.randn(5, 4, device=device), torch.randint(3, (5,), device=device)
    loader, loss = OneBatch([batch]), task.loss

    def epoch(factor):
        monkeypatch.setattr(task, "loss", lambda outputs, targets: factor * loss(outputs, targets))
        meter, before = Meter(task, loader), model.weight.clone()
        train_ddp_amp.train_one_epoch(
            model, loader, optimizer, scheduler, scaler, meter, checkpoint, cfg
        )
        return torch.equal(model.weight, before), scaler.get_scale()

    epochs = [epoch(factor) for factor in (1.0, 1e37, 1.0)]
    assert epochs == [(False, 1024.0), (True, 512.0), (False, 512.0)] or ON_NULL


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_learns_like_float32(dtype, tmp_path):
    flags = {"device": "cuda", "global_batch_size": 12}
    exact = run_script("train_ddp.py", 1, output_dir=tmp_path / "exact", **flags)
    half = run_script("train_ddp_amp.py", 1, output_dir=tmp_path, amp_dtype=dtype, **flags)
    assert numbers(half)[:1] == pytest.approx(numbers(exact)[:1], rel=2e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_train_like_eager_ones(mode, tmp_path):
    runs = [
        run_script("train_1gpu.py", device="cuda", compile=m, output_dir=tmp_path / m, limit=400)
        for m in ("none", mode)
    ]
    eager, other = map(numbers, runs)
    assert other[:2] == pytest.approx(eager[:2], rel=1e-2)


SYNC_BATCHNORM = """
import sys, torch
sys.path.insert(0, {root!r})
from utils.distributed import dp_rank, init_distributed
from utils.sync_batchnorm import SyncBatchNorm
device = init_distributed("cuda:0")
for dtype, layout in (
    (torch.float64, torch.contiguous_format),
    (torch.float64, torch.channels_last),
    (torch.bfloat16, torch.channels_last),
    (torch.bfloat16, torch.contiguous_format),
):
  for momentum in (0.1, None):
    torch.manual_seed(dp_rank())
    images, results = torch.randn(3 + dp_rank(), 4, 5, 5, dtype=dtype), []
    for kind in (torch.nn.SyncBatchNorm, SyncBatchNorm):
        model = kind(4, momentum=momentum, device=device)
        model = model.to(torch.promote_types(dtype, torch.float32))
        x = images.to(device, memory_format=layout).detach().requires_grad_()
        outputs = model(x)
        (outputs * torch.arange(5.0, device=device)).square().sum().backward()
        results.append([outputs, x.grad, model.weight.grad, *model.buffers()])
    for theirs, ours in zip(*results):
        exact = dtype == torch.float64
        tolerance = dict(rtol=1e-7, atol=1e-7) if exact else dict(rtol=0.02, atol=0.02)
        torch.testing.assert_close(ours, theirs, **tolerance)
torch.distributed.destroy_process_group()
"""


@needs_values
def test_our_sync_batchnorm_matches_pytorch(tmp_path):
    (tmp_path / "script.py").write_text(SYNC_BATCHNORM.format(root=str(ROOT)))
    run = finish_run(start_run(tmp_path / "script.py", 2, {}), tmp_path)
    assert run.code == 0, run.stderr


@pytest.mark.parametrize("devices", [["cuda"], ["cuda", "cpu"]], ids=str)
def test_checkpoint_holds_the_values_at_the_save(devices, tmp_path):
    """Training changes them at once, while a thread writes the file."""
    layers = [torch.nn.Linear(2048, 2048, device=device) for device in devices]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = SimpleNamespace(state_dict=dict, load_state_dict=None)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "data": {}}
    checkpoint = Checkpointer(Config(output_dir=str(tmp_path)), state)
    busy = torch.randn(4096, 4096, device="cuda")
    for epoch in (1, 2):
        for _ in range(100):  # work that the GPU has yet to do
            busy = (busy @ busy).clamp(-1, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(epoch).add_(0 * busy[0, 0].to(parameter.device))
        checkpoint.save(epoch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpoint.wait()
        saved = read_checkpoint(tmp_path / "last.pt")["model"]
        assert all((value == epoch).all() for value in saved.values()) or ON_NULL


def test_channels_last_changes_nothing():
    torch.manual_seed(0)
    model, images = torchvision.models.resnet18(num_classes=4), torch.randn(8, 3, 32, 32)
    model, images = model.double().cuda(), images.double().cuda()
    expected = model(images)
    model = model.to(memory_format=torch.channels_last)
    outputs = model(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(outputs, expected)


CHECK_SYNC = """
import sys, torch
sys.path.insert(0, {root!r})
from lab.bench.hooks import run_script
def around(loader, batches):
    for step, batch in enumerate(batches):
        if step == 2:  # everything that is created once exists
            torch.cuda.set_sync_debug_mode("error")
        yield batch
        if step == len(loader) - 2:
            torch.cuda.set_sync_debug_mode("default")
            print("checked", step)
run_script({script!r}, sys.argv[1:], around)
"""


@pytest.mark.parametrize("script", ["train_1gpu.py", "train_ddp_amp.py", "train_ddp_accum.py"])
@pytest.mark.parametrize("loader", ["device", "workers"])
def test_nothing_waits_for_the_gpu_between_steps(script, loader, tmp_path):
    text = CHECK_SYNC.format(root=str(ROOT), script=str(ROOT / script))
    (tmp_path / "checked.py").write_text(text)
    nproc = None if script == "train_1gpu.py" else 1
    flags = {"device": "cuda", "loader": loader, "clip_norm": 1.0}
    flags |= {"amp_dtype": "float16"} if script == "train_ddp_amp.py" else {}
    run = run_script(tmp_path / "checked.py", nproc, output_dir=tmp_path / "run", **flags)
    assert run.code == 0, run.stderr
    assert run.stdout.count("checked") == 2  # epochs


@needs_values
@pytest.mark.parametrize("script", ["train_1gpu.py", "train_ddp.py"])
def test_timing_divides_the_time_of_the_gpu(script, tmp_path):
    nproc = 1 if script == "train_ddp.py" else None
    flags = {"device": "cuda", "timing": True, "synthetic_samples": 480, "output_dir": tmp_path}
    run = run_script(script, nproc, **flags)
    assert run.code == 0, run.stderr
    for row in run.rows:
        seconds = {name: values[0] for name, values in row["time"].items() if name != "total"}
        assert sum(seconds.values()) == pytest.approx(row["time"]["total"])
        # Steps of a small model with 12 images: the GPU computes, and waits for its host.
        assert seconds["computing"] > 0 and seconds["host"] > 0 and seconds["cores"] == 0
    assert "wait for the host" in run.rows[-1]["limited_by"]


@needs_values
def test_profile_shows_kernels(tmp_path):
    run = run_script("train_1gpu.py", None, device="cuda", profile="4:7", output_dir=tmp_path)
    assert run.code == 0, run.stderr
    text = (tmp_path / "profile" / "summary.txt").read_text()
    assert torch.cuda.get_device_name() in text and "kernels and" in text
    assert " 0 kernels" not in text


def test_peak_memory_is_reported(tmp_path):
    flags = ["--dataset=synthetic", "--model=resnet20", "--epochs=1", "--device=cuda"]
    flags += ["--synthetic-samples=512", f"--output-dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "lab.bench.probe", str(tmp_path), "train_1gpu.py", *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=180)
    result = json.loads((tmp_path / "rank-0.json").read_text())
    assert result["memory"] > 10 * 2**20 and result["device"] == torch.cuda.get_device_name()


@needs_values
def test_verify_passes():
    command = [sys.executable, "-m", "tools.verify", "--device", "cuda:0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout
