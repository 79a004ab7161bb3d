"""Do two reports differ? Bootstrap over conversations: paired where both asked the same, unpaired otherwise.

Legend: n conversations, C counts (COUNTS), R resamples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

COUNTS = ("accepted", "drafts", "kept", "passes", "timed_tokens", "timed_s", "baseline_tokens", "baseline_s")
DRAWS = 4000
ALPHA = 0.05
FEWEST = 5  # conversations on each side; fewer give no interval


@dataclass(frozen=True)
class Metric:
    """A figure made of summed counts. `timed`: only conversations that were timed count. `higher`: higher is better."""

    name: str
    label: str
    unit: str
    of: Callable[..., Any]  # sums of COUNTS, arrays or numbers
    timed: bool = False
    higher: bool = True


METRICS = (
    Metric("tokens_per_target_pass", "Tokens per target pass", "tokens", lambda a, d, k, p, *_: k / p),
    Metric("mean_length", "Mean acceptance length", "tokens per draft", lambda a, d, *_: 1 + a / d),
    Metric("speedup", "Speedup", "ratio",
           lambda a, d, k, p, tt, ts, bt, bs: (tt / ts) / (bt / bs), timed=True),
    Metric("ms_per_token", "Time per token", "ms",
           lambda a, d, k, p, tt, ts, *_: 1000 * ts / tt, timed=True, higher=False),
)


def conversations(report: dict[str, Any]) -> dict[tuple[str, str], tuple[str, np.ndarray]]:
    """(set, id) -> (checksum of the first ids sent, counts [C]) summed over the conversation's turns."""
    found: dict[tuple[str, str], tuple[str, np.ndarray]] = {}
    for one in report["prompts"]:
        key = one["set"], one["id"]
        counts = np.array([one["accepted"], one["drafts"], max(one["tokens"] - 1, 0), one["passes"],
                           *(one.get(name, 0) for name in COUNTS[4:])], dtype=float)
        checksum, earlier = found.get(key, (one["ids_sha256"], 0.0))
        found[key] = checksum, earlier + counts
    return found


def matched(a: dict, b: dict) -> list[tuple[str, str]]:
    """Conversations that both reports asked with the same ids."""
    return [key for key, (checksum, _) in a.items() if key in b and b[key][0] == checksum]


def tables(a: dict, b: dict, timed: bool) -> tuple[np.ndarray, np.ndarray, bool]:
    """Counts [n, C] of both sides and whether their rows are pairs. Pairs are used where at least half of the smaller
    side is matched; then only they count."""
    def chosen(side: dict) -> dict:
        return {key: value for key, value in side.items() if not timed or value[1][5] > 0}

    a, b = chosen(a), chosen(b)
    keys = matched(a, b)
    if keys and 2 * len(keys) >= min(len(a), len(b)):
        return np.array([a[k][1] for k in keys]), np.array([b[k][1] for k in keys]), True
    return (np.array([v for _, v in a.values()]).reshape(-1, len(COUNTS)),
            np.array([v for _, v in b.values()]).reshape(-1, len(COUNTS)), False)


def resampled_sums(table: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """Sums [C, R] of the counts over each resample; picks [R, n] says how often a conversation was drawn."""
    return (picks @ table).T


def judge(metric: Metric, a: dict, b: dict, seed: int) -> dict[str, Any]:
    """The metric on both sides, difference b - a with its 95 % interval and two-sided p-value."""
    left, right, paired = tables(a, b, metric.timed)
    out: dict[str, Any] = {"paired": paired, "n": [len(left), len(right)], "a": None, "b": None, "difference": None,
                           "ci95": None, "p_value": None}
    if min(len(left), len(right)) < FEWEST:
        return out | {"reason": f"needs {FEWEST} conversations on each side"}
    generator = np.random.default_rng(seed)
    picks = [generator.multinomial(len(t), np.full(len(t), 1 / len(t)), size=DRAWS) for t in (left, right)]
    if paired:
        picks[1] = picks[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = [float(metric.of(*t.sum(0))) for t in (left, right)]
        spread = metric.of(*resampled_sums(right, picks[1])) - metric.of(*resampled_sums(left, picks[0]))
    spread = spread[np.isfinite(spread)]
    if not len(spread) or not np.isfinite(values).all():
        return out | {"reason": "not counted, or nothing was drafted, on one side"}
    below, above = np.count_nonzero(spread <= 0), np.count_nonzero(spread >= 0)
    return out | {"a": values[0], "b": values[1], "difference": values[1] - values[0],
                  "ci95": [float(x) for x in np.percentile(spread, [2.5, 97.5])],
                  "p_value": min(1.0, 2 * (min(below, above) + 1) / (len(spread) + 1))}


def holm(p_values: list[float | None]) -> list[float | None]:
    """p-values adjusted for several comparisons with one report (Holm 1979); None stays None."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        adjusted[i] = largest
    return adjusted


def conclusion(metric: Metric, found: dict[str, Any]) -> str:
    """better, worse, no difference shown, or not judged."""
    if found["p_adjusted"] is None:
        return "not judged"
    if found["p_adjusted"] >= ALPHA:
        return "no difference shown"
    return "better" if (found["difference"] > 0) == metric.higher else "worse"
