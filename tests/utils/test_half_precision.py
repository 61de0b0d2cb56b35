"""A CPU without instructions for bfloat16 or float16 computes them slowly: a run says so."""

import pytest
import torch

from tests.forked import FIVE_STEPS, fork_script
from utils.rungs import half_precision
from utils.rungs.half_precision import has_instructions, warnings_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLAGS = FIVE_STEPS | {"model": "vit_tiny", "image_size": 16, "epochs": 1}
HASWELL = "processor\t: 0\nmodel name\t: bf16\nflags\t\t: fpu sse2 avx2 f16c\n"
COOPER_LAKE = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16 avx512_fp16\n"
CORTEX_A72 = "processor\t: 0\nFeatures\t: fp asimd\n"
NEOVERSE_V1 = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp i8mm bf16\n"


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    """A path in place of /proc/cpuinfo; nothing is there yet."""
    monkeypatch.setattr(half_precision, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("text", "bfloat16", "float16"),
    [
        (HASWELL, False, False),
        (COOPER_LAKE, True, False),
        (SAPPHIRE_RAPIDS, True, True),
        (CORTEX_A72, False, False),
        (NEOVERSE_V1, True, True),
        ("processor\t: 0\ncpu\t\t: POWER9\n", True, True),  # unknown
    ],
)
def test_instructions_of_a_cpu(text, bfloat16, float16, cpuinfo):
    cpuinfo.write_text(text * 2)  # of two cores
    assert (has_instructions("bfloat16"), has_instructions("float16")) == (bfloat16, float16)


def test_who_is_warned(cpuinfo):
    assert warnings_of("bfloat16", CPU, "remedy") == []  # macOS has no such file
    cpuinfo.write_text(HASWELL)
    (line,) = warnings_of("bfloat16", CPU, "remedy")
    assert " bfloat16" in line and line.endswith(": remedy")
    assert warnings_of("bfloat16", CUDA, "remedy") == warnings_of("none", CPU, "remedy") == []


@pytest.mark.parametrize(
    ("script", "nproc", "flags", "remedy"),
    [
        ("train_ddp_amp.py", 2, {}, "train_ddp.py"),
        ("train_ddp_amp.py", 1, {"amp_dtype": "float16"}, "train_ddp.py"),
        ("train_1gpu_graph.py", None, {"amp_dtype": "bfloat16"}, "--amp-dtype none"),
        ("train_fsdp.py", 2, {"fsdp_dtype": "bfloat16"}, "--fsdp-dtype none"),
        ("train_1gpu_graph.py", None, {}, None),
        ("train_fsdp.py", 1, {}, None),
    ],
)
def test_run_says_so_once(script, nproc, flags, remedy, tmp_path):
    def before():
        half_precision.has_instructions = lambda dtype: False

    run = fork_script(script, nproc, before, output_dir=tmp_path / "run", **FLAGS, **flags)
    assert run.code == 0, run.stderr
    if remedy:
        dtype = flags.get("amp_dtype") or flags.get("fsdp_dtype") or "bfloat16"
        assert run.stderr.startswith("warning: ") and run.stderr.count("\n") == 1
        assert f" {dtype}" in run.stderr and remedy in run.stderr
    else:
        assert run.stderr == ""
