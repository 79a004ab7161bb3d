"""Rows whose states the target computes when they are read; nothing is stored."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from data.capture import Conversation, capture
from data.codec import DTYPES, carrier, decode, encode
from data.remoterows import RemoteRows
from data.store import TraceReader, TraceRow
from drafters.target import Target
from drafters.tensor_parallel import ShardedTarget
from recipes.errors import RunError


class OnlineReader:
    """A RowReader (data/reader.py) over the rows of a folder without states.

    A row is computed alone: its states depend on nothing but the row, so that they have the same bits in every epoch,
    on every rank and after a resume, which rows computed together with changing neighbours would not have. They pass
    through trace.dtype as stored ones do.
    """

    def __init__(self, rows: TraceReader | RemoteRows, target: Target, max_bad_share: float) -> None:
        self.rows, self.target, self.max_bad_share = rows, target, max_bad_share
        self.folder, self.manifest = rows.folder, rows.manifest
        self.dtype = DTYPES[rows.manifest["dtype"]]
        self.bad: set[str] = set()  # rows left out, of those that this process read

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, name: str) -> list[int]:
        return self.rows.split(name)

    def tokens(self, index: int) -> int:
        return self.rows.tokens(index)

    def supervised(self, index: int) -> int:
        return self.rows.supervised(index)

    def shard(self, index: int) -> str:
        return self.rows.shard(index)

    def __getitem__(self, index: int) -> TraceRow:
        """A row with NaN or Inf states comes without any supervised token, so that nothing is learned from it.
        Raises RunError where more than trace.max_bad_share of all rows are such (case 34)."""
        row = self.compute(index)
        return self.without_states(self.rows[index]) if row is None else as_stored(row, self.dtype)

    def compute(self, index: int) -> TraceRow | None:
        """The row as the target gives it, in the precision that a store would encode; None: it has NaN or Inf."""
        row = self.rows[index]
        conversation = Conversation(row.id, row.split, row.ids.tolist(), row.turns.tolist(), row.tail, row.finish,
                                    row.off_policy)
        # Validation of a bfloat16 training runs under autocast, which would silently compute the target in bfloat16.
        with torch.autocast(self.target.device.type, enabled=False):
            traced, faults = capture(self.target, [conversation], len(row.ids), carrier(self.dtype))
        if not traced:
            self.leave_out(row.id, faults[row.id])
        return traced[0] if traced else None

    def leave_out(self, row: str, fault: str) -> None:
        """Counts a row that cannot be learned from."""
        if row not in self.bad:
            print(f"row {row}: {fault}; nothing is learned from it", file=sys.stderr)
        self.bad.add(row)
        if len(self.bad) > self.max_bad_share * len(self):
            raise RunError(f"{len(self.bad)} of {len(self)} rows have NaN or Inf states (trace.max_bad_share = "
                           f"{self.max_bad_share}); check target.dtype and trace.dtype")

    def without_states(self, row: TraceRow) -> TraceRow:
        """The row with no turn, zero taps [T, n*H] and no final state."""
        hidden = self.target.hidden
        return replace(row, turns=torch.zeros_like(row.turns), final=torch.zeros(0, hidden),
                       taps=torch.zeros(len(row.ids), len(self.target.layers) * hidden))


class SharedOnlineReader(OnlineReader):
    """The same for a target whose layers are shared among the training processes (target.tp_plan): a pass needs all of
    them. So they compute the rows of all in one order, and each keeps its own until it reads them.
    """

    def __init__(self, rows: TraceReader | RemoteRows, target: ShardedTarget, max_bad_share: float) -> None:
        super().__init__(rows, target, max_bad_share)
        self.held: dict[int, TraceRow] = {}

    def together(self, rows: list[list[int]]) -> None:
        """Computes the rows of every rank, rows[rank]. All ranks call it with the same lists; what was held before is
        dropped. Raises RunError as OnlineReader does, on all ranks alike."""
        own, self.held = dist.get_rank(), {}
        for rank, indices in enumerate(rows):
            for index in indices:
                row = super().__getitem__(index)
                if rank == own:
                    self.held[index] = row

    def __getitem__(self, index: int) -> TraceRow:
        return self.held[index]


def as_stored(row: TraceRow, dtype: torch.dtype) -> TraceRow:
    """The row as it would be read from a store of this dtype."""
    n = row.taps.shape[1] // row.final.shape[1]
    return replace(row, taps=decode(*encode(row.taps, n, dtype)), final=decode(*encode(row.final, 1, dtype)))
