"""`make roi ARGS="measure --draft_length K"` with `generation.server.base_url`: step times of a live server.

B chat requests stream at once; between the moment when the last of them has begun and the first ends, the gap between
two pieces of a stream is a step of B rows, and tokens over pieces is what a step keeps. The server runs with the draft
length that the call names (0: without a drafter): one call for each way in which it was started, all into one
steps.json. Prompts are the evaluation's, through the server's own chat template (case 53).
"""

import asyncio
import statistics
from dataclasses import asdict, replace

from data.backends.base import Fault
from data.backends.client import Client
from data.backends.stream import GIVES_IDS, Stream, chat_body, streamed
from data.chat import Message
from data.prompts import evaluation_prompts
from eval.plan import read_config
from eval.roi_engine import require_same_run, version_of
from eval.roi_files import Steps, Timed, bits_in
from recipes.errors import ConfigError, RunError
from recipes.hardware import spelt
from recipes.schema import Recipe, Server

TOKENS = 96  # of each answer
FEWEST = 5  # gaps of a stream while all are running


async def one(client: Client, messages: list[Message]) -> Stream:
    """One streamed answer of TOKENS, where the server can be told so. RunError where there is none: a step that was
    disturbed is not timed again."""
    body = chat_body(client.server.kind, client.server.model, messages, None, TOKENS)
    if client.server.kind in GIVES_IDS:
        body["ignore_eos"] = True
    try:
        return await streamed(client, body)
    except Fault as fault:
        raise RunError(f"generation.server.base_url = {client.server.base_url}: {fault.reason}") from None


async def together(section: Server, prompts: list[list[Message]]) -> list[Stream]:
    async with Client(replace(section, concurrency=len(prompts)), 0) as client:
        return await asyncio.gather(*(one(client, messages) for messages in prompts))


def step_of(streams: list[Stream]) -> tuple[float, float, float]:
    """(seconds of a step, tokens kept a step and row, mean context) of requests that ran together.

    RunError where they did not: a stream of fewer than FEWEST gaps while all were running says nothing."""
    begin, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    gaps = [[b - a for a, b in zip(s.times, s.times[1:]) if a >= begin and b <= end] for s in streams]
    if min(map(len, gaps)) < FEWEST:
        raise RunError(f"batch {len(streams)}: the requests did not run together for {FEWEST} steps; the server may "
                       "queue them, or group several steps in a piece of its stream")
    kept = statistics.mean((s.tokens - 1) / (len(s.times) - 1) for s in streams)  # the prompt's pass gives one token
    context = statistics.mean(s.prompt_tokens + s.tokens / 2 for s in streams)
    return statistics.mean(x for own in gaps for x in own), max(1.0, kept), context


def measure(recipe: Recipe, K: int, before: Steps | None, synthetic: bool = False) -> Steps:
    """Steps of this server at each batch of `roi.batches`, added to those measured before of the same run; `synthetic`:
    it accepts drafts by lot, which one such run says of the whole file. ConfigError
    where those are of another engine, hardware, target or drafter."""
    section, roi = recipe.generation.server, recipe.roi
    if not roi.hardware or not (roi.model or recipe.target.model):
        raise ConfigError("roi.hardware: a server does not say what it runs on; set it, and roi.tensor_parallel")
    name, gpu = spelt(roi.hardware, recipe.plan.custom, "roi.hardware")
    own = {} if roi.model else {"config": read_config(recipe)}
    target = {"model": roi.model or recipe.target.model, "weight_bits": roi.weight_bits, **own}
    target["weight_bits"] = bits_in(target)
    fresh = Steps(profile="engine", engine={"name": section.kind, "model": section.model, **version_of(section)},
                  hardware={"name": name, **(asdict(gpu) if name in recipe.plan.custom else {})},
                  tensor_parallel=roi.tensor_parallel, target=target, drafter={"kind": recipe.drafter.kind},
                  acceptance="synthetic" if synthetic or before and before.acceptance == "synthetic" else "measured")
    require_same_run(before, fresh)
    prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
    points = []
    for rows in roi.batches:
        chosen = [prompts[i % len(prompts)].messages for i in range(rows)]
        asyncio.run(together(section, chosen[:1]))  # the first request meets a cold server
        found = [step_of(asyncio.run(together(section, chosen))) for _ in range(roi.rounds)]
        seconds, kept, context = (statistics.median(f[i] for f in found) for i in range(3))
        if not K and kept > 1.05:
            raise RunError(f"batch {rows}: {kept:.2f} tokens a piece without a drafter: this server groups steps in "
                           "its stream, so they cannot be timed from outside")
        points.append(Timed("step", rows, K, 0, context, 1e3 * seconds, min(kept, K + 1.0)))
    fresh.points = [p for p in (before.points if before else []) if p.K != K] + points
    return fresh
