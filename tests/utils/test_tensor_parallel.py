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
ADAMW = {"optimizer": "adamw", "lr": 0.001}


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


def test_split_model_computes_the_whole_one():
    """Also with dropout: the ranks draw the masks of a run on one rank, and keep their parts."""

    def compare(dropouts):
        models, results = make_pair(*dropouts), []
        assert largest_difference(*map(whole_tensors, models)) == 0
        torch.manual_seed(1)
        images = torch.randn(5, 3, 8, 8, dtype=torch.float64)
        for model in models:
            torch.manual_seed(2)
            outputs = model(images)
            outputs.square().sum().backward()
            results.append((outputs, whole_tensors(model, gradients=True)))
            model.eval()
            results[-1] += (model(images),)
        (outputs, gradients, evaluated), (others, other_gradients, other_evaluated) = results
        torch.testing.assert_close(outputs, others)
        torch.testing.assert_close(evaluated, other_evaluated)
        return largest_difference(gradients, other_gradients)

    def body(rank):
        return max(compare(dropouts) for dropouts in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.3)))

    for difference in run_ranks(body, 2):
        assert difference < ROUNDING


def test_each_rank_holds_its_slices():
    def body(rank):
        whole, split = make_pair()
        block, local = split.encoder.layers[0], {}
        for name, parameter in block.named_parameters():
            tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            full = whole.encoder.layers[0].get_parameter(name)
            local[name] = full.numel() / tensor.numel()
        return local

    for local in run_ranks(body, 2):
        sliced = {name for name, part in local.items() if part == 2}
        assert sliced == {
            "self_attention.in_proj_weight",
            "self_attention.in_proj_bias",
            "self_attention.out_proj.weight",
            "mlp.0.weight",
            "mlp.0.bias",
            "mlp.3.weight",
        }
        assert {part for name, part in local.items() if name not in sliced} == {1}


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


def drop_in_all_layers():
    """For fork_script(before=...): dropout everywhere in the ViT."""
    import tasks.images.small_models

    real = tasks.images.small_models.vit_tiny

    def build(num_classes, image_size):
        model = real(num_classes, image_size)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.1
        return model

    tasks.images.small_models.vit_tiny = build


def train(folder, script, nproc, before, **flags):
    """The weights that a run of one epoch reaches."""
    flags = FIVE_STEPS | VIT | {"lr": 0.1, "epochs": 1} | flags
    run = fork_script(script, nproc, before, output_dir=folder / script, **flags)
    assert (run.code, run.stderr) == (0, "")
    return read_checkpoint(run.output_dir / "last.pt")["model"]


@pytest.mark.slow
@pytest.mark.rare
def test_dropout_is_that_of_a_run_with_one_rank_per_replica(tmp_path):
    one = train(tmp_path, "train_1gpu.py", None, drop_in_all_layers)
    tensor = train(tmp_path, "train_tp.py", 2, drop_in_all_layers)
    assert largest_difference(tensor, one) < ROUNDING
    two = train(tmp_path, "train_ddp.py", 2, drop_in_all_layers)
    both = train(tmp_path, "train_fsdp_tp.py", 4, drop_in_all_layers, fsdp_size=2)
    assert largest_difference(both, two) < ROUNDING
    assert largest_difference(two, one) > 1e-4  # each replica drops elements of its own


def add_batchnorm():
    """For fork_script(before=...): BatchNorm behind the ViT's first convolution."""
    import tasks.images.small_models

    real = tasks.images.small_models.vit_tiny

    def build(num_classes, image_size):
        model = real(num_classes, image_size)
        model.conv_proj = nn.Sequential(model.conv_proj, nn.BatchNorm2d(model.hidden_dim))
        return model

    tasks.images.small_models.vit_tiny = build


@pytest.mark.slow
def test_batchnorm_counts_the_samples_of_a_replica_once(tmp_path):
    """Its unbiased variance depends on their number."""
    ours = train(tmp_path, "train_fsdp_tp.py", 4, add_batchnorm, fsdp_size=2)
    theirs = train(tmp_path, "train_1gpu.py", None, add_batchnorm)
    assert "conv_proj.1.running_var" in ours
    assert largest_difference(ours, theirs) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        ("train_tp.py", 2, {"save_sharded": True, "audit": True}),
        pytest.param(
            "train_fsdp_tp.py",
            4,
            {"fsdp_size": 2, "clip_norm": 0.5, "save_sharded": True} | ADAMW,
            marks=pytest.mark.rare,
        ),
    ],
    ids=["tp", "fsdp_tp"],
)
def test_killed_and_resumed_run_matches_an_uninterrupted_one(script, nproc, flags, tmp_path):
    assert_resumes(tmp_path, script, nproc, model="vit_tiny", epochs=1, **flags)


@pytest.mark.slow
@pytest.mark.rare
def test_bfloat16_and_offload_differ_by_rounding(tmp_path):
    flags = FIVE_STEPS | {"model": "vit_tiny", "lr": 0.1, "epochs": 1, "fsdp_size": 1}
    lower = flags | {"fsdp_dtype": "bfloat16", "fsdp_offload": True}
    full, mixed = (
        fork_script("train_fsdp_tp.py", 2, output_dir=tmp_path / name, **settings)
        for name, settings in (("full", flags), ("mixed", lower))
    )
    assert (full.stderr, mixed.stderr) == ("", "")
    assert 0 < abs(mixed.rows[0]["train_loss"] / full.rows[0]["train_loss"] - 1) < 2**-5
    model = read_checkpoint(mixed.output_dir / "last.pt")["model"]
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}


@pytest.mark.slow
def test_run_moves_between_scripts(tmp_path):
    flags = FIVE_STEPS | VIT | {"lr": 0.1}
    reference = fork_script("train_1gpu.py", output_dir=tmp_path / "straight", **flags)
    flags |= {"output_dir": tmp_path / "moved"}
    legs = [
        ("train_1gpu.py", None, (0, 2), {}),
        ("train_tp.py", 2, (0, 4), {"save_sharded": True}),
        ("train_fsdp_tp.py", 4, (1, 2), {"fsdp_size": 2, "save_sharded": True}),
        ("train_ddp.py", 2, None, {}),
    ]
    for script, nproc, end, others in legs:
        run = fork_script(script, nproc, end and killed_at(*end), **flags | others)
        assert run.code == (-9 if end else 0), run.stderr
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt") for r in (run, reference))
    assert largest_difference(ours["model"], theirs["model"]) < ROUNDING
    for row, other in zip(without_seconds(run.rows), without_seconds(reference.rows), strict=True):
        assert row | {"world_size": 1} == pytest.approx(other, rel=ROUNDING)
