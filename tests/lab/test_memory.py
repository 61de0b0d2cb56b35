"""The formulas of lab/memory.py, against the bytes that runs hold."""

import json
import re

import pytest
import torch

from lab.bench.held import install
from lab.memory import BYTES, MODELS, TECHNIQUES, gathered, gigabytes, share, table
from tasks.images.small_models import vit_tiny
from tests.forked import fork_script
from tests.recipes import TEXT
from tools.verify.run import project_with_task
from utils.checkpoint import Checkpointer

SIZE = 16
MODEL = vit_tiny(10, SIZE)
PARAMETERS = sum(p.numel() for p in MODEL.parameters())
IN_SLICES = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "mlp.0.weight", "mlp.0.bias")
IN_SLICES += ("mlp.3.weight",)
SPLIT = sum(p.numel() for n, p in MODEL.named_parameters() if n.endswith(IN_SLICES)) / PARAMETERS


def measure(folder):
    """For fork_script(before=...): each rank writes what lab.bench.held records."""

    def before():
        result = {}
        install(result)
        record = Checkpointer.step

        def write(checkpoint):
            record(checkpoint)
            rank = torch.distributed.get_rank()
            (folder / f"{rank}.json").write_text(json.dumps(result))

        Checkpointer.step = write

    return before


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
    settings = {"model": "vit_tiny", "image_size": SIZE, "synthetic_samples": 12, "epochs": 1}
    settings |= {"optimizer": optimizer, "lr": 0.001, "output_dir": tmp_path / "run"}
    run = fork_script(script, ranks, measure(tmp_path), **settings | flags)
    assert (run.code, run.stderr) == (0, "")
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    held = [result["held"] for result in results]
    for result in results:
        assert bool(result["steps"]) == (script == "train_pp.py")
        assert all(total > computing > 0 for total, computing in result["steps"])
    part = share(script, ranks, flags.get("fsdp_size"), SPLIT)
    for kind, each in zip(("parameters", "gradients"), (4, 4), strict=True):
        assert sum(h[kind] for h in held) / ranks == pytest.approx(part * PARAMETERS * each)
    total = sum(sum(h.values()) for h in held) / ranks
    assert total == pytest.approx(part * PARAMETERS * BYTES[optimizer])


@pytest.mark.slow
@pytest.mark.rare
def test_rank_of_experts_holds_what_the_formula_says(tmp_path):
    project = project_with_task("moe", tmp_path / "project")
    settings = TEXT | {"text_file": "", "epochs": 1, "output_dir": tmp_path / "run"}
    settings |= {"dtype": "float32", "context": 8, "global_batch_size": 256}
    run = fork_script(project / "train_ep.py", 2, measure(tmp_path), settings=settings)
    assert (run.code, run.stderr) == (0, "")
    held = [json.loads((tmp_path / f"{rank}.json").read_text())["held"] for rank in range(2)]
    (parameters,) = re.findall(r"([\d,]+) trainable parameters", run.stdout)
    expected = share("train_ep.py", 2) * int(parameters.replace(",", "")) * BYTES["adamw"]
    assert sum(sum(h.values()) for h in held) / 2 == pytest.approx(expected)


def test_table_has_a_row_per_technique():
    assert len(table().splitlines()) == 2 + len(TECHNIQUES)
    parameters, blocks = MODELS["7 billion"]
    assert gigabytes("train_ddp.py", parameters, blocks, 8) == 112
    assert gigabytes("train_fsdp.py", parameters, blocks, 8, 8) == 14 + 8 * 7 / 32
    assert gigabytes("train_fsdp_tp.py", parameters, blocks, 64, 8) == 1.75 + 7 / 32
    assert gathered("train_fsdp_tp.py", 8, 1, 10) == 2 / 10 / 8
    assert gigabytes("train_pp.py", parameters, blocks, 64) == 1.75
    assert gathered("train_ep.py", 8, None, 10, experts=0.75) == pytest.approx(0.05)
