"""SyncBatchNorm: several ranks compute what one process computes, and no host waits for a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes import run_ranks
from utils.errors import UserError
from utils.sync_batchnorm import SyncBatchNorm, _Normalize, convert_sync_batchnorm

SHARES = [slice(0, 2), slice(2, 5), slice(5, 9)]  # unequal
IMAGES, VECTORS = (9, 5, 4, 3), (9, 5)
CASES = {  # name: shape, dtype, options of the BatchNorm, tolerance
    "float64": (IMAGES, torch.float64, {}, 1e-9),
    "vectors": (VECTORS, torch.float64, {}, 1e-9),
    "no momentum": (IMAGES, torch.float64, {"momentum": None}, 1e-9),
    "not affine": (IMAGES, torch.float64, {"affine": False}, 1e-9),
    "no statistics": (IMAGES, torch.float64, {"track_running_stats": False}, 1e-9),
    "float32": (IMAGES, torch.float32, {}, 1e-4),
    "bfloat16": (IMAGES, torch.bfloat16, {}, 0.03),
}
TRAINED = {"both": (True, True), "the bias": (False, True), "the weight": (True, False)}


def make(shape, dtype=torch.float64, trained=(True, True), **options):
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    torch.manual_seed(1)
    module = kind(5, **options).to(torch.promote_types(dtype, torch.float32))
    for parameter, is_trained in zip(module.parameters(), trained, strict=False):
        nn.init.normal_(parameter).requires_grad_(is_trained)
    return module


def train(module, shape, dtype, share=slice(None), layout=torch.contiguous_format):
    """Two steps. Outputs, gradient of the inputs, and outputs in an evaluation; gradients of the
    parameters; buffers."""
    torch.manual_seed(0)
    batches, gradient = torch.randn(2, *shape) * 3 + 10, torch.randn(shape)
    for inputs in batches.to(dtype):
        inputs = inputs[share].contiguous(memory_format=layout).requires_grad_()
        outputs = module(inputs)
        outputs.backward(gradient[share].to(dtype))
    assert outputs.dtype == inputs.grad.dtype == dtype
    local = [outputs, inputs.grad]
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    if module.track_running_stats:
        local.append(module.eval()(inputs))
    groups = local, gradients, module.buffers()
    return [[tensor.detach().double() for tensor in group] for group in groups]


def compare(ranks, alone, tolerance):
    """Assert that ranks, which have returned what train() has, equal one process."""
    for rank, (local, _, buffers) in enumerate(ranks):
        expected = [tensor[SHARES[rank]] for tensor in alone[0]]
        torch.testing.assert_close(local, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(buffers, alone[2], rtol=tolerance, atol=tolerance)
    summed = [sum(parts) for parts in zip(*(rank[1] for rank in ranks), strict=True)]
    torch.testing.assert_close(summed, alone[1], rtol=tolerance, atol=10 * tolerance)


def test_ranks_equal_one_process_with_the_whole_batch():
    def body(rank):
        found = {}
        for name, (shape, dtype, options, _) in CASES.items():
            module = convert_sync_batchnorm(make(shape, dtype, **options))
            found[name] = train(module, shape, dtype, SHARES[rank])
        for name, trained in TRAINED.items():
            module = convert_sync_batchnorm(make(IMAGES, trained=trained))
            found[name] = train(module, IMAGES, torch.float64, SHARES[rank])
        module = convert_sync_batchnorm(make(IMAGES))
        layout = torch.channels_last
        found["layout"] = train(module, IMAGES, torch.float64, SHARES[rank], layout)
        found["unsynchronized"] = train(make(IMAGES), IMAGES, torch.float64, SHARES[rank])
        return found

    ranks = run_ranks(body, 3)
    for name, (shape, dtype, options, tolerance) in CASES.items():
        alone = train(make(shape, dtype, **options), shape, dtype)
        compare([rank[name] for rank in ranks], alone, tolerance)
    for name, trained in TRAINED.items():
        alone = train(make(IMAGES, trained=trained), IMAGES, torch.float64)
        assert len(alone[1]) == sum(trained)
        compare([rank[name] for rank in ranks], alone, 1e-9)
    alone = train(make(IMAGES), IMAGES, torch.float64)
    compare([rank["layout"] for rank in ranks], alone, 1e-9)
    with pytest.raises(AssertionError):  # this test would notice a mistake
        compare([rank["unsynchronized"] for rank in ranks], alone, 0.01)


def test_single_process_and_evaluation_are_those_of_batchnorm():
    plain, synced = make(IMAGES), convert_sync_batchnorm(make(IMAGES))
    images = torch.randn(IMAGES).double()
    assert synced(images).equal(plain(images))
    assert synced.eval()(images).equal(plain.eval()(images))
    with pytest.raises(ValueError, match="2D"):
        synced(torch.zeros(3))


# The model


def test_module_keeps_its_hooks_its_aliases_and_its_names():
    block = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5, eps=0.01).eval())
    model, seen = nn.ModuleDict({"block": block, "head": nn.SyncBatchNorm(5)}), []
    model.alias = norm = block[1]
    norm.register_forward_hook(lambda *_: seen.append(1))
    weight, names = norm.weight, list(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    assert block[1] is model.alias is norm and type(norm) is type(model["head"]) is SyncBatchNorm
    assert norm.weight is weight and list(model.state_dict()) == names
    assert (norm.eps, norm.training, model["head"].training) == (0.01, False, True)
    norm(torch.zeros(2, 5, 1, 1))
    assert seen == [1]
    convert_sync_batchnorm(model)


class BatchNormAct2d(nn.BatchNorm2d):
    """Like timm's: the activation would be lost."""

    def forward(self, images):
        return super().forward(images).relu()


class Renamed(nn.BatchNorm2d):
    """Computes what its base computes."""


def test_subclass_that_computes_more_is_refused():
    model = nn.Sequential(Renamed(5), nn.Sequential(nn.Identity(), BatchNormAct2d(5)))
    with pytest.raises(UserError, match=r"1\.1 .*BatchNormAct2d.*--no-sync-bn"):
        convert_sync_batchnorm(model)
    convert_sync_batchnorm(model[:1])


def test_ddp_broadcasts_only_buffers_that_may_differ():
    def body(rank):
        model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))
        model.register_buffer("other", torch.full((1,), rank))
        before = len(DistributedDataParallel(model).modules_buffers)
        wrapped = DistributedDataParallel(convert_sync_batchnorm(model))
        wrapped(torch.randn(4, 3, 2, 2))
        return before, len(wrapped.modules_buffers), model.other.item()

    assert run_ranks(body, 2) == [(4, 1, 0)] * 2


# Speed

# Operations that launch nothing.
FREE = (
    "view",
    "split",
    "unbind",
    "detach",
    "alias",
    "expand",
    "squeeze",
    "select",
    "empty",
    "device",
)
WAITS = ("_local_scalar_dense", "nonzero", "index", "masked_select", "unique")


class Operations(TorchDispatchMode):
    """Records the names of the operations, and each tensor that is created from Python numbers or
    copied from one device to another."""

    def __init__(self):
        super().__init__()
        self.names, self.copies = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        self.names.append(name)
        is_moved = "_to_copy" in name and result.device != args[0].device
        if "lift_fresh" in name or is_moved:
            self.copies.append(name)
        return result


def record_operations(momentum, dtype):
    """Of forward and backward on CUDA tensors that exist in name only."""
    with FakeTensorMode():
        module = SyncBatchNorm(5, momentum=momentum, device="cuda")
        images, mean = torch.empty(8, 5, 4, 4, device="cuda", dtype=dtype), module.weight.detach()
        context = SimpleNamespace(  # without a GPU, autograd cannot call backward() itself
            saved_tensors=(images, module.weight, mean, mean, mean.sum()),
            needs_input_grad=(True, True, True),
            eps=1e-5,
        )
        with Operations() as operations:
            outputs = module(images)
            gradient, *_ = _Normalize.backward(context, torch.empty_like(outputs))
    assert outputs.dtype == gradient.dtype == dtype
    return operations.names, operations.copies


def test_host_never_waits_for_the_gpu():
    def body(rank):
        library = torch.library.Library("aten", "IMPL", "Meta")  # the kernel has no such version

        def update_stats(images, mean, var, momentum):
            return images.new_empty(2, images.shape[1], dtype=torch.float32).unbind()

        library.impl("batch_norm_update_stats", update_stats)
        dtypes = torch.float32, torch.bfloat16
        return [record_operations(m, dtype) for m in (None, 0.1) for dtype in dtypes]

    for results in run_ranks(body, 2):
        for names, copies in results:
            assert copies == []
            assert [name for name in names if any(wait in name for wait in WAITS)] == []
            collectives = [name.split(".")[1] for name in names if name.startswith("c10d")]
            assert collectives == ["_allgather_base_", "allreduce_"]
            launches = [name for name in names if not any(word in name for word in FREE)]
            assert len(launches) <= 40, launches


def test_compiles_without_graph_breaks():
    def body(rank):
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        eager, compiled = (convert_sync_batchnorm(make(IMAGES)) for _ in range(2))
        compiled.compile(fullgraph=True, backend=count)
        ours, theirs = (train(m, IMAGES, torch.float64, SHARES[rank]) for m in (compiled, eager))
        torch.testing.assert_close(ours, theirs)
        return len(graphs)

    assert run_ranks(body, 2) == [2, 2]  # of training and of evaluation
