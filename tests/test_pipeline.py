"""Pipeline parallelism: the stages compute what the whole model computes, in every schedule."""

import os

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn

from tests.forked import (
    FIVE_STEPS,
    assert_resumes,
    fork_script,
    killed_at,
    largest_difference,
    same_bits,
    without_seconds,
)
from tests.launch import run_ranks
from tests.test_tensor_parallel import drop_in_all_layers
from utils.checkpoint import read_checkpoint
from utils.config import load_config
from utils.errors import UserError
from utils.pipeline import (
    SCHEDULES,
    Pipeline,
    PipelineConfig,
    Stage,
    clip_grad_norm_,
    hold_one_replica,
    layers_of,
)
from utils.small_models import ResNet9, ResNet20, vit_tiny

CPU = torch.device("cpu")
VIT = {"model": "vit_tiny", "dtype": "float64", "lr": 0.1, "micro_batches": 3}


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: ResNet20(10), 11),
        (lambda: ResNet9(10), 7),
        (torchvision.models.resnet18, 10),
        (lambda: vit_tiny(10, 32), 6),
    ],
    ids=["resnet20", "resnet9", "resnet18", "vit_tiny"],
)
def test_layers_run_in_order_and_hold_all_parameters_once(make, count):
    torch.manual_seed(0)
    model = make().eval()
    stage = Stage(layers_of(model))
    assert len(stage.functions) == count
    ours, theirs = list(stage.parameters()), list(model.parameters())
    assert len(ours) == len(theirs) and {*map(id, ours)} == {*map(id, theirs)}
    assert len(list(stage.buffers())) == len(list(model.buffers()))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(stage(images), model(images)) and stage(images).is_contiguous()


def test_models_of_unknown_order_are_refused():
    with pytest.raises(UserError, match="the order of the layers of a VGG is unknown"):
        layers_of(torchvision.models.vgg11())


def make_pipeline(**settings):
    torch.manual_seed(0)
    model = vit_tiny(10, 8).double()
    nn.init.normal_(model.heads.head.weight)
    cfg = PipelineConfig(**settings)
    return Pipeline(model, (6, 10), CPU, cfg)


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


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_are_clipped_by_the_norm_of_all_stages(max_norm):
    def gradients(model):
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def body(rank):
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=generator)
        labels, criterion = torch.arange(6), nn.CrossEntropyLoss()
        pipeline = make_pipeline(micro_batches=3)
        torch.manual_seed(0)
        whole = vit_tiny(10, 8).double()
        nn.init.normal_(whole.heads.head.weight)
        outputs = whole(images)
        criterion(outputs, labels).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        ours = pipeline.step(images, labels, criterion)
        torch.testing.assert_close(ours, outputs.detach())
        clip_grad_norm_(pipeline.parameters(), max_norm)
        ours, theirs = gradients(pipeline.module), gradients(whole)
        return largest_difference(ours, {name: theirs[name] for name in ours})

    for difference in run_ranks(body, 2):
        assert difference < 1e-12


def test_ranks_draw_different_random_numbers_in_each_step():
    """With the same seed, they would drop the same elements in different layers."""

    def body(rank):
        pipeline, seeds = make_pipeline(micro_batches=3), []
        for _ in range(2):
            torch.manual_seed(5)  # as the loader does, alike on all ranks
            images, labels = torch.zeros(6, 3, 8, 8).double(), torch.zeros(6, dtype=int)
            pipeline.step(images, labels, nn.CrossEntropyLoss())
            seeds.append(torch.initial_seed())
        return seeds

    (first, again), (second, _) = run_ranks(body, 2)
    assert first == again and first != second


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"micro_batches": 4},
            "6 samples are not 4 equal micro-batches",
        ),
        ({"micro_batches": 6, "schedule": "Interleaved1F1B"}, "6 layers cannot be cut into 8 st"),
        ({"micro_batches": 2, "schedule": "1F1B"}, "--schedule 1F1B on 4 ranks: .*2.*4"),
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_are_named(settings, message):
    for error in run_ranks(lambda rank: make_pipeline(**settings), 4):
        assert isinstance(error, UserError)
        with pytest.raises(UserError, match=message):
            raise error


@pytest.mark.parametrize("flag", ["--no-save-sharded", "--compile=default"])
def test_files_of_one_stage_and_compiled_stages_are_refused(flag, capfd):
    with pytest.raises(SystemExit, match="2"):
        load_config(PipelineConfig, [flag])
    assert "a pipeline needs --save-sharded and --compile none" in capfd.readouterr().err


def test_all_ranks_see_all_batches():
    from utils import distributed

    def body(rank):
        hold_one_replica()
        return distributed.dp_rank(), distributed.dp_world_size()

    assert run_ranks(body, 3) == [(0, 1)] * 3


# Runs


def weights(run):
    assert (run.code, run.stderr) == (0, "")
    return read_checkpoint(run.output_dir / "last.pt")["model"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_the_same_weights(schedule, tmp_path):
    flags = FIVE_STEPS | VIT | {"synthetic_samples": 54, "clip_norm": 0.5}
    reference = {k: v for k, v in flags.items() if k != "micro_batches"}
    reference = fork_script("train_1gpu.py", output_dir=tmp_path / "reference", **reference)
    flags |= {"schedule": schedule, "micro_batches": 4}
    run = fork_script("train_pp.py", 2, output_dir=tmp_path / "run", **flags)
    assert largest_difference(weights(run), weights(reference)) < 1e-13
    for row, other in zip(without_seconds(run.rows), without_seconds(reference.rows), strict=True):
        assert row.pop("world_size") == 2 and other.pop("world_size") == 1
        assert row == pytest.approx(other, rel=1e-9)
    count = 2 if schedule in SCHEDULES[:2] else 4
    sizes = {2: "3, 3", 4: "1, 2, 1, 2"}[count]
    text = f"ranks: 2 = 1 data x 2 pipeline, {count} stages of {sizes} layers\nmodel: vit_tiny"
    assert run.stdout.startswith(text)


def test_batchnorm_sees_each_batch_once(tmp_path):
    """Also the first one, from which PyTorch infers the shapes of the activations."""
    flags = FIVE_STEPS | {"dtype": "float64"}
    reference = fork_script("train_1gpu.py", output_dir=tmp_path / "reference", **flags)
    flags |= {"schedule": "GPipe", "micro_batches": 1}
    run = fork_script("train_pp.py", 3, output_dir=tmp_path / "run", **flags)
    assert largest_difference(weights(run), weights(reference)) < 1e-12


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, {"optimizer": "adamw", "lr": 0.001, "clip_norm": 0.5, "audit": True}),
        (3, {"model": "resnet20", "schedule": "Interleaved1F1B", "micro_batches": 3}),
    ],
    ids=str,
)
def test_killed_and_resumed_run_matches_an_uninterrupted_one(nproc, flags, tmp_path):
    assert_resumes(tmp_path, "train_pp.py", nproc, **VIT | {"dtype": "float32"} | flags)


def test_dropout_continues_after_a_resume(tmp_path):
    flags = FIVE_STEPS | VIT

    def kill():
        drop_in_all_layers()
        killed_at(1, 3)()

    straight, dead = (
        fork_script("train_pp.py", 2, before, output_dir=tmp_path / before.__name__, **flags)
        for before in (drop_in_all_layers, kill)
    )
    assert dead.code == -9
    resumed = fork_script("train_pp.py", 2, drop_in_all_layers, output_dir=dead.output_dir, **flags)
    assert "from epoch 1, step 2" in resumed.stdout
    assert same_bits(weights(resumed), weights(straight))


def test_run_moves_between_scripts(tmp_path):
    flags = FIVE_STEPS | VIT | {"epochs": 3}
    flags.pop("micro_batches")
    reference = fork_script("train_1gpu.py", output_dir=tmp_path / "straight", **flags)
    flags |= {"output_dir": tmp_path / "moved"}
    legs = [
        ("train_1gpu.py", None, (0, 2), {}),
        ("train_pp.py", 2, (1, 2), {"micro_batches": 3}),
        ("train_ddp.py", 2, (1, 4), {}),
        ("train_pp.py", 3, (2, 2), {"schedule": "Interleaved1F1B", "micro_batches": 6}),
        ("train_mp.py", None, None, {"micro_batches": 6}),
    ]
    for script, nproc, end, others in legs:
        run = fork_script(script, nproc, end and killed_at(*end), **flags | others)
        assert run.code == (-9 if end else 0), run.stderr
    assert largest_difference(weights(run), weights(reference)) < 1e-12
    for row, other in zip(without_seconds(run.rows), without_seconds(reference.rows), strict=True):
        assert row | {"world_size": 1} == pytest.approx(other, rel=1e-9)


def test_weights_of_any_stage_that_are_not_finite_are_never_saved(tmp_path):
    def spoil():
        import utils.pipeline

        real = utils.pipeline.Pipeline.step

        def step(pipeline, *arguments):
            outputs = real(pipeline, *arguments)
            if dist.get_rank() == 1:
                next(pipeline.parameters()).data.fill_(float("nan"))
            return outputs.nan_to_num()

        utils.pipeline.Pipeline.step = step

    run = fork_script("train_pp.py", 2, spoil, output_dir=tmp_path / "run", **FIVE_STEPS | VIT)
    assert run.code == 1 and "the model is no longer finite" in run.stderr
    assert not os.path.exists(tmp_path / "run" / "last.pt")
