"""What a drafter is worth on given hardware, for given traffic: arithmetic on a calibration and measured acceptance.

Both sides are held to the same SLO, limited by the same memory and planned with whole replicas; the plain side is the
best plain configuration, not the one at the drafter's batch. Nothing is planned beyond what was measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from eval import roi_refuse as refuse
from eval.roi_accepted import Acceptance
from eval.roi_files import Calibration
from eval.roi_refuse import Conditions
from recipes import money
from recipes.cost import cache_per_gpu, weights_per_gpu
from recipes.errors import ConfigError
from recipes.schema import Roi
from recipes.speculation import (
    Constants,
    Draft,
    Place,
    Step,
    cycle_seconds,
    draft_memory,
    prompt_seconds,
    step_seconds,
    weight_read_bound,
)

BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
DRAWS = 100
LEVEL = 0.9
MOST = {"price_per_gpu_hour": 1e6, "demand_tok_s": 1e12}  # beyond, a figure is a slip


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
        return range(self.longest if self.accepted.tokens_per_pass else 1, self.longest + 1)

    @property
    def longest(self) -> int:
        return self.accepted.longest if self.accepted else 0

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
        length = max(s.longest_tokens, s.input_tokens + s.output_tokens)
        held = weights_per_gpu(shape, keep) + cache_per_gpu(shape, batch, length, keep)
        return held + draft_memory(method.draft, shape, method.longest, keep, batch, length)

    @cached_property
    def candidates(self) -> list[int]:
        """Batches that are planned: those of the steps alone, where they are all of one batch, since nothing measured
        says what another one does to the time."""
        measured = self.calibration.batches
        return sorted({*BATCHES, *measured}) if self.calibration.across_batches else measured

    def fits(self, method: Method, batch: int, K: int) -> bool:
        """Whether a batch fits into memory and is no more than twice the largest measured step (5)."""
        return (batch * method.width(K) <= refuse.WIDEST * self.calibration.largest
                and self.memory(method, batch) <= self.section.memory_share * self.memory_bytes)

    def batches(self, method: Method, K: int) -> list[int]:
        return [b for b in self.candidates if self.fits(method, b, K)]

    def point(self, method: Method, batch: int, K: int, c: Constants | None = None, factor: float = 1.0) -> Point:
        c, kept = c or self.constants, method.kept(K, factor)
        step = self.step(method, batch, K, kept)
        took = step_seconds(method.draft, self.place, c, step)
        slowest = method.accepted.slowest_of(K) if method.accepted and K else 1.0
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
        each = self.prompt_of_token(self.constants)
        return money.gpus(demand, 1 / each, self.place.keep.ranks, s.headroom)

    def prompt_of_token(self, c: Constants) -> float:
        """Seconds of a replica for the part of the prompt that a token of the answer carries."""
        s = self.section
        return c.rest * prompt_seconds(self.place, c, s.input_tokens) / s.output_tokens

    def token_seconds(self, point: Point, c: Constants | None = None) -> float:
        """Seconds of a replica that a token costs, those of the prompts' own pool included."""
        apart = self.section.pools == "apart"
        return 1 / point.tok_s + (self.prompt_of_token(c or self.constants) if apart else 0.0)

    def dollars_at_full_load(self, point: Point) -> float:
        """$ per million tokens, every replica at its full rate."""
        price = self.section.price_per_gpu_hour * self.place.keep.ranks
        return money.dollars_per_million(price, 1 / self.token_seconds(point))

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
        found = [1 - self.token_seconds(self.point(method, ours.batch, ours.K, c, f), c)
                 / self.token_seconds(self.point(PLAIN, plain.batch, 0, c), c)
                 for c, f in zip(draws, factors)]
        low, high = np.percentile(found, [50 - 50 * LEVEL, 50 + 50 * LEVEL])
        return float(low), float(high)


def acceptance_factors(method: Method, seed: int = 1) -> np.ndarray:
    """What the acceptance length is multiplied with in each draw."""
    sd = method.accepted.relative_sd if method.accepted else 0.0
    return np.random.default_rng(seed).normal(1.0, sd, DRAWS)


def check(planner: Planner, methods: list[Method], target: str) -> None:
    """The refusals that do not depend on a figure; ConfigError for requests longer than the longest."""
    s, place = planner.section, planner.place
    refuse.unmeasured_steps(planner.calibration.fit.observations)
    refuse.split_replica(1, s.tensor_parallel, place.shape)
    refuse.constant_spot(s.price_kind, s.days, s.spot_held)
    for name, most in MOST.items():
        if getattr(s, name) > most:
            raise ConfigError(f"roi.{name} = {getattr(s, name):g}: must be at most {most:g}")
    mean = s.input_tokens + s.output_tokens
    if 0 < s.longest_tokens < mean:
        raise ConfigError(f"roi.longest_tokens = {s.longest_tokens:g}: a mean request has {mean:g} tokens, prompt and "
                          "answer, and the cache holds the longest; set it to more, or to 0 for the mean")
    timed = planner.calibration.steps.target
    own = timed.get("fingerprint", {}) if timed.get("model") == target else {}
    for method in methods:
        refuse.unmeasured_steps(len(planner.calibration.lengths), f"a cycle with {method.name}")
        refuse.moved_acceptance(method.accepted.conditions(), Conditions(
            s.domain, s.temperature, (s.input_tokens, s.input_tokens + s.output_tokens), target,
            place.keep.weight_bits, own))
        if s.slo_percentile == "p99":
            refuse.thin_tail(method.accepted.requests, method.accepted.slowest > 0)
    room = planner.section.memory_share * planner.memory_bytes
    for method in [PLAIN, *methods]:
        refuse.no_room(planner.memory(method, 1), room, s.tensor_parallel, s.headroom)


def bounded(planner: Planner, point: Point) -> None:
    """Refusal 4 for a rate: reading the weights once a step."""
    place = planner.place
    refuse.beyond_bounds(tok_s=point.tok_s, bound=weight_read_bound(
        place.shape, place.keep, place.bandwidth, point.batch, point.kept))
