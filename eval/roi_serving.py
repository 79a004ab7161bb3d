"""What `make roi ARGS=plan` plans with: the target on the calibrated engine, its drafters, what training took."""

import dataclasses
import json
from datetime import datetime
from pathlib import Path

from data.place import behind_url
from eval import roi_files
from eval import roi_refuse as refuse
from eval.plan import read_config
from eval.plan_machine import BITS
from eval.roi_accepted import draft_for, read_acceptance
from eval.roi_files import Calibration, place_on
from eval.roi_plan import Method, Planner
from recipes.errors import ConfigError
from recipes.hardware import Hardware, spelt
from recipes.model_shape import quantised_bits, shape_of
from recipes.named_shapes import named, short_shape
from recipes.schema import Recipe


def serving(recipe: Recipe, calibration: Calibration) -> tuple[Planner, str]:
    """The planner of the recipe's traffic on the calibrated engine. Refusal 3 where the steps are of other hardware."""
    section, steps = recipe.roi, calibration.steps
    measured: Hardware = roi_files.gpu_of(steps.hardware)
    gpu = spelt(section.hardware, recipe.plan.custom, "roi.hardware")[1] if section.hardware else measured
    if section.hardware and dataclasses.asdict(gpu) != dataclasses.asdict(measured):
        refuse.other_engine({"hardware": steps.hardware.get("name")}, {"hardware": section.hardware})
    refuse.other_engine({"tensor_parallel": steps.tensor_parallel}, {"tensor_parallel": section.tensor_parallel})
    kept = dict(steps.target)
    name = section.model or recipe.target.model
    own = section.weight_bits or (kept.get("weight_bits") if kept.get("model") == name else 0.0)
    if section.model:
        short = named(name)
        shape, checkpoint = short_shape(short, f"model {name}"), short.get("bits", 16)
    else:
        config, where = read_config(recipe), f"target.model = {name}"
        full = BITS[recipe.target.dtype] if steps.profile == "loop" else 16.0
        shape, checkpoint = shape_of(config, where), quantised_bits(config, where) or full
    kept["weight_bits"] = own or checkpoint
    kept["cache_bits"] = section.cache_bits if steps.profile == "engine" else kept.get("cache_bits", 32.0)
    layer = gpu.layer_us if steps.profile == "loop" else 100.0
    place = place_on(gpu, shape, kept, section.tensor_parallel, layer)
    return Planner(section, calibration, place, gpu.memory_gb * 1e9), name


def training_hours(recipe: Recipe) -> tuple[float | None, str]:
    """GPU hours of generation, capture and training: as given, or from the run's stamps, written where a stage begins,
    to its last shard and checkpoint. None where a stamp is missing, or later than what it began: the stages of earlier
    versions wrote it last. Traces behind a URL are fetched again and again, so their files' times say nothing."""
    if recipe.roi.training_gpu_hours:
        return recipe.roi.training_gpu_hours, "as given"
    run, total = Path(recipe.runs_dir) / recipe.name, 0.0
    for folder, made in ((run / "traces", "shards/*.json"), (run, "checkpoints/step-*/trainer.json")):
        stamped, ends = folder / "provenance.json", [p.stat().st_mtime for p in folder.glob(made)]
        if not stamped.exists() or not ends or behind_url(recipe.trace):
            return None, ""
        began = datetime.fromisoformat(json.loads(stamped.read_text(encoding="utf-8"))["time"])
        if max(ends) < began.timestamp():
            return None, ""
        total += (max(ends) - began.timestamp()) / 3600
    return total * recipe.plan.gpus, "from the run's provenance, plan.gpus each"


def quantised(recipe: Recipe) -> dict[str, float]:
    """Bits of the recipe's own target where its checkpoint is quantised: a report does not tell them."""
    if recipe.roi.model:
        return {}
    name = recipe.target.model
    return {name: quantised_bits(read_config(recipe), f"target.model = {name}")}


def methods_of(planner: Planner, paths: list[str], domain: str, bits: dict[str, float]) -> list[Method]:
    """The drafters whose acceptance was given; two of one name are an error."""
    found = []
    for path in paths:
        accepted = read_acceptance(Path(path), domain, bits)
        if accepted.engine:
            refuse.other_engine(accepted.engine, planner.calibration.steps.engine)
        if accepted.name in {"none", *(m.name for m in found)}:
            raise ConfigError(f"{path}: name = {accepted.name}: another report has it; rename one")
        found.append(Method(accepted.name, draft_for(accepted, planner.place.shape, planner.calibration.steps),
                            accepted))
    return found
