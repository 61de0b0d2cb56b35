"""Pictures of different sizes: ragged batches, groups by shape, pickle, a log of each rank."""

import logging
import os
import pickle

import torch
import torch.distributed as dist
import torch.utils.data as data
from torch import nn

logger = logging.getLogger("detector")


class Scenes(data.Dataset):
    def __init__(self, length, seed):
        g = torch.Generator().manual_seed(seed)
        self.wide = torch.rand(length, generator=g) < 0.5
        self.centers = torch.rand(length, 2, generator=g)
        self.seed = seed

    def __len__(self):
        return len(self.wide)

    def __getitem__(self, index):
        height, width = (8, 12) if self.wide[index] else (12, 8)
        g = torch.Generator().manual_seed(self.seed * 10000 + index)
        image = 0.1 * torch.randn(1, height, width, generator=g)
        y, x = self.centers[index].tolist()
        image[0, int(y * height), int(x * width)] = 3.0
        return image, {"center": self.centers[index], "image_id": index}


class GroupedSampler(data.Sampler):
    """Batches of pictures of one shape; each rank gets every world_size-th of them."""

    def __init__(self, groups, batch_size, rank, world_size):
        self.groups, self.batch_size = groups, batch_size
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        batches = []
        for group in self.groups:
            shuffled = [group[i] for i in torch.randperm(len(group), generator=g).tolist()]
            for start in range(0, len(group) - self.batch_size + 1, self.batch_size):
                batches.append(shuffled[start : start + self.batch_size])
        order = torch.randperm(len(batches), generator=g).tolist()
        order = order[: len(order) // self.world_size * self.world_size]
        return iter([batches[i] for i in order[self.rank :: self.world_size]])

    def __len__(self):
        return sum(len(g) // self.batch_size for g in self.groups) // self.world_size


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.score = nn.Conv2d(8, 1, 1)
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, images, targets=None):
        heat = self.score(self.features(torch.stack(images))).squeeze(1)
        weights = heat.flatten(1).softmax(1).view_as(heat)
        rows = torch.linspace(0, 1, heat.shape[1], device=heat.device)
        columns = torch.linspace(0, 1, heat.shape[2], device=heat.device)
        y, x = (weights.sum(2) * rows).sum(1), (weights.sum(1) * columns).sum(1)
        centers = torch.stack([y, x], 1) + self.shift
        if self.training:
            truth = torch.stack([t["center"] for t in targets])
            return {"loss_center": (centers - truth).abs().mean()}
        return [{"center": center} for center in centers]


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    distances = {}
    for images, targets in loader:
        outputs = model([image.to(device) for image in images])
        for target, output in zip(targets, outputs, strict=True):
            distance = (output["center"].cpu() - target["center"]).norm().item()
            distances[target["image_id"]] = distance
    merged = [None] * dist.get_world_size()
    dist.all_gather_object(merged, distances)
    every = {key: value for part in merged for key, value in part.items()}
    return sum(every.values()) / len(every)


def main():
    dist.init_process_group(backend="nccl", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda")
    handler = logging.FileHandler(f"log_rank{rank}.txt")
    logging.basicConfig(
        level=logging.INFO,
        format=f"[rank{rank}] %(message)s",
        handlers=[handler, logging.StreamHandler()],
    )
    torch.manual_seed(0)
    train_set, test_set = Scenes(200, 0), Scenes(33, 1)
    groups = [[i for i in range(200) if bool(train_set.wide[i]) == wide] for wide in (True, False)]
    sampler = GroupedSampler(groups, 4, rank, world_size)
    train_loader = data.DataLoader(
        train_set, batch_sampler=sampler, collate_fn=collate_fn, num_workers=1
    )
    test_loader = data.DataLoader(
        test_set, batch_size=1, sampler=range(rank, 33, world_size), collate_fn=collate_fn
    )
    model = nn.parallel.DistributedDataParallel(Detector().to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    first_epoch = 0
    if os.path.exists("model_last.pkl"):
        with open("model_last.pkl", "rb") as f:
            checkpoint = pickle.load(f)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        warmup.load_state_dict(checkpoint["warmup"])
        first_epoch = checkpoint["epoch"] + 1
    for epoch in range(first_epoch, 5):
        model.train()
        sampler.epoch = epoch
        for images, targets in train_loader:
            images = [image.to(device) for image in images]
            targets = [{"center": t["center"].to(device)} for t in targets]
            losses = model(images, targets)
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            warmup.step()
        logger.info("epoch %d train loss %.3f", epoch, losses["loss_center"].item())
        error = evaluate(model, test_loader, device)
        if rank == 0:
            logger.info("epoch %d test error %.3f", epoch, error)
            checkpoint = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "warmup": warmup.state_dict(),
                "epoch": epoch,
            }
            with open("model_new.pkl", "wb") as f:
                pickle.dump(checkpoint, f)
            os.replace("model_new.pkl", "model_last.pkl")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
