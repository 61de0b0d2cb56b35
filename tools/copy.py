"""Copy a script and the modules that it needs into your own folder.

    python -m tools.copy train_ddp.py DEST
    python -m tools.copy train_ddp.py DEST --with image_folder weights

Modules that only a setting needs are copied only if --with names them. This prints what was copied
and which options were not.
"""

import argparse
import shutil
import sys
from pathlib import Path

from tools.closure import closure, options, purpose, size, total
from tools.lessons import LADDER, ROOT


def files_to_copy(script, chosen=()):
    """The script, its closure, and the chosen Options with the modules that these import."""
    added = [option.path for option in chosen]
    return [script, *sorted({*closure(script), *closure(*added), *added} - {script})]


def copy(files, destination):
    """Copy files of the project, each to its place below `destination`."""
    for file in files:
        target = destination / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        if target.parent != destination:
            (target.parent / "__init__.py").touch()


def report(script, files, left_out):
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
    lines += ["", "These files are MIT licensed: keep the license with them."]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.copy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [rung.script for rung in LADDER]
    parser.add_argument("script", type=lambda path: Path(path).name, choices=names)
    parser.add_argument("destination", type=Path, help="a folder; it is created if necessary")
    parser.add_argument(
        "--with",
        dest="options",
        metavar="OPTION",
        action="extend",
        nargs="+",
        default=[],
        help="modules of utils/ that a setting needs",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    args = parser.parse_args()
    script, known = ROOT / args.script, options(ROOT / args.script)
    unknown = sorted(set(args.options) - known.keys())
    if unknown:
        parser.error(f"unknown option {', '.join(unknown)}: choose from {', '.join(known)}")
    files = files_to_copy(script, [known[name] for name in args.options])
    if (args.destination / "utils.py").exists():
        sys.exit(
            f"error: the folder utils would hide {args.destination}/utils.py: rename that file, or "
            f"copy to another folder"
        )
    existing = [name for f in files if (args.destination / (name := f.relative_to(ROOT))).exists()]
    if existing and not args.force:
        names = ", ".join(map(str, existing))
        sys.exit(f"error: {args.destination} already has {names}: pass --force to overwrite them")
    try:
        copy(files, args.destination)
    except OSError as error:
        sys.exit(f"error: cannot copy to {args.destination}: {error.strerror}")
    print(report(script, files, [o for o in known.values() if o.path not in files]))


if __name__ == "__main__":
    main()
