"""Decoding at batch 1: our plain loop against transformers' `generate`, speculation against our plain loop.

Prompt lookup and a drafter cut from the target's first layers run in our loop and in transformers' own: the same kind
of drafts, so that what differs is the loop. transformers' lookup is a rival that a trained drafter has to beat too.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.generate import same_answers
from bench.material import Stock, evaluation_ids, open_target
from bench.rows import Result, Row, own, ratio_rows
from bench.turns import in_turns, timed
from drafters import imported
from drafters.base import Drafter
from drafters.fast_cpu import use_skinny_linear
from drafters.layer_cut import cut
from drafters.target import Target
from drafters.tree import DynamicTree, Plan, planned
from eval import timing
from eval.decode import Decoder, Output
from eval.figures import per_pass
from eval.metrics import Acceptance
from recipes.schema import Drafter as Section
from recipes.schema import NonNegativeInt, PositiveInt, Recipe, opt

WARM_TOKENS = 4
CONTEXT = 200  # cached tokens at which steps are timed


@dataclass
class Options:
    prompts: PositiveInt = opt(12, "evaluation prompts answered one at a time, evenly spaced, at most")
    max_tokens: PositiveInt = opt(64, "longest answer, in tokens")
    tree_depth: PositiveInt = opt(4, "levels of the dynamic tree")
    tree_top_k: PositiveInt = opt(4, "guesses behind each node of the dynamic tree")
    tree_total: PositiveInt = opt(16, "nodes of the dynamic tree")
    cut_layers: NonNegativeInt = opt(0, "layers of the assistant; 0 is a third of the target's")


@dataclass
class Timed:
    seconds: float
    out: Output


def open_drafter(recipe: Recipe, target: Target) -> Drafter:
    """The checkpoint that drafter.path names, or a fresh drafter, which shows what drafting costs and nothing else."""
    section = recipe.drafter
    run = Path(recipe.runs_dir) / recipe.name
    return packed(imported.open_drafter(section, target, run).drafter if section.path
                  else imported.fresh(section, target, recipe.train.seed), target)


def engines(target: Target, stock: Stock, drafter: Drafter, K: int, max_tokens: int, options: Options,
            ) -> dict[str, Callable[[list[int]], Output]]:
    """One prompt to one greedy answer, each in its own way; their_X is transformers' way to do X."""
    decoder = Decoder(target, max_tokens)
    ours = {"chain": (drafter, K), "tree": (drafter, tree_of(options)), "lookup": (untrained(target, "lookup", {}), K),
            "assisted": (untrained(target, "layer_cut", {"layers": options.cut_layers}), K)}
    assistant = cut(stock.model, target.depth,
                    list(range(len(ours["assisted"][0].model.get_decoder().layers))))
    for name, value in (("num_assistant_tokens", K), ("num_assistant_tokens_schedule", "constant"),
                        ("assistant_confidence_threshold", 0.0)):
        setattr(assistant.generation_config, name, value)

    def speculate(prompt: list[int], drafter: Drafter, plan: Plan | int) -> Output:
        return decoder.speculative([prompt], drafter, plan)[0]

    def reference(prompt: list[int], **ways: Any) -> Output:
        return Output(stock.answers([prompt], 1, max_tokens, **ways)[0])

    return {"plain": lambda prompt: decoder.plain([prompt])[0],
            **{name: partial(speculate, drafter=drafter, plan=plan) for name, (drafter, plan) in ours.items()},
            "their_plain": reference, "their_lookup": partial(reference, lookup=K),
            "their_assisted": partial(reference, assistant=assistant)}


def tree_of(options: Options) -> DynamicTree:
    return DynamicTree(options.tree_depth, options.tree_top_k, options.tree_total)


def untrained(target: Target, kind: str, options: dict[str, Any]) -> Drafter:
    return packed(imported.fresh(Section(kind=kind, options=options), target, 0), target)


def packed(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with products like the target's."""
    if target.grouped:
        use_skinny_linear(drafter)
    return drafter


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only decode"`; eval.draft_length is K."""
    K = recipe.eval.draft_length
    target = open_target(recipe, recipe.trace.layers)
    room = max(K, options.tree_total, options.tree_depth * options.tree_top_k)
    prompts = evaluation_ids(recipe, target, options.prompts, options.max_tokens + room + 1)
    drafter, stock = open_drafter(recipe, target), Stock(target)
    for work in engines(target, stock, drafter, K, WARM_TOKENS, options).values():
        work(prompts[0])
    works = {name: lambda prompt, work=work: Timed(*timed(lambda: work(prompt), target.device))
             for name, work in engines(target, stock, drafter, K, options.max_tokens, options).items()}
    found = in_turns(works, prompts * repeats)
    first = {name: [run.out for run in runs[: len(prompts)]] for name, runs in found.items()}
    loop = own("plain loop")
    rows = [*speed_rows({name: repeat_rates(runs, len(prompts)) for name, runs in found.items()}, K, loop),
            Row("plain", "prompts", len(prompts), "prompts")]
    for name in ("chain", "tree", "lookup", "assisted"):
        counted = sum((out.acceptance for out in first[name]), Acceptance(first[name][0].acceptance.K))
        rows += [Row(name, "acceptance_length", counted.mean_length, "tokens"),
                 Row(name, "drafts", counted.drafts, ""),
                 Row(name, "tokens_per_target_pass", per_pass(first[name]), "tokens")]
    for name, plan in (("chain", planned(K)), ("tree", tree_of(options))):
        steps = timing.step_times(target, drafter, CONTEXT, plan)
        rows += predicted_rows(name, timing.predict(per_pass(first[name]), steps, plan.depth), rows, loop)
    faults = []
    for name, other, reference in (("plain", "their_plain", Stock.name), ("chain", "plain", loop),
                                   ("tree", "plain", loop), ("lookup", "plain", loop), ("assisted", "plain", loop)):
        compared, wrong = same_answers(name, target, prompts, [out.tokens for out in first[name]],
                                       [out.tokens for out in first[other]], recipe.eval.gap_tolerance, reference)
        rows, faults = rows + compared, faults + wrong
    return Result(rows, faults, {"drafter": recipe.drafter.path or f"fresh {recipe.drafter.kind}"})


def predicted_rows(variant: str, predicted: float, rows: list[Row], loop: str) -> list[Row]:
    """E / (K c + v), its steps timed outside the loop, and the measured ratio to the plain loop as a share of it."""
    measured = next(r.value for r in rows if (r.variant, r.metric, r.reference) == (variant, "ratio", loop))
    return [Row(variant, "predicted_speedup", predicted, "x", loop),
            Row(variant, "share_of_predicted", measured / predicted, "", loop)]


def speed_rows(rates: dict[str, list[float]], K: int, loop: str) -> list[Row]:
    """Ratios and rates of every way against what it is compared with."""
    lookup = f"{Stock.name}, prompt_lookup_num_tokens {K}"
    assisted = f"{Stock.name}, assistant_model, num_assistant_tokens {K}"
    rows = ratio_rows("chain", rates["chain"], rates["their_lookup"], lookup)
    for name, other, reference in (("plain", "their_plain", Stock.name), ("chain", "plain", loop),
                                   ("tree", "plain", loop), ("lookup", "their_lookup", lookup),
                                   ("assisted", "their_assisted", assisted)):
        rows += ratio_rows(name, rates[name], rates[other], reference)
        rows += rate_rows(name, rates[name], rates[other], reference)
    return rows


def repeat_rates(runs: list[Timed], count: int) -> list[float]:
    """Tokens a second of each repeat of `count` prompts, over their sums."""
    parts = [runs[start : start + count] for start in range(0, len(runs), count)]
    return [sum(len(run.out.tokens) for run in part) / sum(run.seconds for run in part) for part in parts]


def rate_rows(variant: str, ours: list[float], theirs: list[float], reference: str) -> list[Row]:
    return [Row(variant, "tokens_per_s", statistics.median(ours), "tokens/s"),
            Row(variant, "reference_tokens_per_s", statistics.median(theirs), "tokens/s", reference)]
