"""Checkpoints that are read back from the disk before they replace the last one."""

import os

import pytest

from tests.test_checkpoint import checkpointer
from utils.checkpoint_file import read_checkpoint
from utils.errors import UserError
from utils.options.verified_saves import VerifiedFiles


def truncate(file, *_):
    path = os.readlink(f"/proc/self/fd/{file}")
    os.truncate(path, os.path.getsize(path) - 10)


def test_damaged_file_never_replaces_a_checkpoint(tmp_path, monkeypatch):
    checkpoint = checkpointer(tmp_path, hooks=[VerifiedFiles()])
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
    checkpoint = checkpointer(tmp_path, hooks=[VerifiedFiles()])
    checkpoint.save(1)
    checkpoint.wait()
    assert advice == [(0, 0, os.POSIX_FADV_DONTNEED)]
