"""Hidden states of finished conversations against the bare forward pass over the same batches.

The bare pass is what no capture can do without: transformers' own decoder over the padded ids, causal, without a mask
of its own, a head, taps or copies of states.
"""

import statistics
from dataclasses import dataclass

import torch

from bench.material import Stock, apart, conversations, evaluation_ids, open_target
from bench.rows import TRANSFORMERS, Result, Row, ratio_rows
from bench.turns import in_turns, timed
from data.capture import Conversation, by_tokens, capture
from data.codec import DTYPES, carrier
from recipes.schema import PositiveInt, Recipe, opt

BARE = f"{TRANSFORMERS} bare forward pass"


@dataclass
class Options:
    rows: PositiveInt = opt(96, "conversations captured")
    answer_tokens: PositiveInt = opt(96, "mean length of their answers")


def batches(rows: list[Conversation], batch_tokens: int) -> list[torch.Tensor]:
    """The padded ids [B, S] of the passes that `capture` makes of these rows."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    found = []
    for batch in by_tokens([(i, len(rows[i].ids)) for i in order], batch_tokens):
        ids = torch.zeros(len(batch), max(len(rows[i].ids) for i in batch), dtype=torch.long)
        for b, i in enumerate(batch):
            ids[b, : len(rows[i].ids)] = torch.tensor(rows[i].ids)
        found.append(ids)
    return found


@torch.inference_mode()
def bare(stock: Stock, rows: list[Conversation], batch_tokens: int) -> None:
    decoder = stock.model.get_decoder()
    for ids in batches(rows, batch_tokens):
        decoder(input_ids=ids.to(stock.device), use_cache=False)


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only capture"`."""
    target = open_target(recipe, recipe.trace.layers)
    prompts = evaluation_ids(recipe, target, options.rows, options.answer_tokens * 3 // 2)
    rows = conversations(prompts, options.rows, options.answer_tokens, target.vocab_size, recipe.prompts.seed)
    stock, limit = Stock(target), recipe.trace.batch_tokens
    dtype = carrier(DTYPES[recipe.trace.dtype])
    variants = {"capture": rows, "capture_apart": apart(rows, target.vocab_size)}
    works = {name: lambda turn, part=part: timed(lambda: capture(target, part, limit, dtype), target.device)[0]
             for name, part in variants.items()}
    works["bare"] = lambda turn: timed(lambda: bare(stock, rows, limit), target.device)[0]
    for work in works.values():
        work(0)  # warms up
    found = in_turns(works, range(repeats))
    tokens = sum(len(row.ids) for row in rows)
    rates = {name: [tokens / seconds for seconds in times] for name, times in found.items()}
    result = []
    for name in variants:
        result += [*ratio_rows(name, rates[name], rates["bare"], BARE),
                   Row(name, "tokens_per_s", statistics.median(rates[name]), "tokens/s"),
                   Row(name, "reference_tokens_per_s", statistics.median(rates["bare"]), "tokens/s", BARE),
                   Row(name, "tokens", tokens, "tokens"), Row(name, "rows", len(rows), "rows")]
    return Result(result)
