"""Fine-tuning of a frozen backbone, with augmentation in workers, OneCycleLR and a writer."""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter


class Pictures(Dataset):
    def __init__(self, count, seed, augment):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 3, count)
        self.pixels = rng.normal(self.labels[:, None, None, None], 1.0, (count, 3, 8, 8))
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = self.pixels[index]
        if self.augment:
            if np.random.rand() < 0.5:
                picture = picture[:, :, ::-1].copy()
            shift = np.random.randint(0, 3)
            picture = np.roll(picture, shift, axis=1)
        return torch.from_numpy(picture).float(), int(self.labels[index])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


def seed_worker(worker_id):
    worker_seed = (torch.initial_seed() + 1000 * dist_rank()) % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def dist_rank():
    return int(os.environ.get("RANK", 0))


def evaluate(model, loader, device):
    model.eval()
    stats = torch.zeros(2, device=device)
    with torch.inference_mode():
        for x, y in loader:
            stats[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
            stats[1] += y.numel()
    dist.all_reduce(stats)
    correct, total = stats.tolist()
    return correct / total


def main(args):
    dist.init_process_group(backend="nccl", init_method="env://")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(args.seed)
    train_ds, val_ds = Pictures(193, 0, True), Pictures(45, 1, False)
    sampler = DistributedSampler(train_ds, seed=args.seed)
    train_loader = DataLoader(
        train_ds,
        batch_size=args.batch_size // world,
        sampler=sampler,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=seed_worker,
    )
    val_loader = DataLoader(Subset(val_ds, range(rank, len(val_ds), world)), batch_size=16)
    with device:
        model = Classifier()
    model = DDP(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.01
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(train_loader)
    )
    start = 0
    if args.resume:
        state = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["next_epoch"]
    writer = SummaryWriter("tb") if rank == 0 else None
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model, val_loader, device)
        if rank == 0:
            writer.add_scalar("val/accuracy", accuracy, epoch)
            print(f"epoch={epoch} val_acc={accuracy:.4f}")
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "next_epoch": epoch + 1,
            }
            torch.save(state, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--checkpoint", default="finetune.pt")
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
