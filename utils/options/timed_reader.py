"""How long a rank waits for its batches, for --log-steps and --timing."""

import time
from collections.abc import Iterator
from typing import Any


class TimedReader:
    """Yields what `reader` yields, and has its attributes.

    waited: seconds for which this epoch's batches were waited for; computed: how many of these
    seconds this thread itself was computing, to make the batches.
    """

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.waited = self.computed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    def __iter__(self) -> Iterator[Any]:
        self.waited = self.computed = 0.0
        batches = iter(self.reader)
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            batch = next(batches, None)
            self.waited += time.perf_counter() - wall
            self.computed += time.thread_time() - cpu
            if batch is None:
                return
            yield batch


def timed_reader(loader: Any) -> TimedReader:
    """The TimedReader of a utils.data.Loader, from which it reads from now on."""
    if not isinstance(loader.reader, TimedReader):
        loader.wrap_reader(TimedReader)
    return loader.reader
