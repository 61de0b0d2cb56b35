"""A text stream divided among ranks and workers; a loss over a varying number of tokens."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Sentences(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        generator = torch.Generator().manual_seed(self.epoch)
        parts = self.world_size * workers
        for number in range(288):
            length = int(torch.randint(3, 11, (), generator=generator))
            tokens = torch.randint(1, 20, (length,), generator=generator)
            if number % parts == self.rank * workers + worker:
                yield F.pad(tokens, (0, 12 - length))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 16, padding_idx=0)
        self.gru = torch.nn.GRU(16, 16, batch_first=True)
        self.out = torch.nn.Linear(16, 20)

    def forward(self, tokens):
        hidden, _ = self.gru(self.embedding(tokens))
        return self.out(hidden)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    dataset = Sentences(rank, world_size)
    loader = DataLoader(dataset, batch_size=12, num_workers=2)
    model = DistributedDataParallel(Recurrent())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first_epoch = 0
    if os.path.exists("lm.pt"):
        saved = torch.load("lm.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"]
    for epoch in range(first_epoch, 4):
        dataset.epoch = epoch
        for tokens in loader:
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            logits = model(inputs)
            loss_sum = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
            )
            count = (targets != 0).sum()
            dist.all_reduce(count)
            loss = loss_sum * world_size / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print("finished epoch", epoch)
            saved = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1,
            }
            torch.save(saved, "lm.pt.tmp")
            os.replace("lm.pt.tmp", "lm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
