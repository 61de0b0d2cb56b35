"""Configuration style: nested dataclasses, `key=value` arguments, a Trainer with callbacks."""

import os
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class DataConfig:
    size: int = 160
    batch_size: int = 10
    flip: bool = True


@dataclass
class OptimConfig:
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 3


@dataclass
class Config:
    seed: int = 7
    epochs: int = 6
    folder: str = "outputs"
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def override(self, name, value):
        owner = self
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        kind = next(each.type for each in fields(owner) if each.name == last)
        setattr(
            owner,
            last,
            {"int": int, "float": float}.get(getattr(kind, "__name__", kind), str)(value),
        )

    def flat(self, prefix=""):
        for each in fields(self):
            value = getattr(self, each.name)
            if is_dataclass(value):
                yield from (
                    (f"{each.name}.{sub.name}", getattr(value, sub.name)) for sub in fields(value)
                )
            else:
                yield each.name, value


class Squares(Dataset):
    """Images that are augmented with the generator of the process that reads them."""

    def __init__(self, size, seed, flip):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 1, 8, 8, generator=generator)
        self.labels = (self.images.mean((1, 2, 3)) > 0).long()
        self.flip = flip

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return {"image": image, "label": self.labels[index]}


class Callback:
    def on_epoch_end(self, trainer, epoch, metrics):
        pass


class Printer(Callback):
    def on_epoch_end(self, trainer, epoch, metrics):
        print(
            f"[epoch {epoch}] " + " ".join(f"{k}={v:.4f}" for k, v in metrics.items()), flush=True
        )


class Saver(Callback):
    def on_epoch_end(self, trainer, epoch, metrics):
        target = trainer.folder / "last.ckpt"
        temporary = target.with_suffix(".tmp")
        torch.save(trainer.state_dict() | {"epoch": epoch}, temporary)
        temporary.rename(target)


class Trainer:
    def __init__(self, config):
        self.config = config
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        dist.init_process_group("gloo")
        torch.manual_seed(config.seed)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.GroupNorm(2, 6),
            nn.GELU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(216, 2),
        )
        torch.manual_seed(config.seed + 1 + self.rank)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.warmup)
        train_set = Squares(config.data.size, 0, config.data.flip)
        self.sampler = DistributedSampler(train_set, seed=config.seed)
        self.train_loader = DataLoader(train_set, config.data.batch_size, sampler=self.sampler)
        val_set = Squares(41, 1, flip=False)
        self.val_count = len(val_set)
        self.val_loader = DataLoader(
            torch.utils.data.Subset(val_set, range(self.rank, len(val_set), self.world_size)), 16
        )
        self.folder = Path(config.folder)
        self.folder.mkdir(exist_ok=True)
        self.callbacks = [Printer(), Saver()] if self.rank == 0 else []
        self.first_epoch = 0
        if (self.folder / "last.ckpt").exists():
            self.load_state_dict(torch.load(self.folder / "last.ckpt"))

    def warmup(self, epoch):
        return min(1.0, (epoch + 1) / self.config.optim.warmup)

    def state_dict(self):
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state):
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.first_epoch = state["epoch"] + 1

    def fit(self):
        for epoch in range(self.first_epoch, self.config.epochs):
            self.sampler.set_epoch(epoch)
            metrics = self.train_epoch() | self.validate()
            self.scheduler.step()
            for callback in self.callbacks:
                callback.on_epoch_end(self, epoch, metrics)
            dist.barrier()

    def train_epoch(self):
        self.model.train()
        total = torch.zeros(())
        for batch in self.train_loader:
            loss = F.cross_entropy(self.model(batch["image"]), batch["label"])
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += loss.detach()
        return {"train_loss": float(total / len(self.train_loader))}

    @torch.inference_mode()
    def validate(self):
        self.model.eval()
        sums = torch.zeros(2)
        for batch in self.val_loader:
            outputs = self.model.module(batch["image"])
            sums[0] += F.cross_entropy(outputs, batch["label"], reduction="sum")
            sums[1] += (outputs.argmax(1) == batch["label"]).sum()
        dist.all_reduce(sums)
        loss, accuracy = (sums / self.val_count).tolist()
        return {"val_loss": loss, "val_accuracy": accuracy}


def main():
    config = Config()
    for argument in sys.argv[1:]:
        config.override(*argument.split("=", 1))
    if int(os.environ.get("RANK", 0)) == 0:
        print(dict(config.flat()))
    Trainer(config).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
