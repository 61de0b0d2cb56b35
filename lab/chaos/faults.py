"""The kinds of faults, and the plan that a seed determines."""

import random
from enum import Enum
from typing import NamedTuple


class End(Enum):
    """What a run promises to do after a fault."""

    CONTINUES = "continues"
    RESUMES = "uses the previous checkpoint"  # the fault happens between two runs
    SAVED = "saves, exits with 75"
    ERROR = "one error line"
    REPORT = "one error"  # a line or a traceback
    KILLED = "ends"  # the launcher itself is killed, and can print nothing


class Kind(NamedTuple):
    """A fault that a run must survive or report."""

    name: str
    title: str
    end: End
    text: str = ""  # what stderr must contain, as a regular expression
    ranks: int = 1  # how many the run must have
    launcher: bool = False  # whether the run must have one
    only_rank_0: bool = False
    forked: bool = False  # only in forked runs, where all ranks start at the same time


KINDS = [
    Kind("kill-rank", "SIGKILL of a rank", End.REPORT, "SIGKILL|Connection|peer|torch.distributed"),
    Kind("kill-launcher", "SIGKILL of the launcher", End.KILLED, launcher=True),
    *(
        Kind(f"{name}-{target}", f"{signal} to {title}", End.SAVED, "stopped by a signal", **needs)
        for name, signal in (("term", "SIGTERM"), ("usr1", "SIGUSR1"), ("int", "SIGINT"))
        for target, title, needs in (
            ("rank", "a rank", {}),
            ("launcher", "the launcher", {"launcher": True}),
            ("all", "all processes", {}),
        )
    ),
    Kind("pause", "SIGSTOP of a rank for a second", End.CONTINUES),
    Kind(
        "stop",
        "SIGSTOP of a rank",
        End.REPORT,
        r"(?s)Timeout \(.*most recent call first.*Traceback",  # ShowHang's, and the collective's
        ranks=2,
        forked=True,
    ),
    Kind("slow", "a rank sleeps for a second", End.CONTINUES),
    Kind("raise", "exception in a rank", End.REPORT, "RuntimeError: planted by chaos"),
    Kind("leave", "a rank exits with code 0", End.REPORT, ranks=2),
    Kind("nan", "weight of a rank becomes NaN", End.ERROR, "inf or NaN|differs in|loss is nan"),
    Kind("full-disk", "full disk", End.ERROR, "No space left on device", only_rank_0=True),
    Kind(
        "kill-save",
        "SIGKILL while a file is written",
        End.REPORT,
        "SIGKILL|Connection|peer",
        only_rank_0=True,
    ),
    Kind(
        "kill-rename",
        "SIGKILL around the last rename of a save",
        End.REPORT,
        "SIGKILL|Connection|peer",
        only_rank_0=True,
    ),
    Kind(
        "kill-row",
        "SIGKILL between an epoch's row and its save",
        End.REPORT,
        "SIGKILL|Connection|peer",
        only_rank_0=True,
    ),
    *(
        Kind(f"eio-{name}", f"EIO at {title}", end, "Input/output error", only_rank_0=True)
        for name, title, end in (
            ("fsync", "a flush", End.ERROR),
            ("rename", "a rename", End.ERROR),
            ("link", "a link and its copy", End.REPORT),
        )
    ),
    Kind("kill-worker", "SIGKILL of a DataLoader worker", End.REPORT, "DataLoader worker"),
    Kind("truncate", "last.pt is cut", End.RESUMES, "cannot be read as a checkpoint"),
    Kind("flip", "byte of last.pt is changed", End.RESUMES, "cannot be read as a checkpoint"),
    Kind("zeros", "last.pt is zeros", End.RESUMES, "cannot be read as a checkpoint"),
    Kind("torn-row", "metrics.jsonl is cut in its last row", End.RESUMES),
    Kind("leftover", "temporary files are left over", End.RESUMES),
]
BY_NAME = {kind.name: kind for kind in KINDS}


class Fault(NamedTuple):
    """A fault at a place. `step` counts from where the run resumed; 0: before the run starts."""

    number: int
    kind: str
    rank: int
    step: int
    fraction: float  # how far into a file, where that matters


class Attempt(NamedTuple):
    """A run and its faults. The last fault ends it, unless this is the last attempt."""

    faults: list
    forked: bool  # otherwise: started with the launcher that a user would use


def make_plan(names, count, ranks, has_launcher, seed, warm_up, forked=True, real_share=0.1):
    """The Attempts that a seed determines: `count` faults of the kinds `names`, then none.

    Each kind occurs once before any occurs again. The first fault comes after `warm_up` steps, when
    there are two checkpoints. forked: whether runs may be forked; real_share of them are not.
    """
    rng = random.Random(f"{seed} {ranks} {has_launcher}")
    kinds = [
        BY_NAME[name]
        for name in names
        if ranks >= BY_NAME[name].ranks and (has_launcher or not BY_NAME[name].launcher)
    ]
    deck, attempts, faults = [], [], []
    step = warm_up  # the next fault comes after it
    for number in range(1, count + 1):
        deck = deck or rng.sample(kinds, len(kinds))
        if not attempts:  # there are no files to damage yet
            deck.sort(key=lambda kind: kind.end is not End.RESUMES)
        kind = deck.pop()
        between_runs = kind.end is End.RESUMES
        rank = 0 if kind.only_rank_0 or between_runs else rng.randrange(ranks)
        place = 0 if between_runs else step + rng.randint(1, 4)
        faults.append(Fault(number, kind.name, rank, place, rng.random()))
        if kind.end is End.CONTINUES:
            step = place
        elif not between_runs:
            real = not forked or (rng.random() < real_share and not kind.forked)
            attempts.append(Attempt(faults, forked=not real))
            faults, step = [], 0
    return [*attempts, Attempt(faults, forked)]
