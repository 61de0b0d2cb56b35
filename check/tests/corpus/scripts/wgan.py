"""A critic with a gradient penalty, an endless loader, gradients averaged in one bucket."""

import os
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import autograd, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CRITIC_ITERS, LAMBDA, ITERATIONS = 2, 10.0, 40


class Ring(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(9)
        angle = torch.rand(n, generator=g) * 2 * torch.pi
        self.points = torch.stack([angle.cos(), angle.sin()], 1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i]


def infinite(loader, sampler, start):
    epoch, skipped = divmod(start, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            if i >= skipped:
                yield batch
        epoch, skipped = epoch + 1, 0


def reduce_gradients(module):
    """One all_reduce of all gradients, copied into a flat buffer."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(len(real), 1, device=real.device)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_()
    scores = critic(mixed)
    (gradients,) = autograd.grad(scores.sum(), mixed, create_graph=True)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def mlp(*sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Softplus()]
    return nn.Sequential(*layers[:-1])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    optim_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optim_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    iteration = 0
    if os.path.exists("wgan/latest.pt"):
        ckpt = torch.load("wgan/latest.pt", weights_only=True)
        generator.load_state_dict(ckpt["generator"])
        critic.load_state_dict(ckpt["critic"])
        optim_g.load_state_dict(ckpt["optim_g"])
        optim_c.load_state_dict(ckpt["optim_c"])
        iteration = ckpt["iteration"]
    torch.manual_seed(1 + rank + 100 * iteration)  # noise of its own for each rank
    dataset = Ring(256)
    sampler = DistributedSampler(dataset, rank=rank, num_replicas=world_size)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    batches = infinite(loader, sampler, iteration * CRITIC_ITERS)
    while iteration < ITERATIONS:
        for _ in range(CRITIC_ITERS):
            real = next(batches)
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 4))
            loss_c = critic(fake).mean() - critic(real).mean()
            loss_c = loss_c + LAMBDA * gradient_penalty(critic, real, fake)
            optim_c.zero_grad()
            loss_c.backward()
            reduce_gradients(critic)
            optim_c.step()
        loss_g = -critic(generator(torch.randn(16, 4))).mean()
        optim_g.zero_grad()
        loss_g.backward()
        reduce_gradients(generator)
        optim_g.step()
        iteration += 1
        if iteration % 2 == 0 and rank == 0:
            print(f"{iteration}: critic {loss_c.item():.3f}, generator {loss_g.item():.3f}")
            os.makedirs("wgan", exist_ok=True)
            ckpt = {
                "generator": generator.state_dict(),
                "critic": critic.state_dict(),
                "optim_g": optim_g.state_dict(),
                "optim_c": optim_c.state_dict(),
                "iteration": iteration,
            }
            torch.save(ckpt, "wgan/latest.pt.tmp")
            os.replace("wgan/latest.pt.tmp", "wgan/latest.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
