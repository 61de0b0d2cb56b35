"""SyncBatchNorm on CPUs, for check/diff: PyTorch's refuses CPUs."""

import sys

from check_inside.record import PLAN


def install(name, torch):
    """Join the statistics of the ranks. The observer of `devices`, which uses one rank's
    statistics, comes before."""
    if PLAN.get("diff") and PLAN["device"] == "mapped":
        torch.nn.SyncBatchNorm.forward = forward


def forward(self, inputs):
    """What SyncBatchNorm computes, with collectives through which gradients flow."""
    torch = sys.modules["torch"]
    dist = torch.distributed
    takes_statistics = self.training or self.running_mean is None
    if not takes_statistics or not dist.is_initialized():
        return torch.nn.modules.batchnorm._BatchNorm.forward(self, inputs)
    from torch.distributed.nn.functional import all_reduce

    group = self.process_group or dist.group.WORLD
    places = [0, *range(2, inputs.dim())]
    shape = [1, -1] + [1] * (inputs.dim() - 2)
    count = inputs.new_tensor([inputs.numel() / inputs.shape[1]])
    dist.all_reduce(count, group=group)
    mean = all_reduce(inputs.sum(places), group=group) / count
    centered = inputs - mean.reshape(shape)
    variance = all_reduce(centered.square().sum(places), group=group) / count
    if self.training and self.track_running_stats:
        self.num_batches_tracked += 1
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean, factor)
            self.running_var.lerp_(variance * count / (count - 1), factor)
    outputs = centered / (variance + self.eps).sqrt().reshape(shape)
    if self.affine:
        outputs = outputs * self.weight.reshape(shape) + self.bias.reshape(shape)
    return outputs
