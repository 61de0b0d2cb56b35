"""Train an image classifier with model parallelism in each process, and DDP across processes.

    torchrun --standalone --nproc_per_node=2 train_ddp_mp.py --devices cuda,cuda  # on four GPUs

Changes from train_mp.py: each process has its own devices, and DistributedDataParallel averages the
gradients across the processes.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.data import build_datasets, build_loader, describe_data
from utils.distributed import init_distributed
from utils.errors import report_errors
from utils.metrics import Meter, MetricLogger, evaluate
from utils.model_parallel import MicroBatches, StagesConfig, assign_layers, get_devices
from utils.models import build_model, convert_sync_batchnorm
from utils.optim import build_optimizer, build_scheduler
from utils.runtime import configure_torch, log_summary, progress


def place_stages(model, devices, split):
    """Move stage i of the model's layers to devices[i]; their inputs follow them there."""
    model = model.to(devices[0])
    for layer, device in assign_layers(model, devices, split):
        layer.to(device).register_forward_pre_hook(lambda _, x, device=device: x[0].to(device))
    return model


def train_one_epoch(model, loader, criterion, optimizer, scheduler, meter, checkpoint, cfg):
    model.train()
    meter.start()
    for images, labels in progress(loader):  # on the device, normalized
        outputs = model(images)
        labels = labels.to(outputs.device)
        loss = criterion(outputs, labels)

        optimizer.zero_grad()
        loss.backward()
        if cfg.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm)
        optimizer.step()
        scheduler.step()

        meter.update(loss, outputs, labels)  # sums stay on the device: .item() would synchronize
        checkpoint.step()  # also saves within the epoch when a save is due
    return meter.compute()


@report_errors
def main():
    cfg = load_config(StagesConfig)
    devices = get_devices(cfg.devices)  # of this process, in the order of the stages
    init_distributed(cfg.devices, cfg.timeout, devices)  # reads RANK, WORLD_SIZE, ...
    device = devices[0]  # for the images; outputs and loss are on the last device
    configure_torch(cfg)
    torch.manual_seed(cfg.seed)  # the same initial weights in every process

    # Data
    train_set, val_set, classes = build_datasets(cfg)
    train_sampler = DistributedSampler(train_set, seed=cfg.seed, drop_last=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    batch_size = cfg.global_batch_size // dist.get_world_size()  # this rank's share
    train_loader = build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)
    val_loader = build_loader(val_set, val_sampler, batch_size, device, cfg)

    # Model
    model = build_model(cfg, num_classes=len(classes))
    if cfg.sync_bn:
        model = convert_sync_batchnorm(model)
    model = MicroBatches(place_stages(model, devices, cfg.split), cfg.micro_batches)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # averages gradients

    # Optimization
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = build_optimizer(model, cfg)
    scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=len(train_loader))
    meter = Meter(devices[-1])

    # Checkpoints: everything that a restarted run needs
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": train_loader,
        "meter": meter,
        "data": describe_data(train_set, val_set, classes),
    }
    checkpoint = Checkpointer(cfg, state, compare_ranks=True)  # raises if the replicas diverge
    start_epoch = checkpoint.load()  # 0 unless there is a run to resume
    metrics = MetricLogger(cfg.output_dir, start_epoch)
    log_summary(cfg, state, start_epoch)

    for epoch in range(start_epoch, cfg.epochs):
        train_sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
        train = train_one_epoch(
            model, train_loader, criterion, optimizer, scheduler, meter, checkpoint, cfg
        )
        val = evaluate(model, val_loader, meter)
        is_best = metrics.log(epoch, train, val, lr=scheduler.get_last_lr()[0])
        checkpoint.save(epoch + 1, is_best=is_best)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main() has freed the model: gloo may hang otherwise
