"""The task of experts: who computes what, and the loss that balances them."""

import pytest
import torch
from torch.nn.functional import gelu

import tasks.moe
from tasks.moe import IGNORED, Mixture, balance_loss
from tests.processes import run_ranks
from utils.config import load_config
from utils.errors import UserError
from utils.rungs.accumulation import AccumulationSettings


@pytest.fixture
def cfg():
    return load_config(tasks.moe.Settings, argv=["--layers=2", "--width=8", "--heads=2"])


def mixture(shared=False):
    torch.manual_seed(0)
    module = Mixture(4, 8, shared).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module, torch.randn(2, 5, 8, dtype=torch.float64)


def mlp(experts, number, token):
    up, up_bias, down, down_bias = (p[number] for p in experts.parameters())
    return gelu(token @ up + up_bias) @ down + down_bias


@pytest.mark.parametrize("shared", [False, True])
def test_each_byte_gets_the_outputs_of_its_two_most_probable_experts(shared):
    module, hidden = mixture(shared)
    mixed, probabilities = module(hidden)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    for position in [(0, 0), (0, 4), (1, 2)]:
        token, each = hidden[position], probabilities[position]
        first, second = each.topk(2).indices
        total = each[first] + each[second]
        expected = each[first] / total * mlp(module.experts, first, token)
        expected += each[second] / total * mlp(module.experts, second, token)
        if shared:
            expected += mlp(module.shared, 0, token)
        torch.testing.assert_close(mixed[position], expected)


def batch(samples=4):
    """Probabilities of two blocks' routers, and targets of which some are padding."""
    generator = torch.Generator().manual_seed(0)
    router = torch.rand(samples, 6, 2, 3, dtype=torch.float64, generator=generator).softmax(-1)
    targets = torch.zeros(samples, 6, dtype=torch.long)
    targets[0, 2:] = targets[3, 5:] = IGNORED
    return router, targets


def test_balance_is_the_product_of_two_means_over_the_targets():
    router, targets = batch()
    real = router[targets != IGNORED]  # (targets, blocks, experts)
    expected = 0
    for block in range(2):
        chosen = real[:, block].topk(2).indices.flatten()
        uses = chosen.bincount(minlength=3) / len(chosen)
        expected += 3 * (uses * real[:, block].mean(0)).sum() / 2
    torch.testing.assert_close(balance_loss(router, targets) / len(real), expected)


def test_balance_is_that_of_the_global_batch():
    """The ranks' sums add up to it, though each sees other experts used, and has other numbers of
    targets."""
    whole = balance_loss(*batch())

    def body(rank):
        router, targets = batch()
        return balance_loss(router[rank::2], targets[rank::2])

    torch.testing.assert_close(sum(run_ranks(body, 2)), whole, rtol=1e-12, atol=0)


def test_balance_of_micro_batches_is_said(capsys):
    """It is not that of the global batch."""
    flags = ["--layers=1", "--width=8", "--heads=2", "--micro-batches=2"]
    for extra in ([], ["--balance=0"]):
        cfg = load_config(tasks.moe.Settings, AccumulationSettings, argv=flags + extra)
        tasks.moe.build_model(cfg, None)
        assert ("--balance 0" in capsys.readouterr().out) == (not extra)


def test_balance_is_trained_and_logged_but_not_evaluated(cfg):
    model = tasks.moe.build_model(cfg, None)
    targets = torch.arange(12).view(3, 4)
    outputs = model(targets)
    loss, measured = tasks.moe.loss(outputs, targets), tasks.moe.measure(outputs, targets)
    sums = {"loss": loss.detach(), "count": tasks.moe.count(targets), **measured}
    trained = tasks.moe.summarize(sums)
    model.eval()
    outputs = model(targets)
    assert outputs.keys() == {"logits"} and tasks.moe.measure(outputs, targets) == {}
    evaluated = tasks.moe.summarize({"loss": tasks.moe.loss(outputs, targets), "count": 12})
    assert trained["loss"] == pytest.approx(evaluated["loss"] + trained["balance"])
    assert trained["perplexity"] == pytest.approx(evaluated["perplexity"])
    assert 0 < trained["balance"] < 3 * cfg.balance


def test_every_parameter_is_initialized(cfg):
    for name, parameter in tasks.moe.build_model(cfg, None).named_parameters():
        assert parameter.isfinite().all()
        is_zero = not parameter.any()
        assert is_zero == name.endswith("bias"), name


def test_models_that_cannot_be_divided_are_refused(cfg):
    model = tasks.moe.build_model(cfg, None)
    with pytest.raises(UserError, match=r"router.*train_ep\.py"):
        tasks.moe.layers(model)
    with pytest.raises(UserError, match=r"2 attention heads .* 3 ranks: .*--heads"):
        tasks.moe.tensor_parallel_plan(model, 3)
