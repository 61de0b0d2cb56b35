"""sources/shards.py: files of many samples, as docs/streams.md promises it."""

import io
import json
import os
import pickle
import subprocess
import tarfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from sources import shards
from sources.lines import scan_lines
from sources.samplers import DistributedSamplerWrapper, ShardOrder
from sources.scan import IndexedField
from sources.shards import Shards
from utils.errors import UserError


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


def write_shards(folder, train=(9, 0, 21, 13, 20), val=(4, 7)):
    """Write files with these numbers of samples. Returns the folder."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for split, sizes in (("train", train), ("val", val)):
        for number, size in enumerate(sizes):
            rows = torch.rand(size, 4, generator=generator).tolist()
            text = "".join(json.dumps({"inputs": row, "label": number}) + "\n" for row in rows)
            (folder / f"{split}-{number:03}.jsonl").write_text(text)
    return folder


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
    assert Shards([path]).lengths.tolist() == [17, 13]  # of the lines
    path.write_text('{"text": 3}\n')
    with pytest.raises(UserError, match="at offset 0: no string 'text'"):
        Shards([path], length="text")
    (tmp_path / "x.txt").write_bytes("\r\nt\u00e9\r\n\r\nthree\n".encode())
    for paragraphs in (False, True):
        texts = Shards([tmp_path / "x.txt"], length="text", paragraphs=paragraphs)
        assert list(texts) == ["t\u00e9", "three"] and texts.lengths.tolist() == [3, 5]


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
    names = ["./train/._1.cls", "./train/1.cls", "./train/._1.jpg", "./train/1.jpg"]
    paths = [
        archive(tmp_path / "a.tar", *numbers(*names)),
        archive(tmp_path / "b.tar", *numbers(".git/3.cls", "._3.jpg", "3.cls", "3.jpg")),
    ]
    for _ in range(2):  # at last with an index that is known
        dataset = Shards(paths, label="cls")
        assert dataset.labels.tolist() == [1, 3]
        assert dataset[0] == {"__key__": "./train/1", "cls": b"1", "jpg": b"1"}
        [line] = capsys.readouterr().err.splitlines()
        assert "ignored 4 hidden files" in line and f" ./train/._1.cls in {paths[0]}" in line


LINK = "a link, .* --hard-dereference -h"


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        (tarfile.LNKTYPE, "2.cls", LINK),
        (tarfile.SYMTYPE, "2.jpg", LINK),
        (tarfile.FIFOTYPE, "2.jpg", "not a file"),
    ],
)
def test_links_in_a_tar_are_faults(kind, name, what, tmp_path, capsys):
    members = {f"{i}.{end}": (f"{i}.{end}", b"1") for i in (1, 2, 3) for end in ("cls", "jpg")}
    members[name] = (name, kind, f"1{name[1:]}")
    path = archive(tmp_path / "x.tar", *members.values())
    for label in ("", "cls"):
        with pytest.raises(UserError, match=rf"x.tar at offset 2048: {name} is {what}"):
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


DAMAGES = {
    "truncated": lambda data: data[:-10],
    "zeros": lambda data: bytes(len(data)),
    "a header": lambda data: data.replace(b"size", b"sizd").replace(b"sum", b"sun"),
    "a bit": lambda data: data[:-4] + bytes([data[-4] ^ 16]) + data[-3:],
}


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_is_made_again(how, suffix, tmp_path, capsys):
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\nthree\n")
    before = Shards([path], on_bad="skip", length="text")
    file = before.index_file.with_suffix(suffix)
    data = file.read_bytes()
    file.write_bytes(DAMAGES[how](data))
    after = Shards([path], on_bad="skip", length="text")
    assert list(after) == ["one", "two", "three"] and after.lengths.tolist() == [3, 3, 5]
    assert after.describe("x") == before.describe("x")
    assert capsys.readouterr().err == "" and file.read_bytes() == data


def test_different_files_have_another_description(tmp_path):
    """By which ranks and resumed runs refuse them; the folder may change."""
    facts = []
    for name, sizes in (("a", (3, 4)), ("b", (3, 4)), ("c", (4, 3)), ("d", (3, 5))):
        folder = write_shards(tmp_path / name, train=sizes)
        facts.append(Shards(sorted(folder.glob("train-*"))).describe("train")["train_shards"])
    assert facts[0].startswith("2 files, 7 samples")
    assert facts[0] == facts[1] and len(set(facts)) == 3


# Damaged files


@pytest.mark.parametrize("how", ["in a file", "in a header", "between samples", "no end"])
def test_truncated_tar(how, tmp_path, capsys):
    """tarfile itself takes most of these for the end of the archive."""
    samples = {f"{i}.{name}": b"x" * 700 for i in range(3) for name in ("cls", "jpg")}
    path = write_tar(tmp_path / "bad.tar", samples)
    third, end = 2 * 3072, 3 * 3072  # a file takes 512 bytes for its header, 1024 for its data
    length, offset, left = {
        "in a file": (third + 2200, third + 1536, 2),
        "in a header": (third + 100, third, 1),
        "between samples": (third, third, 1),
        "no end": (end, end, 2),
    }[how]
    os.truncate(path, length)
    assert_damaged(path, offset, left, capsys)


def test_overwritten_and_joined_tars(tmp_path, capsys):
    samples = {f"{i}.cls": b"x" * 700 for i in range(3)}
    path = write_tar(tmp_path / "bad.tar", samples)
    data = path.read_bytes()
    path.write_bytes(data[:1536] + bytes([7]) * 5000)
    assert_damaged(path, 1536, 0, capsys)
    end = 3 * 1536 + 1024
    path.write_bytes(data[:end] + data)  # as cat does
    assert_damaged(path, end - 1024, 2, capsys)


def assert_damaged(path, offset, left, capsys):
    """A damaged file is refused, or all of it but the first `left` samples is skipped."""
    paths = [path, *write_tars(path.parent)]
    with pytest.raises(UserError, match=rf"bad\.tar .*damaged.* offset {offset} \("):
        Shards(paths)
    dataset = Shards(paths, on_bad="skip")
    assert dataset.shard_sizes == [left, 5, 5, 5]
    assert [sample["__key__"] for sample in dataset][:left] == [str(i) for i in range(left)]
    said = capsys.readouterr().err
    assert "skipping" in said and "bad.tar" in said


def test_only_the_broken_lines_of_json_are_lost(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n{"n": 3}\n{"n": "x"}\n{"n": 5')
    with pytest.raises(UserError, match=r"x.jsonl at offset 9: no JSON in UTF-8: "):
        Shards([path])
    assert [sample["n"] for sample in Shards([path], on_bad="skip")] == [1, 3, "x"]
    assert "skipping 2 samples; 3 samples are left" in capsys.readouterr().err
    assert Shards([path], on_bad="skip", label="n").labels.tolist() == [1, 3]


@pytest.mark.parametrize(
    "line",
    [
        rb'{"text": "cut emoji \ud83d"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"text": ' + b"9" * 5000 + b"}",
        b'{"text": "Latin-1: \xe9"}',
        bytes(20),
    ],
    ids=["half a surrogate pair", "deep", "5,000 digits", "Latin-1", "zeros"],
)
def test_lines_that_json_cannot_read(line, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"x.jsonl at offset 17: no JSON in UTF-8: "):
        Shards([path], length="text")
    dataset = Shards([path], length="text", on_bad="skip")
    assert [sample["text"] for sample in dataset] == ["a", "b"]


def test_missing_and_empty_files(tmp_path, capsys):
    first, second, third = write_tars(tmp_path)
    second.unlink()
    paths = [first, second, third]
    with pytest.raises(UserError, match=r"train-1.tar does not exist"):
        Shards(paths)
    dataset = Shards(paths, on_bad="skip")
    assert dataset.shard_sizes == [5, 0, 5] and dataset[5]["__key__"] == "folder/0010"
    assert f"{second} does not exist" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"no samples in .*; .*train-1\.tar .*not exist"):
        Shards([second], on_bad="skip")
    second.touch()  # an upload that was interrupted: an archive has an end
    with pytest.raises(UserError, match=r"train-1\.tar .*offset 0 \(empty file\)"):
        Shards(paths)
    write_tar(second, {})
    assert Shards(paths).shard_sizes == [5, 0, 5]


@pytest.mark.parametrize("cls", [b"cat", b"", b"3000000000", None])
def test_samples_without_a_label(cls, tmp_path):
    samples = {"1.cls": b"3", "1.jpg": b"", "2.jpg": b""}
    if cls is not None:
        samples["2.cls"] = cls
    path = write_tar(tmp_path / "x.tar", samples)
    reason = "2 has no .cls, only .jpg" if cls is None else "2.cls is no integer"
    with pytest.raises(UserError, match=rf"x.tar at offset 1536: {reason}"):
        Shards([path], label="cls")
    assert Shards([path], label="cls", on_bad="skip").labels.tolist() == [3]


@pytest.mark.parametrize("label", ["3.0", "null", "3000000000"])
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
    for how in ("truncated", "overwritten"):
        path = write_tar(tmp_path / f"{how}.tar", numbered(0, 5))
        unread, reading = Shards([path]), Shards([path])
        assert reading[0]["cls"] == b"0"
        offset = reading.index["offset"][4]
        path.write_bytes(path.read_bytes()[:4000] if how == "truncated" else bytes(20_000))
        for dataset in (unread, reading):
            with pytest.raises(UserError, match=rf"{how}.tar has changed .*offset {offset}"):
                dataset[4]


def test_damage_that_leaves_size_and_time_is_noticed(tmp_path):
    path = write_tar(tmp_path / "x.tar", {"1.cls": b"1", "1.jpg": b"2", "2.cls": b"3"})
    dataset = Shards([path])
    before, data = os.stat(path), path.read_bytes()
    for damaged in (bytes(len(data)), data.replace(b"1.jpg", b"7.jpg")):
        path.write_bytes(damaged)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(UserError, match=r"x\.tar .*damaged.* offset 0 "):
            dataset[0]


def test_few_files_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_FILES", 3)
    dataset = Shards(write_tars(tmp_path, count=12, size=2))
    assert [key_of(sample) for sample in dataset] == list(range(24))
    assert dataset.open_file.cache_info().currsize == 3
    numbers = {dataset.open_file(path).descriptor for path in dataset.paths}
    assert len(numbers) < 12  # those of files that have been closed are used again


def test_threads_may_share_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_FILES", 1)
    dataset = Shards(write_tars(tmp_path))

    def read(seed):
        for index in numpy.random.default_rng(seed).integers(0, 15, 100).tolist():
            assert key_of(dataset[index]) == index

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_more_workers_than_files(tmp_path):
    dataset = Shards(write_tars(tmp_path, count=2), key_of)
    assert dataset[3] == 3  # its file is open, and is shared with the forks
    loader = DataLoader(dataset, 2, num_workers=3)
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


@pytest.mark.parametrize("sizes", [[1, 0, 50, 9, 3], [4], [0, 5]], ids=str)
def test_every_sample_comes_once(sizes):
    for options in ({}, {"interleave": 2, "buffer": 4}, {"interleave": 1, "buffer": 1}):
        assert sorted(order_of(sizes, **options)) == list(range(sum(sizes)))


def test_the_order_depends_on_the_epoch():
    assert order_of([10] * 7, epoch=1) != order_of([10] * 7) == order_of([10] * 7)
    for options in ({"interleave": 0}, {"buffer": 0}):
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
