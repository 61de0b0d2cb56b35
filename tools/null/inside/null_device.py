"""What a process on the null device does besides its script: it counts, and reports at its end.

Python imports it before the script (sitecustomize.py), so that it also reaches processes that a
script spawns. It changes PyTorch as little as possible, where numbers are read that no kernel has
computed: they are zeros, unless the host has copied them to the device.
"""

import atexit
import ctypes
import faulthandler
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from functools import wraps
from pathlib import Path

LADDER = Path(__file__).resolve().parents[3]
RECORD = "copied.json"  # of tools.copy, in each copy of the ladder
FRAMES_SIGNAL = signal.SIGRTMAX  # asks faulthandler for the Python frames of a wait


class Counter:
    """The counts of this process, step by step.

    A step ends with checkpoint.step() in the scripts of this project, and with an optimizer's
    step() in others. The first step includes the start of the run.
    """

    def __init__(self, folder, limit):
        self.folder, self.limit = Path(folder), limit  # limit: steps until the process ends; 0: all
        self.steps, self.is_written = [], False
        self.seconds, self.started = [], 0.0  # of the processor, in the script's thread
        self.memory = None  # null_memory.Memory, for tools.fit
        self.global_batch_size = None  # of a script of this project
        self.library = ctypes.CDLL(None)
        for name in ("null_take_counts", "null_logs"):
            getattr(self.library, name).restype = ctypes.c_void_p
        if "NULL_TIMES" not in os.environ:
            self._trace_waits()

    def _trace_waits(self):
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        faulthandler.register(FRAMES_SIGNAL, file=writer, all_threads=False)
        self.library.null_trace_waits(FRAMES_SIGNAL, reader)

    def end_step(self, wait=lambda: None):
        """Called at the end of a step; wait: finishes what the script does in the background."""
        self.seconds.append(time.thread_time() - self.started)
        self.steps.append(self._take())
        if self.memory:
            self.memory.end_step()
        if len(self.steps) == self.limit:
            wait()
            self.write()
            os._exit(0)
        self.started = time.thread_time()

    def _take(self):
        """{kind: {name: [number, bytes]}} since the last call."""
        counts = {}
        for line in self._text("null_take_counts"):
            kind, name, number, size = line.split("\t")
            counts.setdefault(kind, {})[name] = [int(number), int(size)]
        return counts

    def _text(self, function):
        address = getattr(self.library, function)()
        lines = ctypes.string_at(address).decode().splitlines()
        self.library.free(ctypes.c_void_p(address))
        return lines

    def write(self):
        """Write the report of this process, once."""
        torch = sys.modules.get("torch")
        if self.is_written or torch is None or not torch.cuda.is_initialized():
            return
        self.is_written = True
        self.library.null_trace_waits(0, -1)  # Python ends, and faulthandler with it
        logs = {}
        for line in self._text("null_logs"):
            communicator, call = line.split("\t")
            logs.setdefault(communicator, []).append(call)
        peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
        report = {
            "rank": int(os.environ.get("RANK", 0)),
            "world_size": int(os.environ.get("WORLD_SIZE", 1)),
            "steps": self.steps,
            "seconds": self.seconds,  # of each step; with NULL_TIMES, those of backward() too
            "end": self._take(),
            "peak_memory": peaks,  # bytes per GPU
            "calls": logs,
            "global_batch_size": self.global_batch_size,
            "memory": self.memory and self.memory.report(),
        }
        path = self.folder / f"{os.getpid()}.json"
        path.write_text(json.dumps(report), encoding="utf-8")


def install():
    """Count, and change modules once they are imported, in a process started by tools.null."""
    if "NULL_REPORT" not in os.environ:
        return
    counter = Counter(os.environ["NULL_REPORT"], int(os.environ.get("NULL_STEPS") or 0))
    atexit.register(counter.write)
    os.register_at_fork(after_in_child=lambda: setattr(counter, "is_written", True))
    os._exit = _called_before(os._exit, counter.write)  # which skips what is registered
    for name, change in CHANGES.items():
        if name in sys.modules and is_known(sys.modules[name]):  # in a fork that has imported it
            change(sys.modules[name], counter)
    sys.meta_path.insert(0, _Changes(counter))


def is_known(module):
    """Whether a module is PyTorch's, or of this project or a copy of it: other projects have a
    `utils.checkpoint`, too."""
    top, _, rest = module.__name__.partition(".")
    if top == "torch":
        return True
    folder = Path(module.__file__).resolve().parents[1 + rest.count(".")]
    return folder == LADDER or (folder / RECORD).exists()


def _called_before(function, first):
    @wraps(function)
    def wrapper(*args):
        first()
        function(*args)

    return wrapper


class _Changes(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that has been imported: see CHANGES."""

    def __init__(self, counter):
        self.counter = counter
        self.left = {name: change for name, change in CHANGES.items() if name not in sys.modules}

    def find_spec(self, name, path=None, target=None):
        if name not in self.left:
            return None
        change = self.left.pop(name)  # or this would call itself
        spec = importlib.util.find_spec(name)
        self.left[name] = change  # who looks for a module need not import it
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module):
            self.left.pop(name, None)
            execute(module)
            if is_known(module):
                change(module, self.counter)

        spec.loader.exec_module = execute_and_change
        return spec


def _change_torch(torch, counter):
    """Switch off cuDNN, whose graphs the null device does not emulate; clear new memory; count
    steps."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda._device_count_nvml = lambda: -1  # of the machine's own GPUs: ask CUDA
    library = ctypes.PyDLL("libnull_torch.so")
    if "NULL_TIMES" in os.environ:  # what only the null device does takes no time
        torch.autograd.set_multithreading_enabled(False)  # one thread does all of a step
    else:
        torch.cuda._lazy_call(library.null_clear_allocations)
    if "NULL_FIT" in os.environ:
        from null_memory import Memory

        counter.memory = Memory(torch, library)
        counter.memory.install()
        torch.cuda._lazy_call(counter.memory.start)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    hook = register_optimizer_step_post_hook(lambda *_: counter.end_step())
    counter.drop_optimizer_hook = hook.remove
    if not torch.distributed.is_available():
        return
    # It compares numbers that were gathered, which are zeros.
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_, **__: None
    import null_groups

    null_groups.tell_sizes_of_splits(torch.distributed, counter.library)
    if "NULL_RANKS" in os.environ:
        null_groups.join_fake_world(torch.distributed)
    else:
        null_groups.send_objects_over_gloo(torch.distributed)


def _change_checkpoint(checkpoint, counter):
    """A step ends with Checkpointer.step()."""
    counter.drop_optimizer_hook()
    step = checkpoint.Checkpointer.step

    @wraps(step)
    def counted(self):
        step(self)
        counter.global_batch_size = self.cfg.global_batch_size
        counter.end_step(self.wait)

    checkpoint.Checkpointer.step = counted


def _change_metrics(metrics, counter):
    """Count all samples at an epoch's end, and make every sum 1, so that the run continues."""
    compute, reduce, samples = metrics.Meter.compute, metrics.all_reduce, []

    @wraps(compute)
    def counted(self):
        samples[:] = [len(self.loader.dataset)]
        return compute(self)

    @wraps(reduce)
    def made_up(sums):
        sums = reduce(sums)
        if sums.is_cuda:
            sums.copy_(sums.new_tensor([*samples, *[1.0] * (len(sums) - 1)], device="cpu"))
        return sums

    metrics.Meter.compute, metrics.all_reduce = counted, made_up


def _change_finite(finite, counter):
    """Whether numbers are finite is a number, too, which no kernel has computed."""
    finite.RefuseNonFinite.before_save = lambda *args, **kwargs: None


def _change_fsdp(param_group, counter):
    """What is gathered and reduced is recorded as such."""
    if counter.memory:
        counter.memory.follow_fsdp(param_group)


CHANGES = {  # module: what is called after it has been imported
    "torch": _change_torch,
    "utils.checkpoint": _change_checkpoint,
    "utils.metrics": _change_metrics,
    "utils.guards.finite": _change_finite,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": _change_fsdp,
}
