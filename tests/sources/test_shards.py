"""sources/shards.py: files of many samples, as docs/streams.md promises it."""

import io
import os
import pickle
import subprocess
import tarfile

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from sources import shards
from sources.samplers import DistributedSamplerWrapper, ShardOrder
from sources.shards import Shards
from utils.errors import UserError


def write_tar(path, *members, **options):
    """Write (name, data) or, without data, (name, type, the name that a link has)."""
    with tarfile.open(path, "w", **options) as archive:
        for name, data, *link in members:
            member = tarfile.TarInfo(name)
            if link:
                member.type, member.linkname, data = data, link[0], b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def numbered(first, count):
    """The members of samples whose keys end with their number."""
    members = []
    for number in range(first, first + count):
        members.append((f"folder/{number:04}.cls", str(number % 3).encode()))
        members.append((f"folder/{number:04}.left.jpg", bytes([number]) * (number * 100 % 1100)))
    return members


def write_tars(folder, count=3, size=5):
    paths = [folder / f"train-{shard}.tar" for shard in range(count)]
    for shard, path in enumerate(paths):
        write_tar(path, *numbered(shard * size, size))
    return paths


def number_of(sample):
    return int(sample["__key__"][-4:])


# What is in the files


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tar(form, tmp_path):
    paths = [
        write_tar(tmp_path / "b.tar", *numbered(0, 5), format=form),
        write_tar(tmp_path / "a.tar", *numbered(5, 3), format=form),
    ]
    dataset = Shards(paths)
    assert dataset.shard_sizes == [5, 3]
    assert [number_of(sample) for sample in dataset] == list(range(8))
    assert dataset[6] == {"__key__": "folder/0006", "cls": b"0", "left.jpg": bytes([6]) * 600}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_in_a_tar(form, tmp_path):
    path = write_tar(tmp_path / "x.tar", ("a" * 150 + ".txt", b"text"), format=form)
    assert list(Shards([path])) == [{"__key__": "a" * 150, "txt": b"text"}]


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
    assert list(dataset) == ["one"]
    assert dataset.lengths.tolist() == [3]


def test_labels_are_in_the_index(tmp_path):
    dataset = Shards(write_tars(tmp_path), label="cls")
    assert dataset.labels.tolist() == [i % 3 for i in range(15)]
    path = tmp_path / "x.jsonl"
    path.write_text('{"label": 7}\n{"label": -1}\n')
    assert Shards([path], label="label").labels.tolist() == [7, -1]


def test_lengths_are_in_the_index(tmp_path):
    dataset = Shards(write_tars(tmp_path), length="left.jpg")
    assert dataset.lengths.tolist() == [len(sample["left.jpg"]) for sample in dataset]
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "\u00e9 1"}\n{"text": ""}\n')
    assert Shards([path], length="text").lengths.tolist() == [4, 0]
    assert Shards([path]).lengths.tolist() == [17, 13]  # of the lines
    path = tmp_path / "x.txt"
    path.write_bytes("\r\nt\u00e9\r\n\r\nthree\n".encode())
    assert Shards([path], length="text").lengths.tolist() == [3, 5]
    assert Shards([path], length="text", paragraphs=True).lengths.tolist() == [3, 5]


# What is left out


def test_hidden_files_in_a_tar_are_ignored_and_counted(tmp_path, capsys):
    """As macOS puts one beside each file, the folder task ignores them, too."""
    a, b = tmp_path / "a.tar", tmp_path / "b.tar"
    names = ["./train/._1.cls", "./train/1.cls", "./train/._1.jpg", "./train/1.jpg"]
    write_tar(a, *[(name, b"1") for name in names])
    write_tar(b, *[(name, b"3") for name in (".git/3.cls", "._3.jpg", "3.cls", "3.jpg")])
    for _ in range(2):  # at last with an index that is known
        dataset = Shards([a, b], label="cls")
        assert dataset.labels.tolist() == [1, 3]
        assert dataset[0] == {"__key__": "./train/1", "cls": b"1", "jpg": b"1"}
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "ignored 4 hidden files" in said
        assert f" ./train/._1.cls in {a}" in said


@pytest.mark.parametrize(("name", "kind"), [("2.cls", tarfile.LNKTYPE), ("2.jpg", tarfile.SYMTYPE)])
def test_links_in_a_tar_are_faults(name, kind, tmp_path, capsys):
    members = {f"{i}.{end}": (f"{i}.{end}", b"1") for i in (1, 2, 3) for end in ("cls", "jpg")}
    members[name] = (name, kind, "1.cls")
    path = write_tar(tmp_path / "x.tar", *members.values())
    with pytest.raises(UserError, match=rf"x.tar at offset 2048: {name} .* --hard-dereference -h"):
        Shards([path])
    dataset = Shards([path], label="cls", on_bad="skip")
    assert [sample["__key__"] for sample in dataset] == ["1", "3"]
    assert "skipping 1 samples; 2 samples are left" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_files_with_holes_in_a_tar_are_faults(form, tmp_path):
    """Of which tar -S stores less than their size: their bytes would run into the next sample."""
    path = tmp_path / "x.tar"
    for number in range(3):
        (tmp_path / f"{number}.npy").write_bytes(b"x" * 3000)
    os.truncate(tmp_path / "1.npy", 1 << 20)
    command = ["tar", "-S", f"--format={form}", "-cf", path, "0.npy", "1.npy", "2.npy"]
    subprocess.run(command, cwd=tmp_path, check=True)
    if path.stat().st_size > 1 << 20:
        pytest.skip("the file system has no holes")
    with pytest.raises(UserError, match=r"x\.tar .*1\.npy .*holes: .*without tar -S"):
        Shards([path])
    dataset = Shards([path], on_bad="skip")
    assert [sample["npy"] for sample in dataset] == [b"x" * 3000] * 2


def test_a_member_that_is_there_twice(tmp_path):
    """As tar -r appends a label that was corrected."""
    path = write_tar(tmp_path / "x.tar", ("1.cls", b"1"), ("1.jpg", b""), ("1.cls", b"7"))
    with pytest.raises(UserError, match=r"x\.tar .*offset 0: 1\.cls .*twice"):
        Shards([path], label="cls")


def test_scattered_samples_are_refused(tmp_path):
    """WebDataset would make three samples of these, each without some of its files."""
    path = write_tar(tmp_path / "x.tar", ("1.jpg", b""), ("2.jpg", b""), ("1.cls", b""))
    with pytest.raises(UserError, match=r"x\.tar .*\(1 .*two places: .*sorted by"):
        Shards([path])


@pytest.mark.parametrize("cls", [b"cat", b"3000000000", None])
def test_samples_without_a_label(cls, tmp_path):
    members = [("1.cls", b"3"), ("1.jpg", b""), ("2.jpg", b"")]
    if cls is not None:
        members.append(("2.cls", cls))
    path = write_tar(tmp_path / "x.tar", *members)
    reason = "2 has no .cls, only .jpg" if cls is None else "2.cls is no integer"
    with pytest.raises(UserError, match=rf"x.tar at offset 1536: {reason}"):
        Shards([path], label="cls")
    assert Shards([path], label="cls", on_bad="skip").labels.tolist() == [3]


@pytest.mark.parametrize(
    ("value", "field", "kind"),
    [("3.0", "label", "integer"), ("null", "label", "integer"), ("3", "length", "string")],
)
def test_json_without_a_label_or_a_length(value, field, kind, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"n": {value}}}\n')
    with pytest.raises(UserError, match=rf"x.jsonl at offset 0: no {kind} 'n'"):
        Shards([path], **{field: "n"})


# The index


def test_the_index_is_made_once(tmp_path, monkeypatch):
    paths, cache = write_tars(tmp_path), tmp_path / "new" / "cache"
    Shards(paths, cache_dir=cache)
    assert len(list(cache.iterdir())) == 2  # nothing temporary is left
    monkeypatch.setattr(shards, "_scan", None)
    again = Shards(paths, cache_dir=cache)
    assert isinstance(again.index.base, numpy.memmap)
    assert [number_of(sample) for sample in again] == list(range(15))
    os.utime(paths[1], (0, 0))
    with pytest.raises(TypeError):  # it would be made again
        Shards(paths, cache_dir=cache)


def test_many_files_are_read_by_several_processes(tmp_path):
    paths = write_tars(tmp_path, count=7)
    dataset = Shards(paths)
    assert dataset.shard_sizes == [5] * 7
    assert [number_of(sample) for sample in dataset] == list(range(35))
    paths[3].write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"train-3\.tar .*damaged.* offset 0 ") as error:
        Shards(paths)
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
        (["a.tar", "a.tar"], "named twice"),
        (["empty.txt"], r"no samples in .*empty\.txt"),
    ],
)
def test_wrong_files(names, message, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=message):
        Shards([tmp_path / name for name in names])


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("how", ["zeros", "a bit"])
def test_a_damaged_index_is_made_again(how, suffix, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\nthree\n")
    before = Shards([path], length="text")
    file = before.index_file.with_suffix(suffix)
    data = file.read_bytes()
    flipped = data[:-4] + bytes([data[-4] ^ 16]) + data[-3:]
    file.write_bytes(bytes(len(data)) if how == "zeros" else flipped)
    after = Shards([path], length="text")
    assert list(after) == ["one", "two", "three"]
    assert after.lengths.tolist() == [3, 3, 5]
    assert after.describe("x") == before.describe("x")
    assert file.read_bytes() == data


def test_different_files_have_another_description(tmp_path):
    """By which ranks and resumed runs refuse them; the folder may change."""
    facts = []
    for folder, lines in (("a", [3, 4]), ("b", [3, 4]), ("c", [4, 3]), ("d", [3, 5])):
        (tmp_path / folder).mkdir()
        paths = [tmp_path / folder / "0.txt", tmp_path / folder / "1.txt"]
        for path, count in zip(paths, lines, strict=True):
            path.write_text("line\n" * count)
        facts.append(Shards(paths).describe("train")["train_shards"])
    assert facts[0].startswith("2 files, 7 samples")
    assert facts[0] == facts[1]
    assert len(set(facts)) == 3


# Damaged files


def assert_damaged(path, offset, left, capsys):
    """A damaged file is refused, or all of it but the first `left` samples is skipped."""
    paths = [path, *write_tars(path.parent)]
    with pytest.raises(UserError, match=rf"bad\.tar .*damaged.* offset {offset} \("):
        Shards(paths)
    dataset = Shards(paths, on_bad="skip")
    assert dataset.shard_sizes == [left, 5, 5, 5]
    assert [dataset[i]["__key__"] for i in range(left)] == [str(i) for i in range(left)]
    said = capsys.readouterr().err
    assert "skipping" in said
    assert "bad.tar" in said


@pytest.mark.parametrize(
    ("length", "offset", "left"),
    [
        pytest.param(8344, 7680, 2, id="in a file"),
        pytest.param(6244, 6144, 1, id="in a header"),
        pytest.param(6144, 6144, 1, id="between samples"),
        pytest.param(9216, 9216, 2, id="no end"),
    ],
)
def test_truncated_tar(length, offset, left, tmp_path, capsys):
    """tarfile itself takes most of these for the end of the archive."""
    names = ["0.cls", "0.jpg", "1.cls", "1.jpg", "2.cls", "2.jpg"]  # each takes 1536 bytes
    path = write_tar(tmp_path / "bad.tar", *[(name, b"x" * 700) for name in names])
    os.truncate(path, length)
    assert_damaged(path, offset, left, capsys)


def test_overwritten_and_joined_tars(tmp_path, capsys):
    names = ["0.cls", "1.cls", "2.cls"]
    path = write_tar(tmp_path / "bad.tar", *[(name, b"x" * 700) for name in names])
    data = path.read_bytes()
    path.write_bytes(data[:1536] + bytes([7]) * 5000)
    assert_damaged(path, 1536, 0, capsys)
    end = 3 * 1536 + 1024
    path.write_bytes(data[:end] + data)  # as cat does
    assert_damaged(path, end - 1024, 2, capsys)


def test_only_the_broken_lines_of_json_are_lost(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n{"n": 3}\n{"n": "x"}\n{"n": 5')
    with pytest.raises(UserError, match=r"x.jsonl at offset 9: no JSON in UTF-8: "):
        Shards([path])
    assert [sample["n"] for sample in Shards([path], on_bad="skip")] == [1, 3, "x"]
    assert "skipping 2 samples; 3 samples are left" in capsys.readouterr().err
    assert Shards([path], on_bad="skip", label="n").labels.tolist() == [1, 3]


@pytest.mark.parametrize("line", [rb'{"text": "cut emoji \ud83d"}', b'{"text": "Latin-1: \xe9"}'])
def test_lines_that_are_no_text(line, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"x.jsonl at offset 17: no JSON in UTF-8: "):
        Shards([path], length="text")
    dataset = Shards([path], length="text", on_bad="skip")
    assert [sample["text"] for sample in dataset] == ["a", "b"]


def test_missing_and_empty_files(tmp_path, capsys):
    paths = write_tars(tmp_path)
    paths[1].unlink()
    with pytest.raises(UserError, match=r"train-1.tar does not exist"):
        Shards(paths)
    dataset = Shards(paths, on_bad="skip")
    assert dataset.shard_sizes == [5, 0, 5]
    assert number_of(dataset[5]) == 10
    assert f"{paths[1]} does not exist" in capsys.readouterr().err
    paths[1].touch()  # an upload that was interrupted: an archive has an end
    with pytest.raises(UserError, match=r"train-1\.tar .*offset 0 \(empty file\)"):
        Shards(paths)
    write_tar(paths[1])
    assert Shards(paths).shard_sizes == [5, 0, 5]


# Reading


@pytest.mark.parametrize("size", [4000, 20_000])
def test_a_file_that_changes_is_noticed(size, tmp_path):
    path = write_tar(tmp_path / "x.tar", *numbered(0, 5))
    unread, reading = Shards([path]), Shards([path])
    assert reading[0]["cls"] == b"0"
    path.write_bytes(bytes(size))
    for dataset in (unread, reading):
        with pytest.raises(UserError, match=r"x\.tar has changed .*offset"):
            dataset[4]


def test_damage_that_leaves_size_and_time_is_noticed(tmp_path):
    path = write_tar(tmp_path / "x.tar", ("1.cls", b"1"), ("1.jpg", b"2"), ("2.cls", b"3"))
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
    assert [number_of(sample) for sample in dataset] == list(range(24))
    assert dataset.open_file.cache_info().currsize == 3
    numbers = {dataset.open_file(path).descriptor for path in dataset.paths}
    assert len(numbers) < 12  # those of files that have been closed are used again


def test_more_workers_than_files(tmp_path):
    dataset = Shards(write_tars(tmp_path, count=2), number_of)
    assert dataset[3] == 3  # its file is open, and is shared with the forks
    loader = DataLoader(dataset, 2, num_workers=3)
    assert torch.cat(list(loader)).tolist() == list(range(10))


def test_a_pickled_dataset_holds_no_copy_of_the_index(tmp_path):
    paths = write_tars(tmp_path, count=2, size=100)
    data = pickle.dumps(Shards(paths))
    assert len(data) < 2000
    assert len(pickle.loads(data)) == 200


# The order


def order_of(sizes, epoch=0, **options):
    order = DistributedSamplerWrapper(ShardOrder(sizes, **options), seed=3)
    order.set_epoch(epoch)
    return order.draw()


@pytest.mark.parametrize("sizes", [[1, 0, 50, 9, 3], [4], [0, 5]], ids=str)
@pytest.mark.parametrize(("interleave", "buffer"), [(16, 10_000), (2, 4), (1, 1)])
def test_every_sample_comes_once(sizes, interleave, buffer):
    order = order_of(sizes, interleave=interleave, buffer=buffer)
    assert sorted(order.tolist()) == list(range(sum(sizes)))


def test_the_order_depends_on_the_epoch():
    order = order_of([10] * 7)
    assert torch.equal(order_of([10] * 7), order)
    assert not torch.equal(order_of([10] * 7, epoch=1), order)


def test_files_are_read_in_turns_from_start_to_end():
    order = order_of([100] * 4, interleave=2, buffer=1)
    files = order // 100
    for file in range(4):
        own = order[files == file]
        assert torch.equal(own, own.sort()[0])
    first, second = files[:2].tolist(), files[-2:].tolist()
    assert sorted(first + second) == [0, 1, 2, 3]
    assert files.tolist() == first * 100 + second * 100


def test_reading_stays_near():
    """A block of the buffer comes from `interleave` files, and from their neighboring samples."""
    order = order_of([1000] * 40, interleave=4, buffer=100)
    for block in order.view(-1, 100):
        files = block // 1000
        assert len(files.unique()) == 4
        for file in files.unique():
            own = block[files == file]
            assert len(own) == own.max() - own.min() + 1 == 25
        assert (block.diff() < 0).float().mean() > 0.3  # mixed
