"""The runs that verify compares, for each task, and how far their results may differ."""

from typing import NamedTuple

from tools.lib.ladder import LADDER, ONE_PROCESS

# float64: rounding (1e-16) grows to less than 1e-12 in the weights of these runs; different samples
# change them by more than 1e-2. The next two tolerances are for losses.
FLOAT64 = 1e-9
# float32: rounding sometimes changes the sign of a ReLU's input, which adds or removes one of the
# 18 x 16 x 16 terms of a bias's gradient: 1 / sqrt(4608) = 1.5 % of it. Such a gradient moves the
# loss by 1.5 % of the change made by training, which is 3 %: 5e-4. It may happen repeatedly: over
# eight seeds, the largest of 32 differences was 1.3e-3. The tolerance is three times that.
FLOAT32 = 4e-3
# bfloat16: the logits have 8 bits. One unit in the last place, relative to the loss.
BFLOAT16 = 2**-8

# What a resumed run needs, and so every checkpoint must hold: the names in a script's `state`.
STATE = ("model", "optimizer", "scheduler", "loader", "meter", "metrics", "data")
STATE_OF = {"train_ddp_amp.py": (*STATE, "scaler")}  # of scripts that have others
ONE_FILE = ("one_file/train_ddp.py", "one_file/train_fsdp.py")
ONE_FILE_STATE = ("model", "optimizer", "scheduler", "epoch", "step", "sums", "settings")
STATE_OF |= dict.fromkeys(ONE_FILE, ONE_FILE_STATE)


# Moments of a run of one's own script (tools/verify/own.py): what happens then.
EPOCH_END = "resumed at the end of an epoch"
BEFORE_SAVE = "killed in front of the save of an epoch"
WITHIN_EPOCH = "evaluates within the epoch"


class Case(NamedTuple):
    """A row of the table: a run, and what to compare it with."""

    name: str
    script: str
    nproc: int | None  # None: started without torchrun
    flags: dict
    tolerance: float = FLOAT64  # relative: of the losses and, in float64, of the weights
    reference: str | None = "1gpu"  # None: there is nothing to compare with
    resumes: "Case | None" = None  # a run that is killed within its second epoch, and continued
    dropped: int | None = None  # samples, where the dataset has not as many as the suite's
    moment: str = ""  # one of the above


SAVED = {"save_steps": 3}
KILLED = Case("killed", "train_ddp.py", 2, SAVED)


class Suite(NamedTuple):
    """The cases of a task."""

    task: str
    base: dict  # the flags of all runs
    steps: int  # per epoch, as are the next three: numbers of samples
    trained: int
    dropped: int
    validated: int
    cases: list
    references: list
    best: tuple  # the validation metric that decides which epoch is the best, and max or min
    exact: tuple  # the metrics that must not differ at all: numbers of correct predictions
    left_out: dict  # {what has no row: the reason}

    @property
    def epochs(self):
        """The number of epochs of a run."""
        return self.base["epochs"]


# Two epochs of 6 steps. One sample more would make a seventh step: if a sampler repeats samples so
# that all ranks have the same number, there is one. No number of ranks divides the validation
# samples evenly. The gradients of about half of the steps are clipped: if all were, a wrong scale
# would not show.
COMMON = {
    "epochs": 2,
    "global_batch_size": 18,
    "dtype": "float64",
    "timeout": 60,
    "audit": True,
}

NO_EXPERTS = "its models have no experts to divide"
NO_SEQUENCES = "an image is not a sequence that a causal mask divides"

# images: BatchNorm, momentum, augmentation, and clipping, without which some runs train.
# With GroupNorm, micro-batches compute what the whole batch would.
GROUP = {"model": "resnet20_gn", "clip_norm": 0}
# A transformer, for scripts that split its layers.
VIT = {"model": "vit_tiny", "lr": 0.05, "clip_norm": 2.2}
STAGES = {"micro_batches": 6, "save_sharded": True}  # of train_pp.py, whose ranks save their own
# The Verifier writes the file of pretrained weights.
FINETUNE = {"weights": "FILE", "clip_norm": 0}
FROZEN = FINETUNE | {"freeze": "backbone", "optimizer": "adamw"}
# In a CUDA graph, learning rates are float32: these, multiples of 2**-10, are not rounded.
LINEAR = {"lr": 2**-7, "lr_schedule": "linear"}
# The Verifier writes these, and the files of shards.
AUTOCAST_COPY = "train_1gpu_autocast.py"
COPIES = {  # {a copy: (the script, what differs in it: the order of the samples, or the task)}
    f"{stem}_{order}.py": (f"{stem}.py", order)
    for stem in ("train_1gpu", "train_ddp")
    for order in ("shards", "weighted", "buckets")
}
COPIES |= {
    f"train_{name}_terms.py": (f"train_{name}.py", "terms")
    for name in ("1gpu", "1gpu_graph", "ddp", "ddp_accum", "fsdp", "pp")
}
# {a copy: (the script, the page of docs/recipes/ that is applied to it)}
RECIPES = {
    f"{stem}_{recipe.replace('-', '_')}.py": (f"{stem}.py", recipe)
    for stem, recipe in (
        ("train_fsdp", "fsdp-accumulation"),
        ("train_ddp", "mixtures"),
        *((f"train_{name}", "muon") for name in ("1gpu", "ddp", "fsdp", "tp")),
    )
}
SHARDS_COPY = "train_ddp_shards.py"
SHARDS = {"dataset": "shards", "data_dir": "FILES", "loader": "workers"}
TO_SHARDS = {"reference": "1gpu, shards"}
SHARDS_KILLED = Case("shards killed", SHARDS_COPY, 2, SHARDS | SAVED)
# A loss of two terms, one of which has no targets in some batches, and a model of its own.
TERMS = {"clip_norm": 2.0}
TO_TERMS = {"reference": "1gpu, two terms"}
TERMS_KILLED = Case("terms killed", "train_ddp_terms.py", 2, TERMS | SAVED)
WEIGHTED_KILLED = Case("weighted killed", "train_ddp_weighted.py", 2, SAVED)
ONE_FILE_COPY = "train_1gpu_one_file.py"
# The scripts of one_file/ train a task defined there, on any number of processes.
SMALL = {"clip_norm": 3.03}
TO_SMALL = {"reference": "1gpu, one file"}
STOPPED = Case("one_file ddp stopped", ONE_FILE[0], 2, SMALL)
FSDP_STOPPED = Case("one_file fsdp stopped", ONE_FILE[1], 2, SMALL)
# Small updates amplify rounding less. The tolerances have been measured with these.
FLOAT32_RUN = {"dtype": "ieee", "clip_norm": 2.0}
BFLOAT16_RUN = {"dtype": "float32", "clip_norm": 2.0}
# With images this small, gradients overflow in the first steps: the GradScaler lowers its scale.
# The last steps, which would be skipped without it, have a learning rate that matters.
OVERFLOW = {
    "dtype": "float32",
    "amp_dtype": "float16",
    "image_size": 4,
    "lr": 0.05,
    "lr_schedule": "constant",
}
STAGED = {"devices": "cpu,cpu"}
TO_VIT = {"reference": "1gpu, ViT"}
TO_GROUP = {"reference": "1gpu, GroupNorm"}

IMAGES = Suite(
    task="images",
    base=COMMON
    | {
        "dataset": "synthetic",
        "synthetic_samples": 125,
        "image_size": 16,
        "model": "resnet20",
        "lr": 0.01,
        "clip_norm": 4.6,
    },
    steps=6,
    trained=108,
    dropped=17,
    validated=31,
    best=("accuracy", max),
    exact=("accuracy",),
    cases=[
        Case("1gpu_graph", "train_1gpu_graph.py", None, LINEAR, reference="1gpu, linear"),
        Case("dp", "train_dp.py", None, {}),
        Case("ddp x1", "train_ddp.py", 1, {}),
        Case("ddp x2", "train_ddp.py", 2, {"loader": "workers", "num_workers": 1}),
        Case("ddp x3", "train_ddp.py", 3, {}),
        Case("ddp x2, BatchNorm per rank", "train_ddp.py", 2, {"sync_bn": False}, reference=None),
        Case("ddp x2, float32", "train_ddp.py", 2, FLOAT32_RUN, FLOAT32, "1gpu, float32"),
        # Autocast leaves float64 unchanged and the scale is a power of two: scaling, unscaling and
        # clipping in the right order change nothing.
        Case("amp x2, float16", "train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
        Case(
            "amp x2, bfloat16",
            "train_ddp_amp.py",
            2,
            BFLOAT16_RUN | {"amp_dtype": "bfloat16"},
            BFLOAT16,
            "1gpu, bfloat16",
        ),
        Case("accum x2", "train_ddp_accum.py", 2, GROUP | {"micro_batches": 2}, **TO_GROUP),
        Case("spawn x2", "train_ddp_spawn.py", None, {"spawn_processes": 2}),
        Case("mp, 2 stages", "train_mp.py", None, STAGED),
        Case(
            "mp, micro-batches",
            "train_mp.py",
            None,
            GROUP | STAGED | {"micro_batches": 4},
            **TO_GROUP,
        ),
        Case("ddp_mp x2, 2 stages", "train_ddp_mp.py", 2, STAGED),
        Case("fsdp x2", "train_fsdp.py", 2, {}),
        Case("fsdp x2, 2 replicas", "train_fsdp.py", 2, {"fsdp_size": 1}),
        Case("tp x2", "train_tp.py", 2, VIT, **TO_VIT),
        Case("fsdp_tp x4, 2 x 2", "train_fsdp_tp.py", 4, VIT | {"fsdp_size": 2}, **TO_VIT),
        Case("pp x2, 1F1B", "train_pp.py", 2, VIT | STAGES, **TO_VIT),
        Case(
            "pp x2, interleaved",
            "train_pp.py",
            2,
            VIT | STAGES | {"schedule": "Interleaved1F1B"},
            **TO_VIT,
        ),
        Case("pp x3, ResNet", "train_pp.py", 3, GROUP | STAGES, **TO_GROUP),
        Case("ddp x2, pretrained", "train_ddp.py", 2, FINETUNE, reference="1gpu, pretrained"),
        Case("ddp x2, frozen backbone", "train_ddp.py", 2, FROZEN, reference="1gpu, frozen"),
        Case("killed, resumed x2", "train_ddp.py", 2, {}, resumes=KILLED),
        Case("killed, resumed x3", "train_ddp.py", 3, {}, resumes=KILLED),
        Case(
            "amp killed, resumed x2",
            "train_ddp_amp.py",
            2,
            OVERFLOW,
            BFLOAT16,  # on a CPU, the bits are the same; without its scale, the loss differs by 2 %
            "amp x2, uninterrupted",
            resumes=Case("amp killed", "train_ddp_amp.py", 2, OVERFLOW | SAVED),
        ),
        Case("ddp x2, shards", SHARDS_COPY, 2, SHARDS | {"num_workers": 1}, **TO_SHARDS),
        Case("ddp x3, shards", SHARDS_COPY, 3, SHARDS, **TO_SHARDS),
        Case(
            "shards killed, resumed x3",
            SHARDS_COPY,
            3,
            SHARDS,
            **TO_SHARDS,
            resumes=SHARDS_KILLED,
        ),
        Case(
            "weighted killed, resumed x3",
            "train_ddp_weighted.py",
            3,
            {},
            reference="1gpu, weighted",
            resumes=WEIGHTED_KILLED,
        ),
        Case("1gpu_graph, two terms", "train_1gpu_graph_terms.py", None, TERMS, **TO_TERMS),
        Case("ddp x3, two terms", "train_ddp_terms.py", 3, TERMS, **TO_TERMS),
        Case(
            "accum x2, two terms",
            "train_ddp_accum_terms.py",
            2,
            TERMS | {"micro_batches": 3},
            **TO_TERMS,
        ),
        Case("fsdp x2, two terms", "train_fsdp_terms.py", 2, TERMS, **TO_TERMS),
        Case("pp x2, two terms", "train_pp_terms.py", 2, TERMS | STAGES, **TO_TERMS),
        Case(
            "terms killed, resumed x3",
            "train_ddp_terms.py",
            3,
            TERMS,
            **TO_TERMS,
            resumes=TERMS_KILLED,
        ),
        Case("one_file ddp x1", ONE_FILE[0], 1, SMALL, **TO_SMALL),
        Case("one_file ddp x2", ONE_FILE[0], 2, SMALL | {"workers": 1}, **TO_SMALL),
        Case("one_file ddp x2, accum", ONE_FILE[0], 2, SMALL | {"micro_batches": 3}, **TO_SMALL),
        Case("one_file ddp, resumed x3", ONE_FILE[0], 3, SMALL, **TO_SMALL, resumes=STOPPED),
        Case("one_file fsdp x3", ONE_FILE[1], 3, SMALL | {"workers": 1}, **TO_SMALL),
        Case("one_file fsdp x2, accum", ONE_FILE[1], 2, SMALL | {"micro_batches": 3}, **TO_SMALL),
        Case("one_file fsdp, resumed x1", ONE_FILE[1], 1, SMALL, **TO_SMALL, resumes=FSDP_STOPPED),
    ],
    references=[
        Case("1gpu", "train_1gpu.py", None, {}),
        Case("1gpu, linear", "train_1gpu.py", None, LINEAR),
        Case("1gpu, GroupNorm", "train_1gpu.py", None, GROUP),
        Case("1gpu, ViT", "train_1gpu.py", None, VIT),
        Case("amp x2, uninterrupted", "train_ddp_amp.py", 2, OVERFLOW),
        Case("1gpu, pretrained", "train_1gpu.py", None, FINETUNE),
        Case("1gpu, frozen", "train_1gpu.py", None, FROZEN),
        Case("1gpu, float32", "train_1gpu.py", None, FLOAT32_RUN),
        Case("1gpu, bfloat16", AUTOCAST_COPY, None, BFLOAT16_RUN),
        Case("1gpu, shards", "train_1gpu_shards.py", None, SHARDS),
        Case("1gpu, weighted", "train_1gpu_weighted.py", None, {}),
        Case("1gpu, two terms", "train_1gpu_terms.py", None, TERMS),
        Case("1gpu, one file", ONE_FILE_COPY, None, SMALL),
    ],
    left_out={"ep": NO_EXPERTS, "cp": NO_SEQUENCES},
)

# text: every batch is padded to its longest sample, and the number of targets differs between the
# ranks and the micro-batches, except where all batches must have the same shape.
SAME_SHAPE = {"padding": "context"}
PACKED = {"text_file": "FOLDER"}  # the Verifier writes it: shards that hold as many pieces
PACKED_KILLED = Case("packed killed", "train_ddp.py", 2, PACKED | SAVED)
PACKED_ONE = "1gpu, packed shards"
CP_KILLED = Case("cp killed", "train_cp.py", 3, SAME_SHAPE | SAVED)
DROPOUT = {"dropout": 0.2}
DROPOUT_KILLED = Case("dropout killed", "train_ddp.py", 3, DROPOUT | SAVED)
TO_DROPOUT = {"reference": "1gpu, dropout"}
MUON = {"optimizer": "muon", "clip_norm": 0}
TO_MIXED = {"reference": "ddp x1, mixture", "dropped": 0}  # whole global batches
MIXED_KILLED = Case("mixture killed", "train_ddp_mixtures.py", 2, SAVED)
TO_MUON = {"reference": "1gpu, muon"}
MUON_KILLED = Case("muon killed", "train_fsdp_muon.py", 3, MUON | SAVED)
DEPTH = {"stochastic_depth": 0.5, "clip_norm": 0}
DEPTH_KILLED = Case("stochastic depth killed", "train_fsdp.py", 2, DEPTH | SAVED)
TO_DEPTH = {"reference": "1gpu, stochastic depth"}
TEXT = Suite(
    task="text",
    base=COMMON
    | {
        "text_file": "FILE",  # the Verifier writes it: 125 paragraphs to train with, 13 to validate
        "context": 24,
        "layers": 4,
        "heads": 4,
        "width": 16,
        "lr": 0.01,
        "clip_norm": 1.15,
        "padding": "longest",
    },
    steps=6,
    trained=108,
    dropped=17,
    validated=13,
    best=("perplexity", min),
    exact=(),
    cases=[
        Case(
            "1gpu_graph", "train_1gpu_graph.py", None, SAME_SHAPE | LINEAR, reference="1gpu, linear"
        ),
        Case("dp", "train_dp.py", None, {}),
        Case("ddp x1", "train_ddp.py", 1, {}),
        Case("ddp x2", "train_ddp.py", 2, {"num_workers": 1}),
        Case("ddp x3", "train_ddp.py", 3, {}),
        Case("amp x2, float16", "train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
        Case("accum x1", "train_ddp_accum.py", 1, {"micro_batches": 5}),
        Case("accum x2", "train_ddp_accum.py", 2, {"micro_batches": 2}),
        Case("accum x3", "train_ddp_accum.py", 3, {"micro_batches": 6}),
        Case("spawn x2", "train_ddp_spawn.py", None, {"spawn_processes": 2}),
        Case("mp, 2 stages", "train_mp.py", None, STAGED),
        Case("ddp_mp x2, micro-batches", "train_ddp_mp.py", 2, STAGED | {"micro_batches": 3}),
        Case("fsdp x2", "train_fsdp.py", 2, {}),
        Case("fsdp x3", "train_fsdp.py", 3, {}),
        Case("tp x2", "train_tp.py", 2, {}),
        Case("fsdp_tp x4, 2 x 2", "train_fsdp_tp.py", 4, {"fsdp_size": 2}),
        Case("pp x2, 1F1B", "train_pp.py", 2, SAME_SHAPE | STAGES),
        Case("pp x3, GPipe", "train_pp.py", 3, SAME_SHAPE | STAGES | {"schedule": "GPipe"}),
        Case("killed, resumed x2", "train_ddp.py", 2, {}, resumes=KILLED),
        Case("killed, resumed x3", "train_ddp.py", 3, {}, resumes=KILLED),
        Case("killed, resumed by fsdp x2", "train_fsdp.py", 2, {}, resumes=KILLED),
        Case(
            "killed, resumed by accum x2",
            "train_ddp_accum.py",
            2,
            {"micro_batches": 3},
            resumes=KILLED,
        ),
        Case("killed, resumed by pp x2", "train_pp.py", 2, SAME_SHAPE | STAGES, resumes=KILLED),
        Case(
            "packed shards killed, resumed by accum x3",
            "train_ddp_accum.py",
            3,
            PACKED | {"micro_batches": 2, "num_workers": 1},
            reference="1gpu, packed shards",
            resumes=PACKED_KILLED,
        ),
        Case(
            "ddp x2, length buckets",
            "train_ddp_buckets.py",
            2,
            {},
            reference="1gpu, length buckets",
        ),
        Case("ddp x2, mixture", "train_ddp_mixtures.py", 2, {}, **TO_MIXED),
        Case(
            "mixture killed, resumed x3",
            "train_ddp_mixtures.py",
            3,
            {},
            resumes=MIXED_KILLED,
            **TO_MIXED,
        ),
        Case("cp x2", "train_cp.py", 2, SAME_SHAPE),
        Case("cp x3", "train_cp.py", 3, SAME_SHAPE | {"num_workers": 1}),
        Case("cp x2, packed shards", "train_cp.py", 2, SAME_SHAPE | PACKED, reference=PACKED_ONE),
        Case("cp x2, stochastic depth", "train_cp.py", 2, SAME_SHAPE | DEPTH, **TO_DEPTH),
        Case("killed, resumed by cp x3", "train_cp.py", 3, SAME_SHAPE, resumes=KILLED),
        Case("cp killed, resumed x2", "train_cp.py", 2, SAME_SHAPE, resumes=CP_KILLED),
        Case("cp killed, resumed by fsdp x3", "train_fsdp.py", 3, SAME_SHAPE, resumes=CP_KILLED),
        Case("fsdp x3, accumulation", "train_fsdp_fsdp_accumulation.py", 3, {"micro_batches": 2}),
        Case("muon ddp x2", "train_ddp_muon.py", 2, MUON, **TO_MUON),
        Case("muon fsdp x2", "train_fsdp_muon.py", 2, MUON, **TO_MUON),
        Case("muon fsdp x3", "train_fsdp_muon.py", 3, MUON, **TO_MUON),
        Case("muon tp x2", "train_tp_muon.py", 2, MUON, **TO_MUON),
        Case(
            "muon killed, resumed by tp x2",
            "train_tp_muon.py",
            2,
            MUON,
            resumes=MUON_KILLED,
            **TO_MUON,
        ),
        Case("ddp x2, dropout", "train_ddp.py", 2, DROPOUT, **TO_DROPOUT),
        Case(
            "mp, micro-batches, dropout",
            "train_mp.py",
            None,
            DROPOUT | STAGED | {"micro_batches": 3},
            **TO_DROPOUT,
        ),
        Case(
            "fsdp_tp x4, dropout", "train_fsdp_tp.py", 4, DROPOUT | {"fsdp_size": 2}, **TO_DROPOUT
        ),
        Case("pp x2, dropout", "train_pp.py", 2, DROPOUT | SAME_SHAPE | STAGES, **TO_DROPOUT),
        Case(
            "dropout killed, resumed by accum x2",
            "train_ddp_accum.py",
            2,
            DROPOUT | {"micro_batches": 3},
            resumes=DROPOUT_KILLED,
            **TO_DROPOUT,
        ),
        Case("ddp x3, stochastic depth", "train_ddp.py", 3, DEPTH, **TO_DEPTH),
        Case(
            "accum x1, stochastic depth",
            "train_ddp_accum.py",
            1,
            DEPTH | {"micro_batches": 6},
            **TO_DEPTH,
        ),
        Case(
            "fsdp_tp x4, stochastic depth",
            "train_fsdp_tp.py",
            4,
            DEPTH | {"fsdp_size": 2},
            **TO_DEPTH,
        ),
        Case("pp x2, stochastic depth", "train_pp.py", 2, DEPTH | SAME_SHAPE | STAGES, **TO_DEPTH),
        Case(
            "stochastic depth killed, resumed by ddp x3",
            "train_ddp.py",
            3,
            DEPTH,
            resumes=DEPTH_KILLED,
            **TO_DEPTH,
        ),
    ],
    references=[
        Case("1gpu", "train_1gpu.py", None, {}),
        Case("1gpu, linear", "train_1gpu.py", None, LINEAR),
        Case("1gpu, packed shards", "train_1gpu.py", None, PACKED),
        Case("1gpu, dropout", "train_1gpu.py", None, DROPOUT),
        Case("1gpu, stochastic depth", "train_1gpu.py", None, DEPTH),
        Case("1gpu, length buckets", "train_1gpu_buckets.py", None, {}),
        Case("ddp x1, mixture", "train_ddp_mixtures.py", 1, {}),
        Case("1gpu, muon", "train_1gpu_muon.py", None, MUON),
    ],
    left_out={"BatchNorm per rank": "a GPT has no BatchNorm", "ep": NO_EXPERTS},
)

# moe: the text task's batches, and a mixture of experts in each block.
ACCUMULATED_MOE = {"balance": 0, "micro_batches": 3}
MORE_EXPERTS = {"experts": 12, "shared_expert": True}
TO_MORE = {"reference": "1gpu, 12 experts, dropout"}
EP_KILLED = Case("ep killed", "train_ep.py", 2, SAVED)
EP_SHARDED_KILLED = Case("ep sharded killed", "train_ep.py", 3, SAVED | {"save_sharded": True})
MOE = Suite(
    task="moe",
    base=TEXT.base | {"layers": 2, "experts": 6, "clip_norm": 0.75},
    steps=6,
    trained=108,
    dropped=17,
    validated=13,
    best=("perplexity", min),
    exact=(),
    cases=[
        Case("dp", "train_dp.py", None, {}),
        Case("ddp x1", "train_ddp.py", 1, {}),
        Case("ddp x2", "train_ddp.py", 2, {}),
        Case("ddp x3", "train_ddp.py", 3, {}),
        Case("amp x2, float16", "train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
        Case(
            "accum x2, without balance",
            "train_ddp_accum.py",
            2,
            ACCUMULATED_MOE,
            reference="1gpu, without balance",
        ),
        Case("spawn x2", "train_ddp_spawn.py", None, {"spawn_processes": 2}),
        Case("fsdp x3", "train_fsdp.py", 3, {}),
        Case("tp x2", "train_tp.py", 2, {}),
        Case("fsdp_tp x4, 2 x 2", "train_fsdp_tp.py", 4, {"fsdp_size": 2}),
        Case("ep x1", "train_ep.py", 1, {}),
        Case("ep x2", "train_ep.py", 2, {}),
        Case("ep x3", "train_ep.py", 3, {"num_workers": 1}),
        Case("ep x2, 12 experts, dropout", "train_ep.py", 2, MORE_EXPERTS | DROPOUT, **TO_MORE),
        Case("killed, resumed x3", "train_ddp.py", 3, {}, resumes=KILLED),
        Case("killed, resumed by ep x3", "train_ep.py", 3, {}, resumes=KILLED),
        Case("ep killed, resumed x2", "train_ep.py", 2, {}, resumes=EP_KILLED),
        Case("ep killed, resumed x3", "train_ep.py", 3, {}, resumes=EP_KILLED),
        Case("ep killed, resumed by tp x2", "train_tp.py", 2, {}, resumes=EP_KILLED),
        Case("ep sharded killed, resumed x2", "train_ep.py", 2, {}, resumes=EP_SHARDED_KILLED),
    ],
    references=[
        Case("1gpu", "train_1gpu.py", None, {}),
        Case("1gpu, without balance", "train_1gpu.py", None, {"balance": 0}),
        Case("1gpu, 12 experts, dropout", "train_1gpu.py", None, MORE_EXPERTS | DROPOUT),
    ],
    left_out={
        "BatchNorm per rank": "a GPT has no BatchNorm",
        "1gpu_graph": "how many bytes an expert gets is known on the host only after a wait",
        "mp, ddp_mp, pp, cp": "a mixture has a second output, the router's, for the loss",
    },
)

NO_BATCHNORM = {"norm": "group"}
SEGMENTATION = Suite(
    task="segmentation",
    base=COMMON
    | {"synthetic_samples": 125, "image_size": 16, "width": 4, "lr": 0.01, "clip_norm": 0.8},
    steps=6,
    trained=108,
    dropped=17,
    validated=31,
    best=("mean_iou", max),
    exact=("accuracy", "mean_iou"),
    cases=[
        Case("1gpu_graph", "train_1gpu_graph.py", None, LINEAR, reference="1gpu, linear"),
        Case("dp", "train_dp.py", None, {}),
        Case("ddp x1", "train_ddp.py", 1, {}),
        Case("ddp x2", "train_ddp.py", 2, {"num_workers": 1}),
        Case("ddp x3", "train_ddp.py", 3, {}),
        Case("amp x2, float16", "train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
        Case("accum x2", "train_ddp_accum.py", 2, NO_BATCHNORM | {"micro_batches": 4}, **TO_GROUP),
        Case("spawn x2", "train_ddp_spawn.py", None, {"spawn_processes": 2}),
        Case("fsdp x2", "train_fsdp.py", 2, {}),
        Case("killed, resumed x2", "train_ddp.py", 2, {}, resumes=KILLED),
        Case("killed, resumed x3", "train_ddp.py", 3, {}, resumes=KILLED),
    ],
    references=[
        Case("1gpu", "train_1gpu.py", None, {}),
        Case("1gpu, linear", "train_1gpu.py", None, LINEAR),
        Case("1gpu, GroupNorm", "train_1gpu.py", None, NO_BATCHNORM),
    ],
    left_out={
        "ep": NO_EXPERTS,
        "cp": NO_SEQUENCES,
        "mp, ddp_mp, pp": "a U-Net is not a sequence of layers, because of its skip connections",
        "tp, fsdp_tp": "a U-Net has no attention heads or MLPs to divide",
    },
)

# diffusion: the noise of a sample, and its level, are part of the loss.
DIFFUSION = Suite(
    task="diffusion",
    base=COMMON
    | {
        "dataset": "synthetic",
        "synthetic_samples": 125,
        "image_size": 8,
        "patch_size": 2,
        "layers": 3,
        "heads": 4,
        "width": 16,
        "lr": 0.01,
        "clip_norm": 0.6,
    },
    steps=6,
    trained=108,
    dropped=17,
    validated=31,
    best=("loss", min),
    exact=(),
    cases=[
        Case("1gpu_graph", "train_1gpu_graph.py", None, LINEAR, reference="1gpu, linear"),
        Case("dp", "train_dp.py", None, {}),
        Case("ddp x1", "train_ddp.py", 1, {}),
        Case("ddp x2", "train_ddp.py", 2, {"loader": "workers", "num_workers": 1}),
        Case("ddp x3", "train_ddp.py", 3, {}),
        Case("amp x2, float16", "train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
        Case("accum x2", "train_ddp_accum.py", 2, {"micro_batches": 4}),
        Case("spawn x2", "train_ddp_spawn.py", None, {"spawn_processes": 2}),
        Case("mp, micro-batches", "train_mp.py", None, STAGED | {"micro_batches": 4}),
        Case("ddp_mp x2, 2 stages", "train_ddp_mp.py", 2, STAGED),
        Case("fsdp x2", "train_fsdp.py", 2, {}),
        Case("tp x2", "train_tp.py", 2, {}),
        Case("fsdp_tp x4, 2 x 2", "train_fsdp_tp.py", 4, {"fsdp_size": 2}),
        Case("pp x2, 1F1B", "train_pp.py", 2, STAGES),
        Case("killed, resumed x2", "train_ddp.py", 2, {}, resumes=KILLED),
        Case("killed, resumed x3", "train_ddp.py", 3, {}, resumes=KILLED),
        Case("killed, resumed by pp x2", "train_pp.py", 2, STAGES, resumes=KILLED),
    ],
    references=[
        Case("1gpu", "train_1gpu.py", None, {}),
        Case("1gpu, linear", "train_1gpu.py", None, LINEAR),
    ],
    left_out={
        "BatchNorm per rank": "a DiT has no BatchNorm",
        "ep": NO_EXPERTS,
        "cp": NO_SEQUENCES,
    },
)
SUITES = {suite.task: suite for suite in (IMAGES, TEXT, MOE, SEGMENTATION, DIFFUSION)}


def scripts_of(suite):
    """The names of the scripts that train a task."""
    return {"train_1gpu.py", *(case.script for case in suite.cases)}


def cases_of(suite, script):
    """The cases of a script, for a copy of it. In one of them, the copy resumes its own run."""
    cases = [case for case in suite.cases if case.script == script]
    if not any(case.resumes and case.resumes.script == script for case in cases):
        for first in [case for case in [*cases, *suite.references] if case.script == script][:1]:
            killed = first._replace(name=f"{first.name}, killed", flags=first.flags | SAVED)
            cases.append(first._replace(name=f"{first.name}, resumed", resumes=killed))
    return cases


# For --matrix: every script trains the same run, to be continued by every other.
MATRIX_FLAGS = {
    "train_ddp_spawn.py": {"spawn_processes": 2},
    "train_ddp_amp.py": {"amp_dtype": "float16"},
    "train_ddp_accum.py": {"micro_batches": 2},
    "train_mp.py": STAGED | {"micro_batches": 2},
    "train_ddp_mp.py": STAGED | {"micro_batches": 2},
    "train_fsdp.py": {"save_sharded": True},
    "train_fsdp_tp.py": {"fsdp_size": 2},
    "train_pp.py": {"micro_batches": 2, "save_sharded": True},
}
# Ranks that share a GPU use gloo, with which these fail: they run on the CPU then.
GPU_PER_RANK = ("train_fsdp.py", "train_fsdp_tp.py", "train_tp.py", "train_ep.py", "train_pp.py")
GPU_PER_RANK += ("train_cp.py",)
GPU_PER_RANK += ONE_FILE + tuple(copy for copy in RECIPES if RECIPES[copy][0] in GPU_PER_RANK)
FOUR_PROCESSES = ("train_fsdp_tp.py",)
WITHOUT_TORCHRUN = (*ONE_PROCESS, "train_ddp_spawn.py")


def matrix_cases(suite, scripts=None):
    """One Case per script (default: all scripts that train the task), each named after its
    script."""
    flags, reference = {
        "images": (VIT, "1gpu, ViT"),
        "text": (SAME_SHAPE, "1gpu"),
        "moe": ({"balance": 0}, "1gpu, without balance"),  # for the script with micro-batches
        "segmentation": (NO_BATCHNORM, "1gpu, GroupNorm"),
        "diffusion": ({}, "1gpu"),
    }[suite.task]
    cases, known = [], scripts_of(suite)
    for rung in LADDER:
        if rung.script in known and (scripts is None or rung.script in scripts):
            nproc = 4 if rung.script in FOUR_PROCESSES else 2
            if rung.script in WITHOUT_TORCHRUN:
                nproc = None
            own = flags | {"keep_last": 2} | MATRIX_FLAGS.get(rung.script, {})
            name = rung.script.removesuffix(".py")
            cases.append(Case(name, rung.script, nproc, own, reference=reference))
    return cases
