"""Shards in Parquet: rows as samples. Needs pyarrow.

For tasks: docs/streams.md.
"""

from functools import lru_cache
from itertools import chain, repeat
from typing import Any

import pyarrow
from pyarrow import parquet
from torch import Tensor

from sources.scan import BadFile, Format
from sources.shards import Shards, has_changed, state_of
from utils.errors import UserError

ROWS = 1 << 16  # that are Python objects at a time, while the index is made


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

    @property
    def lengths(self) -> Tensor:
        """What `length` names, in bytes. Raises UserError without it: a row has no size."""
        if not self.field.length:
            raise UserError("rows of Parquet have lengths only of a column: pass length")
        return super().lengths

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


def _scan_parquet(file, field, left_out):
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as table:
            names = table.schema_arrow.names
            if field.name and field.name not in names:
                reason = f"no column {field.name!r}, only {', '.join(names)}"
                left_out.add("in its schema", reason, table.metadata.num_rows)
                return
            for group in range(table.num_row_groups):
                yield from _scan_group(table, group, field, left_out)
    except (OSError, pyarrow.ArrowException) as error:
        _raise_if_unread(error)
        raise BadFile(0, f"no Parquet: {error}") from None


def _scan_group(table, group, field, left_out):
    rows = table.metadata.row_group(group).num_rows
    if not field.name:
        yield from zip(repeat(group), range(rows), repeat(-1))
        return
    try:
        column = table.read_row_group(group, columns=[field.name], use_threads=False)
    except (OSError, pyarrow.ArrowException) as error:
        _raise_if_unread(error)
        left_out.add(f"in row group {group}", str(error), rows)
        return
    batches = column.to_batches(max_chunksize=ROWS)
    values = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
    for row, value in enumerate(values):
        if (integer := field.of(value)) is None:
            place = f"in row {row} of row group {group}"
            left_out.add(place, f"no {field.kind} {field.name!r}")
        else:
            yield group, row, integer


def _raise_if_unread(error):
    """Raise an error of the system, such as a disk's: the file may be fine."""
    if getattr(error, "errno", None):
        raise error


def _not_bytes(data):
    raise NotImplementedError
