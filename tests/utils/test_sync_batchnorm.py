"""SyncBatchNorm: several ranks compute what one process computes, and no host waits for a GPU."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.forked import ROUNDING
from tests.processes import run_ranks
from utils.errors import UserError
from utils.sync_batchnorm import (
    SyncBatchNorm,
    _Normalize,
    _NormalizeOnCuda,
    convert_sync_batchnorm,
)


def norm(kind, **options):
    torch.manual_seed(1)
    module = kind(5, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def per_channel(values, images):
    return values.view(1, -1, *[1] * (images.dim() - 2))


def other_dims(images):
    return [dim for dim in range(images.dim()) if dim != 1]


class Kernels:
    """What PyTorch's kernels for CUDA compute, and what they demand, by their source
    (aten/src/ATen/native/cuda/Normalization.cu). They have no version for the CPU."""

    @staticmethod
    def batch_norm_stats(images, eps):
        exact = images.to(torch.promote_types(images.dtype, torch.float32))
        var, mean = torch.var_mean(exact, other_dims(images), correction=0)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_gather_stats_with_counts(
        images, means, invstds, running_mean, running_var, momentum, eps, counts
    ):
        assert means.dtype == counts.dtype == running_mean.dtype and counts.dim() == 1
        shares, count = (counts / counts.sum())[:, None], counts.sum()
        mean = (shares * means).sum(0)
        var = (shares * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * count / (count - 1), momentum)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(images, weight, bias, mean, invstd, eps):
        outputs = (images - per_channel(mean, images)) * per_channel(invstd, images)
        if weight is not None:
            outputs = outputs * per_channel(weight, images) + per_channel(bias, images)
        return outputs.to(images.dtype)

    @staticmethod
    def batch_norm_backward_reduce(grad, images, mean, invstd, weight, *needed):
        assert_layouts(grad, images)
        centered = images - per_channel(mean, images)
        grad_sum = grad.to(mean.dtype).sum(other_dims(images))
        product_sum = (grad * centered).sum(other_dims(images))
        results = grad_sum, product_sum, product_sum * invstd, grad_sum.clone()
        is_needed = needed[0], needed[0], *needed[1:]
        return tuple(r if n else None for r, n in zip(results, is_needed, strict=True))

    @staticmethod
    def batch_norm_backward_elemt(
        grad, images, mean, invstd, weight, grad_sum, product_sum, counts
    ):
        assert_layouts(grad, images)
        assert counts.dtype == torch.int32 and counts.is_contiguous()
        assert grad_sum.is_contiguous() and product_sum.is_contiguous()
        scale = invstd if weight is None else invstd * weight
        slope = invstd**2 * product_sum / counts.sum()
        rest = grad - per_channel(grad_sum / counts.sum(), images)
        rest = rest - (images - per_channel(mean, images)) * per_channel(slope, images)
        return (rest * per_channel(scale, images)).to(images.dtype)


def assert_layouts(grad, images):
    """Both are read by the same offsets."""
    formats = torch.contiguous_format, torch.channels_last
    assert any(grad.is_contiguous(memory_format=f) for f in formats)
    for layout in formats:
        is_same = grad.is_contiguous(memory_format=layout) == images.is_contiguous(
            memory_format=layout
        )
        assert is_same


def use_kernels(monkeypatch):
    """Take the path of CUDA on the CPU."""
    for name in vars(Kernels):
        if name.startswith("batch_norm"):
            monkeypatch.setattr(torch, name, getattr(Kernels, name))
    cuda = SimpleNamespace(is_cuda=True)
    decide = SyncBatchNorm._can_use_cuda_kernels
    monkeypatch.setattr(SyncBatchNorm, "_can_use_cuda_kernels", lambda self, _: decide(self, cuda))
    monkeypatch.setattr(_Normalize, "apply", None)


OPTIONS = ({}, {"momentum": None}, {"affine": False})
SHAPES = ((9, 5, 4, 3), (9, 5))
SHARES = {0: slice(0, 2), 1: slice(2, 5), 2: slice(5, 9)}  # unequal


def train_two_steps(options, shape, share, sync, layouts=(torch.contiguous_format,) * 2):
    """Outputs and gradients of the images; gradients of the parameters; buffers. layouts: the
    memory formats of the images and of the gradient."""
    torch.manual_seed(0)
    batches = torch.randn(2, *shape).double() * 3 + 1000
    gradient = torch.randn(shape).double()
    module = norm(torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d, **options)
    if sync:
        module = convert_sync_batchnorm(torch.nn.Sequential(module))[0]
    for images in batches:
        images = images[share].contiguous(memory_format=layouts[0]).requires_grad_()
        outputs = module(images)
        outputs.backward(gradient[share].contiguous(memory_format=layouts[1]))
    local, gradients = [outputs.detach(), images.grad], [p.grad for p in module.parameters()]
    return [[t.numpy() for t in group] for group in (local, gradients, list(module.buffers()))]


@pytest.mark.parametrize("sync", [True, False])
def test_ranks_equal_one_batchnorm_on_all_samples(sync):
    """Without synchronization, the comparison must fail: it would notice a bug."""
    compare_with_one_process([(options, shape) for options in OPTIONS for shape in SHAPES], sync)


def test_kernels_of_cuda_equal_one_batchnorm_on_all_samples(monkeypatch):
    """Also where the images are channels_last, but the gradient is not, and the reverse."""
    formats = torch.contiguous_format, torch.channels_last
    layouts = list(itertools.product(formats, formats))
    use_kernels(monkeypatch)
    options = [options for options in OPTIONS if "momentum" not in options]
    compare_with_one_process([(o, s) for o in options for s in SHAPES], True)
    for pair in layouts:
        compare_with_one_process([({}, SHAPES[0])], True, pair)


def test_kernels_of_cuda_compute_in_mixed_precision_and_with_frozen_parameters(monkeypatch):
    """As _Normalize does: bfloat16 images with float32 parameters."""

    def body(rank):
        results = []
        for frozen in (False, True):
            module = convert_sync_batchnorm(norm(torch.nn.BatchNorm2d).float())
            module.requires_grad_(not frozen)
            torch.manual_seed(rank)
            images = torch.randn(3, 5, 4, 4).bfloat16().requires_grad_()
            outputs = module(images)
            outputs.square().sum().backward()
            assert outputs.dtype == images.grad.dtype == torch.bfloat16
            assert all((parameter.grad is None) is frozen for parameter in module.parameters())
            results += [outputs, images.grad, *module.buffers()]
            results += [p.grad for p in module.parameters() if p.grad is not None]
        return [result.detach().float().numpy() for result in results]

    expected = run_ranks(body, 2)
    use_kernels(monkeypatch)
    for ours, theirs in zip(run_ranks(body, 2), expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert abs(mine - other).max() < 0.02 * abs(other).max()


def compare_with_one_process(cases, sync, layouts=(torch.contiguous_format,) * 2):
    """cases: [(options, shape)]."""

    def body(rank):
        return [train_two_steps(*case, SHARES[rank], sync, layouts) for case in cases]

    by_rank = run_ranks(body, len(SHARES))
    for i, case in enumerate(cases):
        local, gradients, buffers = train_two_steps(*case, slice(None), sync=False)
        ranks = [results[i] for results in by_rank]
        pairs = []
        for rank, (other, _, other_buffers) in enumerate(ranks):
            shares = [tensor[SHARES[rank]] for tensor in local]
            pairs += zip(shares, other, strict=True)
            pairs += zip(buffers, other_buffers, strict=True)
        summed = [sum(parts) for parts in zip(*(rank[1] for rank in ranks), strict=True)]
        pairs += zip(gradients, summed, strict=True)
        worst = max(float(abs(a - b).max()) for a, b in pairs)
        assert (worst < ROUNDING) is sync, (case, worst)


def test_bfloat16_eval_mode_and_a_single_process():
    plain = torch.nn.Sequential(norm(torch.nn.BatchNorm2d)).float()
    names = list(plain.state_dict())
    images = torch.randn(6, 5, 4, 4)
    expected = plain(images)
    plain[0].reset_running_stats()

    def body(rank):
        module = convert_sync_batchnorm(plain)
        share = images[3 * rank : 3 * rank + 3].bfloat16().requires_grad_()
        outputs = module(share)
        outputs.sum().backward()
        assert outputs.dtype == share.grad.dtype == torch.bfloat16
        module.eval()
        assert module(images).shape == images.shape
        return (outputs.float() - expected[3 * rank : 3 * rank + 3]).abs().max().item()

    assert max(run_ranks(body, 2)) < 0.1
    synced = convert_sync_batchnorm(plain)
    assert list(synced.state_dict()) == names
    torch.testing.assert_close(synced(images), expected)
    again = convert_sync_batchnorm(plain)
    assert isinstance(again[0], SyncBatchNorm)
    with pytest.raises(ValueError, match="at least 2D input"):
        synced(torch.zeros(3))


class BatchNormAct2d(torch.nn.BatchNorm2d):
    """Like timm's: the activation would be lost."""

    def forward(self, images):
        return super().forward(images).relu()


class Renamed(torch.nn.BatchNorm2d):
    """Computes what its base computes."""


def test_subclass_that_computes_more_is_refused():
    block = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 1), BatchNormAct2d(5))
    model = torch.nn.ModuleDict({"stem": torch.nn.Sequential(block), "head": Renamed(5)})
    text = r"stem\.0\.1 .*BatchNormAct2d.* --no-sync-bn"
    with pytest.raises(UserError, match=text):
        convert_sync_batchnorm(model)
    model["stem"] = torch.nn.SyncBatchNorm(5)
    converted = convert_sync_batchnorm(model)
    assert {type(module) for module in converted.values()} == {SyncBatchNorm}


def test_ddp_broadcasts_only_buffers_that_may_differ():
    def body(rank):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 1), torch.nn.BatchNorm2d(5))
        found = []
        for convert in (lambda model: model, convert_sync_batchnorm):
            model = convert(model)
            model.register_buffer("other", torch.full((1,), rank))
            wrapped = DistributedDataParallel(model)
            wrapped(torch.randn(4, 3, 2, 2))
            found.append((len(wrapped.modules_buffers), model.other.item()))
        return found

    assert run_ranks(body, 2) == [[(4, 0), (1, 0)]] * 2


# Operations that launch nothing.
FREE = ("view", "split", "unbind", "detach", "alias", "expand", "squeeze", "select", "empty")
FREE += ("promote_types", "prim.device")


class Operations(TorchDispatchMode):
    """Records the names of the operations, and each tensor that is created from Python numbers or
    copied from one device to another."""

    def __init__(self):
        super().__init__()
        self.names, self.copies = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        if "lift_fresh" in str(function) or (
            "_to_copy" in str(function) and result.device != args[0].device
        ):
            self.copies.append(str(function))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [None, 0.1], ids=["any device", "kernels of CUDA"])
def test_host_never_waits_for_the_gpu(momentum, dtype):
    """The operations on CUDA tensors that exist in name only, on two ranks."""

    def body(rank):
        library = torch.library.Library("aten", "IMPL", "Meta")  # the kernel has no such version

        def update_stats(images, mean, var, momentum):
            return images.new_empty(2, images.shape[1], dtype=torch.float32).unbind()

        def stats(images, eps):
            return update_stats(images, None, None, 0.0)

        def gather(images, means, invstds, *_):
            return means.new_empty(2, images.shape[1]).unbind()

        def reduce(grad, images, mean, invstd, weight, *needed):
            return mean.new_empty(4, images.shape[1]).unbind()

        library.impl("batch_norm_update_stats", update_stats)
        library.impl("batch_norm_stats", stats)
        library.impl("batch_norm_gather_stats_with_counts", gather)
        library.impl("batch_norm_elemt", lambda images, *_: torch.empty_like(images))
        library.impl("batch_norm_backward_reduce", reduce)
        library.impl("batch_norm_backward_elemt", lambda grad, *_: torch.empty_like(grad))
        with FakeTensorMode():
            module = SyncBatchNorm(5, momentum=momentum, device="cuda")
            images = torch.empty(8, 5, 4, 4, device="cuda", dtype=dtype)
            with Operations() as operations:
                outputs = module(images)
            # Without a GPU, autograd cannot call this itself.
            mean = torch.empty(5, device="cuda")
            context = SimpleNamespace(
                saved_tensors=(images, module.weight, mean, mean, mean.sum()),
                needs_input_grad=(True, True, True),
                eps=1e-5,
                layout=torch.contiguous_format,
            )
            function = _Normalize if momentum is None else _NormalizeOnCuda
            with operations:
                gradient, *_ = function.backward(context, torch.empty_like(outputs))
        assert outputs.dtype == gradient.dtype == dtype
        return operations.names, operations.copies

    for names, copies in run_ranks(body, 2):
        assert copies == []
        launches = [name for name in names if not any(word in name for word in FREE)]
        assert len(launches) <= (35 if momentum is None else 12), launches
        waits = ("_local_scalar_dense", "nonzero", "index", "masked_select", "unique")
        assert [name for name in names if any(wait in name for wait in waits)] == []
        collectives = [name.split(".")[1] for name in names if name.startswith("c10d")]
        assert collectives == ["_allgather_base_", "allreduce_"]


def test_operations_of_a_layer():
    """Forward and backward, with the two collectives: each is a launch on a GPU."""

    def body(rank):
        module = SyncBatchNorm(5)
        images = torch.randn(4, 5, 4, 4, requires_grad=True)
        module(images).sum().backward()
        gradient = torch.randn(4, 5, 4, 4)
        with Operations() as operations:
            module(images).backward(gradient)
        return [name for name in operations.names if not any(word in name for word in FREE)]

    for names in run_ranks(body, 2):
        assert len(names) <= 35, names  # three of them are of the gradients of this test


def test_compiles_into_one_graph():
    def body(rank):
        torch.manual_seed(rank)
        images, results, graphs = torch.randn(3 + rank, 5, 4, 4), [], []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        for compiled in (False, True):
            module = convert_sync_batchnorm(norm(torch.nn.BatchNorm2d).float())
            if compiled:
                module.compile(fullgraph=True, backend=count)
            share = images.clone().requires_grad_()
            outputs = module(share)
            outputs.square().sum().backward()
            results.append([outputs, share.grad, *module.buffers()])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
        return len(graphs)

    assert run_ranks(body, 2) == [1, 1]
