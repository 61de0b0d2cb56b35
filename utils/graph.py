"""A training step as one CUDA graph, for train_1gpu_graph.py.

Follows "Whole-network capture" in https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from contextlib import contextmanager

import torch

from utils.errors import UserError

WARMUP_STEPS = 3


class GraphedStep:
    """Calls step(images, labels), which trains and returns (loss, outputs); on a GPU, as one graph.

    The first WARMUP_STEPS calls run the step as it is, on a side stream, as capturing requires.
    They train on their batches, so that no weights have to be restored. The next call captures the
    step, which computes nothing, and from then on every call replays the graph. On a CPU, every
    call runs the step as it is.

    A replay repeats the same kernels on the same memory. So the batch is copied into the tensors
    that were captured, and the optimizer (a fused one) reads its learning rates from tensors, into
    which those of its param_groups are copied: they stay numbers for the scheduler and for
    checkpoints. Dropout draws other numbers in each replay, from the seed that is current then.
    """

    def __init__(self, step, optimizer, device, cfg):
        if cfg.compile in ("reduce-overhead", "max-autotune"):
            raise UserError(
                f"compile {cfg.compile} makes CUDA graphs of its own, which cannot be captured in "
                f"another: pass --compile default"
            )
        self.step, self.optimizer = step, optimizer
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        parameters = [group["params"][0] for group in optimizer.param_groups]
        self.rates = [p.new_zeros((), dtype=torch.float32) for p in parameters]  # as kernels expect
        self.warmup_steps, self.graph = WARMUP_STEPS, None

    def __call__(self, images, labels):
        """(loss, outputs), which the next call may overwrite.

        Raises UserError if the shape of the images differs from those that were captured.
        """
        if self.stream is None:
            return self.step(images, labels)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        if self.warmup_steps:
            self.warmup_steps -= 1
            return self._warm_up(images, labels)
        if self.graph is None:
            self._capture(images, labels)
        if images.shape != self.images.shape:
            raise UserError(
                f"a CUDA graph needs batches of one shape, but {tuple(images.shape)} follows "
                f"{tuple(self.images.shape)}: resize the images, or use train_1gpu.py"
            )
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.results

    def _warm_up(self, images, labels):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = self._run(images, labels)
        torch.cuda.current_stream().wait_stream(self.stream)
        return results

    def _capture(self, images, labels):
        self.images, self.labels = images.clone(), labels.clone()
        self.optimizer.zero_grad()  # the graph allocates the gradients, in memory of its own
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that pins batches for the loader may allocate memory meanwhile.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.results = self._run(self.images, self.labels)

    def _run(self, images, labels):
        with self._rates_as_tensors():
            loss, outputs = self.step(images, labels)
        return loss.detach(), outputs.detach()

    @contextmanager
    def _rates_as_tensors(self):
        groups = self.optimizer.param_groups
        numbers = [dict(group) for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:  # of Adam, which refuses to be captured without it
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, numbers, strict=True):
                group.update(values)
