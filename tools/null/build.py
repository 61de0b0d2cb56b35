"""Build the null device's library for the installed PyTorch.

    python -m tools.null.build

The library defines every function of CUDA, cuBLAS, NCCL and the driver that PyTorch's libraries
import: some are written in source/, and the rest, whose names come from the libraries themselves,
are generated. It is built once for each PyTorch, in ~/.cache/null-device.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
# Without a GPU's answers, these cannot be used: scripts run with torch.backends.cudnn disabled.
NOT_EMULATED = ("cudnn", "cufft", "curand", "cusolver", "cusparse", "cuFile")
BY_NAME = "libcuda.so.1", "libnvrtc.so.13"  # the driver, and NVRTC, are loaded by their names


class Unsupported(Exception):
    """The null device cannot be built or used on this machine; the message says why."""


def find_torch():
    """The folder of the installed torch. Raises Unsupported if it has no CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise Unsupported("PyTorch is not installed: install torch with CUDA")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise Unsupported(
            f"the PyTorch in {folder} is built without CUDA: install the build for CUDA 13, which "
            f"needs no GPU"
        )
    return folder


def find_headers(packages):
    """The folders of CUDA's headers among the installed packages: the runtime's, installed with
    torch, and the compiler's, copied by Triton. Raises Unsupported without them."""
    folders = [*packages.glob("nvidia/*/include"), packages / "triton/backends/nvidia/include"]
    runtime = [f for f in folders if _runtime_version(f / "cuda_runtime_api.h") >= 13000]
    compiler = [f for f in folders if (f / "crt" / "host_defines.h").exists()]
    if not runtime or not compiler:
        raise Unsupported(
            f"{packages} has no headers of CUDA 13, with which the null device is built: install "
            f"a PyTorch for CUDA 13 by pip, which installs them and Triton"
        )
    return [runtime[0], compiler[0]]


def _runtime_version(header):
    text = header.read_text(encoding="utf-8", errors="replace") if header.exists() else ""
    match = re.search(r"#define CUDART_VERSION\s+(\d+)", text)
    return int(match[1]) if match else 0


def find_compiler():
    """The C++ compiler: CXX, or g++. Raises Unsupported if something is missing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unsupported(
            f"the null device needs Linux on x86-64, not {sys.platform} on {platform.machine()}"
        )
    compiler = os.environ.get("CXX", "g++")
    for program in (compiler, "nm"):
        if not shutil.which(program):
            raise Unsupported(
                f"the null device needs {program}, which is not installed: apt-get install g++"
            )
    return compiler


def imported_names(folder):
    """The functions of CUDA, cuBLAS, NCCL and the driver that the libraries in a folder import."""
    names = set()
    for library in sorted(folder.glob("*.so")):
        text = _output("nm", "-D", "--undefined-only", library)
        names |= set(re.findall(r" U ((?:__cuda|cuda|cublas|nccl|cu[A-Z])\w*)", text))
    return {name for name in names if not name.startswith(NOT_EMULATED)}


def written_names():
    """The functions that are written in source/."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.glob("*.cpp")))
    return set(re.findall(r"^API [^(]*?(\w+)\(", text, re.MULTILINE))


def generated(names):
    """C code for functions that do nothing, and succeed. Functions of cuBLAS that compute are
    counted as kernels."""
    lines = ["void null_kernel(const char*);", "void null_other(const char*);"]
    for name in sorted(names):
        is_setting = re.search("Create|Destroy|Set|Get|Algo|Check|Init", name)
        kind = "kernel" if name.startswith("cublas") and not is_setting else "other"
        lines.append(f'int {name}() {{ null_{kind}("{name}"); return 0; }}')
    return "\n".join(lines) + "\n"


def build():
    """Build the library, unless that has been done. Returns its folder, for LD_LIBRARY_PATH.

    The folder has libnull.so, which is loaded before all others, and libnull_torch.so, which a
    process loads after PyTorch. Raises Unsupported if they cannot be built here.
    """
    compiler, torch = find_compiler(), find_torch()
    headers = find_headers(torch.parent)
    digest = hashlib.sha256(str(torch).encode())
    used = [torch / "version.py", headers[0] / "cuda_runtime_api.h"]
    for path in [Path(__file__), *sorted(SOURCE.rglob("*.*")), *used]:
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "null-device"
    target = cache / digest.hexdigest()[:16]
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "made"
            made.mkdir()
            _compile(compiler, torch, headers, made)
            _compile_for_torch(compiler, torch, headers, made)
            if not target.exists():  # by another process, meanwhile
                made.rename(target)
    return target


def _compile(compiler, torch, headers, folder):
    rest = folder / "rest.c"
    names = imported_names(torch / "lib") - written_names()
    rest.write_text(generated(names), encoding="utf-8")
    options = ["-w", "-O1", "-fPIC"]
    _output(compiler, *options, "-fno-builtin", "-x", "c", "-c", rest, "-o", folder / "rest.o")
    sources = [*sorted(SOURCE.glob("*.cpp")), folder / "rest.o"]
    library = folder / "libnull.so"
    include = [f"-I{folder}" for folder in headers]
    _output(compiler, *options, "-std=c++17", "-shared", *include, *sources, "-o", library)
    for name in BY_NAME:  # refers to that library
        link = [f"-L{folder}", "-Wl,--no-as-needed", "-lnull", "-Wl,-rpath,$ORIGIN"]
        link += [f"-Wl,-soname,{name}", "-o", folder / name]
        _output(compiler, "-shared", "-x", "c", "/dev/null", *link)


def _compile_for_torch(compiler, torch, headers, folder):
    source = SOURCE / "torch" / "allocations.cpp"
    options = ["-w", "-O1", "-fPIC", "-shared", "-std=c++20"]
    options += [f"-I{path}" for path in (torch / "include", *headers)]
    link = [f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10"]  # which torch has loaded by then
    _output(compiler, *options, source, *link, "-o", folder / "libnull_torch.so")


def _output(*command):
    command = list(map(str, command))
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        reason = next((line for line in lines if "error" in line), " ".join(lines[:1]))
        raise Unsupported(f"`{command[0]} ... -o {command[-1]}` fails: {reason}")
    return result.stdout


if __name__ == "__main__":
    try:
        print(build() / "libnull.so")
    except Unsupported as error:
        sys.exit(f"error: {error}")
