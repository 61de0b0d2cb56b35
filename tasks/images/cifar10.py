"""dataset=cifar10: the 60,000 images of Krizhevsky 2009, downloaded if necessary."""

import torch
import torch.distributed as dist
import torchvision

from tasks.images.arrays import ArrayDataset, augmented
from tasks.images.settings import Settings
from utils.errors import UserError

CIFAR10 = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}


def build(cfg: Settings) -> tuple[ArrayDataset, ArrayDataset]:
    """The training set and the test set of CIFAR-10, downloaded if necessary."""
    download = dist.get_node_local_rank(0) == 0
    try:
        train, val = (
            torchvision.datasets.CIFAR10(cfg.data_dir, split, download=download)
            for split in (True, False)
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"CIFAR-10 is not in {cfg.data_dir}, and cannot be downloaded from "
            f"{torchvision.datasets.CIFAR10.url}: {error}. Pass --data-dir, or --dataset synthetic"
        ) from None
    arrays = [(torch.from_numpy(s.data).permute(0, 3, 1, 2), s.targets) for s in (train, val)]
    return augmented(arrays, train.classes, CIFAR10, cfg)
