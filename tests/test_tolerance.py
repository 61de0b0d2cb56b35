"""Faults that a run may outlive: steps that are not finite, saves that fail or are damaged."""

import errno
import fcntl
import os
import shutil
import threading

import pytest
import torch
import torch.distributed as dist

from tests.forked import FIVE_STEPS, fork_script, largest_difference, without_seconds
from tests.test_checkpoint import Steps, make_state
from utils import errors
from utils.amp import AmpConfig
from utils.checkpoint import Checkpointer, read_checkpoint
from utils.config import ConfigError, load_config
from utils.data import Loader
from utils.distributed import dp_rank
from utils.errors import UserError
from utils.metrics import Meter, MetricLogger
from utils.preemption import Preempted, _restore_handlers
from utils.tolerance import SkippedSteps

SKIP = FIVE_STEPS | {"dtype": "float64", "max_skipped_steps": 2}
VIT = {"model": "vit_tiny", "image_size": 16}


def poisoned(*places, rank=None, value=float("nan")):
    """For fork_script(before=...): the images of (epoch, step) are not finite on data-parallel rank
    `rank`, or on all."""

    def before():
        batches = Loader.__iter__

        def poisoned_batches(loader):
            for images, labels in batches(loader):
                here = loader.train and rank in (None, dp_rank())
                if here and (loader.epoch, loader.step) in places:
                    images = images * value
                yield images, labels

        Loader.__iter__ = poisoned_batches

    return before


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """train_1gpu.py skips a whole global batch within an epoch, and one at its end."""
    folder = tmp_path_factory.mktemp("one")
    runs = {}
    for name, flags in (("resnet", {}), ("vit", VIT), ("adamw", {"optimizer": "adamw"})):
        places = poisoned((0, 2), (1, 5))
        flags = SKIP | flags
        runs[name] = fork_script("train_1gpu.py", None, places, output_dir=folder / name, **flags)
        assert runs[name].code == 0, runs[name].stderr
    return runs


def test_skipped_step_changes_nothing(one_process):
    run = one_process["resnet"]
    assert [row["train_samples"] for row in run.rows] == [48, 48]  # of 60
    assert run.stderr.count("\n") == 2
    first, second = run.stderr.splitlines()
    assert first.startswith("warning: step 2 of epoch 0 was skipped, as the loss on rank 0, of ")
    assert first.endswith("is not finite") and "step 5 of epoch 1" in second
    checkpoint = read_checkpoint(run.output_dir / "last.pt")
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert checkpoint["model"]["bn1.num_batches_tracked"] == 8  # of 10
    assert all(0.0 < row["train_loss"] < 10.0 for row in run.rows)


@pytest.mark.parametrize(
    ("script", "nproc", "reference", "flags"),
    [
        ("train_1gpu_graph.py", None, "resnet", {}),
        ("train_mp.py", None, "resnet", {"devices": "cpu,cpu"}),
        ("train_ddp.py", 2, "resnet", {}),
        ("train_ddp_accum.py", 2, "vit", VIT | {"micro_batches": 2}),
        ("train_fsdp.py", 2, "resnet", {}),  # SGD is not fused for its shards, AdamW is
        ("train_fsdp.py", 2, "adamw", {"optimizer": "adamw"}),
        ("train_tp.py", 2, "vit", VIT),
        ("train_pp.py", 2, "vit", VIT | {"micro_batches": 2}),
    ],
    ids=str,
)
def test_all_scripts_skip_the_same_steps(script, nproc, reference, flags, tmp_path, one_process):
    """One rank's samples are enough; here, the last data-parallel rank's."""
    replicas = nproc if script in ("train_ddp.py", "train_ddp_accum.py", "train_fsdp.py") else 1
    places = poisoned((0, 2), (1, 5), rank=replicas - 1)
    run = fork_script(script, nproc, places, output_dir=tmp_path / "run", **SKIP | flags)
    assert run.code == 0, run.stderr
    assert run.stderr.count("was skipped, as the loss on rank") == 2
    assert run.stderr.count("of samples [") == 2 * replicas ** (script != "train_ddp_accum.py")
    theirs = one_process[reference]
    paths = run.output_dir / "last.pt", theirs.output_dir / "last.pt"
    ours, expected = (read_checkpoint(path)["model"] for path in paths)
    assert largest_difference(ours, expected) < 1e-9
    for row, other in zip(run.rows, theirs.rows, strict=True):
        for name in ("train_loss", "train_accuracy", "train_samples", "val_loss"):
            assert row[name] == pytest.approx(other[name], abs=1e-9), name


def test_without_the_option_the_weights_are_lost(tmp_path):
    """What the tests above would show without it."""
    flags = FIVE_STEPS | {"dtype": "float64"}
    run = fork_script("train_ddp.py", 2, poisoned((0, 2)), output_dir=tmp_path / "run", **flags)
    assert run.code == 1 and "not finite" not in run.stderr


def test_too_many_skipped_steps_end_the_run(tmp_path):
    flags = SKIP | {"max_skipped_steps": 1, "sync_bn": False}  # which would spread NaN to rank 0
    places = poisoned((0, 4), (1, 3), rank=1)
    run = fork_script("train_ddp.py", 2, places, output_dir=tmp_path / "run", **flags)
    assert run.code == 1
    error, warning = sorted(run.stderr.splitlines())
    assert warning.startswith("warning: step 4 of epoch 0 was skipped")
    assert "step 3 of epoch 1 was skipped, as the loss on rank 1, of samples [" in error
    assert "That makes 2 steps, and --max-skipped-steps is 1" in error
    assert read_checkpoint(tmp_path / "run" / "last.pt")["epoch"] == 1
    again = fork_script("train_ddp.py", 2, places, output_dir=tmp_path / "run", **flags)
    assert again.code == 0, again.stderr  # each start counts from zero


def test_gradient_without_a_loss_that_is_not_finite(tmp_path):
    def before():
        real = torch.Tensor.backward

        def backward(tensor, *args, **kwargs):
            real(tensor * float("inf"), *args, **kwargs)

        torch.Tensor.backward = backward

    flags = SKIP | {"max_skipped_steps": 0}
    run = fork_script("train_1gpu.py", None, before, output_dir=tmp_path / "run", **flags)
    assert run.code == 1 and "step 1 of epoch 0 was skipped, as a gradient is not" in run.stderr


def test_all_ranks_skip_if_one_shard_is_not_finite(tmp_path):
    def before():
        check = SkippedSteps._before

        def poison_and_check(self, optimizer, args, kwargs):
            if (dist.get_rank(), self.loader.epoch, self.loader.step) == (1, 0, 3):
                optimizer.param_groups[0]["params"][0].grad.to_local().fill_(float("inf"))
            check(self, optimizer, args, kwargs)

        SkippedSteps._before = poison_and_check

    run = fork_script("train_fsdp.py", 2, before, output_dir=tmp_path / "run", **SKIP)
    assert run.code == 0, run.stderr
    assert run.stderr == "warning: step 3 of epoch 0 was skipped, as a gradient is not finite\n"
    assert [row["train_samples"] for row in run.rows] == [48, 60]


def test_gradscaler_has_the_decision(capfd):
    """The first scale of float16 is meant to overflow; such steps would count."""
    argv = ["--amp-dtype", "float16", "--max-skipped-steps", "3"]
    with pytest.raises(SystemExit):
        load_config(AmpConfig, argv)
    assert "where the GradScaler skips steps" in capfd.readouterr().err
    assert load_config(AmpConfig, ["--max-skipped-steps", "3"]).max_skipped_steps == 3


def test_resumed_run_skips_and_counts_as_an_uninterrupted_one(tmp_path):
    """Saved right after a skipped step: the Meter's sums in the file are without it."""
    flags = SKIP | {"epochs": 1}
    places = poisoned((0, 2))
    straight = fork_script("train_1gpu.py", None, places, output_dir=tmp_path / "a", **flags)

    def stop():
        places()
        real = Checkpointer.step

        def step(checkpoint):
            real(checkpoint)
            if checkpoint.state["loader"].step == 3:
                checkpoint.wait()
                os._exit(7)

        Checkpointer.step = step

    folder = tmp_path / "b"
    assert fork_script("train_1gpu.py", None, stop, output_dir=folder, **flags).code == 7
    assert read_checkpoint(folder / "last.pt")["loader"]["step"] == 2
    resumed = fork_script("train_1gpu.py", None, places, output_dir=folder, **flags)
    assert (resumed.code, resumed.stderr) == (0, "")
    assert without_seconds(resumed.rows) == without_seconds(straight.rows)


# Saves


def checkpointer(folder, *flags):
    """A Checkpointer of a run that has started, with these flags."""
    argv = ["--output-dir", str(folder), "--save-minutes", "0", "--epochs", "3", *flags]
    state = make_state() | {"meter": Meter(torch.device("cpu"))}
    checkpoint = Checkpointer(load_config(argv=argv), state | {"loader": Steps()})
    checkpoint.load()
    return checkpoint


@pytest.fixture
def full_disk(monkeypatch):
    """A list; while it is not empty, nothing can be flushed to the disk."""
    monkeypatch.setattr(errors, "save_failed", errors.save_failed)  # restored at the end
    full, fsync = [], os.fsync

    def flush(file):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    monkeypatch.setattr(os, "fsync", flush)
    return full


def test_failed_save_is_a_warning_and_the_next_one_is_tried(tmp_path, full_disk, capsys):
    checkpoint = checkpointer(tmp_path, "--save-errors", "warn")
    full_disk.append(True)
    checkpoint.save(1)
    checkpoint.wait()
    text = capsys.readouterr().err
    assert text.startswith(f"warning: cannot save {tmp_path}/epoch-0001.pt: No space left on ")
    assert "MB are needed" in text and "MB are free); the run continues" in text
    full_disk.clear()
    checkpoint.save(2)
    checkpoint.wait()
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 2
    full_disk.append(True)
    with pytest.raises(UserError, match="No space left on device"):
        checkpoint.save(3)  # the last one
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 2


def test_metrics_that_cannot_be_written_are_a_warning(tmp_path, full_disk, monkeypatch, capsys):
    checkpointer(tmp_path, "--save-errors", "warn")
    result = {"loss": 1.0, "accuracy": 0.5, "samples": 4, "seconds": 1.0}
    metrics = MetricLogger(tmp_path)
    shutil.rmtree(tmp_path)
    assert metrics.log(0, result, result, lr=0.1)
    assert "warning: cannot write" in capsys.readouterr().err
    assert tmp_path.is_dir()  # so that the next attempt succeeds
    metrics.log(1, result, result, lr=0.1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_save_before_a_stop_must_succeed(tmp_path, full_disk, capsys):
    """Otherwise, exit code 75 would claim that the run is saved. An earlier save need not."""
    checkpoint = checkpointer(tmp_path, "--save-errors", "warn", "--save-minutes", "5")
    _restore_handlers()
    full_disk.append(True)
    checkpoint.save(0, between_steps=True)
    checkpoint.interrupts.agreed = 15
    with pytest.raises(UserError, match="No space left on device"):
        checkpoint.save(0, between_steps=True)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_stop_is_saved_in_spite_of_a_failed_save_before(tmp_path, full_disk, capsys):
    checkpoint = checkpointer(tmp_path, "--save-errors", "warn", "--save-minutes", "5")
    _restore_handlers()
    full_disk.append(True)
    blocked = threading.Event()
    checkpoint.writer.submit(blocked.wait)  # so that the first save fails when the second is due
    checkpoint.save(1)
    checkpoint.writer.submit(full_disk.clear)
    checkpoint.interrupts.agreed = 15
    threading.Timer(0.2, blocked.set).start()
    with pytest.raises(Preempted):
        checkpoint.save(1, between_steps=True)
    assert "warning: cannot save" in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_deleted_folder_is_created_again(tmp_path):
    def before():
        real = Checkpointer.step

        def step(checkpoint):
            if (checkpoint.epoch, checkpoint.state["loader"].step, dp_rank()) == (0, 2, 0):
                shutil.rmtree(checkpoint.folder)
            real(checkpoint)

        Checkpointer.step = step

    flags = FIVE_STEPS | {"save_errors": "warn"}
    run = fork_script("train_ddp.py", 2, before, output_dir=tmp_path / "run", **flags)
    assert run.code == 0 and run.stderr.count("warning: cannot save") == 1
    assert read_checkpoint(tmp_path / "run" / "last.pt")["epoch"] == 2
    assert len(run.rows) == 2 and (tmp_path / "run" / "config.yaml").exists()


def test_folder_that_is_created_again_is_locked(tmp_path, full_disk):
    checkpoint = checkpointer(tmp_path / "run", "--save-errors", "warn")
    shutil.rmtree(tmp_path / "run")
    checkpoint.save(1)
    checkpoint.wait()
    with open(tmp_path / "run" / ".lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def truncate(file, *_):
    path = os.readlink(f"/proc/self/fd/{file}")
    os.truncate(path, os.path.getsize(path) - 10)


def test_damaged_file_never_replaces_a_checkpoint(tmp_path, monkeypatch):
    checkpoint = checkpointer(tmp_path, "--verify-saves")
    checkpoint.save(1)
    checkpoint.wait()
    monkeypatch.setattr(os, "posix_fadvise", truncate)
    checkpoint.save(1, between_steps=True)
    with pytest.raises(UserError, match=r"cannot save .*last\.pt: the file differs when"):
        checkpoint.wait()
    assert read_checkpoint(tmp_path / "last.pt")["loader"] == {"step": 0}
    assert not list(tmp_path.glob("*.tmp"))


def test_what_is_read_back_comes_from_the_disk(tmp_path, monkeypatch):
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advice.append(arguments[1:]))
    checkpoint = checkpointer(tmp_path, "--verify-saves")
    checkpoint.save(1)
    checkpoint.wait()
    assert advice == [(0, 0, os.POSIX_FADV_DONTNEED)]


@pytest.mark.parametrize("flags", [["--save-errors", "warn"], ["--verify-saves"]], ids=str)
def test_sharded_saves_are_not_covered(flags, capfd):
    load_config(argv=flags)
    with pytest.raises(SystemExit):
        load_config(argv=[*flags, "--save-sharded"])
    assert "not --save-sharded, nor train_pp.py" in capfd.readouterr().err


def test_options_may_come_from_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("max_skipped_steps: 3\nverify_saves: true\n")
    cfg = load_config(argv=["--config", str(file)])
    assert (cfg.max_skipped_steps, cfg.save_errors, cfg.verify_saves) == (3, "stop", True)
    assert not hasattr(load_config(argv=[]), "save_errors")
    assert issubclass(ConfigError, UserError)
