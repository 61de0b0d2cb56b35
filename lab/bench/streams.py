"""Compare readers of streams in samples/s, and batches of similar length with random ones.

    python -m lab.bench.streams

The same images in tar files and the same documents in JSON lines are read in random order by Shards
(with ShardOrder and the scripts' loader), WebDataset, datasets (streaming) and litdata, which reads
its own format. All decode with the same function, in batches of 64, without loader processes and
with two. Then the text task's model is trained for an epoch on batches that are padded to their
longest document: random ones, and batches of LengthBuckets. All runs are interleaved; the table
shows medians of --repeats epochs. Needs the packages of requirements/peers.txt and
requirements/dev.txt.
"""

import argparse
import io
import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, default_collate

import tasks.images
import tasks.text
from lab.bench.loader import CPU
from lab.bench.report import interval, spread, write_table
from lab.bench.runner import machine, take_turns
from sources.samplers import DistributedSamplerWrapper, LengthBuckets, ShardOrder
from sources.shards import Shards
from tools.lib.markdown import markdown_table
from tools.shards import write_json_lines, write_tars
from utils.config import load_config
from utils.data import BatchDataset, build_loader

BATCH, BUFFER, SIZE, LENGTH = 64, 1000, 128, 512
HEAD = ["data", "loader processes", "reader", "samples/s", "Shards / reader"]


def make_files(folder, samples):
    """Write photographs of 128x128 as tar files, and documents as JSON lines. Returns the samples:
    {kind: list}."""
    generator = numpy.random.default_rng(0)
    images, documents = [], []
    for number in range(samples):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), numpy.uint8))
        data = io.BytesIO()
        coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(data, "JPEG", quality=88)
        images.append({"cls": str(number % 10).encode(), "jpg": data.getvalue()})
        letters = generator.integers(97, 123, generator.integers(20, 2 * LENGTH), numpy.uint8)
        documents.append({"text": letters.tobytes().decode()})
    write_tars(folder, "train", images, per_shard=samples // 16)
    write_json_lines(folder, "train", documents, per_shard=samples // 16)
    return {"tar": images, "jsonl": documents}


def decode_tar(sample):
    """A sample -> (uint8 (3, 128, 128), its class)."""
    data = sample["jpg"]["bytes"] if isinstance(sample["jpg"], dict) else sample["jpg"]
    pixels = numpy.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1), int(sample["cls"])


def decode_jsonl(sample):
    """A document -> (uint8 (512,), its number of bytes)."""
    data = sample["text"].encode()[:LENGTH]
    return torch.frombuffer(bytearray(data.ljust(LENGTH)), dtype=torch.uint8), len(data)


DECODE = {"tar": decode_tar, "jsonl": decode_jsonl}


def decode_all(decode, samples):
    """A batch of samples that have not been decoded."""
    return default_collate([decode(sample) for sample in samples])


def of_shards(folder, kind, workers, dataset_class=Shards):
    """The scripts' loader."""
    flags = [f"--global-batch-size={BATCH}", f"--num-workers={workers}", "--device=cpu"]
    cfg = load_config(tasks.images.Settings, None, flags)
    dataset = dataset_class(sorted(folder.glob(f"*.{kind}")), DECODE[kind])
    sampler = DistributedSamplerWrapper(ShardOrder(dataset.shard_sizes, buffer=BUFFER), cfg.seed)
    return build_loader(dataset, sampler, BATCH, CPU, cfg, train=True)


class NotRandom(Shards, BatchDataset):
    """Shards whose transform draws no random numbers. The other readers seed no sample, either."""

    def get_batch(self, indices, epoch, seed):
        return default_collate([self[index] for index in indices.tolist()])


def of_datasets(folder, kind, workers):
    """DataLoader of a stream of datasets, which decodes in its collate function."""
    from datasets import Image, load_dataset

    settings = {"data_files": [str(path) for path in sorted(folder.glob(f"*.{kind}"))]}
    settings |= {"split": "train", "streaming": True, "cache_dir": str(folder / "cache")}
    name = {"tar": "webdataset", "jsonl": "json"}[kind]
    stream = load_dataset(name, **settings).shuffle(seed=0, buffer_size=BUFFER)
    if kind == "tar":
        stream = stream.cast_column("jpg", Image(decode=False))
    return loader_of(DataLoader, stream, workers, collate_fn=partial(decode_all, DECODE[kind]))


def of_litdata(folder, kind, workers):
    """litdata's loader."""
    from litdata import StreamingDataLoader, StreamingDataset

    stream = StreamingDataset(str(folder / f"optimized-{kind}"), transform=DECODE[kind])
    return loader_of(StreamingDataLoader, stream, workers, shuffle=True)


def loader_of(kind, stream, workers, **settings):
    """A loader with the settings that all have."""
    settings |= {"batch_size": BATCH, "drop_last": True}
    return kind(stream, num_workers=workers, persistent_workers=workers > 0, **settings)


def of_webdataset(folder, kind, workers):
    """WebLoader, whose processes make the batches. It reads no JSON lines."""
    from webdataset import WebDataset, WebLoader

    paths = [str(path) for path in sorted(folder.glob("*.tar"))]
    stream = WebDataset(paths, shardshuffle=100).shuffle(BUFFER).map(decode_tar)
    stream = stream.batched(BATCH, default_collate, partial=False)
    return WebLoader(stream, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


READERS = {
    "Shards": of_shards,
    "Shards, get_batch": partial(of_shards, dataset_class=NotRandom),
    "WebDataset": of_webdataset,
    "datasets": of_datasets,
    "litdata": of_litdata,
}


def optimize(folder, samples):
    """Write the samples in litdata's format, in a separate process: it leaves a signal handler
    behind."""

    def write():
        import litdata

        for kind, values in samples.items():
            litdata.optimize(
                fn=_unchanged,
                inputs=values,
                output_dir=str(folder / f"optimized-{kind}"),
                chunk_size=len(values) // 16,
                num_workers=1,
                start_method="fork",
                verbose=False,
            )

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    writer.join()


def _unchanged(sample):
    return sample


def speed(loader):
    """Samples/s of an epoch of whole batches."""
    start, batches = time.perf_counter(), 0
    for _ in loader:
        batches += 1
    return batches * BATCH / (time.perf_counter() - start)


def epoch_seconds(order, steps):
    """Train the text task's model on one core, in an order that is made of (lengths, batch size).
    Returns the seconds of an epoch, extrapolated from `steps` of its steps, evenly spaced among
    those sorted by length."""
    flags = [f"--context={LENGTH}", "--padding=longest"]
    cfg = load_config(tasks.text.Settings, None, flags)
    train_set, _ = tasks.text.build_datasets(cfg)
    model = tasks.text.build_model(cfg, train_set)
    lengths = [len(piece) for piece in train_set.pieces]
    torch.manual_seed(0)
    indices = list(order(lengths, cfg.global_batch_size))
    count = len(indices) // cfg.global_batch_size
    batches = [
        indices[step * cfg.global_batch_size :][: cfg.global_batch_size] for step in range(count)
    ]
    batches.sort(key=lambda batch: max(lengths[index] for index in batch))
    timed = batches[count // (2 * steps) :: count // steps][:steps]
    start = time.perf_counter()
    for chosen in timed:
        inputs, targets = train_set.collate_fn([train_set[index] for index in chosen])
        tasks.text.loss(model(inputs), targets).backward()
    return (time.perf_counter() - start) / len(timed) * count


ORDERS = {
    "random": lambda lengths, batch_size: RandomSampler(lengths),
    "LengthBuckets": LengthBuckets,
}


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.streams", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--samples", type=int, default=4096, help="of each kind")
    parser.add_argument("--steps", type=int, default=4, help="timed in each epoch of the text task")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each (default: 5)")
    parser.add_argument("--output", default="runs/bench-streams", help="folder of the reports")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result, rows = machine() | {"rows": {}}, []
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        optimize(folder, make_files(folder, args.samples))
        for kind in DECODE:
            for workers in (0, 2):
                names = [name for name in READERS if (name, kind) != ("WebDataset", "jsonl")]
                loaders = {name: READERS[name](folder, kind, workers) for name in names}
                jobs = {name: partial(speed, loader) for name, loader in loaders.items()}
                take_turns(jobs, 1)  # starts loader processes, fills caches
                speeds, _ = take_turns(jobs, args.repeats)
                for name, values in speeds.items():
                    ratio = spread(*interval(values, speeds["Shards"]), ".2f")
                    median = f"{statistics.median(values):,.0f}"
                    rows.append([kind, str(workers), name, median, ratio])
                    result["rows"][" ".join(rows[-1][:3])] = values
                    print("  ".join(rows[-1]), flush=True)
                del loaders, jobs  # and their processes
    jobs = {name: partial(epoch_seconds, order, args.steps) for name, order in ORDERS.items()}
    seconds, _ = take_turns(jobs, args.repeats)
    result["seconds"] = seconds
    medians = " s, ".join(f"{name} {statistics.median(s):.1f}" for name, s in seconds.items())
    ratio = spread(*interval(seconds["LengthBuckets"], seconds["random"]), ".2f")
    text = (
        f"{result['cpu']}, torch {result['torch']}, medians of {args.repeats} interleaved epochs."
        f"\n\n{markdown_table(HEAD, rows)}\n\nAn epoch of the text task with --context {LENGTH} "
        f"and --padding longest, on one thread, extrapolated from {args.steps} steps: {medians} s; "
        f"{ratio} times faster.\n"
    )
    write_table(result, text, args.output, "streams")


if __name__ == "__main__":
    main()
