"""What a script needs, and what its default run loads: the project's modules, and their size.

    python -m tools.lib.closure [SCRIPT ...]     what the scripts import, and options that they know
    python -m tools.lib.closure --write          run each script, and write lab/results/loaded.json

Code lines do not include blank lines, comments and docstrings; tokens also show what denser lines
would hide. An f-string is one token, like any string (Python 3.12 splits it into several). A module
is an option if it is imported in a block `with required_by("--setting"):`.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tools.lib.ladder import LADDER, ONE_PROCESS, RESULTS, ROOT

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


WITHOUT_TORCHRUN = (*ONE_PROCESS, "train_ddp_spawn.py")


class Size(NamedTuple):
    """How much code a file has."""

    lines: int
    tokens: int


class Option(NamedTuple):
    """A module that only a setting needs."""

    name: str
    path: Path
    setting: str  # such as --save-sharded


@cache
def parse(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path):
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(parse(path)))


@cache
def size(path):
    """Code lines and tokens of a file."""
    return size_of(path.read_text(encoding="utf-8"))


def size_of(text):
    """Code lines and tokens of the text of a file."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None:
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    lines, tokens, nested = set(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
            kind = tokenize.tok_name[token.type]
            nested -= kind == "FSTRING_END"
            tokens += not nested and kind != "FSTRING_START"
            nested += kind == "FSTRING_START"
    return Size(len(lines), tokens)


def total(paths):
    """The Size of several files together."""
    sizes = [size(path) for path in paths]
    return Size(sum(s.lines for s in sizes), sum(s.tokens for s in sizes))


def purpose(path):
    """The first line of a file's docstring."""
    return (ast.get_docstring(parse(path)) or "").partition("\n")[0]


@cache
def imports(path, root=ROOT):
    """The project's modules that a file imports, in functions, too, but not as options."""
    optional = {id(node) for block, _ in option_blocks(path) for node in ast.walk(block)}
    return modules_in((node for node in nodes_of(path) if id(node) not in optional), root)


@cache
def option_blocks(path):
    """(block, setting) of what a file imports as an option."""
    blocks = []
    for node in nodes_of(path):
        call = node.items[0].context_expr if isinstance(node, ast.With) else None
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "required_by":
            named = isinstance(call.args[0], ast.Constant)  # the others read a file, for example
            blocks.append((node, call.args[0].value if named else ""))
    return blocks


def modules_in(nodes, root):
    """The project's modules that these nodes of a syntax tree import, as a set of paths."""
    names = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    modules = set()
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):  # importing a module imports its packages
            stem = root.joinpath(*parts[:end])
            for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                if path.is_file() and path.stat().st_size:
                    modules.add(path)
    return modules


def closure(*scripts, root=ROOT):
    """The modules that files import, directly or indirectly, but not as options; without the
    files. Returns sorted paths."""
    modules, pending = set(), list(scripts)
    while pending:
        new = imports(pending.pop(), root) - modules - set(scripts)
        modules |= new
        pending += new
    return sorted(modules)


def options(script, root=ROOT):
    """The Options of a script and of its closure, and theirs, by name, sorted."""
    core, result, pending = closure(script, root=root), {}, [script]
    while pending:
        start = pending.pop(0)
        for path in [start, *closure(start, root=root)]:
            for module, setting in option_modules(path, root):
                if module in core or module.stem == "__init__":
                    continue
                if module.stem not in result:
                    pending.append(module)
                elif result[module.stem].setting:
                    continue
                result[module.stem] = Option(module.stem, module, setting)
    return dict(sorted(result.items()))


@cache
def option_modules(path, root):
    """(module, setting) of each module that a file imports as an option, as a list."""
    return [
        (module, setting)
        for block, setting in option_blocks(path)
        for module in modules_in(ast.walk(block), root)
    ]


# Adds the files of all modules that a process of rank 0, or one that starts it, has loaded.
SITECUSTOMIZE = """
import atexit, os, sys

def report():
    if os.environ.get("RANK", "0") == "0" and "utils.config" in sys.modules:
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        open(os.environ["LOADED"], "a").write("\\n".join([*filter(None, files), ""]))

atexit.register(report)
"""


def default_command(script):
    """The arguments that a script's own docstring passes to it, as a list."""
    for line in ast.get_docstring(parse(script)).splitlines():
        before, found, after = line.partition(f"{script.name}")
        if found and ("torchrun" in before or "python " in before):
            return after.partition("#")[0].split()
    return []


def loaded(script, root=ROOT):
    """The project's modules that a run of the script by its own command loads, on two processes
    where it starts with torchrun (four for two dimensions): sorted paths, with the script.

    The run is small: its data are few.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
        output = Path(folder) / "loaded"
        path = os.pathsep.join([folder, str(ROOT)])
        environment = {"PYTHONPATH": path, "LOADED": str(output), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            small_command(script, folder),
            cwd=root,
            env=os.environ | environment,
            check=True,
            capture_output=True,
            timeout=300,
        )
        files = {Path(file).resolve() for file in output.read_text(encoding="utf-8").splitlines()}
    return sorted(
        path
        for path in files
        if path.is_relative_to(root)
        and path.is_file()
        and path.suffix == ".py"
        and ".venv" not in path.relative_to(root).parts[0]
        and size(path).lines
    )


def small_flags(script, folder):
    """The arguments of the script's own command, for fewer epochs and samples, as a list."""
    flags = [*default_command(script), "--epochs=1", f"--output-dir={folder}/run", "--device=cpu"]
    text = script.read_text(encoding="utf-8")
    if "import tasks.images as task" in text:
        flags += ["--dataset=synthetic", "--synthetic-samples=64", "--image-size=16"]
    if "import tasks.segmentation as task" in text:
        flags += ["--synthetic-samples=64"]
    if "import tasks.diffusion as task" in text:
        flags += ["--dataset=synthetic", "--synthetic-samples=64", "--image-size=8", "--width=16"]
    if "import tasks.text as task" in text or "import tasks.moe as task" in text:
        flags += [f"--text-file={script}", "--layers=2", "--width=16", "--context=32"]
    for name, value in (("--fsdp-size", "2"), ("--devices", "cpu,cpu"), ("--micro-batches", "2")):
        if name in flags:
            flags[flags.index(name) + 1] = value
    return [*flags, "--global-batch-size=32", "--num-threads=1"]


def small_command(script, folder):
    """The command that runs the script with small_flags(), as a list."""
    command, flags = [sys.executable], small_flags(script, folder)
    if script.name not in WITHOUT_TORCHRUN:
        count = 4 if script.name == "train_fsdp_tp.py" else 2
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    elif script.name == "train_ddp_spawn.py":
        flags.append("--spawn-processes=2")
    return [*command, script.name, *flags]


def write_loaded():
    """Run each script, and write which files it loads to lab/results/loaded.json."""
    result = {}
    for rung in LADDER:
        files = loaded(ROOT / rung.script)
        lines, tokens = total(files)
        names = [str(path.relative_to(ROOT)) for path in files]
        result[rung.script] = names
        print(f"{rung.script:20}  {len(files) - 1:7}  {lines:10}  {tokens:6}", flush=True)
    (RESULTS / "loaded.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main():
    if sys.argv[1:] == ["--write"]:
        write_loaded()
        return
    scripts = sys.argv[1:] or [rung.script for rung in LADDER]
    print(f"{'script':20}  modules  code lines  tokens  options")
    for name in scripts:
        script = ROOT / name
        modules = closure(script)
        lines, tokens = total([script, *modules])
        known = ", ".join(options(script))
        print(f"{name:20}  {len(modules):7}  {lines:10}  {tokens:6}  {known}")


if __name__ == "__main__":
    main()
