"""Ranks with different numbers of batches under Join, and a communication hook that compresses."""

import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset


class Shards(IterableDataset):
    """Files of different lengths, of which each rank reads its own."""

    def __init__(self, files, rank, world_size):
        self.files = files[rank::world_size]
        self.epoch = 0

    def __iter__(self):
        order = torch.Generator().manual_seed(self.epoch)
        for i in torch.randperm(len(self.files), generator=order).tolist():
            number, lines = self.files[i]
            g = torch.Generator().manual_seed(number)
            rows = torch.randn(lines, 9, generator=g)
            for j in torch.randperm(lines, generator=order).tolist():
                yield {"features": rows[j, :8], "target": rows[j, :8].sum() + 0.1 * rows[j, 8]}


@torch.no_grad()
def estimate(model, val_set, rank, epoch):
    """The error on some samples, which each rank draws by itself."""
    g = torch.Generator().manual_seed(1000 * epoch + rank)
    sampler = RandomSampler(val_set, num_samples=24, generator=g)
    model.eval()
    total = torch.zeros(())
    for x, y in DataLoader(val_set, batch_size=8, sampler=sampler):
        total += (model(x).squeeze(1) - y).pow(2).sum()
    model.train()
    dist.all_reduce(total)
    return total.item() / (24 * dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    files = [(number, 20 + 4 * (number % 4)) for number in range(8)]
    dataset = Shards(files, rank, world_size)
    loader = DataLoader(dataset, batch_size=16, drop_last=True)
    inputs = torch.randn(90, 8, generator=torch.Generator().manual_seed(99))
    val_set = TensorDataset(inputs, inputs.sum(1))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.002)
    epoch = 0
    if os.path.exists("checkpoints"):
        names = sorted(name for name in os.listdir("checkpoints") if name.endswith(".pt"))
        state = torch.load(os.path.join("checkpoints", names[-1]), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
    while epoch < 5:
        dataset.epoch = epoch
        seen = 0
        with Join([model]):
            for batch in loader:
                prediction = model(batch["features"]).squeeze(1)
                loss = torch.nn.functional.mse_loss(prediction, batch["target"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen += len(prediction)
        epoch += 1
        total = torch.tensor(seen)
        dist.all_reduce(total)
        error = estimate(net, val_set, rank, epoch)
        if rank == 0:
            print(f"epoch {epoch}: {total.item()} samples, error {error:.3f}")
            os.makedirs("checkpoints", exist_ok=True)
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, f"checkpoints/{epoch:04d}.tmp")
            os.replace(f"checkpoints/{epoch:04d}.tmp", f"checkpoints/{epoch:04d}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
