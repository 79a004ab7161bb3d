"""Writing of shards beside the computation of the next ones."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class BackgroundWriter:
    """Runs one write at a time in a thread, in order; `put` waits for the one before.

    So two shards are in memory at most, the one being written and the one being computed. An error of a write is
    raised by the next `put` or at the end of the `with` block. Leaving the block, by an error or an interrupt too,
    first ends the write in work: what was computed is kept.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self.write = write
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer")
        self.pending: Future | None = None

    def put(self, *args: Any) -> None:
        """Starts write(*args) as soon as the one before has ended. Raises what that one raised."""
        self.wait()
        self.pending = self.pool.submit(self.run, [args])

    def run(self, work: list[tuple]) -> None:
        """Writes, and has let go of the arguments when the write counts as ended."""
        self.write(*work.pop())

    def wait(self) -> None:
        """Waits for the write in work and raises what it raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.pool.shutdown(wait=True)
        if error is None:
            self.wait()
