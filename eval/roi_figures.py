"""The arithmetic of a claim: dollars, shares, GPUs, hours, held against one another."""

from eval import roi_refuse as refuse
from eval.roi_claim import Claim
from eval.roi_finding import UNSAID, WRONG, Finding, compared, refused
from recipes import money

HEADROOM = 0.7
MONTHS, YEAR_HOURS = 12, 8760.0


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
    if not c.price_per_gpu_hour and c.has("tok_s", "tok_s_after", "dollars_per_million", "dollars_per_million_after"):
        found.append(compared("costs before over after", c.dollars_per_million / c.dollars_per_million_after,
                              c.tok_s_after / c.tok_s, "tokens/s after / before, at the same price", "{:.2f}x"))
    return found


def shares(c: Claim) -> list[Finding]:
    """The share that is saved: of the rates; of the two costs where these are all there is, or where they say something
    else; of $ an hour or GPUs, which are whole, where there is nothing better."""
    found: list[Finding] = []
    for before, after, about, why, always in (
            ("tok_s_after", "tok_s", "share saved", "1 - tokens/s before / after, at the same price", False),
            ("dollars_per_million", "dollars_per_million_after", "share saved, by the two costs",
             "1 - $ per million after / before", True),
            ("dollars_per_hour", "dollars_per_hour_after", "share saved, by $ an hour", "1 - after / before", False),
            ("gpus", "gpus_after", "share saved, by GPUs", "1 - GPUs after / before", False)):
        if c.has("saved_share", before, after) and (always or not found):
            one = compared(about, 100 * c.saved_share, 100 * (1 - getattr(c, after) / getattr(c, before)), why,
                           "{:.2f} %")
            found += [one] if not found or one.verdict == WRONG else []
    return found


def hours(c: Claim) -> list[Finding]:
    """GPUs of GPU hours; $ saved of hours where each token takes fewer of them."""
    found = []
    if c.has("gpu_hours", "gpus_of_hours"):
        found.append(compared("GPUs of these hours", c.gpus_of_hours, money.gpus_of_hours(c.gpu_hours, c.month_hours),
                              f"{c.gpu_hours:,.0f} GPU hours / {c.month_hours:g} hours a month", "{:.1f}"))
    if c.has("gpu_hours", "price_per_gpu_hour", "tok_s", "tok_s_after"):
        value = c.gpu_hours * c.price_per_gpu_hour * (1 - c.tok_s / c.tok_s_after)
        found += saved(c, value, MONTHS * value, "hours * price * (1 - tokens/s before / after)")
    return found


def saved(c: Claim, month: float, year: float, why: str) -> list[Finding]:
    """$ saved a month and a year, where they are claimed."""
    return [compared(f"$ saved a {span}", claimed, value, why, "${:,.0f}")
            for span, claimed, value in (("month", c.saved_a_month, month), ("year", c.saved_a_year, year))
            if claimed is not None]


def end_to_end(c: Claim) -> list[Finding]:
    """Amdahl's law on time; the speedup of the two rates."""
    found = []
    if c.has("decode_speedup", "decode_share", "speedup"):
        value = money.amdahl(c.decode_share, c.decode_speedup)
        found.append(compared("speedup end to end", c.speedup, value,
                              f"1 / ({1 - c.decode_share:.2g} + {c.decode_share:.2g} / {c.decode_speedup:g}), if the "
                              "shares are of time; shares of tokens say nothing without both rates", "{:.2f}x"))
    if c.has("speedup", "tok_s", "tok_s_after") and not elsewhere(c):
        found.append(compared("speedup of the two rates", c.speedup, c.tok_s_after / c.tok_s,
                              "tokens/s after / before", "{:.2f}x"))
    return found


def elsewhere(c: Claim) -> bool:
    """Whether the speedup was measured at another batch than the one that is served."""
    return c.has("speedup_batch", "batch") and c.speedup_batch != c.batch


def fleet(c: Claim) -> list[Finding]:
    """GPUs of a demand, their price, and what is saved; headroom."""
    found = []
    rates = {"": c.tok_s, "_after": c.tok_s_after}
    for suffix, rate in rates.items():
        claimed, when = getattr(c, f"gpus{suffix}"), "after" if suffix else "before"
        if c.demand_tok_s and rate and claimed:
            value = money.gpus(c.demand_tok_s, rate, c.tensor_parallel, c.headroom or 1.0)
            found.append(compared(f"GPUs {when}", claimed, value, f"whole replicas for {c.demand_tok_s:,.0f} tokens/s",
                                  "{:g}", exact=True))
        cost = getattr(c, f"dollars_per_hour{suffix}")
        if cost and claimed and c.price_per_gpu_hour:
            found.append(compared(f"$ an hour {when}", cost, claimed * c.price_per_gpu_hour, "GPUs * price", "${:.2f}"))
    if c.has("gpus", "gpus_after", "price_per_gpu_hour"):
        hour = (c.gpus - c.gpus_after) * c.price_per_gpu_hour
        found += saved(c, hour * c.month_hours, hour * YEAR_HOURS, f"{c.gpus - c.gpus_after:g} GPUs less for "
                       f"{c.month_hours:g} hours a month")
    if c.has("gpus_after", "gpus_matched", "speedup"):
        found += matched(c)
    return found + headroom(c)


def headroom(c: Claim) -> list[Finding]:
    """Fewer GPUs, all at their full rate at all times (11)."""
    if c.headroom is not None and c.headroom < 1:
        return []
    if c.has("demand_tok_s", "tok_s", "tok_s_after", "gpus_after"):
        b, a = (money.gpus(c.demand_tok_s, r, c.tensor_parallel, HEADROOM) for r in (c.tok_s, c.tok_s_after))
        return [Finding("headroom", "none", f"{b} -> {a} GPUs at {HEADROOM:g} of the rate", UNSAID,
                        "refused (11): every GPU at its full rate at all times: the arithmetic is of full load, no "
                        "plan", a, 11)]
    if c.headroom is None or not c.has("gpus_after"):
        return []
    return refused(lambda: refuse.no_room(0, 1, int(c.gpus_after), c.headroom), "headroom", f"{c.headroom:g}")


def matched(c: Claim) -> list[Finding]:
    """N GPUs match M: of which speedup, and at which load."""
    found = [compared("GPUs matched", c.gpus_matched, c.gpus_after * c.speedup, f"{c.gpus_after:g} GPUs * "
                      f"{c.speedup:g}x" + (f", a gain of batch {c.speedup_batch:g}" if c.speedup_batch else ""),
                      "{:g}")]
    about = "GPUs matched at the load served"
    if c.speedup_at_load:
        found.append(compared(about, c.gpus_matched, c.gpus_after * c.speedup_at_load, f"{c.gpus_after:g} GPUs * "
                              f"{c.speedup_at_load:g}x" + (f" at batch {c.batch:g}" if c.batch else ""), "{:g}"))
    elif elsewhere(c):
        found.append(Finding(about, f"{c.gpus_matched:g}", "unknown", UNSAID,
                             f"the gain is of batch {c.speedup_batch:g}, the load of batch {c.batch:g}, where it is "
                             "another: give speedup_at_load"))
    return found
