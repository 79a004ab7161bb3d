"""Where a speculative cycle's time goes at batch 1: draft, verification, sampling, cache, and the loop's own Python.

Measured inside the loop, in a run of its own, by calls that are timed where they are made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from drafters.base import Drafter
from drafters.target import Target
from drafters.tree import Plan
from eval import decode
from eval.clock import now
from eval.decode import Decoder
from eval.figures import spread

PARTS = ("draft", "verify", "sample", "cache")
PROMPTS = 4  # timed; about a hundred cycles are enough for their mean
DRAFTING = ("begin", "propose", "observe", "keep")


class Clock:
    """Seconds of each part; a part that begins inside another takes its time out of that one's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.inner: list[float] = []

    def now(self) -> float:
        return now(self.device)

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, its time counted as `part`."""
        def call(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            self.inner.append(0.0)
            result = work(*args, **kwargs)
            took, within = self.now() - began, self.inner.pop()
            self.seconds[part] += took - within
            if self.inner:
                self.inner[-1] += took
            return result
        return call


class Stand:
    """Stands for an object, with some of its methods replaced."""

    def __init__(self, real: Any, replaced: dict[str, Callable[..., Any]]) -> None:
        self._real, self._replaced = real, replaced

    def __getattr__(self, name: str) -> Any:
        replaced = self.__dict__["_replaced"]
        return replaced[name] if name in replaced else getattr(self.__dict__["_real"], name)


@contextmanager
def timed_verdicts(clock: Clock) -> Iterator[None]:
    """The loop's call of `verify`, a function of its own module, timed as sampling."""
    plain = decode.verify
    decode.verify = clock.timed("sample", plain)
    try:
        yield
    finally:
        decode.verify = plain


def watched(target: Target, drafter: Drafter, clock: Clock) -> tuple[Stand, Stand]:
    """Target and drafter whose calls are timed. Cache: writing and reading keys and values, inside a target pass."""
    def new_cache(*args: Any) -> Any:
        cache = target.new_cache(*args)
        for holder in [cache, *getattr(cache, "layers", [])]:
            for name in ("update", "keep", "move"):
                if hasattr(holder, name):
                    setattr(holder, name, clock.timed("cache", getattr(holder, name)))
        return cache

    def session(*args: Any) -> Stand:
        real = drafter.session(*args)
        names = [name for name in dir(real) if name.startswith(DRAFTING)]
        return Stand(real, {name: clock.timed("draft", getattr(real, name)) for name in names})

    return (Stand(target, {"forward": clock.timed("verify", target.forward),
                           "head": clock.timed("verify", target.head), "new_cache": new_cache}),
            Stand(drafter, {"session": session}))


def cycle(target: Target, drafter: Drafter, prompts: list[list[int]], plan: Plan | int, max_tokens: int,
          **how: Any) -> dict[str, Any]:
    """Mean milliseconds of a cycle and of each part, over all cycles of PROMPTS of these prompts, evenly spaced; the
    first one is run once before. how: what a Decoder is told (eval/settings.py).

    Prefill is not counted. `other_ms` is what no part explains: the loop's own Python.
    """
    clock = Clock(target.device)
    seen, drawn = watched(target, drafter, clock)
    seconds, cycles = 0.0, 0

    class Watched(Decoder):
        def prefill(self, *args: Any) -> Any:
            rows = super().prefill(*args)
            clock.seconds = dict.fromkeys(PARTS, 0.0)
            self.began = clock.now()
            return rows

    decoder = Watched(seen, max_tokens, **how)
    parts = dict.fromkeys(PARTS, 0.0)
    with timed_verdicts(clock):
        for warm, prompt in [(True, prompts[0]), *((False, prompts[i]) for i in spread(prompts, PROMPTS))]:
            output = decoder.speculative([prompt], drawn, plan)[0]
            if not warm and output.passes:
                seconds += clock.now() - decoder.began
                cycles += output.passes
                parts = {name: parts[name] + clock.seconds[name] for name in PARTS}
    if not cycles:
        return {"cycles": 0, "cycle_ms": None, "reason": "no answer was longer than its first token"}
    found = {f"{name}_ms": 1e3 * value / cycles for name, value in parts.items()}
    whole = 1e3 * seconds / cycles
    return {"cycles": cycles, "cycle_ms": whole, **found, "other_ms": whole - sum(found.values())}
