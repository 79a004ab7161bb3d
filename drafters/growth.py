"""How a draft tree grows, level by level, from a drafter's logits.

Legend: B rows, N nodes, p nodes of a level that are grown further, D draft vocabulary, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from drafters.tree import Draft, DynamicTree, Plan, StaticTree

Sample = Callable[[Tensor], Tensor]  # probabilities [n, V] to ids [n]


def growth(plan: Plan, rows: int, draft_ids: Tensor, vocab_size: int, sample: Sample | None = None,
           ) -> "StaticGrowth | DynamicGrowth":
    """A draft to be grown. draft_ids [D]: target ids of the drafter's logits. sample: draws tokens by the drafter's
    distribution [n, V]; None: the most probable ones. ValueError for a dynamic tree of drawn tokens."""
    if isinstance(plan, StaticTree):
        return StaticGrowth(plan, rows, draft_ids, vocab_size, sample)
    if sample is not None:
        raise ValueError("a dynamic tree chooses nodes by their probability, which would bias drawn drafts: use "
                         "deterministic drafts, a static tree or a chain")
    return DynamicGrowth(plan, rows, draft_ids)


@dataclass(frozen=True)
class Level:
    """Nodes of one level of a static tree: of each the place of its parent among those grown further, its rank and its
    parent's block place; then which of the nodes are grown further, and the block places of those."""

    parents: list[int]
    ranks: list[int]
    places: list[int]
    going: list[int]
    going_places: list[int]


@lru_cache(maxsize=64)
def levels_of(tree: StaticTree) -> list[Level]:
    """The levels of a static tree, from its first guesses on."""
    place = {(): 0} | {path: i + 1 for i, path in enumerate(tree.paths)}
    inner = {path[:-1] for path in tree.paths}
    frontier, found = [()], []
    for depth in range(1, tree.depth + 1):
        nodes = [path for path in tree.paths if len(path) == depth]
        going = [i for i, path in enumerate(nodes) if path in inner]
        found.append(Level([frontier.index(path[:-1]) for path in nodes], [path[-1] for path in nodes],
                           [place[path[:-1]] for path in nodes], going, [place[nodes[i]] for i in going]))
        frontier = [nodes[i] for i in going]
    return found


class StaticGrowth:
    """A static tree on its way. Guesses are the most probable tokens, or drawn without replacement."""

    def __init__(self, tree: StaticTree, rows: int, draft_ids: Tensor, vocab_size: int, sample: Sample | None) -> None:
        self.tree, self.draft_ids, self.vocab_size, self.sample = tree, draft_ids, vocab_size, sample
        self.levels, self.level = levels_of(tree), 0
        self.places = [0]  # of the nodes that are being grown
        self.tokens: list[Tensor] = []
        self.real: list[Tensor] = []  # [B, n] of each level, where some node may be none
        self.spread: dict[int, Tensor] = {}  # block place -> q [B, V] of its children
        self.alive = torch.ones(rows, 1, dtype=torch.bool, device=draft_ids.device)

    def take(self, logits: Tensor) -> bool:
        """Names the next level's tokens by logits [B, p, D] behind the nodes being grown; True where all is drafted."""
        level = self.levels[self.level]
        width = max(level.ranks) + 1
        if self.sample is not None:
            picks, real = self.drawn(logits, width)
        else:
            few = min(width, logits.shape[-1])
            best = logits.argmax(-1, keepdim=True) if width == 1 else logits.topk(few, dim=-1).indices
            picks, real = self.draft_ids[best], None
        if width > picks.shape[-1]:
            raise ValueError(f"a tree of {width} guesses behind one token needs a draft vocabulary of as many")
        narrow = self.tree.narrow  # a chain needs no lookups of what follows what
        self.tokens.append(picks[..., 0] if narrow else picks[:, level.parents, level.ranks])  # [B, n]
        if self.tree.stop:
            self.real.append(self.alive)
            sure = logits.float().log_softmax(-1).amax(-1) if self.sample is None else self.chance().log()
            self.alive = self.alive & (sure >= torch.tensor(self.tree.stop).log())
        elif real is not None and not narrow:
            self.real.append(real[:, level.parents, level.ranks] & self.alive[:, level.parents])
            self.alive = self.real[-1][:, level.going]
        self.level, self.places = self.level + 1, level.going_places
        if narrow:
            self.frontier = self.tokens[-1]
        else:
            self.frontier = self.tokens[-1][:, level.going]
            self.follows = torch.tensor(level.parents, device=logits.device)[level.going].expand(len(logits), -1)
        return self.level == len(self.levels) or bool(self.tree.stop and not self.alive.any())

    def drawn(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Draws of each node [B, p, width], without replacement, and which of them exist: a distribution may hold fewer
        tokens."""
        B, p, _ = logits.shape
        q = torch.zeros(B * p, self.vocab_size, dtype=torch.float32, device=logits.device)
        q[:, self.draft_ids] = logits.reshape(B * p, -1).float().softmax(-1)
        for j, place in enumerate(self.places):
            self.spread[place] = q.view(B, p, -1)[:, j]
        picks, real = [], []
        rest = q
        for _ in range(width):
            mass = rest.sum(-1, keepdim=True)
            exists = mass[:, 0] > 0
            picks.append(self.sample(torch.where(exists[:, None], rest, q)))
            real.append(exists)
            if len(picks) < width:
                rest = rest.scatter(1, picks[-1][:, None], 0.0)
                rest = rest / rest.sum(-1, keepdim=True).clamp_min(1e-30)
        return torch.stack(picks, -1).view(B, p, width), torch.stack(real, -1).view(B, p, width)

    def chance(self) -> Tensor:
        """q of each row's last drawn token, [B, 1], of a chain."""
        return self.spread[self.places[0]].gather(1, self.tokens[-1])

    def draft(self) -> Draft:
        tokens = torch.cat(self.tokens, dim=1)
        parents = None if self.tree.narrow else torch.tensor(
            [place for level in self.levels for place in level.places], device=tokens.device).expand(len(tokens), -1)
        return Draft(tokens, self.distributions(), parents, torch.cat(self.real, dim=1) if self.real else None)

    def distributions(self) -> Tensor | None:
        if not self.spread:
            return None
        none = torch.zeros_like(self.spread[0])
        return torch.stack([self.spread.get(place, none) for place in range(max(self.spread) + 1)], dim=1)


class DynamicGrowth:
    """A dynamic tree on its way; the same calls as StaticGrowth."""

    def __init__(self, tree: DynamicTree, rows: int, draft_ids: Tensor) -> None:
        self.tree, self.draft_ids, self.level = tree, draft_ids, 0
        self.score = torch.zeros(rows, 1, device=draft_ids.device)  # log-probability of each node being grown
        self.place = torch.zeros(rows, 1, dtype=torch.long, device=draft_ids.device)  # its block place among all nodes
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []

    def take(self, logits: Tensor) -> bool:
        """See StaticGrowth.take."""
        B, p, D = logits.shape
        best = logits.float().log_softmax(-1).topk(min(self.tree.top_k, D), dim=-1)
        k = best.indices.shape[-1]
        grown = sum(part.shape[1] for part in self.tokens)
        self.tokens.append(self.draft_ids[best.indices].view(B, p * k))
        self.scores.append((self.score[..., None] + best.values).view(B, p * k))
        self.parents.append(self.place.repeat_interleave(k, dim=1))
        self.level += 1
        going = self.scores[-1].topk(min(self.tree.top_k, p * k), dim=1).indices
        self.frontier, self.score = self.tokens[-1].gather(1, going), self.scores[-1].gather(1, going)
        self.follows, self.place = going // k, grown + going + 1
        return self.level == self.tree.depth

    def draft(self) -> Draft:
        """The most probable nodes. A child is never more probable than its parent, and comes later where it is as
        probable, so that a stable order keeps every parent."""
        tokens, scores, parents = (torch.cat(part, dim=1) for part in (self.tokens, self.scores, self.parents))
        chosen = scores.argsort(dim=1, descending=True, stable=True)[:, : self.tree.total].sort(dim=1).values
        place = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)
        place.scatter_(1, chosen + 1, torch.arange(1, chosen.shape[1] + 1, device=tokens.device).expand_as(chosen))
        return Draft(tokens.gather(1, chosen), None, place.gather(1, parents.gather(1, chosen)))
