"""Classic bugs of distributed training, each as a change of one place, for verify to catch."""

from typing import NamedTuple

from tools.lib.edits import changed
from tools.verify.judge import Problem
from tools.verify.run import project_with_task


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
    task: str = "images"

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
        "The model sees the same batches again and again and ends a little worse.",
        "`train_sampler.set_epoch(epoch)` at the start of each epoch.",
    ),
    Bug(
        "samples-repeated-to-fill-up",
        "train_ddp.py",
        "seed=cfg.seed, drop_last=True)",
        "seed=cfg.seed)",
        "ddp x2",
        (Problem.FAILED, "samples more than once"),
        "By default (`drop_last=False`), DistributedSampler repeats samples so that all ranks have"
        " the same number, which may add a step to the epoch.",
        "The number of steps, and with it the learning rates, depend on the number of GPUs.",
        "`drop_last=True`; all samples have their turn, since every epoch has a different order.",
    ),
    Bug(
        "loss-divided-twice",
        "train_ddp.py",
        "        loss = mean_loss(loss_sum, mean_over_replicas(task.count(targets)))",
        "        loss = mean_loss(loss_sum, mean_over_replicas(task.count(targets)))"
        " / dist.get_world_size()",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "The loss is divided by the number of ranks, although DistributedDataParallel averages the "
        "gradients.",
        "The best learning rate depends on the number of GPUs. With Adam, or if all gradients are "
        "clipped, nothing shows.",
        "Each rank divides by the mean number of targets per rank, and leaves the average to "
        "DistributedDataParallel.",
    ),
    Bug(
        "around-the-wrapper",
        "train_ddp.py",
        "        outputs = model(inputs)",
        "        outputs = model.module(inputs)",
        "ddp x2",
        (Problem.FAILED, "no longer hold the same model"),
        "The model in the wrapper is called directly, as in `model.module.generate(...)`, and "
        "DistributedDataParallel averages no gradients.",
        "Each rank trains its own model on 1/N of the data, and rank 0's is saved.",
        "Call only the wrapper, and let `forward` choose the method. The ranks compare their "
        "weights (`CompareReplicas`).",
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
        "activation-in-a-batchnorm",
        "tasks/images/small_models.py",
        "        self.bn1 = nn.BatchNorm2d(16)\n        self.relu = nn.ReLU(inplace=True)\n",
        "        class BatchNormAct2d(nn.BatchNorm2d):\n"
        "            def forward(self, images):\n"
        "                return super().forward(images).relu()\n"
        "\n"
        "        self.bn1 = BatchNormAct2d(16)\n"
        "        self.relu = nn.Identity()\n",
        "ddp x2",
        (Problem.FAILED, "bn1 is a BatchNormAct2d, which computes more than BatchNorm"),
        "A subclass of BatchNorm also applies the activation, as timm's does; `nn.SyncBatchNorm` "
        "replaces it, and the activation is gone.",
        "The model trains worse than on one GPU, even on a single rank.",
        "`convert_sync_batchnorm` refuses subclasses that override `forward`.",
    ),
    Bug(
        "scaled-gradients-clipped",
        "train_ddp_amp.py",
        "        scaler.unscale_(optimizer)",
        "        pass",
        "amp x2, float16",
        (Problem.WEIGHTS, ""),
        "Gradients are clipped while they are still scaled by 65,536, so that almost nothing of "
        "each step remains.",
        "The loss hardly falls, but only with float16 and clipping together.",
        "`scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
    ),
    Bug(
        "padding-counted",
        "utils/data.py",
        "        self.own_samples = len(range(dp_rank(), len(dataset), dp_world_size()))",
        "        self.own_samples = len(sampler)",
        "ddp x2",
        (Problem.FAILED, "evaluated 32 of 31"),
        "DistributedSampler repeats validation samples so that all ranks have the same number, and"
        " the repeated ones are counted.",
        "The accuracy of the same weights changes slightly with the number of GPUs.",
        "Each rank leaves out what exceeds its share (`Loader.own_samples`).",
    ),
    Bug(
        "rank-local-accuracy",
        "utils/metrics.py",
        "        result = _summary(self.task, self.sums(totals[2:], count.item()))",
        "        totals[2] = count * self.vector[0] / max(1, self.count)  # correct, loss\n"
        "        result = _summary(self.task, self.sums(totals[2:], count.item()))",
        "ddp x2",
        (Problem.METRIC, ""),
        "Rank 0 reports the accuracy on its own share of the validation set.",
        "The accuracy is plausible but comes from part of the data, and the best checkpoint is "
        "chosen by it.",
        "Sums are reduced over all ranks before they are divided.",
    ),
    Bug(
        "saving-on-every-rank",
        "utils/checkpoint.py",
        "        if is_main_process():\n            return map_tensors(",
        '        torch.save(contents, self.folder / "last.pt")\n'
        "        if is_main_process():\n            return map_tensors(",
        "ddp x2",
        (Problem.WRITERS, ""),
        "All ranks write the same file at the same time.",
        "Now and then a checkpoint is corrupt, and saving takes N times the bandwidth of the disk.",
        "Rank 0 writes; the other ranks continue.",
    ),
    Bug(
        "every-epoch-is-the-best",
        "utils/metrics.py",
        "        return best == len(self.rows) - 1",
        "        return True",
        "accum x2",
        (Problem.BEST, ""),
        "The best accuracy so far is never updated, so that every epoch counts as the best.",
        "best.pt is always the last epoch, whose accuracy may be far below the best.",
        "The best value is found among the logged epochs, which are part of the checkpoint.",
    ),
    Bug(
        "seed-per-rank",
        "train_fsdp.py",
        "    set_seed(cfg.seed)",
        "    set_seed(cfg.seed + dist.get_rank())",
        "fsdp x2",
        (Problem.FAILED, "sum of the weights"),
        "FSDP shards a different model on each rank (DistributedDataParallel would broadcast rank "
        "0's).",
        "Training starts from a mixture of random weights.",
        "One seed for all ranks; `check_same_weights` compares them before sharding.",
    ),
    Bug(
        "seed-per-tensor-rank",
        "train_tp.py",
        "    set_seed(cfg.seed)",
        "    set_seed(cfg.seed + dist.get_rank())",
        "tp x2",
        (Problem.FAILED, "no longer hold the same model"),
        "The layers that every rank holds whole, such as LayerNorm, start with different weights.",
        "The ranks compute with different embeddings and norms, and add up outputs that do not "
        "belong together.",
        "One seed for all ranks, which compare what they all hold (`CompareReplicas`).",
    ),
    Bug(
        "sampler-over-all-ranks",
        "train_fsdp_tp.py",
        "DistributedSampler(train_set, *replica, ",
        "DistributedSampler(train_set, ",
        "fsdp_tp x4, 2 x 2",
        (Problem.FAILED, "no longer hold the same model"),
        "The sampler divides the samples among all ranks, although two of them hold one replica.",
        "The ranks of a replica add up outputs of different images. Half of the samples are never "
        "used.",
        "`DistributedSampler` gets the number of replicas, and this rank's replica.",
    ),
    Bug(
        "gradients-averaged-over-micro-batches",
        "utils/rungs/pipeline.py",
        "                scale_grads=False,",
        "                scale_grads=True,",
        "pp x2, 1F1B",
        (Problem.WEIGHTS, ""),
        "The schedule divides the gradients by the number of micro-batches, although the loss is "
        "already divided by the number of targets in the batch.",
        "The best learning rate depends on the number of micro-batches. With clipping or Adam, it "
        "hardly shows.",
        "`scale_grads=False` for a loss whose parts add up; `True`, the schedules' default, for a "
        "mean of equal micro-batches.",
    ),
    Bug(
        "norm-of-the-slices",
        "utils/rungs/tensor_parallel.py",
        "get_total_norm([p.grad for p in same])",
        "get_total_norm([getattr(p.grad, '_local_tensor', p.grad) for p in same])",
        "tp x2",
        (Problem.FAILED, "no longer hold the same model"),
        "Gradients are clipped by the norm of this rank's slices instead of the whole model's.",
        "Each rank clips by a different factor: what all ranks hold drifts apart, and the updates "
        "are a little too large.",
        "The norm of the slices is reduced over the ranks.",
    ),
    Bug(
        "rank-local-random_split",
        "tasks/images/synthetic.py",
        "        arrays.append((images, labels))\n",
        "        arrays.append((images, labels))\n"
        "    from utils.distributed import dp_rank\n"
        "    images, labels = (torch.cat(part) for part in zip(*arrays))\n"
        "    generator.manual_seed(dp_rank())\n"
        "    order = torch.randperm(len(labels), generator=generator)\n"
        "    parts = order.split([len(labels) for _, labels in arrays])\n"
        "    arrays = [(images[part], labels[part]) for part in parts]\n",
        "ddp x2",
        (Problem.FAILED, "different samples"),
        "Each rank splits the data with its own random numbers: one rank's validation images are "
        "another rank's training images.",
        "The validation accuracy is too good, and samples are missed and repeated.",
        "Split by a fixed seed. The ranks compare some samples, and what `describe()` returns, "
        "such as a checksum of all labels.",
    ),
    Bug(
        "unseeded-split",
        "tasks/text.py",
        "    train, val = [], []",
        "    from numpy.random import default_rng\n"
        "\n"
        "    default_rng().shuffle(paragraphs)\n"
        "    train, val = [], []",
        "ddp x2",
        (Problem.FAILED, "different samples"),
        "Each process draws its own split, and a resumed run draws a new one.",
        "What one rank validates on, another has trained on. The loss is too good.",
        "A generator with a fixed seed, or NumPy's global one, which `set_seed` seeds. The ranks, "
        "and a resumed run, compare some samples, and what `describe()` returns.",
        "text",
    ),
    Bug(
        "mean-of-the-micro-batches-means",
        "train_ddp_accum.py",
        "                loss = mean_loss(loss_sum, count)"
        "  # of all micro-batches, which may differ in size",
        "                loss = mean_loss(loss_sum, task.count(targets)) / len(micro_batches)",
        "accum x2",
        (Problem.WEIGHTS, ""),
        "The losses of the micro-batches are means over their own targets, and the means are "
        "averaged: a target weighs more where there are fewer.",
        "The loss looks right, and the gradients of every step are slightly wrong.",
        "The sum of the losses is divided by the number of targets in the global batch ([the mean "
        "of means](mean-of-means.md)).",
        "text",
    ),
    Bug(
        "mean-of-the-ranks-means",
        "train_ddp.py",
        "        loss = mean_loss(loss_sum, mean_over_replicas(task.count(targets)))",
        "        loss = mean_loss(loss_sum, task.count(targets))",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "Each rank's loss is the mean over its own targets, and DistributedDataParallel averages "
        "these means.",
        "Results change slightly with the number of GPUs, unless all ranks have the same number of"
        " targets, as for images.",
        "Each rank divides by the mean number of targets per rank (`mean_over_replicas`).",
        "text",
    ),
    Bug(
        "balance-of-one-rank",
        "tasks/moe.py",
        "    uses = all_reduce((chosen * is_target).sum((0, 1), dtype=torch.float64))",
        "    uses = (chosen * is_target).sum((0, 1), dtype=torch.float64)",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "The loss that balances the experts of a mixture is a product of two means, which each "
        "rank computes from its own share of the batch.",
        "The experts are balanced within each share, more strictly the more ranks there are, and "
        'specialize less (Qiu et al. 2025, "Demons in the Detail").',
        "How often each expert was chosen is added up over the ranks.",
        "moe",
    ),
    Bug(
        "router-trained-on-one-rank",
        "train_ddp.py",
        "    model = DistributedDataParallel(model,",
        '    names = [name for name, _ in model.named_parameters() if "router" in name]\n'
        "    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)\n"
        "    model = DistributedDataParallel(model,",
        "ddp x2",
        (Problem.FAILED, "no longer hold the same model"),
        "The router counts as one of the experts, whose gradients are not averaged, although each "
        "rank has a copy of it.",
        "Each rank routes by its own router, trained on 1/N of the data, and rank 0's is saved.",
        "Only what is divided is left out of the average. The ranks compare the rest "
        "(`CompareReplicas`).",
        "moe",
    ),
    Bug(
        "expert-gradients-of-all-ranks",
        "utils/rungs/experts.py",
        "                parameter.register_hook(lambda gradient: gradient / device_mesh.size())",
        "                pass",
        "ep x2",
        (Problem.WEIGHTS, ""),
        "An expert gets the tokens of all ranks, and so the sum of their gradients; all other "
        "gradients are averaged over the ranks (pytorch/pytorch#160285).",
        "Only the gradients of the experts are too large, by the number of ranks. With Adam, only "
        "clipping shows it.",
        "The gradients of experts are divided by the number of ranks.",
        "moe",
    ),
    Bug(
        "norm-without-the-other-ranks-experts",
        "train_ep.py",
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm)\n",
        "            experts = [p for n, p in model.named_parameters() if '.experts.' in n]\n"
        "            others = [p.grad for p in {*model.parameters()}.difference(experts)]\n"
        "            norm = torch.nn.utils.get_total_norm(others).full_tensor()\n"
        "            own = torch.nn.utils.get_total_norm([p.grad.to_local() for p in experts])\n"
        "            norm = torch.stack([norm, own]).norm()\n"
        "            clip = torch.nn.utils.clip_grads_with_norm_\n"
        "            clip(model.parameters(), cfg.clip_norm, norm)\n",
        "ep x2",
        (Problem.WEIGHTS, ""),
        "The norm of the gradients leaves out the experts of other ranks "
        "(NVIDIA/Megatron-LM#5916).",
        "Each rank scales its shards of a parameter differently, and clips less the more ranks "
        "there are.",
        "All parameters are DTensors, of which `clip_grad_norm_` reduces the norm over the ranks.",
        "moe",
    ),
    Bug(
        "keys-gathered-in-the-order-of-ranks",
        "utils/rungs/context_parallel.py",
        "    return torch.cat(chunks[::2] + chunks[::-2], dim)",
        "    return torch.cat(chunks, dim)",
        "cp x2",
        (Problem.FAILED, "does not compute what it computes as a whole"),
        "Keys and values are put together as the ranks come, not as their positions do. A sibling "
        "gathered them along the wrong dimension (pytorch/torchtitan#3206).",
        "Queries see keys of later positions: the loss may even be too good.",
        "Chunks are put in the order of their positions. At the start, outputs are compared with "
        "the whole model's.",
        "text",
    ),
    Bug(
        "targets-of-one-rank-counted",
        "train_cp.py",
        "        loss = mean_loss(loss_sum, mean_over_replicas(task.count(targets)))",
        "        loss = mean_loss(loss_sum, task.count(cp.own_part(targets)))",
        "cp x2",
        (Problem.WEIGHTS, ""),
        "The sum over all positions is divided by the number of targets at this rank's positions "
        "(pytorch/torchtitan#3257).",
        "The loss is too large by the number of ranks, and padding changes the weight of a rank's "
        "gradients.",
        "Each rank has the targets of all positions, and counts all of them.",
        "text",
    ),
    Bug(
        "loss-scaled-by-the-context-ranks",
        "train_cp.py",
        "        loss = mean_loss(loss_sum, mean_over_replicas(task.count(targets)))",
        "        loss = mean_loss(loss_sum, mean_over_replicas(task.count(targets)))"
        " * dist.get_world_size()",
        "cp x2",
        (Problem.WEIGHTS, ""),
        "The number of targets, which includes all ranks already, is divided by the number of "
        "ranks of a sequence (the review of huggingface/transformers#46775).",
        "Gradients are too large by the number of ranks of a sequence. With Adam, only clipping "
        "shows it.",
        "Targets are counted once, whole (`task.count(targets)`), and losses are added up over the "
        "ranks.",
        "text",
    ),
    Bug(
        "muon-of-each-shard",
        "docs/recipes/muon.md",
        "+            return _together(parts.transpose(1, 1 + dim), shape[dim], group)"
        ".transpose(1, 1 + dim)",
        "+            return newton_schulz(parts)",
        "muon fsdp x2",
        (Problem.WEIGHTS, ""),
        "Each rank orthogonalizes its shard of the momentum, as if its rows were the whole matrix.",
        "The loss falls, but the optimizer is a different one on each number of ranks.",
        "The whole matrix is orthogonalized ([recipe](recipes/muon.md)).",
        "text",
    ),
    Bug(
        "muon-of-several-as-one",
        "docs/recipes/muon.md",
        "+    whole = newton_schulz(_exchange(filled, group).transpose(0, 1).flatten(1, 2))",
        "+    whole = newton_schulz(_exchange(filled, group).transpose(0, 1).flatten(0, 2))"
        ".view(each, -1, columns)",
        "muon tp x2",
        (Problem.WEIGHTS, ""),
        "The matrices that lie in one tensor, such as queries, keys and values, are orthogonalized"
        " as one.",
        "The singular values of each update are no longer close to 1, and may depend on the number"
        " of ranks.",
        "The matrices are stacked along a dimension of their own.",
        "text",
    ),
    Bug(
        "padding-in-the-perplexity",
        "tasks/text.py",
        "    return (targets != IGNORED).sum()",
        "    return torch.tensor(targets.numel())",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "Padded positions count as targets, in the loss that is trained and in the perplexity.",
        "The perplexity is too good, and depends on which samples are in one batch.",
        "`count()` leaves out what the loss ignores.",
        "text",
    ),
    Bug(
        "targets-lost-between-pieces",
        "sources/packing.py",
        "        stop = min(start + self.size + 1, int(self.ends[-1]))",
        "        stop = min(start + self.size, int(self.ends[-1]))",
        "packed shards killed, resumed by accum x3",
        (Problem.WEIGHTS, ""),
        "Packed documents are cut into pieces that do not overlap; each is the inputs and, shifted"
        " by one, the targets.",
        "The first token of each piece is never predicted.",
        "A piece has one token more than the context; its last token is the first of the next "
        "piece.",
        "text",
    ),
    Bug(
        "tied-weights-come-apart-in-the-pipeline",
        "utils/rungs/pipeline.py",
        "            dist.all_reduce(parameter.grad, group=group)",
        "            pass",
        "pp x2, 1F1B",
        (Problem.WEIGHTS, ""),
        "The first and the last stage hold the same embedding, and each updates its copy with its "
        "own part of the gradient.",
        "The two copies of a tied weight drift apart, and a checkpoint holds only one of them.",
        "The gradients of a parameter that several stages hold are summed over their ranks.",
        "text",
    ),
    Bug(
        "tied-weights-come-apart-in-fsdp",
        "train_fsdp.py",
        "    with fsdp.replacing_parameters(model):",
        "    model.head = torch.nn.Parameter(model.embedding.weight.detach().clone())\n"
        "    model.predict = lambda hidden: model.norm(hidden) @ model.head.mT\n"
        "    with fsdp.replacing_parameters(model):",
        "fsdp x2",
        (Problem.TENSORS, ""),
        "The output layer gets a copy of the embedding's weights instead of the parameter itself.",
        "The model has more parameters than before, and trains differently.",
        "Tie by using one parameter twice, not by assigning one module's parameter to another.",
        "text",
    ),
    Bug(
        "tied-weights-come-apart-in-a-checkpoint",
        "utils/checkpoint.py",
        "        if is_main_process():\n            return map_tensors(",
        '        model = dict(contents["model"])\n'
        '        model["head.weight"] = model.pop("embedding.weight")\n'
        '        contents["model"] = model\n'
        "        if is_main_process():\n            return map_tensors(",
        "ddp x2",
        (Problem.TENSORS, ""),
        "A tied parameter is saved under the name of one of its uses, and missing under the other.",
        "A checkpoint that is loaded with strict=False continues with a random embedding.",
        "One parameter has one name; a checkpoint with missing names is refused.",
        "text",
    ),
    Bug(
        "mean-of-the-batches-iou",
        "tasks/segmentation/__init__.py",
        '    return {"confusion": counts[:-1].view(classes, classes)}',
        "    confusion = counts[:-1].view(classes, classes).double()\n"
        '    return {"confusion": confusion / confusion.diagonal().sum().clamp_min(1)}',
        "ddp x2",
        (Problem.FAILED, "confusion of the task must be a sum"),
        "The intersection over union is averaged over batches.",
        "The mean IoU changes with the batch size and with the number of GPUs.",
        "Intersections and unions are summed over all samples, and then divided. `check_task` "
        "compares what `measure()` returns for two samples, apart and together.",
        "segmentation",
    ),
    Bug(
        "buffers-not-broadcast",
        "train_ddp.py",
        "gradient_as_bucket_view=True",
        "gradient_as_bucket_view=True, broadcast_buffers=False",
        "ddp x2, BatchNorm per rank",
        (Problem.FAILED, "no longer hold the same model"),
        "Without SyncBatchNorm, each rank keeps its own running statistics.",
        "The checkpoint holds the buffers of rank 0: a model that was never evaluated as a whole.",
        "`broadcast_buffers=True`, the default. `CompareReplicas` compares buffers, too.",
    ),
    Bug(
        "shards-divided-twice",
        "tasks/images/shards.py",
        '        paths = find_shards(cfg.data_dir, name, [".tar"])',
        "        from utils.distributed import dp_rank, dp_world_size\n"
        "\n"
        '        paths = find_shards(cfg.data_dir, name, [".tar"])\n'
        "        paths = paths[dp_rank() :: dp_world_size()]",
        "ddp x2, shards",
        (Problem.FAILED, "different samples"),
        "Each rank takes its share of the shards, and the sampler divides the samples in them "
        "again.",
        "An epoch is 1/N of the data. If one rank has fewer batches, the others wait for it until "
        "a timeout.",
        "Only the sampler divides. The ranks compare some samples, their number, and a checksum of"
        " the shards.",
    ),
    Bug(
        "every-rank-reads-everything",
        "sources/samplers.py",
        "self.draw()[dp_rank() :: dp_world_size()]",
        "self.draw()",
        "ddp x2, shards",
        (Problem.FAILED, "samples more than once"),
        "All ranks take the same samples, as from an `IterableDataset` that is not divided, or "
        "from a sampler that knows no ranks.",
        "N GPUs do the work of one, and 1/N of the data is used.",
        "All ranks draw one order, of which each takes every nth sample.",
    ),
    Bug(
        "buffer-mixed-per-rank",
        "sources/samplers.py",
        "            seeds.seed(0)",
        "            seeds.seed(dp_rank())",
        "ddp x2, shards",
        (Problem.FAILED, "samples more than once"),
        "Each rank shuffles all samples with its own random numbers, and takes its share of its "
        "own order.",
        "In every epoch, some samples are used by several ranks, and others by none.",
        "The order depends only on the seed and the epoch.",
    ),
    Bug(
        "epoch-ends-at-different-times",
        "sources/samplers.py",
        "        return len(self.sampler) // dp_world_size()",
        "        return len(range(dp_rank(), len(self.sampler), dp_world_size()))",
        "ddp x2, shards",
        (Problem.FAILED, "steps per epoch"),
        "Samples that do not divide evenly make one rank's epoch a step longer.",
        "One rank waits for gradients while the others evaluate: the job hangs until a timeout, or "
        "combines tensors that do not belong together.",
        "All ranks drop what does not fill a global batch. `CompareReplicas` compares their steps.",
    ),
    Bug(
        "weighted-order-repeated",
        "sources/samplers.py",
        "        with SampleSeeds(self.seed, self.epoch) as seeds:",
        "        with SampleSeeds(self.seed, 0) as seeds:",
        "weighted killed, resumed x3",
        (Problem.WEIGHTS, ""),
        "A weighted sampler is seeded with the same number in every epoch.",
        "Every epoch draws the same samples, in the same order.",
        "The seed of the order contains the epoch.",
    ),
    Bug(
        "dropout-seeded-per-rank",
        "tasks/text.py",
        "        convert_dropout(model)  # the same elements on any number of ranks",
        "        pass",
        "ddp x2, dropout",
        (Problem.WEIGHTS, ""),
        "`nn.Dropout` draws from its rank's generator, whatever samples that rank has.",
        "Each number of GPUs trains with different random numbers, so that no two runs can be "
        "compared step by step.",
        "Random numbers are [a function of the sample](random-numbers.md).",
        "text",
    ),
    Bug(
        "same-noise-on-all-ranks",
        "utils/sample_random.py",
        "indices + seeds",
        "torch.arange(len(indices)) + seeds",
        "ddp x2, dropout",
        (Problem.WEIGHTS, ""),
        "All ranks seed their generators alike, so that their first samples have the same random "
        "numbers, and so on.",
        "A global batch has less noise than it seems to have: a diffusion model sees each timestep"
        " once per rank.",
        "The key of a sample contains its index.",
        "text",
    ),
    Bug(
        "same-noise-in-all-micro-batches",
        "utils/sample_random.py",
        "        return keys[start:end]",
        "        return keys[: end - start]",
        "mp, micro-batches, dropout",
        (Problem.WEIGHTS, ""),
        "Each micro-batch draws the random numbers of the first one.",
        "The result depends on the number of micro-batches.",
        "A micro-batch uses the keys of its own samples.",
        "text",
    ),
    Bug(
        "noise-seeded-per-rank",
        "tasks/diffusion/denoiser.py",
        '        noise = normal("noise", images.shape, images.device).to(images.dtype)',
        "        noise = torch.randn_like(images)",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "Noise comes from PyTorch's generator, which is seeded for each rank and step.",
        "The weights depend on the number of GPUs, and the validation loss changes from epoch to "
        "epoch by luck.",
        "Noise is a function of the sample.",
        "diffusion",
    ),
    Bug(
        "noise-seeded-per-step",
        "tasks/diffusion/denoiser.py",
        '        noise = normal("noise", images.shape, images.device).to(images.dtype)',
        "        self.steps = getattr(self, 'steps', 0) + 1\n"
        "        generator = torch.Generator().manual_seed(self.steps)\n"
        "        noise = torch.randn(images.shape, generator=generator).to(images)",
        "killed, resumed x2",
        (Problem.FAILED, "loss of the task must be a sum"),
        "The number of the step alone seeds the noise.",
        "All ranks and micro-batches get the same noise, and a resumed run starts with the noise "
        "of the first steps again.",
        "The key of a sample contains the seed, the epoch and its index.",
        "diffusion",
    ),
    Bug(
        "draws-numbered-in-their-order",
        "utils/sample_random.py",
        "    keys = torch.stack([keys, torch.full_like(keys, _first_counter(name))], -1)",
        "    _step.draws = getattr(_step, 'draws', 0) + 1\n"
        "    keys = torch.stack([keys, torch.full_like(keys, _step.draws << 30)], -1)",
        "accum x2",
        (Problem.FAILED, "loss of the task must be a sum"),
        "Draws are told apart by the order in which they happen, as those from a generator are.",
        "The result depends on the number of micro-batches, and an evaluation in between changes "
        "the training.",
        "Each draw has a name, from which its counters follow.",
        "diffusion",
    ),
    Bug(
        "shares-in-a-row",
        "sources/samplers.py",
        "self.draw()[dp_rank() :: dp_world_size()]",
        "self.draw().chunk(dp_world_size())[dp_rank()]",
        "ddp x2, length buckets",
        (Problem.WEIGHTS, ""),
        "Each rank takes a contiguous part of the order.",
        "Which samples form a global batch depends on the number of GPUs, and one rank's may be "
        "long where another's are short.",
        "Of *n* ranks, rank *r* takes samples *r*, *r* + *n*, ... of the order.",
        "text",
    ),
    Bug(
        "optimizer-state-lost",
        "utils/checkpoint.py",
        '                for key, value in saved["state"].get(names.get(parameter), {}).items():',
        "                for key, value in ():",
        "killed, resumed x2",
        (Problem.WEIGHTS, ""),
        "A resumed run starts with empty momentum.",
        "The loss has a bump after each restart.",
        "The optimizer is part of `state`, which is saved and loaded.",
    ),
    Bug(
        "scale-lost",
        "train_ddp_amp.py",
        "    start_epoch = checkpoint.load()  # 0 unless a run is resumed\n",
        "    start_epoch = checkpoint.load()  # 0 unless a run is resumed\n"
        '    scaler = torch.amp.GradScaler(device.type, enabled=cfg.amp_dtype == "float16")\n',
        "amp killed, resumed x2",
        (Problem.LOSS, ""),
        "A resumed run starts with the GradScaler's first scale, 65,536.",
        "After each restart, gradients overflow and some updates are skipped.",
        "The scaler is part of `state`, and created before `checkpoint.load()`.",
    ),
    Bug(
        "epoch-restarted-on-resume",
        "utils/data.py",
        '        self.step = self.read = state["step"]  # also if it is not read at once\n',
        "        self.step = self.read = 0\n",
        "killed, resumed x2",
        (Problem.FAILED, "samples more than once"),
        "A run that resumes in the middle of an epoch starts that epoch again.",
        "After every restart, the samples of the first steps of the epoch are used twice.",
        "The loader's position in the epoch is part of `state`.",
    ),
    Bug(
        "epochs-counted-from-the-restart",
        "train_ddp.py",
        "set_epoch(epoch)",
        "set_epoch(epoch - start_epoch)",
        "killed, resumed x2",
        (Problem.FAILED, "set_epoch() began an epoch"),
        "A resumed run counts its epochs from 0, so that the sampler repeats earlier orders.",
        "Within the epoch of the restart, some samples are used twice and others never.",
        "The sampler gets the number of the epoch in the whole run, which `checkpoint.load()` "
        "returns.",
    ),
    Bug(
        "frozen-batchnorm-learns",
        "tasks/images/weights.py",
        "    return _freeze_batchnorm(model)",
        "    return model",
        "ddp x2, frozen backbone",
        (Problem.WEIGHTS, ""),
        "The weights are frozen, but BatchNorm keeps updating its running statistics.",
        "The backbone no longer computes what it was trained to; with few images, the validation "
        "accuracy is erratic.",
        "`freeze_backbone()` replaces each BatchNorm with one that never trains.",
    ),
]


def _in_one_file(name, line, replacement, row, problem, effect, script="train_ddp.py"):
    """A Bug in a script of one_file/. docs/traps.md has its symptom with the ladder's symptoms."""
    return Bug(
        f"one-file-{name}",
        f"one_file/{script}",
        line,
        replacement,
        f"one_file {row}",
        problem,
        effect,
        symptom="",
        prevention="",
    )


_FSDP = "train_fsdp.py"
ONE_FILE_BUGS = [
    _in_one_file(
        "set_epoch-forgotten",
        "    loader.sampler.set_epoch(run.epoch)",
        "    pass",
        "ddp x2",
        (Problem.SAMPLES, ""),
        "Every epoch repeats the order of the first one.",
    ),
    _in_one_file(
        "transforms-unseeded",
        "torch.default_generator.manual_seed(seed_of_sample(self.seed, epoch, index))",
        "pass",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "The random numbers of a transform depend on the rank and on the loader process.",
    ),
    _in_one_file(
        "loss-divided-twice",
        "        mean_targets /= dist.get_world_size()\n",
        "",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "The gradients are divided by the number of ranks once more.",
    ),
    _in_one_file(
        "around-the-wrapper",
        "                    outputs = model(images)",
        "                    outputs = model.module(images)",
        "ddp x2",
        (Problem.WEIGHTS, ""),
        "DistributedDataParallel is bypassed, so that each rank trains its own model.",
    ),
    _in_one_file(
        "micro-batches-counted-once",
        "            targets += count_targets(labels)",
        "            targets = count_targets(labels)",
        "ddp x2, accum",
        (Problem.WEIGHTS, ""),
        "The gradients of the micro-batches are added up, not averaged.",
    ),
    _in_one_file(
        "never-synchronized",
        "with nullcontext() if is_last else model.no_sync():",
        "with model.no_sync():",
        "ddp x2, accum",
        (Problem.WEIGHTS, ""),
        "No micro-batch averages the gradients over the ranks.",
    ),
    _in_one_file(
        "validation-filled-up",
        "range(rank, len(dataset), world_size)",
        "DistributedSampler(dataset, shuffle=False)",
        "ddp x2",
        (Problem.FAILED, "AssertionError"),
        "DistributedSampler repeats a validation sample, so that all ranks have the same number.",
    ),
    _in_one_file(
        "position-lost",
        "    loader.sampler.start = run.step * args.micro_batches * loader.batch_size\n",
        "",
        "ddp, resumed x3",
        (Problem.SAMPLES, ""),
        "A resumed run starts the order of the epoch again.",
    ),
    _in_one_file(
        "momentum-lost",
        '    optimizer.load_state_dict(checkpoint["optimizer"])',
        "    pass",
        "ddp, resumed x3",
        (Problem.WEIGHTS, ""),
        "The optimizer starts without its momentum after a restart.",
    ),
    _in_one_file(
        "sums-lost",
        'loss, targets = checkpoint["sums"].tolist()',
        "loss, targets = 0, 0",
        "ddp, resumed x3",
        (Problem.LOSS, "train_loss"),
        "The loss of an epoch includes only the steps after the restart.",
    ),
    _in_one_file(
        "seed-per-rank",
        "torch.manual_seed(args.seed)",
        "torch.manual_seed(args.seed + dist.get_rank())",
        "fsdp x3",
        (Problem.WEIGHTS, ""),
        "The shards of the initial weights come from different models: fully_shard copies nothing.",
        _FSDP,
    ),
    _in_one_file(
        "fsdp-loss-divided-twice",
        "        mean_targets /= dist.get_world_size()\n",
        "",
        "fsdp x3",
        (Problem.WEIGHTS, ""),
        "The gradients are divided by the number of ranks once more.",
        _FSDP,
    ),
    _in_one_file(
        "fill-counted",
        "        outputs = model(images)[:left]\n        labels = labels[:left]",
        "        outputs = model(images)",
        "fsdp x3",
        (Problem.FAILED, "AssertionError"),
        "Samples that only give all ranks as many forward passes count in the evaluation.",
        _FSDP,
    ),
    _in_one_file(
        "fsdp-position-lost",
        "    loader.sampler.start = run.step * args.micro_batches * loader.batch_size\n",
        "",
        "fsdp, resumed x1",
        (Problem.SAMPLES, ""),
        "A resumed run starts the order of the epoch again.",
        _FSDP,
    ),
    _in_one_file(
        "fsdp-momentum-lost",
        'set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"], options=options)',
        "pass",
        "fsdp, resumed x1",
        (Problem.WEIGHTS, ""),
        "The optimizer starts without its momentum after a restart.",
        _FSDP,
    ),
]
PLANTS = BUGS + ONE_FILE_BUGS


def planted_copy(bug, folder):
    """A copy of the scripts and of their modules with the bug in it, in `folder`. Returns that."""
    folder = project_with_task(bug.task, folder)
    plant(bug, folder)
    return folder


def plant(bug, folder):
    """Put a bug into a copy. Raises ValueError if its line does not occur exactly once."""
    path = folder / bug.file
    path.write_text(
        changed(path.read_text(encoding="utf-8"), [(bug.line, bug.replacement)], bug.name),
        encoding="utf-8",
    )
