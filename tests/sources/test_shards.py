"""sources/shards.py: files of many samples, as docs/streams.md promises it."""

import io
import json
import os
import pickle
import subprocess
import tarfile
import threading
import tracemalloc

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from sources import shards
from sources.lines import scan_lines
from sources.samplers import DistributedSamplerWrapper, ShardOrder
from sources.scan import IndexedField
from sources.shards import Shards, find_shards
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import RUN, run_to_end, with_task
from tests.shards_task import write_shards
from tools.lib.ladder import ROOT
from tools.verify.run import project_with_task
from utils.errors import UserError

TASK = "tests.shards_task"


def write_tar(path, samples, **options):
    """Write {name: bytes} in this order."""
    with tarfile.open(path, "w", **options) as archive:
        for name, data in samples.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def numbered(first, count):
    samples = {}
    for number in range(first, first + count):
        samples[f"folder/{number:04}.cls"] = str(number % 3).encode()
        samples[f"folder/{number:04}.left.jpg"] = bytes([number]) * (number * 100 % 1100)
    return samples


def write_tars(folder, count=3, size=5):
    return [
        write_tar(folder / f"train-{shard}.tar", numbered(shard * size, size))
        for shard in range(count)
    ]


# What is in the files


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tar(form, tmp_path):
    long = {} if form == tarfile.USTAR_FORMAT else {"a" * 150 + ".txt": b"long name"}
    paths = [
        write_tar(tmp_path / "b.tar", numbered(0, 5), format=form),
        write_tar(tmp_path / "a.tar", numbered(5, 3) | long, format=form),
    ]
    dataset = Shards(paths)
    assert len(dataset) == 8 + len(long) and dataset.shard_sizes == [5, 3 + len(long)]
    assert dataset[6] == {
        "__key__": "folder/0006",
        "cls": b"0",
        "left.jpg": bytes([6]) * 600,
    }
    if long:
        assert dataset[-1] == {"__key__": "a" * 150, "txt": b"long name"}


def test_folders_in_a_tar_are_no_samples(tmp_path):
    folder = tmp_path / "files" / "train"
    folder.mkdir(parents=True)
    for name in ("1.txt", "1.cls", "2.txt"):
        (folder / name).write_text(name)
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(folder.parent, "files")
    samples = [sample["__key__"] for sample in Shards([path])]
    assert sorted(samples) == ["files/train/1", "files/train/2"]


def test_json_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "\xc3\xa9", "n": 7}\r\n\n[1, 2]\n3')
    assert list(Shards([path])) == [{"text": "é", "n": 7}, [1, 2], 3]


def test_text(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\n\none\ntwo\r\n\r\n  \nthree\n\nfour")
    assert list(Shards([path])) == ["one", "two", "three", "four"]
    assert list(Shards([path], paragraphs=True)) == ["one\ntwo", "three", "four"]
    path.write_text("\ufeffone\n", encoding="utf-8")  # as Notepad writes it
    dataset = Shards([path], length="text")
    assert list(dataset) == ["one"] and dataset.lengths.tolist() == [3]


def test_labels_are_in_the_index(tmp_path):
    dataset = Shards(write_tars(tmp_path), label="cls")
    assert dataset.labels.tolist() == [i % 3 for i in range(15)]
    write_shards(tmp_path, train=(2, 3))
    dataset = Shards(sorted(tmp_path.glob("train*.jsonl")), label="label")
    assert dataset.labels.tolist() == [0, 0, 1, 1, 1]


def test_lengths_are_in_the_index(tmp_path):
    dataset = Shards(write_tars(tmp_path), length="left.jpg")
    assert dataset.lengths.tolist() == [len(sample["left.jpg"]) for sample in dataset]
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "\u00e9 1"}\n{"text": ""}\n')
    assert Shards([path], length="text").lengths.tolist() == [4, 0]
    assert Shards([path]).lengths.tolist() == [
        len(line) for line in path.read_bytes().splitlines(True)
    ]
    path.write_text('{"text": 3}\n')
    with pytest.raises(UserError, match="at offset 0: no string 'text'"):
        Shards([path], length="text")
    (tmp_path / "x.txt").write_bytes("\r\nt\u00e9\r\n\r\nthree\n".encode())
    for paragraphs in (False, True):
        texts = Shards([tmp_path / "x.txt"], length="text", paragraphs=paragraphs)
        assert list(texts) == ["t\u00e9", "three"] and texts.lengths.tolist() == [3, 5]
    with pytest.raises(UserError, match="label or length"):
        Shards([path], length="text", label="n")


# What is left out


def archive(path, *members):
    """Write (name, data) or, with (name, type, link), members without data."""
    with tarfile.open(path, "w") as file:
        for name, data, *link in members:
            member = tarfile.TarInfo(name)
            if link:
                member.type, member.linkname, data = data, link[0], b""
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return path


def numbers(*names):
    """(name, number in it) as members."""
    return [(name, name.rpartition("/")[2].partition(".")[0].encode()) for name in names]


def test_hidden_files_in_a_tar_are_ignored_and_counted(tmp_path, capsys):
    """As macOS puts one beside each file, the folder task ignores them, too."""
    names = [
        f"./train/{twin}{i}.{name}"
        for i in (1, 2)
        for name in ("cls", "jpg")
        for twin in ("._", "")
    ]
    paths = [
        archive(tmp_path / "a.tar", *numbers(*names)),
        archive(tmp_path / "b.tar", *numbers(".git/3.cls", "._3.jpg", "3.cls", "3.jpg")),
    ]
    for on_bad in ("stop", "skip", "skip"):  # at last with an index that is known
        dataset = Shards(paths, label="cls", on_bad=on_bad)
        assert dataset.labels.tolist() == [1, 2, 3]
        assert dataset[1] == {"__key__": "./train/2", "cls": b"2", "jpg": b"2"}
        [line] = capsys.readouterr().err.splitlines()
        assert "ignored 6 hidden files" in line and f" ./train/._1.cls in {paths[0]}" in line


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
@pytest.mark.parametrize("which", [("2.cls",), ("2.jpg",), ("2.cls", "2.jpg")], ids=str)
def test_links_in_a_tar_are_faults(kind, which, tmp_path, capsys):
    names = [f"{i}.{name}" for i in (1, 2, 3) for name in ("cls", "jpg")]
    members = [(name, kind, f"1{name[1:]}") if name in which else (name, b"1") for name in names]
    path = archive(tmp_path / "x.tar", *members)
    remedy = "not a file" if kind == tarfile.FIFOTYPE else "a link, .* --hard-dereference -h"
    for label in ("", "cls"):
        with pytest.raises(UserError, match=rf"x.tar at offset 2048: {which[0]} is {remedy}"):
            Shards([path], label=label)
        dataset = Shards([path], label=label, on_bad="skip")
        assert [sample["__key__"] for sample in dataset] == ["1", "3"]
        assert "skipping 1 samples; 2 samples are left" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_files_with_holes_in_a_tar_are_faults(form, tmp_path):
    """Of which tar -S stores less than their size: their bytes would run into the next sample."""
    for number in range(4):
        (tmp_path / f"{number}.cls").write_text(str(number))
        (tmp_path / f"{number}.npy").write_bytes(b"x" * 3000)
    os.truncate(tmp_path / "1.npy", 1 << 20)
    names = [f"{number}.{name}" for number in range(4) for name in ("cls", "npy")]
    command = ["tar", "-S", f"--format={form}", "-cf", "x.tar", *names]
    subprocess.run(command, cwd=tmp_path, check=True)
    path = tmp_path / "x.tar"
    if path.stat().st_size > 1 << 20:
        pytest.skip("the file system has no holes")
    with pytest.raises(UserError, match=r"x\.tar .*1\.npy .*holes: .*without tar -S"):
        Shards([path])
    dataset = Shards([path], on_bad="skip", label="cls")
    assert dataset.labels.tolist() == [0, 2, 3]
    assert [sample["npy"] for sample in dataset] == [b"x" * 3000] * 3


def test_a_member_that_is_there_twice(tmp_path):
    """As tar -r appends a label that was corrected."""
    path = archive(tmp_path / "x.tar", *numbers("1.cls", "1.jpg"), ("1.cls", b"7"))
    with pytest.raises(UserError, match=r"x\.tar .*offset 0: 1\.cls .*twice"):
        Shards([path], label="cls")


def test_other_files_of_a_folder_are_counted(tmp_path, capsys):
    for name in ("train-0.tar", "train-1.tar.gz", "train-2.tgz", "val-0.tar.gz", "._train-0.tar"):
        (tmp_path / name).touch()
    assert find_shards(tmp_path, "train", [".tar"]) == [tmp_path / "train-0.tar"]
    [line] = capsys.readouterr().err.splitlines()
    assert "ignored in" in line and "train-1.tar.gz, train-2.tgz" in line


# The index


def test_the_index_is_made_once(tmp_path, monkeypatch):
    paths = write_tars(tmp_path)
    expected = [sample["__key__"] for sample in Shards(paths, cache_dir=tmp_path / "new" / "cache")]
    assert len(list((tmp_path / "new" / "cache").iterdir())) == 2  # nothing temporary is left
    monkeypatch.setattr(shards, "_scan", None)
    again = Shards(paths, cache_dir=tmp_path / "new" / "cache")
    assert isinstance(again.index.base, numpy.memmap)
    assert [sample["__key__"] for sample in again] == expected
    os.utime(paths[1], (0, 0))
    with pytest.raises(TypeError):  # it would be made again
        Shards(paths, cache_dir=tmp_path / "new" / "cache")


def flipped(data, number):
    number %= len(data)
    return data[:number] + bytes([data[number] ^ 16]) + data[number + 1 :]


DAMAGES = {
    "truncated": lambda data: data[:-10],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "header": lambda data: data.replace(b"size", b"sizd").replace(b"sum", b"sun"),
    "offset": lambda data: flipped(data, -48),
    "size": lambda data: data[:-40] + b"\xff" * 6 + data[-34:],
    "shard": lambda data: flipped(data, -8),
    "label": lambda data: flipped(data, -4),
    "removed": None,
}


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_is_made_again(how, suffix, tmp_path, capsys):
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\nthree\n")
    before = Shards([path], on_bad="skip", length="text")
    file = before.index_file.with_suffix(suffix)
    data = file.read_bytes()
    if DAMAGES[how]:
        file.write_bytes(DAMAGES[how](data))
    else:
        file.unlink()
    after = Shards([path], on_bad="skip", length="text")
    assert list(after) == ["one", "two", "three"] and after.lengths.tolist() == [3, 3, 5]
    assert after.describe("x") == before.describe("x")
    assert capsys.readouterr().err == "" and file.read_bytes() == data


def test_an_index_takes_little_memory_while_it_is_made(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a\n" * 100_000)
    tracemalloc.start()
    index, _ = shards._scan(scan_lines, IndexedField("", ""), path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index) == 100_000 and peak < 80 * len(index)  # as tuples, they take 150 bytes each


def test_many_files_are_read_by_several_processes(tmp_path):
    dataset = Shards(write_tars(tmp_path, count=7))
    assert dataset.shard_sizes == [5] * 7
    assert [int(sample["__key__"][-4:]) for sample in dataset] == list(range(35))
    (tmp_path / "train-3.tar").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"train-3\.tar .*damaged.* offset 0 ") as error:
        Shards(sorted(tmp_path.glob("*.tar")))
    assert "Traceback" not in str(error.value)


def test_the_cache_must_be_writable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is writable as cache_dir"):
        Shards(write_tars(tmp_path), cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no shards: .*pattern"),
        (["a.tar.gz"], "not compressed"),
        (["a.tar", "a.txt"], r"one kind, .*not \.tar, \.txt"),
        (["a.tar", "a.tar"], "named twice"),
        (["empty.txt"], r"no samples in .*empty\.txt"),
    ],
)
def test_wrong_files(names, message, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=message):
        Shards([tmp_path / name for name in names])


# Damaged files


def damage(path, how):
    """Damage the second of three samples, or what follows. Returns the offset of the damage, and
    the keys that remain."""
    data = path.read_bytes()
    places = Shards([path], cache_dir=path.parent / "intact").index["offset"].tolist()
    end = len(data.rstrip(b"\0"))
    end += -end % 512
    if how == "truncated in a file":
        damaged, offset, left = data[: places[2] + 2200], places[2] + 1536, 2
    elif how == "truncated between samples":
        damaged, offset, left = data[: places[2]], places[2], 1
    elif how == "truncated in a header":
        damaged, offset, left = data[: places[2] + 100], places[2], 1
    elif how == "overwritten":
        damaged, offset, left = data[: places[1]] + bytes([7]) * 5000, places[1], 0
    elif how == "no end":
        damaged, offset, left = data[:end], end, 2
    else:
        damaged, offset, left = data[: end + 1024] + data, end, 2
    path.write_bytes(damaged)
    return offset, left


@pytest.mark.parametrize(
    "how",
    [
        "truncated in a file",
        "truncated between samples",
        "truncated in a header",
        "overwritten",
        "no end",
        "joined with cat",
    ],
)
def test_damaged_tar(how, tmp_path, capsys):
    """tarfile itself takes most of these for the end of the archive."""
    samples = {f"{i}.{name}": b"x" * 700 for i in range(3) for name in ("cls", "jpg")}
    path = write_tar(tmp_path / "bad.tar", samples)
    offset, left = damage(path, how)
    paths = [path, *write_tars(tmp_path)]
    with pytest.raises(UserError, match=rf"bad\.tar .*damaged.* offset {offset} \("):
        Shards(paths)
    dataset = Shards(paths, on_bad="skip")
    assert dataset.shard_sizes == [left, 5, 5, 5]
    assert [sample["__key__"] for sample in dataset][:left] == [str(i) for i in range(left)]
    said = capsys.readouterr().err
    assert "skipping" in said and "bad.tar" in said
    Shards(paths, on_bad="skip")  # whose index is known
    assert capsys.readouterr().err == said


def test_how_much_is_lost(tmp_path, capsys):
    samples = {f"{i}.txt": b"x" * 100 for i in range(20)}
    path = write_tar(tmp_path / "x.tar", samples)
    path.write_bytes(path.read_bytes()[: 12 * 1024 + 600])
    assert len(Shards([path], on_bad="skip")) == 11  # the twelfth may be incomplete
    said = capsys.readouterr().err
    assert f"{path} " in said and " offset 12288 (truncated" in said
    assert "skipping 600 bytes; 11 samples" in said


def test_missing_and_empty_files(tmp_path, capsys):
    first, second, third = write_tars(tmp_path)
    second.unlink()
    paths = [first, second, third]
    with pytest.raises(UserError, match=r"train-1.tar does not exist"):
        Shards(paths)
    dataset = Shards(paths, on_bad="skip")
    assert dataset.shard_sizes == [5, 0, 5] and dataset[5]["__key__"] == "folder/0010"
    said = capsys.readouterr().err
    assert f"{second} does not exist" in said and "; 0 samples" in said
    with pytest.raises(UserError, match=r"no samples in .*; .*train-1\.tar .*not exist"):
        Shards([second], on_bad="skip")
    second.touch()  # an upload that was interrupted: an archive has an end
    with pytest.raises(UserError, match=r"train-1\.tar .*offset 0 \(empty file\)"):
        Shards(paths)
    write_tar(second, {})
    assert Shards(paths).shard_sizes == [5, 0, 5]
    write_tar(second, numbered(5, 5))  # it is back
    assert len(Shards(paths, on_bad="skip")) == 15


def test_only_the_broken_lines_of_json_are_lost(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n{"n": 3}\n{"n": "x"}\n{"n": 5')
    with pytest.raises(UserError, match=r"x.jsonl at offset 9: no JSON in UTF-8: "):
        Shards([path])
    assert [sample["n"] for sample in Shards([path], on_bad="skip")] == [1, 3, "x"]
    assert "skipping 2 samples; 3 samples are left" in capsys.readouterr().err
    assert Shards([path], on_bad="skip", label="n").labels.tolist() == [1, 3]


UNREADABLE = {
    "half a surrogate pair": rb'{"text": "cut emoji \ud83d"}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep, closed": b'{"text": ' * 100_000,
    "5,000 digits": b'{"text": ' + b"9" * 5000 + b"}",
    "Latin-1": b'{"text": "\xe9"}',
    "zeros": bytes(20),
}


@pytest.mark.parametrize("line", UNREADABLE.values(), ids=UNREADABLE)
def test_lines_that_json_cannot_read(line, tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"x.jsonl at offset 17: no JSON in UTF-8: "):
        Shards([path], length="text")
    dataset = Shards([path], length="text", on_bad="skip")
    assert [sample["text"] for sample in dataset] == ["a", "b"]
    assert "skipping 1 samples; 2 samples are left" in capsys.readouterr().err


def test_utf_16_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"))
    with pytest.raises(UserError, match=r"no samples in .*x\.jsonl; .*no JSON"):
        Shards([path], on_bad="skip")


@pytest.mark.parametrize("cls", [b"cat", b"", b"3.5", b"3000000000", None])
def test_samples_without_a_label(cls, tmp_path):
    samples = {"1.cls": b"3", "1.jpg": b"", "2.jpg": b""} | ({"2.cls": cls} if cls else {})
    path = write_tar(tmp_path / "x.tar", samples)
    reason = "2.cls is no integer" if cls else "2 has no .cls, only .jpg"
    with pytest.raises(UserError, match=rf"x.tar at offset 1536: {reason}"):
        Shards([path], label="cls")
    assert Shards([path], label="cls", on_bad="skip").labels.tolist() == [3]


@pytest.mark.parametrize("label", ["3.0", "null", '"3"', "[3]", "3000000000"])
def test_json_that_is_no_label(label, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"n": {label}}}\n')
    with pytest.raises(UserError, match=r"x.jsonl at offset 0: no integer 'n'"):
        Shards([path], label="n")


def test_scattered_samples_are_refused(tmp_path):
    """WebDataset would make three samples of these, each without some of its files."""
    path = write_tar(tmp_path / "x.tar", {"1.jpg": b"", "2.jpg": b"", "1.cls": b""})
    with pytest.raises(UserError, match=r"x\.tar .*\(1 .*two places: .*sorted by"):
        Shards([path])


# Reading


def test_a_file_that_changes_is_noticed(tmp_path):
    for how in ("truncated", "overwritten", "replaced", "removed"):
        path = write_tar(tmp_path / f"{how}.tar", numbered(0, 5))
        unread, reading = Shards([path]), Shards([path])
        assert reading[0]["cls"] == b"0"
        data = path.read_bytes()
        if how == "truncated":
            os.truncate(path, len(data) // 2)
        elif how == "overwritten":
            path.write_bytes(bytes(len(data)))
        elif how == "replaced":
            write_tar(tmp_path / "new.tar", numbered(1, 5)).rename(path)
        else:
            path.unlink()
        offset = reading.index["offset"][4]
        message = rf"{how}.tar (has changed .*|at )offset {offset}"
        with pytest.raises(UserError, match=message):
            unread[4]
        if how in ("truncated", "overwritten"):
            with pytest.raises(UserError, match=message):
                reading[4]
        else:  # the open file is still the old one
            assert reading[4]["cls"] == b"1"


def test_damage_that_leaves_size_and_time_is_noticed(tmp_path):
    path = write_tar(tmp_path / "x.tar", numbered(0, 5))
    dataset = Shards([path])
    before, offset = os.stat(path), int(dataset.index["offset"][3])
    with open(path, "r+b") as file:
        file.seek(offset + 1024)
        file.write(b"garbage" * 20)
        file.seek(int(dataset.index["offset"][4]))
        file.write(bytes(3000))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for index, place in ((3, offset), (4, int(dataset.index["offset"][4]))):
        with pytest.raises(UserError, match=rf"x\.tar .*damaged.* offset {place} "):
            dataset[index]
    assert dataset[2]["cls"] == b"2"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_the_members_of_a_sample_have_one_key(form, tmp_path):
    long = "x" * 110 if form == tarfile.PAX_FORMAT else ""
    path = tmp_path / "x.tar"
    write_tar(path, {f"1.cls{long}": b"1", f"1.jpg{long}": b"2"}, format=form)
    dataset = Shards([path])
    before = os.stat(path)
    write_tar(path, {f"1.cls{long}": b"1", f"2.jpg{long}": b"2"}, format=form)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"x\.tar .*offset 0 .*sample 1"):
        dataset[0]


def test_few_files_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_FILES", 3)
    paths = write_tars(tmp_path, count=12, size=2)
    dataset = Shards(paths)

    def opened():
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        files = [os.readlink(link) for link in links if os.path.islink(link)]
        return sum(file.startswith(f"{tmp_path}/train-") for file in files)

    assert opened() == 0
    assert [int(s["__key__"][-4:]) for s in dataset] == list(range(24)) and opened() == 3
    del dataset
    assert opened() == 0


def test_threads_may_share_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_FILES", 1)
    dataset, wrong = Shards(write_tars(tmp_path)), []

    def read(seed):
        for index in numpy.random.default_rng(seed).integers(0, 15, 100).tolist():
            if dataset[index]["__key__"] != f"folder/{index:04}":
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_more_workers_than_files(start, tmp_path):
    dataset = Shards(write_tars(tmp_path, count=2), key_of)
    assert dataset[3] == 3  # its file is open, and is shared with the forks
    loader = DataLoader(dataset, 2, num_workers=3, multiprocessing_context=start)
    assert torch.cat(list(loader)).tolist() == list(range(10))


def key_of(sample):
    return int(sample["__key__"][-4:])


def test_a_pickled_dataset_holds_no_copy_of_the_index(tmp_path):
    paths = write_tars(tmp_path, count=2, size=100)
    data = pickle.dumps(Shards(paths))
    assert len(data) < 2000 and len(pickle.loads(data)) == 200


# The order


def order_of(sizes, epoch=0, **options):
    order = DistributedSamplerWrapper(ShardOrder(sizes, **options), seed=3)
    order.set_epoch(epoch)
    return order.draw().tolist()


@pytest.mark.parametrize("sizes", [[10] * 7, [1, 0, 50, 9, 3], [4], [0, 5]], ids=str)
def test_every_sample_comes_once(sizes):
    for options in ({}, {"interleave": 2, "buffer": 4}, {"interleave": 1, "buffer": 1}):
        assert sorted(order_of(sizes, **options)) == list(range(sum(sizes)))
    if len(sizes) > 1:
        assert order_of([10] * 7, epoch=1) != order_of([10] * 7) == order_of([10] * 7)


def test_wrong_orders_are_refused():
    for options in ({"interleave": 0}, {"buffer": 0}, {"buffer": -1}):
        with pytest.raises(UserError, match="both must be 1 at least"):
            ShardOrder([3, 2], **options)


def test_files_are_read_in_turns_from_start_to_end():
    order = order_of([5, 2, 4, 5], interleave=2, buffer=1)
    shard = numpy.repeat(range(4), [5, 2, 4, 5])[order].tolist()
    for number in range(4):
        own = [index for index, where in zip(order, shard, strict=True) if where == number]
        assert own == sorted(own)
    first, second = set(shard[:2]), set(shard[-2:])
    assert len(first) == 2 and not first & second
    assert shard[:4] == shard[:2] * 2


def test_reading_stays_near():
    """A block of the buffer comes from `interleave` files, or twice as many, and from their
    neighboring samples."""
    sizes, interleave, buffer = [1000] * 40, 4, 100
    order = numpy.array(order_of(sizes, interleave=interleave, buffer=buffer))
    for block in order.reshape(-1, buffer):
        files = numpy.unique(block // 1000)
        assert len(files) == interleave
        for file in files:
            own = block[block // 1000 == file] % 1000
            assert len(own) == own.max() - own.min() + 1 == buffer // interleave
        assert (numpy.diff(block) < 0).mean() > 0.3  # mixed


# Runs


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """train_ddp.py with the task of these tests, and the same with a ShardOrder."""
    folder = project_with_task("images", tmp_path_factory.mktemp("project") / "copy")
    script = with_task(folder / "train_ddp.py", TASK)
    old = "DistributedSampler(train_set, seed=cfg.seed, drop_last=True)"
    new = "DistributedSamplerWrapper(ShardOrder(train_set.shard_sizes, 2, 16), cfg.seed)"
    imports = "from sources.samplers import DistributedSamplerWrapper, ShardOrder\n"
    text = script.read_text()
    assert text.count(old) == 1
    page = (ROOT / "docs" / "streams.md").read_text()
    assert f"-    train_sampler = {old}" in page
    order = "ShardOrder(train_set.shard_sizes)"
    assert f"+    train_sampler = DistributedSamplerWrapper({order}, cfg.seed)" in page
    ordered = folder / "train_ordered.py"
    ordered.write_text(
        text.replace(old, new).replace("import torch\n", f"import torch\n{imports}", 1)
    )
    return [script, ordered]


@pytest.mark.parametrize("order", [0, 1], ids=["permutation", "shard order"])
def test_runs_train_the_same_weights(order, scripts, tmp_path):
    """63 samples in files of 0 to 21, in batches of 12."""
    script, data = scripts[order], write_shards(tmp_path / "data")
    one = run_to_end(script, 1, tmp_path / "one", data_dir=data)[1]
    killed = tmp_path / "killed"
    run_to_end(script, 2, killed, killed_at(1, 3), data_dir=data, save_steps=2)
    for nproc, name, workers in ((2, "two", 1), (3, "killed", 0)):
        run, end = run_to_end(
            script, nproc, tmp_path / name, data_dir=data, num_workers=workers, audit=True
        )
        assert largest_difference(end["model"], one["model"]) < ROUNDING
        assert [(row["train_samples"], row["val_samples"]) for row in run.rows] == [(60, 11)] * 2


def test_ranks_with_different_files_are_refused(scripts, tmp_path):
    data = write_shards(tmp_path / "data")
    other = write_shards(tmp_path / "other", train=(9, 0, 20, 14, 20))

    def before():
        """The node of rank 1 has different files in the same folder."""
        if os.environ["RANK"] == "1":
            real = shards.Shards.__init__

            def init(self, paths, *args):
                real(self, [other / path.name for path in paths], *args)

            shards.Shards.__init__ = init

    flags = RUN | {"output_dir": tmp_path / "run", "data_dir": data}
    run = fork_script(scripts[0], 2, before, **flags)
    assert run.code == 1 and "train_shards" in run.stderr


def test_a_resumed_run_refuses_different_files(scripts, tmp_path):
    data = write_shards(tmp_path / "data")
    run_to_end(scripts[1], 2, tmp_path / "run", killed_at(0, 3), data_dir=data, save_steps=2)
    moved = data.rename(tmp_path / "moved")
    path, flags = moved / "train-000.jsonl", RUN | {"data_dir": moved}
    text = path.read_text()
    path.write_text(text + json.dumps({"inputs": [0.5] * 4}))
    run = fork_script(scripts[1], 2, output_dir=tmp_path / "run", **flags)
    assert run.code == 1 and "train_shards" in run.stderr
    path.write_text(text)
    run = fork_script(scripts[1], 3, output_dir=tmp_path / "run", **flags)  # another folder
    assert run.code == 0, run.stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changes_ends_the_run(workers, scripts, tmp_path):
    data = write_shards(tmp_path / "data")

    def before():
        real = shards.Shards.__getitem__

        def cut_and_read(dataset, index):
            if os.environ["RANK"] == "1" and index == 40:
                os.truncate(data / "train-003.jsonl", 10)
            return real(dataset, index)

        shards.Shards.__getitem__ = cut_and_read

    flags = RUN | {"num_workers": workers, "data_dir": data}
    run = fork_script(scripts[0], 2, before, output_dir=tmp_path / "run", **flags)
    assert run.code == 1
    assert "train-003.jsonl has changed" in run.stderr and "run again" in run.stderr
    assert "Traceback" not in run.stderr
