"""Ends a job in which a rank stalls, shortly before the collectives of the others time out.

Every rank writes to the job's store, 40 times per timeout, how many collectives it has started and
where it is. After 80 % of the timeout, ranks 0 and 1 look for a rank that is behind, or has not
reported for 60 % of it because it was stopped or its machine hangs. Shorter stalls are tolerated.
If a rank exits too early, or its host is lost, the error of a rank that waited for it names it.
"""

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from utils.errors import UserError
from utils.reports import explain_errors, report


def watch(
    store: dist.Store, timeout: float, ignored_group: dist.ProcessGroup | None = None
) -> None:
    """Watch this rank and the others, in a thread, until the process group is destroyed.

    store: the job's. timeout: of a collective, in seconds. ignored_group: one whose collectives may
    wait for longer.
    """
    store, done, rank = store.clone(), threading.Event(), dist.get_rank()
    _write(store, _collectives(ignored_group))  # at once, or _read_all() might wait for it
    explain_errors(partial(_explain, store.clone(), _interval(timeout)))
    arguments = store, timeout, done, ignored_group
    thread = threading.Thread(target=_watch, args=arguments, daemon=True)
    thread.start()

    def stop():
        with suppress(RuntimeError):  # rank 0, which holds the store, has ended
            store.set(f"watchdog/exited/{rank}", "")
        done.set()
        thread.join(1)  # it may be using the store

    atexit.register(stop)


def _interval(timeout):
    """Seconds between two writes of a rank."""
    return min(timeout / 40, 7.5)


def _watch(store, timeout, done, ignored_group):
    started, since, first = None, 0.0, None
    while not done.wait(_interval(timeout)) and dist.is_initialized():
        # Rank 0, which holds the store, has ended, or the group has just been destroyed.
        with suppress(RuntimeError, ValueError):
            before, started = started, _collectives(ignored_group)
            _write(store, started)
            if started != before:
                since, first = time.monotonic(), None
            waiting = (time.monotonic() - since) / timeout
            if dist.get_rank() > 1:  # two can see any rank, and all would be too many for the store
                continue
            if waiting > 0.2 and first is None:
                first = _read_all(store)
            elif waiting > 0.8:
                _end_if_stalled(first, _read_all(store))


def _write(store, started):
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack = "".join(traceback.format_stack(frame, limit=5))
    status = [started, time.monotonic(), stack, os.getpid(), socket.gethostname()]
    store.set(f"watchdog/{dist.get_rank()}", json.dumps(status))


def _collectives(ignored_group):
    """{group: the number of collectives that this rank has started in it}, except for one group."""
    world, counts = distributed_c10d._world, {}
    for group, name in world.pg_names.items():
        if group is not ignored_group:
            members = str(sorted(world.pg_group_ranks[group]))  # names may not be unique
            key = f"{name}-{zlib.crc32(members.encode())}"
            # PyTorch's types leave it out.
            counts[key] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts


def _end_if_stalled(first, last):
    """End the process if a rank has written nothing between two calls of _read_all(), or if others
    wait for it in some group, while it waits for none and has started nothing."""
    highest, lowest = {}, {}
    for counts, *_ in last:
        for group, n in counts.items():
            highest[group] = max(n, highest.get(group, n))
            lowest[group] = min(n, lowest.get(group, n))
    for rank, (before, now) in enumerate(zip(first, last, strict=True)):
        counts, written, stack, pid, host = now
        silent = before[1] == written
        behind = [group for group, n in counts.items() if n < highest[group]]
        waits = any(n > lowest[group] for group, n in counts.items())
        if not silent and (not behind or waits or before[0] != counts):
            continue
        state = "does not respond"
        if not silent:
            n, others = counts[behind[0]], highest[behind[0]]
            state = f"is behind: it has started {n} collectives, and others, which wait, {others}"
        text = (
            f"rank {rank} (process {pid} on {host}) {state}. It was last seen at\n{stack.rstrip()}"
        )
        report(UserError(text))
        if silent and host == socket.gethostname():
            with suppress(OSError):  # SIGTERM, which the launcher will send, has no effect on it
                os.kill(pid, signal.SIGKILL)
        os._exit(1)


def _explain(store, interval, error):
    """Name the ranks for which this one may have waited: of those that have exited, in a note; or,
    if ranks of other hosts no longer write, in a UserError, which is returned."""
    if not isinstance(error, RuntimeError) or sys.platform != "linux":
        return None
    with suppress(Exception):  # the store may have ended, too
        statuses = _read_all(store) if store.check(_keys()) else []
        time.sleep(0.05)  # a process closes its connections before it is gone
        has_exited = False
        for rank, (*_, pid, host) in enumerate(statuses):
            local = host == socket.gethostname()
            if store.check([f"watchdog/exited/{rank}"]) or (local and _has_exited(pid)):
                has_exited = True
                error.add_note(f"rank {rank} (process {pid}) has exited too early")
        # Not a subclass such as OutOfMemoryError, which has nothing to do with a connection.
        if type(error) in (RuntimeError, dist.DistBackendError) and not has_exited:
            return _lost_hosts(store, statuses, patience=max(3.0, 2 * interval))
    return None


def _lost_hosts(store, statuses, patience):
    """A UserError that names the hosts of ranks that write nothing for `patience` seconds."""
    here, end = socket.gethostname(), time.monotonic() + patience
    silent = [rank for rank, (*_, host) in enumerate(statuses) if host != here]
    while silent and time.monotonic() < end:
        time.sleep(0.2)
        now = _read_all(store)
        silent = [rank for rank in silent if now[rank][1] == statuses[rank][1]]
    if not silent:
        return None
    ranks = {}
    for rank in silent:
        ranks.setdefault(statuses[rank][-1], []).append(str(rank))
    names = [f"{host} (rank {', '.join(numbers)})" for host, numbers in ranks.items()]
    return UserError(
        f"lost {'; '.join(names)}: the host is down, or its processes have been killed (see its "
        f"output). The same command continues the run"
    )


def _has_exited(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"ZX"
    except OSError:
        return True


def _read_all(store):
    return [json.loads(value) for value in store.multi_get(_keys())]


def _keys():
    return [f"watchdog/{rank}" for rank in range(dist.get_world_size())]
