"""Speedups that the ROI planner predicts from three measured steps, against the loop's own at other (batch, K).

The three calibrate the planner (plain and one draft length at the smallest batch, the same length at the largest); all
other steps of the grid are predicted. Both sides use the acceptance that the loop had, so that the model of time alone
is judged.
"""

import statistics
from dataclasses import dataclass, replace

from bench.rows import Result, Row, own
from eval.roi_calibrate import Observation, fit
from eval.roi_files import Steps
from eval.roi_measure import measure as measure_steps
from recipes.errors import ConfigError
from recipes.schema import PositiveInt, Recipe, opt

GOAL = 0.10  # of the median error


@dataclass
class Options:
    batches: list[PositiveInt] = opt([1, 2, 4, 8], "rows; the first and the last calibrate")
    lengths: list[PositiveInt] = opt([2, 3, 5], "draft lengths; the last calibrates")
    context: PositiveInt = opt(200, "cached tokens a row")


def calibrating(steps: Steps, options: Options) -> tuple[list[Observation], list[Observation]]:
    """(the three steps, all others)."""
    first, last, K = options.batches[0], options.batches[-1], options.lengths[-1]
    three = {(first, 0), (first, K), (last, K)}
    every = [o for o in steps.observations() if o.what == "step"]
    return ([o for o in every if (o.step.rows, o.step.K) in three],
            [o for o in every if (o.step.rows, o.step.K) not in three])


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only speedups"`; variants ROWSxK. ConfigError for a grid that leaves nothing to
    predict."""
    if len(options.batches) < 2 or len(options.lengths) < 2:
        raise ConfigError("speedups: needs two batches and two draft lengths, the rest is predicted")
    section = replace(recipe.roi, batches=options.batches, draft_lengths=options.lengths, held_out=[],
                      contexts=[options.context], rounds=repeats)
    steps = measure_steps(replace(recipe, roi=section), lambda said: None, parts=False)
    three, held_out = calibrating(steps, options)
    found = fit(three, "loop").constants
    plain = {o.step.rows: o.value for o in [*three, *held_out] if not o.step.K}
    rows, errors = [], []
    for o in (o for o in held_out if o.step.K):
        loop = o.step.kept * plain[o.step.rows] / o.value
        predicted = Observation("speedup", 1.0, o.place, o.draft, o.step).predict(found)
        errors.append(abs(predicted / loop - 1))
        name = f"{o.step.rows:g}x{o.step.K}"
        rows += [Row(name, "predicted_speedup", predicted, "x"), Row(name, "reference_speedup", loop, "x", own("loop")),
                 Row(name, "ms", 1e3 * o.value, "ms"), Row(name, "plain_ms", 1e3 * plain[o.step.rows], "ms")]
    rows += [Row("held_out", "median_error", statistics.median(errors), ""),
             Row("held_out", "worst_error", max(errors), "")]
    return Result(rows, notes={"constants": found.__dict__, "goal": GOAL, "acceptance": steps.acceptance,
                               "three": [(o.step.rows, o.step.K, 1e3 * o.value) for o in three],
                               "hardware": steps.hardware})
