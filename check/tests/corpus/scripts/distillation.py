"""A frozen teacher, a batch_sampler of this rank's batches, and SWA with update_bn."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class DistributedBatchSampler(Sampler):
    """Whole batches of a permutation, dealt out to the ranks in turn."""

    def __init__(self, length, batch_size, rank, num_replicas):
        self.length, self.batch_size = length, batch_size
        self.rank, self.num_replicas = rank, num_replicas
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(97 + self.epoch)
        order = torch.randperm(self.length, generator=generator).tolist()
        order = order[: int(0.8 * self.length)]  # a different part of the set in each epoch
        batches = [
            order[i : i + self.batch_size]
            for i in range(0, len(order) - self.batch_size + 1, self.batch_size)
        ]
        usable = len(batches) // self.num_replicas * self.num_replicas
        yield from batches[self.rank : usable : self.num_replicas]

    def __len__(self):
        return int(0.8 * self.length) // self.batch_size // self.num_replicas


def mlp(width):
    return nn.Sequential(
        nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 5)
    )


def distill(student_logits, teacher_logits, labels, T=2.0, alpha=0.7):
    soft = nn.functional.kl_div(
        (student_logits / T).log_softmax(1),
        (teacher_logits / T).softmax(1),
        reduction="batchmean",
    )
    hard = nn.functional.cross_entropy(student_logits, labels)
    return alpha * T * T * soft + (1 - alpha) * hard


@torch.no_grad()
def accuracy(model, loader, most_batches=3):
    model.eval()
    stats = torch.zeros(2)
    for i, (x, y) in enumerate(loader):
        if i == most_batches:
            break
        stats += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(stats)
    return float(stats[0] / stats[1])


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    x = torch.randn(330, 12)
    teacher = mlp(64).eval().requires_grad_(False)
    y = teacher(x).argmax(1)
    train_set, test_set = TensorDataset(x[:270], y[:270]), TensorDataset(x[270:], y[270:])
    batches = DistributedBatchSampler(len(train_set), 16, rank, world)
    train_loader = DataLoader(train_set, batch_sampler=batches)
    test_share = torch.utils.data.Subset(test_set, range(rank, len(test_set), world))
    test_loader = DataLoader(test_share, batch_size=8)
    student = nn.SyncBatchNorm.convert_sync_batchnorm(mlp(16)) if world > 1 else mlp(16)
    swa_model = AveragedModel(student, use_buffers=False)
    ddp = nn.parallel.DistributedDataParallel(student)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    start = 0
    if os.path.exists("distill/last.pt"):
        saved = torch.load("distill/last.pt", map_location="cpu")
        student.load_state_dict(saved["student"])
        swa_model.load_state_dict(saved["swa"])
        optimizer.load_state_dict(saved["optimizer"])
        swa_scheduler.load_state_dict(saved["scheduler"])
        start = saved["epoch"] + 1
    for epoch in range(start, 5):
        batches.set_epoch(epoch)
        ddp.train()
        for inputs, labels in train_loader:
            with torch.no_grad():
                targets = teacher(inputs)
            loss = distill(ddp(inputs), targets, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        swa_model.update_parameters(student)
        swa_scheduler.step()
        update_bn(train_loader, swa_model)
        score, swa_score = accuracy(ddp, test_loader), accuracy(swa_model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: student {score:.3f}, averaged {swa_score:.3f}")
            os.makedirs("distill", exist_ok=True)
            state = {
                "student": student.state_dict(),
                "swa": swa_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": swa_scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "distill/new.pt")
            os.replace("distill/new.pt", "distill/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
