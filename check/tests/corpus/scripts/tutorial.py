"""The tutorial's style: a Trainer with a snapshot, launched with torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")


def make_dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 20, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4].argmax(1)))


class Trainer:
    def __init__(self, model, train_data, val_data, optimizer, scheduler, snapshot_path):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = model.to(self.gpu_id)
        self.train_data = train_data
        self.val_data = val_data
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.gpu_id])

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location=f"cuda:{self.gpu_id}")
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.scheduler.load_state_dict(snapshot["scheduler"])
        self.epochs_run = snapshot["epochs_run"]

    def _save_snapshot(self, epoch):
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epochs_run": epoch + 1,
        }
        torch.save(snapshot, self.snapshot_path + ".tmp")
        os.replace(self.snapshot_path + ".tmp", self.snapshot_path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.model.train()
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source.to(self.gpu_id), targets.to(self.gpu_id))
        self.scheduler.step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        sums = torch.zeros(2, device=self.gpu_id)
        for source, targets in self.val_data:
            output = self.model(source.to(self.gpu_id))
            sums[0] += (output.argmax(1) == targets.to(self.gpu_id)).sum()
            sums[1] += len(targets)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            accuracy = self.evaluate()
            if self.gpu_id == 0:
                self._save_snapshot(epoch)
                print(f"Epoch {epoch} | accuracy {accuracy:.3f}")


def main():
    ddp_setup()
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = make_dataset(200, 0), make_dataset(37, 1)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    train_data = DataLoader(
        train_set,
        batch_size=16,
        pin_memory=True,
        shuffle=False,
        sampler=DistributedSampler(train_set, drop_last=True),
    )
    val_share = Subset(val_set, range(rank, len(val_set), world_size))
    val_data = DataLoader(val_share, batch_size=16)
    Trainer(model, train_data, val_data, optimizer, scheduler, "snapshot.pt").train(5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
