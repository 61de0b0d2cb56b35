"""The formulas of lab/memory.py, against the bytes that runs hold."""

import json
import os
import re
from statistics import mean

import pytest

from lab.bench.held import install
from lab.memory import BYTES, MODELS, TECHNIQUES, gathered, gigabytes, share, table
from tasks.images.small_models import vit_tiny
from tests.forked import fork_script
from tests.processes import SMALL
from tests.recipes import TEXT
from tools.verify.run import project_with_task
from utils.checkpoint import Checkpointer

SIZES = {name: p.numel() for name, p in vit_tiny(10, 16).named_parameters()}
PARAMETERS = sum(SIZES.values())
IN_SLICES = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "mlp.0.weight", "mlp.0.bias")
IN_SLICES += ("mlp.3.weight",)
SPLIT = sum(size for name, size in SIZES.items() if name.endswith(IN_SLICES)) / PARAMETERS


def run_measured(script, ranks, folder, settings):
    """A Run, and what lab.bench.held has recorded on each rank."""

    def before():
        result = {}
        install(result)
        record = Checkpointer.step

        def write(checkpoint):
            record(checkpoint)
            (folder / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))

        Checkpointer.step = write

    run = fork_script(script, ranks, before, settings=settings, output_dir=folder / "run")
    assert run.code == 0, run.stderr
    return run, [json.loads(path.read_text()) for path in folder.glob("rank*.json")]


@pytest.mark.parametrize(
    ("script", "ranks", "optimizer", "flags"),
    [
        ("train_fsdp.py", 2, "adamw", {}),
        pytest.param("train_ddp.py", 2, "sgd", {}, marks=pytest.mark.slow),
        pytest.param("train_fsdp_tp.py", 4, "adamw", {"fsdp_size": 2}, marks=pytest.mark.slow),
        pytest.param("train_pp.py", 3, "adamw", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_hold_what_the_formula_says(script, ranks, optimizer, flags, tmp_path):
    settings = SMALL | {"model": "vit_tiny", "synthetic_samples": 12, "epochs": 1, "lr": 0.001}
    settings |= flags | {"optimizer": optimizer}
    _, results = run_measured(script, ranks, tmp_path, settings)
    assert len(results) == ranks
    for result in results:
        assert bool(result["steps"]) == (script == "train_pp.py")
        assert all(total > computing > 0 for total, computing in result["steps"])
    held = [result["held"] for result in results]
    expected = share(script, ranks, flags.get("fsdp_size"), SPLIT) * PARAMETERS
    for kind in ("parameters", "gradients"):
        assert mean(each[kind] for each in held) == pytest.approx(4 * expected)
    total = mean(sum(each.values()) for each in held)
    assert total == pytest.approx(BYTES[optimizer] * expected)


@pytest.mark.slow
@pytest.mark.rare
def test_rank_of_experts_holds_what_the_formula_says(tmp_path):
    project = project_with_task("moe", tmp_path / "project")
    settings = TEXT | {"epochs": 1, "dtype": "float32", "context": 8}
    settings["global_batch_size"] = 256
    run, results = run_measured(project / "train_ep.py", 2, tmp_path, settings)
    (parameters,) = re.findall(r"([\d,]+) trainable parameters", run.stdout)
    expected = share("train_ep.py", 2) * int(parameters.replace(",", "")) * BYTES["adamw"]
    total = mean(sum(result["held"].values()) for result in results)
    assert total == pytest.approx(expected)


def test_table_has_a_row_per_technique():
    assert len(table().splitlines()) == 2 + len(TECHNIQUES)
    parameters, blocks = MODELS["7 billion"]
    assert gigabytes("train_ddp.py", parameters, blocks, 8) == 112
    assert gigabytes("train_fsdp.py", parameters, blocks, 8, 8) == 14 + 8 * 7 / 32
    assert gigabytes("train_fsdp_tp.py", parameters, blocks, 64, 8) == 1.75 + 7 / 32
    assert gathered("train_fsdp_tp.py", 8, 1, 10) == 2 / 10 / 8
    assert gigabytes("train_pp.py", parameters, blocks, 64) == 1.75
    assert gathered("train_ep.py", 8, None, 10, experts=0.75) == pytest.approx(0.05)
