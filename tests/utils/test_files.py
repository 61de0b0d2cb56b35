"""Files are whole after a crash at any moment."""

import errno
import os

import pytest

from utils.errors import UserError
from utils.files import link_atomically, write_text


def test_text_is_on_the_disk_or_the_file_stays_as_it_was(tmp_path, monkeypatch):
    """A file that a power failure has emptied would be taken for one without rows."""
    flushed, path = [], tmp_path / "metrics.jsonl"
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_size))
    write_text(path, "one")
    assert flushed[0] == 3 and path.read_text() == "one"

    def fail(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"metrics\.jsonl: Input/output error"):
        write_text(path, "two")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_text_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left"):
        write_text(tmp_path / "metrics.jsonl", "{}")
    assert not list(tmp_path.iterdir())


def test_copy_is_flushed_where_links_do_not_work(tmp_path, monkeypatch):
    flushed = []

    def refuse(*names):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(
        os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    (tmp_path / "a").write_text("x")
    link_atomically(tmp_path / "b", tmp_path / "a")
    assert (tmp_path / "b").read_text() == "x"
    assert flushed == [f"{tmp_path}/b.tmp", str(tmp_path)]


def test_link_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "a").write_text("x")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        link_atomically(tmp_path / "b", tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
