"""The runs that verify compares, and how far their results may differ."""

from typing import NamedTuple

from tools.lessons import LADDER, ONE_PROCESS

# One small run: BatchNorm, momentum, clipping and augmentation. Two epochs of 8 steps; 6 of the 150
# samples are dropped in each, and no number of ranks divides the 37 validation samples evenly.
BASE = {
    "dataset": "synthetic",
    "synthetic_samples": 150,
    "image_size": 16,
    "model": "resnet20",
    "epochs": 2,
    "global_batch_size": 18,
    "lr": 0.01,
    "clip_norm": 2.0,
    "dtype": "float64",
    "timeout": 60,
    "audit": True,
}
STEPS, TRAINED, DROPPED, VALIDATED = 8, 144, 6, 37  # per epoch

# float64: rounding (1e-16) grows to 1e-14 in the weights of this run; different samples change
# them by more than 1e-2. The next two tolerances are for losses.
FLOAT64 = 1e-9
# float32: rounding sometimes changes the sign of a ReLU's input, which adds or removes one of the
# 18 x 16 x 16 terms of a bias's gradient: 1 / sqrt(4608) = 1.5 % of it. Such a gradient moves the
# loss by 1.5 % of the change made by training, which is 3 %: 5e-4. It may happen repeatedly: over
# eight seeds, the largest of 32 differences was 1.3e-3. The tolerance is three times that.
FLOAT32 = 4e-3
# bfloat16: the logits have 8 bits. One unit in the last place, relative to the loss.
BFLOAT16 = 2**-8


class Case(NamedTuple):
    """A row of the table: a run, and what to compare it with."""

    name: str
    script: str
    nproc: int | None  # None: started without torchrun
    flags: dict
    tolerance: float = FLOAT64  # relative: of the losses and, in float64, of the weights
    reference: str | None = "1gpu"  # None: there is nothing to compare with
    resumes: bool = False  # continue the run of KILLED


# GroupNorm, so that micro-batches compute what the whole batch would.
GROUP = {"model": "resnet20_gn"}
# A transformer, for scripts that split its layers. The gradients of some steps are clipped.
VIT = {"model": "vit_tiny", "lr": 0.05, "clip_norm": 1.5}
STAGES = {"micro_batches": 6, "save_sharded": True}  # of train_pp.py, whose ranks save their own
# The Verifier writes the file of pretrained weights.
FINETUNE = {"weights": "FILE"}
FROZEN = FINETUNE | {"freeze": "backbone", "optimizer": "adamw"}
# In a CUDA graph, learning rates are float32: these, multiples of 2**-10, are not rounded.
LINEAR = {"lr": 2**-7, "lr_schedule": "linear"}
CASES = [
    Case("1gpu_graph", "train_1gpu_graph.py", None, LINEAR, reference="1gpu, linear"),
    Case("dp", "train_dp.py", None, {}),
    Case("ddp x1", "train_ddp.py", 1, {}),
    Case("ddp x2", "train_ddp.py", 2, {"loader": "workers", "num_workers": 1}),
    Case("ddp x3", "train_ddp.py", 3, {}),
    Case("ddp x2, BatchNorm per rank", "train_ddp.py", 2, {"sync_bn": False}, reference=None),
    Case("ddp x2, float32", "train_ddp.py", 2, {"dtype": "ieee"}, FLOAT32, "1gpu, float32"),
    # Autocast leaves float64 unchanged and the scale is a power of two: scaling, unscaling and
    # clipping in the right order change nothing.
    Case("amp x2, float16", "train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
    Case(
        "amp x2, bfloat16",
        "train_ddp_amp.py",
        2,
        {"dtype": "float32", "amp_dtype": "bfloat16"},
        BFLOAT16,
        "1gpu, bfloat16",
    ),
    Case(
        "accum x2",
        "train_ddp_accum.py",
        2,
        GROUP | {"micro_batches": 2},
        reference="1gpu, GroupNorm",
    ),
    Case("spawn x2", "train_ddp_spawn.py", None, {"spawn_processes": 2}),
    Case("mp, 2 stages", "train_mp.py", None, {"devices": "cpu,cpu"}),
    Case(
        "mp, micro-batches",
        "train_mp.py",
        None,
        GROUP | {"devices": "cpu,cpu", "micro_batches": 4},
        reference="1gpu, GroupNorm",
    ),
    Case("ddp_mp x2, 2 stages", "train_ddp_mp.py", 2, {"devices": "cpu,cpu"}),
    Case("fsdp x2", "train_fsdp.py", 2, {}),
    Case("fsdp x2, 2 replicas", "train_fsdp.py", 2, {"fsdp_size": 1}),
    Case("tp x2", "train_tp.py", 2, VIT, reference="1gpu, ViT"),
    Case("fsdp_tp x4, 2 x 2", "train_fsdp_tp.py", 4, VIT | {"fsdp_size": 2}, reference="1gpu, ViT"),
    Case("pp x2, 1F1B", "train_pp.py", 2, VIT | STAGES, reference="1gpu, ViT"),
    Case(
        "pp x2, interleaved",
        "train_pp.py",
        2,
        VIT | STAGES | {"schedule": "Interleaved1F1B"},
        reference="1gpu, ViT",
    ),
    Case("pp x3, ResNet", "train_pp.py", 3, GROUP | STAGES, reference="1gpu, GroupNorm"),
    Case("ddp x2, pretrained", "train_ddp.py", 2, FINETUNE, reference="1gpu, pretrained"),
    Case("ddp x2, frozen backbone", "train_ddp.py", 2, FROZEN, reference="1gpu, frozen"),
    Case("killed, resumed x2", "train_ddp.py", 2, {}, resumes=True),
    Case("killed, resumed x3", "train_ddp.py", 3, {}, resumes=True),
]
AUTOCAST_COPY = "train_1gpu_autocast.py"  # the Verifier writes it
REFERENCES = [
    Case("1gpu", "train_1gpu.py", None, {}),
    Case("1gpu, linear", "train_1gpu.py", None, LINEAR),
    Case("1gpu, GroupNorm", "train_1gpu.py", None, GROUP),
    Case("1gpu, ViT", "train_1gpu.py", None, VIT),
    Case("1gpu, pretrained", "train_1gpu.py", None, FINETUNE),
    Case("1gpu, frozen", "train_1gpu.py", None, FROZEN),
    Case("1gpu, float32", "train_1gpu.py", None, {"dtype": "ieee"}),
    Case("1gpu, bfloat16", AUTOCAST_COPY, None, {"dtype": "float32"}),
]
KILLED = Case("killed", "train_ddp.py", 2, {"save_steps": 3})  # killed within the first epoch

# For --matrix: every script trains the same run, to be continued by every other.
MATRIX_FLAGS = {
    "train_ddp_spawn.py": {"spawn_processes": 2},
    "train_ddp_amp.py": {"amp_dtype": "float16"},
    "train_ddp_accum.py": {"micro_batches": 2},
    "train_mp.py": {"devices": "cpu,cpu", "micro_batches": 2},
    "train_ddp_mp.py": {"devices": "cpu,cpu", "micro_batches": 2},
    "train_fsdp.py": {"save_sharded": True},
    "train_fsdp_tp.py": {"fsdp_size": 2},
    "train_pp.py": {"micro_batches": 2, "save_sharded": True},
}
FOUR_PROCESSES = ("train_fsdp_tp.py",)
WITHOUT_TORCHRUN = (*ONE_PROCESS, "train_ddp_spawn.py")


def matrix_cases(scripts=None):
    """One Case per script (default: all), each named after its script."""
    return [
        Case(
            rung.script.removesuffix(".py"),
            rung.script,
            None if rung.script in WITHOUT_TORCHRUN else 4 if rung.script in FOUR_PROCESSES else 2,
            VIT | {"keep_last": 2} | MATRIX_FLAGS.get(rung.script, {}),
            reference="1gpu, ViT",
        )
        for rung in LADDER
        if rung.script in (scripts or [rung.script])
    ]
