"""Data on the device: a dataset whose samples lie in the memory of the device that trains, where
its batches are made, without loader processes.

For build_datasets() of a task: docs/own-task.md.
"""

import copy
import os
import socket
from typing import Any

import torch
from torch import Tensor

from utils.data import BatchDataset
from utils.distributed import all_gather_object, current_device, main_process_first
from utils.errors import UserError


class Resident(BatchDataset):
    """A dataset whose batches are made on the device, the same as of the dataset, bit for bit. It
    has the attributes of the dataset.

    in_memory: a BatchDataset of the same samples, whose get_batch() computes on the device of the
    tensors among its attributes; device: to which a copy of them is moved.
    """

    def __init__(self, dataset: Any, in_memory: BatchDataset, device: torch.device) -> None:
        self.dataset, self.device, self.moved = dataset, device, copy.copy(in_memory)
        for name, value in vars(in_memory).items():
            if isinstance(value, Tensor):
                setattr(self.moved, name, value.to(device))

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> Any:
        """The batch, on the device, of the samples with these indices, int64 (n,), on it."""
        return self.moved.get_batch(indices, epoch, seed)

    def on_device(self, batch: Any, dtype: torch.dtype) -> Any:
        """See BatchDataset."""
        return self.moved.on_device(batch, dtype)


def keep_on_device(dataset: Any, loader: str = "auto") -> Any:
    """A Resident on this process's device; or the dataset itself, for loader processes. All ranks
    call it together, and decide alike.

    dataset: has in_memory(), which returns what a Resident needs; and nbytes, its size, which is
    None if that cannot be. loader: "device": always; "workers": never; "auto": if it takes at most
    a quarter of this rank's share of the free memory. Raises UserError for "device" if the dataset
    cannot do it.
    """
    device, nbytes = current_device(), dataset.nbytes
    memory = _memory_of_rank(device)
    if loader == "device" and nbytes is None:
        raise UserError(f"a {type(dataset).__name__} cannot be on the device: pass --loader auto")
    fits = nbytes is not None and nbytes <= memory / 4
    if loader == "workers" or (loader == "auto" and not all(all_gather_object(fits))):
        return dataset
    with main_process_first():  # one process per node decodes a folder, the others map its file
        return Resident(dataset, dataset.in_memory(), device)


def _memory_of_rank(device):
    """The bytes that a rank may expect to get, where several share a GPU, or a node's memory."""
    place, memory = socket.gethostname(), _free_memory(device)
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        place = str(properties.uuid)  # cuda:0 may be a different one for each task of SLURM
    return memory / all_gather_object(place).count(place)


def _free_memory(device):
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    pages = os.sysconf("SC_PHYS_PAGES")  # all of them: free pages do not include cached files
    return pages * os.sysconf("SC_PAGE_SIZE") / 2
