"""Train an image classifier with DistributedDataParallel, launched from Python without torchrun.

    CUDA_VISIBLE_DEVICES=2,3 python train_ddp_spawn.py --config configs/cifar10.yaml

Changes from train_ddp.py: mp.spawn starts one process per visible GPU and passes it its rank. This
works on one machine only and does not restart failed ranks; torchrun supports both.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.data import build_datasets, build_loader, describe_data
from utils.distributed import init_distributed
from utils.errors import report_errors
from utils.metrics import Meter, MetricLogger, evaluate
from utils.models import build_model, convert_sync_batchnorm
from utils.optim import build_optimizer, build_scheduler
from utils.runtime import configure_torch, log_summary, progress
from utils.spawn import SpawnConfig, host_store, set_environment, shield_tracker, wait_for_ranks


def train_one_epoch(model, loader, criterion, optimizer, scheduler, meter, checkpoint, cfg):
    model.train()
    meter.start()
    for images, labels in progress(loader):  # on the device, normalized
        outputs = model(images)
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
    cfg = load_config(SpawnConfig)
    device = init_distributed(cfg.device, cfg.timeout)  # reads RANK, WORLD_SIZE, MASTER_ADDR, ...
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
    model = build_model(cfg, num_classes=len(classes)).to(device)
    if cfg.sync_bn:
        model = convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # averages gradients

    # Optimization
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = build_optimizer(model, cfg)
    scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=len(train_loader))
    meter = Meter(device)

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


def run_rank(local_rank, world_size, port):
    set_environment(local_rank, world_size, port)  # what torchrun sets for its processes
    main()
    dist.destroy_process_group()  # after main() has freed the model: gloo may hang otherwise


if __name__ == "__main__":
    world_size = load_config(SpawnConfig).spawn_processes or max(1, torch.cuda.device_count())
    store = host_store()  # on a free port
    shield_tracker()  # a process of mp.spawn, which SIGUSR1 to all processes would end
    ranks = mp.spawn(run_rank, (world_size, store.port), world_size, join=False)
    wait_for_ranks(ranks)  # the first failure ends them all; passes signals on
