"""Time of plain decoding and of one speculative cycle, and what follows for the speedup. Arithmetic only.

    cycle = draft + t(B, q) + o_cycle + o_req * B          q = K+1, or the verified nodes of a tree
    S     = AL * (t(B, 1) + o_req * B + rest * B) / (cycle + AL * rest * B)

`rest` is the time of the machine that every kept token costs beside its decoding: its share of the prompt's pass where
prefill and decoding share GPUs. It is paid for each token whoever drafts (Amdahl's law on time), so a cycle that keeps
more tokens also carries more of it. A step time taken from the throughput of whole requests contains it.

Legend: B rows, K draft length, q verified tokens a row, AL acceptance length with the bonus token, H hidden.
"""

import math
from dataclasses import dataclass, fields, replace

from recipes.cost import (
    Format,
    Pass,
    Speed,
    cache_per_gpu,
    experts_read,
    pass_seconds,
    pnorm,
    weights_per_gpu,
)
from recipes.draft_cost import DraftSize
from recipes.model_shape import ModelShape

OVERLAP = 3.0  # exponent of the norm that joins moving and computing: engines hide most of the shorter one
IN_TURNS = 1.0  # on a CPU: products of 32 to 128 rows take what one row takes and their arithmetic (docs/results.md)
SEQUENTIAL = ("eagle3", "mtp", "model", "layer_cut")  # one pass a draft token
KINDS = (*SEQUENTIAL, "parallel", "medusa", "lookup", "none")


@dataclass(frozen=True)
class Constants:
    """What an engine makes of the peaks: the figures that calibration fits, each by its logarithm."""

    moved: float = 0.71  # share of the memory's bandwidth
    done: float = 0.5  # share of the FLOP/s
    layer_us: float = 15.0  # of a target layer in a decoding pass
    reduce_us: float = 10.0  # of each sum over the GPUs that share a layer, two a layer
    cycle_us: float = 1000.0  # of a speculative cycle: sampling, tree, bookkeeping of the cache
    draft_us: float = 300.0  # of each pass of the drafter
    row_us: float = 10.0  # of a row in each step, plain or not
    apart: float = 0.8  # how far the further tokens of a row choose other experts (1 - rho)
    rest: float = 1.0  # multiplies the prefill that each kept token carries

    def logs(self) -> list[float]:
        return [math.log(getattr(self, f.name)) for f in fields(self)]

    @classmethod
    def from_logs(cls, logs) -> "Constants":
        """Whether shares may pass 1 is the profile's to say (eval/roi_calibrate.py)."""
        return cls(**{f.name: math.exp(x) for f, x in zip(fields(cls), logs)})


@dataclass(frozen=True)
class Place:
    """A target on its GPUs: peaks in B/s and FLOP/s, and the microseconds a layer of a prompt's pass costs beside its
    arithmetic (prompts run without the graphs that decoding uses)."""

    shape: ModelShape
    keep: Format
    bandwidth: float
    flops: float
    link: float = float("inf")
    prompt_layer_us: float = 100.0
    overlap: float = OVERLAP


@dataclass(frozen=True)
class Draft:
    """How tokens are drafted. `size` of an EAGLE-3 or parallel drafter; `model` of a standalone one; `bits` its
    weights; MTP takes what it needs from the target, layer_cut its first `layers`. Medusa's heads are as wide as the
    target, `blocks` residual blocks and a projection to `vocab` tokens each (0: the target's vocabulary)."""

    kind: str
    size: DraftSize | None = None
    model: ModelShape | None = None
    bits: float = 16.0
    layers: int = 0
    vocab: int = 0
    blocks: int = 1

    def head(self, shape: ModelShape) -> int:
        """Weights of one of Medusa's heads."""
        return shape.hidden * (self.blocks * shape.hidden + (self.vocab or shape.vocab))


@dataclass(frozen=True)
class Step:
    """One step of B rows behind `context` tokens each. K 0: plain. `topk` branches a level, `verified` nodes a row (0:
    K + 1). `kept`: mean tokens that it yields a row; `prompt`, `answer`: mean lengths of a request, which say how much
    prefill a kept token carries (0: none, the prompt runs elsewhere)."""

    rows: float
    K: int = 0
    context: float = 1024.0
    topk: int = 1
    verified: int = 0
    kept: float = 1.0
    prompt: float = 0.0
    answer: float = 0.0

    @property
    def width(self) -> int:
        return 1 if not self.K else self.verified or self.K + 1

    @property
    def plain(self) -> "Step":
        """The step of plain decoding beside it."""
        return replace(self, K=0, topk=1, verified=0, kept=1.0)


def speed_of(place: Place, c: Constants) -> Speed:
    layer = c.layer_us + (2 * c.reduce_us if place.keep.ranks > 1 else 0.0)
    return Speed(c.moved * place.bandwidth, c.done * place.flops, c.moved * place.link, layer * 1e-6, 0.0,
                 place.overlap)


def target_seconds(place: Place, c: Constants, rows: float, q: float, context: float) -> float:
    """One pass of the target over q tokens a row, logits for all of them."""
    load = Pass(rows, q, context, q, 1 - c.apart)
    return pass_seconds(place.shape, load, place.keep, speed_of(place, c))


def dense_seconds(weights: float, tokens: float, cache: float, bits: float, place: Place, c: Constants) -> float:
    """A drafter's pass: its weights read once, `tokens` multiplied with them, `cache` bytes read."""
    speed, ranks = speed_of(place, c), place.keep.ranks
    moved = (weights * bits / 8 + cache) / ranks
    return pnorm(moved / speed.bandwidth, 2 * weights * tokens / ranks / speed.flops, speed.overlap)


def draft_seconds(draft: Draft, place: Place, c: Constants, step: Step) -> float:
    """All passes that propose a step's tokens; lookup costs the GPU nothing."""
    K, rows = step.K, step.rows
    if not K or draft.kind in ("lookup", "none"):
        return 0.0
    if draft.kind in ("eagle3", "parallel"):
        busy = _eagle_seconds(draft, place, c, step)
    elif draft.kind == "medusa":
        busy = dense_seconds(K * draft.head(place.shape), rows, 0.0, draft.bits, place, c)
    elif draft.kind == "mtp":
        one = some_layers(place.shape, 1)
        first = target_seconds(replace(place, shape=one), c, rows, step.width, step.context)
        busy = first + (K - 1) * target_seconds(replace(place, shape=one), c, rows * step.topk, 1, step.context)
    elif draft.kind == "layer_cut":
        own = replace(place, shape=some_layers(place.shape, draft.layers))
        busy = K * target_seconds(own, c, rows * step.topk, 1, step.context)
    else:
        own = replace(place, shape=draft.model, keep=replace(place.keep, weight_bits=draft.bits))
        busy = K * target_seconds(own, c, rows * step.topk, 1, step.context)
    passes = K if draft.kind in SEQUENTIAL else 1
    own_sums = draft.kind in ("eagle3", "parallel", "medusa") and place.keep.ranks > 1  # the others' are their layers'
    return busy + passes * (c.draft_us + (2 * c.reduce_us if own_sums else 0.0)) * 1e-6


def _eagle_seconds(draft: Draft, place: Place, c: Constants, step: Step) -> float:
    """EAGLE-3: a pass over the verified tokens that also fuses the taps, then one a further level; a parallel drafter
    stops after the first, which has K places a row more."""
    size, rows = draft.size, step.rows
    block = size.every + size.block
    cache = rows * step.context * 2 * size.kv_heads * size.head_dim * size.layers * place.keep.cache_bits / 8
    parallel = draft.kind == "parallel"
    extra = step.K if parallel else 0
    first = dense_seconds(size.fuse + block, rows * (step.width + extra), cache, draft.bits, place, c)
    head = dense_seconds(size.head, rows * max(1, extra), 0.0, draft.bits, place, c)
    further = dense_seconds(block + size.head, rows * step.topk, cache, draft.bits, place, c)
    return first + head + (0.0 if parallel else (step.K - 1) * further)


def some_layers(shape: ModelShape, count: int) -> ModelShape:
    """`count` mean layers of the target with its head; one is a multi-token-prediction (MTP) module."""
    matrices = tuple(replace(m, count=m.count * count / shape.layers) for m in shape.matrices)
    return replace(shape, layers=count, matrices=matrices, windowed=0, window=0)


def draft_memory(draft: Draft, shape: ModelShape, K: int, keep: Format, rows: float, length: float) -> float:
    """Bytes of a drafter on each GPU: its weights, and its own keys and values of so many rows of this length. Lookup
    has neither; a layer_cut's weights are the target's own, an MTP module is kept as the target is."""
    size = draft.size
    if size:
        token = 2 * size.kv_heads * size.head_dim * size.layers * keep.cache_bits / 8
        return size.parameters * draft.bits / 8 / keep.ranks + rows * length * token / min(keep.ranks, size.kv_heads)
    if draft.kind == "medusa":
        return K * draft.head(shape) * draft.bits / 8 / keep.ranks
    if draft.kind == "layer_cut":
        return cache_per_gpu(some_layers(shape, draft.layers), rows, length, keep)
    if draft.kind in ("mtp", "model"):
        own = replace(keep, weight_bits=draft.bits) if draft.model else keep
        drafting = draft.model or some_layers(shape, 1)
        return weights_per_gpu(drafting, own) + cache_per_gpu(drafting, rows, length, own)
    return 0.0


def prompt_seconds(place: Place, c: Constants, tokens: float, rows: float = 1.0) -> float:
    """The pass over a prompt, without graphs."""
    speed = speed_of(place, c)
    layer = max(speed.layer_s, place.prompt_layer_us * 1e-6)
    return pass_seconds(place.shape, Pass(rows, tokens), place.keep, replace(speed, layer_s=layer)) if tokens else 0.0


def rest_seconds(place: Place, c: Constants, step: Step) -> float:
    """What every kept token of all rows costs beside its decoding: its part of the prompts."""
    return c.rest * step.rows * prompt_seconds(place, c, step.prompt) / step.answer if step.answer else 0.0


def cycle_seconds(draft: Draft, place: Place, c: Constants, step: Step) -> float:
    """From one set of kept tokens to the next, nothing else on the machine."""
    busy = target_seconds(place, c, step.rows, step.width, step.context) + step.rows * c.row_us * 1e-6
    if not step.K:
        return busy
    return busy + draft_seconds(draft, place, c, step) + c.cycle_us * 1e-6


def step_seconds(draft: Draft, place: Place, c: Constants, step: Step) -> float:
    """A step as throughput shows it: with the prefill that its kept tokens carry."""
    return cycle_seconds(draft, place, c, step) + step.kept * rest_seconds(place, c, step)


def speedup(draft: Draft, place: Place, c: Constants, step: Step) -> float:
    """Tokens a second with the drafter over plain ones at the same batch and context; at most step.kept."""
    return step.kept * step_seconds(draft, place, c, step.plain) / step_seconds(draft, place, c, step)


def tokens_per_second(draft: Draft, place: Place, c: Constants, step: Step) -> float:
    """Of one replica."""
    return step.rows * step.kept / step_seconds(draft, place, c, step)


def weight_read_bound(shape: ModelShape, keep: Format, bandwidth: float, rows: float, kept: float = 1.0,
                      apart: bool = False) -> float:
    """Tokens a second that no engine passes: the weights are read once a step at the full bandwidth, the head in the
    layers' format. Experts: those of one token, since all rows may choose the same ones; `apart`: those that rows which
    choose on their own need in expectation, a bound for such rows only. The embedding, of which a row reads a line, is
    left out."""
    return rows * kept * bandwidth * keep.ranks / weight_read_bytes(shape, keep, rows if apart else 1.0)


def weight_read_bytes(shape: ModelShape, keep: Format, choices: float = 1.0) -> float:
    """Bytes of weights that a step reads on all GPUs of a replica, with the experts of so many independent choices."""
    read = sum(m.weights if not m.experts else m.weights / m.experts * experts_read(m.experts, m.chosen, Pass(choices))
               for m in shape.matrices)
    return (read + shape.head) * keep.weight_bits / 8


def product_bound(shape: ModelShape, flops: float, ranks: int) -> float:
    """Tokens a second that no engine passes: each kept token was multiplied with every weight that it uses."""
    return flops * ranks / shape.flops()


def kept_of(per_position: list[float], K: int) -> float:
    """Acceptance length of a chain of K from the cumulative rates of a longer one: 1 + their sum."""
    return 1.0 + sum(per_position[:K])


def kept_if_independent(alpha: float, K: int) -> float:
    """Tokens a cycle where every draft token is accepted with probability alpha on its own: (1 - a^(K+1)) / (1 - a)."""
    return K + 1.0 if alpha == 1 else (1 - alpha ** (K + 1)) / (1 - alpha)
