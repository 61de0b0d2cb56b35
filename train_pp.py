"""Train an image classifier with pipeline parallelism: each rank holds some of the layers.

    torchrun --standalone --nproc_per_node=4 train_pp.py --config configs/cifar10.yaml

Changes from train_ddp.py: the ranks hold one model together. Micro-batches pass from rank to rank,
and their gradients back, in the order of --schedule; all ranks see the outputs of the last one.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from utils import pipeline
from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.data import build_datasets, build_loader, describe_data
from utils.distributed import init_distributed
from utils.errors import report_errors
from utils.metrics import Meter, MetricLogger, evaluate
from utils.models import build_model
from utils.optim import build_optimizer, build_scheduler
from utils.runtime import configure_torch, log_summary, progress


def train_one_epoch(model, loader, criterion, optimizer, scheduler, meter, checkpoint, cfg):
    model.train()
    meter.start()
    for images, labels in progress(loader):  # on the device, normalized
        optimizer.zero_grad()
        outputs = model.step(images, labels, criterion)  # forward and backward of micro-batches
        loss = criterion(outputs, labels)
        if cfg.clip_norm:
            pipeline.clip_grad_norm_(model.parameters(), cfg.clip_norm)
        optimizer.step()
        scheduler.step()

        meter.update(loss, outputs, labels)  # sums stay on the device: .item() would synchronize
        checkpoint.step()  # also saves within the epoch when a save is due
    return meter.compute()


@report_errors
def main():
    cfg = load_config(pipeline.PipelineConfig)
    device = init_distributed(cfg.device, cfg.timeout)  # reads RANK, WORLD_SIZE, MASTER_ADDR, ...
    configure_torch(cfg)
    torch.manual_seed(cfg.seed)  # the same initial weights in every process
    pipeline.hold_one_replica()  # all ranks together: each sees all batches

    # Data
    train_set, val_set, classes = build_datasets(cfg)
    train_sampler = DistributedSampler(train_set, 1, rank=0, seed=cfg.seed, drop_last=True)
    val_sampler = DistributedSampler(val_set, 1, rank=0, shuffle=False)
    batch_size = cfg.global_batch_size  # all of it: the ranks divide the layers, not the batch
    train_loader = build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)
    val_loader = build_loader(val_set, val_sampler, batch_size, device, cfg)

    # Model
    model = build_model(cfg, num_classes=len(classes)).to(device)
    # A Pipeline keeps only the layers of this rank's stages.
    model = pipeline.Pipeline(model, (batch_size, len(classes)), device, cfg)

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
    checkpoint = pipeline.read_own_stages(Checkpointer(cfg, state, compare_ranks=True))
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
