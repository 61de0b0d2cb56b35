"""Lightning Fabric: setup_dataloaders, no_backward_sync, clip_gradients, fabric.save and load."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUMULATE = 2


class Spirals(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 2, (n,), generator=g)
        angle = torch.rand(n, generator=g) * 6
        radius = angle / 6 + 0.05 * torch.randn(n, generator=g)
        angle = angle + self.label * torch.pi
        self.xy = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

    def __len__(self):
        return len(self.xy)

    def __getitem__(self, i):
        return {"xy": self.xy[i], "label": self.label[i]}


class ResumedSampler(DistributedSampler):
    """Fabric counts the epochs from the start of the job: after a restart they go on from here."""

    first_epoch = 0

    def set_epoch(self, epoch):
        super().set_epoch(self.first_epoch + epoch)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 2)
        )

    def forward(self, batch):
        return self.layers(batch["xy"])


def main():
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)
    train_set = Spirals(300, 0)
    sampler = ResumedSampler(train_set, fabric.world_size, fabric.global_rank)
    val_set = Spirals(41, 1)
    share = torch.utils.data.Subset(
        val_set, range(fabric.global_rank, len(val_set), fabric.world_size)
    )
    val_loader = fabric.setup_dataloaders(
        DataLoader(share, batch_size=10), use_distributed_sampler=False
    )
    train_loader = fabric.setup_dataloaders(
        DataLoader(train_set, batch_size=10, sampler=sampler), use_distributed_sampler=False
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    checkpoints = sorted(f for f in os.listdir(".") if f.endswith(".ckpt"))
    if checkpoints:
        fabric.load(checkpoints[-1], state)
        sampler.first_epoch = state["epoch"]

    while state["epoch"] < 6:
        model.train()
        for i, batch in enumerate(train_loader):
            accumulating = (i + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = F.cross_entropy(model(batch), batch["label"])
                fabric.backward(loss / ACCUMULATE)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
        scheduler.step()
        state["epoch"] += 1

        model.eval()
        hits = torch.zeros((), device=fabric.device)
        with torch.inference_mode():
            for batch in val_loader:
                hits += (model(batch).argmax(1) == batch["label"]).sum()
        hits = fabric.all_reduce(hits, reduce_op="sum")
        fabric.print(f"epoch {state['epoch']} accuracy {hits.item() / len(val_set):.3f}")
        fabric.save(f"epoch-{state['epoch']:03d}.ckpt", state)


if __name__ == "__main__":
    main()
