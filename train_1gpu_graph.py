"""Train an image classifier on one GPU, with the whole training step in one CUDA graph.

python train_1gpu_graph.py --config configs/cifar10.yaml

Changes from train_1gpu.py: the step is a function, which is captured once and then replayed.
"""

import torch
from torch.utils.data import SequentialSampler

from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.data import build_datasets, build_loader, describe_data
from utils.distributed import get_device
from utils.errors import report_errors
from utils.graph import GraphedStep
from utils.metrics import Meter, MetricLogger, evaluate
from utils.models import build_model
from utils.optim import build_optimizer, build_scheduler
from utils.runtime import configure_torch, log_summary, progress
from utils.sampler import EpochSampler


def build_step(model, criterion, optimizer, cfg):
    def train_step(images, labels):  # no .item(): a graph cannot wait
        outputs = model(images)
        loss = criterion(outputs, labels)

        optimizer.zero_grad()
        loss.backward()
        if cfg.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm)
        optimizer.step()
        return loss, outputs

    return train_step


def train_one_epoch(model, loader, train_step, scheduler, meter, checkpoint):
    model.train()
    meter.start()
    for images, labels in progress(loader):  # on the device, normalized
        loss, outputs = train_step(images, labels)  # overwritten by the next call
        scheduler.step()

        meter.update(loss, outputs, labels)  # sums stay on the device: .item() would synchronize
        checkpoint.step()  # also saves within the epoch when a save is due
    return meter.compute()


@report_errors
def main():
    cfg = load_config()
    device = get_device(cfg.device)
    configure_torch(cfg)
    torch.manual_seed(cfg.seed)  # the same initial weights in every process

    # Data
    train_set, val_set, classes = build_datasets(cfg)
    train_sampler = EpochSampler(train_set, seed=cfg.seed)
    val_sampler = SequentialSampler(val_set)
    batch_size = cfg.global_batch_size
    train_loader = build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)
    val_loader = build_loader(val_set, val_sampler, batch_size, device, cfg)

    # Model
    model = build_model(cfg, num_classes=len(classes)).to(device)

    # Optimization
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = build_optimizer(model, cfg)
    train_step = build_step(model, criterion, optimizer, cfg)
    train_step = GraphedStep(train_step, optimizer, device, cfg)  # captures it on a GPU
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
    checkpoint = Checkpointer(cfg, state)
    start_epoch = checkpoint.load()  # 0 unless there is a run to resume
    metrics = MetricLogger(cfg.output_dir, start_epoch)
    log_summary(cfg, state, start_epoch)

    for epoch in range(start_epoch, cfg.epochs):
        train_sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
        train = train_one_epoch(model, train_loader, train_step, scheduler, meter, checkpoint)
        val = evaluate(model, val_loader, meter)
        is_best = metrics.log(epoch, train, val, lr=scheduler.get_last_lr()[0])
        checkpoint.save(epoch + 1, is_best=is_best)


if __name__ == "__main__":
    main()
