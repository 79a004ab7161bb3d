"""Products with few rows on a CPU: F.linear against drafters.fast_cpu.SkinnyLinear.

The shapes are SmolLM2-135M's. Weights rotate so that none stays in the cache.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.rows import TORCH, Result, time_rows
from bench.turns import times_in_turns
from drafters.fast_cpu import SkinnyLinear
from drafters.target import use_threads
from recipes.errors import ConfigError
from recipes.schema import PositiveInt, Recipe, opt

LINEAR = f"{TORCH} F.linear"


@dataclass
class Options:
    shapes: list[tuple[PositiveInt, PositiveInt]] = opt(
        [(576, 576), (1536, 576), (576, 1536), (49152, 576)], "weights as [out, in]")
    rows: list[PositiveInt] = opt([1, 2, 5, 16, 32, 64, 128, 160], "rows multiplied by a weight")
    rounds: PositiveInt = opt(9, "rounds whose median counts")
    rotate_mb: PositiveInt = opt(60, "MB of weights of one shape that are used in turn, 60 weights at most")


@torch.no_grad()
def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only products"`; variants OUTxIN_ROWS, milliseconds of one product."""
    if not torch.backends.mkldnn.is_available():
        raise ConfigError("--only products: this torch has no oneDNN, so SkinnyLinear is F.linear here")
    use_threads(recipe.target.threads)
    rows = []
    for out, width in options.shapes:
        count = max(2, min(60, options.rotate_mb * 1_000_000 // (out * width * 4)))
        layers = [SkinnyLinear(width, out, bias=False) for _ in range(count)]
        for n in options.rows:
            x = torch.randn(n, width)
            times = times_in_turns({
                "skinny": lambda x=x, layers=layers: [layer(x) for layer in layers],
                "linear": lambda x=x, layers=layers: [F.linear(x, layer.weight) for layer in layers],
            }, options.rounds)
            each = {name: [seconds / count for seconds in found] for name, found in times.items()}
            rows += time_rows(f"{out}x{width}_{n}", each["skinny"], each["linear"], LINEAR)
    return Result(rows)
