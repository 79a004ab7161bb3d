"""A plan across batches, loads and inputs: where a drafter wins, the best method at each, what moves the saving."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from eval.roi_plan import PLAIN, Method, Planner, Point
from recipes import money


def winning(curve: list[dict[str, float]], key: str = "speedup") -> list[list[int]]:
    """Intervals [from, to] of batches where `key` is above 1: as many as there are, since curves are not monotone."""
    runs: list[list[int]] = []
    for before, row in pairwise([None, *curve]):
        if row[key] <= 1:
            continue
        if before and before[key] > 1:
            runs[-1][1] = row["batch"]
        else:
            runs.append([row["batch"], row["batch"]])
    return runs


def chosen(planner: Planner, methods: list[Method]) -> list[dict[str, Any]]:
    """The best method at each batch, plain decoding included, as intervals of batches; `left_out`: methods that memory
    or the largest measured step keep from such a batch, so that nothing is said of them there; `keeps_slo`: false
    where no method keeps the SLO, and the fastest is named."""
    found: list[dict[str, Any]] = []
    for batch in planner.batches(PLAIN, 0):
        rows = [planner.point(m, batch, K) for m in [PLAIN, *methods] for K in m.lengths()
                if batch in planner.batches(m, K)]
        top = planner.best(rows) or max(rows, key=lambda p: p.tok_s)
        left_out = sorted({m.name for m in methods} - {p.method for p in rows})
        same = {"method": top.method, "K": top.K, "left_out": left_out, "keeps_slo": planner.meets(top)}
        if found and all(found[-1][key] == value for key, value in same.items()):
            found[-1]["to"] = batch
        else:
            found.append({"from": batch, "to": batch, "tok_s": top.tok_s, **same})
    return found


def by_load(planner: Planner, best: dict[str, Point]) -> list[dict[str, Any]]:
    """GPUs and $ per million at each load, from a tenth of a plain replica to thirty, or to half more than the demand;
    the method that takes fewest GPUs, plain decoding where it ties."""
    unit, rows = best[PLAIN.name].tok_s if PLAIN.name in best else max(p.tok_s for p in best.values()), []
    for load in np.geomspace(0.1 * unit, max(30 * unit, 1.5 * planner.section.demand_tok_s), 60):
        gpus = {name: planner.gpus(p, load) for name, p in best.items()}
        price = planner.section.price_per_gpu_hour
        top = min(gpus, key=lambda name: (gpus[name], name != PLAIN.name, -best[name].tok_s))
        rows.append({"tok_s": float(load), "gpus": gpus, "best": top,
                     "dollars": {n: money.dollars_per_million(g * price, load) for n, g in gpus.items()}})
    return rows


def chosen_by_load(loads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as intervals of loads in which one method takes the fewest GPUs. Whole replicas make them narrow."""
    found: list[dict[str, Any]] = []
    for row in loads:
        if not found or found[-1]["method"] != row["best"]:
            found.append({"method": row["best"], "from": row["tok_s"], "gpus": row["gpus"][row["best"]]})
        found[-1] |= {"to": row["tok_s"], "gpus_to": row["gpus"][row["best"]]}
    return found


def sensitivity(planner: Planner, method: Method) -> list[dict[str, Any]]:
    """Saving in $ per million at full load, each side at its best again, when one input moves."""
    def saved(p: Planner, factor: float = 1.0) -> float | None:
        plain, ours = p.best(p.points(PLAIN)), p.best(p.points(method, factor))
        if not plain or not ours:
            return None
        return p.dollars_at_full_load(plain) - p.dollars_at_full_load(ours)

    def moved(**changes: float) -> Planner:
        return replace(planner, section=replace(planner.section, **changes))

    s = planner.section
    cases: list[tuple[str, Callable[[], float | None], Callable[[], float | None]]] = [
        ("acceptance length -10 %, +10 %", lambda: saved(planner, 0.9), lambda: saved(planner, 1.1)),
        ("price -20 %, +20 %", lambda: saved(moved(price_per_gpu_hour=0.8 * s.price_per_gpu_hour)),
         lambda: saved(moved(price_per_gpu_hour=1.2 * s.price_per_gpu_hour))),
        ("context half, double", lambda: saved(scaled(planner, 0.5)), lambda: saved(scaled(planner, 2.0))),
        ("answers half, double", lambda: saved(moved(output_tokens=0.5 * s.output_tokens)),
         lambda: saved(moved(output_tokens=2 * s.output_tokens))),
    ]
    base = saved(planner)
    return [{"input": name, "low": low(), "base": base, "high": high()} for name, low, high in cases]


def scaled(planner: Planner, factor: float) -> Planner:
    """The same with prompts longer or shorter, acceptance unchanged (which no plan may assume: refusal 1)."""
    s = planner.section
    return replace(planner, section=replace(s, input_tokens=factor * s.input_tokens,
                                            longest_tokens=factor * s.longest_tokens))
