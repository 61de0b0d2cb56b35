"""Train an image classifier with FSDP2, which shards its state. One file, to read, copy and edit.

    torchrun --standalone --nproc_per_node=4 train_fsdp.py --data data
    torchrun --standalone --nproc_per_node=4 train_fsdp.py --data data      # again: resumes

It needs torch and torchvision, and downloads CIFAR-10. To train something else, edit the part "What
is trained", and the accuracy in evaluate(). The weights do not depend on the number of processes,
on --micro-batches, on workers or on restarts, except for rounding: every global batch holds the
same samples, transformed alike. (A model with dropout drops different elements.)
"""

import argparse
import math
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import v2

STEPS_BETWEEN_LOOKS = 10  # at whether a rank has received SIGTERM; each look waits for the device
stop_requested = threading.Event()


# What is trained


class Images(Dataset):
    """A dataset of (image, label) with a transform whose random numbers depend only on (seed,
    epoch, index): not on the rank or the loader process that happens to read the image. They must
    be PyTorch's, as those of transforms.v2 are; NumPy's and Python's are not seeded here."""

    def __init__(self, dataset, transform, seed):
        self.dataset, self.transform, self.seed = dataset, transform, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        epoch, index = key
        image, label = self.dataset[index]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(hash((self.seed, epoch, index)) % 2**63)
            return self.transform(image), label


def build_datasets(args):
    """The training set and the validation set, whose indices are (epoch, index)."""
    plain = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]
    random = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *plain])
    if os.environ["LOCAL_RANK"] == "0":  # one download per node
        torchvision.datasets.CIFAR10(args.data, download=True)
    dist.barrier()
    train, val = (torchvision.datasets.CIFAR10(args.data, train=part) for part in (True, False))
    return Images(train, random, args.seed), Images(val, v2.Compose(plain), args.seed)


def build_model():
    """ResNet-18 for small images. GroupNorm, unlike BatchNorm, does not mix the samples of a batch,
    so that the number of processes does not matter."""
    model = torchvision.models.resnet18(
        num_classes=10, norm_layer=lambda channels: nn.GroupNorm(32, channels)
    )
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def blocks(model):
    """The parts of a model whose parameters are gathered together, one part after another."""
    return [*model.layer1, *model.layer2, *model.layer3, *model.layer4]


def loss_sum(outputs, labels):
    """The sum of the losses. Not their mean: the mean over all ranks and micro-batches is not the
    mean of their means where they have different numbers of targets."""
    return cross_entropy(outputs, labels, reduction="sum")


def count_targets(labels):
    """The number of targets that loss_sum() adds up: those that are not ignored, for example."""
    return labels.numel()


# How it is trained


class EpochSampler(DistributedSampler):
    """Yields (epoch, index), because a loader process that lives longer than an epoch learns the
    epoch from the key only. After a restart, it begins with this rank's sample number `start`."""

    start = 0

    def __iter__(self):
        indices = list(super().__iter__())[self.start :]
        return iter([(self.epoch, index) for index in indices])


def outlive_sigterm(worker):
    """torchrun signals loader processes, too, whose batches are needed until the next look. It
    kills all that is left after 30 seconds."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(30))


def train_one_epoch(model, loader, optimizer, scheduler, run, args):
    """Train from run["step"] to the end of the epoch. Returns False if the run has to stop."""
    device, steps = run["device"], run["steps_per_epoch"]
    loader.sampler.set_epoch(run["epoch"])  # otherwise, every epoch would have the same order
    loader.sampler.start = run["step"] * args.micro_batches * loader.batch_size
    model.train()
    batches, shown = iter(loader), time.monotonic()
    for step in range(run["step"], steps):
        micro_batches = [next(batches) for _ in range(args.micro_batches)]
        targets = sum(count_targets(labels) for _, labels in micro_batches)
        # fully_shard averages over the ranks, so each divides by the ranks' mean count.
        count = torch.tensor(targets, dtype=torch.float64, device=device)
        dist.all_reduce(count)
        count /= dist.get_world_size()
        for number, (images, labels) in enumerate(micro_batches):
            images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
            # One reduction per step; until then, each rank holds whole gradients.
            model.set_requires_gradient_sync(number == args.micro_batches - 1)
            loss = loss_sum(model(images).to(args.dtype), labels)
            (loss / count).backward()
            run["sums"][0] += loss.detach()
        run["sums"][1] += targets
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)  # of the averaged gradients
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run["step"] = step + 1
        if dist.get_rank() == 0 and time.monotonic() - shown > 10:
            shown, mean = time.monotonic(), run["sums"][0] / run["sums"][1]
            text = f"epoch {run['epoch']}, step {step + 1} of {steps}"
            print(f"{text}: loss {mean.item():.4f} (rank 0)", flush=True)
        if run["step"] % STEPS_BETWEEN_LOOKS == 0 and any_rank_stops(device):
            return False
    return True


def any_rank_stops(device):
    """Whether a signal has reached any rank: all must stop after the same step."""
    stop = torch.tensor(float(stop_requested.is_set()), device=device)
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    return bool(stop.item())


@torch.no_grad()
def evaluate(model, dataset, device, args):
    """(mean loss, accuracy) over the dataset, in which each sample counts once. The forward pass
    communicates, so all ranks run it equally often, some with a last sample that does not count."""
    model.eval()
    rank, world_size, count = dist.get_rank(), dist.get_world_size(), len(dataset)
    left = len(range(rank, count, world_size))
    own = [(0, min(rank + i * world_size, count - 1)) for i in range(-(-count // world_size))]
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in DataLoader(dataset, batch_size=256, sampler=own):
        images, labels = images.to(device), labels.to(device)
        outputs, labels = model(images).to(args.dtype)[:left], labels[:left]
        left -= len(labels)
        sums[0] += loss_sum(outputs, labels)
        sums[1] += (outputs.argmax(1) == labels).sum()
        sums[2] += count_targets(labels)
        sums[3] += len(labels)
    dist.all_reduce(sums)
    assert sums[3] == count
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def save(path, model, optimizer, scheduler, run):
    """Replace the checkpoint: a kill at any moment leaves the old one or the new one."""
    sums = run["sums"].clone()
    dist.all_reduce(sums)  # of all ranks; load() gives them to rank 0
    options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole, on rank 0
    states = dsd.get_state_dict(model, optimizer, options=options)  # all ranks communicate
    if dist.get_rank() == 0:
        contents = dict(zip(("model", "optimizer"), states, strict=True))
        contents["scheduler"] = scheduler.state_dict()
        contents |= {name: run[name] for name in ("epoch", "step", "settings")}
        contents["sums"] = sums.cpu()
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    dist.barrier()


def load(path, model, optimizer, scheduler, run):
    """Continue where the checkpoint was written, if there is one."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, path.exists())
    if not any(found):
        return
    if not all(found):
        raise FileNotFoundError(f"only some ranks see {path}: use a folder that all nodes share")
    contents = torch.load(path, map_location="cpu", weights_only=True)
    if contents["settings"] != run["settings"]:
        raise ValueError(f"{path} is of a run with {contents['settings']}, not {run['settings']}")
    options = dsd.StateDictOptions(full_state_dict=True)  # each rank takes its shards
    states = {"model_state_dict": contents["model"], "optim_state_dict": contents["optimizer"]}
    dsd.set_state_dict(model, optimizer, **states, options=options)
    scheduler.load_state_dict(contents["scheduler"])
    run |= {"epoch": contents["epoch"], "step": contents["step"]}
    if dist.get_rank() == 0:
        run["sums"] += contents["sums"].to(run["device"])
        print(f"continues at epoch {run['epoch']}, step {run['step']}, of {path}", flush=True)


def main(args):
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(args.seed)  # the same initial weights everywhere

    train_set, val_set = build_datasets(args)
    sampler = EpochSampler(train_set, seed=args.seed, drop_last=True)
    batch_size, rest = divmod(args.global_batch, dist.get_world_size() * args.micro_batches)
    steps_per_epoch = len(train_set) // args.global_batch
    if rest or steps_per_epoch == 0:
        raise ValueError("--global-batch: too large, or no multiple of processes x --micro-batches")
    options = {"num_workers": args.workers, "worker_init_fn": outlive_sigterm, "drop_last": True}
    options |= {"pin_memory": device.type == "cuda", "persistent_workers": args.workers > 0}
    loader = DataLoader(train_set, batch_size, sampler=sampler, **options)

    model = build_model().to(device)
    args.dtype = next(model.parameters()).dtype  # of the loss
    param_dtype = torch.bfloat16 if args.bf16 else args.dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=args.dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in [*blocks(model), model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    warmup, total = steps_per_epoch, args.epochs * steps_per_epoch

    def factor(step):  # linear warmup in the first epoch, then half a cosine
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run = {"device": device, "epoch": 0, "step": 0, "steps_per_epoch": steps_per_epoch}
    run |= {"sums": torch.zeros(2, dtype=torch.float64, device=device)}
    fixed = ("epochs", "global_batch", "lr", "clip_norm", "seed")  # when a run is resumed
    run["settings"] = {name: vars(args)[name] for name in fixed} | {"samples": len(train_set)}
    path = Path(args.checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    load(path, model, optimizer, scheduler, run)
    while run["epoch"] < args.epochs:
        if train_one_epoch(model, loader, optimizer, scheduler, run, args):
            dist.all_reduce(run["sums"])
            train_loss = (run["sums"][0] / run["sums"][1]).item()
            loss, accuracy = evaluate(model, val_set, device, args)
            if rank == 0:
                text = f"train loss {train_loss:.4f}, val loss {loss:.4f}, accuracy {accuracy:.4f}"
                print(f"epoch {run['epoch']}: {text}", flush=True)
            run["epoch"], run["step"] = run["epoch"] + 1, 0
            run["sums"].zero_()
        save(path, model, optimizer, scheduler, run)
        if any_rank_stops(device):
            sys.exit(128 + signal.SIGTERM)  # torchrun's own exit code is then 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="data", help="folder for CIFAR-10")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=256, help="samples per step, all ranks")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a batch, per step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--workers", type=int, default=2, help="loader processes per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    signal.signal(signal.SIGTERM, lambda number, frame: stop_requested.set())
    try:
        main(parser.parse_args())
    except Exception:
        # An error that all ranks have is printed once: torchrun ends the others before they do.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)
        sys.exit(traceback.format_exc())  # frees the loader, which ends its processes; not `raise`
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a process that shuts down (pytorch/pytorch#190489)
