"""Learning rate as a pure function of the optimizer step: nothing to save, nothing that can count micro-steps.

Every schedule warms up linearly, reaches the peak at the last step of the warm-up and `floor`, a share of the peak,
at the last step of the run.
"""

import math
from collections.abc import Callable


def decayed(step: int, total: int, start: int) -> float:
    """How far a decay that begins at step `start` has come: 0 there, 1 at the last of `total` steps."""
    return min((step - start) / max(total - 1 - start, 1), 1.0)


def cosine(step: int, total: int, warmup: int, floor: float, decay_share: float) -> float:
    """Share of the peak at a step after the warm-up: half a cosine (Loshchilov and Hutter 2017, without restarts)."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * decayed(step, total, warmup)))


def linear(step: int, total: int, warmup: int, floor: float, decay_share: float) -> float:
    """Share of the peak at a step after the warm-up: a straight line."""
    return 1 - (1 - floor) * decayed(step, total, warmup)


def wsd(step: int, total: int, warmup: int, floor: float, decay_share: float) -> float:
    """Share of the peak at a step after the warm-up: the peak, then a straight line over the last `decay_share` of all
    steps (warm-up, stable, decay; Hu et al. 2024, MiniCPM, with the linear decay of Hägele et al. 2024)."""
    start = max(total - 1 - max(round(decay_share * total), 1), warmup)
    return 1.0 if step < start else linear(step, total, start, floor, decay_share)


SCHEDULES: dict[str, Callable[[int, int, int, float, float], float]] = {"cosine": cosine, "linear": linear, "wsd": wsd}


def share_of_peak(name: str, step: int, total: int, warmup: int, floor: float, decay_share: float) -> float:
    """What optimizer step `step` (from 0) of `total` multiplies a parameter group's peak rate by: 0..1."""
    if step < warmup:
        return (step + 1) / warmup
    return SCHEDULES[name](step, total, warmup, floor, decay_share)
