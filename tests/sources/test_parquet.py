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
    first, paths = 0, [folder / f"{number}.parquet" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        rows = list(range(first, first + size))
        table = pyarrow.table({"n": rows, "text": [f"row {n}" for n in rows]})
        parquet.write_table(table, path, row_group_size=5, write_page_checksum=True)
        first += size
    return paths


def number_of(row):
    return row["n"]


def test_rows(tmp_path):
    paths = write(tmp_path)
    dataset = ParquetShards(paths, label="n", row_groups=2)
    assert dataset.shard_sizes == [7, 0, 12]
    assert dataset.labels.tolist() == list(range(19))
    assert dataset[8] == {"n": 8, "text": "row 8"}
    assert [dataset[index]["n"] for index in range(19)] == list(range(19))
    assert dataset.read_group.cache_info().currsize == 2
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    assert pickle.loads(data)[3]["n"] == 3
    with pytest.raises(UserError, match="pass length"):  # a row has none of its own
        _ = dataset.lengths
    assert ParquetShards(paths, length="text").lengths.tolist() == [5] * 10 + [6] * 9


def test_rows_in_loader_processes(tmp_path):
    paths = write(tmp_path)
    numbers = ParquetShards(paths, number_of)
    assert numbers[18] == 18  # reads before it forks
    loader = DataLoader(numbers, 3, num_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(19))


def test_truncated_file(tmp_path, capsys):
    paths = write(tmp_path)
    paths[0].write_bytes(paths[0].read_bytes()[:-20])
    with pytest.raises(UserError, match=r"0\.parquet .*damaged .*offset 0 \(no Parquet: "):
        ParquetShards(paths)
    assert ParquetShards(paths, on_bad="skip").shard_sizes == [0, 0, 12]
    assert "0.parquet is damaged" in capsys.readouterr().err


def test_values_that_are_no_labels(tmp_path, capsys):
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"n": [0, None, 2], "text": ["a", "bb", None]}), path)
    with pytest.raises(UserError, match=r"x\.parquet .*row 1 .*group 0: no integer 'n'"):
        ParquetShards([path], label="n")
    assert ParquetShards([path], label="n", on_bad="skip").labels.tolist() == [0, 2]
    assert "skipping 1 samples; 2 samples are left" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"x\.parquet .*row 2 .*group 0: no string 'text'"):
        ParquetShards([path], length="text")
    assert ParquetShards([path], length="text", on_bad="skip").lengths.tolist() == [1, 2]
    with pytest.raises(UserError, match=r"no column 'label', only n, text"):
        ParquetShards([path], label="label")


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
