"""Train a vision transformer in two dimensions: FSDP2 across replicas, tensor parallel within.

    torchrun --standalone --nproc_per_node=8 train_fsdp_tp.py --model vit_tiny --fsdp-size 4

Changes from train_fsdp.py: it takes one dimension of a mesh of ranks; train_tp.py takes the other.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DistributedSampler

from utils import tensor_parallel as tp
from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.data import build_datasets, build_loader, describe_data
from utils.distributed import init_distributed
from utils.errors import report_errors
from utils.fsdp import FsdpConfig, blocks_of, check_same_weights, fsdp_kwargs, shard_batchnorms
from utils.metrics import Meter, MetricLogger, evaluate
from utils.models import build_model, convert_sync_batchnorm
from utils.optim import build_optimizer, build_scheduler
from utils.runtime import configure_torch, log_summary, progress

ATTENTION = {"self_attention": tp.HeadwiseParallel(), "self_attention.out_proj": RowwiseParallel()}
MLP = {"mlp.0": ColwiseParallel(), "mlp.2": tp.ColwiseDropout(), "mlp.3": RowwiseParallel()}


def train_one_epoch(model, loader, criterion, optimizer, scheduler, meter, checkpoint, cfg):
    model.train()
    meter.start()
    for images, labels in progress(loader):  # on the device, normalized
        outputs = model(images)
        loss = criterion(outputs, labels)

        optimizer.zero_grad()
        loss.backward()
        if cfg.clip_norm:
            tp.clip_grad_norm_(model.parameters(), cfg.clip_norm)
        optimizer.step()
        scheduler.step()

        meter.update(loss, outputs, labels)  # sums stay on the device: .item() would synchronize
        checkpoint.step()  # also saves within the epoch when a save is due
    return meter.compute()


@report_errors
def main():
    cfg = load_config(FsdpConfig)
    device = init_distributed(cfg.device, cfg.timeout)  # reads RANK, WORLD_SIZE, MASTER_ADDR, ...
    configure_torch(cfg)
    torch.manual_seed(cfg.seed)  # the same initial weights in every process
    mesh, replica = tp.init_mesh(device, data=cfg.fsdp_size)

    # Data
    train_set, val_set, classes = build_datasets(cfg)
    train_sampler = DistributedSampler(train_set, *replica, seed=cfg.seed, drop_last=True)
    val_sampler = DistributedSampler(val_set, *replica, shuffle=False)
    batch_size = cfg.global_batch_size // mesh["data"].size()  # this replica's share
    train_loader = build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)
    val_loader = build_loader(val_set, val_sampler, batch_size, device, cfg)

    # Model
    model = build_model(cfg, num_classes=len(classes)).to(device)
    if cfg.sync_bn:
        model = convert_sync_batchnorm(model)
    check_same_weights(model)  # fully_shard keeps each rank's own; DDP would broadcast rank 0's
    model = model.to(memory_format=torch.contiguous_format)  # fully_shard rejects channels_last
    for block in tp.blocks_to_split(model, mesh["tensor"].size()):
        parallelize_module(block, mesh["tensor"], ATTENTION | MLP)  # first: FSDP shards the slices
    shard_batchnorms(model, cfg)  # separately: they stay in float32
    for block in blocks_of(model):
        fully_shard(block, **fsdp_kwargs(cfg, mesh=mesh["data"]))  # gathered just before it runs
    fully_shard(model, **fsdp_kwargs(cfg, root=True, mesh=mesh["data"]))  # outside the blocks

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
    checkpoint = tp.keep_row_order(Checkpointer(cfg, state, compare_ranks=True))
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
