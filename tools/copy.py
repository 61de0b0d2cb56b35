"""Copy a script, its task and all modules that they need into your own folder, where it runs.

    python -m tools.copy train_ddp.py DEST
    python -m tools.copy train_ddp.py DEST --task text     or own: my_task.py, which you write
    python -m tools.copy train_ddp.py DEST --with sharded,weights
    python -m tools.copy train_ddp.py DEST --without hang,progress
    python -m tools.copy --update DEST
    python -m tools.copy --recipe ema DEST                 --undo takes it back

Modules that only a setting or a task of your own needs, and commands such as tools.report, are
copied only if --with names them (or --all). --without leaves out guards, modules that only watch
the run, with their lines in the script; --plain leaves out all of them. This prints what was
copied, and what was not. --update merges what has changed in this clone since then: files that you
have edited keep your edits, conflicts are marked as git marks them, and files that you have deleted
are not restored. --recipe makes the changes of a page of docs/recipes.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path

from tools.lib import recipes
from tools.lib.closure import Option, closure, options, purpose, size_of
from tools.lib.history import NoHistory, changed_files, head, is_ancestor, renamed, resolve, tree
from tools.lib.ladder import ROOT, RUNGS
from tools.lib.output import may_be_closed
from tools.lib.prune import GUARDS, RENAMED, without
from tools.lib.stale import stale_imports, stale_overrides, stale_settings
from tools.lib.update import (
    OWN,
    RECORD,
    SOURCES,
    CannotUpdate,
    apply,
    as_diff,
    base_of,
    checksum,
    guessed_record,
    new_record,
    plan,
    project_files,
    python_files,
    read,
    read_record,
    require_resolved,
    text_of_record,
    write_files,
)

TASKS = ("images", "text", "moe", "segmentation", "diffusion")
TASK_LINE = "import tasks.{} as task"
ANY_TASK_LINE = re.compile(TASK_LINE.format(r"\w+"))
LAUNCHER = ROOT / "tools" / "launch.py"  # launch/slurm and the pages use it in place of torchrun
COMMANDS = ["tools/report.py"]  # what the pages run after the training
COMMANDS_OF_TASKS = {
    "images": [f"tasks/images/{name}.py" for name in ("predict", "evaluate", "export")],
    "diffusion": ["tasks/diffusion/sample.py"],
}
SOURCES_FOR_TASKS = ("mixture", "packing", "parquet", "samplers", "shards", "streams", "tokens")
FOR_TASKS = ["utils/sample_random.py", *(f"sources/{name}.py" for name in SOURCES_FOR_TASKS)]
NOT_TO_COPY = ("bench.yaml", "tutorial.yaml")  # configs for comparisons


def with_task(script, task):
    """The text of a script of the project, with a different task."""
    text, line = script.read_text(encoding="utf-8"), TASK_LINE.format(RUNGS[script.name].task)
    if text.count(line) != 1:
        sys.exit(f"error: {script} no longer has the line  {line}: restore it; change it in a copy")
    return of_task(text, task)


def of_task(text, task):
    """The text of a script as a copy of it has that trains a task, or one of the user's own."""
    line = "import my_task as task" if task == OWN else TASK_LINE.format(task)
    text = ANY_TASK_LINE.sub(line, text)
    # In the command of the docstring.
    return text if task == "images" else text.replace(" --model vit_tiny", "")


def task_module(task):
    """The path of a task's module."""
    stem = ROOT / "tasks" / task
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def files_to_copy(script, task="images", chosen=()):
    """The script, the modules that it and the task import, and the chosen Options with theirs."""
    shared = [path for path in closure(script) if ROOT / "tasks" not in path.parents]
    added = [LAUNCHER, *(option.path for option in chosen)]
    if task != OWN:
        added.append(task_module(task))
    return [script, *sorted({*shared, *closure(*added), *added})]


def options_and_commands(script, task="images"):
    """{name: Option} of what is copied only if it is named."""
    known = {} if task == OWN else options(task_module(task))
    shared = options(script).items()
    known |= {n: o for n, o in shared if ROOT / "tasks" not in o.path.parents}
    if task != "images":  # diffusion reads images, but not in as many ways
        known = {n: o for n, o in known.items() if ROOT / "tasks" / "images" not in o.path.parents}
    for name in COMMANDS + COMMANDS_OF_TASKS.get(task, []):
        path = ROOT / name
        module = name.removesuffix(".py").replace("/", ".")
        known[path.stem] = Option(path.stem, path, f"python -m {module}")
    for name in FOR_TASKS:  # images has an option "shards", which brings the module
        path, module = ROOT / name, name.removesuffix(".py").replace("/", ".")
        known.setdefault(path.stem, Option(path.stem, path, f"import {module}"))
    return known


def with_packages(files):
    """{path below the destination: bytes} of files, and of the packages that they are in."""
    result = {}
    for file in files:
        path = file.relative_to(ROOT)
        for package in path.parents[:-1]:
            result.setdefault(package / "__init__.py", b"")
        result[path] = file.read_bytes()
    return result


def contents(files, task="images"):
    """{path below the destination: bytes} of a copy of the project's files."""
    result = {Path("utils") / "LICENSE": (ROOT / "LICENSE").read_bytes()}
    if task == "images":
        for config in (ROOT / "configs").glob("*.yaml"):
            if config.name not in NOT_TO_COPY:
                result[config.relative_to(ROOT)] = config.read_bytes()
    result |= with_packages(files)
    script = files[0].relative_to(ROOT)
    result[script] = with_task(files[0], task).encode()
    return result


def _in_copy(path):
    return str(path.relative_to(ROOT))


def report(new, files, left_out, guards):
    """What was copied, {path: bytes}, of which files, and the options and guards that were not."""
    sizes = {name: size_of(new[name].decode()).lines for name in map(_in_copy, files)}
    width = max(map(len, sizes))
    lines = [f"{'file':{width}}  code lines  purpose"]
    for file in files:
        name = _in_copy(file)
        lines.append(f"{name:{width}}  {sizes[name]:10}  {purpose(file)}")
    lines.append(f"{f'{len(files)} files':{width}}  {sum(sizes.values()):10}")
    if left_out:
        lines += ["", "Options that were not copied (--with NAME adds them), and their settings:"]
        for option in left_out:
            lines += [f"  {option.name}: {option.setting}", f"      {purpose(option.path)}"]
    if guards:
        lines += ["", "Left out, with the lines that call them:"]
        lines += [f"  {name}: {GUARDS[name].purpose}" for name in sorted(guards)]
    needed = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    if not any(ROOT / "tasks" in file.parents for file in files):
        needed = [name for name in needed if not name.startswith("torchvision")]
        lines += ["", "Write my_task.py: docs/own-task.md says how."]
    lines += ["", f"These files need {', '.join(needed)}."]
    lines.append("They are MIT licensed: keep the license, utils/LICENSE, with them.")
    return "\n".join(lines)


def parse_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.copy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("paths", nargs="*", type=Path, metavar="SCRIPT DEST", help="a folder")
    parser.add_argument(
        "--task",
        choices=(*TASKS, OWN),
        help="what the script trains (default: the task that it names, or that DEST has); own: the "
        "module my_task, which you write",
    )
    listed = dict(metavar="NAME,...", action="append", default=[])
    parser.add_argument(
        "--with", dest="options", help="also copy these modules, listed in docs/copy.md", **listed
    )
    parser.add_argument("--all", action="store_true", help="--with all modules that it can name")
    parser.add_argument("--without", help=f"leave out some of {','.join(GUARDS)}", **listed)
    parser.add_argument("--plain", action="store_true", help="--without all of them")
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    parser.add_argument("--update", type=Path, metavar="DEST", help="merge what is new into a copy")
    parser.add_argument("--dry-run", action="store_true", help="with --update: list the changes")
    parser.add_argument("--diff", action="store_true", help="with --update: print the changes")
    parser.add_argument(
        "--from", dest="commit", help="with --update: the commit whose files DEST has"
    )
    parser.add_argument("--recipe", choices=recipes.NAMES, metavar="NAME", help="change a copy")
    parser.add_argument("--undo", action="store_true", help="with --recipe: take it back")
    args = parser.parse_args()
    args.options, args.without = (
        [name for words in lists for name in words.split(",")]
        for lists in (args.options, args.without)
    )
    if unknown := sorted(set(args.without) - GUARDS.keys()):
        parser.error(f"cannot leave out {', '.join(unknown)}: choose from {', '.join(GUARDS)}")
    number = 0 if args.update else 1 if args.recipe else 2
    if len(args.paths) != number:
        parser.error("pass SCRIPT and DEST, or --update DEST, or --recipe NAME DEST")
    if args.update is None and (args.dry_run or args.diff or args.commit is not None):
        parser.error("--dry-run, --diff and --from are for --update")
    if number == 2:
        script, args.destination = args.paths
        if script.parent.name == "one_file":
            parser.error(f"{script} needs no other file: copy it by itself")
        if script.name not in RUNGS:
            parser.error(f"there is no script {script.name}: choose from {', '.join(RUNGS)}")
        args.script = script.name
    return args


def choose(names, known):
    """The Options with these names. known: {name: Option}; guards are known, too."""
    if unknown := sorted(set(names) - known.keys()):
        choices = ", ".join([*known, *GUARDS])
        text = f"error: unknown option {', '.join(unknown)}: choose from {choices}"
        print(text, file=sys.stderr)
        sys.exit(2)
    return [known[name] for name in names]


def texts(scripts, options, guards=()):
    """{path in a copy: bytes}. scripts: {name: its task}. guards: the names of those that are left
    out. Later versions call this, to know what this one has copied."""
    result = {}
    for script, task in scripts.items():
        known = options_and_commands(ROOT / script, task) if options else {}
        chosen = [known[name] for name in options if name in known]
        files = files_to_copy(ROOT / script, task, chosen)
        result |= {str(path): text for path, text in contents(files, task).items()}
    return without(result, guards)


def make_copy(args):
    """Copy a script. Raises CannotUpdate if the folder already has something different."""
    folder = args.destination
    if folder.resolve() == ROOT:
        raise CannotUpdate(f"{folder} is this clone: name a different folder")
    record = read_record(folder) or new_record(head())
    if record["commit"] != head():
        raise CannotUpdate(
            f"{folder} is a copy of a different commit: run python -m tools.copy --update {folder}"
        )
    trained = record["scripts"].get(args.script)
    others, usual = [*record["scripts"].values()], RUNGS[args.script].task
    if others and (usual == "images" or OWN in others):
        usual = others[0]
    task = args.task or trained or usual
    if trained not in (None, task) and not args.force:
        raise CannotUpdate(
            f"{args.script} in {folder} trains {trained}: pass --task {trained}, or --force"
        )
    known = options_and_commands(ROOT / args.script, task)
    kept = GUARDS.keys() & set(args.options)  # of what --plain would leave out
    options = choose(known if args.all else set(args.options) - kept, known)
    scripts = record["scripts"] | {args.script: task}
    chosen = {*record["options"], *(option.name for option in options)}
    guards = (GUARDS.keys() if args.plain else {*args.without, *record["without"]}) - kept
    if record["scripts"] and guards != set(record["without"]):  # its scripts share their modules
        raise CannotUpdate(
            f"the scripts in {folder} share their modules, without "
            f"{', '.join(record['without']) or 'none of the guards'}: change that for all of them, "
            f"by python -m tools.copy --update {folder} --with or --without NAME"
        )
    new = texts(scripts, chosen, guards)
    require_nothing_hidden(folder, new)
    sums = {path: checksum(text) for path, text in new.items()}
    present = {path: read(folder / path) for path in new}
    changed = [path for path, text in new.items() if present[path] != text]
    differ = [path for path in changed if present[path] is not None]
    edited = [path for path in differ if record["files"].get(path) == sums[path]]  # by the owner
    existing = [
        path
        for path in differ
        if path not in edited and record["files"].get(path) != checksum(present[path])
    ]
    if existing and not args.force:
        raise CannotUpdate(
            f"{folder} already has different files {', '.join(existing)}: pass --force to "
            f"overwrite them"
        )
    sums = record["files"] | sums
    text = text_of_record(record["commit"], record["since"], scripts, chosen, guards, sums)
    kept = [] if args.force else edited
    written = {path: new[path] for path in changed if path not in kept}
    write_files(folder, written | {RECORD: text})
    options = [option for name, option in known.items() if name in chosen]
    files = files_to_copy(ROOT / args.script, task, options)
    files = [file for file in files if _in_copy(file) in new]
    left_out = [option for option in known.values() if option.path not in files]
    print(report(new, files, left_out, guards))
    if kept:
        print(f"kept as you have edited them: {', '.join(kept)}")
    print_dirt(new)


def require_nothing_hidden(folder, paths):
    """Raise CannotUpdate if a folder of a copy's files would hide a module of the owner's."""
    for name in sorted({path.partition("/")[0] for path in paths if "/" in path}):
        if (folder / f"{name}.py").exists():
            raise CannotUpdate(
                f"the folder {name} would hide {folder}/{name}.py: rename that file, or copy to a "
                f"different folder"
            )


def print_dirt(new):
    """Warn of files that differ from the commit in the record, or if the record has none."""
    if not (ROOT / ".git").exists():
        return
    try:
        shared = [path for path in tree(resolve("HEAD")) if path.startswith("utils/")]
        missing = [path for path in shared if not (ROOT / path).exists()]
        if dirty := dirty_files([*new, *missing]):
            text = f"{', '.join(dirty)} of this clone differ from its commit"
            print(f"warning: {text}: --update will not know what was copied", file=sys.stderr)
    except NoHistory as error:
        print(f"warning: --update will need --from COMMIT, because {error}", file=sys.stderr)


def dirty_files(paths):
    """Which files of a copy, or of those that are missing in this clone, differ from its commit."""
    used, known = {SOURCES.get(path, path) for path in paths}, tree(resolve("HEAD"))
    missing = {path for path in used & known.keys() if not (ROOT / path).exists()}
    return sorted(used & {*changed_files()} | missing)


def options_of(record, known, moved):
    """The names of the options that a copy has: some may have moved since it was made.

    known: {name: Option}.
    """
    paths = {_in_copy(option.path): name for name, option in known.items()}
    names = set(record["options"]) & known.keys()
    is_guessed = None in record["files"].values()  # what is there was chosen
    for path in record["files"]:
        if is_guessed or Path(path).stem in record["options"]:
            names |= {paths[each] for each in (path, moved.get(path)) if each in paths}
    return names


def with_more(new, paths):
    """`new`, {path: bytes}, with the files of `paths` that this clone has, and what they import:
    the owner of a copy may have copied more, as for a recipe."""
    guards = {guard.path for guard in GUARDS.values()}
    more = [ROOT / path for path in sorted(paths - new.keys() - guards) if path.endswith(".py")]
    more = [path for path in more if path.is_file() and path.stat().st_size]
    needed = [f for f in {*more, *closure(*more)} if _in_copy(f) not in guards]
    return {str(path): text for path, text in with_packages(needed).items()} | new


def update(args):
    """Merge this clone's commit into a copy. Returns 1 if there are conflicts, or files that use
    what is gone; otherwise 0."""
    folder, new_commit = args.update, resolve("HEAD")
    if not folder.is_dir():
        raise CannotUpdate(f"there is no folder {folder}")
    try:
        record = read_record(folder)
    except CannotUpdate:
        if args.commit is None:  # the remedy
            raise
        record = None
    if args.commit is not None:
        record = guessed_record(folder, resolve(args.commit), record)
    elif record is None or record["commit"] is None:
        raise CannotUpdate(f"{folder / RECORD} names no commit: pass --from COMMIT, of its files")
    require_resolved(folder, record["files"])
    old_commit = resolve(record["commit"])
    if old_commit != new_commit and is_ancestor(new_commit, old_commit):
        raise CannotUpdate(f"{folder} is newer than this clone: run git pull here")
    moved = renamed(old_commit, new_commit)
    had = GUARDS.keys() & {RENAMED.get(name, name) for name in record["without"]}
    kept, every = GUARDS.keys() & set(args.options), {}
    guards = (GUARDS.keys() if args.plain else had.union(args.without)) - kept
    wanted = set(args.options) - kept
    scripts = {moved.get(script, script): task for script, task in record["scripts"].items()}
    for script, task in scripts.items():
        every |= options_and_commands(ROOT / script, task)
    choose(wanted, every)
    chosen = {*every} if args.all else options_of(record, every, moved) | wanted
    new = texts(scripts, chosen, guards)
    copied = {moved.get(path, path) for path in record["files"]}
    if dirty := dirty_files(new.keys() | copied):
        raise CannotUpdate(
            f"{', '.join(dirty)} of this clone differ from its commit: commit, stash, or restore "
            f"them"
        )
    new = without(with_more(new, copied), guards)
    require_nothing_hidden(folder, new)
    base = base_of(record, old_commit, of_task)
    named = {_in_copy(every[name].path) for name in wanted}
    for path in named.union(GUARDS[name].path for name in kept):
        if not (folder / path).exists():  # it was deleted: --with brings it back
            base.pop(path, None)
    labels = old_commit[:12], new_commit[:12]
    changes = plan(folder, base, new, moved, labels)
    # With --diff, stdout is a patch, for a pager or a file.
    list_changes = partial(print, file=sys.stderr if args.diff else sys.stdout)
    for change in changes:
        place = f"{change.old_path} -> {change.path}" if change.old_path else change.path
        count = f"  ({change.conflicts})" if change.conflicts else ""
        list_changes(f"{change.kind:12}  {place}{count}")
    conflicts = [change.path for change in changes if change.conflicts]
    since = resolve(record["since"] or old_commit)
    after = python_files(folder, changes)
    then, now = project_files(since), project_files(new_commit)
    left_out = {GUARDS[name].path for name in guards}
    now = {path: text for path, text in now.items() if path not in left_out}
    now |= {path: text for path, text in new.items() if path.endswith(".py")}
    stale = stale_imports(after, then, now, renamed(since, new_commit))
    stale += stale_overrides(after, then, now) + stale_settings(after, then, now)
    list_changes("".join(f"{line}\n" for line in stale), end="")
    if args.diff:
        print(as_diff(folder, changes), end="")
    if args.dry_run or args.diff:
        if not any(c.contents is not None or c.kind == "removed" for c in changes):
            list_changes(f"{folder} is up to date with {new_commit[:12]}")
        return 1 if conflicts or stale else 0
    ignored = {change.path for change in changes if change.kind.startswith("in the way")}
    sums = {path: checksum(text) for path, text in new.items() if path not in ignored}
    since = since if conflicts or stale else None  # the next update looks at all of this again
    text = text_of_record(new_commit, since, scripts, chosen, guards, sums)
    apply(folder, changes, text)
    origin = f", from {old_commit[:12]}" * (old_commit != new_commit)
    state = "has conflicts with" if conflicts else "is up to date with"
    print(f"{folder} {state} {new_commit[:12]}{origin}")
    if conflicts:
        print(f"resolve the conflicts in {', '.join(conflicts)}: <<<<<<< yours ... >>>>>>> new")
    return 1 if conflicts or stale else 0


def change(folder, name, undo):
    """Apply a recipe to a copy, with the modules that it imports, or take it back."""
    record = read_record(folder)
    if record is None or record["commit"] != head():
        raise CannotUpdate(f"{folder} is no copy of this commit: update it first")
    require_resolved(folder, record["files"])

    def text_of(path):
        found = read(folder / path)
        return found and found.decode()

    texts = recipes.apply(name, record["scripts"], text_of, undo)
    written = {path: text.encode() for path, text in texts.items() if text is not None}
    code = [text for path, text in texts.items() if text is not None and path.endswith(".py")]
    added = with_packages(() if undo else recipes.modules_for(code))
    added = {str(p): text for p, text in added.items() if not (folder / p).exists()}
    sums = record["files"] | {path: checksum(text) for path, text in added.items()}
    facts = (record[key] for key in ("commit", "since", "scripts", "options", "without"))
    write_files(folder, written | added | {RECORD: text_of_record(*facts, sums)})
    for path, text in texts.items():
        if text is None:
            (folder / path).unlink()
    for path in sorted(texts.keys() | added.keys()):
        kind = "added" if path in added else "removed" if texts[path] is None else "changed"
        print(f"{kind:8}  {path}")
    print(f"{name} is {'taken back' if undo else 'applied'}: docs/recipes/{name}.md explains it")


def main():
    args = parse_arguments()
    try:
        with may_be_closed():
            if args.update:
                return update(args)
            if args.recipe:
                change(args.paths[0], args.recipe, args.undo)
            else:
                make_copy(args)
            return 0
    except (CannotUpdate, NoHistory, recipes.CannotApply) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
