"""Answers in a batch: our generator against transformers' `generate`, greedy and sampled, on the same prompts.

Both are timed whole, and the time inside the model's passes apart from the rest, which is mostly the sampler.
"""

import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from bench.material import GREEDY, Stock, evaluation_ids, open_target
from bench.rows import TRANSFORMERS, Result, Row, own, ratio_rows, time_rows
from bench.turns import PassClock, in_turns, timed, times_in_turns
from data.generate import Generator, Request
from data.sampling import Sampling, sample
from drafters.target import Target
from eval.decode import Output
from eval.lossless import compare_greedy
from recipes.schema import NonNegativeInt, PositiveInt, Recipe, opt

WARM_TOKENS = 4


@dataclass
class Options:
    prompts: PositiveInt = opt(96, "evaluation prompts answered, at most")
    batch_size: PositiveInt = opt(32, "rows decoded together")
    max_tokens: PositiveInt = opt(128, "longest answer of the variants greedy and sampled")
    longer: list[PositiveInt] = opt([256], "further caps N: variants greedy_N and sampled_N")
    temperature: float = opt(1.0, "of the sampled variants")
    top_p: float = opt(0.95, "of the sampled variants")
    sampler_rounds: NonNegativeInt = opt(15, "rounds of the samplers alone; 0 leaves this variant out")


@dataclass
class Run:
    """One way to answer all prompts, once."""

    seconds: float
    answers: list[list[int]]
    clock: PassClock = field(repr=False)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def ours(target: Target, prompts: list[list[int]], batch_size: int, max_tokens: int, sampling: Sampling = GREEDY,
         seed: int = 0) -> Run:
    requests = [Request(f"p{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    generator = Generator(target, max_tokens, batch_size, seed)
    with PassClock(target.model, target.device) as clock:
        seconds, answers = timed(lambda: generator.run(requests), target.device)
    return Run(seconds, [a.tokens for a in answers], clock)


def theirs(stock: Stock, prompts: list[list[int]], batch_size: int, max_tokens: int, sampling: Sampling = GREEDY,
           seed: int = 0) -> Run:
    with PassClock(stock.model, stock.device) as clock:
        seconds, answers = timed(lambda: stock.answers(prompts, batch_size, max_tokens, sampling, seed), stock.device)
    return Run(seconds, answers, clock)


def run_rows(variant: str, prefix: str, runs: list[Run], reference: str | None = None) -> list[Row]:
    """Medians over turns of one engine's figures; `rest` is all that is not a pass of the model."""
    rests = [run.seconds - sum(run.clock.seconds.values()) for run in runs]
    passes = statistics.median(sum(run.clock.passes.values()) for run in runs)
    figures = [
        ("tokens_per_s", [run.rate for run in runs], "tokens/s"), ("seconds", [run.seconds for run in runs], "s"),
        ("tokens", [run.tokens for run in runs], "tokens"),
        ("prefill_s", [run.clock.seconds["prefill"] for run in runs], "s"),
        ("steps_s", [run.clock.seconds["steps"] for run in runs], "s"),
        ("steps", [run.clock.passes["steps"] for run in runs], "passes"),
        ("rest_s", rests, "s"), ("rest_ms_per_pass", [rest / passes * 1e3 for rest in rests], "ms"),
    ]
    return [Row(variant, prefix + metric, statistics.median(values), unit, reference)
            for metric, values, unit in figures]


def variants(options: Options) -> dict[str, tuple[Sampling, int]]:
    """Sampling and cap of each variant."""
    sampled = Sampling(options.temperature, 0, options.top_p)
    caps = {"": options.max_tokens, **{f"_{cap}": cap for cap in options.longer}}
    return {name + end: (sampling, cap) for name, sampling in (("greedy", GREEDY), ("sampled", sampled))
            for end, cap in caps.items()}


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only generate"`."""
    chosen, size, seed = variants(options), options.batch_size, recipe.generation.seed
    target = open_target(recipe)
    prompts = evaluation_ids(recipe, target, options.prompts, max(cap for _, cap in chosen.values()))
    stock = Stock(target)
    works = {}
    for name, (sampling, cap) in chosen.items():
        for engine, answer in ((target, ours), (stock, theirs)):
            answer(engine, prompts[:size], size, WARM_TOKENS, sampling)
            works[name, engine is target] = lambda turn, engine=engine, answer=answer, cap=cap, sampling=sampling: (
                answer(engine, prompts, size, cap, sampling, seed))
    runs = in_turns({f"{name} {'drafthouse' if mine else Stock.name}": work for (name, mine), work in works.items()},
                    range(repeats))
    found = dict(zip(works, runs.values()))
    rows = [Row("greedy", "prompts", len(prompts), "prompts")]
    for name in chosen:
        rows += ratio_rows(name, *([run.rate for run in found[name, mine]] for mine in (True, False)), Stock.name)
        rows += run_rows(name, "", found[name, True]) + run_rows(name, "reference_", found[name, False], Stock.name)
    rows += ratio_rows("sampled", *([run.rate for run in found[name, True]] for name in ("sampled", "greedy")),
                       own("greedy answers"))
    if options.sampler_rounds:
        rows += sampler_rows(target, prompts[:size], chosen["sampled"][0], options.sampler_rounds, seed)
    faults = []
    for name in (name for name, (sampling, _) in chosen.items() if sampling is GREEDY):
        compared, wrong = same_answers(name, target, prompts, *(found[name, mine][0].answers for mine in (True, False)),
                                       recipe.eval.gap_tolerance, Stock.name)
        rows, faults = rows + compared, faults + wrong
    return Result(rows, faults)


def same_answers(variant: str, target: Target, prompts: list[list[int]], mine: list[list[int]],
                 others: list[list[int]], tolerance: float, reference: str) -> tuple[list[Row], list[str]]:
    """Whether two engines gave the same greedy answers: rows, and the fault where they did not. Only where the top two
    logits tie within `tolerance` may they differ: rounding decides there."""
    counts = compare_greedy(target, prompts, [Output(tokens) for tokens in others], [Output(tokens) for tokens in mine],
                            tolerance)
    rows = [Row(variant, metric, counts[metric], "prompts", reference) for metric in ("mismatches", "near_ties")]
    faults = [] if not counts["mismatches"] else [
        f"{variant}: {counts['mismatches']} of {len(prompts)} answers differ from those of {reference}; speeds of "
        "different work say nothing"]
    return rows, faults


@torch.inference_mode()
def sampler_rows(target: Target, prompts: list[list[int]], sampling: Sampling, rounds: int, seed: int) -> list[Row]:
    """Choosing one token for each row, model aside, from the logits behind these prompts."""
    logits = next_logits(target, prompts)
    uniforms = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed)).to(logits.device)
    processors = LogitsProcessorList()  # those that `generate` makes of these settings
    if sampling.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))

    def reference() -> Tensor:
        scores = processors(None, logits.to(torch.float32, copy=True))
        return torch.multinomial(scores.softmax(-1), num_samples=1)

    times = times_in_turns({"ours": lambda: sample(logits, sampling, uniforms), "theirs": reference}, rounds,
                           target.device)
    return time_rows("sampler", times["ours"], times["theirs"], f"{TRANSFORMERS} TopPLogitsWarper and multinomial")


def next_logits(target: Target, prompts: list[list[int]]) -> Tensor:
    """Logits [B, V] behind each prompt."""
    lengths = torch.tensor([len(p) for p in prompts], device=target.device)
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=target.device)
    for b, prompt in enumerate(prompts):
        ids[b, : len(prompt)] = torch.tensor(prompt, device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device).expand_as(ids).contiguous()
    final = target.forward(ids, positions, logits=False).final
    return target.head(final[torch.arange(len(prompts), device=target.device), lengths - 1])
