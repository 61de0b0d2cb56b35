"""Count what each training step issues besides the model, and how long the host takes for it.

    python -m lab.bench.operations

The model is so small, and computes so little, that the host's time is nearly the whole step. Every
row trains it on the same synthetic images in one process on the CPU: this project's scripts, what a
user might choose instead (lab/bench/peer.py), and the model alone, which repeats forward, loss,
backward and a fused optimizer step on one batch. An operation is a call of a PyTorch operator that
reaches the device, without views and allocations; most of them launch one kernel on a GPU. A read
is a value that the host needs (`item()`), for which it would wait for a GPU. DataLoader workers are
other processes: what they compute is not counted, but it is in the main process with this project's
loader, which augments whole batches on the device. The rows take turns.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lab.bench import peer
from lab.bench.hooks import run_script
from lab.bench.limits import training_step
from lab.bench.report import medians, run_counts, spread, write_table
from lab.bench.runner import machine, take_turns
from tasks.images.models import build_classifier
from tools.lib.markdown import markdown_table
from tools.lib.runs import ROOT, end_runs_on_sigterm, finish_run, flag_list, start_run
from utils.config import load_config
from utils.optim import build_optimizer

IGNORED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
IGNORED |= {"_record_function_enter_new", "_record_function_exit"}  # marks for profilers
WARM_UP, COUNTED, TIMED = 10, 10, 200  # steps
BATCH = 2
FLAGS = {
    "model": "squeezenet1_1",  # no BatchNorm: two images are enough
    "image_size": 48,  # at 32, the last feature maps have one pixel (tasks/images/one_pixel.py)
    "dataset": "synthetic",
    "synthetic_samples": BATCH * (2 * WARM_UP + COUNTED + TIMED + 1),
    "global_batch_size": BATCH,
    "epochs": 1,
    "lr": 1e-4,
    "num_threads": 1,
    "device": "cpu",
}
# The rows that are scripts of this project: {name: script, processes, flags}.
SCRIPTS = {
    "ours, train_1gpu.py": ("train_1gpu.py", None, {}),
    "ours, train_1gpu.py --loader workers": (
        "train_1gpu.py",
        None,
        {"loader": "workers", "num_workers": 1},
    ),
    "ours, train_ddp.py x1": ("train_ddp.py", 1, {}),
}
PEERS = ("tutorial", "tuned", "reference", "accelerate", "fabric", "trainer")
MODEL = "the model alone"
HEAD = ["row", "operations", "besides the model", "reads", "host us per step"]
HEAD += ["besides the model, us"]


class Counting(TorchDispatchMode):
    """Counts the operators that compute or send: not views, not the allocation of memory."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in IGNORED:
            self.counts[name] += 1
        return operator(*args, **(kwargs or {}))


class Recorder:
    """Counts the operations of some steps and times others; after_step() ends a step."""

    def __init__(self):
        self.step, self.seconds, self.last = 0, [], 0.0
        self.counting = Counting()

    def after_step(self, *_):
        """A register_optimizer_step_post_hook() hook: a step lasts from one call to the next."""
        now = time.perf_counter()
        self.step += 1
        if self.step == WARM_UP:
            self.counting.__enter__()
        elif self.step == WARM_UP + COUNTED:
            self.counting.__exit__(None, None, None)
        elif self.step > 2 * WARM_UP + COUNTED and len(self.seconds) < TIMED:
            self.seconds.append(now - self.last)
        self.last = time.perf_counter()

    def result(self):
        """The numbers of one step, as a dict."""
        if len(self.seconds) < TIMED:
            raise RuntimeError(f"{self.step} steps are too few")
        counts = {name: count / COUNTED for name, count in self.counting.counts.items()}
        return {
            "operations": sum(counts.values()),
            "reads": counts.get("_local_scalar_dense", 0),
            "microseconds": 1e6 * statistics.median(self.seconds),
            "counts": counts,
        }


def model_alone(flags):
    """Forward, loss, backward and optimizer step on one batch, without anything else."""
    cfg = load_config(peer.task.Settings, None, flags)
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(cfg.num_threads)
    model = build_classifier(cfg, 10)
    images = torch.randn(BATCH, 3, cfg.image_size, cfg.image_size)
    images = images.contiguous(memory_format=torch.channels_last)
    step = training_step(model, build_optimizer(model, cfg), images, torch.arange(BATCH))
    for _ in range(cfg.synthetic_samples // BATCH):
        step()


def worker(folder, row, flags):
    """One row, in its own process: train, and write FOLDER/operations.json."""
    recorder = Recorder()
    register_optimizer_step_post_hook(recorder.after_step)
    if row == MODEL:
        model_alone(flags)
    elif row in SCRIPTS:
        run_script(SCRIPTS[row][0], flags, lambda loader, batches: batches)
    else:
        sys.argv = ["peer", folder, row, "1", "float32", *flags]
        peer.EPOCHS = 1
        peer.main()
    (Path(folder) / "operations.json").write_text(json.dumps(recorder.result()))


def measure(row):
    """Run a row in its own process. Returns the numbers of a step."""
    with tempfile.TemporaryDirectory(prefix="operations-") as folder:
        flags, nproc = FLAGS | {"output_dir": f"{folder}/run"}, None
        if row in SCRIPTS:
            _, nproc, more = SCRIPTS[row]
            flags |= {"save_minutes": 0, "resume": "never"} | more
        script = ["-m", "lab.bench.operations", "--worker", folder, row, *flag_list(flags)]
        cores = sorted(os.sched_getaffinity(0))
        process = start_run(script, nproc, {}, cwd=ROOT, cores=cores, launcher="tools.launch")
        run = finish_run(process, folder, 600)
        if run.code:
            raise RuntimeError(f"{row} failed with exit code {run.code}:\n{run.stderr}")
        return json.loads((Path(folder) / "operations.json").read_text())


def table_rows(result):
    """The cells of the table, one list per row, in the order of HEAD."""
    rows = result["rows"]
    alone = {key: medians(rows[MODEL], key)[0] for key in ("operations", "microseconds")}
    for name, samples in rows.items():
        operations, reads = (medians(samples, key)[0] for key in ("operations", "reads"))
        host = medians(samples, "microseconds")
        besides = "", ""
        if name != MODEL:
            besides = (
                f"{operations - alone['operations']:.0f}",
                f"{host[0] - alone['microseconds']:,.0f}",
            )
        counted = f"{operations:.0f}", besides[0], f"{reads:g}"
        yield [name, *counted, spread(*host, ",.0f"), besides[1]]


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.operations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=5, help="runs of each row (default: 5)")
    parser.add_argument("--output", default="runs/bench-operations", help="folder of the reports")
    args = parser.parse_args()
    rows = [MODEL, *SCRIPTS, *PEERS]
    samples, errors = take_turns(
        {row: partial(measure, row) for row in rows},
        args.repeats,
        describe=lambda sample: f"{sample['microseconds']:.0f} us",
    )
    result = machine() | {"rows": {row: samples[row] for row in rows if samples[row]}}
    size = "{0}x{0}".format(FLAGS["image_size"])
    text = f"{FLAGS['model']}, {BATCH} images of {size}, one thread of {result['cpu']}, torch "
    text += f"{result['torch']}. {run_counts(result['rows'].values())}.\n\n"
    text += markdown_table(HEAD, table_rows(result)) + "\n"
    write_table(result, text, args.output, "operations")
    if errors:
        sys.exit(f"error: these rows failed: {', '.join(errors)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        end_runs_on_sigterm()
        main()
