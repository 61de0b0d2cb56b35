"""SyncBatchNorm on CPU tensors: several ranks compute what one process computes."""

import pytest
import torch

from tests.launch import run_ranks
from utils.models import convert_sync_batchnorm
from utils.sync_batchnorm import SyncBatchNorm


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
        module = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(module))[0]
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
        module = SyncBatchNorm.convert_sync_batchnorm(plain)
        share = images[3 * rank : 3 * rank + 3].bfloat16().requires_grad_()
        outputs = module(share)
        outputs.sum().backward()
        assert outputs.dtype == share.grad.dtype == torch.bfloat16
        module.eval()
        assert module(images).shape == images.shape
        return (outputs.float() - expected[3 * rank : 3 * rank + 3]).abs().max().item()

    assert max(run_ranks(body, 2)) < 0.1
    synced = convert_sync_batchnorm(plain, torch.device("cpu"))
    assert list(synced.state_dict()) == names
    torch.testing.assert_close(synced(images), expected)
    again = convert_sync_batchnorm(plain, torch.device("cpu"))
    assert isinstance(again[0], SyncBatchNorm)
    with pytest.raises(ValueError, match="at least 2D input"):
        synced(torch.zeros(3))


def test_cuda_gets_pytorchs_own_module():
    on_cuda = convert_sync_batchnorm(torch.nn.BatchNorm2d(3), torch.device("cuda"))
    assert isinstance(on_cuda, torch.nn.SyncBatchNorm)
