"""The files between the sub-commands of `make roi`: measured steps and the calibration (eval/roi_accepted.py reads
acceptance)."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from eval import roi_refuse as refuse
from eval.roi_calibrate import NAMES, NOISE, Fit, Observation, errors, fit, left_out
from eval.roi_names import OWN_WEIGHTS, draft_of, hardware_named, kind_of, products_dtype
from eval.roi_validate import read_json
from recipes.cost import Format
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.files import write_json
from recipes.hardware import Hardware, described
from recipes.loader import parse_into
from recipes.model_shape import ModelShape, quantised_bits, shape_of
from recipes.named_shapes import named, short_shape
from recipes.schema import opt
from recipes.speculation import IN_TURNS, OVERLAP, Draft, Place, Step, weight_read_bound

STEPS, CALIBRATION = "drafthouse.steps/1", "drafthouse.calibration/1"
OF_KINDS = ("layers", "vocab", "blocks")  # what a drafter is known by that has no sizes of its own
FEWEST_LENGTHS = 2  # draft lengths beside plain decoding at one batch
Kept = Annotated[float, Field(ge=1)]


@dataclass
class Timed:
    """One measured time."""

    what: Literal["step", "target", "draft"] = opt("step", "step: plain (K 0) or a cycle; target: one pass of `width`")
    rows: PositiveInt = opt(1, "B")
    K: NonNegativeInt = opt(0, "draft length")
    width: NonNegativeInt = opt(0, "target: tokens a row")
    context: NonNegativeFloat = opt(1024.0, "cached tokens a row")
    ms: PositiveFloat = opt(1.0, "milliseconds")
    kept: Kept = opt(1.0, "acceptance length while it was taken")
    topk: PositiveInt = opt(1, "branches of a tree")
    verified: NonNegativeInt = opt(0, "nodes of a tree that are verified")
    prompt: NonNegativeFloat = opt(0.0, "prompt of a request, where the time contains its prefill")
    answer: NonNegativeFloat = opt(0.0, "answer of a request, likewise")
    held_out: bool = opt(False, "predicted, not calibrated on")

    def step(self) -> Step:
        verified = self.width if self.what == "target" else self.verified
        K = max(self.K, 1) if self.what == "target" and self.width > 1 else self.K
        return Step(self.rows, K, self.context, self.topk, verified, self.kept, self.prompt, self.answer)

    @property
    def tokens(self) -> float:
        """Verified in this step."""
        return self.rows * self.step().width if self.what != "draft" else 0.0

    def check(self, where: str) -> None:
        """ConfigError for a time that no run can have."""
        needed = {"target": "width", "draft": "K"}.get(self.what)
        if needed and not getattr(self, needed):
            raise ConfigError(f"{where}: {needed} is missing: a {self.what} needs it")
        if self.what == "step" and self.kept > self.K + 1 + 1e-6:
            raise ConfigError(f"{where}: kept = {self.kept:g}: a step of K {self.K} keeps {self.K + 1} tokens at most")


@dataclass
class TargetEntry:
    """`target` of steps.json."""

    model: str = opt("", "a named shape, or what names the target")
    config: dict[str, Any] = opt({}, "its config.json; empty: the named shape's sizes")
    weight_bits: NonNegativeFloat = opt(0.0, "bits of its layers' weights; 0: its own")
    other_bits: NonNegativeFloat = opt(0.0, "bits of other weights and states; 0 is 16")
    cache_bits: NonNegativeFloat = opt(0.0, "bits of keys and values; 0 is as other_bits")
    dtype: str = opt("bfloat16", "dtype of the products where weights are not fp8")
    expanded: bool = opt(False, "MLA's keys and values are kept for every head")
    fingerprint: dict[str, Any] = opt({}, "of its weights, config, tokenizer, template")


@dataclass
class DrafterEntry:
    """`drafter` of steps.json."""

    kind: str = opt("eagle3", "kind, or a named shape")
    size: dict[str, Any] = opt({}, "sizes of an EAGLE-3 or parallel drafter; empty: as wide as the target")
    bits: PositiveFloat = opt(16.0, "bits of its weights")
    layers: NonNegativeInt = opt(0, "of a layer_cut or small_lm; 0 is a third of the target's")
    vocab: NonNegativeInt = opt(0, "Medusa: tokens that a head can propose; 0 is the target's vocabulary")
    blocks: PositiveInt = opt(1, "Medusa: residual blocks of a head")


@dataclass
class Steps:
    """steps.json: what `measure` writes, or what a user fills in from an own benchmark."""

    schema: str = opt(STEPS, "version of this form")
    profile: Literal["engine", "loop"] = opt("engine", "prior of the constants")
    engine: dict[str, Any] = opt({}, "name, version, flags")
    hardware: dict[str, Any] = opt({}, "name of a table entry, or an entry")
    tensor_parallel: PositiveInt = opt(1, "GPUs of a replica")
    target: dict[str, Any] = opt({}, "fields of TargetEntry")
    drafter: dict[str, Any] = opt({}, "fields of DrafterEntry; empty, or kind none: no drafter was timed")
    acceptance: Literal["measured", "synthetic"] = opt("measured", "how drafts were accepted while it was measured")
    points: list[Timed] = field(default_factory=list)
    machine: dict[str, Any] = opt({}, "provenance: load, time")

    def check(self, where: str) -> None:
        """ConfigError for an entry with unknown keys, or a point that no run can have."""
        parse_into(TargetEntry, self.target, f"{where}: target")
        drafter = parse_into(DrafterEntry, self.drafter, f"{where}: drafter")
        if drafter.size:
            parse_into(DraftSize, drafter.size, f"{where}: drafter.size")
        gpu_of(self.hardware)
        for number, point in enumerate(self.points):
            point.check(f"{where}: points[{number}]")

    def place(self) -> Place:
        gpu = gpu_of(self.hardware)
        return place_on(gpu, shape_in(self.target), self.target, self.tensor_parallel,
                        gpu.layer_us if self.profile == "loop" else 100.0)

    def draft(self) -> Draft:
        kind, bits = self.drafter.get("kind", "eagle3"), self.drafter.get("bits", 16.0)
        if size := self.drafter.get("size"):
            return Draft(kind_of(kind), parse_into(DraftSize, size, "steps: drafter.size"), bits=bits)
        known = {key: self.drafter[key] for key in OF_KINDS if key in self.drafter}
        draft = draft_of(kind, shape_in(self.target), **known)
        return dataclasses.replace(draft, bits=bits) if kind_of(kind) in OWN_WEIGHTS else draft

    def observations(self, held_out: bool = False) -> list[Observation]:
        place, draft = self.place(), self.draft()
        return [Observation(p.what, p.ms / 1e3, place, draft, p.step()) for p in self.points if p.held_out == held_out]


def gpu_of(entry: dict[str, Any]) -> Hardware:
    """A table entry by its name, or the entry itself. ConfigError for an entry without its peaks."""
    if set(entry) <= {"name"}:
        return hardware_named(entry.get("name") or "")
    return described({k: v for k, v in entry.items() if k != "name"}, "steps: hardware")


def shape_in(target: dict[str, Any]) -> ModelShape:
    if target.get("config"):
        return shape_of(target["config"], "steps: target.config")
    name = target.get("model", "")
    return short_shape(named(name), f"model {name}")


def bits_in(target: dict[str, Any]) -> float:
    """Bits of the target's weights: as said, else those of its checkpoint or of the named shape, else 16."""
    if target.get("weight_bits"):
        return float(target["weight_bits"])
    if target.get("config"):
        return quantised_bits(target["config"], "steps: target.config") or 16.0
    return float(named(target.get("model", "")).get("bits", 16))


def place_on(gpu: Hardware, shape: ModelShape, target: dict[str, Any], ranks: int, prompt_layer_us: float) -> Place:
    """A target kept as `target` says on GPUs of this kind. A CPU's core moves and computes in turns."""
    bits = bits_in(target)
    other = float(target.get("other_bits") or 16.0)
    dtype = products_dtype(bits, gpu)
    dtype = target.get("dtype", dtype) if dtype == "bfloat16" else dtype
    keep = Format(bits, other, float(target.get("cache_bits") or other), ranks,
                  expanded=bool(target.get("expanded", False)))
    return Place(shape, keep, gpu.bandwidth_tb_s * 1e12, gpu.flops(dtype), gpu.link_gb_s * 1e9, prompt_layer_us,
                 IN_TURNS if gpu.cpu else OVERLAP)


def read_steps(path: Path) -> Steps:
    """steps.json. ConfigError for another form, an unknown key or a time that no run can have."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("schema") != STEPS:
        raise ConfigError(f"{path}: schema must be {STEPS}; make roi ARGS=measure writes such a file")
    steps = parse_into(Steps, values, str(path))
    steps.check(str(path))
    return steps


@dataclass(frozen=True)
class Calibration:
    """A fit with what it rests on. `lengths`, `batches`: measured; `largest`: tokens verified in the largest step."""

    fit: Fit
    steps: Steps
    largest: float
    lengths: list[int]
    batches: list[int]
    errors: list[float]
    left_out: list[float]
    held_out: list[float]

    @property
    def across_batches(self) -> bool:
        return len(self.batches) > 1


def require_possible(steps: Steps) -> None:
    """Refusal 4 for an engine's step that no run can have, three times what repeated runs differ by allowed for: one
    that reads the weights faster than the memory, or a cycle shorter than the plain step beside it, whose speedup would
    be above its acceptance length; 8 for GPUs that cannot share the heads. The loop's steps are this project's own, on
    hardware that was measured."""
    if steps.profile == "loop":
        return
    place, slack = steps.place(), 1 + 3 * NOISE
    refuse.split_replica(1, steps.tensor_parallel, place.shape)
    plain = {(p.rows, p.context): p.ms for p in steps.points if p.what == "step" and not p.K}
    for number, p in enumerate(steps.points):
        where = f"points[{number}] ({p.what}, rows {p.rows}, K {p.K}, {p.ms:g} ms)"
        rate, most = 1e3 * p.rows / p.ms, weight_read_bound(place.shape, place.keep, place.bandwidth, p.rows)
        if p.what != "draft" and rate > slack * most:
            refuse.beyond_bounds(tok_s=rate, bound=most, where=where)
        gain = p.kept * plain.get((p.rows, p.context), 0.0) / p.ms
        if p.what == "step" and p.K and gain > slack * p.kept:
            refuse.beyond_bounds(speedup=gain, kept=p.kept, where=where)


def calibrate(steps: Steps) -> Calibration:
    """Fits the steps that are not held out. ConfigError below the minimum: plain decoding and two draft lengths at one
    batch. Refusal 4 for a step that cannot be."""
    used = [p for p in steps.points if not p.held_out]
    cycles = [p for p in used if p.what == "step"]
    refuse.unmeasured_steps(len(cycles))
    enough = any({p.K for p in cycles if p.rows == rows} >= {0}
                 and len({p.K for p in cycles if p.rows == rows and p.K}) >= FEWEST_LENGTHS
                 for rows in {p.rows for p in cycles})
    plain_only = not steps.drafter or steps.drafter.get("kind") == "none"
    if not enough and not plain_only:
        raise ConfigError("calibrate: needs plain decoding and two draft lengths at one batch; the steps have "
                          + (", ".join(f"batch {p.rows} K {p.K}" for p in cycles) or "none"))
    require_possible(steps)
    observations = steps.observations()
    found = fit(observations, steps.profile)
    return Calibration(found, steps, max(p.tokens for p in used), sorted({p.K for p in cycles if p.K}),
                       sorted({p.rows for p in cycles}), errors(found, observations),
                       left_out(observations, steps.profile), errors(found, steps.observations(held_out=True)))


def write_calibration(path: Path, found: Calibration) -> None:
    """calibration.json: the constants, their uncertainty, and the steps themselves, from which it can be made again."""
    write_json(path, {
        "schema": CALIBRATION, "profile": found.fit.profile, "constants": dataclasses.asdict(found.fit.constants),
        "log_sd": dict(zip(NAMES, np.sqrt(np.diag(found.fit.covariance)).tolist())),
        "logs": found.fit.logs.tolist(), "covariance": found.fit.covariance.tolist(),
        "errors": found.errors, "left_out": found.left_out, "held_out": found.held_out, "largest": found.largest,
        "lengths": found.lengths, "batches": found.batches, "steps": dataclasses.asdict(found.steps)})


def read_calibration(path: Path) -> Calibration:
    """calibration.json. Refusal 2 where there is none."""
    if not path.exists():
        refuse.unmeasured_steps(0)
    values = read_json(path)
    if not isinstance(values, dict) or values.get("schema") != CALIBRATION:
        raise ConfigError(f"{path}: schema must be {CALIBRATION}; make roi ARGS=calibrate writes such a file")
    try:
        if list(values["log_sd"]) != NAMES:
            raise ConfigError(f"{path}: has other constants than this version; run make roi ARGS=calibrate again")
        steps = parse_into(Steps, values["steps"], f"{path}: steps")
        found = Fit(np.array(values["logs"]), np.array(values["covariance"]), values["profile"], len(values["errors"]))
        return Calibration(found, steps, values["largest"], values["lengths"], values["batches"], values["errors"],
                           values["left_out"], values["held_out"])
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]} is missing; make roi ARGS=calibrate writes it") from None
