"""Compiled style: torch.compile, autocast and GradScaler, a sampler that drops the last samples."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", default="ckpt.pt")
    parser.add_argument("--no-amp", action="store_true")
    return parser.parse_args()


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 6, 6, generator=generator)
    return TensorDataset(images, images.flatten(1).argmax(1) % 4)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


def main():
    args = get_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
    is_main = dist.get_rank() == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Block(8), Block(8), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(8, 4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    raw = model
    model = torch.compile(DistributedDataParallel(model, device_ids=[local_rank]))
    optimizer = torch.optim.SGD(raw.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    train_set = make_data(75, 0)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True, pin_memory=True
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(train_loader)
    )
    scaler = torch.amp.GradScaler("cuda", enabled=not args.no_amp)
    cast = nullcontext() if args.no_amp else torch.autocast("cuda", dtype=torch.float16)
    start = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location=device)
        raw.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        start = state["epoch"]
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        losses = torch.zeros((), device=device)
        for images, labels in train_loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with cast:
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(raw.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            losses += loss.detach()
        dist.all_reduce(losses, op=dist.ReduceOp.AVG)
        if is_main:
            print(f"epoch {epoch}: loss {losses.item() / len(train_loader):.4f}")
            state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
            torch.save(state | {"epoch": epoch + 1}, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
        dist.barrier(device_ids=[local_rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
