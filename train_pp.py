"""Train a model with pipeline parallelism: each rank holds some of the layers.

    torchrun --standalone --nproc_per_node=4 train_pp.py

Changes from train_ddp.py: the ranks hold one model together. Micro-batches pass from rank to rank,
and their gradients back, in the order of --schedule; all ranks see what the last one measures.
"""

import torch.distributed as dist
from torch.utils.data import DistributedSampler

import tasks.images as task  # to train something else, change this line
from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.contract import check_task
from utils.data import build_loader
from utils.distributed import init_distributed, mean_over_replicas
from utils.guards import finite, hang, lock, preemption, progress, replicas
from utils.metrics import Meter, MetricLogger
from utils.optim import build_optimizer, build_scheduler
from utils.options import option_guards
from utils.reports import report_errors
from utils.rungs import pipeline
from utils.runtime import configure_torch, log_summary, to_dtype
from utils.seeds import set_seed


def train_one_epoch(model, loader, optimizer, scheduler, meter, checkpoint, cfg):
    model.train()
    for inputs, targets in loader:  # on the device
        optimizer.zero_grad()
        count = mean_over_replicas(task.count(targets))  # of the batch, not of each micro-batch
        sums = model.step(inputs, targets, task, count)  # forward and backward
        if cfg.clip_norm:
            model.clip_grad_norm_(cfg.clip_norm)
        optimizer.step()
        scheduler.step()

        meter.add(sums, targets)  # on the device: .item() would synchronize
        checkpoint.step()  # calls the guards, and saves within the epoch when a save is due
    return meter.compute()


@report_errors
def main():
    cfg = load_config(task.Settings, pipeline.PipelineSettings)
    device = init_distributed(cfg.device, cfg.timeout, bound=False)  # pairs of ranks send alone
    configure_torch(cfg)
    set_seed(cfg.seed)  # the same initial weights everywhere

    pipeline.set_single_replica()  # all ranks together: each sees all batches

    # Data
    train_set, val_set = task.build_datasets(cfg)
    train_sampler = DistributedSampler(train_set, 1, rank=0, seed=cfg.seed, drop_last=True)
    val_sampler = DistributedSampler(val_set, 1, rank=0, shuffle=False)
    batch_size = cfg.global_batch_size  # all of it: the ranks divide the layers, not the batch
    train_loader = build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)
    val_loader = build_loader(val_set, val_sampler, batch_size, device, cfg)

    # Model
    model = to_dtype(task.build_model(cfg, train_set), cfg.torch_dtype).to(device)
    check_task(task, model, train_loader)  # fails now, not after an epoch
    model = pipeline.Pipeline(model, task.layers, train_loader, device, cfg)  # its stages

    # Optimization
    optimizer = build_optimizer(model, cfg)
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
        replicas.CompareSetup(),  # the ranks' code and data
        preemption.SaveOnSignal(),  # and every cfg.save_minutes
        finite.RefuseNonFinite(),  # keeps the last good checkpoint
        hang.ShowHang(),  # where each rank waits
        progress.Progress(),
        pipeline.RunningStatistics(),  # warns of BatchNorm
        *option_guards(cfg),  # such as --logger
    ]
    checkpoint = Checkpointer(cfg, state, guards, form=pipeline.OwnStages)
    start_epoch = checkpoint.load()  # 0 unless a run is resumed
    log_summary(cfg, state, start_epoch)

    for epoch in range(start_epoch, cfg.epochs):
        train_sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
        train_result = train_one_epoch(
            model, train_loader, optimizer, scheduler, meter, checkpoint, cfg
        )
        val_result = pipeline.evaluate(model, val_loader, task)
        metrics.log(epoch, train_result, val_result, lr=scheduler.get_last_lr()[0])
        checkpoint.save(epoch + 1, is_best=metrics.is_best(*task.BEST))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main() has freed the model: gloo may hang otherwise
