"""What physics allows of a claim: tokens a cycle, weights that are read, products, memory, whole replicas."""

from functools import partial
from math import ceil

from eval import roi_refuse as refuse
from eval.roi_claim import Claim
from eval.roi_finding import HOLDS, IMPOSSIBLE, POSSIBLE, ROUNDING, UNSAID, WRONG, Finding, refused
from recipes.cost import Format, cache_per_gpu, weights_per_gpu
from recipes.speculation import (
    draft_memory,
    kept_if_independent,
    product_bound,
    weight_read_bound,
    weight_read_bytes,
)

GIB = 2**30  # sellers' GB of memory are these
NARROWEST = 4.0  # bits of a number that any of these GPUs multiplies


def cycles(c: Claim) -> list[Finding]:
    """Tokens a cycle, and the speedup that they allow as a chain and in one pass."""
    found = []
    if c.has("alpha", "draft_length", "draft_times_faster", "speedup"):
        kept, cost = kept_if_independent(c.alpha, c.draft_length), 1 / c.draft_times_faster
        chain, once = kept / (1 + c.draft_length * cost), kept / (1 + cost)
        said = (f"{kept:.2f} tokens a cycle: {chain:.2f}x as a chain of {c.draft_length} passes, {once:.2f}x in one "
                "pass, verification free")
        near = min((chain, once), key=lambda x: abs(x - c.speedup))
        verdict = HOLDS if abs(near - c.speedup) <= ROUNDING * near else WRONG
        found.append(Finding("speedup of this drafter", f"{c.speedup:.2f}x", f"{chain:.2f}x or {once:.2f}x", verdict,
                             said, chain))
    if c.has("acceptance_length", "draft_length") and c.acceptance_length > c.draft_length + 1:
        found.append(Finding("acceptance length", f"{c.acceptance_length:.2f}", f"at most {c.draft_length + 1}",
                             IMPOSSIBLE, f"a draft of {c.draft_length} keeps one token more than itself at most, the "
                             "bonus token", c.draft_length + 1.0, 4))
    return found + gains(c)


def gains(c: Claim) -> list[Finding]:
    """No speedup above the acceptance length (4), whichever way it is said."""
    kept, found = c.kept(), []
    rates = c.tok_s_after / c.tok_s if c.has("tok_s", "tok_s_after") and not c.has("speedup") else None
    for about, gain in (("speedup", c.speedup), ("speedup of decoding", c.decode_speedup),
                        ("speedup at the load", c.speedup_at_load), ("tokens/s after over before", rates)):
        if kept and gain:
            found += refused(partial(refuse.beyond_bounds, speedup=gain, kept=kept), about, f"{gain:.2f}x",
                             f"at most {kept:.2f}x", IMPOSSIBLE, kept)
    return found


def fastest_products(c: Claim) -> float:
    """FLOP/s that no engine passes: of the table where it has the width, else the 16-bit peak in proportion."""
    tflops, bits = c.hardware.tflops, c.keep.weight_bits
    if bits >= 16:
        return tflops["bfloat16"] * 1e12
    return max(tflops.get("fp8", 0.0) if bits >= 8 else 0.0, tflops["bfloat16"] * 16 / max(bits, NARROWEST)) * 1e12


def rates(c: Claim) -> list[Finding]:
    """No rate above what reading the weights, and multiplying with them, allow."""
    if not c.has("model", "gpu"):
        return []
    kept, found = c.kept(), []
    if c.tok_s:
        bound, why = bounds(c, 1.0)
        found += judged("tokens/s, plain", c.tok_s, bound, why)
        if bound and c.tok_s > bound and kept and not c.tok_s_after:
            found += judged("tokens/s, if that was with a drafter", c.tok_s, *bounds(c, kept))
    if c.tok_s_after:
        bound, why = bounds(c, kept)
        found += judged("tokens/s, with the drafter", c.tok_s_after, bound, why)
        if c.batch and not kept and c.tok_s_after <= bound:
            found[-1] = Finding("tokens/s, with the drafter", f"{c.tok_s_after:,.0f}", "unknown", UNSAID,
                                "needs an acceptance length, or alpha and draft_length")
    return found


def bounds(c: Claim, kept: float | None) -> tuple[float, str]:
    """(tokens/s that no engine passes, why) where a cycle keeps so many tokens a row. None, or no batch: products
    alone bound it."""
    shape, keep = c.shape, c.keep
    flops = fastest_products(c)
    most = product_bound(shape, flops, keep.ranks)
    products = f"products at {flops / 1e12:,.0f} TFLOP/s allow {most:,.0f}"
    if not c.batch or not kept:
        return most, products
    bandwidth = c.hardware.bandwidth_tb_s * 1e12
    read = weight_read_bound(shape, keep, bandwidth, c.batch, kept)
    ms = 1e3 * weight_read_bytes(shape, keep) / bandwidth / keep.ranks
    why = f"reading the weights takes {ms:.1f} ms a step of {c.batch:g} rows"
    if kept > 1:
        why += f", which keeps at most {kept:.2f} tokens a row"
    apart = weight_read_bound(shape, keep, bandwidth, c.batch, kept, apart=True)
    if apart < read:
        why += f"; with the experts of one token; rows that choose experts on their own allow {apart:,.0f}"
    return (read, why) if read <= most else (most, products)


def judged(about: str, rate: float, bound: float, why: str) -> list[Finding]:
    """A rate that breaks no bound is possible, which is not to say that it was reached."""
    verdict, number = (IMPOSSIBLE, 4) if rate > bound else (POSSIBLE, 0)
    return [Finding(about, f"{rate:,.0f}", f"at most {bound:,.0f}", verdict, why, bound, number)]


def room(c: Claim) -> list[Finding]:
    """Weights, and the cache of the rows that are claimed, on the GPUs of a replica (11)."""
    if not c.has("model", "gpu"):
        return []
    needed = weights_per_gpu(c.shape, c.keep)
    if c.has("batch", "context"):
        needed += cache_per_gpu(c.shape, c.batch, c.context, c.keep)
    memory = c.hardware.memory_gb
    return refused(lambda: refuse.no_room(needed, memory * GIB, c.tensor_parallel, 0.5), "memory",
                   f"{c.tensor_parallel} x {memory:g} GB", f"at least {needed / 1e9:,.1f} GB each", IMPOSSIBLE,
                   needed / 1e9)


def replicas(c: Claim) -> list[Finding]:
    """Whole replicas, of GPUs that divide the heads (8)."""
    ranks, found = c.tensor_parallel, []
    if c.model:
        found += refused(lambda: refuse.split_replica(1, ranks, c.shape), "tensor parallelism", str(ranks),
                         "a divisor of the heads", IMPOSSIBLE)
    for name, claimed in (("GPUs before", c.gpus), ("GPUs after", c.gpus_after)):
        if claimed:
            whole = ranks * ceil(claimed / ranks)
            found += refused(partial(refuse.split_replica, claimed / ranks, ranks), name, f"{claimed:g}", str(whole),
                             IMPOSSIBLE, whole)
    return found


def memory(c: Claim) -> list[Finding]:
    """A drafter takes memory: its weights, and its own keys and values."""
    if c.drafter_gb is None or not c.model:
        return []
    draft, whole = c.drafting(), Format()
    weights = draft_memory(draft, c.shape, c.draft_length or 1, whole, 0, 0)
    token = draft_memory(draft, c.shape, c.draft_length or 1, whole, 1, 1) - weights
    own = (f"drafter of kind {draft.kind} for this target: weights {weights / 1e9:.2f} GB in bf16, {token / 1024:.1f} "
           "KiB of cache a token")
    short = c.drafter_gb < weights / 1e9 * (1 - ROUNDING) or (token > 0 and not c.drafter_gb)
    return [Finding("memory of the drafter", f"{c.drafter_gb:.2f} GB", f"{weights / 1e9:.2f} GB and its cache",
                    WRONG if short else HOLDS, own, weights / 1e9)]
