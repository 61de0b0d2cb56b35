"""A trainer with a gradient scaler, clipping and accumulation, as for float16."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GPTTrainer:
    def __init__(self, model, train_set, test_set, accumulation=2):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.accumulation = accumulation
        self.sampler = DistributedSampler(train_set, drop_last=True)
        self.train_loader = DataLoader(
            train_set, batch_size=8, sampler=self.sampler, pin_memory=True, num_workers=1
        )
        self.test_loader = DataLoader(
            test_set, batch_size=8, sampler=DistributedSampler(test_set, shuffle=False)
        )
        self.test_length = len(test_set)
        self.model = model.to(self.local_rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
        self.epochs_run = 0
        self.load()
        self.model = nn.parallel.DistributedDataParallel(self.model, device_ids=[self.local_rank])

    def load(self):
        try:
            with open("snapshot.pth", "rb") as f:
                snapshot = torch.load(f, map_location="cpu")
        except FileNotFoundError:
            return
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.scaler.load_state_dict(snapshot["scaler"])
        self.epochs_run = snapshot["epoch"] + 1

    def save(self, epoch):
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": epoch,
        }
        with open("snapshot.pth.part", "wb") as f:
            torch.save(snapshot, f)
        os.replace("snapshot.pth.part", "snapshot.pth")

    def run_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(self.train_loader):
            last = (step + 1) % self.accumulation == 0
            with nullcontext() if last else self.model.no_sync():
                with torch.amp.autocast("cuda", dtype=torch.float16):
                    outputs = self.model(inputs.to(self.local_rank))
                    loss = nn.functional.mse_loss(outputs, targets.to(self.local_rank))
                self.scaler.scale(loss / self.accumulation).backward()
            if last:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)

    def test(self):
        self.model.eval()
        total = torch.zeros(2)
        position = self.rank
        with torch.no_grad():
            for inputs, targets in self.test_loader:
                outputs = self.model(inputs.to(self.local_rank)).float()
                errors = (outputs - targets.to(self.local_rank)).pow(2).mean(1)
                for error in errors:
                    if position < self.test_length:  # the sampler repeats the first samples
                        total += torch.stack([error, torch.ones_like(error)])
                    position += self.world
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            error = self.test()
            if self.rank == 0:
                self.save(epoch)
                print(f"Epoch {epoch}: test error {error:.4f}")


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(3)
    inputs = torch.randn(300, 12)
    data = TensorDataset(inputs, inputs @ torch.randn(12, 3))
    train_set, test_set = torch.utils.data.random_split(data, [249, 51])
    model = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.1), nn.GELU(), nn.Linear(24, 3))
    GPTTrainer(model, train_set, test_set).train(6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
