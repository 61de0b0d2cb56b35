"""A model that holds inf or NaN is never saved."""

import pytest
import torch

from tests.processes import run_ranks
from tests.utils.test_checkpoint import checkpointer, make_state, outcome
from utils.checkpoint_file import read_checkpoint
from utils.errors import UserError
from utils.finite import RefuseNonFinite


def watched(folder, state):
    return checkpointer(folder, state, [RefuseNonFinite()])


@pytest.mark.parametrize(
    ("place", "value", "name"),
    [
        ("weight", "inf", "0.weight"),
        ("buffer", "nan", "1.running_var"),
        ("momentum", "nan", "0.weight (momentum_buffer)"),
    ],
)
def test_values_that_are_not_finite_are_never_saved(place, value, name, tmp_path):
    def body(rank):
        state = make_state()
        model = state["model"]
        tensor = {
            "weight": model[0].weight.data,
            "buffer": model[1].running_var,
            "momentum": state["optimizer"].state[model[0].weight]["momentum_buffer"],
        }[place]
        writer = watched(tmp_path, state)
        writer.load()
        tensor.view(-1)[-1] = float(value)
        return outcome(lambda: writer.save(1))

    for kind, text in run_ranks(body, 2):
        assert kind is UserError and f"no longer finite: {name} " in text
        assert " 1 tensors " in text and "--lr" in text and "--clip-norm" in text
    assert not list(tmp_path.glob("*.pt"))


def state_with_buffer(buffer):
    state = make_state()
    state["model"].register_buffer("extra", buffer)
    return state


def test_buffer_that_is_not_finite_by_design_is_saved(tmp_path):
    """Such as a causal mask; everything else is still looked at."""
    mask = torch.full((3, 3), float("-inf")).triu(1)
    state = state_with_buffer(mask)
    writer = watched(tmp_path, state)
    writer.load()
    writer.save(1)
    writer.wait()
    assert torch.equal(read_checkpoint(tmp_path / "last.pt")["model"]["extra"], mask)
    resumed = watched(tmp_path, state_with_buffer(mask.clone()))
    assert resumed.load() == 1
    resumed.save(2)
    resumed.model[1].running_mean[0] = float("inf")
    with pytest.raises(UserError, match=r"1\.running_mean .* 1 tensors .*--clip-norm"):
        resumed.save(3)


def test_weights_are_never_infinite_by_design(tmp_path):
    state = make_state()
    state["model"][0].weight.data[0, 0] = float("nan")
    writer = watched(tmp_path, state)
    writer.load()
    with pytest.raises(UserError, match=r"0\.weight .* 1 tensors .*--clip-norm"):
        writer.save(1)


@pytest.mark.parametrize("value", [complex("nan"), complex(0, float("inf"))])
def test_complex_values_that_are_not_finite_are_noticed(value, tmp_path):
    buffer = torch.ones(2, dtype=torch.complex64)
    state = state_with_buffer(buffer)
    writer = watched(tmp_path, state)
    writer.load()
    writer.save(1)
    state["model"].extra[1] = value
    with pytest.raises(UserError, match=r"extra .* 1 tensors .*--clip-norm"):
        writer.save(2)
