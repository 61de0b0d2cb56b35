"""sources/parquet.py: rows of Parquet files as samples."""

import errno
import io
import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from sources.scan import IndexedField, LeftOut
from utils.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from sources.parquet import ParquetShards, _scan_parquet  # noqa: E402


def write(folder, sizes=(7, 0, 12)):
    """Files of row groups of five. Returns their paths."""
    first, paths = 0, []
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.parquet")
        rows = list(range(first, first + size))
        table = pyarrow.table({"n": rows, "text": [f"row {n}" for n in rows]})
        parquet.write_table(table, paths[-1], row_group_size=5, write_page_checksum=True)
        first += size
    return paths


def number_of(row):
    return row["n"]


def test_rows(tmp_path):
    paths = write(tmp_path)
    dataset = ParquetShards(paths, label="n", row_groups=2)
    assert dataset.shard_sizes == [7, 0, 12] and dataset.labels.tolist() == list(range(19))
    assert dataset[8] == {"n": 8, "text": "row 8"}
    assert ParquetShards(paths, length="text").lengths.tolist() == [5] * 10 + [6] * 9
    assert [dataset[i]["n"] for i in (18, 0, 9, 18)] == [18, 0, 9, 18]
    assert dataset.read_group.cache_info().currsize == 2
    assert len(pickle.dumps(dataset)) < 2000
    assert pickle.loads(pickle.dumps(dataset))[3]["n"] == 3
    numbers = ParquetShards(paths, number_of)
    assert numbers[18] == 18  # reads before it forks
    loader = DataLoader(numbers, 3, num_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(19))


def test_faults(tmp_path, capsys):
    paths = write(tmp_path)
    data = paths[0].read_bytes()
    paths[0].write_bytes(data[:-20])
    with pytest.raises(UserError, match=r"0\.parquet .*damaged .*offset 0 \(no Parquet: "):
        ParquetShards(paths)
    assert ParquetShards(paths, on_bad="skip").shard_sizes == [0, 0, 12]
    assert "0.parquet is damaged" in capsys.readouterr().err
    paths[0].write_bytes(data)
    with pytest.raises(UserError, match=r"one kind, \.parquet, .*\.tar$"):
        ParquetShards([tmp_path / "x.tar"])
    with pytest.raises(UserError, match="pass length"):  # a row has none of its own
        _ = ParquetShards(paths).lengths


def test_values_that_are_no_labels(tmp_path, capsys):
    path = tmp_path / "x.parquet"
    table = {
        "n": pyarrow.array([0, None, 2]),
        "text": ["a", "bb", None],
        "in": [{"n": 1}, {"n": 2}, {"n": 3}],
    }
    parquet.write_table(pyarrow.table(table), path)
    with pytest.raises(UserError, match=r"x\.parquet .*row 1 .*group 0: no integer 'n'"):
        ParquetShards([path], label="n")
    assert ParquetShards([path], label="n", on_bad="skip").labels.tolist() == [0, 2]
    assert "skipping 1 samples; 2 samples are left" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"x\.parquet .*row 2 .*group 0: no string 'text'"):
        ParquetShards([path], length="text")
    assert ParquetShards([path], length="text", on_bad="skip").lengths.tolist() == [1, 2]
    with pytest.raises(UserError, match=r"0 columns 'in.n' of n, text, in"):
        ParquetShards([path], label="in.n")
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["n", "n"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    paths = [path, tmp_path / "twice.parquet"]
    with pytest.raises(UserError, match=r"twice\.parquet .*schema: 2 columns 'n' of n, n"):
        ParquetShards(paths[1:], label="n")
    assert ParquetShards(paths, label="n", on_bad="skip").shard_sizes == [2, 0]


def test_what_cannot_be_read_is_no_fault_of_the_file(tmp_path):
    [path] = write(tmp_path, [20])

    class Failing(io.FileIO):
        def read(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        list(_scan_parquet(Failing(path), IndexedField("n", ""), LeftOut()))


def test_damage_in_a_row_group_is_noticed(tmp_path, capsys):
    paths = write(tmp_path)
    dataset = ParquetShards(paths)
    before = os.stat(paths[2])
    with open(paths[2], "r+b") as file:
        file.seek(60)
        file.write(bytes(30))
    with pytest.raises(UserError, match=r"2\.parquet has changed .*start .* again"):
        dataset[7]
    os.utime(paths[2], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"row group 0 of .*2\.parquet: "):
        dataset[7]
    assert dataset[0]["n"] == 0
    os.utime(paths[2])
    dataset = ParquetShards(paths, label="n", on_bad="skip")
    assert dataset.shard_sizes == [7, 0, 7] and dataset[7]["n"] == 12
    assert "in row group 0: " in (said := capsys.readouterr().err)
    assert "skipping 5 samples; 7 samples are left" in said
