"""The one recursion: what training unrolls, decoding calls, and validation replays.

A drafter supplies `step`, `logits`, `feedback` and `embed`; a memory supplies the keys that a step may see.
Legend: B rows, S sequence, P positions that carry loss, q tokens a row, H hidden, D draft vocabulary,
nkv key/value heads, g query heads a group, hd head dimension.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import take
from drafters.cache import RowStore
from drafters.chain_attention import Part, chain_attention, parts_of
from drafters.growth import growth
from drafters.tree import Draft, Plan, planned
from drafters.visible import Branches, Paths, along_branches

QUERIES = 256  # of a row that decoding attends together: their mask grows with rows times queries times columns


class Memory(Protocol):
    """Keys and values of the drafter's layers, each layer's own, counted from 0."""

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Adds [B, q, nkv, hd] at rotary `positions` [B, q]."""

    def attend(self, layer: int, queries: Tensor, positions: Tensor) -> Tensor:
        """Attention of [B, q, nkv*g, hd] queries at `positions` over what they may see -> [B, q, nkv*g*hd]."""

    def go_on(self, going: Tensor) -> None:
        """Which of the last step's positions each of the next step's follows, [B, q]."""


def unroll(drafter: Any, state: Tensor, tokens: Tensor, positions: Tensor, memory: Memory, depth: int,
           choose: Callable[[int, Tensor], Tensor], select: Tensor | None = None,
           thin: Callable[[int], Tensor] | None = None, branch: Callable[[int], Tensor] | None = None,
           ) -> Iterator[Tensor]:
    """Yields the output state [B, p, H] of `depth` successive draft steps; `drafter.logits` of it names the token.

    state [B, q, H] with the token that follows each position, `tokens` [B, q]. The first step writes keys for
    all q positions and computes outputs only for `select` [B, p] (None: all); later steps go on from those,
    one rotary position further each, with the tokens that `choose(k, output)` names: the target's own in
    training, the drafter's in decoding. thin(k) names which of the p positions go on to step k, [B, p'] (None: all).
    branch(k) names, for each of the p' tokens that `choose` gave for step k, the one of the p positions that it
    follows, [B, p'] (None: each its own): several where a tree branches.
    """
    for k in range(depth):
        state = drafter.step(state, drafter.embed(tokens), positions, memory, select)
        if select is not None:
            positions, select = positions.gather(1, select), None
        yield state
        if k + 1 < depth:
            tokens = choose(k, state)
            state, positions = drafter.feedback(state), positions + 1
            if branch is not None:
                follows = branch(k + 1)
                state, positions = take(state, follows), take(positions, follows)
                memory.go_on(follows)
            if thin is not None:
                going = thin(k + 1)
                state, tokens, positions = take(state, going), take(tokens, going), take(positions, going)
                memory.go_on(going)


class UnrollMemory:
    """Memory of parallel chains: the chain that starts at t sees step-0 keys <= t and its own later keys.

    A layer's first write holds the whole sequence, every later one the next key of each chain. In step 0 the last
    layer alone is asked for the chains only: the layers behind any other one need keys of every position.
    """

    def __init__(self, at: Tensor, begins: Tensor | None = None, layers: int = 1) -> None:
        """`at` [B, P]: the positions at which the chains start; `begins` [B, S]: the first one that each position may
        see, where conversations are packed end to end (None: 0)."""
        self.begins, self.layers = begins, layers
        self.at, self.starts = at, torch.zeros_like(at) if begins is None else begins.gather(1, at)
        self.parts = parts_of(self.starts, self.at)
        self.blocks: list[tuple[Tensor, Tensor]] = []  # of each layer
        self.own: list[list[tuple[Tensor, Tensor]]] = []  # of each layer, of each later step

    def go_on(self, going: Tensor) -> None:
        """Only these of the P chains go on, [B, P']."""
        self.at, self.starts = take(self.at, going), take(self.starts, going)
        self.parts = parts_of(self.starts, self.at)
        self.own = [[tuple(take(part.transpose(1, 2), going).transpose(1, 2) for part in pair) for pair in layer]
                    for layer in self.own]

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        pair = keys.transpose(1, 2), values.transpose(1, 2)  # [B, nkv, S, hd], later [B, nkv, P, hd]
        if layer == len(self.blocks):
            self.blocks.append(pair)
            self.own.append([])
        else:
            self.own[layer].append(pair)

    def attend(self, layer: int, queries: Tensor, positions: Tensor) -> Tensor:
        (keys, values), later = self.blocks[layer], self.own[layer]
        everywhere = not later and layer + 1 < self.layers
        starts, at, parts = self.everywhere(keys) if everywhere else (self.starts, self.at, self.parts)
        B, P, heads, hd = queries.shape
        nkv = keys.shape[1]
        q = queries.reshape(B, P, nkv, heads // nkv, hd).permute(0, 2, 3, 1, 4) * hd**-0.5  # [B, nkv, g, P, hd]
        own = [torch.stack(part) for part in zip(*later)] or [keys.new_empty(0, B, nkv, P, hd)] * 2
        out = chain_attention(q, keys, values, *own, starts, at, parts)
        return out.permute(0, 3, 1, 2, 4).reshape(B, P, heads * hd)

    def everywhere(self, keys: Tensor) -> tuple[Tensor, Tensor, list[Part]]:
        """Starts, places and parts of all positions of the sequence."""
        at = torch.arange(keys.shape[2], device=keys.device).repeat(len(keys), 1)
        starts = torch.zeros_like(at) if self.begins is None else self.begins
        return starts, at, parts_of(starts, at)


class RowMemory:
    """Memory of the decoding loop: one cache row a sequence; a query sees the columns up to its position.

    Where a draft branches, its tokens are kept as Paths says. What an abandoned draft wrote is overwritten by the real
    states that take its positions.
    """

    def __init__(self, rows: int, capacity: int, layers: int = 1) -> None:
        self.stores = [RowStore(rows, capacity) for _ in range(layers)]
        self.begin(None)

    @property
    def empty(self) -> bool:
        return self.stores[0].keys is None

    def begin(self, last: Tensor | None) -> None:
        """A draft begins; `last` [B]: the last real position, where the draft may branch."""
        self.paths = None if last is None else Paths(last)
        self.branches: Branches | None = None  # of the newest step, where the draft branches

    def go_on(self, follows: Tensor) -> None:
        """The next step's tokens follow these ones of the step before, [B, q]; at first all follow the last one."""
        self.paths.go_on(follows)
        self.branches = self.paths.branches()

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        rows = torch.arange(len(positions), device=positions.device)
        self.stores[layer].write(keys, values, rows, positions if self.branches is None else self.branches.columns)

    def attend(self, layer: int, queries: Tensor, positions: Tensor) -> Tensor:
        if self.branches is not None:
            width = int(self.branches.block.max()) + 1
            columns = torch.arange(width, device=positions.device)[None]
            return self.attend_part(layer, queries, ~along_branches(self.branches, columns, queries.shape[1]))
        ahead = torch.arange(int(positions.max()) + 1, device=positions.device)
        parts = zip(queries.split(QUERIES, dim=1), positions.split(QUERIES, dim=1))
        return torch.cat([self.attend_part(layer, part, ahead[: int(at.max()) + 1] > at[:, :, None])
                          for part, at in parts], dim=1)

    def attend_part(self, layer: int, queries: Tensor, hidden: Tensor) -> Tensor:
        """Attention of [B, q, heads, hd] queries, each over the columns that are not `hidden` [B, q, W]."""
        B, q, heads, hd = queries.shape
        width = hidden.shape[-1]
        keys, values = self.stores[layer].read(None, width)  # [B, nkv, W, hd]
        g = heads // keys.shape[1]
        bias = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device).masked_fill_(hidden, -torch.inf)
        folded = queries.transpose(1, 2).reshape(B, heads // g, g * q, hd)
        bias = bias[:, None, None].expand(B, 1, g, q, width).reshape(B, 1, g * q, width)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias)
        return out.reshape(B, heads, q, hd).transpose(1, 2).reshape(B, q, heads * hd)

    def keep(self, rows: Tensor) -> None:
        for store in self.stores:
            store.keep(rows)

    def join(self, other: "RowMemory") -> None:
        """Takes over the rows of another memory of the same capacity, behind its own."""
        for store, given in zip(self.stores, other.stores):
            store.join(given)


class ChainSession:
    """A recursive drafter in the decoding loop: the first step takes the newly verified states, the draft follows."""

    def __init__(self, drafter: Any, rows: int, capacity: int, layers: int = 1) -> None:
        self.drafter = drafter
        self.memory = RowMemory(rows, capacity, layers)

    def begin(self, prompts: list[list[int]]) -> None:
        """The first token of a prompt has no place in the recursion: nothing to do."""

    def observe(self, taps: Tensor, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        self.pending = self.drafter.fuse(taps), tokens, positions, last[:, None]

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        drafter, plan = self.drafter, planned(plan)
        state, tokens, positions, last = self.pending
        grown = growth(plan, len(tokens), drafter.draft_ids, drafter.shape.vocab_size, sample)
        self.memory.begin(positions.gather(1, last)[:, 0])
        steps = unroll(drafter, state, tokens, positions, self.memory, plan.depth, lambda k, output: grown.frontier,
                       last, branch=None if plan.narrow else lambda k: grown.follows)
        for output in steps:  # [B, p, H]
            if grown.take(drafter.logits(output)):
                break
        self.memory.begin(None)
        return grown.draft()

    def keep(self, rows: Tensor) -> None:
        self.memory.keep(rows)
        self.pending = tuple(part[rows] for part in self.pending)

    def join(self, other: "ChainSession") -> None:
        """A joining row's pending positions are as many as a prompt has: all but the last are written first; this
        session's own too, where a row ended with its first token, before anything was drafted."""
        other.settle()
        if self.memory.empty:
            self.settle()
        self.memory.join(other.memory)
        width = self.pending[1].shape[1]
        self.pending = tuple(torch.cat([ours, theirs if i == 3 else theirs.expand(-1, width, *theirs.shape[2:])])
                             for i, (ours, theirs) in enumerate(zip(self.pending, other.pending)))

    def settle(self) -> None:
        """Writes the keys of what is pending and leaves each row's last position alone pending."""
        state, tokens, positions, last = self.pending
        self.memory.begin(None)
        for _ in unroll(self.drafter, state, tokens, positions, self.memory, 1, lambda k, output: output, last):
            pass
        self.pending = take(state, last), take(tokens, last), take(positions, last), torch.zeros_like(last)
