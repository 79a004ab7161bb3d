"""Decoding at batch 1: our plain loop against transformers' `generate`, speculation against our plain loop.

Prompt lookup is transformers' own: a rival that a drafter has to beat. `assisted` and `tree` come with their drafters.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import PositiveInt

from bench.generate import same_answers
from bench.material import Stock, evaluation_ids, open_target
from bench.rows import Result, Row, own, ratio_rows
from bench.turns import in_turns, timed
from drafters import checkpoint
from drafters.base import Drafter
from drafters.fast_cpu import use_skinny_linear
from drafters.registry import entry, options_of
from drafters.target import Target
from eval.decode import Decoder, Output
from eval.metrics import Acceptance
from eval.run import per_pass
from recipes.schema import Recipe, opt

WARM_TOKENS = 4


@dataclass
class Options:
    prompts: PositiveInt = opt(12, "evaluation prompts answered one at a time, evenly spaced, at most")
    max_tokens: PositiveInt = opt(64, "longest answer, in tokens")


@dataclass
class Timed:
    seconds: float
    out: Output


def open_drafter(recipe: Recipe, target: Target) -> Drafter:
    """The checkpoint that drafter.path names, or a fresh drafter, which shows what drafting costs and nothing else."""
    section = recipe.drafter
    if section.path:
        drafter = checkpoint.load(Path(section.path), target)
    else:
        fresh = entry(section.kind).code.build(options_of(section.kind, section.options), target, {}, recipe.train.seed)
        drafter = fresh.to(target.device, target.dtype).eval()
    if target.grouped:
        use_skinny_linear(drafter)
    return drafter


def engines(target: Target, stock: Stock, drafter: Drafter, K: int, max_tokens: int,
            ) -> dict[str, Callable[[list[int]], Output]]:
    """One prompt to one greedy answer, each in its own way."""
    decoder = Decoder(target, max_tokens)

    def reference(prompt: list[int], lookup: int | None) -> Output:
        return Output(stock.answers([prompt], 1, max_tokens, lookup=lookup)[0])

    return {"plain": lambda prompt: decoder.plain([prompt])[0],
            "chain": lambda prompt: decoder.speculative([prompt], drafter, K)[0],
            "reference": partial(reference, lookup=None), "lookup": partial(reference, lookup=K)}


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only decode"`; eval.draft_length is K."""
    K = recipe.eval.draft_length
    target = open_target(recipe, recipe.trace.layers)
    prompts = evaluation_ids(recipe, target, options.prompts, options.max_tokens + K + 1)
    drafter, stock = open_drafter(recipe, target), Stock(target)
    for work in engines(target, stock, drafter, K, WARM_TOKENS).values():
        work(prompts[0])
    works = {name: lambda prompt, work=work: Timed(*timed(lambda: work(prompt), target.device))
             for name, work in engines(target, stock, drafter, K, options.max_tokens).items()}
    found = in_turns(works, prompts * repeats)
    rates = {name: repeat_rates(runs, len(prompts)) for name, runs in found.items()}
    loop, lookup = own("plain loop"), f"{Stock.name}, prompt_lookup_num_tokens {K}"
    first = {name: [run.out for run in runs[: len(prompts)]] for name, runs in found.items()}
    counted = sum((out.acceptance for out in first["chain"]), Acceptance(K))
    rows = [
        *ratio_rows("plain", rates["plain"], rates["reference"], Stock.name),
        *rate_rows("plain", rates["plain"], rates["reference"], Stock.name),
        *ratio_rows("chain", rates["chain"], rates["plain"], loop),
        *ratio_rows("chain", rates["chain"], rates["lookup"], lookup),
        *rate_rows("chain", rates["chain"], rates["plain"], loop),
        Row("chain", "acceptance_length", counted.mean_length, "tokens"), Row("chain", "drafts", counted.drafts, ""),
        Row("chain", "tokens_per_target_pass", per_pass(first["chain"]), "tokens"),
        Row("lookup", "reference_tokens_per_s", statistics.median(rates["lookup"]), "tokens/s", lookup),
        Row("plain", "prompts", len(prompts), "prompts"),
    ]
    faults = []
    for name, other, reference in (("plain", "reference", Stock.name), ("chain", "plain", loop)):
        compared, wrong = same_answers(name, target, prompts, [out.tokens for out in first[name]],
                                       [out.tokens for out in first[other]], recipe.eval.gap_tolerance, reference)
        rows, faults = rows + compared, faults + wrong
    return Result(rows, faults, {"drafter": recipe.drafter.path or f"fresh {recipe.drafter.kind}"})


def repeat_rates(runs: list[Timed], count: int) -> list[float]:
    """Tokens a second of each repeat of `count` prompts, over their sums."""
    parts = [runs[start : start + count] for start in range(0, len(runs), count)]
    return [sum(len(run.out.tokens) for run in part) / sum(run.seconds for run in part) for part in parts]


def rate_rows(variant: str, ours: list[float], theirs: list[float], reference: str) -> list[Row]:
    return [Row(variant, "tokens_per_s", statistics.median(ours), "tokens/s"),
            Row(variant, "reference_tokens_per_s", statistics.median(theirs), "tokens/s", reference)]
