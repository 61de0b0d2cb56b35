"""Train a transformer in two dimensions: FSDP2 across replicas, tensor parallel within.

    torchrun --standalone --nproc_per_node=8 train_fsdp_tp.py --model vit_tiny --fsdp-size 4

Changes from train_fsdp.py: it takes one dimension of a mesh of ranks; train_tp.py takes the other.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

import tasks.images as task  # to train something else, change this line
from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.contract import check_task
from utils.data import build_loader
from utils.distributed import init_distributed, mean_over_replicas, set_data_parallel_group
from utils.guards import finite, hang, lock, preemption, progress, replicas
from utils.metrics import Meter, MetricLogger, evaluate, mean_loss
from utils.optim import build_optimizer, build_scheduler
from utils.options import option_guards
from utils.reports import report_errors
from utils.rungs import fsdp
from utils.rungs import tensor_parallel as tp
from utils.runtime import configure_torch, log_summary, to_dtype
from utils.seeds import set_seed
from utils.sync_batchnorm import convert_sync_batchnorm


def train_one_epoch(model, loader, optimizer, scheduler, meter, checkpoint, cfg):
    model.train()
    for inputs, targets in loader:  # on the device
        outputs = model(inputs)
        loss_sum = task.loss(outputs, targets)  # over the targets
        # Replicas average their gradients, so they divide by one number: docs/mean-of-means.md.
        loss = mean_loss(loss_sum, mean_over_replicas(task.count(targets)))

        optimizer.zero_grad()
        loss.backward()
        if cfg.clip_norm:
            tp.clip_grad_norm_(model.parameters(), cfg.clip_norm)
        optimizer.step()
        scheduler.step()

        meter.update(loss_sum, outputs, targets)  # on the device: .item() would synchronize
        checkpoint.step()  # calls the guards, and saves within the epoch when a save is due
    return meter.compute()


@report_errors
def main():
    cfg = load_config(task.Settings, fsdp.FsdpSettings)
    device = init_distributed(cfg.device, cfg.timeout)  # reads RANK, WORLD_SIZE, MASTER_ADDR, ...
    configure_torch(cfg)
    set_seed(cfg.seed)  # the same initial weights everywhere

    mesh = tp.init_mesh(device, data=cfg.fsdp_size, timeout=cfg.timeout)
    set_data_parallel_group(mesh.get_group("data"))
    replica = mesh["data"].size(), mesh.get_local_rank("data")  # how many, and which is this rank's

    # Data
    train_set, val_set = task.build_datasets(cfg)
    train_sampler = DistributedSampler(train_set, *replica, seed=cfg.seed, drop_last=True)
    val_sampler = DistributedSampler(val_set, *replica, shuffle=False)
    batch_size = cfg.global_batch_size // mesh["data"].size()  # this replica's share
    train_loader = build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)
    val_loader = build_loader(val_set, val_sampler, batch_size, device, cfg)

    # Model
    model = to_dtype(task.build_model(cfg, train_set), cfg.torch_dtype).to(device)
    check_task(task, model, train_loader)  # fails now, not after an epoch
    if cfg.sync_bn:
        model = convert_sync_batchnorm(model)  # a model without BatchNorm stays as it is
    if cfg.compile != "none":
        model.compile(mode=cfg.compile)  # in place: parameters keep their names
    fsdp.check_same_weights(model)  # fully_shard keeps each rank's own; DDP broadcasts rank 0's
    model = model.to(memory_format=torch.contiguous_format)  # fully_shard rejects channels_last
    with fsdp.replacing_parameters(model):  # refuses what holds on to the old ones
        tp.divide_layers(task.tensor_parallel_plan(model, mesh["tensor"].size()), mesh["tensor"])
        fsdp.shard_batchnorms(model, cfg)  # separately: they stay in float32
        for block in task.blocks(model):
            fully_shard(block, **fsdp.fsdp_kwargs(cfg, mesh=mesh["data"]))  # gathered when it runs
        fully_shard(model, **fsdp.fsdp_kwargs(cfg, root=True, mesh=mesh["data"]))  # the others

    # Optimization
    optimizer = build_optimizer(model, cfg)
    tp.update_by_mesh(optimizer)  # no kernel takes tensors of several meshes together
    scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=len(train_loader))
    meter, metrics = Meter(task, train_loader), MetricLogger(cfg)

    # Checkpoints: everything that a restarted run needs
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": train_loader,
        "meter": meter,
        "metrics": metrics,
        "data": task.describe(train_set, val_set),
    }
    guards = [  # each can be deleted, with its file
        lock.LockFolder(),  # one run at a time in output_dir
        replicas.CompareReplicas(),  # the ranks' code, data and weights
        fsdp.CompareShards(),  # what they gather
        preemption.SaveOnSignal(),  # and every cfg.save_minutes
        finite.RefuseNonFinite(),  # keeps the last good checkpoint
        hang.ShowHang(),  # where each rank waits
        progress.Progress(),
        *option_guards(cfg),  # such as --logger
    ]
    checkpoint = Checkpointer(cfg, state, guards, form=tp.PytorchRowOrder)
    start_epoch = checkpoint.load()  # 0 unless a run is resumed
    log_summary(cfg, state, start_epoch)

    for epoch in range(start_epoch, cfg.epochs):
        train_sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
        train_result = train_one_epoch(
            model, train_loader, optimizer, scheduler, meter, checkpoint, cfg
        )
        val_result = evaluate(model, val_loader, task)
        metrics.log(epoch, train_result, val_result, lr=scheduler.get_last_lr()[0])
        checkpoint.save(epoch + 1, is_best=metrics.is_best(*task.BEST))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main() has freed the model: gloo may hang otherwise
    fsdp.exit_process()  # at once: gloo's threads may abort in the interpreter's teardown
