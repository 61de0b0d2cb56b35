"""The house: budgets, settings, circles of imports, attributes assigned from outside, types."""

import ast
import re
from dataclasses import fields

import pytest

from tasks.images import Settings
from tools.copy import texts
from tools.lib.closure import closure, imports, modules_in, option_blocks, parse, size, size_of
from tools.lib.ladder import ROOT
from tools.lib.prune import GUARDS
from utils.config import Config

FILES = sorted(
    path
    for folder in ("utils", "tasks", "sources")
    for path in (ROOT / folder).rglob("*.py")
    if size(path).lines
)
SCRIPTS = sorted(ROOT.glob("train_*.py"))

# Each is what PyTorch's interface asks for, or an object that the function has just made.
ASSIGNED = {
    "contract.py: module.training",  # of a copy of the model
    "distributed.py: model.module",  # DistributedDataParallel, for one backward pass
    "skipped_steps.py: optimizer.found_inf",  # as torch.amp.GradScaler does
    "one_pixel.py: module.__class__",  # in place, so that hooks stay
    "sync_batchnorm.py: module.__class__",
    "tensor_parallel.py: module.__class__",  # a ParallelStyle changes a module in place
    "tensor_parallel.py: module.mesh",
    "tensor_parallel.py: module.forward",
    "experts.py: module.forward",
    "small_models.py: model.conv1",
    "small_models.py: model.maxpool",
    "spawn.py: os.environ",
}


def names_in(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def imported_names(tree):
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def targets_in(function):
    """What a function assigns to."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target


def assigned_attributes(path):
    """Attributes of modules, or of parameters other than self, that a file assigns."""
    tree = parse(path)
    imported = imported_names(tree)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        parameters = {arg.arg for arg in function.args.args + function.args.kwonlyargs}
        foreign = (parameters | imported) - {"self", "ctx", "cls"}
        for node in ast.walk(function):  # what comes from a parameter, one after another
            if isinstance(node, ast.For) and foreign & names_in(node.iter):
                foreign |= names_in(node.target)
        for target in targets_in(function):
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") in foreign:
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


def test_no_module_looks_for_a_file_to_decide_what_to_do():
    for path in FILES:
        assert "find_spec" not in path.read_text(), path


def is_private(node):
    return getattr(node, "name", "_").startswith("_")


def test_public_functions_are_annotated():
    """mypy checks what is annotated, and lets private functions do without."""
    for path in FILES:
        public = [node for node in parse(path).body if not is_private(node)]
        classes = [node for node in public if isinstance(node, ast.ClassDef)]
        public += [node for each in classes for node in each.body if not is_private(node)]
        for function in [node for node in public if isinstance(node, ast.FunctionDef)]:
            named = [*function.args.args, *function.args.kwonlyargs]
            bare = {arg.arg for arg in named if not arg.annotation} - {"self", "cls"}
            assert function.returns and not bare, f"{path}:{function.lineno}"


# Code lines. Whoever raises one lowers another, or says which promise is worth it.
CORE = {
    "batches": 45,
    "checkpoint": 303,
    "config": 190,
    "contract": 100,
    "data": 229,
    "distributed": 165,
    "errors": 22,
    "guards/__init__": 10,
    "guards/finite": 20,
    "guards/hang": 20,
    "guards/lock": 20,
    "guards/preemption": 59,
    "guards/progress": 25,
    "guards/replicas": 106,
    "metrics": 142,
    "optim": 50,
    "options/__init__": 30,
    "reports": 65,
    "runtime": 50,
    "seeds": 50,
    "signals": 22,
    "sync_batchnorm": 90,
}
OTHERS = {
    "cache_file": 30,
    "options/audit": 65,
    "options/loggers": 200,
    "options/profile": 105,
    "options/sharded": 165,
    "options/skipped_steps": 80,
    "options/step_log": 80,
    "options/timing": 185,
    "rungs/accumulation": 50,
    "rungs/amp": 23,
    "rungs/context_parallel": 120,
    "rungs/experts": 70,
    "rungs/fsdp": 178,
    "rungs/graph": 90,
    "rungs/groups": 24,
    "rungs/model_parallel": 135,
    "rungs/parameters": 45,
    "rungs/pipeline": 270,
    "rungs/spawn": 72,
    "rungs/tensor_parallel": 125,
    "sample_random": 200,
    "sampler": 15,
}
DEFAULT, PLAIN = 1772, 1386  # of the modules of utils that a copy of train_ddp.py has


def test_each_module_of_utils_keeps_its_budget():
    utils = ROOT / "utils"
    lines = {
        path.relative_to(utils).with_suffix("").as_posix(): size(path).lines
        for path in FILES
        if path.is_relative_to(utils)
    }
    budgets = CORE | OTHERS
    assert lines.keys() == budgets.keys()
    assert [name for name in lines if lines[name] > budgets[name]] == []


@pytest.mark.parametrize(("guards", "most"), [((), DEFAULT), (GUARDS, PLAIN)])
def test_a_copy_of_train_ddp_keeps_its_budget(guards, most):
    files = texts({"train_ddp.py": "own"}, [], guards)
    names = {f"utils/{name}.py" for name in CORE} & files.keys()
    assert sum(size_of(files[name].decode()).lines for name in names) <= most


def test_code_is_not_dense():
    """9.6 tokens per line on average, so that golf costs. Tensor code may be denser."""
    sizes = [size(path) for path in FILES if path.is_relative_to(ROOT / "utils")]
    assert sum(s.tokens for s in sizes) / sum(s.lines for s in sizes) <= 9.6


# A new setting names the one that it replaces, or its reason.
SETTINGS = """
log_steps logger timing profile audit max_skipped_steps
output_dir resume allow_config_change save_epochs save_steps save_minutes keep_last save_sharded
device dtype sync_bn compile deterministic num_workers num_threads timeout
epochs global_batch_size optimizer lr momentum weight_decay warmup_epochs lr_schedule clip_norm seed
"""
OF_IMAGES = """
dataset data_dir synthetic_samples image_size augment model weights freeze val_fraction
on_bad_sample cache_dir loader
"""


def test_settings_are_frozen():
    assert [field.name for field in fields(Config)] == SETTINGS.split()
    assert [field.name for field in fields(Settings)] == (SETTINGS + OF_IMAGES).split()


@pytest.mark.parametrize("protocol", ["Guard", "BatchDataset"])
def test_no_method_of_a_protocol_has_a_single_implementation(protocol):
    nodes = [node for path in FILES for node in ast.walk(parse(path))]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    kinds = {protocol}
    for _ in classes:  # with the classes of classes
        for name, node in classes.items():
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            kinds |= {name} if bases & kinds else set()
    functions = [
        function.name
        for name in kinds - {protocol}
        for function in classes[name].body
        if isinstance(function, ast.FunctionDef)
    ]
    for function in classes[protocol].body:
        if isinstance(function, ast.FunctionDef):
            assert functions.count(function.name) >= 2, function.name


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
    """But for images that stay on the GPU, which is the default there."""
    needed = {path for script in SCRIPTS for path in closure(script)}
    names = {path.name for path in needed if path.is_relative_to(ROOT / "sources")}
    assert names <= {"resident.py"}
