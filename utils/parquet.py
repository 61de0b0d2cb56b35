"""Shards in Parquet: rows as samples. Needs pyarrow.

Not imported by any script: docs/streams.md adds it.
"""

from functools import lru_cache
from typing import Any

import pyarrow
from pyarrow import parquet

from utils.errors import UserError
from utils.shards import Broken, Fault, Format, Shards, has_changed, state_of


class ParquetShards(Shards):
    """The rows of Parquet files, as dicts of Python values. See Shards.

    A row can only be read with its row group, of which each process keeps the last `row_groups`
    that it has read: use a ShardOrder whose `interleave` is not larger. label, length: a column.
    """

    def __init__(self, *args: Any, row_groups: int = 16, **options: Any) -> None:
        self.row_groups = row_groups
        super().__init__(*args, **options)

    def formats(self) -> list[Format]:
        """Parquet alone. The offset of a sample is its row group, and its size is its row."""
        return [Format(".parquet", _scan_parquet, _not_bytes)]

    def _map_index(self):
        super()._map_index()
        self.read_group = lru_cache(self.row_groups)(_read_group)

    def __getstate__(self) -> dict[str, Any]:
        """Without the row groups."""
        return {k: v for k, v in super().__getstate__().items() if k != "read_group"}

    def sample(self, shard: int, offset: int, size: int) -> Any:
        """The row number `size` of the row group number `offset`. Raises UserError."""
        path = self.paths[shard]
        try:
            if state_of(path) != self.states[shard]:
                raise has_changed(path, offset)
            rows = self.read_group(path, offset)
            return rows.slice(size, 1).to_pylist()[0]
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"cannot read row group {offset} of {path}: {error}") from None


def _read_group(path, group):
    # Threads would compete with the ranks, and do not outlive a fork.
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read_row_group(group, use_threads=False)


def _scan_parquet(file, number, faults):
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as table:
            for group in range(table.num_row_groups):
                yield from _scan_group(table, group, number, faults)
    except pyarrow.ArrowException as error:
        raise Broken(0, f"no Parquet: {error}") from None


def _scan_group(file, group, number, faults):
    rows = file.metadata.row_group(group).num_rows
    integers = [-1] * rows
    if number.name:
        try:
            column = file.read_row_group(group, columns=[number.name], use_threads=False)
        except (OSError, pyarrow.ArrowException) as error:
            faults += [Fault(group, 0, str(error))] * rows
            return
        if not column.num_columns:
            raise Broken(0, f"there is no column {number.name}")
        integers = [number.of(value) for value in column[number.name].to_pylist()]
    for row, integer in enumerate(integers):
        if integer is None:
            faults.append(Fault(group, 0, f"row {row} has no integer {number.name!r}"))
        else:
            yield group, row, integer


def _not_bytes(data):
    raise NotImplementedError
