"""SyncBatchNorm: several ranks compute what one process computes."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run_ranks
from utils.errors import UserError
from utils.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

SHARES = [slice(0, 2), slice(2, 5), slice(5, 9)]  # unequal
IMAGES, VECTORS = (9, 5, 4, 3), (9, 5)
CASES = [  # shape, dtype, whether the weight and the bias are trained, options, tolerance
    (IMAGES, torch.float64, (True, True), {}, 1e-9),
    (IMAGES, torch.float64, (False, True), {}, 1e-9),
    (IMAGES, torch.float64, (True, False), {}, 1e-9),
    (VECTORS, torch.float64, (True, True), {}, 1e-9),
    (IMAGES, torch.float64, (True, True), {"momentum": None}, 1e-9),
    (IMAGES, torch.float64, (), {"affine": False}, 1e-9),
    (IMAGES, torch.float64, (True, True), {"track_running_stats": False}, 1e-9),
    (IMAGES, torch.float32, (True, True), {}, 1e-4),
    (IMAGES, torch.bfloat16, (True, True), {}, 0.03),
]


def make(shape=IMAGES, dtype=torch.float64, trained=(True, True), options=None):
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    torch.manual_seed(1)
    module = kind(5, **options or {}).to(torch.promote_types(dtype, torch.float32))
    for parameter, is_trained in zip(module.parameters(), trained, strict=True):
        nn.init.normal_(parameter).requires_grad_(is_trained)
    return module


def train(module, shape=IMAGES, dtype=torch.float64, share=slice(None), layout=None):
    """Two steps. Outputs, gradient of the inputs, and outputs in an evaluation; gradients of the
    parameters; buffers."""
    torch.manual_seed(0)
    batches, gradient = torch.randn(2, *shape) * 3 + 10, torch.randn(shape)
    for batch in batches.to(dtype):
        inputs = batch[share]
        if layout:
            inputs = inputs.contiguous(memory_format=layout)
        inputs = inputs.detach().requires_grad_()
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
        found = []
        for shape, dtype, trained, options, _ in CASES:
            module = convert_sync_batchnorm(make(shape, dtype, trained, options))
            found.append(train(module, shape, dtype, SHARES[rank]))
        module = convert_sync_batchnorm(make())
        found.append(train(module, share=SHARES[rank], layout=torch.channels_last))
        return found

    *ranks_of_cases, ranks_of_layout = zip(*run_ranks(body, 3), strict=True)
    for ranks, (shape, dtype, trained, options, tolerance) in zip(
        ranks_of_cases, CASES, strict=True
    ):
        compare(ranks, train(make(shape, dtype, trained, options), shape, dtype), tolerance)
    compare(ranks_of_layout, train(make()), 1e-9)


def test_single_process_and_evaluation_are_those_of_batchnorm():
    plain, synced = make(), convert_sync_batchnorm(make())
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


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    def body(rank):
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        eager, compiled = (convert_sync_batchnorm(make()) for _ in range(2))
        compiled.compile(fullgraph=True, backend=count)
        ours, theirs = (train(m, share=SHARES[rank]) for m in (compiled, eager))
        torch.testing.assert_close(ours, theirs)
        return len(graphs)

    assert run_ranks(body, 2) == [2, 2]  # of training and of evaluation
