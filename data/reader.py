"""What training and validation read: rows by index, wherever their states come from. See docs/store.md."""

from pathlib import Path
from typing import Any, Protocol

from data.online import OnlineReader
from data.settings import folder_mode, stores_states
from data.statecache import CachedReader
from data.store import TraceReader, TraceRow
from drafters.target import Target
from recipes.schema import Trace


class RowReader(Protocol):
    """Rows of a trace folder. Reading a row twice gives the same bits, in any process and after any other row."""

    folder: Path
    manifest: dict[str, Any]

    def __len__(self) -> int: ...

    def split(self, name: str) -> list[int]:
        """Indices of the rows of a split, in stored order."""

    def tokens(self, index: int) -> int:
        """Length of a row without reading it."""

    def supervised(self, index: int) -> int:
        """Positions of a row with a final state, without reading it."""

    def shard(self, index: int) -> str:
        """The shard that holds a row, without reading it."""

    def __getitem__(self, index: int) -> TraceRow: ...


def open_rows(section: Trace, folder: Path) -> TraceReader:
    """The rows that `make trace` left; complete with their states only where trace.mode is `store`.
    Raises RunError and ConfigError as TraceReader does."""
    return TraceReader(folder, mode=folder_mode(section))


def with_states(rows: TraceReader, section: Trace, target: Target) -> RowReader:
    """The reader of trace.mode. Raises RunError where the disk has no room for the cache."""
    if stores_states(section):
        return rows
    online = OnlineReader(rows, target, section.max_bad_share)
    if section.mode == "online":
        return online
    run = rows.folder.parent
    parent = Path(section.cache_dir) / run.name if section.cache_dir else run / "cache"
    return CachedReader(online, parent, int(section.cache_gb * 1e9))
