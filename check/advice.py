"""Advice on each rule: how serious it is, why it matters, and the fix."""

from typing import NamedTuple


class Advice(NamedTuple):
    """severity: error (the results are wrong, or will be lost), warning (they depend on the
    number of processes, or may be lost), note (costs time, or may be intended). fix: a few lines
    of code."""

    severity: str
    why: str
    fix: str


ADVICE = {
    "same-samples": Advice(
        "error",
        "All ranks do the same work: N GPUs train no faster than one, on the same samples N times.",
        "sampler = DistributedSampler(train_set)\n"
        "loader = DataLoader(train_set, batch_size, sampler=sampler)",
    ),
    "shares-overlap": Advice(
        "error",
        "The ranks permute or split the dataset differently, so their shares are not disjoint.",
        "# The same seed on all ranks:\n"
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))\n"
        "DistributedSampler(train_set, seed=0)",
    ),
    "samples-left-out": Advice(
        "warning",
        "Part of the data is paid for, but never trained on.",
        "# Divide once: by a DistributedSampler, or by a Subset per rank, not by both.",
    ),
    "no-set-epoch": Advice(
        "warning",
        "Without it, DistributedSampler repeats the order of the first epoch forever.",
        "for epoch in range(epochs):\n    train_loader.sampler.set_epoch(epoch)",
    ),
    "not-shuffled": Advice(
        "warning",
        "Neighbors in the dataset are neighbors in every batch.",
        "DataLoader(train_set, batch_size, shuffle=True)  # or a DistributedSampler",
    ),
    "uneven-batches": Advice(
        "error",
        "The rank with more batches waits for the others in its last steps, forever.",
        "DistributedSampler(train_set, drop_last=True)  # equal shares; or model.join()",
    ),
    "validation-in-training": Advice(
        "error",
        "The validation result is too good: the ranks split the dataset differently.",
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))",
    ),
    "same-augmentation": Advice(
        "warning",
        "Different samples get equal crops and flips: less augmentation than it seems.",
        "torch.manual_seed(seed + rank)  # after the model was built; or in worker_init_fn:\n"
        "numpy.random.seed(torch.initial_seed() % 2**32)",
    ),
    "no-eval-mode": Advice(
        "error",
        "Dropout makes the result noisy. BatchNorm, where there is one, takes the batch's "
        "statistics, and learns from the validation set.",
        "model.eval()\nvalidate(model, val_loader)\nmodel.train()",
    ),
    "no-train-mode": Advice(
        "error",
        "After the first evaluation, dropout is off and BatchNorm learns no statistics.",
        "for epoch in range(epochs):\n    model.train()",
    ),
    "no-no-grad": Advice(
        "note",
        "The graph of each batch is kept for a backward that never comes: memory and time.",
        "@torch.no_grad()\ndef validate(model, loader): ...",
    ),
    "evaluation-on-one-rank": Advice(
        "note",
        "The other GPUs wait, for as long as the timeout of the process group allows.",
        "# Divide the set, and add up the sums of all ranks:\n"
        "share = Subset(val_set, range(rank, len(val_set), world_size))\n"
        "dist.all_reduce(sums)",
    ),
    "evaluation-repeated": Advice(
        "note",
        "N GPUs need as long as one.",
        "share = Subset(val_set, range(rank, len(val_set), world_size))\ndist.all_reduce(sums)",
    ),
    "padding-counted": Advice(
        "warning",
        "DistributedSampler repeats samples so that all shares are equal: the result of the same "
        "weights depends on the number of processes.",
        "share = Subset(val_set, range(rank, len(val_set), world_size))  # no sampler",
    ),
    "metric-of-one-rank": Advice(
        "error",
        "The result covers 1/N of the validation set, also where it chooses the best model.",
        "sums = torch.stack([correct, count])\ndist.all_reduce(sums)\naccuracy = sums[0] / sums[1]",
    ),
    "evaluation-augmented": Advice(
        "warning",
        "The validation result is random, and of different data than the real one.",
        "val_set = Dataset(val_folder, transform=without_augmentation)",
    ),
    "mean-of-means": Advice(
        "warning",
        "The ranks' shares weigh the same although they hold different numbers of targets; or a "
        "loss over outputs that are gathered has gradients for a rank's own alone; or a rank does "
        "something that the others do not.",
        "count = torch.tensor(float(number_of_targets))\n"
        "dist.all_reduce(count)\n"
        "loss = loss_sum * world_size / count",
    ),
    "gradient-scale": Advice(
        "error",
        "The learning rate that works on one process does not on several, and conversely.",
        "# 1/N: do not divide the loss by the number of ranks. DDP averages the gradients itself.\n"
        "# N: by hand, sum and divide: dist.all_reduce(p.grad); p.grad /= world_size",
    ),
    "loss-not-divided": Advice(
        "warning",
        "The gradient is k times as large: more accumulation means a larger learning rate.",
        "(loss / accumulation_steps).backward()",
    ),
    "models-start-differently": Advice(
        "error",
        "Nothing broadcasts the weights here: the ranks train different models.",
        "torch.manual_seed(seed)  # the same on all ranks, before the model is built",
    ),
    "shards-start-differently": Advice(
        "note",
        "Each rank has drawn its shard with a different seed: on a different number of ranks the "
        "same seed makes a different model.",
        "torch.manual_seed(seed)  # the same on all ranks, before the model is built",
    ),
    "wrapped-twice": Advice(
        "note",
        "Each gradient is averaged twice, and the names in state_dict() begin with module.module.",
        "model = DistributedDataParallel(model)  # once",
    ),
    "ddp-bypassed": Advice(
        "error",
        "DistributedDataParallel averages gradients only if its own forward is called. Each rank "
        "trains its own model on 1/N of the data.",
        "outputs = model(inputs)  # the wrapper, not model.module or a method of the model",
    ),
    "never-synchronized": Advice(
        "error",
        "Within no_sync() each rank keeps its own gradients, and nothing averages them later.",
        "# The last micro-batch of a step averages what has been added up:\n"
        "with contextlib.nullcontext() if is_last else model.no_sync():\n"
        "    loss = criterion(model(inputs), targets) / accumulation_steps\n"
        "    loss.backward()",
    ),
    "gradients-not-averaged": Advice(
        "error",
        "Each rank trains its own model on 1/N of the data.",
        "model = DistributedDataParallel(model)",
    ),
    "skipped-by-a-rank": Advice(
        "warning",
        "The mean over all ranks counts the rank that skips a module as a gradient of zero: its "
        "parameters learn 1/N more slowly, from the samples of the other ranks only.",
        "outputs = self.extra(inputs)  # on all ranks, and not `if rank == 0`",
    ),
    "replicas-drift": Advice(
        "error",
        "The ranks no longer have the same model, and rank 0's is saved.",
        "# Change parameters in the same way on all ranks, or broadcast the change:\n"
        "dist.broadcast(parameter, src=0)",
    ),
    "rates-differ": Advice(
        "error",
        "Ranks that step with different rates drift apart, and the model of rank 0 is saved.",
        "scheduler.step()  # on all ranks; by a value that all of them have:\n"
        "dist.all_reduce(loss); plateau.step(loss / world_size)",
    ),
    "clip-before-average": Advice(
        "warning",
        "The mean of clipped gradients is not the clipped mean: it is shorter, points elsewhere, "
        "and depends on the number of ranks.",
        "average_gradients(model)\nclip_grad_norm_(model.parameters(), max_norm)",
    ),
    "no-zero-grad": Advice(
        "error",
        "The gradients of all steps add up.",
        "optimizer.zero_grad()  # before each backward that begins a step",
    ),
    "clip-before-unscale": Advice(
        "error",
        "The norm is up to 65,536 times too large: almost nothing of each gradient is left.",
        "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), max_norm)",
    ),
    "zero-gradients": Advice(
        "error",
        "The loss does not depend on the parameters: nothing is trained.",
        "# Is there a detach() too many? The cross entropy of a single class is always 0:\n"
        "loss = F.cross_entropy(outputs, targets)  # outputs: one column per class",
    ),
    "rate-by-step": Advice(
        "note",
        "With more processes an epoch has fewer steps. If the number of epochs is fixed, the "
        "schedule then ends too early or too late; if the number of steps is fixed, all is well.",
        "total_steps = epochs * len(train_loader)  # the loader of this rank's share",
    ),
    "frozen-batchnorm-learns": Advice(
        "warning",
        "requires_grad=False does not freeze the running statistics.",
        "model.train()\nfor norm in frozen_norms:\n    norm.eval()",
    ),
    "batchnorm-per-rank": Advice(
        "note",
        "The statistics are computed from a share of the batch, smaller on more processes.",
        "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    ),
    "wrong-parameters": Advice(
        "error",
        "The optimizer changes parameters that nothing uses; the model is not trained.",
        "fully_shard(model)\n"
        "model.load_state_dict(state, assign=True)\n"
        "optimizer = AdamW(model.parameters())  # after all that puts new parameters in place",
    ),
    "needless-find-unused": Advice(
        "note",
        "DDP walks through the graph after each forward, for parameters that are all used.",
        "DistributedDataParallel(model)  # without find_unused_parameters",
    ),
    "unused-parameters": Advice(
        "error",
        "DistributedDataParallel waits for gradients that never come.",
        "# TORCH_DISTRIBUTED_DEBUG=INFO prints their names: delete them, freeze them with\n"
        "# requires_grad=False, or use find_unused_parameters=True.",
    ),
    "host-synchronization": Advice(
        "note",
        "On a GPU the host waits for everything that it has issued, in each step.",
        "total += loss.detach()  # .item() once per epoch",
    ),
    "collectives-differ": Advice(
        "error",
        "A collective that not all ranks call in the same order hangs, or mixes up results.",
        "result = all_ranks_compute()  # outside of `if rank == 0`\nif rank == 0: print(result)",
    ),
    "hangs-on-two": Advice(
        "error", "The job stands still until a timeout, and costs as much as one that trains.", ""
    ),
    "fails-on-two": Advice("error", "The script does not run on several processes.", ""),
    "saved-by-every-rank": Advice(
        "error",
        "The ranks write one file at the same time: now and then it is corrupt.",
        "if dist.get_rank() == 0:\n    torch.save(checkpoint, path)",
    ),
    "buffers-differ": Advice(
        "note",
        "The ranks evaluate with different statistics, and only rank 0's are saved.",
        "model = DistributedDataParallel(model)  # broadcast_buffers=True; and evaluate with it",
    ),
    "same-noise": Advice(
        "note",
        "Different samples get equal noise on all ranks: N GPUs draw no more of it than one.",
        "torch.manual_seed(seed + rank)  # after the model was built",
    ),
    "written-by-every-rank": Advice(
        "note",
        "The ranks write one file at the same time.",
        "if dist.get_rank() == 0:\n    write(path)",
    ),
    "written-in-place": Advice(
        "warning",
        "A job that is killed while it saves leaves neither the old checkpoint nor the new one.",
        "torch.save(checkpoint, path + '.tmp')\nos.replace(path + '.tmp', path)",
    ),
    "several-loggers": Advice(
        "warning",
        "Each rank starts a separate run: N curves, all but one of them wrong.",
        "writer = SummaryWriter() if rank == 0 else None",
    ),
    "resume-fails": Advice(
        "error", "After a failure the job cannot be started again from its own checkpoint.", ""
    ),
    "model-not-restored": Advice(
        "error",
        "The checkpoint is read, but the training starts from the beginning.",
        "model.load_state_dict(checkpoint['model'])  # before the wrapper, or into it",
    ),
    "model-rounded": Advice(
        "warning",
        "Updates that are smaller than the precision of the checkpoint are lost at each restart.",
        "checkpoint = {'model': model.state_dict()}  # half() for a copy that is not trained on",
    ),
    "optimizer-not-restored": Advice(
        "error",
        "Momentum and Adam's averages start from zero: the loss jumps after each restart.",
        "checkpoint = {'model': ..., 'optimizer': optimizer.state_dict()}\n"
        "optimizer.load_state_dict(checkpoint['optimizer'])",
    ),
    "scheduler-not-restored": Advice(
        "error",
        "The learning rate starts again, or goes on from the wrong place.",
        "checkpoint['scheduler'] = scheduler.state_dict()\n"
        "scheduler.load_state_dict(checkpoint['scheduler'])",
    ),
    "settings-not-restored": Advice(
        "error",
        "A schedule of momentum or weight decay starts again, or an optimizer that counts in its "
        "groups of parameters (Prodigy, schedule-free) does.",
        "# The whole state, and after the schedule was made, which sets what it begins with:\n"
        "optimizer.load_state_dict(checkpoint['optimizer'])",
    ),
    "scaler-not-restored": Advice(
        "warning",
        "The first steps overflow, and are skipped, until the scale is found again.",
        "checkpoint['scaler'] = scaler.state_dict()\nscaler.load_state_dict(checkpoint['scaler'])",
    ),
    "buffers-not-restored": Advice(
        "error",
        "The running statistics of BatchNorm begin again: the next evaluation measures a different "
        "model.",
        "checkpoint = {'model': model.state_dict()}  # not only model.named_parameters()\n"
        "model.load_state_dict(checkpoint['model'])  # strict: what is missing is an error",
    ),
    "other-step-after-resume": Advice(
        "warning",
        "The training does not go on as it would have without the restart: something that the "
        "loss or the optimizer depends on is not in the checkpoint.",
        "# A weight of the loss that a counter sets, a temperature, a queue, a running mean:\n"
        "checkpoint['updates'] = updates",
    ),
    "ema-not-restored": Advice(
        "error",
        "The average begins again with the weights of the restart, or with others: it is often "
        "what is evaluated and published.",
        "checkpoint['ema'] = ema.state_dict()\nema.load_state_dict(checkpoint['ema'])",
    ),
    "epoch-not-restored": Advice(
        "error",
        "The job trains more epochs than it should, in the order of the first ones.",
        "checkpoint['epoch'] = epoch + 1\nfor epoch in range(checkpoint['epoch'], epochs): ...",
    ),
    "order-after-resume": Advice(
        "warning",
        "After each restart some samples come more often than others: those at the beginning, or "
        "all but those that are skipped.",
        "train_loader.sampler.set_epoch(epoch)  # of the checkpoint; also to skip batches\n"
        "# A checkpoint at the end of an epoch has the position 0 of the next one.",
    ),
    "epoch-repeated": Advice(
        "note",
        "After a restart within an epoch its first samples come again, and so less often those at "
        "the end. It may be intended.",
        "# Also save the position, and skip what has been trained on:\n"
        "batches = itertools.islice(train_loader, position, None)",
    ),
    "printed-by-every-rank": Advice(
        "note", "The log has each line N times.", "if dist.get_rank() == 0:\n    print(...)"
    ),
}
