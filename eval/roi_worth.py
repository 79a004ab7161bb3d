"""One plan put together: the best configurations, money, days to pay back, and the sentences that say it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from eval import roi_refuse as refuse
from eval.roi_loads import by_load, chosen, chosen_by_load, sensitivity, winning
from eval.roi_plan import DRAWS, PLAIN, Method, Planner, Point, acceptance_factors, bounded, check
from recipes import money
from recipes.errors import ConfigError
from recipes.named_shapes import named

SCHEMA = "drafthouse.roi/1"
FAR = 2.0  # times the longest measured context, or a part of the shortest, from which the plan says so
ONE_BATCH = ("what is saved cannot be said (9): all steps are of one batch, and plain decoding may reach as much with "
             "another; measure the largest planned batch too")


def worth(planner: Planner, methods: list[Method], target: str,
          hours: Mapping[str, tuple[float, str]] | None = None) -> dict[str, Any]:
    """The plan as roi.json holds it. `hours`: GPU hours of each method's training and where they are from, as far as
    known. Raises Refusal where it would have to guess."""
    check(planner, methods, target)
    section = planner.section
    points = {m.name: planner.points(m) for m in [PLAIN, *methods]}
    best = {name: p for name, own in points.items() if (p := planner.best(own))}
    if planner.calibration.steps.profile == "engine":  # a CPU's measured bandwidth is no bound: it has caches
        for point in best.values():
            bounded(planner, point)
    curves = {m.name: planner.speedups(m) for m in methods}
    plan: dict[str, Any] = {
        "schema": SCHEMA, "target": target, "hardware": planner.calibration.steps.hardware.get("name", ""),
        "tensor_parallel": section.tensor_parallel, "traffic": asdict(section),
        "calibration": {"engine": planner.calibration.steps.engine, "steps": planner.calibration.fit.observations,
                        "largest": planner.calibration.largest, "batches": planner.calibration.batches,
                        "constants": asdict(planner.constants), "left_out": planner.calibration.left_out},
        "acceptance": {m.name: asdict(m.accepted) for m in methods},
        "best": {name: asdict(p) for name, p in best.items()},
        "points": {name: [asdict(p) for p in own] for name, own in points.items()},
        "curves": curves,
        "wins": {name: {"likely": winning(c), "sure": winning(c, "low")} for name, c in curves.items()},
        "choice": chosen(planner, methods), "notes": notes(planner, methods, best, target),
        "sides": {name: side(planner, p) for name, p in best.items()},
    }
    known = hours or {}
    plan["money"] = {m.name: value(planner, m, best, known.get(m.name)) for m in methods if m.name in best}
    across = planner.calibration.across_batches
    plan["loads"] = by_load(planner, best) if best and across else []
    plan["choice_by_load"] = chosen_by_load(plan["loads"])
    plan["sensitivity"] = ({m.name: sensitivity(planner, m) for m in methods if m.name in best}
                           if section.price_per_gpu_hour and across else {})
    plan["prose"] = prose(planner, methods, plan)
    return plan


def side(planner: Planner, point: Point) -> dict[str, Any]:
    """$ per million at full load, GPUs and $ per million at the demand, of one configuration."""
    s = planner.section
    found: dict[str, Any] = {"full_load": None, "at_demand": None}
    if s.price_per_gpu_hour:
        found["full_load"] = planner.dollars_at_full_load(point)
    if s.demand_tok_s:
        gpus = planner.gpus(point, s.demand_tok_s)
        found["at_demand"] = {"gpus": gpus, "prefill_gpus": planner.prefill_gpus(s.demand_tok_s)}
        if s.price_per_gpu_hour:
            found["at_demand"]["dollars_per_million"] = money.dollars_per_million(gpus * s.price_per_gpu_hour,
                                                                                  s.demand_tok_s)
    return found


def value(planner: Planner, method: Method, best: dict[str, Point],
          hours: tuple[float, str] | None) -> dict[str, Any]:
    """GPUs and dollars of one method beside plain decoding, each at its best under the same SLO."""
    s, ours, plain = planner.section, best[method.name], best.get(PLAIN.name)
    price = s.price_per_gpu_hour
    found: dict[str, Any] = {"full_load": {}, "at_demand": {}, "saving": None, "payback_days": None}
    for name, point in (("plain", plain), ("speculative", ours)):
        for key, figure in (side(planner, point) if point else {}).items():
            if figure is not None:
                found[key][name] = figure
    if not plain:
        return found | {"no_saving": "no plain configuration keeps the SLO: what is saved against it cannot be said"}
    if not planner.calibration.across_batches:
        return found | {"no_saving": ONE_BATCH}
    refuse.unfair_saving(plain.tok_s, s.slo_ms, s.slo_ms)
    draws = planner.calibration.fit.draws(DRAWS)
    found["saving"] = {"share": 1 - planner.token_seconds(ours) / planner.token_seconds(plain),
                       "interval": planner.saving(method, draws, acceptance_factors(method), ours, plain)}
    if s.demand_tok_s:
        before, after = (found["at_demand"][n]["gpus"] for n in ("plain", "speculative"))
        found["gpus_saved"] = before - after
        if price:
            found["saved_in_days"] = {"days": s.days, "dollars": 24 * s.days * price * (before - after)}
        if hours:
            found["training"] = {"gpu_hours": hours[0], "from": hours[1]}
            prices = (s.training_price_per_gpu_hour or price, price) if price else (1.0, 1.0)
            found["payback_days"] = money.payback_days(hours[0], before, after, *prices)
    return found


def notes(planner: Planner, methods: list[Method], best: dict[str, Point], target: str) -> list[str]:
    """What a reader must know to use the figures."""
    s, found, calibration = planner.section, [], planner.calibration
    if not calibration.across_batches:
        found.append(f"all steps were measured at batch {calibration.batches[0]}: nothing is planned at another one; "
                     "measure the largest planned batch with its longest draft too")
    found += carried(planner, methods, target)
    found.append(f"no step of more than {refuse.WIDEST * calibration.largest:,.0f} verified tokens is planned, twice "
                 "the largest measured")
    if not s.price_per_gpu_hour:
        found.append("no price was given: no dollars; set roi.price_per_gpu_hour"
                     + ("; days to pay back are counted in GPU hours, whatever they cost"
                        if s.training_price_per_gpu_hour else ""))
    if s.price_kind == "spot":
        found.append(f"a spot price is held constant over {s.days:g} days")
    for name, point in best.items():
        if at_limit(planner, point):
            found.append(f"{shown(name)}: batch {point.batch} is the largest within what was measured, so it may have "
                         "a better configuration; measure a larger step before choosing by it")
    for method in [PLAIN, *methods]:
        if method.name not in best:
            kept_out = f"keeps the SLO of {s.slo_ms:g} ms a token" if s.slo_ms else "fits into memory"
            found.append(f"{shown(method.name)}: no configuration within what was measured {kept_out}")
    for method in methods:
        if not method.accepted.requests:
            found.append(f"{method.name}: no p99, since the acceptance length of each request was not recorded")
        elif method.accepted.requests < refuse.TAIL_REQUESTS:
            found.append(f"{method.name}: no p99, since {method.accepted.requests:,} requests are fewer than "
                         f"{refuse.TAIL_REQUESTS:,}")
    if calibration.steps.acceptance == "synthetic":
        found.append("step times were measured with synthetic acceptance, which is fine for them; acceptance was "
                     "measured apart")
    return found


def carried(planner: Planner, methods: list[Method], target: str) -> list[str]:
    """Where the constants are used for something else than they were measured with."""
    steps, s, found = planner.calibration.steps, planner.section, []
    if not same_sizes(steps.target.get("model", ""), target):
        found.append(f"the steps are of {steps.target.get('model')}: an engine's constants carry over to another "
                     "target, within what docs/roi.md states")
    timed, planned = steps.place().keep, planner.place.keep
    for what, there, here in (("weights", timed.weight_bits, planned.weight_bits),
                              ("a cache", timed.cache_bits, planned.cache_bits)):
        if round(there) != round(here):
            found.append(f"the steps are of {what} of {there:g} bits, the plan of {here:g}: other formats have other "
                         "kernels, whose share of the peak was not measured")
    measured = [p.context for p in steps.points if not p.held_out]
    served = s.input_tokens + s.output_tokens / 2
    if not min(measured) / FAR <= served <= max(measured) * FAR:
        found.append(f"the traffic's mean context of {served:,.0f} tokens is far from the {min(measured):,.0f} to "
                     f"{max(measured):,.0f} of the steps: measure there")
    kind = steps.draft().kind
    for method in methods:
        if method.draft.kind not in (kind, "none"):
            found.append(f"{method.name}: the steps are of {kind}, so its own drafting, {method.draft.kind}, was not "
                         "timed: its speed rests on the model")
    return found


def same_sizes(timed: str, target: str) -> bool:
    """Whether two names are of one target, or of one entry of the table: a step takes what its sizes take."""
    try:
        return timed == target or named(timed) == named(target)
    except ConfigError:
        return False


def shown(name: str) -> str:
    """A method's name for a reader."""
    return "no drafter" if name == PLAIN.name else name


def at_limit(planner: Planner, point: Point) -> bool:
    """Whether it is the measured range, and not memory, that keeps a larger batch out of the plan."""
    more = next((b for b in planner.candidates if b > point.batch), None)
    return (more is not None and planner.memory(PLAIN, more) <= planner.section.memory_share * planner.memory_bytes
            and more * (point.K + 1) > refuse.WIDEST * planner.calibration.largest)


def spans(intervals: list[list[int]]) -> str:
    return ", ".join(f"{a} to {b}" if a != b else str(a) for a, b in intervals)


def looked_at(curve: list[dict[str, Any]]) -> str:
    first, last = curve[0]["batch"], curve[-1]["batch"]
    return f"batches {first} to {last} were" if first < last else f"batch {first} alone was"


def prose(planner: Planner, methods: list[Method], plan: dict[str, Any]) -> list[str]:
    """What a manager reads: a sentence for each thing that is decided."""
    s, said = planner.section, []
    for method in methods:
        wins, curve = plan["wins"][method.name], plan["curves"][method.name]
        if not curve:
            said.append(f"{method.name}: no batch fits into memory and the measured range.")
            continue
        if wins["likely"]:
            sure = f", surely at {spans(wins['sure'])}" if wins["sure"] else ", nowhere beyond doubt"
            said.append(f"{method.name} is faster than plain decoding at batches {spans(wins['likely'])}{sure}; "
                        f"{looked_at(curve)} looked at.")
        else:
            said.append(f"{method.name} is slower than plain decoding; {looked_at(curve)} looked at.")
        worth_of = plan["money"].get(method.name)
        if not worth_of:
            continue
        if not worth_of["saving"]:
            said.append(f"{method.name}: {worth_of['no_saving']}.")
            continue
        share, (low, high) = worth_of["saving"]["share"], worth_of["saving"]["interval"]
        ours, plain = plan["best"][method.name], plan["best"][PLAIN.name]
        slo = f"under {s.slo_ms:g} ms a token" if s.slo_ms else "without a limit on latency"
        verb = f"{100 * share:.0f} % less" if share > 0 else f"{-100 * share:.0f} % more"
        said.append(f"With {method.name} at its best {slo} (batch {ours['batch']}, K {ours['K']}) a token costs "
                    f"{verb} GPU time than at the best plain configuration (batch {plain['batch']}); saved: "
                    f"{100 * share:.0f} %, 90 % interval {100 * low:.0f} to {100 * high:.0f} %.")
        if any(note.startswith(f"{method.name}: batch ") for note in plan["notes"]):
            said.append(f"For {method.name} that batch is the largest that the measured steps allow: before it is "
                        "turned down, measure a larger one.")
        said += _demand(s, method.name, worth_of)
    return said


def _demand(s, name: str, worth_of: dict[str, Any]) -> list[str]:
    at = worth_of["at_demand"]
    if not at:
        return []
    line = (f"For {s.demand_tok_s:,.0f} tokens/s with {100 * s.headroom:.0f} % of each replica planned with: "
            f"{at['plain']['gpus']:,} GPUs without a drafter, {at['speculative']['gpus']:,} with {name}")
    if "saved_in_days" in worth_of:
        dollars = worth_of["saved_in_days"]["dollars"]
        line += f"; ${abs(dollars):,.0f} {'less' if dollars >= 0 else 'more'} in {s.days:g} days"
    found = [line + "."]
    if worth_of.get("training"):
        days, hours = worth_of["payback_days"], worth_of["training"]["gpu_hours"]
        found.append(f"Training {name} took {hours:,.1f} GPU hours ({worth_of['training']['from']}): "
                     + (f"paid back in {days:,.1f} days." if days is not None else
                        "never paid back at this demand, since no GPU is saved."))
    return found
