"""Leave modules that only watch a run out of a copy, with the code that uses them.

What uses such a module is taken out of the other files, whole statements or elements at a time: its
imports; calls for their effect (`check_task(...)`), with the `if` around them; decorators;
arguments of build_hooks(); rows of HOOKS (utils/options/__init__.py); and the settings that nothing
reads then.
"""

import ast
import re
from functools import cache
from typing import NamedTuple

from tools.lib.closure import rows_of_table

SETTINGS = "utils/config.py"
TABLE = "utils/options/__init__.py"


class Guard(NamedTuple):
    """A module that can be left out."""

    module: str
    purpose: str  # what a copy without it does not have

    @property
    def path(self):
        """The path of its file in a copy."""
        return self.module.replace(".", "/") + ".py"

    def at(self, path):
        """The same, with its file at a different path."""
        return self._replace(module=path.removesuffix(".py").replace("/", "."))


GUARDS = {
    "contract": Guard(
        "utils.contract",
        "tries the task on a few samples before the first epoch; refuses missing names, a loss or "
        "a metric that is a mean, and samples that differ between ranks or after a resume",
    ),
    "finite": Guard(
        "utils.finite", "refuses to save a model that holds inf or NaN, and keeps the last good one"
    ),
    "preemption": Guard(
        "utils.preemption", "saves every few minutes, and on SIGTERM or Ctrl-C before the run stops"
    ),
    "progress": Guard("utils.progress", "shows the step, the loss and the time left"),
    "replicas": Guard(
        "utils.replicas",
        "refuses to start if ranks differ in code, settings or data, and to go on or to save if "
        "their weights, buffers or optimizers differ",
    ),
    "reports": Guard(
        "utils.reports",
        "reports one error for all ranks, on one line if it is not a bug, and ends every rank with "
        "an exit code that schedulers know",
    ),
    "run_folder": Guard(
        "utils.run_folder",
        "locks the output folder against a second run, which would overwrite files of the first",
    ),
    "watchdog": Guard(
        "utils.watchdog", "names the rank that hangs, or the host that is lost, and where"
    ),
}


class CannotLeaveOut(Exception):
    """Files need the module; the message names all."""

    def __init__(self, paths, guard):
        verb = "needs" if len(paths) == 1 else "need"
        super().__init__(f"{', '.join(sorted(paths))} {verb} {guard.path}")
        self.guard = guard


def without(files, names, guards=GUARDS):
    """A copy, {path: bytes}, without the guards of these names. guards: {name: Guard} as they were
    when it was made. Raises CannotLeaveOut."""
    files, hooks = dict(files), {guard.path for guard in guards.values()}
    removed = {name: files.pop(guards[name].path, b"").decode() for name in sorted(names)}
    for name, text in removed.items():
        guard, needed_by = guards[name], []
        for path, contents in files.items():
            if path.endswith(".py") and guard.module in contents.decode():
                edited = _without_module(contents.decode(), guard.module)
                if edited is None or path in hooks or _is_option(path):  # calls would be missed
                    needed_by.append(path)
                else:
                    files[path] = edited.encode()
        if needed_by:
            raise CannotLeaveOut(needed_by, guard)
        unread = _attributes(text) - set().union(
            *(_attributes(t.decode()) for path, t in files.items() if path.endswith(".py"))
        )
        files = {path: _without_settings(path, t, unread) for path, t in files.items()}
    return files


def can_leave_out(files, kept=()):
    """The names of the guards that a copy, {path: bytes}, can be without, all at once. kept: of
    guards that stay."""
    names = [name for name in GUARDS if GUARDS[name].path in files and name not in kept]
    while True:
        try:
            without(files, names)
            return names
        except CannotLeaveOut as error:
            names = [name for name in names if GUARDS[name] != error.guard]


@cache
def _attributes(text):
    """The names behind a dot, and the strings of HOOKS, that a file reads."""
    tree = ast.parse(text)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {row[0] for _, row in rows_of_table(tree)}


def _is_option(path):
    return path.startswith("utils/options/") and path != TABLE


def _without_module(text, module):
    """A file's text without what uses a module; None if it needs the module for more than that."""
    tree = ast.parse(text)
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }
    finder = _Finder(module, names)
    finder.visit(tree)
    rows = [(row, "") for row, value in rows_of_table(tree) if value[2] == module]
    text = _edited(text, finder.edits + rows)
    text = _without_unused_imports(text, _names(tree))
    return None if names & _names(ast.parse(text)) else text


class _Finder(ast.NodeVisitor):
    """Collects edits: (node, its new text, "" if it goes)."""

    def __init__(self, module, names):
        self.module, self.names, self.edits = module, names, []

    def is_effect(self, node):
        call = node.value if isinstance(node, ast.Expr) else None
        return isinstance(call, ast.Call) and ast.unparse(call.func) in self.names

    def visit_ImportFrom(self, node):
        if node.module == self.module:
            self.edits.append((node, ""))

    def visit_Expr(self, node):
        if self.is_effect(node):
            self.edits.append((node, ""))

    def visit_FunctionDef(self, node):
        used = [each for each in node.decorator_list if ast.unparse(each) in self.names]
        self.edits += [(decorator, "") for decorator in used]
        self.generic_visit(node)

    def visit_If(self, node):
        if not node.orelse and all(map(self.is_effect, node.body)):
            self.edits.append((node, ""))
        else:
            self.generic_visit(node)

    def visit_Assign(self, node):
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "build_hooks":
            kept = [ast.unparse(arg) for arg in call.args if ast.unparse(arg) not in self.names]
            if len(kept) < len(call.args):
                target = ast.unparse(node.targets[0])
                self.edits.append((node, f"{target} = build_hooks({', '.join(kept)})"))


def _edited(text, edits):
    """A text with whole lines replaced. edits: (node, its new text, "" if it goes)."""
    lines = text.splitlines(keepends=True)
    for node, new in edits:
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        lines[node.lineno - 1] = new and f"{indent}{new}\n"
    return "".join(lines)


def _names(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _without_unused_imports(text, used_before):
    """A text without imports of names that were used before, and no longer are."""
    tree, edits = ast.parse(text), []
    unused = used_before - _names(tree)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept = [alias for alias in node.names if (alias.asname or alias.name) not in unused]
            if len(kept) < len(node.names):
                node.names = kept
                edits.append((node, ast.unparse(node) if kept else ""))
    return _edited(text, edits)


def _without_settings(path, contents, unread):
    """A file without settings, as fields of config.py and as keys of configs/*.yaml."""
    if path == SETTINGS:
        fields = [node for node in ast.walk(ast.parse(contents)) if isinstance(node, ast.AnnAssign)]
        edits = [(node, "") for node in fields if ast.unparse(node.target) in unread]
        return _edited(contents.decode(), edits).encode()
    if path.endswith(".yaml") and unread:
        names = "|".join(map(re.escape, sorted(unread)))
        return re.sub(rf"^({names}):.*\n", "", contents.decode(), flags=re.MULTILINE).encode()
    return contents
