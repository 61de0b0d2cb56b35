"""The training step in a CUDA graph: train_1gpu_graph.py on a CPU, and what a replay repeats."""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasks.images import Settings
from tests.forked import assert_resumes, fork_script
from train_1gpu_graph import build_step
from utils.checkpoint import read_checkpoint
from utils.config import load_config
from utils.errors import UserError
from utils.optim import build_optimizer, build_scheduler
from utils.rungs import graph

SETTINGS = {"clip_norm": 1.0, "synthetic_samples": 54}
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


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
    state, the losses, and the GraphedStep. Capturing computes nothing: the state is put
    back."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)

    def train(device, steps=8, **flags):
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        flags += ["--clip-norm=1", "--lr=0.01", "--epochs=1"]
        cfg = load_config(Settings, graph.GraphSettings, argv=flags)
        torch.manual_seed(0)
        # No bias: BatchNorm leaves it a gradient of rounding errors, which Adam scales to steps.
        layers = torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        model = torch.nn.Sequential(*layers)
        optimizer = build_optimizer(model, cfg)
        scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=steps)
        train_step = build_step(model, optimizer, CPU, cfg)
        train_step = graph.GraphedStep(train_step, optimizer, device)

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
        numbers, flags = [], []
        optimizer.register_step_pre_hook(
            lambda *_: flags.append(optimizer.param_groups[0].get("capturable"))
        )
        for _ in range(steps):
            images, labels = torch.randn(6, 3), torch.randint(2, (6,))
            loss_sum, outputs = train_step(images, labels)
            scheduler.step()
            numbers.append(loss_sum.item())
            assert outputs.shape == (6, 2)
            assert isinstance(optimizer.param_groups[0]["lr"], float)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        train_step.capturable = flags
        return state, numbers, train_step

    return train


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_nesterov", "adam", "adamw"])
def test_replays_train_the_same_weights(optimizer, trainer):
    """The learning rate, which differs in each step, the batch, and the statistics of BatchNorm."""
    (graphed, numbers, train_step), (eager, expected, _) = (
        trainer(device, optimizer=optimizer) for device in (CUDA, CPU)
    )
    assert isinstance(train_step.graph, Recording) and train_step.warmup_steps == 0
    assert numbers == pytest.approx(expected, rel=1e-5)
    for name, value in eager["model"].items():
        torch.testing.assert_close(graphed["model"][name], value)
    assert graphed["optimizer"]["param_groups"] == eager["optimizer"]["param_groups"]


def test_first_steps_are_not_captured(trainer):
    *_, train_step = trainer(CUDA, steps=graph.WARMUP_STEPS)
    assert train_step.graph is None
    *_, train_step = trainer(CUDA, steps=graph.WARMUP_STEPS + 1)
    assert train_step.graph is not None


def test_adam_is_capturable_while_it_is_captured(trainer):
    """PyTorch refuses to capture it otherwise, and warns of it in steps that are not captured."""
    *_, train_step = trainer(CUDA, optimizer="adamw")
    assert train_step.capturable == [False] * graph.WARMUP_STEPS + [True]
    assert train_step.optimizer.param_groups[0]["capturable"] is False


def test_batches_of_different_shapes_are_refused(trainer):
    """Also if only the targets differ, or if they would broadcast."""
    *_, train_step = trainer(CUDA)
    for images, labels in ((5, 5), (6, 1), (1, 6)):
        with pytest.raises(UserError, match=rf"\({images}, 3\), \({labels},\)"):
            train_step(torch.randn(images, 3), torch.zeros(labels, dtype=torch.int64))


def test_inputs_may_be_nested():
    """The tensors of a dict are copied to the captured ones."""
    captured = {"image": torch.zeros(2, 3), "size": torch.zeros(2)}
    step = graph.GraphedStep(None, SimpleNamespace(param_groups=[]), CPU)
    step.stream, step.warmup_steps, step.results = object(), 0, "results"
    step.graph, step.batch = SimpleNamespace(replay=lambda: None), (captured, torch.zeros(2))
    given = {"image": torch.ones(2, 3), "size": torch.full((2,), 5.0)}
    assert step(given, torch.ones(2)) == "results"
    assert all(torch.equal(captured[name], given[name]) for name in given)
    assert torch.equal(step.batch[1], torch.ones(2))


def test_other_cuda_graphs_are_refused(capfd):
    with pytest.raises(SystemExit, match="2"):
        load_config(Settings, graph.GraphSettings, argv=["--compile=max-autotune"])
    assert "--compile default" in capfd.readouterr().err


def test_script_trains_the_same_bits_on_a_cpu(tmp_path):
    assert_same_bits(tmp_path, {"train_1gpu.py": {}, "train_1gpu_graph.py": {}})


def test_bfloat16_trains_the_same_bits_as_in_the_amp_script(tmp_path):
    flags = {"amp_dtype": "bfloat16"}
    assert_same_bits(tmp_path, {"train_ddp_amp.py": flags, "train_1gpu_graph.py": flags})


def assert_same_bits(folder, scripts):
    """scripts: {name: flags}, of which train_ddp_amp.py runs as one rank."""
    files = []
    for script, flags in scripts.items():
        ranks = [1] if script == "train_ddp_amp.py" else []
        run = fork_script(script, *ranks, output_dir=folder / script, **SETTINGS | flags)
        assert (run.code, run.stderr) == (0, "")
        files.append(read_checkpoint(run.output_dir / "last.pt"))
    for name, value in files[0]["model"].items():
        assert torch.equal(files[1]["model"][name], value), name


def test_killed_and_resumed_run_matches_an_uninterrupted_one(tmp_path):
    assert_resumes(tmp_path, "train_1gpu_graph.py", None, clip_norm=1.0, epochs=1)
