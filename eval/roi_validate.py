"""`make roi ARGS="validate FILE"`: public points, each predicted from its own calibration steps, against what was
measured. `expected` is never fitted on. Alone among the sub-commands it may predict without a calibration.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.roi_calibrate import Observation, fit, left_out
from recipes.cost import Format
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.hardware import known
from recipes.model_shape import ModelShape
from recipes.named_shapes import named, short_shape
from recipes.speculation import KINDS, Draft, Place, Step, speedup, tokens_per_second

CONTEXT = 1024.0  # mean cached tokens where a point gives none
PROMPT, ANSWER = 0.75, 0.5  # of the mean context: a prompt of 0.75 and an answer of 0.5 have it half-way through
DRAFT_VOCAB = 32000
SUFFIXES = ("", "-sxm", "-80")


def hardware_named(name: str, custom: dict | None = None):
    """An entry by the name that points and claims use: 'H100', 'A100', 'RTX 3090'. ConfigError names the known ones."""
    table = known(custom or {})
    plain = name.lower().replace(" ", "").replace("_", "-")
    for suffix in SUFFIXES:
        if plain + suffix in table:
            return table[plain + suffix]
    raise ConfigError(f"hw = {name}: unknown; known: {', '.join(table)}")


def place_of(model: str, hw: str, ranks: int, bits: float, models: dict[str, Any]) -> Place:
    """A target of this name on GPUs of this name; `bits` 0: the model's own."""
    short = named(model, models)
    shape, gpu = short_shape(short, f"model {model}"), hardware_named(hw)
    bits = bits or short.get("bits", 16)
    flops = gpu.flops("fp8" if 8 <= bits < 9 and "fp8" in gpu.tflops else "bfloat16")
    keep = Format(bits, 16, 16, ranks)
    return Place(shape, keep, gpu.bandwidth_tb_s * 1e12, flops, gpu.link_gb_s * 1e9)


def eagle_size(shape: ModelShape, taps: int = 3, draft_vocab: int = DRAFT_VOCAB, layers: int = 1) -> DraftSize:
    """An EAGLE-3 drafter as wide as its target, with its heads; an MLA or expert target gives it the dense width that
    it has, or three times the hidden size."""
    a, H = shape.attention, shape.hidden
    dim = a.cached // (2 * a.kv_heads) if a.kv_heads else 128
    width = max((m.out for m in shape.matrices if m.name == "mlp in"), default=3 * H)
    return DraftSize(H, H, taps, a.heads, a.kv_heads or a.heads, dim, width, draft_vocab, shape.vocab, layers=layers)


def draft_of(kind: str, shape: ModelShape, models: dict[str, Any] | None = None) -> Draft:
    """A drafter of this kind, or the standalone model of this name. ConfigError for neither."""
    if kind in KINDS and kind != "model":
        return Draft(kind, eagle_size(shape)) if kind in ("eagle3", "parallel") else Draft(kind)
    short = named(kind, models)
    return Draft("model", model=short_shape(short, f"draft {kind}"), bits=short.get("bits", 16))


def step_of(point: dict[str, Any], default: dict[str, Any]) -> Step:
    """One step of a point; what a calibration step does not say is its point's."""
    context = point.get("ctx", default.get("ctx", CONTEXT))
    K = point["K"]
    chain = {"topk": 1, "nver": 0} if point is not default else default
    return Step(point["B"], K, context, point.get("topk", chain.get("topk", 1)) if K else 1,
                point.get("nver", chain.get("nver", 0)) if K else 0, point.get("AL", 1.0) if K else 1.0,
                PROMPT * context, ANSWER * context)


def observations_of(point: dict[str, Any], models: dict[str, Any]) -> list[Observation]:
    """What a point may be calibrated on: step times in ms, a speedup at another batch, a plain rate."""
    found = []
    for step in point.get("calibrate", []):
        place = place_of(step.get("model", point["model"]), point["hw"], step.get("tp", point.get("tp", 1)),
                         step.get("bits", point.get("bits", 0)), models)
        draft = draft_of(point.get("draft", "eagle3"), place.shape, models)
        found.append(Observation("step", step["ms"] / 1e3, place, draft, step_of(step, point)))
    place = place_of(point["model"], point["hw"], point.get("tp", 1), point.get("bits", 0), models)
    draft = draft_of(point.get("draft", "eagle3"), place.shape, models)
    for batch, value in point.get("calibrate_S", {}).items():
        found.append(Observation("speedup", value, place, draft, step_of({**point, "B": float(batch)}, point)))
    if "anchor_tok_s" in point:
        plain = step_of({**point, "B": 1, "K": 0}, point)
        found.append(Observation("step", 1 / point["anchor_tok_s"], place, draft, plain))
    return found


@dataclass(frozen=True)
class Judged:
    """One point: predicted and measured, its interval of 90 %, and the errors of its calibration steps left out."""

    name: str
    predicted: float
    expected: float
    tolerance: float
    interval: tuple[float, float]
    left_out: list[float]
    steps: int
    unjudged: str = ""  # why nothing could be predicted; such a point counts as missed

    @property
    def error(self) -> float:
        return self.predicted / self.expected - 1

    @property
    def within(self) -> bool:
        return not self.unjudged and abs(self.error) <= self.tolerance


def judge(point: dict[str, Any], models: dict[str, Any]) -> Judged:
    """Predicts one point. ConfigError for one of another kind."""
    observations = observations_of(point, models)
    place = place_of(point["model"], point["hw"], point.get("tp", 1), point.get("bits", 0), models)
    draft, step = draft_of(point.get("draft", "eagle3"), place.shape, models), step_of(point, point)
    found = fit(observations)
    if point["kind"] in ("speedup", "speedup_calS"):
        def predict(c):
            return speedup(draft, place, c, step)
    elif point["kind"] == "abs_AR":
        def predict(c):
            return tokens_per_second(draft, place, c, step)
    else:
        raise ConfigError(f"{point['id']}: kind = {point['kind']}: unknown; known: speedup, speedup_calS, abs_AR")
    return Judged(point["id"], predict(found.constants), point["expected"], point["tol_rel"], found.interval(predict),
                  left_out(observations), len(observations))


def read_json(path: Path) -> Any:
    """ConfigError where the file is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def validate(path: Path) -> list[Judged]:
    """Every point of a file; models.json beside it adds sizes of targets. ConfigError names a field that is missing."""
    beside = path.with_name("models.json")
    models, found = read_json(beside) if beside.exists() else {}, []
    points = read_json(path)
    if not isinstance(points, list):
        raise ConfigError(f"{path}: must be a list of points")
    for number, point in enumerate(points):
        try:
            found.append(judge(point, models))
        except ConfigError as error:  # a target or GPU that nobody described: said, and counted as missed
            found.append(Judged(str(point["id"]), 0.0, point["expected"], point["tol_rel"], (0.0, 0.0), [], 0,
                                str(error)))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: point {number}: {error.args[0]!r} is missing or of the wrong type") from None
    return found


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
