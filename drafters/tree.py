"""Draft trees: what the loop asks a drafter for, what it gets, and what the tokens of a tree see.

A chain is a tree of width one. Block places: 0 is the last decided token, i + 1 is node i; a parent comes before its
children and siblings stand in the order in which they are tried.
Legend: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Draft:
    """Proposed tokens [B, N] in target ids; a parent stands before its children, siblings in the order in which they
    are tried."""

    tokens: Tensor
    q: Tensor | None = None  # [B, M, V]: the children of block place j were drawn from q[:, j]; None: deterministic
    parents: Tensor | None = None  # [B, N] block place of each token's parent; None: a chain
    real: Tensor | None = None  # [B, N] tokens that are none are False, and all behind them; None: all are
    by: list[str] | None = None  # of each row: the drafter that proposed, where one holds several; for reports alone

    def counts(self) -> list[int]:
        """Tokens proposed to each row."""
        return [self.tokens.shape[1]] * len(self.tokens) if self.real is None else self.real.sum(1).tolist()


@dataclass(frozen=True)
class StaticTree:
    """A tree of one shape, whatever the drafter thinks. A path names the rank of each of its tokens among the drafter's
    guesses behind the one before: (0, 2) is the third guess behind the first (Medusa's `medusa_choices`).

    stop: a chain ends behind a token whose probability under the drafter is lower; 0 is off.
    """

    paths: tuple[tuple[int, ...], ...]
    stop: float = 0.0

    def __post_init__(self) -> None:
        known = set(self.paths) | {()}
        if not self.paths or len(known) != len(self.paths) + 1:
            raise ValueError("a tree needs paths, each of them once and none empty")
        for path in self.paths:
            if path[:-1] not in known or min(path) < 0 or (path[-1] and (*path[:-1], path[-1] - 1) not in known):
                raise ValueError(f"path {list(path)}: its parent and its smaller siblings must be in the tree too")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))
        if self.stop and not self.narrow:
            raise ValueError("stop: only a chain stops early")

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def room(self) -> int:
        """Places that drafting and verification take behind the last decided token."""
        return self.nodes

    @property
    def narrow(self) -> bool:
        """Whether it is a chain."""
        return self.nodes == self.depth


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (Li et al. 2024, section 4): at each of `depth` levels the `top_k` guesses behind each of the
    `top_k` most probable nodes; of all of them the `total` most probable ones are verified."""

    depth: int
    top_k: int
    total: int

    def __post_init__(self) -> None:
        if min(self.depth, self.top_k, self.total) < 1:
            raise ValueError("depth, top_k and total of a tree are at least 1")

    @property
    def nodes(self) -> int:
        return min(self.total, self.top_k + (self.depth - 1) * self.top_k**2)

    @property
    def room(self) -> int:
        return max(self.nodes, (self.depth - 1) * self.top_k)

    narrow = False


Plan = StaticTree | DynamicTree


def chain(K: int, stop: float = 0.0) -> StaticTree:
    """The chain of K tokens."""
    return StaticTree(tuple((0,) * (k + 1) for k in range(K)), stop)


def planned(plan: Plan | int) -> Plan:
    """A number is the chain of so many tokens."""
    return chain(plan) if isinstance(plan, int) else plan


@dataclass(frozen=True)
class Topology:
    """What block places see of one another, [B or 1, N+1, N+1] (a place's ancestors and itself), and how many tokens
    each lies behind the last decided one, [B or 1, N+1]."""

    sees: Tensor
    depth: Tensor

    @classmethod
    def of(cls, draft: Draft) -> "Topology":
        N, device = draft.tokens.shape[1], draft.tokens.device
        if draft.parents is None:
            return straight(N, device)
        reach = torch.eye(N + 1, device=device).repeat(len(draft.parents), 1, 1)
        reach[:, 1:].scatter_(2, draft.parents[..., None], 1.0)  # a place, and its parent
        for _ in range(max(N, 1).bit_length()):  # squaring doubles how far ancestors reach
            reach = (reach @ reach).clamp_(max=1.0)
        sees = reach > 0
        return cls(sees, sees.sum(-1) - 1)


@lru_cache(maxsize=64)
def straight(N: int, device: torch.device) -> Topology:
    """The topology of a chain, which every cycle shares."""
    with torch.inference_mode(False):
        places = torch.arange(N + 1, device=device)
        return Topology((places[None] <= places[:, None])[None], places[None])


def mixed(a: Draft, b: Draft, rows: list[bool]) -> Draft:
    """Drafts of one batch, row by row: a's where `rows` says so, b's elsewhere. ValueError where b is drawn and a
    branches: a's guesses are certain, and two of them behind one token have no distribution."""
    if b.q is not None and a.parents is not None:
        raise ValueError("a tree of deterministic guesses cannot stand beside drawn ones")
    N, chosen = max(a.tokens.shape[1], b.tokens.shape[1]), torch.tensor(rows, device=a.tokens.device)[:, None]
    branched = a.parents is not None or b.parents is not None
    (tokens, real, parents), others = filled(a, N), filled(b, N)
    tokens, real, parents = (torch.where(chosen, x, y) for x, y in zip((tokens, real, parents), others))
    q = None
    if b.q is not None:
        certain = F.one_hot(a.tokens, b.q.shape[-1]).to(b.q.dtype)  # [B, Na, V]: of a chain, by the place before
        M = max(certain.shape[1], b.q.shape[1])
        certain, drawn = (F.pad(part, (0, 0, 0, M - part.shape[1])) for part in (certain, b.q))
        q = torch.where(chosen[..., None], certain, drawn)
    by = [x if mine else y for mine, x, y in zip(rows, a.by, b.by)] if a.by and b.by else None
    return Draft(tokens, q, parents if branched else None, real, by)


def filled(draft: Draft, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, which of them are some, and parents of a draft of N tokens a row, [B, N] each."""
    more = N - draft.tokens.shape[1]
    places = torch.arange(draft.tokens.shape[1], device=draft.tokens.device).expand_as(draft.tokens)
    real = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.real is None else draft.real
    return tuple(F.pad(part, (0, more)) for part in (draft.tokens, real,
                                                     places if draft.parents is None else draft.parents))
