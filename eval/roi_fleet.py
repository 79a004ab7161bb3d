"""Several workloads on one cluster: each with its own acceptance, context, SLO and demand; totals, and what moves when
the drafter is dropped where it loses."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat

from eval import roi_refuse as refuse
from eval.roi_plan import PLAIN, Method, Planner, Point, check
from recipes.errors import ConfigError
from recipes.loader import parse_into, yaml_value
from recipes.schema import PositiveInt, opt


@dataclass
class Workload:
    """One workload of a fleet file, a YAML list. What it does not say is the recipe's `roi` section."""

    name: str = opt("", "what the table calls it")
    demand_tok_s: PositiveFloat | None = opt(None, "output tokens/s")
    input_tokens: PositiveFloat | None = opt(None, "mean length of a prompt")
    output_tokens: PositiveFloat | None = opt(None, "mean length of an answer")
    slo_ms: NonNegativeFloat | None = opt(None, "longest time a token")
    longest_tokens: NonNegativeFloat | None = opt(None, "cache kept for a request")
    domain: str | None = opt(None, "prompt kind")
    temperature: NonNegativeFloat | None = opt(None, "of the traffic")
    batch: PositiveInt | None = opt(None, "rows that its replicas run with the drafter; empty: the best under the SLO. "
                                          "Plain decoding is always planned at its best")
    report: str = opt("", "its acceptance; a path")


def read_fleet(path: Path) -> list[Workload]:
    """ConfigError for anything but a list of workloads with a name, a demand and a report each."""
    values = yaml_value(path, "list of workloads")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path}: must be a list of workloads")
    found = [parse_into(Workload, item, f"{path}: workload {number}") for number, item in enumerate(values)]
    for number, load in enumerate(found):
        for name in ("name", "demand_tok_s", "report"):
            if not getattr(load, name):
                raise ConfigError(f"{path}: workload {number}: {name} is missing")
    return found


def planner_of(base: Planner, load: Workload) -> Planner:
    """The planner with the workload's own traffic."""
    own = {k: v for k, v in asdict(load).items() if k not in ("name", "batch", "report") and v is not None}
    return replace(base, section=replace(base.section, **own))


def points_at(planner: Planner, load: Workload, method: Method) -> list[Point]:
    """The drafter's configurations: at the workload's own batch, where it names one. Refusal 5 where that is beyond the
    measured steps with every draft length."""
    if not load.batch:
        return planner.points(method)
    refuse.beyond_measured(load.batch * min(map(method.width, method.lengths())), planner.calibration.largest)
    return [planner.point(method, load.batch, K) for K in method.lengths() if planner.fits(method, load.batch, K)]


def one(base: Planner, load: Workload, method: Method, target: str) -> dict[str, Any]:
    """GPUs of a workload without the drafter, with it, and with whichever needs fewer. A refusal where its acceptance
    is of other conditions, its batch beyond what was measured, or all steps of one batch; ConfigError where neither
    side keeps the SLO."""
    planner = planner_of(base, load)
    check(planner, [method], target)
    if not planner.calibration.across_batches:  # the best plain configuration is not known
        refuse.unfair_saving(None, planner.section.slo_ms, planner.section.slo_ms)

    def gpus(points: list[Point]) -> tuple[int | None, int]:
        top = planner.best(points)
        return (planner.gpus(top, load.demand_tok_s), top.K) if top else (None, 0)

    (plain, _), (ours, K) = gpus(planner.points(PLAIN)), gpus(points_at(planner, load, method))
    if plain is None and ours is None:
        raise ConfigError(f"workload {load.name}: no configuration keeps its SLO within memory and what was measured"
                          + (f"; with the drafter at batch {load.batch}" if load.batch else ""))
    keeps = ours is not None and (plain is None or ours < plain)
    return {"name": load.name, "method": method.name, "K": K, "plain": plain, "speculative": ours,
            "best": ours if keeps else plain, "keeps_drafter": keeps}


def fleet(base: Planner, loads: list[tuple[Workload, Method]], target: str) -> dict[str, Any]:
    """The cluster: each workload, totals without the drafter, with it everywhere, with it only where it wins."""
    rows = [one(base, load, method, target) for load, method in loads]
    total: dict[str, int | None] = {}
    for side in ("plain", "speculative", "best"):
        values = [row[side] for row in rows]
        total[side] = None if None in values else sum(values)
    dropped = [row["name"] for row in rows if not row["keeps_drafter"]]
    price = base.section.price_per_gpu_hour
    found = {"workloads": rows, "gpus": total, "dropped": dropped,
             "moved_by_dropping": None if total["speculative"] is None else total["speculative"] - total["best"]}
    if price:
        refuse.constant_spot(base.section.price_kind, base.section.days, base.section.spot_held)
        found["dollars_a_day"] = {k: None if v is None else 24 * price * v for k, v in total.items()}
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """What the terminal shows."""
    def shown(value: int | None) -> str:
        return "SLO missed" if value is None else str(value)

    said = [f"{'workload':24} {'GPUs plain':>11} {'with drafter':>13} {'best':>5}  drafter"]
    for row in found["workloads"]:
        said.append(f"{row['name']:24} {shown(row['plain']):>11} {shown(row['speculative']):>13} "
                    f"{shown(row['best']):>5}  "
                    + (f"{row['method']}, K {row['K']}" if row["keeps_drafter"] else "dropped"))
    total = found["gpus"]
    said.append(f"{'total':24} {shown(total['plain']):>11} {shown(total['speculative']):>13} {shown(total['best']):>5}")
    if found["dropped"] and found["moved_by_dropping"] is not None:
        said.append(f"dropping the drafter on {', '.join(found['dropped'])} frees {found['moved_by_dropping']} GPUs "
                    "against using it everywhere")
    if "dollars_a_day" in found:
        dollars = {k: v for k, v in found["dollars_a_day"].items() if v is not None}
        said.append("$ a day: " + ", ".join(f"{k} {v:,.0f}" for k, v in dollars.items()))
    return said
