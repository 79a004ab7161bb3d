"""`make roi`: what a drafter is worth. The one entry of measure, calibrate, plan, check and validate (docs/roi.md).

Run as `python -m eval.roi --config RECIPE SUBCOMMAND`. Files go to runs/<name>/roi/: steps.json, calibration.json,
roi.json, roi.html.
"""

import dataclasses
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pydantic import NonNegativeFloat
from rich.console import Console

from eval import roi_check, roi_files, roi_fleet, roi_measure, roi_page, roi_server, roi_table, roi_validate
from eval.roi_calibrate import Observation
from eval.roi_claim import claims_of
from eval.roi_files import Calibration, read_calibration
from eval.roi_serving import hours_of, methods_of, quantised, serving
from eval.roi_worth import worth
from recipes.cli import Command, process
from recipes.errors import ConfigError, RunError
from recipes.files import write_json, write_text
from recipes.schema import NonNegativeInt, Recipe, opt


@dataclass
class Options:
    """What the sub-commands take beside the recipe."""

    draft_length: NonNegativeInt = opt(0, "measure a server: the draft length that it was started with; 0: no drafter")
    synthetic: bool = opt(False, "measure a server: it was started with synthetic acceptance (fine for step times)")
    steps: str = opt("", "calibrate: the measured steps; empty is runs/<name>/roi/steps.json")
    calibration: str = opt("", "plan: the calibration; empty is runs/<name>/roi/calibration.json")
    reports: list[str] = opt([], "plan: measured acceptance, one file a drafter; empty is runs/<name>/eval/report.json")
    fleet: str = opt("", "plan: YAML list of workloads; totals of a cluster")
    slo: NonNegativeFloat | None = opt(None, "plan: short for --roi.slo_ms")
    price: NonNegativeFloat | None = opt(None, "plan: short for --roi.price_per_gpu_hour")
    demand: NonNegativeFloat | None = opt(None, "plan: short for --roi.demand_tok_s")


def folder_of(recipe: Recipe) -> Path:
    folder = Path(recipe.runs_dir) / recipe.name / "roi"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the run's folder: {error.strerror}") from None
    return folder


def measure(recipe: Recipe, options: Options, words: list[str]) -> None:
    """Times this machine's loop, or a live server where generation.server.base_url names one."""
    console = Console(stderr=True)
    path = folder_of(recipe) / "steps.json"
    if recipe.generation.server.base_url:
        before = roi_files.read_steps(path) if path.exists() else None
        steps = roi_server.measure(recipe, options.draft_length, before, options.synthetic)
    else:
        steps = roi_measure.measure(recipe, lambda said: console.print(said, highlight=False))
    write_json(path, dataclasses.asdict(steps))
    for p in steps.points:
        print(f"{p.what:7} rows {p.rows:3} {'width' if p.what == 'target' else 'K'} {p.width or p.K:2} "
              f"context {p.context:5.0f}  {p.ms:9.2f} ms{'  held out' if p.held_out else ''}")
    print(f"steps: {path}")


def calibrate(recipe: Recipe, options: Options, words: list[str]) -> None:
    """Fits the constants."""
    folder = folder_of(recipe)
    found = roi_files.calibrate(roi_files.read_steps(Path(options.steps or folder / "steps.json")))
    roi_files.write_calibration(folder / "calibration.json", found)
    for name, sd in zip(roi_files.NAMES, np.sqrt(np.diag(found.fit.covariance))):
        value = getattr(found.fit.constants, name)
        print(f"{name:10} {value:10.4g}  within a factor of {np.exp(1.645 * sd):.2f} (90 %)")
    for name, values in (("of the steps fitted", found.errors), ("left out in turn", found.left_out),
                         ("held out", found.held_out)):
        if values:
            sizes = np.abs(values)
            print(f"error {name}: median {100 * np.median(sizes):.1f} %, worst {100 * sizes.max():.1f} % "
                  f"(n = {len(values)})")
    for line in held_out_speedups(found):
        print(line)
    print(f"calibration: {folder / 'calibration.json'}")


def held_out_speedups(found: Calibration) -> list[str]:
    """Predicted against measured speedups of the steps held out, with the acceptance that they had."""
    plain = {(o.step.rows, o.step.context): o for o in found.steps.observations() if o.what == "step" and not o.step.K}
    errors = []
    for o in found.steps.observations(held_out=True):
        base = plain.get((o.step.rows, o.step.context))
        if o.what == "step" and o.step.K and base:
            predicted = Observation("speedup", 1.0, o.place, o.draft, o.step).predict(found.fit.constants)
            errors.append(abs(predicted / (o.step.kept * base.value / o.value) - 1))
    return [f"speedups held out: median error {100 * np.median(errors):.1f} %, worst {100 * max(errors):.1f} % "
            f"(n = {len(errors)})"] if errors else []


def plan(recipe: Recipe, options: Options, words: list[str]) -> None:
    """The plan, its table, JSON and page; or a fleet's totals."""
    short = {"slo_ms": options.slo, "price_per_gpu_hour": options.price, "demand_tok_s": options.demand}
    recipe = replace(recipe, roi=replace(recipe.roi, **{k: v for k, v in short.items() if v is not None}))
    folder = folder_of(recipe)
    calibration = read_calibration(Path(options.calibration or folder / "calibration.json"))
    planner, target = serving(recipe, calibration)
    bits = quantised(recipe)
    if options.fleet and options.reports:
        raise ConfigError("--reports: a fleet's workloads name their own; leave it out")
    if options.fleet:
        loads = roi_fleet.read_fleet(Path(options.fleet))
        pairs = [(load, methods_of(planner, [load.report], roi_fleet.planner_of(planner, load).section.domain, bits)[0])
                 for load in loads]
        found = roi_fleet.fleet(planner, pairs, target)
        write_json(folder / "fleet.json", found)
        print(*roi_fleet.lines(found), f"fleet: {folder / 'fleet.json'}", sep="\n")
        return
    paths = options.reports or [str(Path(recipe.runs_dir) / recipe.name / "eval" / "report.json")]
    methods = methods_of(planner, paths, recipe.roi.domain, bits)
    hours = hours_of(recipe, paths, methods)
    found = worth(planner, methods, target, hours)
    if recipe.roi.training_gpu_hours and not hours:
        found["notes"].append(f"roi.training_gpu_hours = {recipe.roi.training_gpu_hours:g} is of one drafter, and "
                              "which one is not known: give training_gpu_hours in each one's file")
    found["time"] = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / "roi.json", found)
    write_text(folder / "roi.html", roi_page.render(found))
    console = Console()
    console.width = max(console.width, 120)
    roi_table.show(found, console)
    print(f"plan: {folder / 'roi.json'}", f"page: {folder / 'roi.html'}", sep="\n")


def check(recipe: Recipe, options: Options, words: list[str]) -> None:
    """Judges claims; exit 1 where a figure does not hold, 2 where one rests on what is refused or unknown."""
    wrong = refused = 0
    for claim in claims_of(words):
        found = roi_check.check(claim)
        print(*roi_check.lines(claim, found), sep="\n")
        wrong += roi_check.is_wrong(found)
        refused += roi_check.is_refused(found)
    resting = f"{refused} of the claims rest on what is refused or unknown"
    if wrong:
        raise RunError(f"{wrong} of the claims do not hold" + (f"; {resting}" if refused else ""))
    if refused:
        raise ConfigError(resting)


def validate(recipe: Recipe, options: Options, words: list[str]) -> None:
    """Judges the model by public points."""
    if len(words) != 1:
        raise ConfigError("validate: needs one file of points, as in tests/roi/fixtures.json")
    print(*roi_validate.lines(roi_validate.validate(Path(words[0]))), sep="\n")


ACTIONS = {"measure": measure, "calibrate": calibrate, "plan": plan, "check": check, "validate": validate}


def main(recipe: Recipe, switches: set[str], options: Options, words: list[str]) -> None:
    if not words or words[0] not in ACTIONS:
        raise ConfigError(f"{words[0] if words else 'no sub-command'}: say one of {', '.join(ACTIONS)}")
    name, *rest = words
    if rest and name not in ("check", "validate"):
        raise ConfigError(f"{name}: takes no further words, got {rest[0]}")
    ACTIONS[name](recipe, options, rest)


COMMAND = Command("make roi", "What a drafter is worth: step times, calibration, plan, audit of claims.", main,
                  options=Options, words="measure, calibrate, plan, check CLAIM (a YAML file or key=value words), "
                                         "validate FILE")

if __name__ == "__main__":
    process(COMMAND)
