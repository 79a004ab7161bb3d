"""Public points, as `make roi ARGS="validate FILE"` reads them: every field checked, nothing taken for another."""

import math
from dataclasses import dataclass
from typing import Any

from eval.roi_calibrate import Observation
from eval.roi_names import draft_of, place_of
from recipes.errors import ConfigError
from recipes.speculation import Draft, Place, Step

KINDS = ("speedup", "speedup_calS", "abs_AR")
CONTEXT = 1024.0  # mean cached tokens where a point gives none
PROMPT, ANSWER = 0.75, 0.5  # of the mean context: a prompt of 0.75 and an answer of 0.5 have it half-way through
LONGEST_MS, LARGEST = 1e6, 1e6  # of a step: milliseconds, rows
NONE = Draft("none")


@dataclass(frozen=True)
class Point:
    """What is predicted (kind), where, of which drafter, and what it may be calibrated on."""

    kind: str
    place: Place
    draft: Draft
    step: Step
    observations: list[Observation]


def figure(values: dict[str, Any], name: str, default: float | None = None, least: float = 0.0,
           most: float = math.inf, above: bool = False) -> float:
    """A number of a point; null is as if it were left out. ConfigError where it is missing, none, or out of bounds
    (`above`: `least` itself is too)."""
    value = values.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} = {value!r}: must be a finite number")
    if value < least or value > most or (above and value == least):
        bounds = f"{'above' if above else 'at least'} {least:g}" + (f", at most {most:g}" if most < math.inf else "")
        raise ConfigError(f"{name} = {value!r}: must be {bounds}")
    return value


def whole(values: dict[str, Any], name: str, default: float | None = None, least: float = 0.0) -> int:
    value = figure(values, name, default, least)
    if value != int(value):
        raise ConfigError(f"{name} = {value!r}: must be a whole number")
    return int(value)


def text(values: dict[str, Any], name: str, default: str = "") -> str:
    value = values.get(name)
    if value is None and default:
        return default
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is missing" if value is None else f"{name} = {value!r}: must be a name")
    return value


def step_of(values: dict[str, Any], point: dict[str, Any], kept: float | None = None) -> Step:
    """One step; batch and context that it does not say are its point's, a tree is its own. `kept`: acceptance length
    where it gives none. A calibration step of a draft whose acceptance length nobody gives is a cycle's own time, in
    which there is no prefill; the predicted step needs its own."""
    context = figure(values, "ctx", figure(point, "ctx", CONTEXT))
    rows = figure(values, "B", figure(point, "B", math.nan, 0, LARGEST, True), 0, LARGEST, True)
    if math.isnan(rows):
        raise ConfigError("B is missing")
    K = whole(values, "K")
    prompt, answer = PROMPT * context, ANSWER * context
    if not K:
        return Step(rows, 0, context, prompt=prompt, answer=answer)
    most = K + 1.0
    if values.get("AL") is None and kept is None and values is not point:
        kept, prompt, answer = 1.0, 0.0, 0.0
    kept = figure(values, "AL", kept, 1.0, most)
    return Step(rows, K, context, whole(values, "topk", 1, 1), whole(values, "nver", 0), kept, prompt, answer)


def place_in(values: dict[str, Any], point: dict[str, Any], models: dict[str, Any]) -> Place:
    """Where a step ran; what it does not say is its point's, but the bits of another model are that model's own."""
    model = text(values, "model", text(point, "model"))
    bits = figure(values, "bits", figure(point, "bits", 0) if model == point["model"] else 0)
    return place_of(model, text(values, "hw", text(point, "hw")), whole(values, "tp", whole(point, "tp", 1, 1), 1),
                    bits, models)


def draft_in(values: dict[str, Any], point: dict[str, Any], K: int, place: Place, models: dict[str, Any]) -> Draft:
    """The drafter of a step; a plain one has none, whatever its name."""
    return draft_of(text(values, "draft", text(point, "draft", "eagle3")), place.shape, models) if K else NONE


def timed(values: Any, point: dict[str, Any], models: dict[str, Any]) -> Observation:
    """A calibration step."""
    if not isinstance(values, dict):
        raise ConfigError(f"{values!r}: must be a step")
    seconds = figure(values, "ms", most=LONGEST_MS, above=True) / 1e3
    same = all((values.get(name) or 1) == (point.get(name) or 1) for name in ("K", "topk"))
    step = step_of(values, point, figure(point, "AL", least=1.0) if same and point.get("AL") is not None else None)
    place = place_in(values, point, models)
    return Observation("step", seconds, place, draft_in(values, point, step.K, place, models), step)


def observations_of(point: dict[str, Any], models: dict[str, Any]) -> list[Observation]:
    """What a point may be calibrated on: step times in ms, a speedup at another batch, a plain rate."""
    found, steps, gains = [], point.get("calibrate") or [], point.get("calibrate_S") or {}
    if not isinstance(steps, list) or not isinstance(gains, dict):
        raise ConfigError("calibrate must be a list of steps, calibrate_S a mapping of batch to speedup")
    for number, values in enumerate(steps):
        try:
            found.append(timed(values, point, models))
        except ConfigError as error:
            raise ConfigError(f"calibrate[{number}]: {error}") from None
    place = place_in(point, point, models)
    for batch in gains:
        try:
            rows = figure({"batch": float(batch)}, "batch", above=True)
        except ValueError:
            raise ConfigError(f"calibrate_S: {batch!r} is no batch") from None
        step = step_of(at := point | {"B": rows}, at)
        found.append(Observation("speedup", figure(gains, batch, above=True), place,
                                 draft_in(point, point, step.K, place, models), step))
    if point.get("anchor_tok_s") is not None:
        plain = step_of(at := point | {"B": 1, "K": 0}, at)
        found.append(Observation("step", 1 / figure(point, "anchor_tok_s", above=True), place, NONE, plain))
    return found


def read_point(values: dict[str, Any], models: dict[str, Any]) -> Point:
    """ConfigError, one line, for what cannot be predicted: a target, GPU, drafter or kind that nobody described, a
    field that is missing, a figure that no run can have."""
    kind = text(values, "kind")
    if kind not in KINDS:
        raise ConfigError(f"kind = {kind}: unknown; known: {', '.join(KINDS)}")
    place = place_in(values, values, models)
    if kind == "abs_AR":
        step, draft = step_of(at := values | {"K": 0}, at), NONE
    else:
        step = step_of(values, values)
        if not step.K:
            raise ConfigError("K = 0: a speedup needs a draft")
        draft = draft_in(values, values, step.K, place, models)
    return Point(kind, place, draft, step, observations_of(values, models))
