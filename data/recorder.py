"""Hidden states of rows in work, kept from the very passes that decode them: nothing is computed twice.

Legend: R rows decoded together, S capacity in tokens, B rows of a pass, q its tokens a row, n*H tapped states, T tokens
of a finished row.
"""

from typing import Protocol

import torch
from torch import Tensor

from drafters.target import Prefix, States, Target


class Keeper(Protocol):
    """Takes the states of finished rows."""

    dtype: torch.dtype  # the precision they are kept in

    def add(self, id: str, ids: list[int], turns: list[int], taps: Tensor, final: Tensor) -> None:
        """A row's tokens (prompt and answer), their turns, and the states of all of them, [T, n*H] and [T, H]."""


class Recorder:
    """One place for each row and position, as in the key/value cache: 4 H numbers a token for three taps."""

    def __init__(self, target: Target, rows: int, capacity: int, prefix: Prefix, keeper: Keeper) -> None:
        narrow = min(keeper.dtype, target.dtype, key=lambda dtype: dtype.itemsize)

        def places(width: int) -> Tensor:
            return torch.zeros(rows, capacity, width, dtype=narrow, device=target.device)

        self.keeper = keeper
        self.taps, self.final = places(len(target.layers) * target.hidden), places(target.hidden)
        if prefix.length:
            self.taps[:, : prefix.length], self.final[:, : prefix.length] = prefix.states.taps, prefix.states.final

    def write(self, rows: Tensor | None, positions: Tensor, states: States) -> None:
        """Keeps a pass over `positions` [B, q] of `rows` [B] (None: all). What a later pass writes there replaces
        it, so padding and the dummies of empty rows do no harm."""
        if rows is None:
            rows = torch.arange(len(positions), device=positions.device)
        self.taps[rows[:, None], positions] = states.taps.to(self.taps)
        self.final[rows[:, None], positions] = states.final.to(self.final)

    def keep(self, rows: Tensor) -> None:
        """Drops every row but these and moves them to the front, in this order."""
        self.taps, self.final = self.taps[rows], self.final[rows]

    def finish(self, row: int, id: str, ids: list[int], turns: list[int]) -> None:
        """Hands a row over: `ids` are its tokens, all of which have been through the target."""
        T = len(ids)
        taps, final = (kept[row, :T].to("cpu", self.keeper.dtype, copy=True) for kept in (self.taps, self.final))
        self.keeper.add(id, ids, turns, taps, final)
