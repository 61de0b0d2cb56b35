"""Random seeds, and showing how far an epoch is. Needs torch and distributed.py."""

import random
import sys
import time

import torch

from utils.distributed import get_rank, is_main_process

SECONDS_BETWEEN_LINES = 15


def seed_everything(seed):
    """The same weights on every rank. (FSDP would not broadcast rank 0's as DDP does.)"""
    random.seed(seed)
    torch.manual_seed(seed)


def seed_step(seed, epoch, step):
    """Random numbers inside the model (dropout): others on each rank and at each step, the same
    after a restart in the middle of an epoch."""
    seed = hash((seed, epoch, step, get_rank()))  # of integers, so alike everywhere
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 50 times as long without
    if torch.cuda.is_initialized():  # CUDA, looking for it
        torch.cuda.manual_seed_all(seed)


def progress(loader, name, start=0):
    """The batches of `loader`, with a progress bar where a person is looking.

    On the main process alone: tqdm's bar on a terminal where tqdm is installed, otherwise a plain
    line now and then, for a log. start: batches that an earlier run has done.
    """
    if not is_main_process():
        return iter(loader)
    bar = _tqdm() if sys.stderr.isatty() else None
    if bar:
        return iter(bar(loader, desc=name, leave=False, unit="batch", initial=start))
    return _lines(loader, name, start)


def _tqdm():
    try:
        from tqdm import tqdm
    except ImportError:  # optional: requirements-extras.txt
        return None
    return tqdm


def _lines(loader, name, start):
    said = time.monotonic()
    for step, batch in enumerate(loader, start):
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{name}: step {step} of {len(loader)}", file=sys.stderr, flush=True)
        yield batch
