"""What a run costs one rank among thousands: start-up, samples, memory and object gathers.

    python -m lab.scale --ranks 8 64 1024 8192

Rank 0 of train_ddp.py really runs, for two epochs of four steps, in a process group of PyTorch's
"fake" backend: the group has the given size, but nothing is sent, and each collective returns at
once, as if all ranks had sent what this one did. What the ranks do themselves, such as pickling,
sorting and allocating, is measured; the network is not. Prints Markdown tables.
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DistributedSampler

import train_ddp
from tools.lib.runs import flag_list

STEPS = 4  # per epoch: the validation set, a quarter of it, then has a sample per rank
FLAGS = {"dataset": "synthetic", "image_size": 8, "model": "resnet20_gn", "epochs": 2}
FLAGS |= {"device": "cpu", "num_threads": 1, "save_steps": 1, "save_minutes": 0}


def join_fake_group(rank, world_size, ranks_per_node=8):
    """Join a group of `world_size` ranks of which only this one exists."""
    os.environ["LOCAL_RANK"] = str(rank % ranks_per_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(min(ranks_per_node, world_size))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    return torch.device("cpu")


class Gathers:
    """Records the object gathers of this process, by the function of utils/ that makes them."""

    def __init__(self):
        self.calls = defaultdict(lambda: {"count": 0, "bytes": 0, "seconds": 0.0})
        self.gather = dist.all_gather_object
        dist.all_gather_object = self

    def __call__(self, values, value, group=None):
        start = time.perf_counter()
        self.gather(values, value)
        seconds = time.perf_counter() - start
        call = self.calls[_site(sys._getframe(1))]
        call["count"] += 1
        call["bytes"] = max(call["bytes"], len(pickle.dumps(value)))
        call["seconds"] = max(call["seconds"], seconds)


def _site(frame):
    """The function that called one of distributed.py's helpers, as module.function."""
    while frame.f_globals["__name__"] in ("utils.distributed", "contextlib"):
        frame = frame.f_back
    module = frame.f_globals["__name__"].removeprefix("utils.")
    return f"{module}.{frame.f_code.co_name}"


def run_one_rank(world_size, **flags):
    """Run rank 0 of train_ddp.py in a fake group. Call it once per process.

    Returns {"start": seconds, "epochs": seconds, "memory": bytes, "gathers": {site: {"count",
    "bytes" (of one rank's value), "seconds" (of one call)}}}.
    """
    gathers, times = Gathers(), []
    train_ddp.init_distributed = lambda device, timeout: join_fake_group(0, world_size)
    train_ddp.DistributedDataParallel = _wrap
    dist.all_reduce = _all_reduce
    summarize = train_ddp.log_summary
    train_ddp.log_summary = lambda *args: (times.append(time.perf_counter()), summarize(*args))
    with tempfile.TemporaryDirectory() as folder:
        flags = FLAGS | {"output_dir": folder, "global_batch_size": world_size} | flags
        flags.setdefault("synthetic_samples", STEPS * world_size)
        sys.argv = ["train_ddp.py", *flag_list(flags)]
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train_ddp.main()
        end = time.perf_counter()
    dist.destroy_process_group()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = {"start": times[0] - start, "epochs": end - times[0]}
    return {**seconds, "memory": memory, "gathers": dict(gathers.calls)}


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """dist.all_reduce(), as if all ranks had the same tensor."""
    if op == dist.ReduceOp.SUM:
        tensor.mul_(dist.get_world_size(group))


def _wrap(model, **options):
    """DistributedDataParallel without its all-reduce, which the fake backend never completes."""
    wrapped = DistributedDataParallel(model, **options)
    wrapped.register_comm_hook(None, _reduce_nothing)
    return wrapped


def _reduce_nothing(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def check_partition(world_size, steps=STEPS, epoch=1):
    """Assert that the ranks' shares partition an epoch, and each global batch; return the seconds
    that one rank needs for its share."""
    dataset = range(steps * world_size + world_size - 1)  # the last batch is incomplete
    batches, seconds = [[] for _ in range(steps)], []
    for rank in range(world_size):
        start = time.perf_counter()
        sampler = DistributedSampler(dataset, world_size, rank, seed=0, drop_last=True)
        sampler.set_epoch(epoch)
        for batch, index in zip(batches, list(sampler)[:steps], strict=True):
            batch.append(index)
        seconds.append(time.perf_counter() - start)
    samples = [index for batch in batches for index in batch]
    assert len(samples) == len(set(samples)) == steps * world_size, "samples are shared or missing"
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
    for step, batch in enumerate(batches):
        expected = order[step * world_size : (step + 1) * world_size]
        assert batch == expected, f"global batch {step} depends on the number of ranks"
    return sorted(seconds)[len(seconds) // 2]


def tables(results, shares):
    """The results of run_one_rank() and check_partition(), by number of ranks, as Markdown."""
    yield "| ranks | start-up | two epochs | memory | sampling per epoch |"
    yield "| --- | --- | --- | --- | --- |"
    for ranks, result in results.items():
        row = (
            f"{result['start']:.2f} s | {result['epochs']:.2f} s | {result['memory'] / 1e6:.0f} MB"
        )
        yield f"| {ranks:,} | {row} | {shares[ranks] * 1e3:.1f} ms |"
    yield ""
    columns = " | ".join(f"{ranks:,} ranks" for ranks in results)
    yield f"| object gather | calls | bytes per rank | {columns} |"
    yield f"| --- | --- | --- |{' --- |' * len(results)}"
    last = list(results.values())[-1]["gathers"]
    for site, call in sorted(last.items()):
        every = [result["gathers"].get(site, call) for result in results.values()]
        seconds = " | ".join(f"{c['seconds'] * 1e3:.1f} ms" for c in every)
        yield f"| `{site}` | {call['count']} | {call['bytes']:,} | {seconds} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 8192])
    parser.add_argument("--json", action="store_true", help="one number of ranks, as JSON")
    parser.add_argument("--save-sharded", action="store_true", help="the scripts' flag")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(run_one_rank(args.ranks[0], save_sharded=args.save_sharded)))
        return
    results, shares = {}, {}
    for ranks in args.ranks:
        command = [sys.executable, "-m", "lab.scale", "--json", "--ranks", str(ranks)]
        if args.save_sharded:
            command.append("--save-sharded")
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[ranks] = json.loads(run.stdout)
        shares[ranks] = check_partition(ranks)
    print("\n".join(tables(results, shares)))


if __name__ == "__main__":
    main()
