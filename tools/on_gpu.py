"""python -m tools.on_gpu OUT: all that wants a GPU, in one call; every stage leaves a log in OUT.

    --only NAME,...   some stages, in this order; default: all
    --minutes N       stop a stage that takes longer (default: 9)
    --data-dir DIR    CIFAR-10 as JPEG folders; default: the original, downloaded

Stages: tests (tests/gpu), verify, roof (what the GPU can do at most), modes18 and modes50 (ResNets,
each precision eager, compiled and with CUDA graphs), peers18 and peers50, profile50 (how busy the
GPU is, and with what), bench (ResNet-18, the DDP rows), decode (JPEGs on the GPU and on a core of
the CPU), loader, checkpoint, and cifar10-94 (five seeds). A stopped bench reports what it has.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import torch
from torchvision.io import ImageReadMode, decode_jpeg

from tools.bench_loader import make_photographs
from tools.runs import ROOT, kill_family

STOPPED = "stopped"


def stages(out, data_dir=None):
    """{name: commands}, each an argument list for Python."""
    images = ["--dataset=imagefolder", f"--data-dir={data_dir}"] if data_dir else []

    def bench(name, model, *more):
        return ["-m", "tools.bench", f"--set=model={model}", f"--output={out / name}", *more]

    def peers(name, model):
        flags = [f"--set=model={model}", "--processes=1", "--repeats=3", "--steps=195"]
        return ["-m", "tools.bench_peers", *flags, f"--output={out / name}"]

    modes = ["--only=1 device", "--repeats=3", "--steps=195"]  # CIFAR-10's epoch
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    fifty = ["train_ddp_amp.py", "--config=configs/bench.yaml", "--model=resnet50", "--epochs=2"]
    fifty += [f"--synthetic-samples={60 * 256}", "--resume=never", "--save-minutes=0"]
    profiles = []
    for mode in ("none", "default", "reduce-overhead"):
        folder = out / f"profile50-{mode}"
        flags = [*fifty, f"--compile={mode}", f"--output-dir={folder}"]
        profiles.append([*launch, "-m", "tools.profiler", str(folder), *flags])
    cifar = ["train_ddp_amp.py", "--config=configs/cifar10-94.yaml", "--resume=never", *images]
    seeds = [
        [*launch, *cifar, f"--seed={seed}", f"--output-dir={out / f'cifar10-94-{seed}'}"]
        for seed in range(5)
    ]
    return {
        "tests": [["-m", "pytest", "tests/gpu"]],
        "verify": [["-m", "tools.verify", "--device=cuda:0", f"--write={out / 'verify.md'}"]],
        "roof": [["-m", "tools.on_gpu", str(out), "--measure=roof"]],
        "modes18": [bench("modes18", "resnet18", *modes)],
        "modes50": [bench("modes50", "resnet50", *modes)],
        "peers18": [peers("peers18", "resnet18")],
        "peers50": [peers("peers50", "resnet50")],
        "profile50": profiles,
        "bench": [bench("bench", "resnet18", "--only=DDP", "--repeats=3", "--steps=195")],
        "decode": [["-m", "tools.on_gpu", str(out), "--measure=decode"]],
        "loader": [["-m", "tools.bench_loader", f"--output={out / 'loader'}"]],
        "checkpoint": [
            ["-m", "tools.bench_checkpoint", "--steps=200", f"--output={out / 'checkpoint'}"]
        ],
        "cifar10-94": seeds,
    }


def per_second(work, amount, repeats=20):
    """`amount` a call of work(), by the GPU's own clock."""
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return amount * repeats / (begin.elapsed_time(end) / 1e3)


def roof():
    """What the GPU can do at most: bytes copied, bfloat16 matrix products, kernels launched."""
    size = 2**30
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    n = 8192
    left, right = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one = torch.zeros(1, device="cuda")

    def launches():
        for _ in range(1000):
            one.add_(1)

    launches()
    torch.cuda.synchronize()
    start = time.perf_counter()
    launches()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start  # of 1000
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy, GB/s read and written": per_second(lambda: target.copy_(source), 2 * size) / 1e9,
        "bfloat16 matrix products, TFLOP/s": per_second(lambda: left @ right, 2 * n**3) / 1e12,
        "a kernel's launch, us": seconds * 1e3,
    }


def decode():
    """JPEGs decoded a second: by the GPU's decoder, and by one core of the CPU."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = sorted(make_photographs(Path(folder), 256).glob("train/*/*.jpg"))
        files = [torch.frombuffer(bytearray(p.read_bytes()), dtype=torch.uint8) for p in paths]
    found = {}
    for device in ("cuda", "cpu"):
        for _ in range(3):  # the last counts
            torch.cuda.synchronize()
            start = time.perf_counter()
            decode_jpeg(files, ImageReadMode.RGB, device=device)
            torch.cuda.synchronize()
            found[device] = len(files) / (time.perf_counter() - start)
    return {f"images/s on {device}": speed for device, speed in found.items()}


def run(command, log, limit):
    """Exit code of Python with these arguments; STOPPED where it took longer than `limit` seconds.

    It is interrupted first, so that it can report what it has; nothing of it is left behind.
    """
    tag = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=log,
        stderr=log,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RUN_TAG": tag},
        # A shell's background jobs would ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        return process.wait(limit)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        if isinstance(stop, KeyboardInterrupt):
            raise
        return STOPPED
    finally:
        kill_family(tag)
        process.wait()


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.on_gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", metavar="NAME,...")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--data-dir", metavar="DIR")
    parser.add_argument("--measure", choices=("roof", "decode"), help="what a stage runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stopped stage leaves nothing
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.measure:
        found = {"roof": roof, "decode": decode}[args.measure]()
        (args.out / f"{args.measure}.json").write_text(json.dumps(found))
        print(json.dumps(found, indent=1))
        return 0
    known, failed = stages(args.out, args.data_dir), []
    names = args.only.split(",") if args.only else list(known)
    for name in names:
        if name not in known:
            parser.error(f"no stage is called {name}: {', '.join(known)}")
    for name in names:
        start, code = time.monotonic(), 0
        with open(args.out / f"{name}.log", "w") as log:
            for command in known[name]:
                left = max(1.0, args.minutes * 60 - (time.monotonic() - start))
                code = run(command, log, left) or code
                if code == STOPPED:
                    break
        failed += [name] if code else []
        print(f"{name}: {code or 'done'} in {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
