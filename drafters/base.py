"""What every drafter shares: the training batch, the loss positions, the protocols that loop and trainer call.

Legend: B rows, S sequence, P loss positions of a row (padded), n*Ht tapped target states, H hidden,
V target vocabulary, D draft vocabulary, K draft length.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters.tree import Draft, Plan


@dataclass
class Batch:
    """Traced conversations, each in a row of its own or packed end to end. Padding has turn 0, so it never carries
    loss; so has the first token of each packed conversation."""

    ids: Tensor  # [B, S] int64
    turns: Tensor  # [B, S] int64: turn whose tokens are supervised, 0 or less for none
    taps: Tensor  # [B, S, n*Ht]
    final: Tensor  # [B, S, Ht], zeros where the token that follows has no turn
    starts: Tensor | None = None  # [B, S] int64: where the conversation of each position starts; None: at 0

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        return Batch(self.ids.to(device), self.turns.to(device), self.taps.to(device, dtype),
                     self.final.to(device, dtype), None if self.starts is None else self.starts.to(device))

    @property
    def positions(self) -> Tensor:
        """Place of each token in its own conversation, [B, S]."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        return columns if self.starts is None else columns - self.starts


def loss_mask(turns: Tensor, depth: int) -> Tensor:
    """Which positions carry loss at unroll depth k = `depth`: [B, S] turns to [B, S] bool.

    Position t sees f_t and the embedding of x[t+1] and predicts x[t+2+k]; it carries loss if and only if
    x[t+1] ... x[t+2+k] are all supervised tokens of one turn. So the last prompt position is included,
    and nothing is predicted across a turn's end (cases 31, 09).
    """
    S = turns.shape[-1]
    joined = torch.zeros_like(turns, dtype=torch.bool)
    joined[:, :-1] = (turns[:, :-1] > 0) & (turns[:, :-1] == turns[:, 1:])  # x[p], x[p+1] of one turn
    carries = torch.ones_like(joined)
    for j in range(depth + 1):
        shifted = torch.zeros_like(joined)
        shifted[:, : max(S - 1 - j, 0)] = joined[:, 1 + j :]
        carries &= shifted
    return carries


def pack(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a [B, S] mask as (at [B, P] ascending, valid [B, P]); padding points at position 0."""
    width = max(int(mask.sum(1).max()), 1)
    order = torch.argsort((~mask).int(), dim=1, stable=True)[:, :width]
    valid = mask.gather(1, order)
    return torch.where(valid, order, 0), valid


def draw(carries: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random `share` of each row's carrying positions, ascending: (index [B, p], weight [B, p]) into [B, P].

    A row of n keeps ceil(share * n), each with the same chance and the weight n / kept, so that a weighted sum over
    the kept ones is in expectation the sum over all. Padding has weight 0.
    """
    counts = carries.sum(1)
    kept = torch.ceil(share * counts.double()).long()
    chance = torch.rand(carries.shape, generator=generator).to(carries.device).masked_fill(~carries, -1.0)
    index = chance.argsort(dim=1, descending=True)[:, : max(int(kept.max()), 1)]
    real = torch.arange(index.shape[1], device=carries.device)[None] < kept[:, None]
    order = index.masked_fill(~real, carries.shape[1]).argsort(dim=1, stable=True)  # neighbours stay neighbours
    return index.gather(1, order), real * (counts / kept.clamp_min(1))[:, None]


def take(values: Tensor, at: Tensor) -> Tensor:
    """values [B, S, ...] at positions [B, P] -> [B, P, ...]."""
    index = at.reshape(*at.shape, *[1] * (values.dim() - 2)).expand(*at.shape, *values.shape[2:])
    return values.gather(1, index)


@dataclass
class LossOutput:
    """Sum of a micro-batch's loss over its supervised positions, and detached sums to report per depth."""

    loss_sum: Tensor  # scalar, to be divided by the global batch's supervised positions
    depth_loss: Tensor  # [K] detached sums
    depth_hits: Tensor  # [K] detached: teacher-forced top-1 equals the target's token, full vocabulary
    depth_count: Tensor  # [K]


class DraftSession(Protocol):
    """A drafter inside the decoding loop, for a batch of rows with lengths of their own."""

    def observe(self, taps: Tensor, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        """Real target states (those that the registry says the drafter reads): taps [B, q, n*Ht] at `positions` [B, q],
        the token that FOLLOWS each, [B, q], and the index of the last valid one in each row, [B]. What lies behind it
        is ignored."""

    def begin(self, prompts: list[list[int]]) -> None:
        """The rows' prompts, before anything is observed. What is observed names every token but their first."""

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        """Tokens that follow the last observed token: a tree of this plan (a number: a chain of so many), or a part of
        one. `sample` draws from probabilities [n, V]; None: the most probable ones. ValueError for a plan that the
        drafter cannot follow."""

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows only, in this order."""

    def join(self, other: "DraftSession") -> None:
        """Takes over the rows of another session of the same drafter and capacity, behind its own."""


class Drafter(Protocol):
    """A trainable drafter: a torch module with the methods that trainer and loop call. One without training has
    `session` and `meta` alone; any may have `remarks()`, lines that a report shows beside its figures."""

    vocabulary_modules: tuple[str, ...]  # submodules whose matrices have a row for each token: heads, embeddings
    one_pass: bool  # whether all levels of a draft are one pass; a drafter without it takes a pass for each
    longest: int  # most tokens of a draft; a drafter without it drafts as many as it is asked for

    def count(self, batch: Batch) -> int:
        """Supervised positions of a micro-batch: what the loss is normalised by."""

    def forward(self, batch: Batch, progress: float, seed: int) -> LossOutput:
        """Training loss; `progress` 0..1 of the run, `seed` of this micro-batch's noise."""

    def flops(self, tokens: float, worked: Sequence[float]) -> float:
        """Model FLOPs, forward and backward, of reading `tokens` with worked[k] positions of loss at depth k."""

    def chain_logits(self, batch: Batch, K: int) -> Iterable[Tensor]:
        """Logits [B, P, D] of each of K steps of the greedy drafts from every position at which one can start."""

    def chains(self, batch: Batch, K: int) -> tuple[Tensor, Tensor, Tensor]:
        """Greedy drafts from every position at which a draft can start: tokens [B, P, K], at [B, P], valid."""

    def session(self, rows: int, capacity: int) -> DraftSession:
        """A fresh decoding session."""

    def meta(self) -> dict[str, Any]:
        """Shape and options for drafter.json."""


def steady(drafter: Any, plan: Plan) -> tuple[Any, Plan]:
    """The drafter whose steps and guesses are measured outside the loop, and what it is asked for under this plan: of
    one that holds others and chooses between them by the request, the one that drafts where nothing else does."""
    return drafter.steady(plan) if hasattr(drafter, "steady") else (drafter, plan)
