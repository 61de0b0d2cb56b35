"""Formulas for the memory that a rank needs for parameters, gradients and optimizer state.

A test compares them with what the ranks of real runs hold; docs/choosing.md shows the table.
"""

from tools.lib.markdown import markdown_table

# float32 parameters and gradients, and what the optimizer keeps for each parameter.
BYTES = {"sgd": 4 + 4 + 4, "adamw": 4 + 4 + 8}
GIGA = 1e9


def share(script, ranks, fsdp_size=None, split=1.0):
    """The fraction of a model's parameters that a rank holds, on average over the ranks.

    fsdp_size: the setting (default: all ranks). split: the fraction of the parameters that tensor
    parallelism divides: the weights of the blocks.
    """
    size = fsdp_size or ranks
    tensor = ranks if script == "train_tp.py" else ranks // size
    sliced = split / tensor + 1 - split
    return {
        "train_ddp.py": 1.0,
        "train_fsdp.py": 1 / size,
        "train_tp.py": sliced,
        "train_fsdp_tp.py": sliced / size,
        "train_ep.py": 1 / ranks,
        "train_cp.py": 1.0,
        "train_pp.py": 1 / ranks,
    }[script]


def gathered(script, ranks, fsdp_size, blocks, experts=0.0):
    """The fraction of the parameters that FSDP gathers at any one time: the parameters of the
    current block and of the next one, or this rank's slices of them. experts: the fraction of the
    parameters that train_ep.py divides instead."""
    tensor = ranks // fsdp_size if script == "train_fsdp_tp.py" else 1
    if script == "train_ep.py":
        return 2 / blocks * (1 - experts)
    return 2 / blocks / tensor if "fsdp" in script else 0.0


def gigabytes(script, parameters, blocks, ranks, fsdp_size=None):
    """GB per rank with AdamW, without activations. parameters: their number, in `blocks` blocks."""
    held = share(script, ranks, fsdp_size) * BYTES["adamw"]
    return parameters * (held + 4 * gathered(script, ranks, fsdp_size, blocks)) / GIGA


MODELS = {"1 billion": (1e9, 24), "7 billion": (7e9, 32), "70 billion": (70e9, 80)}
TECHNIQUES = [  # name, script, and fsdp_size for 8 and for 64 ranks
    ("data parallel", "train_ddp.py", (None, None)),
    ("FSDP over all ranks", "train_fsdp.py", (8, 64)),
    ("FSDP over 8 ranks (HSDP)", "train_fsdp.py", (8, 8)),
    ("tensor parallel 8, FSDP over the others", "train_fsdp_tp.py", (1, 8)),
    ("pipeline of 8 or 64 stages", "train_pp.py", (None, None)),
]


def table():
    """GB per GPU for each technique, size of model and number of GPUs."""
    rows = []
    for name, script, sizes in TECHNIQUES:
        cells = []
        for parameters, blocks in MODELS.values():
            for ranks, size in zip((8, 64), sizes, strict=True):
                value = gigabytes(script, parameters, blocks, ranks, size)
                cells.append(f"{value:,.0f}" if value >= 10 else f"{value:.1f}")
        rows.append([name, f"`{script}`", *cells])
    head = [f"{model}, {ranks} GPUs" for model in MODELS for ranks in (8, 64)]
    return markdown_table(["technique", "script", *head], rows)
