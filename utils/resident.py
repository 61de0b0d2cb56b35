"""loader=device and loader=auto: a whole dataset in the training device's memory."""

import os
from typing import Any

import torch

from utils.distributed import all_gather_object, get_local_world_size, main_process_first
from utils.errors import UserError


def make_resident(dataset: Any, device: torch.device, loader: str) -> Any:
    """A BatchDataset (utils/data.py) with its samples on `device`, or None if workers are to read
    them. All ranks call it together, and reach the same decision.

    loader: "device": always; "auto": if they take at most a quarter of this rank's share of the
    free memory. Raises UserError for "device" if the dataset cannot do it.
    """
    if loader == "auto":
        size = dataset.resident_bytes()
        room = _free_memory(device) / _ranks_on(device) / 4
        fits = size is not None and size <= room
        if not all(all_gather_object(fits)):
            return None
    with main_process_first():  # one process per node decodes a folder, the others map its file
        resident = dataset.resident(device)
    if resident is None and loader == "device":
        raise UserError(
            f"loader=device cannot keep this {type(dataset).__name__} on the device: pass --loader "
            f"workers"
        )
    return resident


def _free_memory(device):
    """The number of bytes that the processes on the device may expect to get."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    pages = os.sysconf("SC_PHYS_PAGES")  # all of them: free pages do not include cached files
    return pages * os.sysconf("SC_PAGE_SIZE") / 2


def _ranks_on(device):
    """The number of ranks that share the device: on a GPU, one or several; on a CPU, its node's."""
    if device.type == "cpu":
        return get_local_world_size()
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = str(properties.uuid)  # cuda:0 may differ between tasks
    return all_gather_object(uuid).count(uuid)
