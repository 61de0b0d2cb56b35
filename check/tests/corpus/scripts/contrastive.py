"""A contrastive loss over the batches of all ranks, an average of the weights, rolling files."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, size, seed, noise=0.3):
        g = torch.Generator().manual_seed(seed)
        self.signals = torch.randn(size, 16, generator=g)
        self.noise = noise

    def __len__(self):
        return len(self.signals)

    def view(self, x):
        x = x + self.noise * torch.randn(16)
        return x.flip(0) if torch.rand(()) < 0.5 else x

    def __getitem__(self, i):
        return self.view(self.signals[i]), self.view(self.signals[i])


class GatherLayer(torch.autograd.Function):
    """all_gather whose backward adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x.contiguous())
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        grads = torch.stack(grads)
        dist.all_reduce(grads)
        return grads[dist.get_rank()]


def nt_xent(a, b, temperature=0.2):
    a = torch.cat(GatherLayer.apply(F.normalize(a, dim=1)))
    b = torch.cat(GatherLayer.apply(F.normalize(b, dim=1)))
    logits = a @ b.t() / temperature
    labels = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def save(folder, step, state, keep=2):
    path = folder / f"ckpt_{step:06d}.pt"
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    pointer = folder / "latest.tmp"
    pointer.write_text(path.name)
    pointer.rename(folder / "latest")
    for old in sorted(folder.glob("ckpt_*.pt"))[:-keep]:
        old.unlink()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    ema = AveragedModel(encoder, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model = nn.parallel.DistributedDataParallel(encoder, device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    folder = Path("runs")
    folder.mkdir(exist_ok=True)
    step = epoch = 0
    if (folder / "latest").exists():
        state = torch.load(folder / (folder / "latest").read_text(), map_location=device)
        encoder.load_state_dict(state["encoder"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        step, epoch = state["step"], state["epoch"]
    torch.manual_seed(1000 * (epoch + 1) + rank)  # from here on each rank draws its own views
    train_set = TwoViews(192, 0)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, drop_last=True, num_workers=1)
    while epoch < 5:
        sampler.set_epoch(epoch)
        for first, second in loader:
            views = torch.cat([first, second]).to(device)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                a, b = model(views).chunk(2)
            loss = nt_xent(a.float(), b.float())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            ema.update_parameters(encoder)
            step += 1
            if step % 10 == 0 and rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
        epoch += 1
        if rank == 0:
            state = {
                "encoder": encoder.state_dict(),
                "ema": ema.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "epoch": epoch,
            }
            save(folder, step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
