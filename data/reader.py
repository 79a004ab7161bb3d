"""What training and validation read: rows by index, wherever their states come from. See docs/store.md."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from data.online import OnlineReader, SharedOnlineReader
from data.place import behind_url, open_place
from data.remoterows import RemoteRows
from data.settings import folder_mode, stores_states
from data.statecache import CachedReader
from data.store import TraceReader, TraceRow, read_manifest
from drafters.target import Target
from drafters.tensor_parallel import ShardedTarget
from recipes.errors import ConfigError
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


def cache_folder(section: Trace, run: Path) -> Path:
    """Where a run keeps what it need not compute or fetch again."""
    return Path(section.cache_dir) / run.name if section.cache_dir else run / "cache"


def open_rows(section: Trace, run: Path) -> TraceReader | RemoteRows:
    """The rows that `make trace` left for a run; complete with their states only where trace.mode is `store`.
    Raises RunError and ConfigError as TraceReader and RemoteRows do."""
    if behind_url(section):
        place = open_place(section, cache_folder(section, run))
        return RemoteRows(place, int(section.cache_gb * 1e9), folder_mode(section))
    return TraceReader(open_place(section, run).folder, mode=folder_mode(section))


def open_manifest(section: Trace, run: Path) -> dict[str, Any]:
    """The manifest of a run's traces, without reading any. Raises RunError where there is none."""
    if behind_url(section):
        place = open_place(section, cache_folder(section, run))
        place.pull(("manifest.json",))
        return read_manifest(place.folder)
    return read_manifest(open_place(section, run).folder)


def with_states(rows: TraceReader | RemoteRows, section: Trace, run: Path, target: Target) -> RowReader:
    """The reader of trace.mode. A cache holds the states of training: a target that is tapped elsewhere, as one that
    shows its final state alone, neither reads nor writes it; its states are computed.

    Raises RunError where the disk has no room for the cache, and ConfigError for a cache of a target that several
    processes share."""
    if stores_states(section):
        return rows
    if isinstance(target, ShardedTarget):
        if section.mode == "cache":
            raise ConfigError("trace.mode = cache with target.tp_plan: processes that share a target compute every row "
                              "together; use mode online or store")
        return SharedOnlineReader(rows, target, section.max_bad_share)
    online = OnlineReader(rows, target, section.max_bad_share)
    if section.mode == "online" or list(target.layers) != list(rows.manifest["layers"]):
        return online
    return CachedReader(online, cache_folder(section, run), int(section.cache_gb * 1e9))


def rounds(reader: RowReader, rows: list[int], rank: int, ranks: int) -> Iterator[list[int]]:
    """This rank's share of `rows`, every one once, in pieces; ranks may have unlike shares. All ranks go through it
    together, as the processes of a shared target compute their rows together."""
    if not isinstance(reader, SharedOnlineReader):
        yield rows[rank::ranks]
        return
    for start in range(0, len(rows), ranks):
        dealt = [[i] for i in rows[start : start + ranks]]
        reader.together(dealt)
        yield dealt[rank] if rank < len(dealt) else []


def fetch(reader: RowReader, rows: Callable[[], list[list[int]]]) -> None:
    """Before a step: `rows` gives the rows that every rank is about to read. Only a shared target asks for them."""
    if isinstance(reader, SharedOnlineReader):
        reader.together(rows())
