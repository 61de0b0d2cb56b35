"""one_file/*.py train the weights that the ladder trains, on any number of processes and after any
restart; and they import nothing of ours."""

import ast
import sys

import pytest
import torch

from tests.forked import largest_difference
from tools.closure import size
from tools.runs import ROOT, finish_run, start_run
from utils.checkpoint_file import read_checkpoint

FOLDER = ROOT / "one_file"
FLAGS = {"epochs": 3, "global_batch": 12, "lr": 0.05, "clip_norm": 0.5, "workers": 0}
LADDER = {"epochs": 3, "global_batch_size": 12, "lr": 0.05, "clip_norm": 0.5, "dtype": "float64"}
LADDER |= {"device": "cpu", "num_workers": 0, "num_threads": 1, "loader": "workers"}
OURS = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"


def edited(name, folder, edits):
    """A copy of a script that trains tests/one_file_task.py, as a user would edit it. edits: {text:
    what takes its place}."""
    text = (FOLDER / name).read_text()
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    task = f"{OURS}from tests import one_file_task\n"
    task += "build_datasets = lambda args: one_file_task.images_of(args.seed)\n"
    task += "build_model, blocks = one_file_task.small_model, list\n\n"
    place = "class EpochSampler(DistributedSampler):"
    assert text.count(place) == 1
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(text.replace(place, task + place))
    return script


def start(name, folder, nproc, edits, **flags):
    flags = FLAGS | {"checkpoint": folder / "checkpoint.pt"} | flags
    return start_run(edited(name, folder, edits), nproc, flags, {"CUDA_VISIBLE_DEVICES": ""})


def train(name, folder, nproc, **flags):
    """Run it. Returns its Run, and its last checkpoint."""
    run = finish_run(start(name, folder, nproc, {}, **flags), folder)
    assert run.code == 0, run.stderr
    return run, torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return train("train_ddp.py", tmp_path_factory.mktemp("one"), 1)


def losses(run):
    return [line for line in run.stdout.splitlines() if line.startswith("epoch ")]


def test_it_is_one_short_file():
    for script in FOLDER.glob("*.py"):
        assert size(script).lines <= 220
        modules = set()
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
        assert modules - sys.stdlib_module_names == {"torch", "torchvision"}


def test_weights_are_those_of_the_ladder(one_process, tmp_path):
    run, checkpoint = one_process
    text = (ROOT / "train_1gpu.py").read_text()
    line = "import tasks.images as task"
    assert text.count(line) == 1
    script = tmp_path / "train_1gpu.py"
    script.write_text(OURS + text.replace(line, "import tests.one_file_task as task"))
    flags = LADDER | {"output_dir": tmp_path / "run"}
    ladder = finish_run(start_run(script, None, flags), tmp_path / "run")
    assert ladder.code == 0, ladder.stderr
    theirs = read_checkpoint(tmp_path / "run" / "last.pt")
    assert largest_difference(checkpoint["model"], theirs["model"]) < 1e-12
    for line, row in zip(losses(run), ladder.rows, strict=True):
        for name in ("train_loss", "val_loss", "val_accuracy"):
            assert f"{row[name]:.4f}" in line, (line, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nproc", "flags"),
    [
        ("train_ddp.py", 2, {}),
        ("train_ddp.py", 3, {"workers": 1}),
        ("train_ddp.py", 2, {"micro_batches": 3}),
        ("train_fsdp.py", 1, {}),
        ("train_fsdp.py", 2, {"micro_batches": 3, "workers": 1}),
        ("train_fsdp.py", 3, {}),
    ],
)
def test_weights_do_not_depend_on_processes(name, nproc, flags, one_process, tmp_path):
    run, checkpoint = train(name, tmp_path, nproc, **flags)
    assert largest_difference(checkpoint["model"], one_process[1]["model"]) < 1e-12
    assert losses(run) == losses(one_process[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_ddp.py", "train_fsdp.py"])
def test_stopped_within_an_epoch_and_resumed_on_another_number(name, one_process, tmp_path):
    """SIGTERM reaches one rank in the fourth step of the second epoch: all ranks stop after it."""
    stop = 'if (dist.get_rank(), run["epoch"], step) == (1, 1, 3):\n'
    stop += "            os.kill(os.getpid(), signal.SIGTERM)\n        "
    edits = {
        "STEPS_BETWEEN_LOOKS = 10": "STEPS_BETWEEN_LOOKS = 1",
        "scheduler.step()": stop + "scheduler.step()",
    }
    stopped = finish_run(start(name, tmp_path, 2, edits), tmp_path)
    assert stopped.code == 1 and len(losses(stopped)) == 1, stopped.stderr
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (checkpoint["epoch"], checkpoint["step"]) == (1, 4)
    run, checkpoint = train(name, tmp_path, 1)
    assert largest_difference(checkpoint["model"], one_process[1]["model"]) < 1e-12
    assert losses(stopped) + losses(run) == losses(one_process[0])


@pytest.mark.slow
def test_error_of_all_ranks_is_printed_once(tmp_path):
    run = finish_run(start("train_ddp.py", tmp_path, 2, {}, lr="-1"), tmp_path)
    assert run.code == 1 and run.stderr.count("ValueError: Invalid") == 1, run.stderr
    assert "[rank1]" not in run.stderr
