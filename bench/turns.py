"""Measuring in turns: every way to do a work meets the same machine, whatever else runs on it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from data.console import console

A = TypeVar("A")
T = TypeVar("T")
CPU = torch.device("cpu")
PEAK = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")  # Linux: 5 sets the peak of resident memory back to what is resident now


def in_turns(works: dict[str, Callable[[A], T]], turns: Sequence[A]) -> dict[str, list[T]]:
    """What each work returned for each of `turns`, in their order. The works alternate, and every other turn goes
    through them backwards: a machine that grows slower and slower then favours none."""
    found: dict[str, list[T]] = {name: [] for name in works}
    for number, turn in enumerate(turns):
        console.print(f"turn {number + 1} of {len(turns)}:", end="", highlight=False)
        for name in in_order(works, number):
            began = time.perf_counter()
            found[name].append(works[name](turn))
            console.print(f" {name} {time.perf_counter() - began:.2f} s;", end="", highlight=False, soft_wrap=True)
        console.print()
    return found


def in_order(works: dict[str, Any], turn: int) -> list[str]:
    """The names forwards in even turns, backwards in odd ones."""
    return list(works)[:: 1 if turn % 2 == 0 else -1]


def timed(work: Callable[[], T], device: torch.device = CPU) -> tuple[float, T]:
    """Seconds that a call took until its device was done, and its result."""
    sync(device)
    began = time.perf_counter()
    result = work()
    sync(device)
    return time.perf_counter() - began, result


def times_in_turns(works: dict[str, Callable[[], Any]], rounds: int, device: torch.device = CPU,
                   ) -> dict[str, list[float]]:
    """Seconds of each of many short calls in turns; one round before them warms up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name in in_order(works, turn):
            seconds, _ = timed(works[name], device)
            if turn:
                times[name].append(seconds)
    return times


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PassClock:
    """Seconds inside a causal LM's decoder and head, while the `with` block runs.

    Passes over one token a row are steps, longer ones prefills; the head's time belongs to the pass before it. What
    else a loop takes (choosing tokens, bookkeeping) is its own time less these.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.parts = {model.get_decoder(): True, model.get_output_embeddings(): False}
        self.device = device
        self.seconds = {"prefill": 0.0, "steps": 0.0}
        self.passes = {"prefill": 0, "steps": 0}
        self.kind, self.began = "prefill", 0.0

    def __enter__(self) -> Self:
        self.hooks = []
        for module in self.parts:
            self.hooks += [module.register_forward_pre_hook(self.begin, with_kwargs=True),
                           module.register_forward_hook(self.end)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for hook in self.hooks:
            hook.remove()

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.parts[module]:
            ids = args[0] if args else kwargs["input_ids"]
            self.kind = "steps" if ids.shape[1] == 1 else "prefill"
            self.passes[self.kind] += 1
        sync(self.device)
        self.began = time.perf_counter()

    def end(self, module: nn.Module, args: tuple, output: Any) -> None:
        sync(self.device)
        self.seconds[self.kind] += time.perf_counter() - self.began


def reset_peak() -> bool:
    """Sets the process's peak memory back; False where the system cannot."""
    if not RESET.exists():
        return False
    RESET.write_text("5", encoding="ascii")
    return True


def peak_bytes() -> int:
    """Peak resident memory since `reset_peak`."""
    lines = PEAK.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
