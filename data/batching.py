"""Training order and batches: a pure function of seed and step, so that a resumed run needs no sampler state."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.reader import RowReader
from data.store import TraceRow
from drafters.base import Batch


def collate(rows: list[TraceRow]) -> Batch:
    """Packs conversations end to end into one row: nothing is padded, and none sees another.

    The first token of each has turn 0, whatever its trace says: only a position before it could predict from it, and
    that is another conversation's.
    """
    lengths = torch.tensor([len(row.ids) for row in rows])
    begins = lengths.cumsum(0) - lengths
    turns = torch.cat([row.turns for row in rows])
    turns[begins] = 0
    final = torch.zeros(int(lengths.sum()), rows[0].final.shape[1])
    final[torch.cat([row.final_at + begin for row, begin in zip(rows, begins)])] = torch.cat(
        [row.final.float() for row in rows])
    ids, taps = torch.cat([row.ids for row in rows]), torch.cat([row.taps.float() for row in rows])
    starts = begins.repeat_interleave(lengths)
    return Batch(ids[None], turns[None], taps[None], final[None], starts[None])


def with_user_turns(turns: Tensor) -> Tensor:
    """Turns by which the marked user turns (below 0) are learnt from too: as one apart from every answer."""
    return torch.where(turns < 0, turns.max() + 1, turns)


def epoch_order(rows: int, shards: Sequence[Hashable], mix: int, seed: int) -> list[int]:
    """Every index 0..rows-1 once, shuffled by `seed` alone.

    mix 0: all rows at random. Otherwise the shards (`shards[i]` holds row i) are shuffled, taken `mix` at a time, and
    the rows of such a window shuffled together: at any time `mix` shards are read (two windows where a batch spans
    their border), instead of all, which a disk or an object store serves better.
    """
    generator = torch.Generator().manual_seed(seed)

    def shuffled(items: list) -> list:
        return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]

    if not mix:
        return shuffled(list(range(rows)))
    held: dict[Hashable, list[int]] = {}
    for i in range(rows):
        held.setdefault(shards[i], []).append(i)
    queue = shuffled(list(held.values()))
    return [i for w in range(0, len(queue), mix) for i in shuffled([i for shard in queue[w : w + mix] for i in shard])]


@dataclass(frozen=True)
class Plan:
    """Which rows each optimizer step trains on, on each rank.

    An epoch is a seeded order of all rows (`epoch_order`) cut into global batches of rows * ranks * accumulation; the
    last one may be short. Rows of a global batch are sorted by length and dealt so that the micro-batches of all
    ranks are alike; a rank can get an empty micro-batch, and still takes part in the step.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    batch_rows: int
    ranks: int
    accumulation: int
    seed: int
    shards: tuple[str, ...] = ()  # of each row; needed where `mix` is not 0
    mix: int = 0
    orders: dict[int, list[int]] = field(default_factory=dict, compare=False, repr=False)  # of the epoch in work

    @property
    def global_rows(self) -> int:
        return self.batch_rows * self.ranks * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.global_rows)

    def total_steps(self, epochs: float) -> int:
        """Optimizer steps of a run of `epochs` passes, at least one."""
        return max(1, round(epochs * self.steps_per_epoch))

    def order(self, epoch: int) -> list[int]:
        """Positions in `rows` in the order of this epoch."""
        if epoch not in self.orders:
            self.orders.clear()
            self.orders[epoch] = epoch_order(len(self.rows), self.shards, self.mix, self.seed * 1_000_003 + epoch)
        return self.orders[epoch]

    def micro_batches(self, step: int, rank: int) -> list[list[int]]:
        """`accumulation` lists of row indices for optimizer step `step` (from 0) on `rank`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        chosen = self.order(epoch)[index * self.global_rows : (index + 1) * self.global_rows]
        chosen.sort(key=lambda i: (self.lengths[i], i))
        parts = self.ranks * self.accumulation
        cut = [chosen[p * len(chosen) // parts : (p + 1) * len(chosen) // parts] for p in range(parts)]
        return [[self.rows[i] for i in cut[a * self.ranks + rank]] for a in range(self.accumulation)]


def plan_for(reader: RowReader, batch_rows: int, ranks: int, accumulation: int, seed: int, mix: int = 0) -> Plan:
    """The training plan of a trace store's train split; `mix` as in epoch_order."""
    rows = reader.split("train")
    return Plan(tuple(rows), tuple(reader.tokens(i) for i in rows), batch_rows, ranks, accumulation, seed,
                tuple(reader.shard(i) for i in rows), mix)
