"""What a claim may not rest on: the planner's refusals, held against what the claim says of itself."""

import re
from collections.abc import Iterator

from eval import roi_refuse as refuse
from eval.roi_claim import Claim
from eval.roi_finding import Finding, refused
from eval.roi_refuse import Conditions
from recipes.named_shapes import named

SPOT = {"spot", "preemptible", "interruptible", "bid"}
YEAR_DAYS = 365.0


def moved(c: Claim) -> Iterator[Finding]:
    """1: acceptance of other conditions than the traffic's."""
    bits = c.weight_bits or (named(c.model).get("bits", 16) if c.model and c.acceptance_bits else None)
    for about, field, here, there in (
            ("domain", "domain", c.acceptance_domain, c.traffic_domain),
            ("temperature", "temperature", c.acceptance_temperature, c.traffic_temperature),
            ("target", "target", c.acceptance_target, c.traffic_target or c.model),
            ("weight bits", "weight_bits", c.acceptance_bits, bits),
            ("context", "context", span(c.acceptance_context), span(c.traffic_context))):
        if here in (None, "") or there in (None, ""):
            continue
        traffic = {"context": (0.0, 0.0)} | {field: there}
        yield from refused(lambda h=here, t=traffic, f=field: refuse.moved_acceptance(
            Conditions(**{f: h}), Conditions(**t)), about)


def span(value: float | list[float] | None) -> tuple[float, float] | None:
    """[shortest, longest]; one figure is both."""
    return None if value is None else (value[0], value[1]) if isinstance(value, list) else (value, value)


def sides(c: Claim) -> Iterator[Finding]:
    """3 and 9: both sides of a comparison on one engine, the plain one at its best, under one SLO."""
    both = [name for name in ("engine", "engine_version", "flags") if c.has(name, f"{name}_after")]
    yield from refused(lambda: refuse.other_engine({n: getattr(c, n) for n in both},
                                                   {n: getattr(c, f"{n}_after") for n in both}), "engines")
    saves = (c.has("saved_share") or c.has("saved_a_month") or c.has("saved_a_year") or c.has("gpus", "gpus_after")
             or c.has("dollars_per_million", "dollars_per_million_after"))
    fixed = c.best_plain is None and saves and (c.has("batch") or c.has("speedup_batch"))
    if c.best_plain is False or fixed:
        yield from refused(lambda: refuse.unfair_saving(None, None, None), "baseline")
    if c.has("slo_ms", "slo_ms_after"):
        yield from refused(lambda: refuse.unfair_saving(1.0, c.slo_ms, c.slo_ms_after), "SLO")


def measured(c: Claim) -> Iterator[Finding]:
    """2, 5, 6, 7 and 10: what a figure must have been measured with."""
    if c.step_times is not None:
        yield from refused(lambda: refuse.unmeasured_steps(c.step_times), "step times")
    if c.has("measured_tokens", "batch", "draft_length"):
        yield from refused(lambda: refuse.beyond_measured(c.batch * (c.draft_length + 1), c.measured_tokens),
                           "verified tokens")
    yield from refused(lambda: refuse.made_up_acceptance(c.acceptance_mode.strip().lower(),
                                                         c.acceptance_prompts.strip().lower()), "acceptance")
    if c.p99_ms is not None:
        yield from refused(lambda: refuse.thin_tail(c.requests or 0, c.by_request is not False), "p99")
    if c.crossover_billions is not None:
        yield from refused(lambda: refuse.size_crossover(True), "crossover")


def priced(c: Claim) -> Iterator[Finding]:
    """12: a spot price that is held."""
    kind = re.sub(r"[^a-z]", "", c.price_kind.lower())
    days = max(c.days, YEAR_DAYS if c.saved_a_year is not None else 0.0)
    if kind:
        yield from refused(lambda: refuse.constant_spot("spot" if kind in SPOT else kind, days, c.spot_held), "price")
