"""Copy a script, its task and all modules that they need into your own folder, where it runs.

    python -m tools.copy train_ddp.py DEST
    python -m tools.copy train_ddp.py DEST --task text
    python -m tools.copy train_ddp.py DEST --with sharded weights

Modules that only a setting needs are copied only if --with names them (or --all). This prints what
was copied and which options were not.
"""

import argparse
import sys
from pathlib import Path

from tools.closure import closure, options, purpose, size, total
from tools.lessons import LADDER, ROOT

TASKS = ("images", "text", "segmentation")
TASK_LINE = "import tasks.{} as task"


def with_task(script, task):
    """The text of a script that trains the images task, with a different task in its place."""
    text, line = script.read_text(), TASK_LINE.format("images")
    if text.count(line) != 1:
        sys.exit(f"error: {script} no longer has the line  {line}: restore it; change it in a copy")
    text = text.replace(line, TASK_LINE.format(task))
    if task != "images":
        text = text.replace(" --model vit_tiny", "")  # in the command of the docstring
    return text


def task_module(task):
    """The path of a task's module."""
    stem = ROOT / "tasks" / task
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def files_to_copy(script, task="images", chosen=()):
    """The script, the modules that it and the task import, and the chosen Options with theirs."""
    images, start = task_module("images"), task_module(task)
    shared = [path for path in closure(script) if images.parent not in (path.parent, path)]
    added = [option.path for option in chosen]
    return [script, *sorted({*shared, start, *closure(start), *closure(*added), *added})]


def contents(files, task="images"):
    """{path below the destination: bytes} of a copy of the project's files."""
    result = {Path("utils") / "LICENSE": (ROOT / "LICENSE").read_bytes()}
    for file in files:
        path = file.relative_to(ROOT)
        for package in path.parents[:-1]:
            result.setdefault(package / "__init__.py", b"")
        result[path] = file.read_bytes()
    script = files[0].relative_to(ROOT)
    result[script] = with_task(files[0], task).encode()
    return result


def copy(files, destination, task="images"):
    """Copy files of the project, each to its place below `destination`."""
    for path, content in contents(files, task).items():
        target = destination / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def report(files, left_out):
    """What was copied, and the options that were not."""
    width = max(len(str(file.relative_to(ROOT))) for file in files)
    lines = [f"{'file':{width}}  code lines  purpose"]
    for file in files:
        name = str(file.relative_to(ROOT))
        lines.append(f"{name:{width}}  {size(file).lines:10}  {purpose(file)}")
    lines.append(f"{f'{len(files)} files':{width}}  {total(files).lines:10}")
    if left_out:
        lines += ["", "Options that were not copied (--with NAME adds them), and their settings:"]
        for option in left_out:
            lines += [f"  {option.name}: {option.setting}", f"      {purpose(option.path)}"]
    lines += ["", "These files are MIT licensed: keep the license, utils/LICENSE, with them."]
    return "\n".join(lines)


def parse_arguments():
    """The command line, and the Options that it selects."""
    parser = argparse.ArgumentParser(prog="python -m tools.copy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [rung.script for rung in LADDER]
    parser.add_argument("script", type=lambda path: Path(path).name, choices=names)
    parser.add_argument("destination", type=Path, help="a folder; it is created if necessary")
    parser.add_argument("--task", choices=TASKS, default="images", help="what the script trains")
    parser.add_argument(
        "--with",
        dest="options",
        metavar="OPTION",
        action="extend",
        nargs="+",
        default=[],
        help="modules that a setting needs",
    )
    parser.add_argument("--all", action="store_true", help="all of these modules")
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    args = parser.parse_args()
    known = options(ROOT / args.script) | options(task_module(args.task))
    if args.task != "images":
        known = {n: o for n, o in known.items() if "images" not in o.path.parts}
    unknown = sorted(set(args.options) - known.keys())
    if unknown:
        parser.error(f"unknown option {', '.join(unknown)}: choose from {', '.join(known)}")
    return args, known


def main():
    args, known = parse_arguments()
    chosen = list(known.values()) if args.all else [known[name] for name in args.options]
    files = files_to_copy(ROOT / args.script, args.task, chosen)
    for name in ("utils", "tasks"):
        if (args.destination / f"{name}.py").exists():
            sys.exit(
                f"error: the folder {name} would hide {args.destination}/{name}.py: rename that "
                f"file, or copy to a different folder"
            )
    existing = [
        str(path)
        for path, content in contents(files, args.task).items()
        if (copied := args.destination / path).exists() and copied.read_bytes() != content
    ]
    if existing and not args.force:
        names = ", ".join(existing)
        sys.exit(
            f"error: {args.destination} already has different files {names}: pass --force to "
            f"overwrite them"
        )
    try:
        copy(files, args.destination, args.task)
    except OSError as error:
        sys.exit(f"error: cannot copy to {args.destination}: {error.strerror}")
    print(report(files, [option for option in known.values() if option.path not in files]))


if __name__ == "__main__":
    main()
