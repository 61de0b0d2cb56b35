"""Train an image classifier with FSDP2, which shards its state. One file, to read, copy and edit.

    torchrun --standalone --nproc_per_node=4 train_fsdp.py --data data
    torchrun --standalone --nproc_per_node=4 train_fsdp.py --data data      # again: resumes

It needs torch and torchvision, and downloads CIFAR-10. To train something else, edit the part "What
is trained", and the accuracy in evaluate(). The weights do not depend on the number of processes,
on --micro-batches, on workers or on restarts, except for rounding: every global batch holds the
same samples with the same augmentation. (Exception: what a model draws at random, as nn.Dropout
does, differs between processes.)
"""

import argparse
import ctypes
import hashlib
import math
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.transforms import v2

SIGNAL_CHECK_INTERVAL = 10  # steps between two checks for signals, which wait for the device
LOG_INTERVAL_SECONDS = 10  # between two lines of output within an epoch
received_signals = []  # a threading.Event has a lock: a second signal could wait for it forever


# What is trained


class Images(Dataset):
    """A dataset of (image, label) with a transform whose random numbers depend only on (seed,
    epoch, index): not on the rank or the loader process that happens to read the image. They must
    be PyTorch's, as in transforms.v2; NumPy's and Python's are not seeded here."""

    def __init__(self, dataset, transform, seed):
        self.dataset = dataset
        self.transform = transform
        self.seed = seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        epoch, index = key
        image, label = self.dataset[index]
        with torch.random.fork_rng(devices=[]):  # without workers, dropout draws from it, too
            torch.default_generator.manual_seed(seed_of_sample(self.seed, epoch, index))
            image = self.transform(image)
        return image, label


def seed_of_sample(seed, epoch, index):
    """The first 8 bytes of a SHA-256: the same in every process and version of Python, and, unlike
    a sum, different for (epoch 1, index 2) and (epoch 2, index 1)."""
    text = f"{seed} {epoch} {index}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big")


def build_datasets(args):
    """The training set and the validation set, whose indices are (epoch, index)."""
    if os.environ["LOCAL_RANK"] == "0":  # one download per node
        CIFAR10(args.data, download=True)
    dist.barrier()

    to_tensor = v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5], [0.25]),
        ]
    )
    augment = v2.Compose(
        [
            v2.RandomCrop(32, padding=4),
            v2.RandomHorizontalFlip(),
            to_tensor,
        ]
    )
    train_set = CIFAR10(args.data, train=True)
    val_set = CIFAR10(args.data, train=False)
    train_set = Images(train_set, augment, args.seed)
    val_set = Images(val_set, to_tensor, args.seed)
    return train_set, val_set


def build_model():
    """ResNet-18 for small images. GroupNorm, unlike BatchNorm, does not mix the samples of a batch,
    so that the number of processes does not matter."""

    def norm_layer(channels):
        return nn.GroupNorm(32, channels)

    model = resnet18(num_classes=10, norm_layer=norm_layer)
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


# Signals and output


def remember_signal(number, frame):
    """Only records the signal: all ranks must stop after the same step."""
    received_signals.append(number)


def ignore_signal_in_worker(number, frame):
    """Handles signals in loader processes: torchrun signals these, too, but the run needs their
    batches until it stops. torchrun kills what is left after 30 seconds."""
    signal.alarm(30)


def handle_signals(handler):
    """Call the handler on SIGTERM, which schedulers send, and on SIGHUP, of a closed terminal."""
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGHUP, handler)


def start_worker(worker):
    """Called first in each new loader process."""
    handle_signals(ignore_signal_in_worker)


def any_rank_stops(device):
    """Whether a signal has reached any rank: all must stop after the same step."""
    stop = torch.tensor(len(received_signals), device=device)
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    return stop.item() > 0


def print_rank0(text):
    """Write a line on rank 0. On a full disk, or to a terminal that is gone, print() would end the
    run with an error, or with exit code 120 for what is left in its buffer."""
    if dist.get_rank() == 0:
        with suppress(OSError):
            os.write(1, os.fsencode(f"{text}\n"))


# How it is trained


def zero(device):
    """A sum to add to: in float64, and on the device, where nothing has to wait for its value."""
    return torch.zeros((), dtype=torch.float64, device=device)


class Run:
    """How far a run has come, and what this rank has added up since the epoch began."""

    def __init__(self, settings, steps_per_epoch, device):
        self.settings = settings  # a run can only be resumed with the same
        self.steps_per_epoch = steps_per_epoch
        self.device = device
        self.epoch = 0
        self.step = 0  # the number of steps done in this epoch
        self.loss = zero(device)
        self.targets = zero(device)

    def start_next_epoch(self):
        """Set everything to the beginning of the next epoch."""
        self.epoch += 1
        self.step = 0
        self.loss.zero_()
        self.targets.zero_()

    def totals(self):
        """(the sum of the losses, the number of targets) of all ranks, as a tensor."""
        sums = torch.stack([self.loss, self.targets])
        dist.all_reduce(sums)
        return sums


class EpochSampler(DistributedSampler):
    """Yields (epoch, index), because a persistent worker only sees the epoch through the index.
    After a restart, it begins with this rank's sample number `start`."""

    start = 0

    def __iter__(self):
        indices = list(super().__iter__())
        for index in indices[self.start :]:
            yield self.epoch, index


def train_one_epoch(model, loader, optimizer, scheduler, run, args):
    """Train from run.step to the end of the epoch, or until the run has to stop."""
    loader.sampler.set_epoch(run.epoch)  # otherwise, every epoch would have the same order
    loader.sampler.start = run.step * args.micro_batches * loader.batch_size
    device = run.device
    model.train()
    batches = iter(loader)
    shown = time.monotonic()
    while run.step < run.steps_per_epoch:
        micro_batches = []
        targets = 0
        for _ in range(args.micro_batches):
            images, labels = next(batches)
            micro_batches.append((images, labels))
            targets += count_targets(labels)

        # fully_shard averages over the ranks, so each divides by the ranks' mean count.
        mean_targets = zero(device) + targets
        dist.all_reduce(mean_targets)
        mean_targets /= dist.get_world_size()

        for number, (images, labels) in enumerate(micro_batches, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            is_last = number == args.micro_batches
            model.set_requires_gradient_sync(is_last)  # until then, each rank holds whole gradients
            outputs = model(images)
            loss = loss_sum(outputs, labels)
            (loss / mean_targets).backward()
            run.loss += loss.detach()  # not .item(), which would wait for the device
        run.targets += targets

        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                # If another rank has used it, FSDP has averaged its gradient with a different one.
                raise ValueError(f"{name} has no gradient: use all parameters, or freeze it")
        if args.clip_norm > 0:  # of the averaged gradients
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.step += 1

        if time.monotonic() - shown > LOG_INTERVAL_SECONDS:
            shown = time.monotonic()
            mean = run.loss / run.targets
            place = f"epoch {run.epoch}, step {run.step} of {run.steps_per_epoch}"
            print_rank0(f"{place}: loss {mean.item():.4f} (rank 0)")
        if run.step % SIGNAL_CHECK_INTERVAL == 0 and any_rank_stops(device):
            return


@torch.no_grad()
def evaluate(model, dataset, batch_size, device):
    """(mean loss, accuracy) over the dataset, in which each sample counts once. The forward pass
    communicates, so all ranks run it equally often, some with one more sample that does not count.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    own = range(rank, len(dataset), world_size)
    keys = [(0, index) for index in own]
    left = len(keys)  # the number of samples that are still to be counted
    if left < math.ceil(len(dataset) / world_size):
        keys.append((0, 0))  # any sample will do
    loss = zero(device)
    correct = zero(device)
    targets = zero(device)
    samples = zero(device)
    model.eval()
    for images, labels in DataLoader(dataset, batch_size, sampler=keys):
        images = images.to(device)
        labels = labels.to(device)
        outputs = model(images)[:left]
        labels = labels[:left]
        left -= len(labels)
        loss += loss_sum(outputs, labels)
        correct += (outputs.argmax(1) == labels).sum()
        targets += count_targets(labels)
        samples += len(labels)
    sums = torch.stack([loss, correct, targets, samples])
    dist.all_reduce(sums)
    loss, correct, targets, samples = sums
    assert samples == len(dataset)
    mean = loss / targets
    accuracy = correct / targets
    return mean.item(), accuracy.item()


def save(path, model, optimizer, scheduler, run):
    """Replace the checkpoint: a kill at any moment leaves the old one or the new one."""
    totals = run.totals()  # load() gives them to rank 0
    # All ranks communicate, for whole tensors on rank 0.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(model, options=options)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        checkpoint = {
            "model": model_state,
            "optimizer": optimizer_state,
            "scheduler": scheduler.state_dict(),
            "epoch": run.epoch,
            "step": run.step,
            "sums": totals.cpu(),
            "settings": run.settings,
        }
        temporary = path.with_name(f"{path.name}.tmp")
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine might leave an empty file
        os.replace(temporary, path)
    dist.barrier()


def load(path, model, optimizer, scheduler, run):
    """Resume from the checkpoint, if there is one."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, path.exists())
    if not any(found):
        return
    if not all(found):
        raise FileNotFoundError(f"only some ranks see {path}: use a folder that all nodes share")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    settings = checkpoint["settings"]
    if settings != run.settings:
        raise ValueError(
            f"{path} was saved with settings {settings}, but this run has {run.settings}"
        )
    options = StateDictOptions(full_state_dict=True)  # each rank takes its shards
    set_model_state_dict(model, checkpoint["model"], options=options)
    set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"], options=options)
    scheduler.load_state_dict(checkpoint["scheduler"])
    run.epoch = checkpoint["epoch"]
    run.step = checkpoint["step"]
    if dist.get_rank() == 0:
        loss, targets = checkpoint["sums"].tolist()
        run.loss += loss
        run.targets += targets
    print_rank0(f"continues at epoch {run.epoch}, step {run.step}, of {path}")


def main(args):
    if "RANK" not in os.environ:
        sys.exit("start one process per device: torchrun --standalone --nproc_per_node=N ...")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # the same initial weights everywhere

    # Data
    train_set, val_set = build_datasets(args)
    steps_per_epoch = len(train_set) // args.global_batch
    parts = dist.get_world_size() * args.micro_batches
    batch_size = args.global_batch // parts
    if steps_per_epoch == 0 or args.global_batch % parts != 0:
        raise ValueError(
            "--global-batch must not exceed the dataset and must be a multiple of "
            "processes x --micro-batches"
        )
    loader = DataLoader(
        train_set,
        batch_size,
        sampler=EpochSampler(train_set, seed=args.seed, drop_last=True),
        drop_last=True,
        num_workers=args.workers,
        worker_init_fn=start_worker,
        persistent_workers=args.workers > 0,
        pin_memory=device.type == "cuda",
    )

    # Model
    model = build_model()
    model.to(device)
    dtype = next(model.parameters()).dtype
    compute_dtype = torch.bfloat16 if args.bf16 else dtype
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=dtype,
    )
    model_policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=dtype,
        output_dtype=dtype,  # for the loss
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=model_policy)

    # Optimization
    optimizer = SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        weight_decay=5e-4,
    )
    warmup = steps_per_epoch
    decay = max(1, args.epochs * steps_per_epoch - warmup)

    def factor(step):  # linear warmup in the first epoch, then half a cosine
        if step < warmup:
            return (step + 1) / warmup
        angle = math.pi * (step - warmup) / decay
        return (1 + math.cos(angle)) / 2

    scheduler = LambdaLR(optimizer, factor)

    # Checkpoints
    settings = {
        "epochs": args.epochs,
        "global_batch": args.global_batch,
        "lr": args.lr,
        "clip_norm": args.clip_norm,
        "seed": args.seed,
        "samples": len(train_set),
    }
    run = Run(settings, steps_per_epoch, device)
    path = Path(args.checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    load(path, model, optimizer, scheduler, run)

    while run.epoch < args.epochs:
        train_one_epoch(model, loader, optimizer, scheduler, run, args)
        # Before the evaluation: if that fails, the same command trains nothing again.
        save(path, model, optimizer, scheduler, run)
        if any_rank_stops(device):
            sys.exit(128 + signal.SIGTERM)  # torchrun's own exit code is then 1
        loss, targets = run.totals()
        train_loss = (loss / targets).item()
        val_loss, accuracy = evaluate(model, val_set, batch_size, device)
        text = f"train loss {train_loss:.4f}, val loss {val_loss:.4f}, accuracy {accuracy:.4f}"
        print_rank0(f"epoch {run.epoch}: {text}")
        run.start_next_epoch()


def parse_args():
    purpose = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--data", default="data", help="folder for CIFAR-10")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=256, help="samples per step, all ranks")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a batch, per step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip-norm", type=float, default=1.0, help="0: off")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--workers", type=int, default=2, help="loader processes per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.platform == "linux":  # if torchrun is killed, so is this process (PR_SET_PDEATHSIG)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    handle_signals(remember_signal)
    try:
        main(parse_args())
    except Exception:
        # An error that all ranks have is printed once: torchrun stops the other ranks first.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.environ.get("RANK", "0") != "0":
            time.sleep(30)
        sys.exit(traceback.format_exc())  # unlike `raise`, ends the loader's processes
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a process that shuts down (pytorch/pytorch#190489)
