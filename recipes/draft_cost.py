"""Size, training and drafting of a drafter in numbers: what drafters/eagle3.py, parallel.py and medusa.py do, counted.
Arithmetic only.

Step 0 of the unroll computes for every position the fused state, all of every layer but the last, and the last one's
keys and values; queries and MLP of the last layer, and the head, are computed for positions that carry loss, in every
step. A parallel drafter has the same products in one pass: its places to come pass every layer, as later steps do.
Legend: S sequence, P_k loss positions of step k, H hidden, Ht target hidden, n taps, D draft vocabulary,
I intermediate, nh/nkv heads, hd head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from recipes.cost import Speed, pnorm, ring

PART = 128  # chains whose attention is computed together on a CPU (drafters/chain_attention.py)
LOGITS = 512e6  # bytes of logits that are held at a time, at most (drafters/unrolled.py: on a GPU)


@dataclass(frozen=True)
class DraftSize:
    """All sizes of one drafter and of what it borrows from its target."""

    hidden: int
    target_hidden: int
    taps: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_vocab: int
    vocab: int
    tap_norms: bool = False
    train_head: bool = True
    layers: int = 1
    parallel: bool = False  # all tokens of a draft in one pass

    @property
    def inputs(self) -> list[int]:
        """What each layer's attention reads: the first one state and embedding, a further one the state."""
        return [2 * self.hidden] + [self.hidden] * (self.layers - 1)

    @property
    def fuse(self) -> int:
        return self.taps * self.target_hidden * self.hidden

    def keys(self, width: int) -> int:
        """Key and value projections of a layer whose attention reads `width`."""
        return 2 * width * self.kv_heads * self.head_dim

    def rest(self, width: int) -> int:
        """What a position passes besides in such a layer: query, output, MLP."""
        queries = self.heads * self.head_dim
        return width * queries + queries * self.hidden + 3 * self.hidden * self.intermediate

    @property
    def every(self) -> int:
        """What every position passes in step 0: all keys and values, and every layer but the last."""
        return sum(map(self.keys, self.inputs)) + sum(map(self.rest, self.inputs[:-1]))

    @property
    def block(self) -> int:
        """What every worked position passes besides: the rest of the last layer."""
        return self.rest(self.inputs[-1])

    @property
    def head(self) -> int:
        return self.hidden * self.draft_vocab

    @property
    def teacher(self) -> int:
        """Weights of the target's head that teach: those of the draft vocabulary."""
        return self.target_hidden * self.draft_vocab

    @property
    def parameters(self) -> int:
        norms = (2 + 2 * self.layers) * self.hidden + (self.taps * self.target_hidden if self.tap_norms else 0)
        masks = self.taps * self.target_hidden + self.hidden if self.parallel else 0
        return self.fuse + self.every + self.block + self.head + norms + masks

    @property
    def trained(self) -> int:
        return self.parameters - (0 if self.train_head else self.head)

    @property
    def borrowed(self) -> int:
        """Numbers of the target that training holds: its embedding and its head over the draft vocabulary."""
        return self.vocab * self.hidden + self.teacher

    @property
    def head_gradients(self) -> int:
        """Numbers of the heads' gradients, which are summed part by part beside those of the optimizer."""
        return self.head * self.train_head

    def moved(self, depth: int) -> int:
        """Weights that pass the memory in a micro-batch of so many steps, each of which passes all of them."""
        return self.parameters * (depth + 1)

    def exported(self, layout: str) -> int:
        """Numbers of its export, with what the layout carries of the target: speculators its embedding, as every
        layout does of a parallel drafter, which has a row of its own in it."""
        table = self.vocab * self.hidden - self.hidden if self.parallel else self.vocab * self.hidden
        return self.parameters + table * (self.parallel or layout == "speculators")


@dataclass(frozen=True)
class MedusaSize(DraftSize):
    """Medusa heads (drafters/medusa.py) in the same terms: a step is a head's residual blocks and its projection.
    `train_head`: each head has a projection of its own; there is no attention, no taps are fused."""

    count: int = 1  # K
    blocks: int = 1  # of a head

    fuse = every = 0

    @property
    def block(self) -> int:
        return self.blocks * self.hidden**2

    @property
    def parameters(self) -> int:
        return self.count * (self.blocks * (self.hidden**2 + self.hidden) + self.train_head * self.head)

    @property
    def trained(self) -> int:
        return self.parameters

    @property
    def borrowed(self) -> int:
        return self.teacher

    @property
    def head_gradients(self) -> int:
        return self.count * self.head * self.train_head

    def moved(self, depth: int) -> int:
        return self.parameters

    def exported(self, layout: str) -> int:
        """Projections have a row for every token in both layouts; a shared one vLLM's carries once, the original for
        every head."""
        if self.train_head:
            return self.parameters + self.count * (self.vocab - self.draft_vocab) * self.hidden
        return self.parameters + self.vocab * self.hidden * (self.count if layout == "medusa-original" else 1)


@dataclass(frozen=True)
class ModelSize(DraftSize):
    """A standalone language model (drafters/small_lm.py) in the same terms: every position passes all its layers, loss
    is taken at depth 0 alone, over the whole vocabulary. `train_head`: its embedding and head are trained too."""

    tables: int = 2  # embedding and head, 1 where they are tied

    fuse = block = 0

    @property
    def every(self) -> int:
        return self.layers * (self.keys(self.hidden) + self.rest(self.hidden))

    @property
    def parameters(self) -> int:
        return self.exported("plain") - self.tables * self.head * (not self.train_head)

    @property
    def trained(self) -> int:
        return self.parameters

    @property
    def borrowed(self) -> int:
        """The target's head, which teaches, and the embedding and the head that are its own, where they stay so."""
        return self.teacher + self.tables * self.head * (not self.train_head)

    def moved(self, depth: int) -> int:
        return self.parameters + 2 * self.head  # the head, and the one that teaches

    def exported(self, layout: str) -> int:
        return self.every + (1 + 2 * self.layers) * self.hidden + self.tables * self.head


def worked(spans: list[float], depth: int, share: float = 1.0, floor: float = 0.0) -> list[float]:
    """Loss positions of each unrolled step of a row whose turns learnt from have these lengths: a turn of A tokens has
    A - 1 - k at step k; from each step the `share` of the chains goes on, down to the `floor` of all."""
    return [max(share**k, floor) * sum(max(0.0, span - 1 - k) for span in spans) for k in range(depth)]


def computed(size: DraftSize, positions: list[float], share: float) -> list[float]:
    """Positions that each step computes before its head: chains that end are left out where chains are thinned, and
    by a parallel drafter."""
    return positions if share < 1 or size.parallel else [positions[0]] * len(positions)


def columns(tokens: float, chains: float) -> float:
    """Columns that a chain's attention runs over, in the mean: those up to the last start of its part. Chains start
    up to the third place from the end."""
    return max(1.0, tokens - 2 - max(0.0, chains - PART) / 2)


def chain_flops(tokens: float, passed: Sequence[float], taught: Sequence[float], *, fuse: int, every: int, step: int,
                head: int, teacher: int, train_head: bool) -> float:
    """Operations of the products with weights in one forward and backward pass: a matrix of n numbers costs 2n a
    position forward, 2n for the gradient of its input and 2n for its own.

    tokens: positions read; passed[k]: those that pass the last layer in step k; taught[k]: those with loss. Numbers:
    `fuse` of the fusing layer, `every` of what step 0 applies to every position (keys, values, layers before the last),
    `step` of what else a draft step applies, `head`, and the frozen `teacher` head, which sees every state once.
    """
    return (4 * fuse * tokens  # its input is the target's: it needs no gradient
            + 6 * every * (tokens + sum(passed[1:]))
            + 6 * step * sum(passed)
            + (6 if train_head else 4) * head * sum(taught)
            + 2 * teacher * (taught[0] if taught else 0))


def attention_flops(size: DraftSize, tokens: float, passed: Sequence[float]) -> float:
    """Operations of one product of queries with keys, all layers and steps. In step 0 every position of a layer before
    the last has queries, over the columns up to its part's last position."""
    chains = sum(P * columns(tokens, P) for P in passed)
    later = sum(P * columns(tokens, P) for P in passed[1:])
    everywhere = tokens * (tokens - max(0.0, tokens - PART) / 2)
    return 2 * size.heads * size.head_dim * (chains + (size.layers - 1) * (later + everywhere))


def forward_flops(size: DraftSize, tokens: float, positions: list[float]) -> float:
    """Operations of drafting from these positions, without a teacher."""
    passed = [positions[0]] * len(positions)
    products = (size.fuse * tokens + size.every * (tokens + sum(passed[1:])) + size.block * sum(passed)
                + size.head * sum(positions))
    return 2 * products + 2 * attention_flops(size, tokens, passed)


def train_flops(size: DraftSize, tokens: float, positions: list[float], share: float = 1.0) -> float:
    """Operations of one row's forward and backward pass. Attention takes seven products: the scores are computed once
    more for the backward pass."""
    passed = computed(size, positions, share)
    return 7 * attention_flops(size, tokens, passed) + chain_flops(
        tokens, passed, positions, fuse=size.fuse, every=size.every, step=size.block, head=size.head,
        teacher=size.teacher, train_head=size.train_head)


def mean_train_flops(size: DraftSize, tokens: float, spans: list[float], unroll: Sequence[tuple[float, int]],
                     share: float = 1.0, floor: float = 0.0) -> float:
    """train_flops of one row, averaged over a run that unrolls, from each share of it on, so many steps."""
    begins = [min(max(begin, 0.0), 1.0) for begin, _ in unroll]
    return sum((end - begin) * train_flops(size, tokens, worked(spans, depth, share, floor), share)
               for (_, depth), begin, end in zip(unroll, begins, [*begins[1:], 1.0]))


def optimizer_bytes(size: DraftSize, ranks: int, stage: int) -> float:
    """Bytes a GPU of float32 weights, gradients and AdamW's two moments. ZeRO divides moments and its copy of the
    weights (1), gradients (2) and weights (3) among the ranks; without it, several ranks sum gradients in buckets."""
    moments, gradients, weights = 8 * size.trained, 4 * size.trained, 4 * size.parameters
    if not stage:
        return weights + moments + gradients * (2 if ranks > 1 else 1)
    return ((moments + 4 * size.trained) / ranks + gradients / (ranks if stage >= 2 else 1)
            + weights / (ranks if stage >= 3 else 1))


def update_seconds(size: DraftSize, ranks: int, stage: int, speed: Speed) -> float:
    """Seconds of one optimizer step beside its passes: gradients cleared, clipped and summed over the ranks, AdamW's
    four numbers a parameter read and three written."""
    own = size.trained / (ranks if stage >= 1 else 1)
    return (28 * own + 12 * size.trained) / speed.bandwidth + 4 * size.trained * ring(ranks) / speed.link


def activation_bytes(size: DraftSize, rows: float, tokens: float, positions: list[float], itemsize: float,
                     share: float = 1.0) -> float:
    """Bytes kept for the backward pass of a micro-batch, and its batch: taps and final states; normed, fused and
    projected states; each layer's and step's own keys; MLP; the heads' gradients. On top what a part of the head takes
    while it is worked: logits in float32, the teacher's, and two of their size."""
    S, H = tokens, size.hidden
    batch = S * (size.taps + 1) * size.target_hidden * itemsize
    kept, passed = S * 4 * H * itemsize, computed(size, positions, share)
    for layer in range(size.layers):
        kept += S * (2 * H + 2 * size.kv_heads * size.head_dim) * itemsize
        for k, P in enumerate(passed if layer + 1 == size.layers else [S, *passed[1:]]):
            kept += P * itemsize * (8 * H + 3 * size.heads * size.head_dim + 4 * size.intermediate)
            kept += P * (4 * size.heads + 2 * k * size.kv_heads * size.head_dim * itemsize)
    head = sum(positions) * H * itemsize
    worked_on = 4 * min(LOGITS, rows * sum(positions) * size.draft_vocab * 4)
    return rows * (batch + kept + head) + 4 * size.head_gradients + worked_on


def draft_seconds(size: DraftSize, rows: float, K: int, context: float, itemsize: float, speed: Speed) -> float:
    """Seconds of one draft of K tokens: a pass over the newly verified positions, then K - 1 passes of one token; of a
    parallel drafter the one pass has K - 1 places more."""
    def one(queries: float, fused: bool, drafted: float = 1.0) -> float:
        weights = size.every + size.block + size.head + (size.fuse if fused else 0)
        done = 2 * rows * (queries * (size.every + (size.fuse if fused else 0)) + drafted * (size.block + size.head))
        cache = rows * context * 2 * size.kv_heads * size.head_dim * size.layers
        busy = pnorm((weights + cache) * itemsize / speed.bandwidth, done / speed.flops, speed.overlap)
        return busy + size.layers * speed.layer_s

    if not K:
        return 0.0
    return one(2 * K, True, K) if size.parallel else one(K + 1, True) + (K - 1) * one(1, False)


def optimizer_steps(rows: float, epochs: float, batch_rows: int, ranks: int, accumulation: int) -> int:
    """Steps of a run, as data.batching.Plan counts them."""
    return max(1, round(epochs * max(1, ceil(rows / (batch_rows * ranks * accumulation)))))
