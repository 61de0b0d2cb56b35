"""One file with argparse and mp.spawn, a convolutional model with BatchNorm, and meters."""

import argparse
import os

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim
import torch.utils.data
import torch.utils.data.distributed
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Subset

parser = argparse.ArgumentParser(description="training")
parser.add_argument("--epochs", default=5, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int)
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--print-freq", default=10, type=int)
parser.add_argument("--dist-url", default="tcp://127.0.0.1:0", type=str)
best_acc1 = 0


class Images(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (length,), generator=generator)
        self.images = torch.randn(length, 3, 8, 8, generator=generator)
        self.images += self.labels[:, None, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device="cuda")
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / self.count


def main():
    args = parser.parse_args()
    args.ngpus = torch.cuda.device_count()
    args.dist_url = args.dist_url.replace(":0", f":{20000 + os.getpid() % 20000}")
    mp.spawn(main_worker, nprocs=args.ngpus, args=(args.ngpus, args))


def main_worker(gpu, ngpus, args):
    global best_acc1
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=ngpus, rank=gpu)
    torch.cuda.set_device(gpu)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.cuda(gpu)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    start_epoch = 0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location=f"cuda:{gpu}")
        start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    cudnn.benchmark = True
    train_dataset, val_dataset = Images(203, 0), Images(37, 1)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, pin_memory=True, sampler=train_sampler
    )
    val_dataset = Subset(val_dataset, range(gpu, len(val_dataset), ngpus))
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.batch_size)
    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, gpu, args)
        acc1 = validate(val_loader, model, gpu)
        scheduler.step()
        best_acc1 = max(acc1, best_acc1)
        if gpu == 0:
            print(f" * epoch {epoch} Acc@1 {acc1:.3f}")
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(state, "checkpoint.pth.tar.new")
            os.rename("checkpoint.pth.tar.new", "checkpoint.pth.tar")


def train(train_loader, model, criterion, optimizer, epoch, gpu, args):
    model.train()
    for i, (images, target) in enumerate(train_loader):
        images = images.cuda(gpu, non_blocking=True)
        target = target.cuda(gpu, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0 and gpu == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] loss {loss.item():.3f}")


def validate(val_loader, model, gpu):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images.cuda(gpu))
            correct = (output.argmax(1) == target.cuda(gpu)).float().mean()
            top1.update(correct.item(), images.size(0))
    top1.all_reduce()
    return top1.avg


if __name__ == "__main__":
    main()
