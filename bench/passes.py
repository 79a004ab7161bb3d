"""Whole cached passes of the target: packed weights (SkinnyLinear) against F.linear, all else alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.material import open_target
from bench.products import LINEAR
from bench.rows import Result, time_rows
from bench.turns import times_in_turns
from drafters.fast_cpu import SkinnyLinear
from drafters.target import Target
from recipes.errors import ConfigError
from recipes.schema import PositiveInt, Recipe, opt

MANY = 32  # rows from which a third of the rounds is enough


@dataclass
class Options:
    shapes: list[tuple[PositiveInt, PositiveInt]] = opt(
        [(1, 1), (1, 2), (1, 5), (4, 5), (32, 1), (64, 1), (32, 5)], "rows and tokens a row of a pass")
    columns: PositiveInt = opt(200, "columns of cache before it")
    rounds: PositiveInt = opt(24, f"rounds whose median counts; a third of them from {MANY} rows on")


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """Every SkinnyLinear multiplies as nn.Linear while the block runs; its packed weight is kept."""
    packed = [module for module in model.modules() if type(module) is SkinnyLinear]
    for module in packed:
        module.__class__ = nn.Linear
    try:
        yield
    finally:
        for module in packed:
            module.__class__ = SkinnyLinear


def pass_of(target: Target, rows: int, tokens: int, columns: int):
    """A call that runs one such pass and returns its logits [rows, tokens, V]. What the cache holds is random."""
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> Tensor:
        return torch.randint(0, target.vocab_size, (rows, n), generator=generator).to(target.device)

    def positions(start: int, n: int) -> Tensor:
        return (start + torch.arange(n, device=target.device)).expand(rows, n).contiguous()

    cache = target.new_cache(rows, columns + tokens)
    target.forward(ids(columns), positions(0, columns), cache, logits=False)
    block, at = ids(tokens), positions(columns, tokens)
    return lambda: target.forward(block, at, cache).logits


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only passes"`; variants ROWSxTOKENS."""
    target = open_target(recipe, recipe.trace.layers)
    if not any(type(module) is SkinnyLinear for module in target.model.modules()):
        raise ConfigError("--only passes: this target has no packed products; they need a float32 target on a CPU, "
                          "target.skinny_linear: true and a torch with oneDNN")
    rows = []
    for n, tokens in options.shapes:
        work = pass_of(target, n, tokens, options.columns)

        def linear(work=work) -> Tensor:
            with plain_products(target.model):
                return work()

        rounds = options.rounds if n < MANY else max(1, options.rounds // 3)
        times = times_in_turns({"packed": work, "linear": linear}, rounds, target.device)
        rows += time_rows(f"{n}x{tokens}", times["packed"], times["linear"], LINEAR)
    return Result(rows)
