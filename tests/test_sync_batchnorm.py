"""SyncBatchNorm: several ranks compute what one process computes, and no host waits for a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.launch import run_ranks
from utils.errors import UserError
from utils.sync_batchnorm import SyncBatchNorm, _Normalize, convert_sync_batchnorm


def norm(kind, **options):
    torch.manual_seed(1)
    module = kind(5, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


OPTIONS = ({}, {"momentum": None}, {"affine": False})
SHAPES = ((7, 5, 4, 3), (7, 5))
SHARES = {0: slice(0, 3), 1: slice(3, 7)}  # unequal


def train_two_steps(options, shape, share, sync):
    """Outputs and gradients of the images; gradients of the parameters; buffers."""
    torch.manual_seed(0)
    batches = torch.randn(2, *shape).double() * 3 + 1000
    gradient = torch.randn(shape).double()
    module = norm(torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d, **options)
    if sync:
        module = convert_sync_batchnorm(torch.nn.Sequential(module))[0]
    for images in batches:
        images = images[share].requires_grad_()
        outputs = module(images)
        outputs.backward(gradient[share])
    local, gradients = [outputs.detach(), images.grad], [p.grad for p in module.parameters()]
    return [[t.numpy() for t in group] for group in (local, gradients, list(module.buffers()))]


@pytest.mark.parametrize("sync", [True, False])
def test_two_ranks_equal_one_batchnorm_on_all_samples(sync):
    """Without synchronization, the comparison must fail: it would notice a bug."""
    cases = [(options, shape) for options in OPTIONS for shape in SHAPES]

    def body(rank):
        return [train_two_steps(*case, SHARES[rank], sync) for case in cases]

    by_rank = run_ranks(body, 2)
    for i, case in enumerate(cases):
        local, gradients, buffers = train_two_steps(*case, slice(None), sync=False)
        ranks = [results[i] for results in by_rank]
        pairs = []
        for rank, (other, _, other_buffers) in enumerate(ranks):
            shares = [tensor[SHARES[rank]] for tensor in local]
            pairs += zip(shares, other, strict=True)
            pairs += zip(buffers, other_buffers, strict=True)
        summed = [a + b for a, b in zip(ranks[0][1], ranks[1][1], strict=True)]
        pairs += zip(gradients, summed, strict=True)
        worst = max(float(abs(a - b).max()) for a, b in pairs)
        assert (worst < 1e-9) is sync, (case, worst)


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
    text = r"stem\.0\.1 is a BatchNormAct2d, which computes more than .* pass --no-sync-bn"
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
def test_host_never_waits_for_the_gpu(dtype):
    """The operations on CUDA tensors that exist in name only, on two ranks."""

    def body(rank):
        library = torch.library.Library("aten", "IMPL", "Meta")  # the kernel has no such version

        def update_stats(images, mean, var, momentum):
            return images.new_empty(2, images.shape[1], dtype=torch.float32).unbind()

        library.impl("batch_norm_update_stats", update_stats)
        with FakeTensorMode():
            module = SyncBatchNorm(5, momentum=None, device="cuda")
            images = torch.empty(8, 5, 4, 4, device="cuda", dtype=dtype)
            with Operations() as operations:
                outputs = module(images)
            # Without a GPU, autograd cannot call this itself.
            mean = torch.empty(5, device="cuda")
            context = SimpleNamespace(
                saved_tensors=(images, module.weight, mean, mean, mean.sum()),
                needs_input_grad=(True, True),
                eps=1e-5,
            )
            with operations:
                gradient, *_ = _Normalize.backward(context, torch.empty_like(outputs))
        assert outputs.dtype == gradient.dtype == dtype
        return operations.names, operations.copies

    for names, copies in run_ranks(body, 2):
        assert copies == []
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
        free = ("view", "split", "unbind", "detach", "alias", "expand", "empty", "promote_types")
        return [name for name in operations.names if not any(word in name for word in free)]

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
