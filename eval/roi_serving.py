"""What `make roi ARGS=plan` plans with: the target on the calibrated engine, its drafters, what training took."""

import dataclasses
import json
from datetime import datetime
from pathlib import Path

from data.place import behind_url
from drafters.registry import REGISTRY, entry
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
        same = section.hardware == steps.hardware.get("name")
        refuse.other_place("roi.hardware", steps.hardware.get("name"),
                           f"{section.hardware}{' as the recipe describes it' if same else ''}")
    refuse.other_place("roi.tensor_parallel", steps.tensor_parallel, section.tensor_parallel)
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
    if section.cache_bits and steps.profile == "engine":
        kept["cache_bits"] = section.cache_bits
    layer = gpu.layer_us if steps.profile == "loop" else 100.0
    place = place_on(gpu, shape, kept, section.tensor_parallel, layer)
    return Planner(section, calibration, place, gpu.memory_gb * 1e9), name


def training_hours(recipe: Recipe, run: Path | None = None) -> tuple[float | None, str]:
    """GPU hours of generation, capture and training: as given, or from the stamps of the run (`run`: another one),
    written where a stage begins, to its last shard and checkpoint. None where a stamp is missing, or later than what it
    began: the stages of earlier versions wrote it last. Traces behind a URL are fetched again and again, so their
    files' times say nothing."""
    if recipe.roi.training_gpu_hours:
        return recipe.roi.training_gpu_hours, "as given"
    run, total = run or Path(recipe.runs_dir) / recipe.name, 0.0
    for folder, made in ((run / "traces", "shards/*.json"), (run, "checkpoints/step-*/trainer.json")):
        stamped, ends = folder / "provenance.json", [p.stat().st_mtime for p in folder.glob(made)]
        if not stamped.exists() or not ends or behind_url(recipe.trace):
            return None, ""
        began = datetime.fromisoformat(json.loads(stamped.read_text(encoding="utf-8"))["time"])
        if max(ends) < began.timestamp():
            return None, ""
        total += (max(ends) - began.timestamp()) / 3600
    return total * recipe.plan.gpus, "from the run's provenance, plan.gpus each"


def hours_of(recipe: Recipe, paths: list[str], methods: list[Method]) -> dict[str, tuple[float, str]]:
    """(GPU hours, where they are from) of each drafter's training, by its name, where they are known: as its file says;
    as the recipe says of its own drafter, or of the only one that is trained; else from the stamps of the run whose
    report it is. Nothing is trained for lookup and a layer_cut."""
    own, found = Path(recipe.runs_dir) / recipe.name, {}
    trained = [(m, Path(path)) for m, path in zip(methods, paths) if needs_training(m.draft.kind)]
    for method, path in trained:
        run = path.parent.parent if path.parent.name == "eval" else None
        ours = run is not None and run.resolve() == own.resolve()
        if method.accepted.training_gpu_hours:
            found[method.name] = (method.accepted.training_gpu_hours, "as its file says")
        elif recipe.roi.training_gpu_hours and (ours or len(trained) == 1):
            found[method.name] = training_hours(recipe)
        elif run and not recipe.roi.training_gpu_hours and (known := training_hours(recipe, run))[0] is not None:
            found[method.name] = known
    return found


def needs_training(kind: str) -> bool:
    return kind != "none" and (kind not in REGISTRY or entry(kind).trained)


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
