"""Medusa drafter (Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads").

Head k sees the target's final state at position t, which itself names x[t+1], and predicts x[t+2+k]. All heads see the
same state and none sees what another guessed: a draft is one pass, needs no cache, and what it says of a level is the
same behind every node of it. The target stays frozen (Medusa-1). Parameter names are those that vLLM loads.
Legend: B rows, S sequence, P loss positions, H hidden size of the target, V its vocabulary, D draft vocabulary,
K heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from drafters import vocab
from drafters.base import Batch, LossOutput, loss_mask, take
from drafters.growth import growth
from drafters.head_loss import heads_loss
from drafters.layers import check_sizes
from drafters.tree import Draft, Plan, planned
from drafters.unrolled import Aim, Chains, gather, greedy_drafts, unrolled_loss
from recipes.draft_cost import MedusaSize
from recipes.errors import ConfigError
from recipes.model_shape import ModelShape
from recipes.schema import NonNegativeInt, opt

MOST_HEADS, MOST_BLOCKS = 5, 4
# Acceptance lengths that `make plan` takes for the worst and the best case, and why these.
EXPECTED_LENGTHS = ((1.2, 2.6), "EAGLE-3's table has 2.59 for Medusa on Vicuna-13B (MT-bench), drafted as a tree; a "
                                "chain, and heads that are early in their training, keep less")


@dataclass
class Options:
    """`drafter.options` of a recipe with kind medusa."""

    heads: Annotated[int, Field(ge=1, le=MOST_HEADS)] = opt(4, "K: heads, and so the most tokens of a draft")
    num_layers: Annotated[int, Field(ge=1, le=MOST_BLOCKS)] = opt(1, "residual blocks a head")
    projection: Literal["own", "shared"] = opt("own", "own: each head has a vocabulary projection, which starts as the "
                                                      "target's head; shared: all use the target's, frozen")
    draft_vocab_size: NonNegativeInt = opt(0, "D: target tokens the heads can propose; 0 is all of them")
    loss: Literal["kl", "reverse_kl", "tv", "lk"] = opt("kl", "divergence from the target, or its acceptance: tv, and "
                                                              "lk, which goes from kl to tv as acceptance grows")
    labels: Literal["distribution", "greedy", "token"] = opt(
        "distribution", "what teaches: the target's distribution, its first choice, or the token that the trace has "
                        "(kl by token is the paper's loss)")
    lk_eta: NonNegativeFloat = opt(3.0, "lk: the share of kl is exp(-lk_eta * acceptance)")
    step_decay: PositiveFloat = opt(0.8, "weight of head k is step_decay^k (the paper's lambda)")
    step_weights: Literal["fixed", "prefix"] = opt("fixed", "prefix: times the acceptance of the heads before")
    outside_vocabulary: Literal["keep", "drop"] = opt("keep", "loss where the target's token is not in D")

    def __post_init__(self) -> None:
        if self.loss == "reverse_kl" and self.labels != "distribution":
            raise ValueError(f"reverse_kl is infinite by labels: {self.labels}; use labels: distribution, or loss: kl")

    @property
    def stages(self) -> list[tuple[float, int]]:
        """From which share of the run on how many steps a position is taught: all heads, all the time."""
        return [(0.0, self.heads)]

    @property
    def depth_share(self) -> float:
        """Share of the positions that goes on from each head to the next."""
        return 1.0


@dataclass
class Shape:
    """Sizes of a drafter, all explicit, as drafter.json stores them."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layers: int

    @classmethod
    def read(cls, values: Any) -> "Shape":
        """The sizes that a drafter.json states. ConfigError naming the first that is missing, unknown or none."""
        check_sizes(cls, values)
        return cls(**values)


class ResidualBlocks(nn.Module):
    """x + SiLU(Wx + b), [..., H] to [..., H], so many times. It begins as the identity."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(nn.Module):
    """The drafter. The target's head, which teaches and may project, is frozen, never saved, never optimised."""

    kind = "medusa"
    vocabulary_modules = ("lm_heads",)
    one_pass = True

    def __init__(self, options: Options, shape: Shape, ids: Tensor, teacher_head: Tensor) -> None:
        """ids [D]: target ids of the draft vocabulary; teacher_head [V, H]."""
        super().__init__()
        self.options, self.shape, self.longest = options, shape, options.heads
        H, D, own = shape.hidden_size, shape.draft_vocab_size, options.projection == "own"
        self.blocks = nn.ModuleList(ResidualBlocks(H, options.num_layers) for _ in range(options.heads))
        self.lm_heads = nn.ModuleList(nn.Linear(H, D, bias=False) for _ in range(options.heads if own else 0))
        d2t, t2d = vocab.maps(ids, shape.vocab_size)
        for name, value in {"d2t": d2t, "t2d": t2d, "draft_ids": ids, "teacher_head": teacher_head[ids]}.items():
            self.register_buffer(name, value, persistent=False)
        wants_all = Aim.wants_all(options.loss, options.labels, options.step_weights == "prefix")
        self.register_buffer("full_head", teacher_head if wants_all else None, persistent=False)
        with torch.no_grad():
            for head in self.lm_heads:
                head.weight.copy_(self.teacher_head)

    def guesses(self, state: Tensor) -> Iterator[Tensor]:
        """Logits [..., D] of each head in turn, from final states [..., H]."""
        for k, block in enumerate(self.blocks):
            yield self.lm_heads[k](block(state)) if self.lm_heads else F.linear(block(state), self.teacher_head)

    # --- training ---

    def count(self, batch: Batch) -> int:
        return int(loss_mask(batch.turns, 0).sum())

    def forward(self, batch: Batch, progress: float = 1.0, seed: int = 0) -> LossOutput:
        """Sum of step_decay^k times head k's loss over the positions that carry loss at depth k, as in the unrolled
        drafters: neither a turn's end nor a packed border lies between a position and its label. The states are the
        traces' final ones, which every such position has."""
        chains = Chains(batch, 1.0, 0)
        state = take(batch.final, chains.at).masked_fill(~chains.valid[..., None], 0.0)  # [B, P, H]
        steps = gather((chains, block(state)) for block in self.blocks)
        own = len(self.lm_heads) > 0
        weights = [head.weight for head in self.lm_heads] if own else [self.teacher_head]
        head = partial(heads_loss, weights=weights, which=steps.step if own else None)
        return unrolled_loss(steps, steps.outputs, head, self.aim(), batch.final)

    def aim(self) -> Aim:
        """What the options say a head learns."""
        o = self.options
        return Aim(o.loss, o.labels, o.step_decay, o.step_weights == "prefix", o.lk_eta,
                   o.outside_vocabulary == "drop", self.draft_ids, self.t2d, self.teacher_head, self.full_head)

    def flops(self, tokens: float, worked: Sequence[float]) -> float:
        """Model FLOPs of training with worked[k] positions of loss at head k; `tokens` do not matter: nothing is read
        of the others. The first block's input is the target's and needs no gradient."""
        square, head = self.shape.hidden_size**2, self.teacher_head.numel()
        block = 2 * square * (3 * self.options.num_layers - 1)
        teacher = 2 * head * worked[0] if self.options.labels == "distribution" else 0.0
        return sum(worked) * (block + (6 if len(self.lm_heads) else 4) * head) + teacher

    @torch.no_grad()
    def chain_logits(self, batch: Batch, K: int) -> Iterator[Tensor]:
        """Logits [B, P, D] of each of K steps of the drafts from every position that can start one (Chains)."""
        if K > self.longest:
            raise ValueError(f"a draft of {K} tokens: the drafter has {self.longest} heads")
        yield from islice(self.guesses(take(batch.final, Chains(batch, 1.0, 0).at)), K)

    def chains(self, batch: Batch, K: int) -> tuple[Tensor, Tensor, Tensor]:
        """Greedy drafts from every position that can start one: tokens [B, P, K], at [B, P], valid [B, P]."""
        return greedy_drafts(batch, self.draft_ids, self.chain_logits(batch, K))

    # --- decoding ---

    def session(self, rows: int, capacity: int) -> "MedusaSession":
        return MedusaSession(self)

    # --- saving ---

    def meta(self) -> dict[str, Any]:
        """No layer is tapped: the final state is no state that enters one."""
        return {"kind": self.kind, "options": asdict(self.options), "shape": asdict(self.shape), "layers": []}

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds: trained parameters and the vocabulary maps."""
        return {**self.state_dict(), "d2t": self.d2t, "t2d": self.t2d}


class MedusaSession:
    """Medusa in the decoding loop: the final state at the last decided token's predecessor is all that it keeps."""

    def __init__(self, drafter: Medusa) -> None:
        self.drafter = drafter

    def begin(self, prompts: list[list[int]]) -> None:
        """Nothing of a prompt but its last state matters."""

    def observe(self, taps: Tensor, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        """taps [B, q, H]: the target's final states."""
        self.state = take(taps, last[:, None])  # [B, 1, H]

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        plan, drafter = planned(plan), self.drafter
        if plan.depth > drafter.longest:
            raise ValueError(f"a draft of {plan.depth} levels: the drafter has {drafter.longest} heads")
        grown = growth(plan, len(self.state), drafter.draft_ids, drafter.shape.vocab_size, sample)
        nodes = 1
        for logits in drafter.guesses(self.state):  # [B, 1, D], the same behind every node
            if grown.take(logits.expand(-1, nodes, -1)):
                break
            nodes = grown.frontier.shape[1]
        return grown.draft()

    def keep(self, rows: Tensor) -> None:
        self.state = self.state[rows]

    def join(self, other: "MedusaSession") -> None:
        self.state = torch.cat([self.state, other.state])


# --- what the registry calls ---


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> Medusa:
    """A fresh drafter for a loaded target. Nothing in it is random: blocks begin as the identity, heads as the
    target's."""
    size = options.draft_vocab_size or target.vocab_size
    ids = vocab.build(counts, size, target.vocab_size, vocab.forced(target))
    return Medusa(options, Shape(target.hidden, target.vocab_size, size, target.depth), ids, target.head_weight.clone())


def cost(options: Options, shape: ModelShape, config: dict[str, Any], taps: int) -> MedusaSize:
    """Sizes of the drafter for a target of this shape, for `make plan`; taps: what the traces hold besides."""
    D = options.draft_vocab_size or shape.vocab
    return MedusaSize(shape.hidden, shape.hidden, taps, 0, 0, 0, 0, D, shape.vocab,
                      train_head=options.projection == "own", count=options.heads, blocks=options.num_layers)


def load(options: Options, shape: dict[str, Any], layers: list[int], tensors: dict[str, Tensor], target: Any) -> Medusa:
    """A drafter from a checkpoint's parts, on a loaded target.

    Raises ConfigError where tensors are missing, unexpected or of another shape, or for another target.
    """
    own, rest = Shape.read(shape), dict(tensors)
    if (own.vocab_size, own.hidden_size) != (target.vocab_size, target.hidden):
        raise ConfigError(f"the drafter is for a target with vocabulary {own.vocab_size} and hidden size "
                          f"{own.hidden_size}; this target has {target.vocab_size} and {target.hidden}")
    try:
        d2t, t2d = rest.pop("d2t"), rest.pop("t2d")
    except KeyError as error:
        raise ConfigError(f"the checkpoint has no {error.args[0]} tensor") from None
    if (list(d2t.shape), list(t2d.shape)) != ([own.draft_vocab_size], [own.vocab_size]) or d2t.is_floating_point():
        raise ConfigError(f"tensors d2t {list(d2t.shape)} and t2d {list(t2d.shape)}: draft_vocab_size = "
                          f"{own.draft_vocab_size} and vocab_size = {own.vocab_size} imply others")
    vocab.check(d2t, t2d)
    drafter = Medusa(options, own, vocab.ids_of(d2t), target.head_weight.clone())
    expected = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in rest.items()}
    if expected != found:
        wrong = sorted(set(expected.items()) ^ set(found.items()))
        raise ConfigError(f"the checkpoint's tensors do not fit the drafter: {wrong[:4]}")
    drafter.load_state_dict(rest)
    return drafter
