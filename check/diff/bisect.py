"""Finds the commit that changed the numbers. `git bisect` chooses the commits, in a clone: the
folder of the user is only read."""

import subprocess
import sys

from check.scenarios import CannotRun

ENDS = ("is the first bad commit", "only 'skip'ped commits left")


def first_bad(root, good, bad, work, judge):
    """Find the first commit that is not as `good`. judge(folder) says "good", "bad", or "skip" of
    the commit that is checked out there. Returns what git says in the end: the commit, or several
    of which it is one."""
    top, prefix = git(root, "rev-parse", "--show-toplevel", "--show-prefix").split("\n")[:2]
    good, bad = (git(root, "rev-parse", "--verify", f"{name}^{{commit}}") for name in (good, bad))
    git(root, "clone", "--quiet", "--no-checkout", top, str(work))
    git(work, "checkout", "--quiet", "--detach", bad.strip())
    said = git(work, "bisect", "start", bad.strip(), good.strip())
    while not any(end in said for end in ENDS):
        name = git(work, "log", "-1", "--format=%h %s").strip()
        verdict = judge(work / prefix)
        print(f"{name}: {verdict}", file=sys.stderr, flush=True)
        said = git(work, "bisect", verdict, may_fail=True)
    return said.strip()


def git(folder, *arguments, may_fail=False):
    """What git prints. Raises CannotRun with the last line of its error."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not may_fail:
        reason = done.stderr.strip().splitlines()[-1:]
        raise CannotRun(f"git {' '.join(arguments)} failed in {folder}: {' '.join(reason)}")
    return done.stdout
