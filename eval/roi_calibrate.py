"""Fits an engine's constants to measured step times: log-constants with the engine profile's prior.

A few steps cannot determine nine constants. Each has a prior (median, standard deviation of its logarithm) from what is
known of such engines; measured times, taken to be right within `NOISE`, move those that they speak of, and what they
leave open stays as wide as the prior. Predictions are drawn from that (Laplace) distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from scipy.optimize import least_squares

from recipes.errors import ConfigError
from recipes.speculation import Constants, Draft, Place, Step, draft_seconds, speedup, step_seconds, target_seconds

NOISE = 0.03  # of the logarithm of a measured time: what repeated runs of a server differ by
NAMES = [f.name for f in fields(Constants)]
BELOW_ONE = {"moved", "done", "apart"}  # shares of a peak
DRAWS = 400


@dataclass(frozen=True)
class Prior:
    """(median, standard deviation of the logarithm) of each constant, and where it is from."""

    medians: Constants
    spread: dict[str, float]
    why: str
    cap: float = 1.0  # of a share of a peak: more, where the peaks were measured with other shapes


PRIORS = {
    "engine": Prior(
        Constants(),
        {"moved": 0.15, "done": 0.3, "layer_us": 1.0, "reduce_us": 0.5, "cycle_us": 0.7, "draft_us": 0.7,
         "row_us": 1.0, "apart": 0.2, "rest": 0.5},
        "a GPU engine with CUDA graphs. Share of the bandwidth, 15 us a layer taken off: 16-bit weights on one GPU in "
        "the READMEs of gpt-fast (258ae2e: A100, 7B 0.72, 8B 0.72; half an MI250X, 7B 0.64) and of torchao (03d01ad: "
        "A100, 7B 0.73, 8B 0.74): geometric mean 0.71. Wide products reach about half of the peak; graphs leave about "
        "15 us a layer, a sum over NVLink 10 us; a drafter's pass and a cycle's bookkeeping are host work of tenths of "
        "a millisecond to milliseconds"),
    "loop": Prior(
        Constants(1.0, 1.0, 900.0, 10.0, 2000.0, 2000.0, 100.0, 0.8, 1.0),
        {"moved": 0.3, "done": 0.3, "layer_us": 0.5, "reduce_us": 0.1, "cycle_us": 1.0, "draft_us": 1.0, "row_us": 1.0,
         "apart": 0.2, "rest": 0.1},
        "this project's loop on a CPU whose peaks were measured: eager layers cost near a millisecond, the loop's own "
        "Python a few", cap=3.0),
}


@dataclass(frozen=True)
class Observation:
    """One measured figure. what: step (seconds of a plain step or a cycle), target (seconds of one pass of `width`
    tokens a row), draft (seconds of a draft) or speedup."""

    what: str
    value: float
    place: Place
    draft: Draft
    step: Step

    def predict(self, c: Constants) -> float:
        if self.what == "speedup":
            return speedup(self.draft, self.place, c, self.step)
        if self.what == "draft":
            return draft_seconds(self.draft, self.place, c, self.step)
        if self.what == "target":
            return target_seconds(self.place, c, self.step.rows, self.step.width, self.step.context)
        return step_seconds(self.draft, self.place, c, self.step)


@dataclass(frozen=True)
class Fit:
    """The constants, the covariance of their logarithms, and what they were fitted to."""

    logs: np.ndarray  # [constants]
    covariance: np.ndarray
    profile: str
    observations: int

    @property
    def constants(self) -> Constants:
        return Constants.from_logs(self.logs)

    def draws(self, count: int = DRAWS, seed: int = 0) -> list[Constants]:
        """Constants drawn from the posterior, shares of a peak below the profile's cap."""
        drawn = np.random.default_rng(seed).multivariate_normal(self.logs, self.covariance, size=count)
        return [Constants.from_logs(np.minimum(row, _upper(self.profile))) for row in drawn]

    def interval(self, predict: Callable[[Constants], float], level: float = 0.9) -> tuple[float, float]:
        """Interval of a prediction over the posterior."""
        found = [predict(c) for c in self.draws()]
        low, high = np.percentile(found, [50 - 50 * level, 50 + 50 * level])
        return float(low), float(high)


def _upper(profile: str) -> np.ndarray:
    cap = np.log(PRIORS[profile].cap)
    return np.array([cap if n in BELOW_ONE - {"apart"} else 0.0 if n == "apart" else np.inf for n in NAMES])


def prior_of(profile: str) -> Prior:
    if profile not in PRIORS:
        raise ConfigError(f"profile = {profile}: unknown; known: {', '.join(PRIORS)}")
    return PRIORS[profile]


def fit(observations: list[Observation], profile: str = "engine") -> Fit:
    """Most probable log-constants and their covariance. Without observations: the prior itself."""
    prior = prior_of(profile)
    centre = np.array(prior.medians.logs())
    spread = np.array([prior.spread[n] for n in NAMES])
    wanted = np.log([o.value for o in observations])

    def residuals(logs: np.ndarray) -> np.ndarray:
        c = Constants.from_logs(logs)
        found = np.log([o.predict(c) for o in observations])
        return np.concatenate([(found - wanted) / NOISE, (logs - centre) / spread])

    if not observations:
        return Fit(centre, np.diag(spread**2), profile, 0)
    upper = _upper(profile)
    start = np.minimum(centre, upper - 1e-6)
    done = least_squares(residuals, start, bounds=(np.full(len(centre), -np.inf), upper), x_scale=spread)
    return Fit(done.x, np.linalg.inv(done.jac.T @ done.jac), profile, len(observations))


def errors(found: Fit, observations: list[Observation]) -> list[float]:
    """Relative error of each figure under a fit."""
    return [o.predict(found.constants) / o.value - 1 for o in observations]


def left_out(observations: list[Observation], profile: str = "engine") -> list[float]:
    """Relative error of each figure predicted from all the others."""
    return [errors(fit(observations[:i] + observations[i + 1:], profile), [o])[0] for i, o in enumerate(observations)]
