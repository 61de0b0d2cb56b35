"""The training step in a CUDA graph: train_1gpu_graph.py on a CPU, and what a replay repeats."""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasks.images import Settings
from tests.forked import assert_resumes, fork_script, same_bits
from train_1gpu_graph import build_step
from utils.checkpoint import read_checkpoint
from utils.config import load_config
from utils.errors import UserError
from utils.optim import build_optimizer, build_scheduler
from utils.rungs import graph

SETTINGS = {"clip_norm": 1.0, "synthetic_samples": 24, "image_size": 8, "epochs": 1}
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Named(torch.nn.Sequential):
    """Gets its inputs in a dict."""

    def forward(self, inputs):
        return super().forward(inputs["points"])


class Recording(TorchDispatchMode):
    """Stands in for a CUDAGraph on a CPU: repeats all operations on the same tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, result in self.operations:
            pairs = zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True)
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


@pytest.fixture
def trainer(monkeypatch):
    """A function that trains a model for some steps, in a recorded graph or not, and returns its
    state, the losses, and the GraphedStep. Capturing computes nothing: the state is put back."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)

    def train(device, steps=8, optimizer="sgd"):
        flags = [f"--optimizer={optimizer}", "--clip-norm=1", "--lr=0.01", "--epochs=1"]
        cfg = load_config(Settings, graph.GraphSettings, argv=flags)
        torch.manual_seed(0)
        # No bias: BatchNorm leaves it a gradient of rounding errors, which Adam scales to steps.
        layers = torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        model = Named(*layers)
        optimizer = build_optimizer(model, cfg)
        scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=steps)
        step = graph.GraphedStep(build_step(model, optimizer, CPU, cfg), optimizer, device)

        @contextmanager
        def record(recording, stream, capture_error_mode):
            tensors = [*model.state_dict().values()]
            tensors += [v for state in optimizer.state.values() for v in state.values()]
            before = copy.deepcopy(tensors)
            with recording:
                yield
            for tensor, value in zip(tensors, before, strict=True):
                tensor.detach().copy_(value)

        monkeypatch.setattr(torch.cuda, "graph", record)
        losses, step.capturable = [], []
        optimizer.register_step_pre_hook(
            lambda *_: step.capturable.append(optimizer.param_groups[0].get("capturable"))
        )
        for _ in range(steps):
            points, labels = torch.randn(6, 3), torch.randint(2, (6,))
            loss_sum, outputs = step({"points": points}, labels)
            scheduler.step()
            losses.append(loss_sum.item())
            assert outputs.shape == (6, 2)
            assert isinstance(optimizer.param_groups[0]["lr"], float)
        return model.state_dict(), losses, step

    return train


@pytest.mark.parametrize("optimizer", ["sgd_nesterov", "adamw"])
def test_replays_train_the_same_weights(optimizer, trainer):
    """The learning rate, which differs in each step, the batch, and the statistics of BatchNorm.
    PyTorch refuses to capture Adam unless it is capturable, and warns of that in other steps."""
    weights, losses, step = trainer(CUDA, optimizer=optimizer)
    expected, expected_losses, eager = trainer(CPU, optimizer=optimizer)
    assert isinstance(step.graph, Recording) and eager.graph is None
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value)
    assert step.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]
    if optimizer == "adamw":
        assert step.capturable == [False] * graph.WARMUP_STEPS + [True]
        assert step.optimizer.param_groups[0]["capturable"] is False


def test_batches_of_different_shapes_are_refused(trainer):
    """Also if only the targets differ, or if they would broadcast."""
    *_, step = trainer(CUDA, steps=graph.WARMUP_STEPS + 1)
    for images, labels in ((5, 5), (6, 1), (1, 6)):
        with pytest.raises(UserError, match=rf"\({images}, 3\), \({labels},\)"):
            step({"points": torch.randn(images, 3)}, torch.zeros(labels, dtype=torch.int64))


def test_bfloat16_trains_the_same_bits_as_in_the_amp_script(tmp_path):
    flags = SETTINGS | {"amp_dtype": "bfloat16"}
    graphed = fork_script("train_1gpu_graph.py", output_dir=tmp_path / "graph", **flags)
    amp = fork_script("train_ddp_amp.py", 1, output_dir=tmp_path / "amp", **flags)
    assert (graphed.code, graphed.stderr) == (amp.code, amp.stderr) == (0, "")
    ours, theirs = (read_checkpoint(run.output_dir / "last.pt") for run in (graphed, amp))
    assert same_bits(ours["model"], theirs["model"])


def test_killed_and_resumed_run_matches_an_uninterrupted_one(tmp_path):
    assert_resumes(tmp_path, "train_1gpu_graph.py", None, clip_norm=1.0, epochs=1)
