"""What files of a copy use of the project, and what it no longer has.

Python files are {path: bytes}: `after`, the copy's after an update, including its owner's; `then`
and `now`, the project's before and after, without what is left out of the copy.
"""

import ast
from functools import cache


def stale_imports(after, then, now, moved):
    """Lines about imports of modules that are gone or have moved, and of names that are gone from a
    module. moved: {old path: new path}."""
    lines = []
    for path, text in sorted(after.items()):
        reported = set()
        for module, name in _imports(text):
            module = module if _file(f"{module}.{name}", then) is None else f"{module}.{name}"
            old = _file(module, then)
            new = _file(module, after) or _file(module, now)  # an option may not be copied
            if old is None or old == path or old in reported:
                continue
            known = _names(after.get(new, b"")) | _names(now.get(new, b""))
            if new is None:
                reported.add(old)
                place = f"{moved[old]} now" if old in moved else "gone, or left out"
                lines.append(f"{path} imports {old}, which is {place}: change the import")
            elif name in _names(then[old]) - known:
                lines.append(f"{path} imports {name}, which {new} no longer has: change that")
    return lines


def stale_overrides(after, then, now):
    """Lines about methods that override one which the project's class no longer has."""
    lines, old, new, every = [], _classes(then), _classes(now), _classes(after)
    for path, text in sorted(after.items()):
        ours = _classes({path: now.get(path, b"")})
        for name, (_, bases, methods) in _classes({path: text}).items():
            methods = methods - ours.get(name, (path, set(), set()))[2]
            ancestors = {a for base in bases for a in _line(base, every)}
            for base in sorted(ancestors & old.keys() & new.keys()):
                lost = old[base][2].difference(*(new[a][2] for a in _line(base, new) if a in new))
                lines += [
                    f"{path}: {name}.{method} is not called any more: {new[base][0]} no longer has "
                    f"{base}.{method}"
                    for method in sorted(methods & lost)
                    if not method.startswith("__")
                ]
    return lines


def stale_settings(after, then, now):
    """Lines about code that reads a setting, an attribute of `cfg`, which no class declares now."""
    gone = _settings(then) - _settings(now) - _settings(after)
    return [
        f"{path}:{node.lineno} reads cfg.{node.attr}, a setting that is gone: change that"
        for path, text in sorted(after.items())
        for node in _nodes(text)
        if isinstance(node, ast.Attribute) and node.attr in gone
        if ast.unparse(node.value).rpartition(".")[2] == "cfg"
    ]


def _settings(files):
    """The names of the fields and properties of all dataclasses."""
    return {
        each.target.id if isinstance(each, ast.AnnAssign) else each.name
        for text in files.values()
        for node in _class_definitions(text)
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for each in node.body
        if isinstance(each, ast.AnnAssign | ast.FunctionDef)
    }


def _classes(files):
    """{name: (path, names of its bases, names of its methods)} of all classes, those with the same
    name as one."""
    found = {}
    for path, text in files.items():
        for node in _class_definitions(text):
            _, bases, methods = found.setdefault(node.name, (path, set(), set()))
            bases |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            methods |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@cache
def _class_definitions(text):
    return [node for node in _nodes(text) if isinstance(node, ast.ClassDef)]


def _line(name, classes, seen=()):
    """The names of a class and of those that it inherits from."""
    if name not in seen:
        yield name
        for base in classes.get(name, ("", ()))[1]:
            yield from _line(base, classes, (*seen, name))


def _file(module, files):
    """The path of a module, among files; None if it is not there."""
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in files), None)


def _imports(text):
    """(module, imported name or None) of what a Python file imports."""
    for node in _nodes(text):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def _names(text):
    """The names that a Python file defines or imports, anywhere in it."""
    names = set()
    for node in _nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


@cache
def _nodes(text):
    """All nodes of the syntax tree of a text."""
    return list(ast.walk(_parsed(text)))


def _parsed(text):
    """The syntax tree; empty if it fails, as of a file with conflicts: the next update reads it."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
