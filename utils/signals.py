"""The signals that stop a run, and loader processes that outlive them. Needs no other module."""

import multiprocessing
import os
import signal
import threading

SIGNALS = [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
    SIGNALS.append(signal.SIGHUP)
# Two signals within this time are one request: SLURM signals all processes, and torchrun, which is
# one of them, passes it on. So does a terminal with Ctrl-C.
SECONDS_OF_ONE_REQUEST = 2.0


def shield_worker(number: int) -> None:
    """Block the signals that stop a run in a worker of a DataLoader, unless its rank sends them:
    schedulers signal all processes, but the rank needs its workers until it has saved. If the rank
    is killed, the worker ends at once."""
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    rank = multiprocessing.parent_process()
    for wait in (_wait_for_signal, _wait_for_end):
        threading.Thread(target=wait, args=(rank,), daemon=True).start()


def _wait_for_signal(rank):
    while signal.sigwaitinfo(SIGNALS).si_pid != rank.pid:
        pass
    os._exit(0)


def _wait_for_end(rank):
    rank.join()
    os._exit(0)
