"""Train a model with DataParallel: one process drives every visible GPU.

    python train_dp.py

Changes from train_1gpu.py: one line, which is not recommended. At every step, one Python thread per
GPU receives a new copy of the model, and the outputs are gathered on the first GPU; BatchNorm
normalizes each GPU's share separately. train_ddp.py has none of these costs. Without a GPU, this
script does the same as train_1gpu.py.
"""

import torch
from torch.utils.data import SequentialSampler

import tasks.images as task  # to train something else, change this line
from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.contract import check_task
from utils.data import build_loader
from utils.distributed import select_device
from utils.guards import finite, lock, preemption, progress
from utils.metrics import Meter, MetricLogger, evaluate, mean_loss
from utils.optim import build_optimizer, build_scheduler
from utils.options import option_guards
from utils.reports import report_errors
from utils.runtime import configure_torch, log_summary, to_dtype
from utils.sampler import EpochSampler
from utils.seeds import set_seed


def train_one_epoch(model, loader, optimizer, scheduler, meter, checkpoint, cfg):
    model.train()
    for inputs, targets in loader:  # on the device
        outputs = model(inputs)
        loss_sum = task.loss(outputs, targets)  # over the targets
        loss = mean_loss(loss_sum, task.count(targets))

        optimizer.zero_grad()
        loss.backward()
        if cfg.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm)
        optimizer.step()
        scheduler.step()

        meter.update(loss_sum, outputs, targets)  # on the device: .item() would synchronize
        checkpoint.step()  # calls the guards, and saves within the epoch when a save is due
    return meter.compute()


@report_errors
def main():
    cfg = load_config(task.Settings)
    device = select_device(cfg.device)
    configure_torch(cfg)
    set_seed(cfg.seed)  # the same initial weights everywhere

    # Data
    train_set, val_set = task.build_datasets(cfg)
    train_sampler = EpochSampler(train_set, seed=cfg.seed)
    val_sampler = SequentialSampler(val_set)
    batch_size = cfg.global_batch_size
    train_loader = build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)
    val_loader = build_loader(val_set, val_sampler, batch_size, device, cfg)

    # Model
    model = to_dtype(task.build_model(cfg, train_set), cfg.torch_dtype).to(device)
    check_task(task, model, train_loader)  # fails now, not after an epoch
    if cfg.compile != "none":
        model.compile(mode=cfg.compile)  # in place: parameters keep their names
    model = torch.nn.DataParallel(model)  # splits each batch over the visible GPUs

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
        preemption.SaveOnSignal(),  # and every cfg.save_minutes
        finite.RefuseNonFinite(),  # keeps the last good checkpoint
        progress.Progress(),
        *option_guards(cfg),  # such as --logger
    ]
    checkpoint = Checkpointer(cfg, state, guards)
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
