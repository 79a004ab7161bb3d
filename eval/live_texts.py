"""Are the greedy answers of two servers the same, and where they differ, was it a near-tie?

Where a recipe samples, what was measured says nothing of that: both are asked greedily beside it.
A server's arithmetic depends on what else it computes at the time, so that two tokens of almost equal logits may change
places without anything being wrong. The baseline is asked for the probabilities at the first difference.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from os.path import commonprefix
from typing import Any

from data.backends.base import Fault
from data.backends.client import Client
from data.backends.stream import PATH, Stream, chat_body
from eval.figures import spread
from eval.live import Level, Live, Reply, Run, Side, Work
from eval.settings import greedy_of
from recipes.errors import RunError
from recipes.schema import Eval, Sampling

MOST_ASKED = 64  # differences whose gap is asked for


@dataclass
class Difference:
    """Two answers to one request. `place`: index of the first token that differs, where ids are known (`by_token`),
    else of the first character. `gap`: between the baseline's two largest logits there; None is not known."""

    speculative: Reply
    baseline: Reply
    place: int
    by_token: bool
    gap: float | None = None


@dataclass
class Texts:
    """`prompts`, `tokens`: requests that both servers answered, and the baseline's tokens of them."""

    prompts: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


def proving(section: Eval, works: list[Work]) -> Live:
    """Asks eval.lossless_prompts of these conversations greedily, with the recipe's repetition penalty and stop
    strings."""
    greedy = Sampling(**asdict(greedy_of(section)["sampling"]))
    return Live(replace(section, sampling=greedy), [works[i] for i in spread(works, section.lossless_prompts)])


async def asked_greedily(live: Live, side: Side, other: Side | None) -> Level:
    """The answers of one or both servers, one request at a time; their times and counters are of no use."""
    runs = {}
    for one in [one for one in (other, side) if one]:
        run = runs[one.field] = Run(sum(len(work.question.rounds) for work in live.works))
        await live.turn(one, run, live.works, 1, "greedy")
    return Level(1, 1, 1, runs[side.field], runs[other.field] if other else None)


def first_difference(a: Stream, b: Stream, stops: bool = False) -> tuple[int, bool] | None:
    """(place, by token) of the first difference of two answers; None where they are equal. stops: answers end at stop
    strings too: then equal texts are equal, whatever tokens an engine wrote behind one."""
    if a.ids is not None and b.ids is not None:
        if a.ids == b.ids or stops and a.text == b.text:
            return None
        same = next((i for i, pair in enumerate(zip(a.ids, b.ids)) if pair[0] != pair[1]), min(len(a.ids), len(b.ids)))
        return same, True
    return None if a.text == b.text else (len(commonprefix([a.text, b.text])), False)


def compared(level: Level, stops: bool) -> Texts:
    """Each request that both servers answered, the first time that it was asked at this concurrency. Later turns of a
    conversation whose earlier answers differ are other requests. stops: as in `first_difference`."""
    found = Texts()
    if level.baseline is None:
        return found
    others = {(*reply.key, reply.round): reply for reply in level.baseline.replies if reply.work.repeat == 0}
    for reply in level.speculative.replies:
        other = others.get((*reply.key, reply.round))
        if reply.work.repeat or other is None or reply.messages != other.messages:
            continue
        found.prompts, found.tokens = found.prompts + 1, found.tokens + other.stream.tokens
        place = first_difference(reply.stream, other.stream, stops)
        if place:
            found.differences.append(Difference(reply, other, *place))
    return found


def unsteady(runs: Iterable[Run]) -> tuple[int, int]:
    """(first requests that one server answered several times, those whose answers are not all the same)."""
    answers: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for reply in run.replies:
            if reply.round == 0:
                answers.setdefault(reply.key, []).append(reply.stream.text)
    several = [texts for texts in answers.values() if len(texts) > 1]
    return len(several), sum(len(set(texts)) > 1 for texts in several)


async def classify(live: Live, baseline: Side, texts: Texts) -> None:
    """Fills in the gaps. One stays unknown where the server gives no probabilities or another answer than before."""
    for one in texts.differences[:MOST_ASKED]:
        work, stream = one.baseline.work, one.baseline.stream
        body = chat_body(live.server.kind, baseline.client.server.model, one.baseline.messages, work.question.tools,
                         live.section.max_tokens, "", live.sampling, live.section.stop)
        body |= {"stream": False, "logprobs": True, "top_logprobs": 2}
        del body["stream_options"]
        try:
            one.gap = await gap(baseline.client, body, stream, one)
        except (Fault, RunError):  # no such field, or a server that is gone: nothing is known, and is reported so
            continue


async def gap(client: Client, body: dict[str, Any], stream: Stream, one: Difference) -> float | None:
    """Difference of the two largest log-probabilities, which is that of their logits, at the place."""
    def read(value: Any) -> float | None:
        try:
            choice = value["choices"][0]
            steps = choice["logprobs"]["content"]
            at = place_of(one, stream, [step["token"] for step in steps], choice.get("token_ids"))
            if at is None:
                return None
            first, second = sorted((top["logprob"] for top in steps[at]["top_logprobs"]), reverse=True)[:2]
            return float(first - second)
        except (KeyError, IndexError, TypeError, ValueError):
            return None

    return await client.call("POST", PATH, body, read, "gap", lambda reason: None)


def place_of(one: Difference, stream: Stream, tokens: list[str], ids: list[int] | None) -> int | None:
    """Index of the token at the place in the answer that was given again; None where it went another way before."""
    if one.by_token:
        same = ids is not None and stream.ids is not None and ids[: one.place] == stream.ids[: one.place]
        return one.place if same and one.place < len(tokens) else None
    text = ""
    for index, token in enumerate(tokens):
        if not stream.text.startswith(text):
            return None
        text += token
        if len(text) > one.place:
            return index
    return None
