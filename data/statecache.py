"""Computed rows kept in a local folder of bounded size, so that further epochs read what the first one computed.

Which rows are kept is decided before the first one is read (`kept_rows`), and none is ever thrown out for another.
Training reads every row once an epoch in a new order, so the row read last is not the one needed next: a folder with
room for the share c of the rows that dropped the least recently used one would find c + (1 - c) ln(1 - c) of them, 15 %
where half of them fit. A fixed set finds c, and processes that use one folder need not agree on anything.

Each kept row is a shard of one row (data/store.py): renamed into place, listed with its checksum and its set's key.
"""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from data.codec import decode
from data.online import OnlineReader, as_stored
from data.store import TraceRow, row_bytes, shard_complete, shard_of, write_shard
from recipes.errors import ConfigError, RunError
from recipes.files import locked, sha256_json

HEADERS = 4096  # bytes that a row's two files take beyond its tensors, at most; a tail adds its digits
SET_NAME = re.compile(r"[0-9a-f]{64}")


def kept_rows(sizes: list[int], first: list[int], limit: int) -> set[int]:
    """Rows that a folder of `limit` bytes keeps: `first` (validation rows, read many times an epoch) and then the
    others, in their order, each where it still fits. Holds: the sizes of the kept rows sum to at most `limit`, and no
    row that was left would fit beside them."""
    kept, used = set(), 0
    ahead = set(first)
    for index in [*first, *(i for i in range(len(sizes)) if i not in ahead)]:
        if used + sizes[index] <= limit:
            kept.add(index)
            used += sizes[index]
    return kept


class CachedReader:
    """A RowReader (data/reader.py): rows of an OnlineReader, those of a fixed set read from `parent`/<set> once they
    have been computed there. A row has the same bits whether it was computed or read."""

    def __init__(self, online: OnlineReader, parent: Path, limit: int) -> None:
        """Removes what other sets and sizes left in `parent`. Raises ConfigError where the folder cannot be written,
        RunError where the disk has no room for the rows to come (case 14)."""
        self.online, self.limit = online, limit
        self.folder, self.manifest = online.folder, online.manifest
        self.key = set_key(online.folder, online.manifest)
        self.cache = parent / self.key
        self.checked: set[int] = set()  # rows whose file this process has verified
        self.sizes = [self.bytes_of(i) for i in range(len(online))]
        self.kept = kept_rows(self.sizes, online.split("validation"), limit)
        with ExitStack() as held:
            try:
                self.cache.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(parent))
            except OSError as error:
                raise ConfigError(f"trace.cache_dir: {parent}: cannot write there: {error.strerror}") from None
            self.clean(parent)
        present = {path.stem for path in self.cache.glob("*.json")}
        needed = sum(self.sizes[i] for i in self.kept if name_of(i) not in present)
        free = shutil.disk_usage(self.cache).free
        if needed > free:
            raise RunError(f"{parent}: the cache needs {needed / 1e6:.0f} MB more, {free / 1e6:.0f} MB are free; lower "
                           "trace.cache_gb, make room, or set trace.mode to online")

    def clean(self, parent: Path) -> None:
        """Removes other sets, rows of an earlier and larger trace.cache_gb, and what a killed process left."""
        for other in parent.iterdir():
            if SET_NAME.fullmatch(other.name) and other != self.cache:
                shutil.rmtree(other, ignore_errors=True)
        wanted = {name_of(i) for i in self.kept}
        for path in self.cache.iterdir():
            if path.stem not in wanted:
                path.unlink()

    def bytes_of(self, index: int) -> int:
        target, row = self.online.target, self.online.rows.places[index].listed
        width = len(target.layers) * target.hidden
        tensors = row_bytes(row["tokens"], row["finals"], width, target.hidden, self.online.dtype)
        return tensors + HEADERS + 8 * len(row["tail"]) + 6 * len(row["id"])

    def __len__(self) -> int:
        return len(self.online)

    def split(self, name: str) -> list[int]:
        return self.online.split(name)

    def tokens(self, index: int) -> int:
        return self.online.tokens(index)

    def supervised(self, index: int) -> int:
        return self.online.supervised(index)

    def shard(self, index: int) -> str:
        return self.online.shard(index)

    def __getitem__(self, index: int) -> TraceRow:
        """Raises RunError where the row cannot be written, and as OnlineReader does. A file that is torn or of another
        row is written again (case 35)."""
        if index not in self.kept:
            return self.online[index]
        if index in self.checked or self.complete(index):
            self.checked.add(index)
            return self.read(index)
        row = self.online.compute(index)
        if row is None:
            return self.online.without_states(self.online.rows[index])
        with locked(self.cache.parent):  # a row that fills an empty micro-batch is read by several ranks at once
            if not self.complete(index):
                write_shard(self.cache, name_of(index), shard_of([row], self.online.dtype), {}, self.key)
        return as_stored(row, self.online.dtype)

    def complete(self, index: int) -> bool:
        row = self.online.rows.places[index].listed["id"]
        return shard_complete(self.cache, name_of(index), [row], self.key)

    def read(self, index: int) -> TraceRow:
        listed = self.online.rows.places[index].listed
        held = load_file(self.cache / f"{name_of(index)}.safetensors")
        return TraceRow(
            id=listed["id"], split=listed["split"], tail=listed["tail"], off_policy=listed.get("off_policy", False),
            finish=listed.get("finish", ""), ids=held["ids"], turns=held["turns"].long(),
            taps=decode(held["taps"], held.get("taps_scale")), final=decode(held["final"], held.get("final_scale")))


def set_key(folder: Path, manifest: dict[str, Any]) -> str:
    """What decides the states of a folder's rows: target, layers and dtype (in the manifest's key) and the ids, of
    which the shards' checksums speak: answers written a second time may differ under the same key."""
    lists = [json.loads((folder / "shards" / f"{name}.json").read_text(encoding="utf-8"))
             for name in manifest["shards"]]
    return sha256_json([manifest["key"], [listed["sha256"] for listed in lists]])


def name_of(index: int) -> str:
    """The file name, without its ending, of the row at this index of its set."""
    return f"row-{index:08d}"
