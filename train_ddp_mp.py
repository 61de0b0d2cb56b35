"""Train an image classifier whose layers lie on several devices, in several processes at once.

    torchrun --standalone --nproc_per_node=2 train_ddp_mp.py --devices cuda,cuda  # on four GPUs

Since train_mp.py: each process has its own devices, DistributedDataParallel joins the processes.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from utils.checkpoint import load_checkpoint, save_checkpoint
from utils.config import load_config
from utils.datasets import build_datasets
from utils.distributed import report_errors
from utils.loaders import build_loader
from utils.metrics import Meter, MetricLogger, evaluate
from utils.model_parallel import MicroBatches, assign_layers, init_distributed_devices
from utils.models import build_model, convert_sync_batchnorm, prepare_ddp
from utils.optim import build_optimizer, build_scheduler
from utils.plan import announce
from utils.runtime import seed_everything
from utils.supervise import finish_epoch, supervise


def place(model, devices, split):
    """Put stage i of the model's layers on devices[i]; their inputs follow them there."""
    model = model.to(devices[0])
    for layer, device in assign_layers(model, devices, split):
        layer.to(device).register_forward_pre_hook(lambda _, x, device=device: x[0].to(device))
    return model


def train_one_epoch(model, loader, criterion, optimizer, scheduler, meter, cfg, device):
    model.train()
    meter.start()
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)

        outputs = model(images)
        loss = criterion(outputs, labels)

        optimizer.zero_grad()
        loss.backward()
        if cfg.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm)
        optimizer.step()
        scheduler.step()

        meter.update(loss, outputs, labels)  # on the device: no loss.item(), no waiting for the GPU
    return meter.compute()


@report_errors  # one message, from the first rank that fails
def main():
    cfg = load_config()
    devices = init_distributed_devices(cfg.devices, cfg.timeout)
    device = devices[-1]  # where outputs, labels and loss meet
    seed_everything(cfg.seed)

    # Data
    train_set, val_set = build_datasets(cfg)
    train_sampler = DistributedSampler(train_set, seed=cfg.seed, drop_last=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = build_loader(train_set, train_sampler, cfg, device, train=True)
    val_loader = build_loader(val_set, val_sampler, cfg, device)

    # Model
    model = build_model(cfg, len(train_set.classes))
    if cfg.sync_bn:
        model = convert_sync_batchnorm(model, device)
    model = MicroBatches(place(model, devices, cfg.split), cfg.micro_batches)
    model = DistributedDataParallel(model)  # broadcasts rank 0's weights, then averages gradients
    prepare_ddp(model, cfg)  # so that a resumed run adds up gradients in the same order

    # Optimization
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = build_optimizer(model, cfg)
    scheduler = build_scheduler(optimizer, cfg, len(train_loader))
    meter = Meter(device)

    # Everything a restarted run needs; load_checkpoint fills it in.
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": train_loader,
        "meter": meter,
        "config": vars(cfg),
        "data": train_set.meta(),
    }
    start_epoch = load_checkpoint(cfg.output_dir, state, cfg.resume, cfg.must_match())
    metrics = MetricLogger(cfg.output_dir, start_epoch)
    announce(cfg, state, val_loader, start_epoch)

    for epoch in range(start_epoch, cfg.epochs):
        train_sampler.set_epoch(epoch)  # or every epoch would repeat the first one's order
        loader = supervise(train_loader, epoch, state, cfg)  # saves and checks between steps
        train = train_one_epoch(model, loader, criterion, optimizer, scheduler, meter, cfg, device)
        val = evaluate(model, val_loader, device)
        train |= finish_epoch(epoch, state, val, cfg)  # do all ranks hold the same model?
        is_best = metrics.log(epoch, train, val, lr=scheduler.get_last_lr()[0])
        save_checkpoint(cfg.output_dir, state, epoch + 1, is_best, cfg.keep_last, cfg.save_sharded)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main: while the model lives, gloo may hang at exit
