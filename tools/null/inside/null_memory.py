"""What takes the memory of a run, for tools.fit: by kind, and at which module it is most.

source/torch/allocations.cpp records the allocator's events, each with a tag: what Python was doing.
What a block is, is known later: the optimizer knows its parameters, gradients and state.
"""

import ctypes
import itertools
import struct
import weakref
from functools import wraps

EVENT = struct.Struct("QQii")  # address, size, device, tag
FREED = -1
GRANULE = 512  # bytes: the allocator rounds up to them
# Tensors of the host from this size on are not filled: it would take minutes, and the host's
# memory, to draw the weights of a large model.
LARGE = 2**18  # elements
FILLING = "normal_", "uniform_", "zero_", "fill_.Scalar"
GATHERED, GRADIENTS = "gathered", "gradients"
# Of torch.distributed.fsdp: what the parameters of a block take while it computes, and what their
# gradients take until they are reduced.
OF_FSDP = {"unshard": GATHERED, "wait_for_unshard": GATHERED, "post_backward": GRADIENTS}


def leave_large_tensors_unfilled(torch):
    """Drawing or writing numbers into a large float tensor of the host does nothing."""
    library = torch.library.Library("aten", "IMPL")

    def is_left(tensor):
        is_large = isinstance(tensor, torch.Tensor) and tensor.numel() >= LARGE
        return is_large and tensor.is_cpu and tensor.is_floating_point()

    def replace(name):
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def fill(keys, tensor, *args, **kwargs):
            if is_left(tensor):
                return tensor
            return kernel.call_boxed(keys, tensor, *args, **kwargs)

        library.impl(name, fill, "CPU", with_keyset=True)

    def replace_initializer(name):
        function = getattr(torch.nn.init, name)

        @wraps(function)
        def initialize(tensor, *args, **kwargs):
            return tensor if is_left(tensor) else function(tensor, *args, **kwargs)

        setattr(torch.nn.init, name, initialize)

    for name in FILLING:
        replace(name)
    for name in dir(torch.nn.init):  # some do more than to draw numbers
        if name.endswith("_") and not name.startswith("_"):
            replace_initializer(name)
    return library  # as long as it lives


class Operations:
    """Counts the operations of matrix products, convolutions and attention, by type of number."""

    def __init__(self, torch):
        from torch.utils.flop_counter import flop_registry

        self.counts, self.of_convolutions, self.is_within = {}, 0, False
        self.library = torch.library.Library("aten", "IMPL")
        for packet, count in flop_registry.items():
            if not isinstance(packet, torch._ops.OpOverloadPacket):
                continue  # an operator of higher order
            for overload in packet.overloads():
                self._count_calls(torch, getattr(packet, overload), count)

    def _count_calls(self, torch, operator, count):
        name = operator._schema.name
        if operator._schema.overload_name:
            name = f"{name}.{operator._schema.overload_name}"
        try:
            kernel = torch.library.get_kernel(operator, "CUDA")
        except RuntimeError:  # it has none
            return

        def call(keys, *args, **kwargs):
            if self.is_within:  # a part of an operator that is counted
                return kernel.call_boxed(keys, *args, **kwargs)
            self.is_within = True
            try:
                result = kernel.call_boxed(keys, *args, **kwargs)
            finally:
                self.is_within = False
            dtype = str(args[0].dtype).removeprefix("torch.")
            number = int(count(*args, **kwargs, out_val=result))  # a tensor within jit.trace()
            self.counts[dtype] = self.counts.get(dtype, 0) + number
            self.of_convolutions += number * ("conv" in name)
            return result

        self.library.impl(name.removeprefix("aten::"), call, "CUDA", with_keyset=True)

    def take(self):
        """{dtype: operations} since the last call, and how many of them are of convolutions."""
        taken = self.counts, self.of_convolutions
        self.counts, self.of_convolutions = {}, 0
        return taken


class Memory:
    """Records what takes the memory of this process, step by step."""

    def __init__(self, torch, library):
        self.torch, self.library = torch, library
        self.is_started = False
        self.module, self.phase, self.kind = "", "", ""
        self.tags = {("", "", ""): 0}  # (module, phase, kind): number
        self.marks = []  # (number of events, {address: kind})
        self.names = weakref.WeakKeyDictionary()  # of modules
        self.roots = weakref.WeakSet()
        self.held = {}  # kind: bytes, at the last step of an optimizer
        self.steps, self.operations = [], None
        self.drawn = None  # (samples of the first batch of the last loader, its batch size)
        self.inputs = None  # of the last model that was called in the first step, for training
        self.filling = leave_large_tensors_unfilled(torch)

    def start(self):
        """Called when CUDA is initialized."""
        self.is_started = True
        self.library.null_record_allocations()
        self.operations = Operations(self.torch)

    # What Python is doing

    def _tag(self):
        if self.is_started:
            key = self.module, self.phase, self.kind
            self.library.null_tag_allocations(self.tags.setdefault(key, len(self.tags)))

    def within(self, function, phase=None, kind=None):
        """The function, during which allocations have this phase or kind."""

        @wraps(function)
        def wrapper(*args, **kwargs):
            before = self.phase, self.kind
            self.phase, self.kind = phase or self.phase, kind or self.kind
            self._tag()
            try:
                return function(*args, **kwargs)
            finally:
                self.phase, self.kind = before
                self._tag()

        return wrapper

    def install(self):
        """Follow modules, loaders, backward passes, optimizers and DistributedDataParallel."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        torch = self.torch
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave, always_call=True)
        backward = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = self.within(backward, phase="backward")
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        loads = torch.utils.data.dataloader._BaseDataLoaderIter
        loads._next_index = self._noting_samples(loads._next_index)
        ddp = torch.nn.parallel.DistributedDataParallel
        for name in ("_ddp_init_helper", "_pre_forward"):  # its buckets are made, and made anew
            if hasattr(ddp, name):
                setattr(ddp, name, self.within(getattr(ddp, name), kind=GRADIENTS))

    def follow_fsdp(self, param_group):
        """Called with the module of torch.distributed.fsdp that gathers and reduces."""
        for name, kind in OF_FSDP.items():
            group = param_group.FSDPParamGroup
            if hasattr(group, name):
                setattr(group, name, self.within(getattr(group, name), kind=kind))

    def _noting_samples(self, next_index):
        seen = weakref.WeakSet()

        @wraps(next_index)
        def wrapper(iterator):
            indices = next_index(iterator)
            size = getattr(iterator._index_sampler, "batch_size", None)
            if iterator not in seen and size and isinstance(indices, list):
                self.drawn = len(indices), size
            seen.add(iterator)
            return indices

        return wrapper

    def _note_inputs(self, module, inputs):
        """A model that is called with keywords passes tensors to its modules."""
        if not self.phase and next(module.parameters(), None) is not None:
            self.inputs = None
        if self.inputs is None and module.training and self.torch.is_grad_enabled():
            shapes = [list(x.shape) for x in inputs if self._is_tensor(x) and x.dim()]
            if shapes:
                self.inputs = {"shapes": shapes, "drawn": self.drawn}

    def _enter(self, module, inputs):
        if self.torch.compiler.is_compiling():
            return
        if not self.steps:
            self._note_inputs(module, inputs)
        if module not in self.names:
            self.roots.add(module)
            for name, child in module.named_modules():
                self.names.setdefault(child, name)
        self.module = self.names[module]
        self.phase = self.phase or "forward"
        self._tag()

    def _leave(self, module, _, outputs):
        if self.torch.compiler.is_compiling():
            return
        name = self.names.get(module, "")

        def enter_backward(*_):
            self.module = name
            self._tag()

        for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
            function = getattr(output, "grad_fn", None)
            if function is not None and hasattr(function, "register_prehook"):
                function.register_prehook(enter_backward)
        if module in self.roots and self.phase == "forward":
            self.phase = ""

    def _before_update(self, optimizer, *_):
        self._mark(self._weights_of(optimizer))
        self.phase, self.module = "optimizer", ""
        self._tag()

    def _after_update(self, optimizer, *_):
        states = [value for state in optimizer.state.values() for value in state.values()]
        self._mark([("optimizer", value) for value in states if self._is_tensor(value)])
        self.phase = ""
        self._tag()

    def _weights_of(self, optimizer):
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        yield from (("gradients", p.grad) for p in trained if p.grad is not None)
        for root in self.roots:
            yield from (("buffers", buffer) for buffer in root.buffers())
            trained += root.parameters()
        yield from (("parameters", p) for p in {id(p): p for p in trained}.values())

    def _is_tensor(self, value):
        return isinstance(value, self.torch.Tensor)

    def _mark(self, tensors):
        """Note what tensors are, by the addresses of their storages."""
        kinds, held, seen = {}, {}, set()
        for kind, tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if id(tensor) in seen or (tensor.is_cuda and not tensor.untyped_storage().size()):
                continue
            seen.add(id(tensor))
            held[kind] = held.get(kind, 0) + tensor.nbytes
            if tensor.is_cuda:
                kinds.setdefault(tensor.untyped_storage().data_ptr(), kind)
        self.held.update(held)
        self.marks.append((self._events()[0], kinds))

    def end_step(self):
        """Called at the end of a step."""
        if not self.is_started:
            return
        cuda = self.torch.cuda
        devices = range(cuda.device_count())
        operations, of_convolutions = self.operations.take()
        self.steps.append(
            {
                "events": self._events()[0],
                "peak": [cuda.max_memory_allocated(i) for i in devices],
                "reserved": [cuda.max_memory_reserved(i) for i in devices],
                "retries": [cuda.memory_stats(i).get("num_alloc_retries", 0) for i in devices],
                "operations": operations,
                "of_convolutions": of_convolutions,
            }
        )
        for i in devices:
            cuda.reset_peak_memory_stats(i)
        self.phase, self.module = "", ""
        self._tag()

    # When the process ends

    def _events(self):
        first = ctypes.c_void_p()
        count = self.library.null_allocations(ctypes.byref(first))
        return count, first.value

    def report(self):
        """What tools.fit reads: peaks of each step, and what makes up the peaks of the start and of
        the last step. A run that has ended within a step reports that one, too."""
        if not self.is_started:
            return None
        self.end_step()
        count, first = self._events()
        events = list(EVENT.iter_unpack(ctypes.string_at(first, count * EVENT.size)))
        highest = [max(step["peak"]) for step in self.steps]
        device = self.steps[0]["peak"].index(max(self.steps[0]["peak"]))
        if len(highest) > 2:
            device = self.steps[1]["peak"].index(highest[1])
        blocks, ends = _blocks(events, self.marks, device)
        names = {number: key for key, number in self.tags.items()}
        starts = [0, *(step["events"] for step in self.steps)]
        bounds = itertools.pairwise(starts)
        steps = [
            {
                "peak": step["peak"][device],
                "reserved": step["reserved"][device],
                "retries": step["retries"][device],  # since the start
                "operations": step["operations"],
                "of_convolutions": step["of_convolutions"],
                **_peak_of(blocks, ends, names, *bound),
            }
            for step, bound in zip(self.steps, bounds, strict=True)
        ]
        found = {"device": device, "held": self.held, "inputs": self.inputs}
        return found | {"steps": steps[:-1], "end": steps[-1]}


def _blocks(events, marks, device):
    """({number of the event that allocates a block: (bytes, tag, kind)}, {that number: the event
    that frees it})."""
    sizes, kinds, ends, live = {}, {}, {}, {}
    marks = [*marks, (len(events), {})]
    done = 0
    for end, addresses in marks:
        for number in range(done, end):
            address, size, own_device, tag = events[number]
            if own_device != device:
                continue
            if tag == FREED:
                if address in live:
                    ends[live.pop(address)] = number
            else:
                live[address] = number
                sizes[number] = (max(1, -(-size // GRANULE)) * GRANULE, tag)
        done = end
        for address, kind in addresses.items():
            if address in live:
                kinds.setdefault(live[address], kind)
    return {n: (*sizes[n], kinds.get(n, "")) for n in sizes}, ends


def _peak_of(blocks, ends, names, start, end):
    """The blocks' bytes by kind when they take most, from event `start` to `end`, and what Python
    was doing."""
    before = {n for n in blocks if n < start and ends.get(n, end) >= start}
    changes = [(n, blocks[n][0]) for n in blocks if start <= n < end]
    changes += [(freed, -blocks[n][0]) for n, freed in ends.items() if start <= freed < end]
    total = highest = sum(blocks[n][0] for n in before)
    moment = start - 1
    for number, change in sorted(changes):
        total += change
        if total > highest:
            highest, moment = total, number
    parts = {}
    for n, (size, tag, kind) in blocks.items():
        if n <= moment and ends.get(n, end) > moment:
            kind = kind or _kind(names[tag], n < start)
            parts[kind] = parts.get(kind, 0) + size
    module, phase, _ = names[blocks[moment][1]] if moment in blocks else ("", "", "")
    return {"parts": parts, "module": module, "phase": phase}


def _kind(tag, is_old):
    _, phase, kind = tag
    if kind:
        return kind
    if is_old:  # neither parameters nor state, and there before the step
        return "other"
    return {"forward": "activations", "backward": "in backward", "optimizer": "in optimizer"}.get(
        phase, "activations"
    )
