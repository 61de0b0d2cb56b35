"""Accumulation style: no_sync, the last group of an epoch is shorter, resumes within an epoch."""

import contextlib
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUMULATE = 3
EPOCHS = 6
CHECKPOINT = "checkpoints/state.pt"


class Sentences(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(20, (128, 9), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 16)
        self.recurrent = torch.nn.GRU(16, 16, batch_first=True)
        self.head = torch.nn.Linear(16, 20)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embedding(tokens))[0])


def groups(loader, size):
    """Lists of up to `size` batches."""
    iterator = iter(loader)
    while group := list(itertools.islice(iterator, size)):
        yield group


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    dataset = Sentences()
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    progress = {"epoch": 0, "updates": 0}
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = saved["progress"]
    os.makedirs("checkpoints", exist_ok=True)
    for epoch in range(progress["epoch"], EPOCHS):
        sampler.set_epoch(epoch)
        for update, group in enumerate(groups(loader, ACCUMULATE)):
            if update < progress["updates"]:
                continue  # trained on before the restart
            optimizer.zero_grad()
            for number, (tokens, targets) in enumerate(group):
                is_last = number == len(group) - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                    (loss / len(group)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress = {"epoch": epoch, "updates": update + 1}
            if rank == 0:
                save(model, optimizer, progress)
            dist.barrier()
        progress = {"epoch": epoch + 1, "updates": 0}
        if rank == 0:
            print(f"finished epoch {epoch}")
            save(model, optimizer, progress)
        dist.barrier()
    dist.destroy_process_group()


def save(model, optimizer, progress):
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
    torch.save(saved, CHECKPOINT + "~")
    os.replace(CHECKPOINT + "~", CHECKPOINT)


if __name__ == "__main__":
    main()
