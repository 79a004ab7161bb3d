"""States that came with the answers, kept beside them until their shard is written.

A shard needs its manifest first, and the manifest counts the tokens of all answers; so the states of each unit wait in
parts: shards in form (data/store.py), in a folder of their own. A part is deleted when all its rows are in shards: by
the process that writes them, or with the folder where several do. A part that is torn, missing or of other rows is no
fault: its rows are computed again.
"""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from data.capture import Conversation
from data.store import ShardReader, TraceRow, final_positions, shard_of, write_shard
from data.writer import BackgroundWriter
from recipes.errors import RunError


class UnitParts:
    """The keeper of one unit's states (data/recorder.py): writes a part whenever `part_bytes` have come. Within a
    `with` block; the last part is written when the block ends without an error. What an earlier try left is removed."""

    def __init__(self, folder: Path, unit: str, key: str, dtype: torch.dtype, part_bytes: float) -> None:
        self.folder, self.unit, self.key, self.dtype, self.part_bytes = folder, unit, key, dtype, part_bytes
        self.rows: list[TraceRow] = []
        self.held = self.parts = 0

    def add(self, id: str, ids: list[int], turns: list[int], taps: Tensor, final: Tensor) -> None:
        """See Keeper.add."""
        at = final_positions(torch.tensor(turns))
        self.rows.append(TraceRow(id, "", torch.tensor(ids), torch.tensor(turns), taps, final[at], []))
        self.held += taps.nbytes + self.rows[-1].final.nbytes
        if self.held >= self.part_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what has come, beside the decoding of the next rows."""
        if self.rows:
            self.writer.put(self.folder, f"{self.unit}.{self.parts:03d}", shard_of(self.rows, self.dtype), {}, self.key)
            self.rows, self.held, self.parts = [], 0, self.parts + 1

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"{self.unit}.*"):
            path.unlink()
        self.writer = BackgroundWriter(write_shard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self.writer.__exit__(kind, error, trace)


class Staging:
    """All parts of a trace run, in `folder`. `key`: the trace set; `dtype`: the precision that states wait in."""

    def __init__(self, folder: Path, key: str, dtype: torch.dtype, part_bytes: float) -> None:
        self.folder, self.key, self.dtype, self.part_bytes = folder, key, dtype, part_bytes
        self.forget()

    def unit(self, name: str) -> UnitParts:
        """The keeper for a unit that is going to be made."""
        return UnitParts(self.folder, name, self.key, self.dtype, self.part_bytes)

    def forget(self) -> None:
        """Nothing is known to wait."""
        self.reader = ShardReader(self.folder, self.key)
        self.waiting: dict[str, set[str]] = {}  # part -> ids of its rows that are in no shard yet
        self.index: dict[str, int] = {}

    def open(self, done: list[str], own: list[str] | None = None) -> None:
        """Reads which rows wait. `own`: rows that this process writes (None: all that are not `done`); it reads no part
        without one of them. What cannot be read is removed, and parts of rows that are `done` alone."""
        self.forget()
        for path in self.folder.glob(".*"):
            path.unlink(missing_ok=True)
        finished, wanted = set(done), None if own is None else set(own)
        for path in sorted(self.folder.glob("*.safetensors")):
            held = self.listed(path.stem)
            if held and held <= finished:
                self.remove([path.stem])
            elif wanted is None or not held or held & wanted:
                try:
                    self.reader.index(path.stem)
                except RunError:
                    self.remove([path.stem])
        self.index = {place.listed["id"]: i for i, place in enumerate(self.reader.places)}
        for row, i in self.index.items():
            self.waiting.setdefault(self.reader.shard(i), set()).add(row)
        for left in self.waiting.values():
            left -= finished

    def listed(self, part: str) -> set[str]:
        """The rows of a part as its list names them; none where it cannot be read."""
        try:
            listed = json.loads((self.folder / f"{part}.json").read_text(encoding="utf-8"))
            return {row["id"] for row in listed["rows"]}
        except (OSError, ValueError, KeyError, TypeError):
            return set()

    def row(self, wanted: Conversation) -> TraceRow | None:
        """The traced row, where exactly these tokens and turns wait here."""
        if wanted.id not in self.index:
            return None
        row = self.reader[self.index[wanted.id]]
        if row.ids.tolist() != wanted.ids or row.turns.tolist() != wanted.turns:
            return None
        row.split, row.tail, row.off_policy, row.finish = wanted.split, wanted.tail, wanted.off_policy, wanted.finish
        return row

    def returns(self, ranks: int = 1) -> int:
        """Bytes that surely come free while so many processes write shards. Without those of the largest unit for each,
        whose parts have rows of all its shards and go together, of one more wherever the rows of two meet, whose parts
        go last of all, and of two shards each, one being computed and one being written."""
        units: Counter = Counter()
        for path in self.folder.glob("*"):
            units[path.name.split(".")[0]] += path.stat().st_size
        together = sum(sorted(units.values(), reverse=True)[: 2 * ranks - 1])
        return max(0, int(units.total() - together - 2 * ranks * self.part_bytes))

    def held(self, round: int) -> int:
        """Bytes that wait for this round's answers."""
        return sum(path.stat().st_size for path in self.folder.glob(f"{round}-*"))

    def spent(self, rows: list[str]) -> list[str]:
        """Parts of which no row waits any more, now that these go to a shard."""
        for part in {self.reader.shard(self.index[row]) for row in rows if row in self.index}:
            self.waiting[part] -= set(rows)
        done = [part for part, left in self.waiting.items() if not left]
        for part in done:
            del self.waiting[part]
        return done

    def remove(self, parts: list[str]) -> None:
        """Deletes these parts, and lets go of their mapping, which would keep their room taken."""
        for part in parts:
            self.reader.files.pop(part, None)
            for end in (".json", ".safetensors"):
                (self.folder / f"{part}{end}").unlink(missing_ok=True)

    def close(self) -> None:
        """Every row is in a shard: deletes the folder."""
        self.forget()
        shutil.rmtree(self.folder, ignore_errors=True)
