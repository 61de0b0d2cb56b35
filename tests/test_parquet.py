"""utils/parquet.py: rows of Parquet files as samples."""

import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from utils.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from utils.parquet import ParquetShards  # noqa: E402


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
    with pytest.raises(UserError, match=r"0.parquet is damaged at offset 0 \(no Parquet: "):
        ParquetShards(paths)
    assert ParquetShards(paths, on_bad="skip").shard_sizes == [0, 0, 12]
    assert "0.parquet is damaged" in capsys.readouterr().out
    paths[0].write_bytes(data)
    with pytest.raises(UserError, match=r"must be all of one kind, .parquet"):
        ParquetShards([tmp_path / "x.tar"])
    with pytest.raises(UserError, match=r"damaged at offset 0 \(row 0 has no integer 'text'\)"):
        ParquetShards(paths, label="text")
    with pytest.raises(UserError, match="there is no column other"):
        ParquetShards(paths, label="other")


def test_damage_in_a_row_group_is_noticed(tmp_path, capsys):
    paths = write(tmp_path)
    dataset = ParquetShards(paths)
    before = os.stat(paths[2])
    with open(paths[2], "r+b") as file:
        file.seek(60)
        file.write(bytes(30))
    with pytest.raises(UserError, match=r"2.parquet has changed since the run started"):
        dataset[7]
    os.utime(paths[2], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"cannot read row group 0 of .*2.parquet: "):
        dataset[7]
    assert dataset[0]["n"] == 0
    os.utime(paths[2])
    dataset = ParquetShards(paths, label="n", on_bad="skip")
    assert dataset.shard_sizes == [7, 0, 7] and dataset[7]["n"] == 12
    assert "skipping 0 bytes, about 5 samples; 7 are left" in capsys.readouterr().out
