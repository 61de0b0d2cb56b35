"""What bfloat16 and float16 cost on a CPU that has no instructions for them."""

from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = {  # by the names in CPUINFO: of x86, then of ARM
    "bfloat16": {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp"},
}


def has_instructions(dtype: str) -> bool:
    """Whether this CPU multiplies matrices of `dtype`, a key of INSTRUCTIONS. True if unknown, as
    on macOS."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].split() for line in lines if is_list_of_features(line)]
    return not names or not INSTRUCTIONS[dtype].isdisjoint(names[0])


def is_list_of_features(line: str) -> bool:
    """Whether a line of CPUINFO names the instructions of a core."""
    return line.partition(":")[0].strip() in ("flags", "Features")


def warnings_of(dtype: str, device: Any, remedy: str) -> list[str]:
    """What Settings.warnings() returns: at most one line, if `dtype` is slow on the device.

    dtype: a name, such as bfloat16 or none. remedy: what trains in float32 instead.
    """
    if device.type != "cpu" or dtype not in INSTRUCTIONS or has_instructions(dtype):
        return []
    # Measured with torch 2.15 and ResNet-20: 10 times as slow with AVX2, 2 times with AVX-512.
    return [
        f"this CPU has no instructions for {dtype}, which is therefore slower than float32 here, "
        f"up to ten times: {remedy}"
    ]
