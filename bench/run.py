"""`make bench ARGS="--only NAME"`: measures one thing and writes runs/bench/NAME.json. See docs/bench.md.

Run as `python -m bench.run --config RECIPE --only NAME [--NAME.option value] [--section.field value]`.
"""

import difflib
import sys
from dataclasses import asdict, field, make_dataclass
from types import ModuleType

from bench import (
    answers,
    capture,
    decode,
    generate,
    passes,
    precision,
    products,
    rows,
    speedups,
    store,
    time_to_quality,
    train_step,
    trained,
)
from recipes.cli import Command, process
from recipes.errors import ConfigError, RunError
from recipes.schema import PositiveInt, Recipe, opt

MEASURES: dict[str, ModuleType] = {  # each has its Options and measure(recipe, options, repeats) -> Result
    "generate": generate,
    "capture": capture,
    "store": store,
    "decode": decode,
    "products": products,
    "passes": passes,
    "answers": answers,
    "precision": precision,
    "trained": trained,
    "train_step": train_step,
    "time_to_quality": time_to_quality,
    "speedups": speedups,
}
Options = make_dataclass("Options", [
    ("only", str, opt("", f"what to measure: {', '.join(MEASURES)}")),
    ("repeats", PositiveInt, opt(3, "turns whose median counts, after a warm-up")),
    *((name, module.Options, field(default_factory=module.Options)) for name, module in MEASURES.items()),
])


def check(name: str) -> None:
    """ConfigError for a name that cannot be measured; it names the nearest."""
    if name in MEASURES:
        return
    close = difflib.get_close_matches(name, MEASURES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"names: {', '.join(MEASURES)}"
    raise ConfigError(f"--only {name}: unknown; {hint}" if name else f"--only NAME is missing; {hint}")


def main(recipe: Recipe, switches: set[str], options: Options) -> None:
    name = options.only
    check(name)
    folder, own = rows.bench_folder(recipe), getattr(options, name)
    before = rows.environment(recipe)
    result = MEASURES[name].measure(recipe, own, options.repeats)
    after = rows.environment(recipe)  # the threads are set by then
    path = rows.write(folder, name, result.rows, after | {
        "began": before["time"], "load_before": before["load"], "command": sys.argv, "repeats": options.repeats,
        "options": asdict(own), "notes": result.notes, "faults": result.faults})
    print(*rows.lines(result.rows), path, sep="\n")
    if result.faults:
        raise RunError("; ".join(result.faults))


COMMAND = Command("make bench", "Measures one thing, in turns with what it is compared with.", main, options=Options)

if __name__ == "__main__":
    process(COMMAND)
