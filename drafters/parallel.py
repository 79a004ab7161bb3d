"""Parallel EAGLE drafter (Hui et al. 2026, "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training"): K tokens in one
forward pass.

EAGLE-3's layers, taps, vocabulary and losses. Where EAGLE-3's step k takes the state and token of step k - 1, depth
k >= 1 takes a learned state and the learned embedding of a mask token, the same at every place: no depth waits for
another one. Depth k of the chain from position t has rotary position t + k, sees the real context up to t and its own
masks of depths 1..k, and predicts x[t+2+k]: in training, validation and decoding alike.
Legend: B rows, S sequence, P_k chains of depth k, M masks of all depths, H hidden, Ht target hidden, n taps,
D draft vocabulary, V target vocabulary, K depths.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from drafters import eagle3_build
from drafters.base import Batch, LossOutput, take
from drafters.eagle3 import Eagle3, Share, Shared
from drafters.eagle3_build import fresh, restored
from drafters.growth import growth
from drafters.layers import MOST_PARALLEL_LAYERS, Shape
from drafters.propose import ChainSession, UnrollMemory
from drafters.tree import Draft, Plan, planned
from drafters.unrolled import Chains, gather, unrolled_loss
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.model_shape import ModelShape
from recipes.schema import opt

# Acceptance lengths that `make plan` takes for the worst and the best case, and why these.
EXPECTED_LENGTHS = ((1.2, 3.0), "at best a good EAGLE-3 chain, whose steps see the tokens before them; an early "
                                "drafter on few tokens keeps less")


@dataclass
class Options(Shared):
    """`drafter.options` of a recipe with kind parallel."""

    depth: Annotated[int, Field(ge=2, le=128)] = opt(5, "K: tokens that one pass drafts in training")
    depth_share: Share = opt(0.7, "r: share of the chains that goes on from each depth, at random: r^k at depth k")
    depth_floor: Annotated[float, Field(ge=0, le=1)] = opt(0.2, "share of the chains that every depth has at least")
    num_layers: Annotated[int, Field(ge=1, le=MOST_PARALLEL_LAYERS)] = opt(1, "decoder layers, 1 to 4")
    mask_token: Annotated[int, Field(ge=-1, lt=2**31)] = opt(
        -1, "target id that stands for a token to come, one that no text has; -1: such a one is looked for")

    @property
    def stages(self) -> list[tuple[float, int]]:
        """From which share of the run on how many depths are trained: all, always."""
        return [(0.0, self.depth)]


class MaskMemory:
    """Keys of a pass that holds every chain's masks behind the sequence, depth by depth.

    A query of depth k sees what step k of EAGLE-3's recursion would: real keys up to the start of its chain, and its
    own chain's keys of depths 1..k. So each depth has the memory that the recursion has at that step.
    """

    def __init__(self, starts: list[Tensor], going: list[Tensor], begins: Tensor | None, layers: int) -> None:
        """starts: where the chains of each depth start [B, P_k]; going: of each depth from 1 on, which chain of the
        depth before each of its chains is [B, P_k]; begins, layers: see UnrollMemory."""
        self.depths = [UnrollMemory(at, begins, layers) for at in starts]
        self.widths = [at.shape[1] for at in starts[1:]]
        self.origins: list[list[Tensor]] = [[]]  # of each depth: its chains' places [B, P_k] among those of depths 1..k
        for index in going:
            itself = torch.arange(index.shape[1], device=index.device).expand_as(index)
            self.origins.append([*(origin.gather(1, index) for origin in self.origins[-1]), itself])

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, S + M, ...] apart: the sequence, then the masks of each depth."""
        return x.split([x.shape[1] - sum(self.widths), *self.widths], dim=1)

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Adds [B, S + M, nkv, hd]."""
        keys, values = self.parts(keys), self.parts(values)
        for memory, origins in zip(self.depths, self.origins):
            memory.write(layer, keys[0], values[0], positions)
            for j, origin in enumerate(origins, start=1):
                memory.write(layer, take(keys[j], origin), take(values[j], origin), positions)

    def attend(self, layer: int, queries: Tensor, positions: Tensor) -> Tensor:
        """Attention of [B, P_0 + M, heads, hd] queries; of a layer before the last [B, S + M, ...]."""
        parts = self.parts(queries)
        return torch.cat([memory.attend(layer, part, positions) for memory, part in zip(self.depths, parts)], dim=1)


class ParallelEagle(Eagle3):
    """The drafter. The mask token's embedding is the drafter's own wherever that token stands; the rest of the table is
    the target's, as in EAGLE-3."""

    kind = "parallel"
    one_pass = True

    def __init__(self, options: Options, shape: Shape, tapped: list[int], ids: Tensor, embedding: Tensor,
                 teacher_head: Tensor) -> None:
        """See Eagle3. ConfigError for a mask token that the target does not have."""
        super().__init__(options, shape, tapped, ids, embedding, teacher_head)
        if not 0 <= options.mask_token < shape.vocab_size:
            raise ConfigError(f"drafter.options.mask_token = {options.mask_token}: must be a token of the target, "
                              f"0..{shape.vocab_size - 1}, or -1 in a recipe")
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(tapped) * shape.target_hidden_size))  # as if tapped
        self.mask_embedding = nn.Parameter(embedding.float().mean(0))

    def embed(self, tokens: Tensor) -> Tensor:
        """Target ids [B, q] to embeddings [B, q, H]."""
        table = super().embed(tokens)
        return torch.where((tokens == self.options.mask_token)[..., None], self.mask_embedding.to(table.dtype), table)

    # --- training ---

    def all_depths(self, batch: Batch, state: Tensor, starts: list[Tensor], going: list[Tensor]) -> tuple[Tensor, ...]:
        """Outputs [B, P_k, H] (before the norm) of every depth, from fused states [B, S, H]; starts, going: see
        MaskMemory."""
        B, S = batch.ids.shape
        masked = [batch.positions.gather(1, at) + k for k, at in enumerate(starts) if k]
        positions = torch.cat([batch.positions, *masked], dim=1)  # [B, S + M]
        M = positions.shape[1] - S
        state = torch.cat([state, self.fuse(self.mask_hidden).expand(B, M, -1)], dim=1)
        tokens = F.pad(batch.ids[:, 1:], (0, 1 + M), value=self.options.mask_token)
        behind = torch.arange(S, S + M, device=tokens.device).expand(B, M)
        memory = MaskMemory(starts, going, batch.starts, self.options.num_layers)
        outputs = self.step(state, self.embed(tokens), positions, memory, torch.cat([starts[0], behind], dim=1))
        return outputs.split([at.shape[1] for at in starts], dim=1)

    def dropped(self, batch: Batch, seed: int) -> tuple[list[Chains], list[Tensor]]:
        """The chains of each depth, drawn among those of the depth before (conditional drop), and
        `going` as MaskMemory takes it. Their weights keep every depth's loss the same in expectation."""
        o = self.options
        chains = Chains(batch, o.depth_share, seed + 1, o.depth_floor)
        levels, going = [copy(chains)], []
        for k in range(1, o.depth):
            going.append(chains.thin(k))
            levels.append(copy(chains))
        return levels, going

    def forward(self, batch: Batch, progress: float = 1.0, seed: int = 0) -> LossOutput:
        """Loss of all depths, which one pass computes; positions that carry none lend keys alone."""
        levels, going = self.dropped(batch, seed)
        outputs = self.all_depths(batch, self.noisy(self.fuse(batch.taps), seed), [c.at for c in levels], going)
        steps = gather(zip(levels, outputs))
        return unrolled_loss(steps, self.norm(steps.outputs), self.lm_head, self.aim(), batch.final,
                             self.options.feature_loss)

    @torch.no_grad()
    def chain_logits(self, batch: Batch, K: int) -> Iterator[Tensor]:
        """See Eagle3.chain_logits; here no depth depends on what another one chooses."""
        at = Chains(batch, 1.0, 0).at
        every = torch.arange(at.shape[1], device=at.device).expand_as(at)
        for output in self.all_depths(batch, self.fuse(batch.taps), [at] * K, [every] * (K - 1)):
            yield self.logits(output)

    # --- decoding ---

    def session(self, rows: int, capacity: int) -> "MaskSession":
        return MaskSession(self, rows, capacity, self.options.num_layers)


class MaskSession(ChainSession):
    """The drafter in the decoding loop: one pass takes the newly verified states with the masks behind the last one.

    What the masks wrote is overwritten by the real states that take their positions. Trees are products: a node's
    children do not depend on its token, only on its depth.
    """

    def __init__(self, drafter: ParallelEagle, rows: int, capacity: int, layers: int) -> None:
        super().__init__(drafter, rows, capacity, layers)
        with torch.no_grad():
            self.mask = drafter.fuse(drafter.mask_hidden)  # [1, 1, H]

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        drafter, plan = self.drafter, planned(plan)
        grown = growth(plan, len(self.pending[1]), drafter.draft_ids, drafter.shape.vocab_size, sample)
        logits = drafter.logits(self.outputs(plan.depth))  # [B, K, D]
        nodes = 1  # of the level before, that are grown further
        for level in logits.split(1, dim=1):
            if grown.take(level.expand(-1, nodes, -1)):
                break
            nodes = grown.frontier.shape[1]
        return grown.draft()

    def outputs(self, K: int) -> Tensor:
        """Outputs [B, K, H] at each row's last real position and at the K - 1 masks behind it."""
        state, tokens, positions, last = self.pending  # [B, q, H], [B, q], [B, q], [B, 1]
        places = torch.arange(int(last.max()) + K, device=tokens.device)[None]  # what lies behind is ignored
        # A row whose places end before another one's repeats its last: written twice, it is the same.
        behind = (places - last).clamp(max=K - 1)  # [B, W]; above 0: a mask
        real = torch.minimum(places, last)
        state = torch.where(behind[..., None] > 0, self.mask, take(state, real))
        tokens = torch.where(behind > 0, self.drafter.options.mask_token, tokens.gather(1, real))
        self.memory.begin(None)
        return self.drafter.step(state, self.drafter.embed(tokens), positions.gather(1, last) + behind, self.memory,
                                 last + torch.arange(K, device=tokens.device))


def unused_token(target: Any, counts: dict[int, int]) -> int:
    """A token of a loaded target that its texts do not have: a row of its embedding behind the tokenizer's last id, a
    special token without a place in the chat template, or one that the traces do not count. ConfigError where there is
    none."""
    tokenizer, V = target.tokenizer, target.vocab_size
    if len(tokenizer) < V:
        return V - 1
    taken = {*counts, *target.end_ids, *tokenizer.all_special_ids}
    template = str(tokenizer.chat_template)
    spare = [t for t, token in tokenizer.added_tokens_decoder.items()
             if token.special and t < V and t not in taken and token.content not in template]
    spare = spare or [t for t in range(V) if t not in taken]
    if not spare:
        raise ConfigError("drafter.options.mask_token = -1: every token of the target occurs in the traces; name the "
                          "one that matters least")
    return max(spare)


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> ParallelEagle:
    """A fresh drafter for a loaded target (drafters.target.Target with taps)."""
    if options.mask_token < 0:
        options = replace(options, mask_token=unused_token(target, counts))
    return fresh(ParallelEagle, options, target, counts, seed)


def load(options: Options, shape: dict[str, Any], layers: list[int], tensors: dict[str, Tensor],
         target: Any) -> ParallelEagle:
    """A drafter from a checkpoint's parts, on a loaded target; see eagle3_build.restored."""
    return restored(ParallelEagle, options, shape, layers, tensors, target)


def cost(options: Options, shape: ModelShape, config: dict[str, Any], taps: int) -> DraftSize:
    """Sizes of the drafter for a target of this shape and text config, for `make plan`."""
    return replace(eagle3_build.cost(options, shape, config, taps), parallel=True)
