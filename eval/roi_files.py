"""The files between the sub-commands of `make roi`: measured steps, the calibration, measured acceptance."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from eval import roi_refuse as refuse
from eval.roi_calibrate import NAMES, Fit, Observation, errors, fit, left_out
from eval.roi_refuse import Conditions
from eval.roi_validate import draft_of, hardware_named, read_json
from recipes.cost import Format
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.files import write_json
from recipes.hardware import Hardware
from recipes.loader import parse_into
from recipes.model_shape import ModelShape, shape_of
from recipes.named_shapes import named, short_shape
from recipes.schema import opt
from recipes.speculation import Draft, Place, Step

STEPS, CALIBRATION, ACCEPTANCE = "drafthouse.steps/1", "drafthouse.calibration/1", "drafthouse.acceptance/1"
FEWEST_LENGTHS = 2  # draft lengths beside plain decoding at one batch
FEWEST_DRAFTS = 30  # of a context bucket that counts as measured


@dataclass
class Timed:
    """One measured time."""

    what: Literal["step", "target", "draft"] = opt("step", "step: plain (K 0) or a cycle; target: one pass of `width`")
    rows: PositiveInt = opt(1, "B")
    K: int = opt(0, "draft length")
    width: int = opt(0, "target: tokens a row")
    context: NonNegativeFloat = opt(1024.0, "cached tokens a row")
    ms: PositiveFloat = opt(1.0, "milliseconds")
    kept: PositiveFloat = opt(1.0, "acceptance length while it was taken")
    topk: PositiveInt = opt(1, "branches of a tree")
    verified: int = opt(0, "nodes of a tree that are verified")
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


@dataclass
class Steps:
    """steps.json: what `measure` writes, or what a user fills in from an own benchmark."""

    schema: str = opt(STEPS, "version of this form")
    profile: Literal["engine", "loop"] = opt("engine", "prior of the constants")
    engine: dict[str, Any] = opt({}, "name, version, flags")
    hardware: dict[str, Any] = opt({}, "name of a table entry, or an entry")
    tensor_parallel: PositiveInt = opt(1, "GPUs of a replica")
    target: dict[str, Any] = opt({}, "model (a named shape) or config (a config.json); weight_bits, other_bits, "
                                     "cache_bits, dtype, expanded, fingerprint")
    drafter: dict[str, Any] = opt({}, "kind; size")
    acceptance: Literal["measured", "synthetic"] = opt("measured", "how drafts were accepted while it was measured")
    points: list[Timed] = field(default_factory=list)
    machine: dict[str, Any] = opt({}, "provenance: load, time")

    def place(self) -> Place:
        gpu = gpu_of(self.hardware)
        return place_on(gpu, shape_in(self.target), self.target, self.tensor_parallel,
                        gpu.layer_us if self.profile == "loop" else 100.0)

    def draft(self) -> Draft:
        kind, size = self.drafter.get("kind", "eagle3"), self.drafter.get("size")
        if size:
            return Draft(kind, DraftSize(**size), bits=self.drafter.get("bits", 16.0))
        return draft_of(kind, shape_in(self.target))

    def observations(self, held_out: bool = False) -> list[Observation]:
        place, draft = self.place(), self.draft()
        return [Observation(p.what, p.ms / 1e3, place, draft, p.step()) for p in self.points if p.held_out == held_out]


def gpu_of(entry: dict[str, Any]) -> Hardware:
    """A table entry by its name, or the entry itself."""
    if set(entry) <= {"name"}:
        return hardware_named(entry.get("name", ""))
    return parse_into(Hardware, {k: v for k, v in entry.items() if k != "name"}, "steps: hardware")


def shape_in(target: dict[str, Any]) -> ModelShape:
    if "config" in target:
        return shape_of(target["config"], "steps: target.config")
    name = target.get("model", "")
    return short_shape(named(name), f"model {name}")


def place_on(gpu: Hardware, shape: ModelShape, target: dict[str, Any], ranks: int, prompt_layer_us: float) -> Place:
    """A target kept as `target` says on GPUs of this kind."""
    bits = float(target.get("weight_bits") or 16.0)
    other = float(target.get("other_bits") or 16.0)
    dtype = "fp8" if 8 <= bits < 9 and "fp8" in gpu.tflops else target.get("dtype", "bfloat16")
    keep = Format(bits, other, float(target.get("cache_bits") or other), ranks,
                  expanded=bool(target.get("expanded", False)))
    return Place(shape, keep, gpu.bandwidth_tb_s * 1e12, gpu.flops(dtype), gpu.link_gb_s * 1e9, prompt_layer_us)


def read_steps(path: Path) -> Steps:
    """steps.json. ConfigError for another form or an unknown key."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("schema") != STEPS:
        raise ConfigError(f"{path}: schema must be {STEPS}; make roi ARGS=measure writes such a file")
    return parse_into(Steps, values, str(path))


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


def calibrate(steps: Steps) -> Calibration:
    """Fits the steps that are not held out. ConfigError below the minimum: plain decoding and two draft lengths at one
    batch."""
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
    steps = parse_into(Steps, values["steps"], f"{path}: steps")
    found = Fit(np.array(values["logs"]), np.array(values["covariance"]), values["profile"], len(values["errors"]))
    return Calibration(found, steps, values["largest"], values["lengths"], values["batches"], values["errors"],
                       values["left_out"], values["held_out"])


@dataclass
class Acceptance:
    """What was measured of one drafter, with its conditions. Of our report, or of a file that a user fills in for an
    imported drafter (drafthouse.acceptance/1)."""

    schema: str = opt(ACCEPTANCE, "version of this form")
    name: str = opt("drafter", "what the plan calls it")
    kind: str = opt("eagle3", "eagle3, parallel, medusa, mtp, lookup, or a named shape: a standalone draft model")
    per_position: list[float] = opt([], "cumulative rate of each draft position")
    relative_sd: NonNegativeFloat = opt(0.05, "standard deviation of the acceptance length over its value")
    tokens_per_pass: NonNegativeFloat = opt(0.0, "lookup, tree: kept tokens a target pass, passes without a draft "
                                                 "included; then no other draft length is planned")
    topk: PositiveInt = opt(1, "tree: branches of a level")
    verified: int = opt(0, "tree: nodes verified a row; 0 is a chain")
    domain: str = opt("", "prompts")
    temperature: NonNegativeFloat = opt(0.0, "of the answers")
    context: list[float] = opt([0.0, 0.0], "shortest and longest context measured")
    target: str = opt("", "the target's name")
    weight_bits: NonNegativeFloat = opt(16.0, "bits of its weights when it was measured")
    mode: str = opt("measured", "measured or synthetic")
    prompts: str = opt("chat", "chat: rendered with the target's chat template; completion, random: refused")
    engine: dict[str, Any] = opt({}, "engine of its own step times, where it has any")
    requests: int = opt(0, "requests whose own acceptance length was recorded")
    slowest: NonNegativeFloat = opt(0.0, "acceptance length that 99 of 100 requests exceed; 0 is not recorded")
    size: dict[str, Any] = opt({}, "sizes of the drafter; empty: as wide as its target")

    def kept(self, K: int) -> float:
        """Acceptance length of a draft of K, at most as long as the measured one."""
        return self.tokens_per_pass or 1.0 + sum(self.per_position[:K])

    @property
    def longest(self) -> int:
        return len(self.per_position)

    def conditions(self) -> Conditions:
        return Conditions(self.domain, self.temperature, tuple(self.context), self.target, self.weight_bits)


def read_acceptance(path: Path, domain: str) -> Acceptance:
    """Measured acceptance from eval/report.json or drafthouse.acceptance/1. `domain`: a set of the report, or empty.
    Refusal 1 for a domain that was not measured, 6 for synthetic acceptance."""
    values = read_json(path)
    schema = values.get("schema", "") if isinstance(values, dict) else ""
    if schema == ACCEPTANCE:
        found = parse_into(Acceptance, values, str(path))
        if not found.per_position:
            raise ConfigError(f"{path}: per_position is missing")
    elif schema.startswith("drafthouse.report/") and "server" in values:
        raise ConfigError(f"{path}: is of a running server, which does not say what drafter it runs; name the report "
                          f"of `make eval` without eval.server, or write what is known of it as {ACCEPTANCE}")
    elif schema.startswith("drafthouse.report/"):
        found = _of_report(values, domain)
    else:
        raise ConfigError(f"{path}: schema {schema!r}: must be an eval/report.json or {ACCEPTANCE}")
    refuse.made_up_acceptance(found.mode, found.prompts)
    return found


def _of_report(report: dict[str, Any], domain: str) -> Acceptance:
    if domain and domain not in report["sets"]:
        refuse.moved_acceptance(Conditions(", ".join(report["sets"])), Conditions(domain))
    block = report["sets"][domain] if domain else report["total"]
    acceptance = block["acceptance"]
    low, high = acceptance["ci95"]
    buckets = [b for b in acceptance["by_context_bucket"] if b["drafts"] >= FEWEST_DRAFTS]
    context = [float(buckets[0]["from"]), float(buckets[-1]["to"])] if buckets else [0.0, 0.0]
    kind = report["drafter"]["kind"]
    by_request = acceptance.get("by_request") or {}
    bits = {"float32": 32.0}.get(report["stack"]["dtype"], 16.0)
    return Acceptance(name=report["name"], kind=kind, per_position=acceptance["per_position"],
                      relative_sd=(high - low) / 3.92 / acceptance["mean_length"],
                      tokens_per_pass=block["tokens_per_target_pass"] if kind == "lookup" else 0.0, domain=domain,
                      temperature=report["settings"]["temperature"], context=context,
                      target=report["target"]["model"], weight_bits=bits, requests=by_request.get("n", 0),
                      slowest=by_request.get("p1") or 0.0)


def draft_for(found: Acceptance, shape: ModelShape, steps: Steps) -> Draft:
    """The drafter whose acceptance this is: the sizes it names, those of the measured steps where it is the same kind,
    else as wide as the target."""
    if found.size:
        return Draft(found.kind, DraftSize(**found.size), bits=steps.drafter.get("bits", 16.0))
    if found.kind == steps.drafter.get("kind") and steps.drafter.get("size"):
        return steps.draft()
    return draft_of(found.kind, shape)

