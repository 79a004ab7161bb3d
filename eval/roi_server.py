"""`make roi ARGS="measure --draft_length K"` with `generation.server.base_url`: step times of a live server.

B chat requests stream at once; between the moment when the last of them has begun and the first ends, the gap between
two pieces of a stream is a step of B rows, and tokens over pieces is what a step keeps. The server runs with the draft
length that the call names (0: without a drafter): one call for each way in which it was started, all into one
steps.json. Prompts are the evaluation's, through the server's own chat template (case 53).
"""

import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from data.prompts import evaluation_prompts
from eval.plan import read_config
from eval.roi_engine import require_same_run, version_of
from eval.roi_files import Steps, Timed, bits_in
from recipes.errors import ConfigError, RunError
from recipes.hardware import spelt
from recipes.schema import Recipe, Server

TOKENS = 96  # of each answer
FEWEST = 5  # gaps of a stream while all are running


@dataclass
class Stream:
    """When the pieces of one answer came, and what the server counted."""

    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0


async def one(client: httpx.AsyncClient, section: Server, messages: list[dict[str, Any]]) -> Stream:
    """One streamed answer. RunError for a status that is none of success, or a stream without usage."""
    body: dict[str, Any] = {"model": section.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0.0,
                            "stream": True, "stream_options": {"include_usage": True}}
    if section.kind in ("vllm", "sglang"):
        body["ignore_eos"] = True
    found = Stream()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")[:200]
            raise RunError(f"generation.server.base_url: status {answer.status_code}: {text}")
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data:"))
            if event.get("usage"):
                found.prompt_tokens, found.tokens = (event["usage"][k] for k in ("prompt_tokens", "completion_tokens"))
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
                found.times.append(time.perf_counter())
    if not found.tokens or not found.times:
        raise RunError("generation.server.base_url: the stream has no usage or no text; stream_options.include_usage "
                       "must be supported")
    return found


async def together(section: Server, prompts: list[list[dict[str, Any]]]) -> list[Stream]:
    key = os.environ.get(section.api_key_env, "") if section.api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=section.base_url.rstrip("/"), headers=headers, timeout=section.timeout_s,
                                 limits=limits) as client:
        return await asyncio.gather(*(one(client, section, messages) for messages in prompts))


def step_of(streams: list[Stream]) -> tuple[float, float, float]:
    """(seconds of a step, tokens kept a step and row, mean context) of requests that ran together.

    RunError where they did not: a stream of fewer than FEWEST gaps while all were running says nothing."""
    begin, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    gaps = [[b - a for a, b in zip(s.times, s.times[1:]) if a >= begin and b <= end] for s in streams]
    if min(map(len, gaps)) < FEWEST:
        raise RunError(f"batch {len(streams)}: the requests did not run together for {FEWEST} steps; the server may "
                       "queue them, or group several steps in a piece of its stream")
    kept = statistics.mean(s.tokens / len(s.times) for s in streams)
    context = statistics.mean(s.prompt_tokens + s.tokens / 2 for s in streams)
    return statistics.mean(x for own in gaps for x in own), max(1.0, kept), context


def measure(recipe: Recipe, K: int, before: Steps | None) -> Steps:
    """Steps of this server at each batch of `roi.batches`, added to those measured before of the same run. ConfigError
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
                  tensor_parallel=roi.tensor_parallel, target=target, drafter={"kind": recipe.drafter.kind})
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
