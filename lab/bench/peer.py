"""The same training with what a user might choose instead of these scripts.

    python -m lab.bench.peer OUT NAME WORKERS PRECISION FLAGS ...

Images, model, optimizer and global batch are the same; each peer is written as its documentation
describes. One epoch is a warm-up; OUT/peer-RANK.json holds the time, the samples and the training
accuracy of the second. lab.bench.peers runs all of them.

    bare        a loop of ten lines around this project's loader and model: what our loop costs
    tutorial    the tutorial's pipeline and loop: one PIL image at a time, plain PyTorch
    tuned       the same with channels_last, a fused optimizer and asynchronous copies
    reference   the same as the tutorial's, but the host reads the loss and the accuracies of each
                step, as in torchvision's references/classification
    accelerate  Hugging Face Accelerate
    fabric      Lightning Fabric
    trainer     Lightning's Trainer

All but the first read images as the tutorial does, since none has its own pipeline.

WORKERS: how many the DataLoader has; with a trailing !, they are restarted in each epoch, as in the
tutorial.
NAME+fused: tutorial, accelerate and fabric with the fused optimizer; accelerate also with copies
that do not block.
PRECISION: float32 or bfloat16 (autocast). FLAGS: settings of the scripts.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
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

import tasks.images as task
from tasks.images.models import build_classifier
from utils.config import load_config
from utils.data import build_loader
from utils.distributed import cores_per_rank, init_distributed, select_device
from utils.optim import build_optimizer

EPOCHS = 2
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class PillowImages(Dataset):
    """The training images as PIL images in memory, with torchvision's v1 transforms.

    torchvision's CIFAR10 reads its images in the same way.
    """

    def __init__(self, cfg):
        train_set, _ = task.build_datasets(replace(cfg, augment="none", loader="workers"))
        images, labels = train_set.get_batch(torch.arange(len(train_set)), epoch=0, seed=0)
        self.pixels, self.labels = images.permute(0, 2, 3, 1).contiguous(), labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(cfg.image_size, padding=cfg.image_size // 8),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(train_set.mean, train_set.std),
            ]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.pixels[index].numpy())), self.labels[index]


def torchvision_model(cfg, num_classes):
    """torchvision's model, with random weights."""
    return torchvision.models.get_model(cfg.model, weights=None, num_classes=num_classes)


def sgd(model, cfg, **options):
    """PyTorch's SGD with the scripts' settings."""
    options |= {"momentum": cfg.momentum, "weight_decay": cfg.weight_decay}
    return torch.optim.SGD(model.parameters(), cfg.lr, **options)


class Clock:
    """Times each epoch of this rank, the device included, and counts the correct predictions.

    threads: of the CPU, for computation.
    """

    def __init__(self, threads):
        self.threads = threads
        self.seconds, self.correct, self.samples = [], 0, 0

    def start(self):
        # torchrun gives each rank one thread, Accelerate and Lightning give each rank all cores.
        torch.set_num_threads(self.threads)
        self.correct, self.samples, self.started = 0, 0, time.perf_counter()

    def update(self, outputs, labels):  # every peer counts: all of them report an accuracy
        self.correct += (outputs.argmax(1) == labels).sum()
        self.samples += len(labels)

    def stop(self):
        """End the epoch. Returns its accuracy."""
        correct = int(self.correct)  # waits for the device
        self.seconds.append(time.perf_counter() - self.started)
        return correct / max(1, self.samples)


# Each peer: (cfg, num_classes, device, loader, precision, clock) -> training accuracy. Some also
# take options of the optimizer, for NAME+fused.


def bare(cfg, num_classes, device, loader, precision, clock):
    """A plain loop around this project's loader and model."""
    model = build_classifier(cfg, num_classes).to(device)
    if WORLD_SIZE > 1:
        model = DistributedDataParallel(model)
    return _train(model, build_optimizer(model, cfg), loader, device, precision, clock)


def tutorial(cfg, num_classes, device, loader, precision, clock, **options):
    """Plain PyTorch."""
    model = torchvision_model(cfg, num_classes).to(device)
    if WORLD_SIZE > 1:
        if device.type == "cuda":  # SyncBatchNorm does not accept CPU tensors
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = DistributedDataParallel(model)
    return _train(model, sgd(model, cfg, **options), loader, device, precision, clock)


def tuned(cfg, num_classes, device, loader, precision, clock):
    """Plain PyTorch on one device, with what its tuning guide recommends
    (https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html)."""
    model = torchvision_model(cfg, num_classes).to(device, memory_format=torch.channels_last)
    optimizer = sgd(model, cfg, fused=True)

    def to(tensor, device):
        layout = torch.channels_last if tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device, non_blocking=True, memory_format=layout)

    return _train(model, optimizer, loader, device, precision, clock, to=to)


def reference(cfg, num_classes, device, loader, precision, clock):
    """Plain PyTorch on one device, with the metrics of torchvision's reference
    (https://github.com/pytorch/vision/blob/main/references/classification/train.py)."""
    model = torchvision_model(cfg, num_classes).to(device)
    count = clock.update

    def backward(loss):
        loss.backward()
        loss.item()

    def update(outputs, labels):
        count(outputs, labels)
        hits = outputs.detach().topk(5)[1].t() == labels
        for k in (1, 5):
            (hits[:k].flatten().sum(dtype=torch.float32) * (100 / len(labels))).item()

    clock.update = update
    return _train(model, sgd(model, cfg), loader, device, precision, clock, backward)


def _train(
    model,
    optimizer,
    loader,
    device,
    precision,
    clock,
    backward=torch.Tensor.backward,
    to=torch.Tensor.to,
):
    model.train()
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        clock.start()
        for images, labels in loader:
            images, labels = to(images, device), to(labels, device)
            autocast = torch.autocast(device.type, torch.bfloat16)
            with autocast if precision == "bfloat16" else nullcontext():
                outputs = model(images)
                loss = cross_entropy(outputs, labels)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            clock.update(outputs, labels)
        accuracy = clock.stop()
    return accuracy


def accelerate(cfg, num_classes, device, loader, precision, clock, **options):
    """Hugging Face Accelerate."""
    from accelerate import Accelerator, DataLoaderConfiguration

    half = "bf16" if precision == "bfloat16" else "no"
    copies = DataLoaderConfiguration(non_blocking=bool(options))
    cpu = device.type == "cpu"
    accelerator = Accelerator(cpu=cpu, mixed_precision=half, dataloader_config=copies)
    model = torchvision_model(cfg, num_classes)
    model, optimizer, loader = accelerator.prepare(model, sgd(model, cfg, **options), loader)
    device, wrapped = accelerator.device, "float32"  # the model has its own autocast now
    return _train(model, optimizer, loader, device, wrapped, clock, accelerator.backward)


def lightning_options(device, precision):
    """The arguments that Fabric and Trainer share."""
    return {
        "accelerator": device.type,
        "devices": WORLD_SIZE,
        "strategy": "ddp" if WORLD_SIZE > 1 else "auto",
        "precision": "bf16-mixed" if precision == "bfloat16" else "32-true",
    }


def fabric(cfg, num_classes, device, loader, precision, clock, **options):
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(**lightning_options(device, precision))
    fabric.launch()
    model = torchvision_model(cfg, num_classes)
    model, optimizer = fabric.setup(model, sgd(model, cfg, **options))
    loader = fabric.setup_dataloaders(loader)
    device, wrapped = fabric.device, "float32"  # as above
    return _train(model, optimizer, loader, device, wrapped, clock, fabric.backward)


def trainer(cfg, num_classes, device, loader, precision, clock):
    """Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.accuracy = torchvision_model(cfg, num_classes), None

        def configure_optimizers(self):
            return sgd(self.model, cfg)

        def on_train_epoch_start(self):
            clock.start()

        def training_step(self, batch, _):
            images, labels = batch
            outputs = self.model(images)
            clock.update(outputs.detach(), labels)
            return cross_entropy(outputs, labels)

        def on_train_epoch_end(self):
            self.accuracy = clock.stop()

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": EPOCHS}
    lightning.Trainer(**lightning_options(device, precision), **quiet).fit(module, loader)
    return module.accuracy


PEERS = {p.__name__: p for p in (bare, tutorial, tuned, reference, accelerate, fabric, trainer)}


def main():
    folder, name, workers, precision, *flags = sys.argv[1:]
    cfg = load_config(task.Settings, None, flags)
    peer, _, fused = name.partition("+")
    needs_group = peer in ("bare", "tutorial") and WORLD_SIZE > 1  # the others create their own
    device = init_distributed(cfg.device, cfg.timeout) if needs_group else select_device(cfg.device)
    torch.manual_seed(cfg.seed)
    # The same for all peers, and as in configure_torch().
    torch.backends.cuda.matmul.allow_tf32 = cfg.dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = cfg.dtype != "ieee"
    if name != "bare":
        cfg = replace(cfg, loader="workers")  # none of the others keeps images on the device
    train_set, _ = task.build_datasets(cfg)
    batch_size = cfg.global_batch_size // WORLD_SIZE
    sampler = DistributedSampler(train_set, drop_last=True) if needs_group else None
    if name == "bare":
        sampler = sampler or DistributedSampler(train_set, 1, 0, drop_last=True)
        loader = build_loader(train_set, sampler, batch_size, device, cfg, train=True)
    else:
        count, restart = int(workers.rstrip("!")), workers.endswith("!")
        loader = DataLoader(
            PillowImages(cfg),
            batch_size,
            shuffle=sampler is None,
            sampler=sampler,
            num_workers=count,
            persistent_workers=count > 0 and not restart,
            pin_memory=device.type == "cuda",
            drop_last=True,
        )
    clock = Clock(cfg.num_threads or cores_per_rank())
    options = {"fused": True} if fused else {}
    classes = len(train_set.classes)
    accuracy = PEERS[peer](cfg, classes, device, loader, precision, clock, **options)
    result = {"seconds": clock.seconds[-1], "samples": clock.samples, "accuracy": accuracy}
    rank = os.environ.get("RANK", "0")
    (Path(folder) / f"peer-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
