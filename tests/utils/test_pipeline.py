"""Pipeline parallelism: the stages compute what the whole model computes."""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn

import tasks.diffusion
import tasks.images
import tasks.segmentation
from tasks.images.small_models import vit_tiny
from tests.forked import (
    FIVE_STEPS,
    ROUNDING,
    assert_resumes,
    fork_script,
    largest_difference,
    same_bits,
    without_seconds,
)
from tests.processes import run_ranks
from utils.checkpoint import read_checkpoint
from utils.config import Config
from utils.errors import UserError
from utils.optim import build_optimizer
from utils.rungs.pipeline import (
    SCHEDULES,
    Pipeline,
    PipelineSettings,
    check_layers,
)


@dataclass(frozen=True)
class PipelineConfig(PipelineSettings, Config):
    """What load_config() makes of both."""


CPU = torch.device("cpu")
VIT = {"model": "vit_tiny", "dtype": "float64", "lr": 0.1, "micro_batches": 3}


def test_no_module_of_a_task_has_the_name_of_a_function():
    """Its first import would replace the function: tasks.images.layers() could be called once."""
    functions = {"loss", "count", "measure", "summarize", "describe", "blocks", "layers"}
    for package in (tasks.images, tasks.segmentation, tasks.diffusion):
        modules = {path.stem for path in Path(package.__file__).parent.glob("*.py")}
        assert not modules & functions


class Averaging(torchvision.models.VisionTransformer):
    def forward(self, images):
        tokens = self._process_input(images)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
        return self.heads(self.encoder(tokens).mean(1))


def test_model_with_a_forward_of_its_own_is_refused():
    """It looks like a sequence of layers whose order is known, and computes something else."""
    torch.manual_seed(0)
    model = Averaging(8, 4, 2, 2, 8, 16, num_classes=10)  # torchvision's has a head of zeros
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match="Averaging"):
        check_layers(model, tasks.images.layers, torch.randn(2, 3, 8, 8))
    assert same_bits(before, model.state_dict())
    assert model.training


def test_inputs_must_be_one_tensor():
    with pytest.raises(UserError, match="one tensor"):
        build_pipeline(nn.Linear(3, 2), list, {"image": torch.zeros(2, 3)})


def make_pipeline(**settings):
    torch.manual_seed(0)
    model = vit_tiny(10, 8).double()
    nn.init.normal_(model.heads.head.weight)
    images = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    return build_pipeline(model, tasks.images.layers, images, **settings)


def build_pipeline(model, layers_of, inputs, **settings):
    """As train_pp.py does, for batches of 6 samples."""
    cfg = PipelineConfig(global_batch_size=6, **settings)
    loader = SimpleNamespace(
        dataset=range(2), examples=lambda indices: [(inputs, None)], prepare=tuple
    )
    return Pipeline(model, layers_of, loader, CPU, cfg)


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


TASK = SimpleNamespace(loss=cross_entropy, measure=lambda outputs, _: {"outputs": outputs.sum(0)})


def test_each_rank_keeps_its_own_stages():
    def body(rank):
        pipelines = [make_pipeline(schedule=s, micro_batches=2) for s in SCHEDULES[1:3]]
        return [[name for name, _ in p.module.named_parameters()] for p in pipelines]

    ranks = run_ranks(body, 2)
    names = [name for name, _ in vit_tiny(10, 8).named_parameters()]
    for number, layers in enumerate((["0", "2"], ["2", "0"])):  # one stage per rank, and two
        first, second = (rank[number] for rank in ranks)
        assert sorted(first + second) == sorted(names)
        assert "class_token" in first and "heads.head.weight" in second
        for part, layer in zip((first, second), layers, strict=True):
            assert f"encoder.layers.encoder_layer_{layer}.ln_1.weight" in part


class Tied(nn.Module):
    """A model whose last layer has the weight of its first one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight

    def layers(self):
        modules = (self.embedding, self.first, self.second, self.output)
        return [(module, [module]) for module in modules]

    def forward(self, tokens):
        return self.output(self.second(self.first(self.embedding(tokens))))


def train_tied(rank, is_divided=True):
    """The weights after three steps, in which gradients are clipped."""
    torch.manual_seed(0)
    model = whole = Tied().double()
    if is_divided:
        options = {"schedule": "GPipe", "micro_batches": 6}
        whole = build_pipeline(model, Tied.layers, torch.tensor([1, 2]), **options)
    optimizer = build_optimizer(whole, PipelineConfig(lr=0.1, dtype="float64"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(5, (6,), generator=generator)
        optimizer.zero_grad()
        if is_divided:
            whole.step(tokens, tokens, TASK, 6)
            whole.clip_grad_norm_(0.1)
        else:
            (cross_entropy(model(tokens), tokens) / 6).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.2
        optimizer.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_parameter_of_two_stages_stays_tied():
    """Its gradient is the sum of both uses, and the norm of all gradients has it once. The last
    rank holds nothing else."""
    expected, stages = train_tied(0, is_divided=False), run_ranks(train_tied, 4)
    assert set().union(*stages) == expected.keys()
    for stage in stages:
        for name, value in stage.items():
            assert abs(value - expected[name]).max() < ROUNDING, name
    assert (stages[0]["embedding.weight"] == stages[3]["output.weight"]).all()


def test_ranks_draw_different_random_numbers_in_each_step():
    """With the same seed, they would drop the same elements in different layers."""

    def body(rank):
        pipeline, seeds = make_pipeline(micro_batches=3), []
        for _ in range(2):
            torch.manual_seed(5)  # as the loader does, alike on all ranks
            images, labels = torch.zeros(6, 3, 8, 8).double(), torch.zeros(6, dtype=int)
            pipeline.step(images, labels, TASK, 6)
            seeds.append(torch.initial_seed())
        return seeds

    (first, again), (second, _) = run_ranks(body, 2)
    assert first == again and first != second


def test_numbers_that_do_not_fit_are_named():
    def body(rank):
        with pytest.raises(UserError, match="8 stages"):
            make_pipeline(micro_batches=6, schedule="Interleaved1F1B")
        with pytest.raises(UserError, match="--schedule 1F1B"):
            make_pipeline(micro_batches=2, schedule="1F1B")
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)  # as of a frozen backbone
        with pytest.raises(UserError, match="rank 0 would"):
            build_pipeline(model, tasks.images.layers, torch.zeros(2, 3))

    assert run_ranks(body, 4) == [None] * 4


# Runs


def weights(run):
    assert (run.code, run.stderr) == (0, "")
    return read_checkpoint(run.output_dir / "last.pt")["model"]


CLIPPED = FIVE_STEPS | VIT | {"synthetic_samples": 54, "clip_norm": 0.5}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    flags = {name: value for name, value in CLIPPED.items() if name != "micro_batches"}
    return fork_script("train_1gpu.py", output_dir=tmp_path_factory.mktemp("1gpu") / "run", **flags)


def without_sending_outputs():
    """For fork_script(before=...): for a language model, those of a batch may be gigabytes."""
    import utils.rungs.pipeline

    def broadcast(tensor, source):
        assert tensor.numel() <= 3, tensor.shape
        return dist.broadcast(tensor, source)

    utils.rungs.pipeline.dist = SimpleNamespace(**vars(dist) | {"broadcast": broadcast})


def test_pipeline_trains_the_same_weights(reference, tmp_path):
    """tests/test_same_curve.py has other schedules."""
    flags = CLIPPED | {"schedule": "GPipe", "micro_batches": 4, "output_dir": tmp_path / "run"}
    run = fork_script("train_pp.py", 2, without_sending_outputs, **flags)
    assert largest_difference(weights(run), weights(reference)) < ROUNDING
    for row, other in zip(without_seconds(run.rows), without_seconds(reference.rows), strict=True):
        assert row.pop("world_size") == 2 and other.pop("world_size") == 1
        assert row == pytest.approx(other, rel=ROUNDING)
    assert "2 stages of 3, 3" in run.stdout


def test_batchnorm_sees_each_batch_once(tmp_path):
    """Also the first one, from which PyTorch infers the shapes of the activations."""
    flags = FIVE_STEPS | {"dtype": "float64", "epochs": 1}
    reference = fork_script("train_1gpu.py", output_dir=tmp_path / "reference", **flags)
    flags |= {"schedule": "GPipe", "micro_batches": 1}
    run = fork_script("train_pp.py", 2, output_dir=tmp_path / "run", **flags)
    assert largest_difference(weights(run), weights(reference)) < ROUNDING


@pytest.mark.slow
def test_killed_and_resumed_run_matches_an_uninterrupted_one(tmp_path):
    flags = {"dtype": "float32", "optimizer": "adamw", "lr": 0.001, "clip_norm": 0.5}
    assert_resumes(tmp_path, "train_pp.py", 2, audit=True, **VIT | flags)
