"""Context parallelism: together, the ranks' positions compute what one process computes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tasks.text
from tests.forked import fork_script, killed_at, largest_difference
from tests.processes import run_ranks
from tests.recipes import TEXT, run_text_to_end, with_task
from tools.verify.run import project_with_task
from utils.errors import UserError
from utils.rungs.context_parallel import _GatheredAttention, gather, own_part

TOLERANCE = 1e-12
FLAGS = {"clip_norm": 0.5, "padding": "context"}


def test_chunks_are_balanced_and_gathered_in_order():
    def body(rank):
        positions = torch.arange(12.0).view(1, 12, 1)
        own = own_part(positions)
        seen = sum(own.flatten().tolist()) + own.numel()  # keys that these queries see
        return seen, torch.equal(gather(own, 1), positions)

    assert run_ranks(body, 3) == [(26, True)] * 3


def own(tensor):
    """This rank's positions of queries, keys, values or outputs."""
    return own_part(tensor.detach().transpose(1, 2)).transpose(1, 2)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_and_its_gradients_are_those_of_the_whole(is_causal):
    def body(rank):
        torch.manual_seed(0)
        whole = list(torch.randn(3, 2, 3, 8, 4, dtype=torch.float64))
        parts = [own(tensor) for tensor in whole]
        for tensor in whole + parts:
            tensor.requires_grad_()
        expected = scaled_dot_product_attention(*whole, is_causal=is_causal)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        with _GatheredAttention():
            outputs = scaled_dot_product_attention(*parts, is_causal=is_causal)
        (outputs * own(weights)).sum().backward()
        assert_close(outputs, own(expected))
        for part, tensor in zip(parts, whole, strict=True):
            assert_close(part.grad, own(tensor.grad))

    assert run_ranks(body, 2) == [None, None]


def test_masks_and_dropout_are_refused():
    def body(rank):
        queries = torch.zeros(1, 1, 4, 2)
        for options in ({"attn_mask": torch.ones(4, 4)}, {"dropout_p": 0.5}):
            with pytest.raises(UserError, match="is_causal"), _GatheredAttention():
                scaled_dot_product_attention(queries, queries, queries, **options)

    assert run_ranks(body, 1) == [None]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The path of a copy of a script, for the text task."""
    folder = project_with_task("images", tmp_path_factory.mktemp("project") / "copy")
    return lambda name: with_task(folder / name, "tasks.text")


@pytest.fixture(scope="module")
def one(script, tmp_path_factory):
    """The run of one process, and its last checkpoint."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return run_text_to_end(script("train_1gpu.py"), None, folder, **FLAGS)


def test_killed_run_is_resumed_on_another_number_of_ranks(script, one, tmp_path):
    flags = FLAGS | {"save_steps": 2}
    dead, _ = run_text_to_end(script("train_cp.py"), 2, tmp_path / "run", killed_at(1, 3), **flags)
    assert dead.stderr == "" and "= 1 replicas x " in dead.stdout
    run, end = run_text_to_end(script("train_cp.py"), 1, tmp_path / "run", **FLAGS)
    assert "from epoch 1, step 2" in run.stdout
    assert largest_difference(end["model"], one[1]["model"]) < TOLERANCE
    for ours, theirs in zip(run.rows, one[0].rows, strict=True):
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=TOLERANCE)
        assert ours["train_samples"] == theirs["train_samples"]


def pack_attention():
    """For fork_script(before=...): attention of the whole sequence, in a module of PyTorch's."""
    init = tasks.text.Attention.__init__

    def make(self, *arguments):
        init(self, *arguments)
        self.packed = nn.MultiheadAttention(self.query.in_features, 1, batch_first=True)

    tasks.text.Attention.__init__ = make
    tasks.text.Attention.forward = lambda self, hidden: self.packed(hidden, hidden, hidden)[0]


def test_what_cannot_be_divided_is_refused(script, tmp_path):
    cp = script("train_cp.py")

    def refused(name, before=None, script=cp, **flags):
        settings = TEXT | {"text_file": "", "padding": "context"} | flags
        run = fork_script(script, 2, before, settings=settings, output_dir=tmp_path / name)
        assert run.code == 1 and run.stderr.count("error") == 1, run.stderr
        return run.stderr

    line = refused("length", context=26)
    assert "26" in line and "4 chunks" in line and "--padding context" in line
    assert "--padding context" in refused("longest", padding="longest")
    assert "--dropout 0" in refused("dropout", dropout=0.1)
    assert "scaled_dot_product_attention" in refused("packed", pack_attention)
