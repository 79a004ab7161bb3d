"""What a drafter is worth on given hardware, for given traffic: arithmetic on a calibration and measured acceptance.

Both sides are held to the same SLO, limited by the same memory and planned with whole replicas; the plain side is the
best plain configuration, not the one at the drafter's batch. Nothing is planned beyond what was measured.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from eval import roi_refuse as refuse
from eval.roi_files import Acceptance, Calibration
from eval.roi_refuse import Conditions
from recipes import money
from recipes.cost import cache_per_gpu, weights_per_gpu
from recipes.schema import Roi
from recipes.speculation import (
    Constants,
    Draft,
    Place,
    Step,
    cycle_seconds,
    one_layer,
    prompt_seconds,
    step_seconds,
    weight_read_bound,
)

BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
DRAWS = 100
LEVEL = 0.9


@dataclass(frozen=True)
class Method:
    """A way to decode: plain, or a drafter with its measured acceptance."""

    name: str
    draft: Draft
    accepted: Acceptance | None = None

    def lengths(self) -> range:
        """Draft lengths that may be planned: up to the measured one; that one alone where acceptance is known for no
        shorter draft."""
        if not self.accepted:
            return range(1)
        longest = self.accepted.longest
        return range(longest if self.accepted.tokens_per_pass else 1, longest + 1)

    def width(self, K: int) -> int:
        """Tokens that a step verifies a row."""
        return ((self.accepted.verified if self.accepted else 0) or K + 1) if K else 1

    def kept(self, K: int, factor: float = 1.0) -> float:
        """Acceptance length; `factor` multiplies it, kept between 1 and K + 1."""
        return min(max(self.accepted.kept(K) * factor, 1.0), K + 1.0) if K else 1.0


PLAIN = Method("none", Draft("none"))


@dataclass(frozen=True)
class Point:
    """One configuration of one replica: tokens/s, ms a token (median, 99th percentile or None with why not), ms between
    two bursts of tokens, bytes on each GPU."""

    method: str
    batch: int
    K: int
    kept: float
    tok_s: float
    ms: float
    ms_p99: float | None
    gap_ms: float
    memory: float


@dataclass(frozen=True)
class Planner:
    """One target on one kind of GPU under one traffic."""

    section: Roi
    calibration: Calibration
    place: Place
    memory_bytes: float

    @property
    def constants(self) -> Constants:
        return self.calibration.fit.constants

    def step(self, method: Method, batch: int, K: int, kept: float) -> Step:
        s, topk = self.section, method.accepted.topk if K else 1
        apart = s.pools == "apart"
        prompt, answer = (0.0, 0.0) if apart else (s.input_tokens, s.output_tokens)
        return Step(batch, K, s.input_tokens + s.output_tokens / 2, topk, method.width(K), kept, prompt, answer)

    def memory(self, method: Method, batch: int) -> float:
        """Bytes a GPU: weights, drafter, both caches of requests at their longest (11: a drafter takes room)."""
        s, keep, shape = self.section, self.place.keep, self.place.shape
        length = s.longest_tokens or s.input_tokens + s.output_tokens
        held = weights_per_gpu(shape, keep) + cache_per_gpu(shape, batch, length, keep)
        size, model = method.draft.size, method.draft.model
        if size and method is not PLAIN:
            token = 2 * size.kv_heads * size.head_dim * size.layers * keep.cache_bits / 8
            held += (size.parameters * method.draft.bits / 8 + batch * length * token) / keep.ranks
        elif method.draft.kind == "medusa":
            heads = method.accepted.longest * shape.hidden * (shape.hidden + shape.vocab)
            held += heads * method.draft.bits / 8 / keep.ranks
        elif model or method.draft.kind == "mtp":
            own = replace(keep, weight_bits=method.draft.bits)
            drafting = model or one_layer(shape)
            held += weights_per_gpu(drafting, own) + cache_per_gpu(drafting, batch, length, own)
        return held

    def batches(self, method: Method, K: int) -> list[int]:
        """Batches that fit into memory and are no more than twice the largest measured step (5)."""
        room = self.section.memory_share * self.memory_bytes
        most = refuse.WIDEST * self.calibration.largest
        return [b for b in BATCHES if b * method.width(K) <= most and self.memory(method, b) <= room]

    def point(self, method: Method, batch: int, K: int, c: Constants | None = None, factor: float = 1.0) -> Point:
        c, kept = c or self.constants, method.kept(K, factor)
        step = self.step(method, batch, K, kept)
        took = step_seconds(method.draft, self.place, c, step)
        slowest = method.accepted.slowest if method.accepted and K else 1.0
        tail = None
        if slowest and (not K or method.accepted.requests >= refuse.TAIL_REQUESTS):
            own = replace(step, kept=min(slowest, kept))
            tail = 1e3 * step_seconds(method.draft, self.place, c, own) / own.kept
        return Point(method.name, batch, K, kept, batch * kept / took, 1e3 * took / kept, tail,
                     1e3 * cycle_seconds(method.draft, self.place, c, step), self.memory(method, batch))

    def points(self, method: Method, factor: float = 1.0) -> list[Point]:
        """Every configuration that may be planned."""
        return [self.point(method, b, K, factor=factor) for K in method.lengths() for b in self.batches(method, K)]

    def meets(self, point: Point) -> bool:
        """Whether a configuration keeps the SLO."""
        s = self.section
        ms = point.ms_p99 if s.slo_percentile == "p99" else point.ms
        return not s.slo_ms or (ms is not None and ms <= s.slo_ms)

    def best(self, points: Iterable[Point]) -> Point | None:
        """Most tokens a second under the SLO; None where nothing keeps it."""
        return max((p for p in points if self.meets(p)), key=lambda p: p.tok_s, default=None)

    def prefill_gpus(self, demand: float) -> int:
        """GPUs of the pool that runs the prompts, the same on both sides."""
        s = self.section
        if s.pools == "shared" or not demand:
            return 0
        each = prompt_seconds(self.place, self.constants, s.input_tokens)
        return money.gpus(demand / s.output_tokens, 1 / each, self.place.keep.ranks, s.headroom)

    def gpus(self, point: Point, demand: float) -> int:
        return money.gpus(demand, point.tok_s, self.place.keep.ranks, self.section.headroom) + self.prefill_gpus(demand)

    def speedups(self, method: Method) -> list[dict[str, float]]:
        """At each batch that both sides may run: the best draft length, its gain over plain decoding at that batch, and
        the gain's 90 % interval over what calibration and acceptance leave open."""
        found, plain = [], set(self.batches(PLAIN, 0))
        draws, factors = self.calibration.fit.draws(DRAWS), acceptance_factors(method)
        for batch in sorted({b for K in method.lengths() for b in self.batches(method, K)} & plain):
            rows = [self.point(method, batch, K) for K in method.lengths() if batch in self.batches(method, K)]
            top = max(rows, key=lambda p: p.tok_s)
            gains = [self.point(method, batch, top.K, c, f).tok_s / self.point(PLAIN, batch, 0, c).tok_s
                     for c, f in zip(draws, factors)]
            low, high = np.percentile(gains, [50 - 50 * LEVEL, 50 + 50 * LEVEL])
            gain = top.tok_s / self.point(PLAIN, batch, 0).tok_s
            refuse.beyond_bounds(speedup=gain, kept=top.kept)
            found.append({"batch": batch, "K": top.K, "speedup": gain, "low": float(low), "high": float(high)})
        return found

    def saving(self, method: Method, draws: list[Constants], factors: np.ndarray, ours: Point, plain: Point,
               ) -> tuple[float, float]:
        """90 % interval of the share of GPU time that a token costs less than with the best plain configuration."""
        found = [1 - self.point(PLAIN, plain.batch, 0, c).tok_s / self.point(method, ours.batch, ours.K, c, f).tok_s
                 for c, f in zip(draws, factors)]
        low, high = np.percentile(found, [50 - 50 * LEVEL, 50 + 50 * LEVEL])
        return float(low), float(high)


def acceptance_factors(method: Method, seed: int = 1) -> np.ndarray:
    """What the acceptance length is multiplied with in each draw."""
    sd = method.accepted.relative_sd if method.accepted else 0.0
    return np.random.default_rng(seed).normal(1.0, sd, DRAWS)


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
    or the largest measured step keep from such a batch, so that nothing is said of them there."""
    found: list[dict[str, Any]] = []
    for batch in planner.batches(PLAIN, 0):
        rows = [planner.point(m, batch, K) for m in [PLAIN, *methods] for K in m.lengths()
                if batch in planner.batches(m, K)]
        top = max(rows, key=lambda p: p.tok_s)
        left_out = sorted({m.name for m in methods} - {p.method for p in rows})
        same = {"method": top.method, "K": top.K, "left_out": left_out}
        if found and all(found[-1][key] == value for key, value in same.items()):
            found[-1]["to"] = batch
        else:
            found.append({"from": batch, "to": batch, "tok_s": top.tok_s, **same})
    return found


def by_load(planner: Planner, best: dict[str, Point]) -> list[dict[str, Any]]:
    """GPUs and $ per million at each load, from a tenth of a plain replica to thirty; the method that takes fewest
    GPUs, plain decoding where it ties."""
    unit, rows = best[PLAIN.name].tok_s if PLAIN.name in best else max(p.tok_s for p in best.values()), []
    for load in unit * np.geomspace(0.1, 30, 60):
        gpus = {name: planner.gpus(p, load) for name, p in best.items()}
        price = planner.section.price_per_gpu_hour
        top = min(gpus, key=lambda name: (gpus[name], name != PLAIN.name, -best[name].tok_s))
        rows.append({"tok_s": float(load), "gpus": gpus, "best": top,
                     "dollars": {n: money.dollars_per_million(g * price, load) for n, g in gpus.items()}})
    return rows


def sensitivity(planner: Planner, method: Method) -> list[dict[str, Any]]:
    """Saving in $ per million at full load, each side at its best again, when one input moves."""
    def saved(p: Planner, factor: float = 1.0) -> float | None:
        plain, ours = p.best(p.points(PLAIN)), p.best(p.points(method, factor))
        if not plain or not ours:
            return None
        price = p.section.price_per_gpu_hour * p.place.keep.ranks
        return money.dollars_per_million(price, plain.tok_s) - money.dollars_per_million(price, ours.tok_s)

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


def check(planner: Planner, methods: list[Method], target: str) -> None:
    """The refusals that do not depend on a figure."""
    s, place = planner.section, planner.place
    refuse.unmeasured_steps(planner.calibration.fit.observations)
    refuse.split_replica(1, s.tensor_parallel, place.shape)
    refuse.constant_spot(s.price_kind, s.days, s.spot_held)
    for method in methods:
        refuse.moved_acceptance(method.accepted.conditions(), Conditions(
            s.domain, s.temperature, (s.input_tokens, s.input_tokens + s.output_tokens), target,
            place.keep.weight_bits))
        if s.slo_percentile == "p99":
            refuse.thin_tail(method.accepted.requests, method.accepted.slowest > 0)
    room = planner.section.memory_share * planner.memory_bytes
    for method in [PLAIN, *methods]:
        refuse.no_room(planner.memory(method, 1), room, s.tensor_parallel, s.headroom if s.demand_tok_s else 0.5)


def bounded(planner: Planner, point: Point) -> None:
    """Refusal 4 for a rate: reading the weights once a step."""
    place = planner.place
    refuse.beyond_bounds(tok_s=point.tok_s, bound=weight_read_bound(
        place.shape, place.keep, place.bandwidth, point.batch, point.kept))
