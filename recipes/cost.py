"""Time of one pass of a target on given hardware: a roofline with stated shares of the peak. Arithmetic only.

    t(B, q) = sum over kinds of matrices of pnorm(bytes / bandwidth, operations / FLOP/s)
              + keys and values, read once for the q queries of a row + logits + all-reduce + overhead

q is the number of tokens a row: 1 when decoding plainly, K+1 when verifying, the prompt when filling a cache.
Legend: B rows, q tokens a row, E experts, k experts a token.
"""

from dataclasses import dataclass

from recipes.model_shape import Matrix, ModelShape


@dataclass(frozen=True)
class Speed:
    """What one GPU reaches: peaks times shares. `overlap`: exponent of the norm that joins moving and computing;
    1: one after the other, large: all of the shorter one hidden behind the longer."""

    bandwidth: float  # B/s
    flops: float  # FLOP/s
    link: float = float("inf")  # B/s, one way, to another GPU
    layer_s: float = 0.0  # of each layer of a pass, beside its arithmetic: launches, host code, small operations
    pass_s: float = 0.0
    overlap: float = 1.0


@dataclass(frozen=True)
class Format:
    """How the target is kept: bits of layer matrices, of all other weights and states, of the cache; `ranks` GPUs share
    each layer (tensor parallelism), `holders` have layers of their own and work in turn (a device map); `expanded`:
    MLA's keys and values are kept for every head, as transformers does."""

    weight_bits: float = 16.0
    other_bits: float = 16.0
    cache_bits: float = 16.0
    ranks: int = 1
    holders: int = 1
    expanded: bool = False

    @property
    def gpus(self) -> int:
        return self.ranks * self.holders


@dataclass(frozen=True)
class Pass:
    """One forward pass: `rows` of `tokens` each behind `context` cached ones; `heads` positions a row get logits.
    alike: how far a row's tokens choose the same experts (0: as if at random, 1: all the same)."""

    rows: float
    tokens: float = 1.0
    context: float = 0.0
    heads: float = 1.0
    alike: float = 0.0


def pnorm(a: float, b: float, p: float) -> float:
    """(a^p + b^p)^(1/p) of two times: their sum at p = 1, the longer one for large p."""
    longer, shorter = max(a, b), min(a, b)
    return longer * (1 + (shorter / longer) ** p) ** (1 / p) if shorter > 0 else longer


def experts_read(E: int, k: int, load: Pass) -> float:
    """Experts of a layer whose weights a pass needs, in expectation, if tokens choose independently."""
    choices = load.rows * (1 + (load.tokens - 1) * (1 - load.alike))
    return E * (1 - (1 - k / E) ** choices)


def matrix_work(m: Matrix, load: Pass, keep: Format) -> tuple[float, float]:
    """(bytes moved, operations) of all matrices of one kind in a pass, on each of the ranks."""
    tokens = load.rows * load.tokens
    read = m.weights if not m.experts else m.weights / m.experts * experts_read(m.experts, m.chosen, load)
    used = m.chosen if m.experts else 1
    moved = tokens * (m.inp + m.out) * m.count * used * keep.other_bits / 8
    return (read * keep.weight_bits / 8 + moved) / keep.ranks, 2 * m.active * tokens / keep.ranks


def cache_split(shape: ModelShape, ranks: int) -> int:
    """Parts that the cache is divided into: whole key/value heads, and never MLA's one latent."""
    return min(ranks, shape.attention.kv_heads) if shape.attention.kv_heads else 1


def attention_work(shape: ModelShape, load: Pass, keep: Format) -> tuple[float, float]:
    """(bytes, operations) of reading keys and values: each row's cache once, whatever the number of queries."""
    held = shape.cache_bytes(load.context + load.tokens, keep.cache_bits, keep.expanded)
    seen = shape.attended(load.context + (load.tokens + 1) / 2)
    filled = keep.expanded or load.tokens > load.context
    each = shape.attention.on_expanded if filled else shape.attention.on_cached
    return (load.rows * held / cache_split(shape, keep.ranks), load.rows * load.tokens * seen * each / keep.ranks)


def head_work(shape: ModelShape, load: Pass, keep: Format) -> tuple[float, float]:
    """(bytes, operations) of the vocabulary projection, float32 logits written."""
    positions = load.rows * load.heads
    moved = shape.head * keep.other_bits / 8 + 4 * positions * shape.vocab
    return moved / keep.ranks, 2 * positions * shape.head / keep.ranks


def reduce_seconds(shape: ModelShape, load: Pass, keep: Format, speed: Speed) -> float:
    """Two sums of the states over the ranks in each layer, as rings."""
    states = load.rows * load.tokens * shape.hidden * keep.other_bits / 8
    return 2 * shape.layers * states * ring(keep.ranks) / speed.link


def ring(ranks: int) -> float:
    """Bytes that each of the ranks sends for every byte of a sum over all of them."""
    return 2 * (ranks - 1) / ranks


def pass_work(shape: ModelShape, load: Pass, keep: Format) -> list[tuple[float, float]]:
    """(bytes, operations) of each kind of work in one pass."""
    work = [matrix_work(m, load, keep) for m in shape.matrices]
    work.append(attention_work(shape, load, keep))
    if load.heads:
        work.append(head_work(shape, load, keep))
    return work


def pass_seconds(shape: ModelShape, load: Pass, keep: Format, speed: Speed) -> float:
    """Seconds of one forward pass of the target."""
    if load.rows * load.tokens <= 0:
        return 0.0
    busy = sum(pnorm(moved / speed.bandwidth, done / speed.flops, speed.overlap)
               for moved, done in pass_work(shape, load, keep))
    return busy + reduce_seconds(shape, load, keep, speed) + shape.layers * speed.layer_s + speed.pass_s


def weights_per_gpu(shape: ModelShape, keep: Format) -> float:
    """Bytes of the target's weights on each GPU."""
    return shape.weight_bytes(keep.weight_bits, keep.other_bits) / keep.gpus


def cache_per_gpu(shape: ModelShape, rows: float, length: float, keep: Format) -> float:
    """Bytes of the cache of so many rows of this length on each GPU."""
    held = rows * shape.cache_bytes(length, keep.cache_bits, keep.expanded)
    return held / cache_split(shape, keep.ranks) / keep.holders


def dollars(seconds: float, gpus: int, price_per_gpu_hour: float) -> float:
    """Price of a stage."""
    return seconds / 3600 * gpus * price_per_gpu_hour
