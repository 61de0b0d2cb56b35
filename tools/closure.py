"""What a script needs: the project's modules that it imports, with their code lines and tokens.

    python -m tools.closure [SCRIPT ...]

Code lines do not include blank lines, comments and docstrings; tokens also show what denser lines
would hide. An f-string is one token, like any string (Python 3.12 splits it into several). A module
that is imported inside a function is an option: it is only needed if a setting selects it.
"""

import ast
import io
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tools.lessons import LADDER, ROOT

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


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
    return ast.parse(path.read_text())


@cache
def size(path):
    """Code lines and tokens of a file."""
    docstrings = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None:
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    lines, tokens, nested = set(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
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


def imports(path, root=ROOT):
    """The project's modules that a file imports when it is imported itself. Returns paths."""
    nodes = []
    for node in parse(path).body:
        nodes += ast.walk(node) if isinstance(node, ast.Try | ast.If) else [node]
    return _modules(nodes, root)


def lazy_imports(path, root=ROOT):
    """The project's modules that a file imports only inside functions. Returns paths."""
    return _modules(ast.walk(parse(path)), root) - imports(path, root)


def _modules(nodes, root):
    names = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    stems = [root / name.replace(".", "/") for name in names]
    paths = [path for s in stems for path in (s.with_suffix(".py"), s / "__init__.py")]
    return {path for path in paths if path.is_file() and size(path).lines}


def closure(*scripts, root=ROOT):
    """The modules that files import at module level, directly or indirectly, without the files."""
    modules, pending = set(), list(scripts)
    while pending:
        new = imports(pending.pop(), root) - modules - set(scripts)
        modules |= new
        pending += new
    return sorted(modules)


def depth(script, root=ROOT):
    """The length of the longest chain of imports below a script."""
    return max((1 + depth(path, root) for path in imports(script, root)), default=0)


def options(script, root=ROOT):
    """The Options of a script and of its closure, by name, sorted."""
    core, result, pending = closure(script, root=root), {}, [script]
    while pending:
        needed = {pending[0], *closure(pending.pop(0), root=root)}
        settings = {}
        for name, text in (pair for path in sorted(needed) for pair in _settings(path)):
            if text.startswith("--") or name not in settings:
                settings[name] = text
        for path in sorted({p for module in needed for p in lazy_imports(module, root)}):
            if path not in core and path.stem not in result:
                result[path.stem] = Option(path.stem, path, settings.get(path.stem, ""))
                pending.append(path)
    return dict(sorted(result.items()))


def _settings(path):
    """(module's name, setting) of a file's blocks `with option("SETTING"): from utils.X import`;
    (X, "used if present") where it calls find_spec("utils.X")."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "find_spec":
            yield node.args[0].value.rpartition(".")[2], "used if present"
        call = node.items[0].context_expr if isinstance(node, ast.With) else None
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "option":
            parts = getattr(call.args[0], "values", [call.args[0]])  # of an f-string
            texts = [part.value if isinstance(part, ast.Constant) else "NAME" for part in parts]
            for statement in ast.walk(node):
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    module = getattr(statement, "module", "")
                    for name in (module, *(alias.name for alias in statement.names)):
                        yield name.rpartition(".")[2], "".join(texts).partition(" (")[0]


def main():
    scripts = sys.argv[1:] or [rung.script for rung in LADDER]
    print(f"{'script':20}  modules  code lines  tokens  depth")
    for name in scripts:
        script = ROOT / name
        modules = closure(script)
        lines, tokens = total([script, *modules])
        print(f"{name:20}  {len(modules):7}  {lines:10}  {tokens:6}  {depth(script):5}")
    for folder in ("utils", "tools", "tests"):
        print(f"{folder + '/':20}  {'':7}  {total((ROOT / folder).rglob('*.py')).lines:10}")


if __name__ == "__main__":
    main()
