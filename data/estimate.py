"""What a run of `make trace` would take, from counted prompts and a few measured answers; arithmetic only.

Sizes are those that the store writes (data.store.row_bytes); lengths of answers and times are extrapolated.
"""

from dataclasses import dataclass, field, fields

from data.answers import prompt_turns
from data.capture import Conversation
from data.chat import answer_points, prompt_ids
from data.codec import DTYPES
from data.intake import sources_of, wanted
from data.literal import Unrenderable
from data.prompts import Prompt
from data.settings import stores_states
from data.store import row_bytes
from drafters.target import Target
from recipes.schema import Recipe


@dataclass
class Estimate:
    """What the run would take. Pairs are (estimate, upper bound), for seconds (low, high)."""

    rows: tuple[float, float] = (0.0, 0.0)
    prompts: int = 0
    sampled: int = 0  # answers that the estimate rests on
    tokens: tuple[float, float] = (0.0, 0.0)
    supervised: tuple[float, float] = (0.0, 0.0)
    bytes: tuple[float, float] = (0.0, 0.0)
    synthesis: tuple[float, float] = (0.0, 0.0)
    answers: tuple[float, float] = (0.0, 0.0)
    states: tuple[float, float] = (0.0, 0.0)
    written: tuple[int, int] = (0, 0)  # bytes of the sample: predicted, found on disk
    warnings: list[str] = field(default_factory=list)


@dataclass
class Load:
    """Work of a run: tokens of prompts and given rows are counted, an answer counts by its length."""

    rows: float = 0.0
    known: float = 0.0  # tokens that do not depend on the length of answers
    marked: float = 0.0  # those of them with a stored final state
    answers: float = 0.0  # answers the target has to write
    repeats: float = 0.0  # how often an answer is stored: again in each later turn's prompt
    overrun: float = 0.0  # tokens generated beyond the end of validation rows, not stored

    def tokens(self, length: float) -> float:
        return self.known + self.repeats * length

    def supervised(self, length: float) -> float:
        return self.marked + self.answers * length


def combined(loads: list[Load], going_on: float) -> Load:
    """The load of all turns, where a share `going_on` of the answers lets a conversation have its next turn."""
    return Load(**{f.name: sum(getattr(load, f.name) * going_on**turn for turn, load in enumerate(loads))
                   for f in fields(Load)})


@dataclass
class Speed:
    """Seconds of a decoding step with one row and with `batch` rows, and tokens a second of the latter."""

    alone: float = 0.0
    together: float = 0.0
    batch: int = 1
    rate: float = float("inf")


def synthetic(recipe: Recipe) -> int:
    """Prompts that the recipe has the target write."""
    section = recipe.prompts
    return sum(count or 0 for source, count in zip(sources_of(section), wanted(section)) if source.kind == "synthesis")


def marked(turns: list[int]) -> int:
    """Final states that a row stores."""
    return sum(turn != 0 for turn in turns[1:])


def bytes_of(recipe: Recipe, target: Target, tokens: float, finals: float) -> float:
    """Bytes on disk, as data.collect predicts them; linear, so totals will do."""
    dtype = DTYPES[recipe.trace.dtype]
    width = len(target.layers) * target.hidden if stores_states(recipe.trace) else 0
    return row_bytes(tokens, finals, width, target.hidden, dtype)


def workload(recipe: Recipe, target: Target, limit: int, prompts: list[Prompt], held: set[str],
             kept: list[Conversation]) -> list[Load]:
    """What each round of answers adds, given rows in the first one; counted over all prompts, of which synthesised
    ones stand for as many as the recipe wants."""
    loads = [Load(len(kept), sum(len(r.ids) for r in kept), sum(marked(r.turns) for r in kept),
                  overrun=recipe.prompts.validation * recipe.train.validation_draft_length)]
    own = sum(p.own for p in prompts)
    for prompt in prompts:
        if recipe.generation.answers == "keep" and prompt.id not in held:
            continue
        weight = synthetic(recipe) / own if prompt.own else 1.0
        history = []
        for number, part in enumerate(answer_points(prompt.messages)[0]):
            history += part
            try:
                ids = prompt.ids or prompt_ids(target.tokenizer, history, prompt.tools)
                turns = prompt_turns(target, prompt, history, ids, recipe.trace.user_turns)
            except Unrenderable:
                break
            if len(ids) + recipe.generation.max_tokens > limit:
                break
            loads += [Load() for _ in range(number + 1 - len(loads))]
            load = loads[number]
            load.rows, load.answers = load.rows + weight, load.answers + weight
            load.known += weight * len(ids)
            load.marked += weight * marked(turns) * (prompt.id not in held)
            load.repeats += weight * (number + 1)
            history = [*history, {"role": "assistant", "content": "."}]  # stands for the answer, counted by `repeats`
    return loads


def extrapolate(recipe: Recipe, target: Target, loads: list[Load], rows: list[Conversation], speed: Speed,
                capturing: float) -> Estimate:
    """Totals of the run: from the sample's mean answer and the share of it that ended, and from answers that all reach
    generation.max_tokens and still let their conversation go on."""
    longest = float(recipe.generation.max_tokens)
    length = sum(row.turns.count(1) for row in rows) / len(rows) if rows else longest
    ended = sum(row.finish == "stop" for row in rows) / len(rows) if rows else 1.0
    load, most = combined(loads, ended), combined(loads, 1.0)
    tokens = load.tokens(length), most.tokens(longest)
    supervised = load.supervised(length), most.supervised(longest)
    batch = max(1.0, min(recipe.generation.batch_size, load.answers))
    a_row = max(0.0, (speed.together - speed.alone) / max(1, speed.batch - 1))  # what one more row adds to a step
    written = load.answers * length + load.overrun
    batched = written / batch * (max(0.0, speed.together - a_row * speed.batch) + a_row * batch)
    as_measured = written / speed.rate
    return Estimate(
        rows=(load.rows, most.rows), sampled=len(rows), tokens=tokens, supervised=supervised,
        bytes=tuple(bytes_of(recipe, target, t, s) for t, s in zip(tokens, supervised)),
        answers=tuple(sorted((batched, as_measured))), states=(tokens[0] / capturing, tokens[1] / capturing))
