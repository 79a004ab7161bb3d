"""Our own generator with different numbers of rows decoded together, prefills and steps apart."""

from dataclasses import dataclass
from typing import Literal

from bench.generate import WARM_TOKENS, ours, run_rows
from bench.material import evaluation_ids, open_target, traced_ids
from bench.rows import Result, Row, own, ratio_rows
from bench.turns import in_turns
from recipes.schema import PositiveInt, Recipe, opt


@dataclass
class Options:
    prompts: PositiveInt = opt(200, "prompts answered, at most")
    source: Literal["eval", "traces"] = opt("eval", "eval: the evaluation prompts; traces: those of the run's traces")
    batch_sizes: list[PositiveInt] = opt([64, 128], "rows decoded together; the first is the ratio's reference")
    max_tokens: PositiveInt = opt(80, "longest answer, in tokens")


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only answers"`; greedy."""
    target = open_target(recipe)
    read = evaluation_ids if options.source == "eval" else traced_ids
    prompts = read(recipe, target, options.prompts, options.max_tokens)
    works = {}
    for size in options.batch_sizes:
        ours(target, prompts[:size], size, WARM_TOKENS)
        works[f"rows_{size}"] = lambda turn, size=size: ours(target, prompts, size, options.max_tokens)
    found = in_turns(works, range(repeats))
    first = next(iter(found))
    rows = []
    for name, runs in found.items():
        rows += [Row(name, "prompts", len(prompts), "prompts"),
                 Row(name, "prompt_tokens", sum(map(len, prompts)) / len(prompts), "tokens"),
                 Row(name, "prompt_tokens_max", max(map(len, prompts)), "tokens"), *run_rows(name, "", runs)]
        if name != first:
            rows += ratio_rows(name, [r.rate for r in runs], [r.rate for r in found[first]], own(first))
    return Result(rows)
