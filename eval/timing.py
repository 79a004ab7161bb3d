"""Measured speed: plain decoding, speculation and transformers' generate in turns on the same prompts, at batch 1.

All of them sample and stop as the evaluation does: `how`, what eval/settings.py tells a Decoder.
Interleaving lets all of them see the same machine; figures are sums over prompts, intervals resample prompts.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from data.sampling import row_names, row_seed
from drafters.base import Drafter
from drafters.fast_cpu import GROUPED
from drafters.target import Target
from drafters.tree import Plan, planned
from eval.clock import now
from eval.decode import Decoder, Output
from eval.stops import Stops

PLAIN, SPECULATIVE, TRANSFORMERS = "drafthouse plain loop", "speculative", "transformers generate"
REPEATS = 15  # timed calls of a step, of which the median counts
WARM_TOKENS = 4  # a few passes, so that no engine is the first of its batch size
SMALLEST_N = {"p50": 10, "p95": 100, "p99": 500}  # samples below which a percentile says nothing


@dataclass
class Timing:
    """Seconds and kept tokens of each timed prompt, and in ms: times to the first token, between two tokens, and
    between two bursts, tokens that appear together. Their answers, for counts."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    burst_ms: list[float] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0

    def add(self, began: float, out: Output) -> None:
        """A burst of n tokens counts as n intervals of a n-th of the time since the last."""
        self.outputs.append(out)
        self.seconds.append(out.times[-1][0] - began)
        self.tokens.append(len(out.tokens))
        self.ttft_ms.append((out.times[0][0] - began) * 1e3)
        for (before, _), (after, n) in zip(out.times, out.times[1:]):
            self.burst_ms.append((after - before) * 1e3)
            self.itl_ms += [self.burst_ms[-1] / n] * n

    def latency(self, name: str) -> dict[str, Any]:
        """Percentiles of ttft_ms, itl_ms or burst_ms; of itl_ms each burst is one time measured, whatever its size."""
        return percentiles(getattr(self, name), len(self.burst_ms) if name == "itl_ms" else None)


def interleaved(target: Target, drafter: Drafter, prompts: list[list[int]], plan: Plan | int, max_tokens: int,
                progress: Callable[[], None], **how: Any) -> dict[str, Timing]:
    """Times every prompt with each engine in turn; the first prompt runs once before, uncounted."""
    decoder = Decoder(target, max_tokens, **how)
    works = {PLAIN: lambda prompt: decoder.plain([prompt])[0],
             SPECULATIVE: lambda prompt: decoder.speculative([prompt], drafter, plan)[0],
             TRANSFORMERS: lambda prompt: generate(decoder, prompt)}
    timings = {name: Timing() for name in works}
    for warm, prompt in [(True, prompts[0]), *((False, p) for p in prompts)]:
        for name, work in works.items():
            with as_loaded(decoder, prompt) if name == TRANSFORMERS else nullcontext():
                began = now(target.device)
                out = work(prompt)
            if not warm:
                timings[name].add(began, out)
        progress()
    return timings


@contextmanager
def as_loaded(decoder: Decoder, prompt: list[int]) -> Iterator[None]:
    """The decoder's model with transformers' own attention, with its end tokens and the decoder's sampling as all its
    generation settings (a repetition penalty that it was published with would act on greedy text too), and with torch's
    random numbers, which `generate` draws from, seeded for this prompt; all as before afterwards."""
    target, sampling = decoder.target, decoder.sampling
    model, settings, ends = target.model, target.model.generation_config, target.end_ids
    chosen: dict[str, Any] = {} if sampling.greedy else {
        "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "min_p": sampling.min_p or None}
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0,
                                               repetition_penalty=sampling.repetition_penalty, **chosen)
    if target.grouped:
        model.set_attn_implementation("sdpa")
    devices = [target.device] if target.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices, enabled=not sampling.greedy):
            if not sampling.greedy:
                torch.manual_seed(row_seed(decoder.seed, row_names([prompt])[0], 8))
            yield
    finally:
        model.generation_config = settings
        if target.grouped:
            model.set_attn_implementation(GROUPED)


class Stopping(StoppingCriteria):
    """Ends an answer where the loop does: transformers' own stop strings look into the prompt too."""

    def __init__(self, stops: Stops, begin: int) -> None:
        self.stops, self.begin = stops, begin

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        ended = [bool(self.stops.found(row[self.begin :].tolist())) for row in input_ids]
        return torch.tensor(ended, device=input_ids.device)


def generate(decoder: Decoder, prompt: list[int]) -> Output:
    """transformers' own generate at the decoder's settings as an Output, the time of the whole answer alone; inside
    `as_loaded`."""
    device = decoder.target.device
    ids = torch.tensor([prompt], device=device)
    stopping = StoppingCriteriaList([Stopping(decoder.stops, len(prompt))] if decoder.stops else [])
    result = decoder.target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=decoder.max_tokens,
                                           do_sample=not decoder.sampling.greedy, stopping_criteria=stopping)
    tokens = result[0, len(prompt):].tolist()
    return Output(tokens, times=[(now(device), len(tokens))])


def medians_in_turns(works: dict[str, Callable[[], Any]], device: torch.device, repeats: int = REPEATS,
                     ) -> dict[str, float]:
    """Median milliseconds of each call and of what it gives `device` to do, taken in turns so that all meet the same
    machine; one round warms up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            began = now(device)
            work()
            took = (now(device) - began) * 1e3
            if turn:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.inference_mode()
def step_times(target: Target, drafter: Drafter, context: int, plan: Plan | int) -> dict[str, float]:
    """Milliseconds, outside the loop at batch 1: one plain target pass, one verification of a whole draft and the last
    token, one level of drafting."""
    device, plan = target.device, planned(plan)
    width = plan.nodes + 1
    cache = target.new_cache(1, context + width)
    ids = torch.ones(1, context, dtype=torch.long, device=device)
    positions = torch.arange(context, device=device)[None]
    states = target.forward(ids, positions, cache, logits=False)
    block = torch.ones(1, width, dtype=torch.long, device=device)
    ahead = context + torch.arange(width, device=device)[None]
    session = drafter.session(1, context + width + plan.room + 2)
    session.begin([[1] * context])
    session.observe(states.taps, ids, positions, torch.tensor([context - 1], device=device))
    session.propose(plan)
    verified = target.forward(block, ahead, cache)
    path = slice(0, plan.depth + 1)
    taps = None if verified.taps is None else verified.taps[:, path]

    def cycle() -> None:
        session.observe(taps, block[:, path], ahead[:, path], torch.tensor([1], device=device))
        session.propose(plan)

    times = medians_in_turns({
        "target_step_ms": lambda: target.forward(block[:, :1], ahead[:, :1], cache),
        "verify_ms": lambda: target.forward(block, ahead, cache),
        "draft_step_ms": cycle,
    }, device)
    return times | {"draft_step_ms": times["draft_step_ms"] / plan.depth}


def predict(E: float, steps: dict[str, float], K: int) -> float:
    """Speedup = E / (K c + v): c draft step and v verification, both over a plain target step."""
    return E / cycle_cost(steps, K)


def cycle_cost(steps: dict[str, float], K: int) -> float:
    """A cycle with a draft of K levels in plain steps of the target: the break-even of its acceptance length."""
    c, v = (steps[name] / steps["target_step_ms"] for name in ("draft_step_ms", "verify_ms"))
    return K * c + v


def speedup(base: Timing, fast: Timing, seed: int, draws: int = 2000) -> tuple[float, list[float]]:
    """Ratio of tokens per second, and its 95 % interval by resampling prompts."""
    bt, bs, ft, fs = (np.array(x, dtype=float) for x in (base.tokens, base.seconds, fast.tokens, fast.seconds))
    picks = np.random.default_rng(seed).integers(0, len(bt), size=(draws, len(bt)))
    ratios = (ft[picks].sum(1) / fs[picks].sum(1)) / (bt[picks].sum(1) / bs[picks].sum(1))
    return fast.tok_s / base.tok_s, [float(x) for x in np.percentile(ratios, [2.5, 97.5])]


def each(base: Timing, fast: Timing) -> list[dict[str, float]]:
    """What was timed of each prompt, without a drafter and with one."""
    return [{"baseline_tokens": bt, "baseline_s": bs, "timed_tokens": ft, "timed_s": fs}
            for bt, bs, ft, fs in zip(base.tokens, base.seconds, fast.tokens, fast.seconds)]


def percentiles(values: list[float], measured: int | None = None) -> dict[str, Any]:
    """p50, p95 and p99 with n; a percentile that n is too small for is null, with the reason. measured: times measured,
    where several values come of one; None: one each."""
    n = len(values) if measured is None else measured
    out: dict[str, Any] = {"n": n}
    missing = []
    for name, smallest in SMALLEST_N.items():
        enough = n >= smallest
        out[name] = float(np.percentile(values, int(name[1:]))) if enough else None
        if not enough:
            missing.append(f"{name} needs n >= {smallest}")
    if missing:
        out["reason"] = "; ".join(missing)
    return out


def by_batch(target: Target, drafter: Drafter, prompts: list[list[int]], plan: Plan | int, max_tokens: int,
             size: int, **how: Any) -> dict[str, Any]:
    """Plain and speculative tokens per second with `size` rows decoded together, prefill included; a finished row is
    replaced by the next prompt. Sums over the rounds, which begin with either engine in turn, after a few tokens of
    warm-up."""
    def decode(name: str, part: list[list[int]], longest: int) -> list[Output]:
        decoder = Decoder(target, longest, slots=size, **how)
        return decoder.plain(part) if name == PLAIN else decoder.speculative(part, drafter, plan)

    engines = [PLAIN, SPECULATIVE]
    seconds, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    parts = rounds(prompts, size)
    for name in engines:
        decode(name, parts[0][:size], min(max_tokens, WARM_TOKENS))
    for part in parts:
        for name in engines:
            began = now(target.device)
            outputs = decode(name, part, max_tokens)
            seconds[name] += now(target.device) - began
            tokens[name] += sum(len(out.tokens) for out in outputs)
        engines.reverse()
    plain, fast = (tokens[name] / seconds[name] for name in (PLAIN, SPECULATIVE))
    return {"batch": size, "baseline_tok_s": plain, "speculative_tok_s": fast, "speedup": fast / plain,
            "engine": PLAIN, "prompts": len(prompts)}


def rounds(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    """What each round of `by_batch` decodes: every second prompt, or every third where only that gives whole batches,
    so that each is decoded once. Fewer than two batches are decoded whole in both rounds; fewer than one are repeated
    until they fill it."""
    if len(prompts) < 2 * size:
        return [[prompts[i % len(prompts)] for i in range(max(size, len(prompts)))]] * 2
    count = next((n for n in (2, 3) if len(prompts) % (n * size) == 0), 2)
    return [prompts[i::count] for i in range(count)]
