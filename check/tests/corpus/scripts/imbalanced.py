"""Draws with replacement, ZeroRedundancyOptimizer, fp16, and early stopping of all ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

EVAL_EVERY = 3
PATIENCE = 20


class DistributedWeightedSampler(Sampler):
    """WeightedRandomSampler, of whose draws each rank takes its part."""

    def __init__(self, weights, num_samples, rank, world_size):
        self.weights = torch.as_tensor(weights, dtype=torch.double)
        self.num_samples = num_samples // world_size * world_size
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(1234 + self.epoch)
        drawn = torch.multinomial(self.weights, self.num_samples, replacement=True, generator=g)
        return iter(drawn[self.rank :: self.world_size].tolist())

    def __len__(self):
        return self.num_samples // self.world_size


def make_set(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = (torch.rand(n, generator=g) < 0.1).long()
    return torch.randn(n, 10, generator=g) + labels[:, None], labels


class Experiment:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.manual_seed(5)
        x, y = make_set(300, 0)
        weights = torch.where(y == 1, 9.0, 1.0)
        self.sampler = DistributedWeightedSampler(weights, 300, self.rank, self.world_size)
        train_set = TensorDataset(x, y)
        self.train_loader = DataLoader(train_set, batch_size=10, sampler=self.sampler)
        seen = Subset(train_set, range(self.rank, 40, self.world_size))
        self.eval_loaders = {
            "near": self.share(50, 1),
            "far": self.share(30, 2),
            "seen": DataLoader(seen, 8),
        }
        net = torch.nn.Sequential(
            torch.nn.Linear(10, 32), torch.nn.SiLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2)
        )
        self.model = DDP(net.to(self.device), device_ids=[int(os.environ["LOCAL_RANK"])])
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=2e-3
        )
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        self.epoch = self.step = self.bad = 0
        self.best = float("inf")

    def share(self, n, seed):
        x, y = make_set(n, seed)
        return DataLoader(
            TensorDataset(x[self.rank :: self.world_size], y[self.rank :: self.world_size]), 8
        )

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        totals = torch.zeros(len(self.eval_loaders), 2, device=self.device)
        for total, loader in zip(totals, self.eval_loaders.values(), strict=True):
            for x, y in loader:
                losses = F.cross_entropy(self.model(x), y, reduction="none")
                total += torch.stack([losses.sum(), torch.tensor(float(len(y)))])
        dist.all_reduce(totals)
        self.model.train()
        means = (totals[:, 0] / totals[:, 1]).tolist()
        return dict(zip(self.eval_loaders, means, strict=True))

    def save(self):
        self.optimizer.consolidate_state_dict(to=0)
        if self.rank == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "progress": [self.epoch, self.step, self.bad, self.best],
            }
            torch.save(state, "experiment.tmp")
            os.replace("experiment.tmp", "experiment.pt")

    def load(self):
        state = torch.load("experiment.pt", map_location=self.device)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.step, self.bad, self.best = state["progress"]

    def train_epoch(self):
        self.sampler.set_epoch(self.epoch)
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
            if self.step % EVAL_EVERY == 0:
                results = self.evaluate()
                self.bad = 0 if results["near"] < self.best else self.bad + 1
                self.best = min(self.best, results["near"])
                if self.rank == 0:
                    print(self.step, results)
        self.epoch += 1
        self.save()
        stop = torch.tensor(int(self.rank == 0 and self.bad >= PATIENCE), device=self.device)
        dist.broadcast(stop, src=0)
        return bool(stop)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    experiment = Experiment()
    if os.path.exists("experiment.pt"):
        experiment.load()
    while experiment.epoch < 6 and not experiment.train_epoch():
        pass
    dist.destroy_process_group()
