"""Models, synchronised BatchNorm, the optimizer, and random numbers."""

import sys
import types

import pytest
import torch
import torchvision
from torch.nn.parallel import DistributedDataParallel

import utils.runtime
from tests.launch import run_ranks
from utils.distributed import UserError
from utils.models import build_model, convert_sync_batchnorm, prepare_ddp
from utils.optim import build_optimizer, build_scheduler
from utils.runtime import progress, seed_everything, seed_step
from utils.settings import Config
from utils.sync_batchnorm import SyncBatchNorm

CPU = torch.device("cpu")


# RegNets compute their widths with tensors and so cannot be built on the meta device.
NAMES = [
    name
    for name in torchvision.models.list_models(module=torchvision.models)
    if not name.startswith("regnet")
] + ["resnet9"]


@pytest.mark.parametrize("name", NAMES)
def test_any_model_by_name(name):
    size = 299 if name == "inception_v3" else 224
    with torch.device("meta"):
        model = _meta(Config(model=name, image_size=size))
        assert model.train()(torch.empty(2, 3, size, size)).shape == (2, 10)


def _meta(cfg):
    """build_model without weights: a meta tensor has no sum to compare over the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.models.all_gather_object", lambda value: [value])
        patch.setattr(torch.Tensor, "item", lambda tensor: 0.0)
        return build_model(cfg, 10)


def test_stems():
    model = build_model(Config(stem="cifar", dtype="float64"), 10)
    assert model.maxpool(model.conv1(torch.zeros(1, 3, 32, 32).double())).shape[2:] == (32, 32)
    with pytest.raises(UserError, match="stem=cifar is for ResNets, and vgg11 is none"):
        build_model(Config(model="vgg11", stem="cifar"), 10)
    with pytest.raises(
        UserError, match=r"'resnet17' is neither resnet20 nor resnet9 nor one of .*resnet18"
    ):
        build_model(Config(model="resnet17"), 10)


def test_planted_seed_per_rank_is_refused():
    def body(rank, per_rank):
        seed_everything(5 + per_rank * rank)
        try:
            return build_model(Config(), 10).fc.weight.sum().item()
        except UserError as error:
            return str(error)

    one, two = run_ranks(body, 2, False)
    assert one == two
    assert "drew different weights" in run_ranks(body, 2, True)[0]


def norm(kind, **options):
    torch.manual_seed(1)
    module = kind(5, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
@pytest.mark.parametrize("shape", [(7, 5, 4, 3), (7, 5)])
@pytest.mark.parametrize("sync", [True, False])
def test_ranks_together_equal_one_batchnorm_on_all(options, shape, sync):
    kind = torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d
    torch.manual_seed(0)
    batches = torch.randn(2, *shape).double() * 3 + 1000
    grad = torch.randn(shape).double()
    share = {0: slice(0, 3), 1: slice(3, 7)}  # unequal

    def run(module, part):
        for images in batches:
            images = images[part].requires_grad_()
            outputs = module(images)
            outputs.backward(grad[part])
        gradients = [p.grad for p in module.parameters()]
        return [outputs.detach(), images.grad], gradients, list(module.buffers())

    def body(rank):
        module = norm(kind, **options)
        if sync:
            module = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(module))[0]
        results = run(module, share[rank])
        return [[t.numpy() for t in group] for group in results]

    local, gradients, buffers = run(norm(kind, **options), slice(None))
    ranks = run_ranks(body, 2)
    worst = 0.0
    for rank, (theirs, _, their_buffers) in enumerate(ranks):
        pairs = [(mine[share[rank]], other) for mine, other in zip(local, theirs, strict=True)]
        pairs += zip(buffers, their_buffers, strict=True)
        worst = max(worst, *(float((a - torch.from_numpy(b)).abs().max()) for a, b in pairs))
    for i, gradient in enumerate(gradients):
        both = torch.from_numpy(ranks[0][1][i] + ranks[1][1][i])
        worst = max(worst, float((gradient - both).abs().max()))
    assert (worst < 1e-9) is sync, worst  # planted: BatchNorm of each rank alone differs


def test_synchronised_batchnorm_alone_in_eval_and_in_bfloat16():
    plain = torch.nn.Sequential(norm(torch.nn.BatchNorm2d)).float()
    names = list(plain.state_dict())
    images = torch.randn(6, 5, 4, 4)
    expected = plain(images)
    plain[0].reset_running_stats()

    def body(rank):
        module = SyncBatchNorm.convert_sync_batchnorm(plain)
        part = images[3 * rank : 3 * rank + 3].bfloat16().requires_grad_()
        outputs = module(part)
        outputs.sum().backward()
        assert outputs.dtype == part.grad.dtype == torch.bfloat16
        module.eval()
        assert module(images).shape == images.shape
        return (outputs.float() - expected[3 * rank : 3 * rank + 3]).abs().max().item()

    assert max(run_ranks(body, 2)) < 0.1
    synced = convert_sync_batchnorm(plain, CPU)
    assert list(synced.state_dict()) == names
    torch.testing.assert_close(synced(images), expected)
    assert isinstance(convert_sync_batchnorm(plain, CPU)[0], SyncBatchNorm)
    on_cuda = convert_sync_batchnorm(torch.nn.BatchNorm2d(3), torch.device("cuda"))
    assert isinstance(on_cuda, torch.nn.SyncBatchNorm)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        synced(torch.zeros(3))


def test_settled_buckets_add_up_the_same_at_every_step():
    def body(rank):
        torch.manual_seed(0)
        model = DistributedDataParallel(torchvision.models.resnet18(num_classes=4))
        before = [t.clone() for t in model.state_dict().values()]
        prepare_ddp(model, Config(image_size=32))
        same = all(
            torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True)
        )
        torch.manual_seed(rank)
        images, gradients = torch.randn(2, 3, 32, 32), []
        for _ in range(2):
            model.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))
            model.zero_grad()
            model(images).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        return same, all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    assert run_ranks(body, 3) == [(True, True)] * 3


def test_gradients_travel_in_the_precision_that_was_asked_for():
    def body(rank, dtype):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Conv2d(3, 4, 3))
        prepare_ddp(model, Config(image_size=8, gradient_dtype=dtype))
        torch.manual_seed(rank)
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        gradient = model.module.weight.grad
        return gradient, gradient.to(getattr(torch, dtype)).float()

    exact = run_ranks(body, 2, "float32")[0][0]
    for dtype in ("bfloat16", "float16"):
        (gradient, rounded), (other, _) = run_ranks(body, 2, dtype)
        assert torch.equal(gradient, rounded) and torch.equal(gradient, other)
        assert not torch.equal(gradient, exact)
        torch.testing.assert_close(gradient, exact, rtol=0.02, atol=0.001)


def rates(**options):
    cfg = Config(epochs=2, lr=1.0, **options)
    optimizer = build_optimizer(torch.nn.Linear(1, 1), cfg)
    scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=4)
    found = []
    for _ in range(8):
        found.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        scheduler.step()
    return found


def test_the_learning_rate_of_every_step():
    assert rates(lr_schedule="constant", warmup_epochs=0) == [1.0] * 8
    assert rates(lr_schedule="linear") == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    assert rates(lr_schedule="cosine") == [0.25, 0.5, 0.75, 1, 1, 0.854, 0.5, 0.146]


def test_a_skipped_first_step_leaves_clean_momentum():
    """Guards against fused SGD under a GradScaler, which then steps on uninitialised memory."""

    def train(optimizer, model):
        scaler = torch.amp.GradScaler("cpu")
        for factor in (float("inf"), 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 999)).sum() * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**15  # halved once
        return model.weight.detach()

    models = [torch.nn.Linear(999, 9) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    cfg = Config(lr=0.1, weight_decay=0.0)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    ours = train(build_optimizer(models[0], cfg), models[0])
    torch.testing.assert_close(ours, train(plain, models[1]))


def test_random_numbers_by_seed_epoch_step_and_rank():
    def body(rank):
        found = []
        for numbers in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0)):
            seed_step(*numbers)
            found.append(torch.rand(()).item())
        return found

    first, second = run_ranks(body, 2)
    assert first[0] == first[4]
    assert len({*first, *second}) == 8


def test_progress_for_a_log_and_for_a_person(monkeypatch, capsys):
    batches = [1, 2, 3]
    monkeypatch.setattr(utils.runtime, "SECONDS_BETWEEN_LINES", -1)
    assert list(progress(batches, "epoch 4")) == batches
    assert "epoch 4: step 2 of 3" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bars = []
    fake = types.SimpleNamespace(tqdm=lambda loader, **options: bars.append(options) or loader)
    monkeypatch.setitem(sys.modules, "tqdm", fake)
    assert list(progress(batches, "epoch 4", start=7)) == batches
    assert (bars[0]["desc"], bars[0]["initial"]) == ("epoch 4", 7)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress(batches, "epoch 4")) == batches
    assert "step 2 of 3" in capsys.readouterr().err
    monkeypatch.setattr(utils.runtime, "is_main_process", lambda: False)
    assert list(progress(batches, "epoch 4")) == batches
    assert capsys.readouterr().err == ""
