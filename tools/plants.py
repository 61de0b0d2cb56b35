"""Classic bugs of distributed training, each as a change of one line, to be caught by verify."""

import shutil
from pathlib import Path
from typing import NamedTuple

from tools.runs import ROOT


class Bug(NamedTuple):
    name: str
    file: str
    line: str
    instead: str
    row: str  # of verify's table, which must turn red
    wrong: str  # what goes wrong
    outside: str  # how it looks
    prevents: str  # what prevents it


BUGS = [
    Bug(
        "set_epoch-forgotten",
        "train_ddp.py",
        "        train_sampler.set_epoch(epoch)",
        "        pass",
        "ddp x2",
        "Every epoch repeats the first one's order.",
        "Nothing fails; the model sees the same batches again and again and ends a little worse.",
        "`train_sampler.set_epoch(epoch)` at the start of each epoch.",
    ),
    Bug(
        "batchnorm-of-each-rank",
        "train_ddp.py",
        "        model = convert_sync_batchnorm(model, device)",
        "        pass",
        "ddp x2",
        "BatchNorm normalises with the statistics of a rank's share of the batch.",
        "Results change with the number of GPUs, most with few samples on each.",
        "`convert_sync_batchnorm(model, device)`, or a norm without batch statistics.",
    ),
    Bug(
        "scaled-gradients-clipped",
        "train_ddp_amp.py",
        "        scaler.unscale_(optimizer)",
        "        pass",
        "amp float16 x2",
        "The gradients' norm is measured 65536 times too large, so that every step is clipped to "
        "almost nothing.",
        "The loss hardly falls, and only with float16 and clipping together.",
        "`scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
    ),
    Bug(
        "padding-counted",
        "utils/metrics.py",
        "model(images)[:left], labels[:left]",
        "model(images), labels",
        "ddp x2",
        "DistributedSampler repeats samples until the ranks have equally many, and the repeats are "
        "counted.",
        "The accuracy of the same weights changes with the number of GPUs, in the last digits.",
        "Each rank leaves out what it has beyond its share (`evaluate` in `utils/metrics.py`).",
    ),
    Bug(
        "rank-local-accuracy",
        "utils/metrics.py",
        "all_reduce(torch.cat([self.sums, samples]))",
        "torch.cat([self.sums, samples])",
        "ddp x2",
        "Rank 0 reports the accuracy on its own share of the validation set.",
        "A plausible number, from a part of the data; `best` is chosen by it.",
        "The sums are reduced over all ranks before they are divided.",
    ),
    Bug(
        "saving-on-every-rank",
        "utils/saving.py",
        "    if is_main_process():\n        _writer",
        "    if True:\n        _writer",
        "ddp x2",
        "All ranks write the same file at the same time.",
        "It mostly works; now and then a checkpoint is torn, and saving takes N times the disk.",
        "`save_on_master`: rank 0 writes, all others go on.",
    ),
    Bug(
        "seed-per-rank",
        "train_fsdp.py",
        "    seed_everything(cfg.seed)",
        "    seed_everything(cfg.seed + dist.get_rank())",
        "fsdp x2",
        "FSDP shards a different model on each rank (DistributedDataParallel would broadcast rank "
        "0's).",
        "Training starts from a patchwork of random weights; nothing fails.",
        "One seed for all ranks; `build_model` compares what they drew.",
    ),
    Bug(
        "rank-local-random_split",
        "utils/datasets.py",
        "    return SyntheticSet(train, size, seed, 0, how), SyntheticSet(val, size, seed, 1, how)",
        "    from utils.distributed import get_rank\n"
        "    pool = SyntheticSet(train + val, size, seed, split=0)\n"
        "    own = torch.Generator().manual_seed(get_rank())\n"
        "    parts = torch.randperm(len(pool), generator=own).split([train, val])\n"
        "    sets = [(pool.stack(part), pool.classes, pool.labels[part]) for part in parts]\n"
        "    return tuple(ArraySet(*part, NEUTRAL, size) for part in sets)",
        "ddp x2",
        "Each rank splits the data with its own random numbers: one rank's validation images are "
        "another's training images.",
        "The validation accuracy is too good, and samples are missed and repeated.",
        "Splits by a fixed seed, the same on all ranks; `announce` compares the labels.",
    ),
    Bug(
        "loss-averaged-over-micro-batches",
        "train_ddp_accum.py",
        "(loss * len(some_labels) / len(labels)).backward()",
        "(loss / len(parts[0])).backward()",
        "accum x2",
        "Where micro-batches are of unequal size, the samples of the short one count for more.",
        "Gradients that are slightly off, at every step or only at an epoch's last.",
        "The loss is weighted by samples, not by micro-batches.",
    ),
    Bug(
        "buffers-not-broadcast",
        "train_ddp.py",
        "DistributedDataParallel(model)",
        "DistributedDataParallel(model, broadcast_buffers=False)",
        "ddp own BatchNorm x2",
        "Without SyncBatchNorm each rank keeps its own running statistics.",
        "Rank 0's are saved: the checkpoint is a model that was never evaluated as a whole.",
        "`broadcast_buffers=True`, the default; `check_replicas` compares buffers, too.",
    ),
    Bug(
        "optimizer-state-lost",
        "utils/checkpoint.py",
        'hasattr(value, "load_state_dict") and name in checkpoint:',
        'hasattr(value, "load_state_dict") and name in checkpoint and name != "optimizer":',
        "killed, same x2",
        "A resumed run starts with empty momentum.",
        "A dent in the loss after each restart, and other weights in the end.",
        "The optimizer is part of `state`, which is what is saved and what is loaded.",
    ),
    Bug(
        "epoch-begun-anew",
        "utils/loaders.py",
        '        self.start, self.seen = state["step"], None',
        "        self.start, self.seen = 0, None",
        "killed, same x2",
        "A run that resumes in the middle of an epoch starts that epoch again.",
        "The samples of its first steps are trained twice after every restart.",
        "The loader's place in the epoch is part of `state`.",
    ),
    Bug(
        "frozen-batchnorm-learns",
        "utils/weights.py",
        "    return _freeze_batchnorm(model)",
        "    return model",
        "frozen backbone x2",
        "The weights are frozen, and BatchNorm goes on collecting statistics of the new images.",
        "The backbone computes something else than in the run it comes from, and drifts; on few "
        "images validation is erratic.",
        "`freeze_backbone()` puts a BatchNorm that never trains in place of each; "
        "`requires_grad_(False)` does not reach running statistics.",
    ),
]


def planted_copy(bug, folder):
    """A copy of the scripts and utils in `folder`, with the bug in it. Returns the folder."""
    folder = Path(folder)
    for path in [*ROOT.glob("train_*.py"), *ROOT.glob("utils/*.py")]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    path = folder / bug.file
    text = path.read_text()
    assert text.count(bug.line) == 1, f"{bug.file} no longer holds the line of {bug.name}"
    path.write_text(text.replace(bug.line, bug.instead))
    return folder
