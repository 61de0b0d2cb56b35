"""Ends a run after a few steps of a few epochs, or kills it between two steps."""

import atexit
import dis
import faulthandler
import inspect
import os
import signal
import sys
import time
from pathlib import Path

from check_inside.record import PLAN, is_user_file, record
from check_inside.state import STATE

EVALUATION_BATCHES = 50  # of a loader without a backward, its last batch included
BATCHES_PER_STEP = 64  # more than that without a step of an optimizer: the epoch is cut
SECONDS_FOR_OTHERS = 20.0


def install(name, torch):
    """Let the check ask this process for its stacks, and know when it ends by itself."""
    stacks = open(Path(PLAN["folder"]) / f"{os.getpid()}.stacks", "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    record("start", argv=sys.argv, torch=torch.__version__)
    atexit.register(lambda: record("exit"))


def cuts(epoch):
    """Whether this loader has yielded enough batches for this run."""
    if epoch.is_endless:
        return False  # the script does not expect it to end: the number of steps ends the run
    if epoch.backwards():
        if epoch.is_iterable and PLAN["run"] in ("one", "two"):
            # The number of batches is not known otherwise, and ranks may have different ones.
            return epoch.steps() >= 10 * PLAN["steps"]
        return epoch.steps() >= PLAN["steps"] or epoch.batches >= BATCHES_PER_STEP * PLAN["steps"]
    return epoch.batches >= EVALUATION_BATCHES


def may_end(frame):
    """Whether the code of a frame, which asks for a batch, expects the end at any time: it loops
    over the loader, or knows StopIteration. One that calls next() by itself may know the number of
    batches, and fail without them."""
    while frame is not None and is_user_file(frame.f_code.co_filename):
        code = frame.f_code
        is_loop = dis.opname[code.co_code[frame.f_lasti]] in ("FOR_ITER", "SEND")
        if not is_loop and "StopIteration" not in code.co_names:
            return False
        # The caller of a generator decides: one may call next() of the other.
        frame = frame.f_back if code.co_flags & inspect.CO_GENERATOR else None
    return True


def before_backward():
    """Ends the run if enough epochs were trained: this is the first batch of one more.

    Not when a loader starts: the evaluation after the last epoch may start it.
    """
    if STATE.training_epochs >= PLAN["epochs"]:
        STATE.active.clear()  # without a backward it would look like an evaluation
        end("epochs")


def after_step():
    """An optimizer has taken a step."""
    if PLAN["kill_step"] is not None and STATE.steps >= PLAN["kill_step"]:
        record("killed", steps=STATE.steps)
        os.kill(os.getpid(), signal.SIGKILL)
    # Scripts without epochs, or whose loader is never exhausted. GANs make two steps per batch.
    if STATE.steps >= PLAN["most_steps"]:
        end("steps")


def end(why):
    """End this process as if the script had ended, when the other ranks have come as far."""
    from check_inside import data

    record("end", why=why)
    data.finish()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    folder = Path(PLAN["folder"])
    (folder / f"{os.getpid()}.ended").touch()
    # Earlier stages of a pipeline wait for a gradient from this one: they will not come here.
    limit = time.monotonic() + (0.0 if STATE.is_stage else SECONDS_FOR_OTHERS)
    while len(list(folder.glob("*.ended"))) < PLAN["world"] and time.monotonic() < limit:
        time.sleep(0.02)
    torch = sys.modules["torch"]
    for child in torch.multiprocessing.active_children():
        child.terminate()
    os._exit(0)
