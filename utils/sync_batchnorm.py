"""BatchNorm with statistics over all replicas. Needs torch, distributed.py and errors.py."""

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
        if self._can_use_cuda_kernels(images):
            self.num_batches_tracked += 1
            running = self.running_mean, self.running_var, self.momentum
            return _NormalizeOnCuda.apply(images, self.weight, self.bias, self.eps, *running)
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

    def _can_use_cuda_kernels(self, images):
        # torch.compile cannot trace them, and fuses the operations of _Normalize instead. They take
        # the momentum from the host.
        has_momentum = self.track_running_stats and self.momentum is not None
        return images.is_cuda and has_momentum and not torch.compiler.is_compiling()


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


class _NormalizeOnCuda(torch.autograd.Function):
    """Computes what _Normalize does, with the kernels of torch.nn.SyncBatchNorm: 12 operations per
    layer and step instead of 32. Also updates running_mean and running_var.

    backward_elemt takes images to have the memory format of the gradient, without a check.
    """

    @staticmethod
    def forward(ctx, images, weight, bias, eps, running_mean, running_var, momentum):
        is_channels_last = images.is_contiguous(memory_format=torch.channels_last)
        ctx.layout = torch.channels_last if is_channels_last else torch.contiguous_format
        images = images.contiguous(memory_format=ctx.layout)
        means, invstds, counts = _gather(*torch.batch_norm_stats(images, eps), images)
        counts = counts.squeeze(1)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            images, means, invstds, running_mean, running_var, momentum, eps, counts
        )
        ctx.save_for_backward(images, weight, mean, invstd, counts.to(torch.int32))
        return torch.batch_norm_elemt(images, weight, bias, mean, invstd, eps)

    @staticmethod
    def backward(ctx, grad):
        images, weight, mean, invstd, counts = ctx.saved_tensors
        grad = grad.contiguous(memory_format=ctx.layout)
        needed = True, *ctx.needs_input_grad[1:3]
        grad_sum, product_sum, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, images, mean, invstd, weight, *needed
        )
        grad_sum, product_sum = all_reduce(torch.stack([grad_sum, product_sum]))
        grad_images = torch.batch_norm_backward_elemt(
            grad, images, mean, invstd, weight, grad_sum, product_sum, counts
        )
        return grad_images, grad_weight, grad_bias, None, None, None, None


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
        if not ctx.needs_input_grad[1]:  # affine=False
            grad_weight = grad_bias = None
        return grad_images.to(images.dtype), grad_weight, grad_bias, None


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """The model with every BatchNorm in it synchronized, keeping its parameters and buffers.

    DistributedDataParallel will not broadcast these buffers before each forward pass: they are the
    same on all ranks. Raises UserError for a subclass of BatchNorm that computes something else,
    such as timm's BatchNormAct2d: a replacement would leave that out.
    """
    model = _convert(model, "")
    names = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, SyncBatchNorm)
        for name, _ in module.named_buffers()
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def _convert(module, name):
    if isinstance(module, SyncBatchNorm):
        return module
    if isinstance(module, _BatchNorm):
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise UserError(
                f"{name} is a {type(module).__name__}, which computes more than BatchNorm, so "
                f"--sync-bn cannot replace it: pass --no-sync-bn, or use a different model"
            )
        options = module.momentum, module.affine, module.track_running_stats
        synced = SyncBatchNorm(module.num_features, module.eps, *options)
        for key, parameter in module.named_parameters(recurse=False):
            synced.register_parameter(key, parameter)
        for key, buffer in module.named_buffers(recurse=False):
            synced.register_buffer(key, buffer)
        return synced.train(module.training)
    for key, child in module.named_children():
        converted = _convert(child, f"{name}.{key}".lstrip("."))
        if converted is not child:
            setattr(module, key, converted)
    return module
