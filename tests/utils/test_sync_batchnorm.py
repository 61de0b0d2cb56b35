"""SyncBatchNorm: several ranks compute what one process computes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run_ranks
from utils.distributed import all_reduce, dp_rank, set_data_parallel_group
from utils.errors import UserError
from utils.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

SHARES = [slice(0, 2), slice(2, 5), slice(5, 9)]  # unequal
IMAGES, VECTORS = (9, 5, 4, 3), (9, 5)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.03}
CASES = [
    {},
    {"layout": torch.channels_last},
    {"shape": VECTORS},
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"trained": (True, False)},  # the weight, and not the bias
    {"trained": (), "affine": False},
    {"momentum": None},
    {"track_running_stats": False},
]


def make(shape=IMAGES, dtype=torch.float64, trained=(True, True), **options):
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    torch.manual_seed(1)
    module = kind(5, **options).to(torch.promote_types(dtype, torch.float32))
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


def assert_equals_one_process(rank, layout=None, shape=IMAGES, dtype=torch.float64, **options):
    share, tolerance = SHARES[rank], TOLERANCES[dtype]
    module = convert_sync_batchnorm(make(shape, dtype, **options))
    local, gradients, buffers = train(module, shape, dtype, share, layout)
    whole, whole_gradients, whole_buffers = train(make(shape, dtype, **options), shape, dtype)
    whole = [tensor[share] for tensor in whole]
    torch.testing.assert_close(local, whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(buffers, whole_buffers, rtol=tolerance, atol=tolerance)
    sums = [all_reduce(gradient) for gradient in gradients]
    torch.testing.assert_close(sums, whole_gradients, rtol=tolerance, atol=10 * tolerance)


def test_ranks_equal_one_process_with_the_whole_batch():
    def body(rank):
        for case in CASES:
            assert_equals_one_process(rank, **case)

    assert run_ranks(body, 3) == [None] * 3


def test_ranks_that_share_a_replica_count_its_samples_once():
    """The unbiased variance depends on their number."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        set_data_parallel_group(mesh.get_group("data"))
        share = slice(0, 4) if dp_rank() == 0 else slice(4, 9)
        return train(convert_sync_batchnorm(make()), share=share)

    *_, expected = train(make())
    for *_, buffers in run_ranks(body, 4):
        torch.testing.assert_close(buffers, expected)


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
