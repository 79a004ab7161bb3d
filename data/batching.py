"""Training order and batches: a pure function of seed and step, so that a resumed run needs no sampler state."""

from dataclasses import dataclass

import torch

from data.store import TraceReader, TraceRow
from drafters.base import Batch


def collate(rows: list[TraceRow]) -> Batch:
    """Pads rows at the end: turn 0 and zero states, so padding never carries loss."""
    B, S = len(rows), max(len(r.ids) for r in rows)
    batch = Batch(torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, dtype=torch.long),
                  torch.zeros(B, S, rows[0].taps.shape[1]), torch.zeros(B, S, rows[0].final.shape[1]))
    for b, row in enumerate(rows):
        length = len(row.ids)
        batch.ids[b, :length] = row.ids
        batch.turns[b, :length] = row.turns
        batch.taps[b, :length] = row.taps.float()
        batch.final[b, row.final_at] = row.final.float()
    return batch


@dataclass(frozen=True)
class Plan:
    """Which rows each optimizer step trains on, on each rank.

    An epoch is a seeded shuffle of all rows cut into global batches of rows * ranks * accumulation; the last
    one may be short. Rows of a global batch are sorted by length and dealt so that the micro-batches of all
    ranks are alike; a rank can get an empty micro-batch, and still takes part in the step.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    batch_rows: int
    ranks: int
    accumulation: int
    seed: int

    @property
    def global_rows(self) -> int:
        return self.batch_rows * self.ranks * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.global_rows)

    def total_steps(self, epochs: float) -> int:
        """Optimizer steps of a run of `epochs` passes, at least one."""
        return max(1, round(epochs * self.steps_per_epoch))

    def micro_batches(self, step: int, rank: int) -> list[list[int]]:
        """`accumulation` lists of row indices for optimizer step `step` (from 0) on `rank`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.rows), generator=generator).tolist()
        chosen = order[index * self.global_rows : (index + 1) * self.global_rows]
        chosen.sort(key=lambda i: (self.lengths[i], i))
        parts = self.ranks * self.accumulation
        cut = [chosen[p * len(chosen) // parts : (p + 1) * len(chosen) // parts] for p in range(parts)]
        return [[self.rows[i] for i in cut[a * self.ranks + rank]] for a in range(self.accumulation)]


def plan_for(reader: TraceReader, batch_rows: int, ranks: int, accumulation: int, seed: int) -> Plan:
    """The training plan of a trace store's train split."""
    rows = reader.split("train")
    return Plan(tuple(rows), tuple(reader.tokens(i) for i in rows), batch_rows, ranks, accumulation, seed)
