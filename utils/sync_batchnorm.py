"""BatchNorm with statistics over all replicas."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from utils.distributed import all_reduce, data_parallel_group, dp_world_size
from utils.errors import UserError


class SyncBatchNorm(_BatchNorm):
    """Computes what torch.nn.SyncBatchNorm computes: N ranks, each with its share of a batch, get
    the outputs that one process gets with the whole batch.
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html)

    PyTorch's does not accept CPU tensors. On CUDA, it makes the host wait for the GPU three times
    per layer, where it leaves out ranks without samples, and torch.compile cannot trace that
    (pytorch/pytorch#78549). Here, every rank has samples. And ranks that share a replica count its
    samples once: the unbiased variance depends on their number.
    """

    _check_input_dim = nn.SyncBatchNorm._check_input_dim

    def forward(self, images: Tensor) -> Tensor:
        """images: (n, channels, ...) -> the same shape; n may differ between ranks."""
        if not self.training or dp_world_size() == 1:
            return super().forward(images)
        outputs, mean, var, count = _Normalize.apply(images, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked += 1
                step = self.momentum
                if step is None:  # the mean over all batches
                    step = self.num_batches_tracked.to(mean.dtype).reciprocal()
                self.running_mean.lerp_(mean, step)
                self.running_var.lerp_(var * (count / (count - 1)), step)  # unbiased
        return outputs


# torch 2.14 has renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _gather(mean, spread, images):
    """The values of all ranks: means and spreads (ranks, channels), and counts (ranks, 1).
    mean, spread: this rank's, (channels,)."""
    channels, ranks = images.shape[1], dp_world_size()
    # new_tensor() would copy the number from the host, which waits for the copy.
    count = mean.new_full((1,), images.numel() // channels)
    stats = torch.cat([mean, spread, count])
    gathered = stats.new_empty(ranks * len(stats))
    _all_gather(gathered, stats, group=data_parallel_group())
    return gathered.view(ranks, -1).split([channels, channels, 1], dim=1)


class _Normalize(torch.autograd.Function):
    """(images - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks' images.

    Forward merges the means and variances of the ranks, weighted by their counts (Chan et al.
    1979), which stays accurate where E[x^2] - E[x]^2 cancels. Backward all-reduces the two sums in
    the gradient of BatchNorm.
    """

    @staticmethod
    def forward(ctx, images, weight, bias, eps):
        exact = images
        if not images.is_cuda:  # where the kernel itself sums bfloat16 in float32
            exact = images.to(torch.promote_types(images.dtype, torch.float32))
        # The kernel of BatchNorm itself: var_mean is 20 times slower on channels_last images.
        local_mean, local_var = torch.batch_norm_update_stats(exact, None, None, 0.0)
        means, variances, counts = _gather(local_mean, local_var, images)
        count = counts.sum()
        share = counts / count
        mean = (means * share).sum(0)
        spread = means - mean
        var = (torch.addcmul(variances, spread, spread) * share).sum(0)
        if weight is None:
            weight, bias = torch.ones_like(mean), torch.zeros_like(mean)
        outputs = nn.functional.batch_norm(images, mean, var, weight, bias, eps=eps)
        ctx.save_for_backward(images, weight, mean, var, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var, count)
        ctx.set_materialize_grads(False)  # no zeros for these three
        return outputs, mean, var, count

    @staticmethod
    def backward(ctx, grad, *_):
        images, weight, mean, var, count = ctx.saved_tensors
        invstd = torch.rsqrt(var + ctx.eps)
        # For fixed statistics, this kernel returns sum(grad * normalized) and sum(grad). It takes
        # them as (mean, var) on the CPU, and as (mean, invstd) on CUDA.
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, images, weight, mean, var, mean, invstd, False, ctx.eps, [False, True, True]
        )
        sums = torch.stack([grad_weight, grad_bias])
        all_reduce(sums)
        mean_of_products, mean_of_grad = sums / count
        # weight * invstd * (grad - mean(grad) - normalized * mean(grad * normalized)), regrouped
        # so that it passes over the images three times: scale * grad - slope * images + offset.
        scale = weight * invstd
        slope = scale * invstd * mean_of_products
        offset = torch.addcmul(slope * mean, scale, mean_of_grad, value=-1)
        shape = (1, -1) + (1,) * (images.dim() - 2)
        scale, slope, offset = (t.view(shape) for t in (scale, slope, offset))
        grad_images = torch.addcmul(offset, images, slope, value=-1)
        grad_images = torch.addcmul(grad_images, grad, scale)
        if not any(ctx.needs_input_grad[1:3]):  # affine=False
            grad_weight = grad_bias = None
        return grad_images.to(images.dtype), grad_weight, grad_bias, None


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Synchronize every BatchNorm in the model, in place. Each changes its class, and so keeps its
    parameters, its hooks and all references to it.

    DistributedDataParallel will not broadcast these buffers before each forward pass: they are the
    same on all ranks. Raises UserError for a subclass of BatchNorm that computes something else,
    such as timm's BatchNormAct2d, which would be lost.
    """
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if type(module).forward not in _FORWARDS:
            raise UserError(
                f"{name} is a {type(module).__name__}, which computes more than BatchNorm, so "
                f"--sync-bn cannot replace it: pass --no-sync-bn, or use a different model"
            )
        module.__class__ = SyncBatchNorm
        names += [f"{name}.{key}".lstrip(".") for key, _ in module.named_buffers(recurse=False)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
