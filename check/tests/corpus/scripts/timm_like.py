"""Mixup, an average of the weights, BatchNorm of each rank that is joined after an epoch."""

import argparse
import os
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Textures(Dataset):
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 4, (n,), generator=g)
        self.images = torch.randn(n, 3, 12, 12, generator=g) + self.targets[:, None, None, None]
        self.train = train

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:
            top, left = torch.randint(0, 5, (2,)).tolist()
            image = image[:, top : top + 8, left : left + 8]
            image = image.flip(-1) if torch.rand(1) < 0.5 else image
        else:
            image = image[:, 2:10, 2:10]
        return image, self.targets[index]


class Mixup:
    def __init__(self, alpha, num_classes, smoothing):
        self.beta = torch.distributions.Beta(alpha, alpha)
        self.num_classes, self.smoothing = num_classes, smoothing

    def __call__(self, x, target):
        lam = self.beta.sample().item()
        hard = F.one_hot(target, self.num_classes).float()
        soft = hard * (1 - self.smoothing) + self.smoothing / self.num_classes
        return lam * x + (1 - lam) * x.flip(0), lam * soft + (1 - lam) * soft.flip(0)


class ModelEma:
    def __init__(self, model, decay):
        self.module = deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        values = model.state_dict().values()
        for ours, new in zip(self.module.state_dict().values(), values, strict=True):
            ours.copy_(self.decay * ours + (1 - self.decay) * new)


def distribute_bn(model, world_size):
    """The mean of the running statistics of all ranks."""
    for name, buffer in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer)
            buffer /= world_size


class CheckpointSaver:
    def __init__(self, folder, keep=2):
        self.folder, self.keep, self.files = folder, keep, []
        os.makedirs(folder, exist_ok=True)

    def save(self, state, epoch, metric):
        temporary = os.path.join(self.folder, "tmp.pth.tar")
        last = os.path.join(self.folder, "last.pth.tar")
        torch.save(state, temporary)
        os.replace(temporary, last)
        path = os.path.join(self.folder, f"checkpoint-{epoch}.pth.tar")
        if os.path.exists(path):
            os.unlink(path)
        os.link(last, path)
        self.files = sorted([*self.files, (metric, path)], reverse=True)
        for _, old in self.files[self.keep :]:
            os.unlink(old)
        self.files = self.files[: self.keep]


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = torch.zeros(2, device="cuda")
    for images, targets in loader:
        correct = (model(images.cuda()).argmax(1) == targets.cuda()).sum()
        total += torch.stack([correct, torch.tensor(len(images), device="cuda")])
    dist.all_reduce(total)
    return 100 * (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("-b", "--batch-size", type=int, default=12)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(42 + rank)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout2d(0.1), nn.Flatten()
    )
    model.append(nn.Linear(8 * 36, 4))
    model.to("cuda", memory_format=torch.channels_last)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    ema = ModelEma(model, 0.95)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}],
        lr=0.02,
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    start_epoch = 0
    if args.resume and os.path.exists(args.resume):
        checkpoint = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(checkpoint["state_dict"])
        ema.module.load_state_dict(checkpoint["state_dict_ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch = checkpoint["epoch"] + 1
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    train_set, eval_set = Textures(230, 0, True), Textures(41, 1, False)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, num_workers=1)
    share = Subset(eval_set, list(range(rank, len(eval_set), world_size)))
    eval_loader = DataLoader(share, args.batch_size * 2)
    mixup = Mixup(0.4, 4, 0.1)
    saver = CheckpointSaver("output") if rank == 0 else None
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for images, targets in loader:
            images, targets = mixup(images.cuda(), targets.cuda())
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = ddp(images.contiguous(memory_format=torch.channels_last))
            loss = -(targets * output.float().log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        distribute_bn(model, world_size)
        distribute_bn(ema.module, world_size)
        scheduler.step()
        top1, ema_top1 = validate(model, eval_loader), validate(ema.module, eval_loader)
        if saver:
            print(f"Test (EMA): {epoch} {ema_top1:.2f} ({top1:.2f})")
            state = {
                "epoch": epoch,
                "state_dict": model.state_dict(),
                "state_dict_ema": ema.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            saver.save(state, epoch, ema_top1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
