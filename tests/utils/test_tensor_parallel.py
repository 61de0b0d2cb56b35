"""Tensor parallelism: together, the ranks' slices of a ViT's blocks compute the whole blocks."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import tasks.images
from tasks.images.small_models import vit_tiny
from tests.forked import (
    FIVE_STEPS,
    ROUNDING,
    assert_resumes,
    fork_script,
    killed_at,
    largest_difference,
    without_seconds,
)
from tests.processes import run_ranks
from utils.checkpoint import read_checkpoint
from utils.errors import UserError
from utils.rungs.tensor_parallel import (
    clip_grad_norm_,
    divide_layers,
    head_order,
    init_mesh,
)

CPU = torch.device("cpu")
VIT = {"model": "vit_tiny", "dtype": "float64"}


def make_pair(dropout=0.0, attention_dropout=0.0):
    """A ViT with random weights, and a copy of it that is split over all ranks."""
    torch.manual_seed(0)
    whole = vit_tiny(10, image_size=8).double()
    nn.init.normal_(whole.heads.head.weight)  # zeros would leave the layers before without gradient
    for module in whole.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = attention_dropout
            nn.init.normal_(module.in_proj_bias)
    split = copy.deepcopy(whole)
    divide(split)
    return whole, split


def divide(model):
    """As train_tp.py does."""
    mesh = init_mesh(CPU, data=1)["tensor"]
    divide_layers(tasks.images.tensor_parallel_plan(model, mesh.size()), mesh)


def whole_tensors(model, gradients=False):
    """{name: full tensor} of parameters or their gradients, rows in PyTorch's order."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
            if "in_proj" in name:
                attention = model.get_submodule(name.rpartition(".")[0])
                tensor = tensor[head_order(attention).argsort()]
        tensors[name] = tensor
    return tensors


def train_and_evaluate(model, images):
    torch.manual_seed(2)
    outputs = model(images)
    outputs.square().sum().backward()
    return outputs, model.eval()(images)


def test_split_model_computes_the_whole_one():
    """Also with dropout: the ranks draw the masks of a run on one rank, and keep their parts."""

    def body(rank):
        for dropouts in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.3)):
            whole, split = make_pair(*dropouts)
            assert largest_difference(whole_tensors(split), whole_tensors(whole)) == 0
            images = torch.randn(5, 3, 8, 8, dtype=torch.float64)
            expected = train_and_evaluate(whole, images)
            torch.testing.assert_close(train_and_evaluate(split, images), expected)
            gradients = whole_tensors(split, True), whole_tensors(whole, True)
            assert largest_difference(*gradients) < ROUNDING

    assert run_ranks(body, 2) == [None, None]


def test_each_rank_holds_its_slices():
    def body(rank):
        _, split = make_pair()
        sliced = set()
        for name, parameter in split.encoder.layers[0].named_parameters():
            is_divided = isinstance(parameter, DTensor)
            if is_divided and 2 * parameter.to_local().numel() == parameter.numel():
                sliced.add(name)
        assert sliced == {
            "self_attention.in_proj_weight",
            "self_attention.in_proj_bias",
            "self_attention.out_proj.weight",
            "mlp.0.weight",
            "mlp.0.bias",
            "mlp.3.weight",
        }

    assert run_ranks(body, 2) == [None, None]


def test_models_that_cannot_be_split_are_refused():
    model = vit_tiny(10, image_size=8)
    model.encoder.layers[1].mlp[0] = nn.Linear(64, 127)
    with pytest.raises(UserError, match="127 MLP columns"):
        tasks.images.tensor_parallel_plan(model, 2)
    with pytest.raises(UserError, match="tensor_parallel_plan"):
        divide_layers([], mesh=None)


def test_all_ranks_get_the_same_bits_of_cudnn():
    """For the layers that each of them computes whole."""

    def body(rank):
        cudnn = torch.backends.cudnn
        cudnn.benchmark = True
        divide(vit_tiny(10, image_size=8))
        return cudnn.deterministic, cudnn.benchmark

    assert run_ranks(body, 2) == [(True, False)] * 2


def test_frozen_weights_stay_frozen():
    def body(rank):
        model = vit_tiny(10, image_size=8).requires_grad_(False)
        model.heads.requires_grad_(True)
        divide(model)
        model(torch.ones(2, 3, 8, 8)).sum().backward()
        assert clip_grad_norm_(model.parameters(), 1.0) > 0
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    assert run_ranks(body, 2) == [["heads.head.weight", "heads.head.bias"]] * 2


def test_groups_of_a_mesh_have_the_timeout():
    """Otherwise PyTorch's thirty minutes would pass before a job with a stopped rank ends."""

    def body(rank):
        group = init_mesh(CPU, data=2, timeout=2)["tensor"].get_group()
        start = time.monotonic()
        if rank == 0:  # rank 1 takes no part, but its connections stay open
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1), group=group)
        return time.monotonic() - start

    assert 1.5 < run_ranks(body, 4, timeout=300)[0] < 30


# Runs


@pytest.mark.slow
@pytest.mark.rare
def test_killed_and_resumed_run_matches_an_uninterrupted_one(tmp_path):
    flags = {"model": "vit_tiny", "epochs": 1, "save_sharded": True, "audit": True}
    assert_resumes(tmp_path, "train_tp.py", 2, **flags)


@pytest.mark.slow
def test_run_moves_between_scripts_that_divide_the_model(tmp_path):
    flags = FIVE_STEPS | VIT | {"lr": 0.1, "epochs": 3}
    reference = fork_script("train_1gpu.py", output_dir=tmp_path / "straight", **flags)
    flags |= {"output_dir": tmp_path / "moved"}
    legs = [
        ("train_1gpu.py", None, (0, 2), {}),
        ("train_tp.py", 2, (0, 4), {"save_sharded": True}),
        ("train_pp.py", 2, (1, 2), {"micro_batches": 6}),
        ("train_fsdp_tp.py", 4, (1, 4), {"fsdp_size": 2, "save_sharded": True}),
        ("train_pp.py", 3, (2, 2), {"schedule": "Interleaved1F1B", "micro_batches": 6}),
        ("train_ddp.py", 2, None, {}),
    ]
    for script, nproc, end, others in legs:
        run = fork_script(script, nproc, end and killed_at(*end), **flags | others)
        assert run.code == (-9 if end else 0), run.stderr
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt") for r in (run, reference))
    assert largest_difference(ours["model"], theirs["model"]) < ROUNDING
    for row, other in zip(without_seconds(run.rows), without_seconds(reference.rows), strict=True):
        assert row | {"world_size": 1} == pytest.approx(other, rel=ROUNDING)
