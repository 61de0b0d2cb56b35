"""Keeps a process, and everything that it starts, from writing anywhere but in a few folders.

Landlock is a part of Linux: its rules hold for native code and for other programs too, need no
privileges, and cannot be taken back. https://docs.kernel.org/userspace-api/landlock.html
"""

import contextlib
import ctypes
import os

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers of calls, on all processors
SET_NO_NEW_PRIVILEGES = 38
ASK_FOR_VERSION = 1
BENEATH_PATH = 1
# Version 1 has no rule against os.truncate, and version 2 none that lets a script rename a file
# into a different folder.
OLDEST_VERSION = 3
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
ALL_WRITES = TRUNCATE | WRITE_FILE | sum(1 << bit for bit in range(4, 14))  # make, remove, move


class _Rule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def is_available():
    """Whether this kernel has everything that is needed here."""
    with contextlib.suppress(OSError, AttributeError):
        return _call(CREATE_RULESET, None, 0, ASK_FOR_VERSION) >= OLDEST_VERSION
    return False


def restrict(writable):
    """Let this process and its children write only in these folders, or these files."""
    handled = ctypes.c_uint64(ALL_WRITES)
    rules = _call(CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    for path in writable:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = ALL_WRITES if os.path.isdir(path) else WRITE_FILE | TRUNCATE
        rule = _Rule(allowed, folder)
        _call(ADD_RULE, rules, BENEATH_PATH, ctypes.byref(rule), 0)
        os.close(folder)
    if ctypes.CDLL(None).prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError("prctl")
    _call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def _call(number, *arguments):
    """A call of the kernel, which C libraries have no functions for yet."""
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
