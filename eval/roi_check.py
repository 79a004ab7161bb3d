"""`make roi ARGS="check CLAIM"`: figures of an offer or an article, held against one another and against physics.

A claim is a YAML file (one mapping or a list) or words key=value on the command line. Every rule speaks only where the
claim has the figures that it needs; a claim that no rule can judge is said to be so, never passed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from eval import roi_refuse as refuse
from eval.roi_claim import Claim
from eval.roi_validate import eagle_size, hardware_named
from recipes import money
from recipes.speculation import kept_if_independent, weight_read_bound, weight_read_bytes

ROUNDING = 0.02  # a claimed figure within it of ours was only rounded
HEADROOM = 0.7
HOLDS, WRONG, IMPOSSIBLE, UNSAID = "holds", "wrong", "impossible", "cannot be said"


@dataclass(frozen=True)
class Finding:
    """One figure: what was claimed, what it comes to, and the judgement."""

    about: str
    claimed: str
    correct: str
    verdict: str
    why: str = ""
    value: float | None = None  # the corrected figure


def compared(about: str, claimed: float, value: float, why: str, unit: str = "{:,.3g}") -> Finding:
    verdict = HOLDS if abs(claimed / value - 1) <= ROUNDING else WRONG
    return Finding(about, unit.format(claimed), unit.format(value), verdict, why, value)


def costs(c: Claim) -> list[Finding]:
    """$ per million from price and rate, of each side; what the claimed dollars would need."""
    found = []
    for suffix, side in (("", "plain"), ("_after", "with the drafter")):
        rate, dollars = getattr(c, f"tok_s{suffix}"), getattr(c, f"dollars_per_million{suffix}")
        if c.price_per_gpu_hour and rate and dollars:
            price = c.price_per_gpu_hour * c.tensor_parallel
            value, needed = money.dollars_per_million(price, rate), money.implied_rate(price, dollars)
            found.append(compared(f"$ per million, {side}", dollars, value,
                                  f"${price:g} an hour / ({rate:,.0f} tokens/s * 0.0036); the claimed ${dollars:g} "
                                  f"would be {needed:,.0f} tokens/s", "${:.3f}"))
    if c.has("tok_s", "tok_s_after", "saved_share"):
        found.append(compared("share saved", 100 * c.saved_share, 100 * (1 - c.tok_s / c.tok_s_after),
                              "1 - tokens/s before / after, at the same price", "{:.2f} %"))
    return found


def hours(c: Claim) -> list[Finding]:
    """GPUs of GPU hours; $ saved of hours where each token takes fewer of them."""
    found = []
    if c.has("gpu_hours", "gpus_of_hours"):
        found.append(compared("GPUs of these hours", c.gpus_of_hours, money.gpus_of_hours(c.gpu_hours, c.month_hours),
                              f"{c.gpu_hours:,.0f} GPU hours / {c.month_hours:g} hours a month", "{:.1f}"))
    if c.has("gpu_hours", "price_per_gpu_hour", "tok_s", "tok_s_after", "saved_a_month"):
        value = c.gpu_hours * c.price_per_gpu_hour * (1 - c.tok_s / c.tok_s_after)
        found.append(compared("$ saved a month", c.saved_a_month, value,
                              "hours * price * (1 - tokens/s before / after)", "${:,.0f}"))
    return found


def end_to_end(c: Claim) -> list[Finding]:
    """Amdahl's law on time."""
    if not c.has("decode_speedup", "decode_share", "speedup"):
        return []
    value = money.amdahl(c.decode_share, c.decode_speedup)
    return [compared("speedup end to end", c.speedup, value,
                     f"1 / ({1 - c.decode_share:.2g} + {c.decode_share:.2g} / {c.decode_speedup:g}), if the shares are "
                     "of time; shares of tokens say nothing without both rates", "{:.2f}x")]


def cycles(c: Claim) -> list[Finding]:
    """Tokens a cycle, and the speedup that they allow as a chain and in one pass."""
    found = []
    if c.has("alpha", "draft_length", "draft_times_faster", "speedup"):
        kept, cost = kept_if_independent(c.alpha, c.draft_length), 1 / c.draft_times_faster
        chain, once = kept / (1 + c.draft_length * cost), kept / (1 + cost)
        said = (f"{kept:.2f} tokens a cycle: {chain:.2f}x as a chain of {c.draft_length} passes, {once:.2f}x in one "
                "pass, verification free")
        near = min((chain, once), key=lambda x: abs(x / c.speedup - 1))
        verdict = HOLDS if abs(near / c.speedup - 1) <= ROUNDING else WRONG
        found.append(Finding("speedup of this drafter", f"{c.speedup:.2f}x", f"{chain:.2f}x or {once:.2f}x", verdict,
                             said, chain))
    kept = c.acceptance_length or (kept_if_independent(c.alpha, c.draft_length)
                                   if c.has("alpha", "draft_length") else None)
    if kept and c.speedup:
        found += refused(lambda: refuse.beyond_bounds(speedup=c.speedup, kept=kept), "speedup", f"{c.speedup:.2f}x",
                         f"at most {kept:.2f}x", IMPOSSIBLE, kept)
    return found


def weights_read(c: Claim) -> list[Finding]:
    """No rate above what reading the weights allows."""
    if not c.has("model", "gpu", "batch"):
        return []
    bandwidth = hardware_named(c.gpu).bandwidth_tb_s * 1e12
    kept = c.acceptance_length or (kept_if_independent(c.alpha, c.draft_length)
                                   if c.has("alpha", "draft_length") else 1.0)
    ms = 1e3 * weight_read_bytes(c.shape, c.keep, c.batch) / bandwidth / c.tensor_parallel
    found = []
    for rate, times, side in ((c.tok_s, 1.0, "plain"), (c.tok_s_after, kept, "with the drafter")):
        if rate:
            bound = weight_read_bound(c.shape, c.keep, bandwidth, c.batch, times)
            why = f"reading the weights takes {ms:.1f} ms a step of {c.batch:g} rows"
            if times > 1:
                why += f", which keeps at most {times:.2f} tokens a row"
            over = rate > bound
            found.append(Finding(f"tokens/s, {side}", f"{rate:,.0f}", f"at most {bound:,.0f}",
                                 IMPOSSIBLE if over else HOLDS, why, bound))
            if over and times == 1 and kept > 1 and not c.tok_s_after:
                found.append(Finding("tokens/s, if that was with a drafter", f"{rate:,.0f}",
                                     f"at most {bound * kept:,.0f}", HOLDS if rate <= bound * kept else IMPOSSIBLE,
                                     f"{kept:.2f} tokens a cycle", bound * kept))
    if found and c.has("tok_s_after") and kept == 1.0:
        found[-1] = Finding("tokens/s, with the drafter", f"{c.tok_s_after:,.0f}", "unknown", UNSAID,
                            "needs an acceptance length, or alpha and draft_length")
    return found


def fleet(c: Claim) -> list[Finding]:
    """GPUs of a demand, their price, and what is saved; headroom."""
    found = []
    rates = {"": c.tok_s, "_after": c.tok_s_after}
    for suffix, rate in rates.items():
        claimed = getattr(c, f"gpus{suffix}")
        if c.demand_tok_s and rate and claimed:
            value = money.gpus(c.demand_tok_s, rate, c.tensor_parallel, c.headroom or 1.0)
            found.append(compared(f"GPUs {'after' if suffix else 'before'}", claimed, value,
                                  f"whole replicas for {c.demand_tok_s:,.0f} tokens/s", "{:.0f}"))
        cost = getattr(c, f"dollars_per_hour{suffix}")
        if cost and claimed and c.price_per_gpu_hour:
            found.append(compared(f"$ an hour {'after' if suffix else 'before'}", cost, claimed * c.price_per_gpu_hour,
                                  "GPUs * price", "${:.2f}"))
    if c.has("gpus", "gpus_after", "price_per_gpu_hour", "saved_a_month"):
        value = (c.gpus - c.gpus_after) * c.price_per_gpu_hour * c.month_hours
        found.append(compared("$ saved a month", c.saved_a_month, value, f"{c.gpus - c.gpus_after} GPUs less for "
                              f"{c.month_hours:g} hours", "${:,.0f}"))
    if c.has("demand_tok_s", "tok_s", "tok_s_after", "gpus_after") and not c.headroom:
        b, a = (money.gpus(c.demand_tok_s, r, c.tensor_parallel, HEADROOM) for r in (c.tok_s, c.tok_s_after))
        found.append(Finding("headroom", "none", f"{b} -> {a} GPUs at {HEADROOM:g} of the rate", UNSAID,
                             "every GPU at its full rate at all times: the arithmetic is of full load, no plan", a))
    if c.has("gpus_after", "gpus_matched", "speedup"):
        found += matched(c)
    return found


def matched(c: Claim) -> list[Finding]:
    """N GPUs match M: of which speedup, and at which load."""
    own = c.gpus_after * c.speedup
    found = [compared("GPUs matched", c.gpus_matched, own, f"{c.gpus_after} GPUs * {c.speedup:g}x"
                      + (f", a gain of batch {c.speedup_batch:g}" if c.speedup_batch else ""), "{:.0f}")]
    if c.speedup_at_load:
        found.append(compared("GPUs matched at the load served", c.gpus_matched, c.gpus_after * c.speedup_at_load,
                              f"{c.gpus_after} GPUs * {c.speedup_at_load:g}x"
                              + (f" at batch {c.batch:g}" if c.batch else ""), "{:.0f}"))
    return found


def replicas(c: Claim) -> list[Finding]:
    """Whole replicas, of GPUs that divide the heads."""
    found = []
    if c.model:
        found += refused(lambda: refuse.split_replica(1, c.tensor_parallel, c.shape), "tensor parallelism",
                         str(c.tensor_parallel), "a divisor of the heads", IMPOSSIBLE)
    for name, claimed in (("GPUs before", c.gpus), ("GPUs after", c.gpus_after)):
        if claimed and claimed % c.tensor_parallel:
            whole = c.tensor_parallel * ceil(claimed / c.tensor_parallel)
            found.append(Finding(name, str(claimed), str(whole), IMPOSSIBLE,
                                 f"whole replicas of {c.tensor_parallel} GPUs", whole))
    return found


def memory(c: Claim) -> list[Finding]:
    """A drafter takes memory: its weights, and its own keys and values."""
    if c.drafter_gb is None or not c.model:
        return []
    size = eagle_size(c.shape)
    weights, token = size.parameters * 2 / 1e9, 2 * size.kv_heads * size.head_dim * size.layers * 2 / 1024
    own = f"an EAGLE-3 drafter of this target: weights {weights:.2f} GB in bf16, {token:.1f} KiB of cache a token"
    if c.drafter_gb < weights * (1 - ROUNDING):
        return [Finding("memory of the drafter", f"{c.drafter_gb:.2f} GB", f"{weights:.2f} GB and its cache", WRONG,
                        own, weights)]
    return [Finding("memory of the drafter", f"{c.drafter_gb:.2f} GB", f"{weights:.2f} GB and its cache", HOLDS, own,
                    weights)]


def grounds(c: Claim) -> list[Finding]:
    """What such a statement may not rest on."""
    rules: list[tuple[bool, Callable[[], None], str]] = [
        (bool(c.engine or c.engine_after),
         lambda: refuse.other_engine({"engine": c.engine}, {"engine": c.engine_after}), "engines"),
        (c.acceptance_mode != "measured", lambda: refuse.made_up_acceptance(c.acceptance_mode), "acceptance"),
        (bool(c.acceptance_domain and c.traffic_domain), lambda: refuse.moved_acceptance(
            refuse.Conditions(c.acceptance_domain), refuse.Conditions(c.traffic_domain, context=(0, 0))), "domain"),
        (c.best_plain is False, lambda: refuse.unfair_saving(None, None, None), "baseline"),
        (c.crossover_billions is not None, lambda: refuse.size_crossover(True), "crossover"),
        (bool(c.price_kind), lambda: refuse.constant_spot(c.price_kind, c.days, False), "price"),
    ]
    return [f for applies, rule, about in rules if applies for f in refused(rule, about, "", "", UNSAID)]


def refused(rule: Callable[[], None], about: str, claimed: str, correct: str, verdict: str,
            value: float | None = None) -> list[Finding]:
    """The finding of a rule that refuses; none where it lets pass."""
    try:
        rule()
    except refuse.Refusal as error:
        return [Finding(about, claimed, correct, verdict, str(error), value)]
    return []


RULES = (costs, hours, end_to_end, cycles, weights_read, fleet, replicas, memory, grounds)


def check(claim: Claim) -> list[Finding]:
    """Everything that can be said about a claim."""
    found = [finding for rule in RULES for finding in rule(claim)]
    return found or [Finding("the claim", "", "", UNSAID, "no two of its figures can be held against each other")]


def lines(claim: Claim, found: list[Finding]) -> list[str]:
    """What the terminal shows of one claim."""
    said = [claim.name]
    for f in found:
        figures = f"{f.claimed} -> {f.correct}" if f.claimed or f.correct else ""
        said.append(f"  {f.verdict:14} {f.about}: {figures}{' ' if figures else ''}({f.why})")
    return said
