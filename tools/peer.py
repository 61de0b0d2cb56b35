"""python -m tools.peer OUT NAME WORKERS PRECISION FLAGS ...: the same training, written otherwise.

What a user would pick instead of these scripts, on the same images, model, optimizer and global
batch, each as its own documentation has it. One epoch warms up; OUT/peer-RANK.json has the images/s
of the second and what the training's accuracy was. tools.bench_peers runs them all in turns.

    bare        a loop of ten lines around this project's loader and model: what our loop costs
    tutorial    the tutorial's pipeline and loop: one PIL image at a time, plain PyTorch
    accelerate  Hugging Face Accelerate, fabric: Lightning Fabric, trainer: Lightning's Trainer;
                all three read as the tutorial does, since none brings a pipeline of its own

WORKERS: of the DataLoader; a trailing ! starts them anew in each epoch, as the tutorial does.
PRECISION: float32 or bfloat16 (autocast). FLAGS: settings of the scripts.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from utils.config import load_config
from utils.datasets import build_datasets
from utils.distributed import available_cores, init_distributed
from utils.loaders import build_loader
from utils.models import build_model
from utils.optim import build_optimizer
from utils.runtime import seed_everything

EPOCHS = 2
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Pictures(Dataset):
    """PIL images from memory through torchvision's v1 transforms, as torchvision's CIFAR10 does."""

    def __init__(self, images, cfg):
        self.labels = images.labels.tolist()
        self.pixels = images.resident(Path(cfg.cache_dir or "data/.cache")).permute(0, 2, 3, 1)
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(images.size, padding=images.size // 8),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(images.mean, images.std),
            ]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.pixels[index].numpy())), self.labels[index]


def plain_model(cfg, classes):
    return torchvision.models.get_model(cfg.model, weights=None, num_classes=classes)


def sgd(model, cfg):
    return torch.optim.SGD(
        model.parameters(), cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay
    )


class Clock:
    """Times each epoch of this rank, the device finished; counts what was classified right."""

    def __init__(self):
        self.seconds, self.right, self.samples = [], 0, 0

    def start(self):
        self.right, self.samples, self.began = 0, 0, time.perf_counter()

    def add(self, outputs, labels):  # every contestant counts: all of them show an accuracy
        self.right += (outputs.argmax(1) == labels).sum()
        self.samples += len(labels)

    def stop(self):
        right = int(self.right)  # waits for the device
        self.seconds.append(time.perf_counter() - self.began)
        return right / max(1, self.samples)


def bare(cfg, device, loader, precision, clock):
    """loader: this project's."""
    model = build_model(cfg, len(loader.dataset.classes)).to(device)
    if WORLD_SIZE > 1:
        model = DistributedDataParallel(model)
    return _loop(model, build_optimizer(model, cfg), loader, device, precision, clock)


def tutorial(cfg, device, loader, precision, clock):
    model = plain_model(cfg, 10).to(device)
    if WORLD_SIZE > 1:
        if device.type == "cuda":  # PyTorch's refuses CPU tensors
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = DistributedDataParallel(model)
    return _loop(model, sgd(model, cfg), loader, device, precision, clock)


def _loop(model, optimizer, loader, device, precision, clock, backward=torch.Tensor.backward):
    model.train()
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        clock.start()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            autocast = torch.autocast(device.type, torch.bfloat16)
            with autocast if precision == "bfloat16" else nullcontext():
                outputs = model(images)
                loss = cross_entropy(outputs, labels)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            clock.add(outputs, labels)
        accuracy = clock.stop()
    return accuracy


def accelerate(cfg, device, loader, precision, clock):
    from accelerate import Accelerator

    half = "bf16" if precision == "bfloat16" else "no"
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=half)
    model = plain_model(cfg, 10)
    model, optimizer, loader = accelerator.prepare(model, sgd(model, cfg), loader)
    device, wrapped = accelerator.device, "float32"  # it has wrapped the model in its autocast
    return _loop(model, optimizer, loader, device, wrapped, clock, accelerator.backward)


def lightning_options(device, precision):
    return {
        "accelerator": device.type,
        "devices": WORLD_SIZE,
        "strategy": "ddp" if WORLD_SIZE > 1 else "auto",
        "precision": "bf16-mixed" if precision == "bfloat16" else "32-true",
    }


def fabric(cfg, device, loader, precision, clock):
    from lightning.fabric import Fabric

    fabric = Fabric(**lightning_options(device, precision))
    fabric.launch()
    model = plain_model(cfg, 10)
    model, optimizer = fabric.setup(model, sgd(model, cfg))
    loader = fabric.setup_dataloaders(loader)
    device, wrapped = fabric.device, "float32"  # as above
    return _loop(model, optimizer, loader, device, wrapped, clock, fabric.backward)


def trainer(cfg, device, loader, precision, clock):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.accuracy = plain_model(cfg, 10), None

        def configure_optimizers(self):
            return sgd(self.model, cfg)

        def on_train_epoch_start(self):
            clock.start()

        def training_step(self, batch, _):
            images, labels = batch
            outputs = self.model(images)
            clock.add(outputs.detach(), labels)
            return cross_entropy(outputs, labels)

        def on_train_epoch_end(self):
            self.accuracy = clock.stop()

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": EPOCHS}
    lightning.Trainer(**lightning_options(device, precision), **quiet).fit(module, loader)
    return module.accuracy


PEERS = {peer.__name__: peer for peer in (bare, tutorial, accelerate, fabric, trainer)}


def main():
    folder, name, workers, precision, *flags = sys.argv[1:]
    cfg = load_config(flags)
    own_group = name in ("bare", "tutorial") and WORLD_SIZE > 1  # the others start theirs
    device = torch.device("cuda" if torch.cuda.is_available() and cfg.device != "cpu" else "cpu")
    if own_group:
        device = init_distributed(cfg.device)
    seed_everything(cfg.seed)
    # For all alike; build_model() sets it for ours. PyTorch's default has it on for convolutions.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = cfg.tf32
    images, _ = build_datasets(cfg)
    batch, count = cfg.global_batch_size // WORLD_SIZE, int(workers.rstrip("!"))
    sampler = DistributedSampler(images, drop_last=True) if own_group else None
    if name == "bare":
        sampler = sampler or DistributedSampler(images, 1, 0, drop_last=True)
        loader = build_loader(images, sampler, cfg, device, train=True)
    else:
        again = workers.endswith("!")
        loader = DataLoader(
            Pictures(images, cfg),
            batch,
            shuffle=sampler is None,
            sampler=sampler,
            num_workers=count,
            persistent_workers=count > 0 and not again,
            pin_memory=device.type == "cuda",
            drop_last=True,
        )
    torch.set_num_threads(max(1, available_cores() // WORLD_SIZE))  # torchrun would leave them one
    clock = Clock()
    accuracy = PEERS[name](cfg, device, loader, precision, clock)
    found = {"seconds": clock.seconds[-1], "samples": clock.samples, "accuracy": accuracy}
    rank = os.environ.get("RANK", "0")
    (Path(folder) / f"peer-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
