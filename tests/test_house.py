"""The house: dense code, circles of imports, attributes assigned from outside, probes, types."""

import ast
import re

import pytest
import yaml

from tools.lib.closure import closure, imports, modules_in, option_blocks, parse, size
from tools.lib.ladder import ROOT

FILES = sorted(
    path
    for folder in ("utils", "tasks", "sources")
    for path in (ROOT / folder).rglob("*.py")
    if size(path).lines
)
SCRIPTS = sorted(ROOT.glob("train_*.py"))

# Each is what PyTorch's interface asks for, or an object that the function has just made.
ASSIGNED = {
    "distributed.py: model.module",  # DistributedDataParallel, for one backward pass
    "skipped_steps.py: optimizer.found_inf",  # as torch.amp.GradScaler does
    "tensor_parallel.py: module.__class__",  # a ParallelStyle changes a module in place
    "tensor_parallel.py: module.mesh",
    "tensor_parallel.py: module.forward",
    "experts.py: module.forward",
    "small_models.py: model.conv1",
    "small_models.py: model.maxpool",
    "checkpoint.py: options.strict",
    "checkpoint.py: options.full_state_dict",
    "spawn.py: os.environ",
}


def assigned_attributes(path):
    """Attributes of modules, or of parameters other than self, that a file assigns."""
    tree = parse(path)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        parameters = {arg.arg for arg in function.args.args + function.args.kwonlyargs}
        foreign = (parameters | imported) - {"self", "ctx", "cls"}
        for node in ast.walk(function):
            targets = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            for group in targets:
                for target in group.elts if isinstance(group, ast.Tuple) else [group]:
                    is_attribute = isinstance(target, ast.Attribute)
                    if is_attribute and getattr(target.value, "id", "") in foreign:
                        yield f"{path.name}: {ast.unparse(target)}"


def test_nobody_assigns_to_what_is_not_theirs():
    found = {text for path in [*FILES, *SCRIPTS] for text in assigned_attributes(path)}
    assert found == ASSIGNED


def imports_of(path):
    """The modules that a file imports, in functions and as options, too. A package counts only
    where it is imported itself, not one of its modules."""
    direct, text = set(imports(path)), path.read_text()
    for block, _ in option_blocks(path):
        direct |= modules_in(ast.walk(block), ROOT)
    packages = {path for path in direct if path.name == "__init__.py"}
    named = [path for path in packages if f"from {package_name(path)} import" in text]
    return direct - packages | set(named)


def package_name(path):
    return ".".join(path.parent.relative_to(ROOT).parts)


def test_imports_have_no_circles():
    edges = {path: imports_of(path) for path in FILES}
    for start in FILES:
        reached, pending = set(), [start]
        while pending:
            for path in edges.get(pending.pop(), set()) - reached:
                reached.add(path)
                pending.append(path)
        assert start not in reached, start


def test_what_only_informs_cannot_end_a_run():
    """It is printed by say(), which does not raise. The commands of a task may print."""
    commands = {"evaluate.py", "export.py", "predict.py"}
    for path in FILES:
        if path.name not in commands | {"errors.py"}:
            calls = [node.func for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
            assert not {"print", "os.write"} & {ast.unparse(call) for call in calls}, path


def test_no_module_looks_for_a_file_to_decide_what_to_do():
    for path in FILES:
        assert "find_spec" not in path.read_text(), path


def calls_without_encoding(path):
    """Calls that read or write a text in the encoding of the locale."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and "encoding" not in {each.arg for each in node.keywords}:
            name = getattr(node.func, "attr", "")
            opens = getattr(node.func, "id", "") == "open" and "b'" not in ast.unparse(node)
            if name in ("read_text", "write_text") or opens:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_texts_are_utf_8_in_any_locale():
    tools = [path for room in ("tools", "check") for path in (ROOT / room).rglob("*.py")]
    tools = [path for path in tools if path.parent.name not in ("scripts", "tests")]
    found = [text for path in [*FILES, *tools] for text in calls_without_encoding(path)]
    assert found == [], "pass encoding="


def public_functions(body):
    """The functions in the body of a module, and the methods of its classes, that others call."""
    for node in body:
        name = getattr(node, "name", "")
        if name.startswith("_") and not name.endswith("__"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef):
            yield node


def is_annotated(function):
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    named = [arg for arg in every if arg is not None and arg.arg not in ("self", "cls")]
    return function.returns is not None and all(arg.annotation for arg in named)


def test_public_functions_are_annotated():
    """mypy checks what is annotated, and lets private functions do without."""
    bare = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path in FILES
        for function in public_functions(parse(path).body)
        if not is_annotated(function)
    ]
    assert not bare


def test_code_is_not_dense():
    """8.9 tokens per line on average, so that golf costs. Tensor code may be denser."""
    sizes = [size(path) for path in FILES if path.is_relative_to(ROOT / "utils")]
    assert sum(s.tokens for s in sizes) / sum(s.lines for s in sizes) <= 8.9


# {folder: what its modules must not import}: whoever copies or reads a folder needs no more.
ABOVE = {
    "utils": {"sources", "tasks", "tools", "check", "lab", "tests", "train_*"},
    "sources": {"tasks", "tools", "check", "lab", "tests", "train_*"},
    "tasks": {"tools", "check", "lab", "tests", "train_*"},
    "tools": {"check", "lab", "tests", "train_*"},
    "check": {"utils", "sources", "tasks", "tools", "lab", "tests", "train_*"},
}
OLD_NAME = ROOT / "tools" / "check" / "__main__.py"  # of the command, for hooks of users


@pytest.mark.parametrize("folder", ABOVE)
def test_no_folder_imports_what_is_above_it(folder):
    for path in (ROOT / folder).rglob("*.py"):
        names = set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
        rooms = {re.sub("^train_.*", "train_*", name.partition(".")[0]) for name in names}
        assert path == OLD_NAME or not rooms & ABOVE[folder], path


def test_no_script_needs_a_data_source():
    for script in SCRIPTS:
        assert not [path for path in closure(script) if path.is_relative_to(ROOT / "sources")]


def test_pre_commit_runs_the_linter_of_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    requirements = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert f"ruff=={config['repos'][0]['rev'].removeprefix('v')}" in requirements
