"""Finds the commit that changed the numbers. `git bisect` chooses the commits, in a clone: the
folder of the user is only read."""

import os
import subprocess
import sys
from functools import cache

from check.scenarios import CannotRun

ENDS = ("is the first bad commit", "only 'skip'ped commits left")
EQUAL = "GOOD and BAD compute the same"


def first_bad(root, good, bad, work, judge):
    """Find the first commit that is not as `good`. judge(folder) says "good", "bad", or "skip" of
    the commit that is checked out there. Returns what git says in the end: the commit, or several
    of which it is one; or EQUAL. Raises CannotRun if `bad` cannot be judged."""
    top, prefix = git(root, "rev-parse", "--show-toplevel", "--show-prefix").split("\n")[:2]
    good, bad = (git(root, "rev-parse", "--verify", f"{name}^{{commit}}") for name in (good, bad))
    git(root, "clone", "--quiet", "--no-checkout", top, str(work))
    git(work, "checkout", "--quiet", "--detach", bad.strip())

    def verdict_of():
        name = git(work, "log", "-1", "--format=%h %s").strip()
        verdict = judge(work / prefix)
        print(f"{name}: {verdict}", file=sys.stderr, flush=True)
        return verdict

    verdict = verdict_of()  # which git would take for granted
    if verdict == "good":
        return EQUAL
    if verdict == "skip":
        raise CannotRun(f"command A fails at {bad.strip()}, so that it cannot be compared")
    said = git(work, "bisect", "start", bad.strip(), good.strip())
    while not any(end in said for end in ENDS):
        said = git(work, "bisect", verdict_of(), ends=ENDS)
    return said.strip()


@cache
def environment():
    """The environment without what names a different repository, as in a hook of git."""
    command = ["git", "rev-parse", "--local-env-vars"]
    names = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return {name: value for name, value in os.environ.items() if name not in names}


def git(folder, *arguments, ends=()):
    """What git prints. Raises CannotRun with the last line of its error, unless it printed one of
    the `ends`."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode and not any(end in done.stdout for end in ends):
        reason = done.stderr.strip().splitlines()[-1:]
        raise CannotRun(f"git {' '.join(arguments)} failed in {folder}: {' '.join(reason)}")
    return done.stdout
