"""A drafter that need not propose in every cycle, for drafters that hold another one.

A session's `observe` is followed by `propose` in the loop: recursive drafters write their keys there, and what was
observed before would be lost. Here observations are kept until a proposal is wanted, and given as one.
Legend: B rows, q and Q tokens a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafters.base import DraftSession, take
from drafters.tree import Draft, Plan

Observation = tuple[Tensor | None, Tensor, Tensor, Tensor]  # taps, tokens, positions, last of DraftSession.observe
MOST = 64  # tokens a row that are kept, beside the first observation, before the drafter reads them


class Deferred:
    """The session of a drafter, begun with its first proposal. It stands for a DraftSession."""

    def __init__(self, drafter: Any, capacity: int) -> None:
        self.drafter, self.capacity = drafter, capacity
        self.session: DraftSession | None = None
        self.kept: list[Observation] = []

    def begin(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def observe(self, taps: Tensor | None, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        self.kept.append((taps, tokens, positions, last))
        if sum(tokens.shape[1] for _, tokens, _, _ in self.kept[1:]) > MOST:
            self.read()

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        if self.session is None:
            self.session = self.drafter.session(len(self.prompts), self.capacity)
            self.session.begin(self.prompts)
        if self.kept:
            self.session.observe(*together(self.kept))
            self.kept = []
        return self.session.propose(plan, sample)

    def read(self) -> None:
        """Has the drafter read what was kept: a draft of one token that nobody sees."""
        self.propose(1)

    def keep(self, rows: Tensor) -> None:
        self.prompts = [self.prompts[row] for row in rows.tolist()]
        self.kept = [tuple(None if part is None else part[rows] for part in one) for one in self.kept]
        if self.session is not None:
            self.session.keep(rows)

    def join(self, other: "Deferred") -> None:
        self.read()
        other.read()
        self.session.join(other.session)
        self.prompts = self.prompts + other.prompts


def together(observed: list[Observation]) -> Observation:
    """Observations that follow one another as one. A row that has fewer tokens than another repeats its last one: to
    read that again changes nothing."""
    if len(observed) == 1:
        return observed[0]
    taps = None if observed[0][0] is None else torch.cat([one[0] for one in observed], dim=1)
    tokens, positions = (torch.cat([one[i] for one in observed], dim=1) for i in (1, 2))  # [B, Q]
    valid = torch.cat([torch.arange(tokens.shape[1], device=tokens.device) <= last[:, None]
                       for _, tokens, _, last in observed], dim=1)
    count = valid.sum(1, keepdim=True)
    order = (~valid).int().argsort(dim=1, stable=True)[:, : int(count.max())]
    order = order.gather(1, torch.arange(order.shape[1], device=order.device).expand_as(order).minimum(count - 1))
    taken = None if taps is None else take(taps, order)
    return taken, tokens.gather(1, order), positions.gather(1, order), count[:, 0] - 1
