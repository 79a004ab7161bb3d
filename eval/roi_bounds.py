"""What physics allows of a claim: tokens a cycle, weights that are read, products, memory, whole replicas."""

import math
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True)
class Bound:
    """tokens/s that no engine passes, and why. `apart`: that rows which choose experts on their own do not pass."""

    most: float
    why: str
    apart: float = math.inf

    def judge(self, about: str, rate: float) -> Finding:
        """A rate that breaks no bound is possible, which is not to say that it was reached. One that needs rows to
        choose the same experts cannot be judged without knowing them."""
        verdict = IMPOSSIBLE if rate > self.most else UNSAID if rate > self.apart else POSSIBLE
        return Finding(about, f"{rate:,.0f}", f"at most {self.most:,.0f}", verdict, self.why, self.most,
                       4 if verdict == IMPOSSIBLE else 0)


def rates(c: Claim) -> list[Finding]:
    """No rate above what reading the weights, and multiplying with them, allow."""
    if not c.has("model", "gpu"):
        return []
    kept, found = c.kept(), []
    if c.tok_s:
        plain = bound_of(c, 1.0)
        found.append(plain.judge("tokens/s, plain", c.tok_s))
        if c.tok_s > plain.most and kept and not c.tok_s_after:
            found.append(bound_of(c, kept).judge("tokens/s, if that was with a drafter", c.tok_s))
    if c.tok_s_after:
        drafted = bound_of(c, kept)
        if c.batch and not kept and c.tok_s_after <= drafted.most:
            found.append(Finding("tokens/s, with the drafter", f"{c.tok_s_after:,.0f}", "unknown", UNSAID,
                                 "needs an acceptance length, or alpha and draft_length"))
        else:
            found.append(drafted.judge("tokens/s, with the drafter", c.tok_s_after))
    return found


def bound_of(c: Claim, kept: float | None) -> Bound:
    """Of a cycle that keeps so many tokens a row. None, or no batch: products alone bound it."""
    shape, keep = c.shape, c.keep
    flops = fastest_products(c)
    products = product_bound(shape, flops, keep.ranks)
    by_products = Bound(products, f"products at {flops / 1e12:,.0f} TFLOP/s allow {products:,.0f}")
    if not c.batch or not kept:
        return by_products
    bandwidth = c.hardware.bandwidth_tb_s * 1e12
    read, apart = (weight_read_bound(shape, keep, bandwidth, c.batch, kept, one) for one in (False, True))
    ms = 1e3 * weight_read_bytes(shape, keep) / bandwidth / keep.ranks
    why = f"reading the weights takes {ms:.1f} ms a step of {c.batch:g} rows"
    if kept > 1:
        why += f", which keeps at most {kept:.2f} tokens a row"
    if apart < read:
        why += f", if all choose the same experts; rows that choose on their own allow {apart:,.0f}"
    return Bound(read, why, apart) if read <= products else by_products


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
            whole = ranks * math.ceil(claimed / ranks)
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
