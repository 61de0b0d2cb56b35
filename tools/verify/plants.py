"""Classic bugs of distributed training, each as a change of one place, for verify to catch."""

import shutil
from pathlib import Path
from typing import NamedTuple

from tools.lessons import ROOT
from tools.verify.judge import Problem


class Bug(NamedTuple):
    """A change of one place in one file."""

    name: str
    file: str
    line: str  # occurs once in the file
    replacement: str
    row: str  # the case that fails
    problem: tuple  # why it fails: a Problem, and what the details must say
    effect: str
    symptom: str
    prevention: str

    def diff(self):
        """The change, as a diff without header."""
        lines = [f"-{line}" for line in self.line.splitlines()]
        return "\n".join(lines + [f"+{line}" for line in self.replacement.splitlines()])


BUGS = [
    Bug(
        "set_epoch-forgotten",
        "train_ddp.py",
        "        train_sampler.set_epoch(epoch)",
        "        pass",
        "ddp x2",
        (Problem.SAMPLES, ""),
        "Every epoch repeats the order of the first one.",
        "Nothing fails. The model sees the same batches again and again and ends a little worse.",
        "`train_sampler.set_epoch(epoch)` at the start of each epoch.",
    ),
    Bug(
        "batchnorm-per-rank",
        "train_ddp.py",
        "        model = convert_sync_batchnorm(model)",
        "        pass",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "BatchNorm normalizes with the statistics of one rank's share of the batch.",
        "Results change with the number of GPUs, more so the fewer samples each has.",
        "`convert_sync_batchnorm(model)`, or a norm without batch statistics.",
    ),
    Bug(
        "scaled-gradients-clipped",
        "train_ddp_amp.py",
        "        scaler.unscale_(optimizer)",
        "        pass",
        "amp x2, float16",
        (Problem.WEIGHTS, ""),
        "The norm of the gradients is measured 65536 times too large, so that every step is "
        "clipped to almost nothing.",
        "The loss hardly falls, but only with float16 and clipping together.",
        "`scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
    ),
    Bug(
        "padding-counted",
        "utils/metrics.py",
        "        outputs = model(images)[:left]\n        labels = labels[:left].to(outputs.device)",
        "        outputs = model(images)\n        labels = labels.to(outputs.device)",
        "ddp x2",
        (Problem.FAILED, "evaluated 54 of 37"),
        "Samples are repeated so that all ranks have the same number, in full batches, and the "
        "repeated ones are counted.",
        "The accuracy of the same weights changes slightly with the number of GPUs.",
        "Each rank leaves out what exceeds its share (`evaluate` in `utils/metrics.py`).",
    ),
    Bug(
        "rank-local-accuracy",
        "utils/metrics.py",
        "        loss, correct, samples = all_reduce(torch.cat([self.sums, samples])).tolist()\n",
        "        accuracy = float(self.sums[1]) / max(1, self.samples)\n"
        "        loss, correct, samples = all_reduce(torch.cat([self.sums, samples])).tolist()\n"
        "        correct = accuracy * samples\n",
        "ddp x2",
        (Problem.ACCURACY, ""),
        "Rank 0 reports the accuracy on its own share of the validation set.",
        "A plausible number from part of the data, by which the best checkpoint is chosen.",
        "The sums are reduced over all ranks before they are divided.",
    ),
    Bug(
        "saving-on-every-rank",
        "utils/checkpoint.py",
        "        if is_main_process():\n            name =",
        '        torch.save(checkpoint, self.folder / "last.pt")\n'
        "        if is_main_process():\n            name =",
        "ddp x2",
        (Problem.WRITERS, ""),
        "All ranks write the same file at the same time.",
        "It usually works. Now and then a checkpoint is corrupt, and saving takes N times the "
        "bandwidth of the disk.",
        "Rank 0 writes; the other ranks continue.",
    ),
    Bug(
        "every-epoch-is-the-best",
        "utils/metrics.py",
        'best = max((row["val_accuracy"] for row in self.rows), default=-1.0)',
        "best = -1.0",
        "ddp x2",
        (Problem.BEST, ""),
        "The best accuracy so far is never updated, so that every epoch counts as the best.",
        "best.pt is always the last epoch, whose accuracy may be far below the best.",
        "The best accuracy is computed from the logged epochs, which a resumed run reads.",
    ),
    Bug(
        "seed-per-rank",
        "train_fsdp.py",
        "    torch.manual_seed(cfg.seed)",
        "    torch.manual_seed(cfg.seed + dist.get_rank())",
        "fsdp x2",
        (Problem.FAILED, "different weights"),
        "FSDP shards a different model on each rank (DistributedDataParallel would broadcast rank "
        "0's).",
        "Training starts from a mixture of random weights. Nothing fails.",
        "One seed for all ranks; `check_same_weights` compares them before sharding.",
    ),
    Bug(
        "seed-per-tensor-rank",
        "train_tp.py",
        "    torch.manual_seed(cfg.seed)",
        "    torch.manual_seed(cfg.seed + dist.get_rank())",
        "tp x2",
        (Problem.FAILED, "no longer hold the same model"),
        "The layers that every rank holds whole, such as LayerNorm, start with different weights.",
        "The slices come from rank 0, so the model looks right; the ranks compute with different "
        "embeddings and norms, and add up outputs that do not belong together.",
        "One seed for all ranks; the ranks compare what they all hold (`compare_ranks=True`).",
    ),
    Bug(
        "sampler-over-all-ranks",
        "train_fsdp_tp.py",
        "DistributedSampler(train_set, *replica, ",
        "DistributedSampler(train_set, ",
        "fsdp_tp x4, 2 x 2",
        (Problem.FAILED, "no longer hold the same model"),
        "The sampler divides the samples among all ranks, although two of them hold one replica.",
        "Ranks of a replica compute with different images, and add up outputs that do not belong "
        "together. Half of the samples are never used.",
        "`DistributedSampler` gets the number of replicas, and this rank's replica.",
    ),
    Bug(
        "gradients-of-summed-micro-batches",
        "utils/pipeline.py",
        "loss_fn=lambda *x: self.criterion(*x))",
        "loss_fn=lambda *x: self.criterion(*x), scale_grads=False)",
        "pp x2, 1F1B",
        (Problem.WEIGHTS, ""),
        "The gradients of the micro-batches' mean losses are added up, and not divided by their "
        "number.",
        "The best learning rate depends on the number of micro-batches. With clipping or Adam, it "
        "hardly shows.",
        "`scale_grads=True`, the schedules' default, for a criterion that returns a mean.",
    ),
    Bug(
        "norm-of-the-slices",
        "utils/tensor_parallel.py",
        "get_total_norm([p.grad for p in same])",
        "get_total_norm([getattr(p.grad, '_local_tensor', p.grad) for p in same])",
        "tp x2",
        (Problem.FAILED, "no longer hold the same model"),
        "Gradients are clipped by the norm of this rank's slices instead of the whole model's.",
        "Each rank clips by another factor, so that what all ranks hold drifts apart; and the "
        "updates are a little too large.",
        "`clip_grad_norm_` in `utils/tensor_parallel.py` reduces the norm of the slices over the "
        "ranks.",
    ),
    Bug(
        "rank-local-random_split",
        "utils/array_data.py",
        "        arrays.append((images, labels))\n",
        "        arrays.append((images, labels))\n"
        "    from utils.distributed import dp_rank\n"
        "    images, labels = (torch.cat(part) for part in zip(*arrays))\n"
        "    generator.manual_seed(dp_rank())\n"
        "    order = torch.randperm(len(labels), generator=generator)\n"
        "    parts = order.split([len(labels) for _, labels in arrays])\n"
        "    arrays = [(images[part], labels[part]) for part in parts]\n",
        "ddp x2",
        (Problem.FAILED, "labels"),
        "Each rank splits the data with its own random numbers: one rank's validation images are "
        "another rank's training images.",
        "The validation accuracy is too good, and samples are missed and repeated.",
        "Splits by a fixed seed, the same on all ranks; the ranks compare their labels.",
    ),
    Bug(
        "loss-averaged-over-micro-batches",
        "train_ddp_accum.py",
        "(loss * len(some_labels) / len(labels)).backward()",
        "(loss / len(parts[0])).backward()",
        "accum x2",
        (Problem.WEIGHTS, ""),
        "Where micro-batches have unequal sizes, the samples of the smaller one count for more.",
        "Gradients that are slightly wrong, in every step or only in the last of an epoch.",
        "The loss is weighted by samples, not by micro-batches.",
    ),
    Bug(
        "buffers-not-broadcast",
        "train_ddp.py",
        "gradient_as_bucket_view=True",
        "gradient_as_bucket_view=True, broadcast_buffers=False",
        "ddp x2, BatchNorm per rank",
        (Problem.FAILED, "no longer hold the same model"),
        "Without SyncBatchNorm, each rank keeps its own running statistics.",
        "Rank 0's are saved: the checkpoint is a model that was never evaluated as a whole.",
        "`broadcast_buffers=True`, the default; `utils/replicas.py` compares buffers, too.",
    ),
    Bug(
        "optimizer-state-lost",
        "utils/checkpoint.py",
        "        for parameter, values in self.optimizer.state.items():",
        "        self.optimizer.state.clear()\n"
        "        for parameter, values in self.optimizer.state.items():",
        "killed, resumed x2",
        (Problem.WEIGHTS, ""),
        "A resumed run starts with empty momentum.",
        "A bump in the loss after each restart, and different weights in the end.",
        "The optimizer is part of `state`, which is what is saved and what is loaded.",
    ),
    Bug(
        "epoch-restarted-on-resume",
        "utils/data.py",
        '        self.start = state["step"]\n',
        "        self.start = 0\n",
        "killed, resumed x2",
        (Problem.NOT_RESUMED, ""),
        "A run that resumes in the middle of an epoch starts that epoch again.",
        "The samples of its first steps are used twice for training after every restart.",
        "The loader's position in the epoch is part of `state`.",
    ),
    Bug(
        "frozen-batchnorm-learns",
        "utils/weights.py",
        "    return _freeze_batchnorm(model)",
        "    return model",
        "ddp x2, frozen backbone",
        (Problem.WEIGHTS, ""),
        "The weights are frozen, but BatchNorm keeps updating its statistics with the new images.",
        "The backbone no longer computes what it did when it was trained; with few images, the "
        "validation accuracy is erratic.",
        "`freeze_backbone()` replaces each BatchNorm with one that never trains; "
        "`requires_grad_(False)` does not affect running statistics.",
    ),
]


def planted_copy(bug, folder):
    """A copy of the scripts and utils/ in `folder`, with the bug in it. Returns the folder.

    Raises AssertionError if the line to change does not occur exactly once.
    """
    folder = Path(folder)
    for path in [*ROOT.glob("train_*.py"), *ROOT.glob("utils/*.py")]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    path = folder / bug.file
    text = path.read_text()
    count = text.count(bug.line)
    assert count == 1, f"the line that {bug.name} changes occurs {count} times in {bug.file}"
    path.write_text(text.replace(bug.line, bug.replacement))
    return folder
