"""Acceptance as vLLM counts it, from the lengths of accepted prefixes. K draft length."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Acceptance:
    """Counters of drafts that ran. accepted[i]: drafts whose first i+1 tokens were all accepted (cumulative). K: most
    tokens that a draft can have accepted. drafted: tokens proposed (default: K a draft). refused[i]: drafts whose first
    i tokens were accepted and all drafted behind them refused (default: of chains of K, what was not accepted)."""

    K: int
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: int = -1
    refused: list[int] = field(default_factory=list, compare=False)  # engines' own counters do not say it

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.K
        self.drafted = self.drafts * self.K if self.drafted < 0 else self.drafted
        self.refused = self.refused or [a - b for a, b in zip([self.drafts, *self.accepted], self.accepted)]

    def add(self, length: int, drafted: int | None = None, refused: bool | None = None) -> None:
        """Counts one draft of `drafted` tokens (None: K) of which `length` were accepted, before any trimming at an end
        token. refused: whether one was drafted behind those (None: of a chain, whether it is longer); a chain that
        stopped early and a leaf of a tree have none."""
        drafted = self.K if drafted is None else drafted
        self.drafts += 1
        self.drafted += drafted
        for i in range(length):
            self.accepted[i] += 1
        if length < min(drafted, self.K) if refused is None else refused:
            self.refused[length] += 1

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """Sum over prompts, ranks or engine replicas (case 55)."""
        return Acceptance(self.K, self.drafts + other.drafts, [a + b for a, b in zip(self.accepted, other.accepted)],
                          self.drafted + other.drafted, [a + b for a, b in zip(self.refused, other.refused)])

    @property
    def rate(self) -> float:
        """accepted tokens / drafted tokens."""
        return sum(self.accepted) / self.drafted if self.drafted else 0.0

    @property
    def mean_length(self) -> float:
        """1 + accepted / drafts: the bonus token included."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 1.0

    @property
    def per_position(self) -> list[float]:
        """Cumulative rate of each position: accepted at i / drafts."""
        return [a / self.drafts if self.drafts else 0.0 for a in self.accepted]

    @property
    def conditional(self) -> list[float]:
        """Rate of each position among the drafts that were right so far and have a token there (case 54)."""
        return [a / (a + b) if a + b else 0.0 for a, b in zip(self.accepted, self.refused)]


def resampled(prompts: int, seed: int, draws: int) -> np.ndarray:
    """Indices [draws, prompts] of prompts drawn with replacement."""
    return np.random.default_rng(seed).integers(0, prompts, size=(draws, prompts))


def ratios(values: np.ndarray, weights: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """sum(values) / sum(weights) of each draw: [draws]; NaN where the weights are all zero."""
    totals = weights[picks].sum(1)
    return values[picks].sum(1) / np.where(totals == 0, np.nan, totals)


def bootstrap(values: np.ndarray, weights: np.ndarray, seed: int, draws: int = 2000) -> list[float]:
    """95 % interval of sum(values) / sum(weights) by resampling prompts with replacement."""
    if len(values) < 2:
        return [float("nan")] * 2
    found = ratios(values, weights, resampled(len(values), seed, draws))
    return [float(x) for x in np.nanpercentile(found, [2.5, 97.5])]


def bootstrap_difference(a: np.ndarray, a_weights: np.ndarray, b: np.ndarray, b_weights: np.ndarray, seed: int,
                         level: float = 0.95, draws: int = 2000) -> list[float]:
    """Interval of sum(a) / sum(a_weights) - sum(b) / sum(b_weights), each over the same resampled prompts."""
    if len(a) < 2:
        return [float("nan")] * 2
    picks = resampled(len(a), seed, draws)
    found = ratios(a, a_weights, picks) - ratios(b, b_weights, picks)
    return [float(x) for x in np.nanpercentile(found, [50 - 50 * level, 50 + 50 * level])]


def repeated_share(tokens: list[int], n: int = 8) -> float:
    """Share of an answer's tokens inside an n-gram that occurs more than once in it."""
    seen: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(tokens) - n + 1):
        seen.setdefault(tuple(tokens[i : i + n]), []).append(i)
    inside = {i + j for starts in seen.values() if len(starts) > 1 for i in starts for j in range(n)}
    return len(inside) / len(tokens) if tokens else 0.0
