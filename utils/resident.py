"""loader=device and loader=auto: the whole dataset as uint8 in the training device's memory."""

import os

import torch

from utils.array_data import ArrayDataset
from utils.distributed import all_gather_object, get_local_world_size, main_process_first
from utils.errors import UserError


def make_resident(dataset, device, cfg):
    """The dataset as an ArrayDataset on `device`, or None if workers are to read it.

    loader=device: always. loader=auto: if the images take at most a quarter of this rank's share of
    the free memory and, if they come from files, can be cached. All ranks call it together, and
    reach the same decision. A dataset other than an ArrayDataset needs as_array(), which returns
    one, or None if its augmentation needs the original images. Raises UserError for loader=device
    without it.
    """
    if cfg.loader == "auto":
        room = _free_memory(device) / _ranks_on(device) / 4
        if not all(all_gather_object(_fits(dataset, room))):
            return None
    with main_process_first():  # one process per node decodes a folder, the others map its file
        array = _as_array(dataset, device)
    if array is None and cfg.loader == "device":
        raise UserError(
            f"loader=device cannot keep this {type(dataset).__name__} on the device, because it "
            f"has no as_array() or augments the original images: pass --loader workers"
        )
    return None if array is None else array.to(device)


def _as_array(dataset, device):
    if not isinstance(dataset, ArrayDataset):
        return dataset.as_array() if hasattr(dataset, "as_array") else None
    resized = dataset.nhwc.shape[1] != dataset.size  # a GPU rounds differently
    return None if resized and device.type == "cuda" else dataset


def _fits(dataset, room):
    if not isinstance(dataset, ArrayDataset) and not hasattr(dataset, "as_array"):
        return False
    cache = getattr(dataset, "cache", None)  # the Path where as_array() keeps decoded images
    if cache:
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        if not os.access(existing, os.W_OK):
            return False
    image, _ = dataset[0]
    return image.nbytes * len(dataset) <= room


def _free_memory(device):
    """The number of bytes that the processes on the device may expect to get."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_PHYS_PAGES")  # all of them: free pages do not include cached files
    return pages * os.sysconf("SC_PAGE_SIZE") / 2


def _ranks_on(device):
    """The number of ranks that share the device: on a GPU, one or several; on a CPU, its node's."""
    if device.type == "cpu":
        return get_local_world_size()
    uuid = str(torch.cuda.get_device_properties(device).uuid)  # cuda:0 may be another for each task
    return all_gather_object(uuid).count(uuid)
