"""What the trainer reports of its steps: pure functions, and the sums between two log lines. See docs/training.md.

Legend: K unrolled steps (depths).
"""

import resource
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import LossOutput

SIMULATED = "simulated_length/teacher_forced"


class Meter:
    """What this process did since the last log line. Sums stay on the device: reading them would wait for it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sums: Tensor | None = None  # [3, K] loss, hits, positions
        self.tokens, self.seconds = 0, 0.0

    def add(self, outputs: list[LossOutput], tokens: int, seconds: float) -> None:
        """One optimizer step: its micro-batches here, the tokens of all ranks, and the time it took."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        for out in outputs:
            new = torch.stack([out.depth_loss.double(), out.depth_hits.double(), out.depth_count.double()])
            self.sums = new if self.sums is None else add_depths(self.sums, new)


def add_depths(a: Tensor, b: Tensor) -> Tensor:
    """Sum of [3, K] and [3, K'], the shallower one as if it had zeros below."""
    K = max(a.shape[1], b.shape[1])
    return F.pad(a, (0, K - a.shape[1])) + F.pad(b, (0, K - b.shape[1]))


def depth_values(loss: Sequence[float], hits: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    """Means at each depth from sums over positions; a depth without a position is left out, not reported as 0."""
    losses = {f"loss/depth_{k}": loss[k] / n for k, n in enumerate(counts) if n}
    rates = {f"hit_rate/depth_{k}": hits[k] / n for k, n in enumerate(counts) if n}
    return {**losses, **rates, SIMULATED: simulated_length([*rates.values()])}


def simulated_length(hit_rates: Sequence[float]) -> float:
    """Tokens a cycle if the chain's steps hit independently with these rates: 1 + h0 + h0 h1 + ...

    The rates are teacher-forced, over all positions: this is not acceptance, which the validation replays.
    """
    length = reached = 1.0
    for rate in hit_rates:
        reached *= rate
        length += reached
    return length


def coverage(rows_seen: int, tokens_seen: int, rows: int, tokens: int) -> dict[str, float]:
    """How much of the training rows a run has read. Every epoch reads each of the `rows` once, `tokens` in all."""
    before = max(rows_seen - 1, 0) // rows  # finished epochs; a full one is the one in work until the next begins
    return {"data/epoch": rows_seen / rows, "data/epoch_rows_share": (rows_seen - before * rows) / rows,
            "data/epoch_tokens_share": (tokens_seen - before * tokens) / tokens,
            "data/distinct_rows": min(rows_seen, rows)}


def utilisation(flops: float, seconds: float, peak_tflops: float, processes: int) -> float:
    """Model FLOPs utilisation: useful FLOP/s of all processes over what their devices could do at most."""
    return flops / seconds / (peak_tflops * 1e12 * processes)


def peak_memory(device: torch.device) -> int:
    """Most bytes of this process so far: of tensors on a CUDA device, else resident, mapped trace pages included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def line(values: dict[str, float]) -> str:
    """The display line of a step's values."""
    hits = " ".join(f"{v:.2f}" for k, v in values.items() if k.startswith("hit_rate/"))
    used = f" mfu {values['mfu']:.0%}" if "mfu" in values else ""
    return (f"loss {values['loss/depth_0']:.2f} hits {hits} forced length {values[SIMULATED]:.2f}"
            f" {values['tokens_per_s']:.0f} tok/s epoch {values['data/epoch']:.2f}"
            f" {values['memory/peak_gb']:.1f} GB{used}")
