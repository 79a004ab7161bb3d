"""`make roi ARGS="validate FILE"`: public points, each predicted from its own calibration steps, against what was
measured. `expected` is never fitted on. Alone among the sub-commands it may predict without a calibration.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eval.roi_calibrate import fit, left_out
from eval.roi_points import figure, read_point
from recipes.errors import ConfigError
from recipes.speculation import Constants, speedup, tokens_per_second


@dataclass(frozen=True)
class Judged:
    """One point: predicted and measured, its interval of 90 %, and the errors of its calibration steps left out."""

    name: str
    expected: float
    tolerance: float
    predicted: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    left_out: list[float] = field(default_factory=list)
    steps: int = 0
    unjudged: str = ""  # why nothing could be predicted; such a point counts as missed

    @property
    def error(self) -> float:
        return self.predicted / self.expected - 1

    @property
    def within(self) -> bool:
        return not self.unjudged and abs(self.error) <= self.tolerance


def judge(values: Any, models: dict[str, Any], where: str) -> Judged:
    """Predicts one point; what cannot be predicted is said and counts as missed. ConfigError only for what could not be
    counted: no name, no measured figure, no tolerance."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: must be a mapping, not {values!r}")
    try:
        if values.get("id") is None:
            raise ConfigError("id is missing")
        own = (str(values["id"]), figure(values, "expected", above=True), figure(values, "tol_rel", above=True))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        point = read_point(values, models)
    except ConfigError as error:
        return Judged(*own, unjudged=str(error))
    found = fit(point.observations)

    def predict(c: Constants) -> float:
        if point.kind == "abs_AR":
            return tokens_per_second(point.draft, point.place, c, point.step)
        return speedup(point.draft, point.place, c, point.step)

    return Judged(*own, predict(found.constants), found.interval(predict), left_out(point.observations),
                  len(point.observations))


def read_json(path: Path) -> Any:
    """ConfigError where the file is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def validate(path: Path) -> list[Judged]:
    """Every point of a file; models.json beside it adds sizes of targets. ConfigError for a file that holds no
    points."""
    beside = path.with_name("models.json")
    models = read_json(beside) if beside.exists() else {}
    points = read_json(path)
    if not isinstance(points, list):
        raise ConfigError(f"{path}: must be a list of points")
    if not isinstance(models, dict):
        raise ConfigError(f"{beside}: must be a mapping of names to sizes")
    return [judge(point, models, f"{path}: point {number}") for number, point in enumerate(points)]


def lines(judged: list[Judged]) -> list[str]:
    """A line a point, the errors over all, and the count, which comes last."""
    said = [f"{j.name:32} MISSED: {j.unjudged}" for j in judged if j.unjudged]
    done = [j for j in judged if not j.unjudged]
    said += [f"{j.name:32} predicted {j.predicted:8.3f}  measured {j.expected:8.3f}  error {100 * j.error:+6.1f} %  "
             f"tolerance {100 * j.tolerance:.0f} %  90 % {j.interval[0]:.2f} to {j.interval[1]:.2f}  steps {j.steps}  "
             f"{'ok' if j.within else 'MISSED'}" for j in done]
    sizes = [abs(j.error) for j in done]
    left = [abs(e) for j in judged for e in j.left_out if j.steps > 1]
    if sizes:
        said.append(f"error: median {100 * np.median(sizes):.1f} %, 90th percentile "
                    f"{100 * np.percentile(sizes, 90):.1f} %, worst {100 * max(sizes):.1f} % (n = {len(sizes)})")
    if left:
        said.append(f"calibration steps predicted from the others of their point (leave one out): median "
                    f"{100 * np.median(left):.1f} %, 90th percentile {100 * np.percentile(left, 90):.1f} %, worst "
                    f"{100 * max(left):.1f} % (n = {len(left)})")
    return [*said, f"{sum(j.within for j in judged)} of {len(judged)} within tolerance"]
