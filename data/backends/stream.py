"""Streamed chat requests: what is sent to `/v1/chat/completions`, and when which piece of the answer came.

Messages go through the server's own chat template. Every sampling field is sent, off ones too (data/backends/wire.py
says why).
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from data.backends.base import Fault
from data.backends.client import LATE, Client, message_of
from data.backends.wire import DIALECTS, OFF
from data.chat import Message
from data.sampling import Sampling
from recipes.errors import RunError

PATH = "/v1/chat/completions"
GREEDY = Sampling()
GIVES_IDS = ("vllm", "sglang")  # kinds that return token ids and salt their prefix cache where they are asked to
REFUSALS = (400, 413, 422)  # statuses of a request that this server takes at no attempt
TEXTS = ("reasoning_content", "reasoning", "content")  # of a delta, in the order in which they are written


@dataclass
class Stream:
    """One streamed answer. Times in seconds of time.perf_counter; a piece is an event that brings text or tokens.

    `counts`: tokens of each piece, and `ids` all of them; both None where the server does not give every id. `tokens`
    and `prompt_tokens` are the server's own counts. `content`: the text without reasoning and tool calls.
    """

    began: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    counts: list[int] | None = None
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    content: str = ""
    finish: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Reader:
    """Makes a Stream of the lines of one response, in order. `model`: the only one that may answer."""

    model: str
    found: Stream
    pieces: list[list[int] | None] = field(default_factory=list)
    done: bool = False

    def line(self, line: str) -> None:
        """Takes a line of the response. Raises Fault for an event that is none, RunError for another model's."""
        if not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise Fault("an event is not JSON") from None
        if not isinstance(event, dict):
            raise Fault("an event is no object")
        if event.get("error"):
            raise Fault("an error in the stream")
        if event.get("model") not in (None, self.model):
            raise RunError(f"model {self.model}: the server answered with {event['model']!r}")
        self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        """Notes what an event brings, and when."""
        found, usage, choices = self.found, event.get("usage"), event.get("choices")
        if isinstance(usage, dict):
            found.tokens, found.prompt_tokens = (count_in(usage, k) for k in ("completion_tokens", "prompt_tokens"))
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        prompt = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
        found.prompt_ids = prompt if is_ids(prompt) and prompt else found.prompt_ids
        delta = choice["delta"] if isinstance(choice.get("delta"), dict) else {}
        text = "".join(delta[key] for key in TEXTS if isinstance(delta.get(key), str))
        if delta.get("tool_calls"):
            text += json.dumps(delta["tool_calls"], sort_keys=True, ensure_ascii=False)
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        if text or ids or (finish and not found.times):
            found.times.append(time.perf_counter())
            self.pieces.append(ids if is_ids(ids) else None)
            found.text += text
            found.content += delta["content"] if isinstance(delta.get("content"), str) else ""
        if finish:
            found.finish, found.ended = str(finish), time.perf_counter()

    def finished(self) -> Stream:
        """The whole answer. Raises Fault where it was cut, RunError where the server does not count its tokens."""
        found = self.found
        if not (self.done or found.finish) or not found.times:
            raise Fault("the stream ended early")
        if not found.tokens:
            raise RunError("the stream has no usage: the server must support stream_options.include_usage")
        found.ended = max(found.ended, found.times[-1])
        if None not in self.pieces:
            ids = [i for piece in self.pieces for i in piece]
            if len(ids) == found.tokens:
                found.ids, found.counts = ids, [len(piece) for piece in self.pieces]
        return found


def count_in(usage: dict[str, Any], key: str) -> int:
    value = usage.get(key)
    return value if type(value) is int and value > 0 else 0


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def sent(message: Message) -> Message:
    """A message in OpenAI's form: arguments of tool calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
             if isinstance(call.get("function", {}).get("arguments"), dict) else call
             for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def unknown_to(kind: str, sampling: Sampling) -> list[str]:
    """Settings that are not off and that a server of this kind has no field for."""
    if DIALECTS[kind].top_k_off is not None:
        return []
    return [name for name in ("top_k", *OFF) if getattr(sampling, name) != getattr(GREEDY, name)]


def chat_body(kind: str, model: str, messages: list[Message], tools: list | None, max_tokens: int,
              salt: str = "", sampling: Sampling = GREEDY, stop: Sequence[str] = ()) -> dict[str, Any]:
    """A streamed request. `salt`: prompts of another one are not found in the server's prefix cache, where its kind
    knows that. stop: strings that end the answer. No seed is sent: requests in production have none."""
    body: dict[str, Any] = {"model": model, "messages": [sent(m) for m in messages], "max_tokens": max_tokens,
                            "temperature": sampling.temperature, "top_p": sampling.top_p, "presence_penalty": 0.0,
                            "frequency_penalty": 0.0, "n": 1, "stream": True,
                            "stream_options": {"include_usage": True}}
    if tools:
        body["tools"] = tools
    if stop:
        body["stop"] = list(stop)
    dialect = DIALECTS[kind]
    if dialect.top_k_off is not None:
        body |= {name: getattr(sampling, name) for name in OFF} | {"top_k": sampling.top_k or dialect.top_k_off}
    if kind in GIVES_IDS:
        body["return_token_ids"] = True
        body |= {"cache_salt": salt} if salt else {}
    return body


async def streamed(client: Client, body: dict[str, Any]) -> Stream:
    """One answer, one attempt. Raises Fault for what may pass, and as final where the server refuses this request;
    RunError for what no request can mend."""
    reader = Reader(body["model"], Stream(time.perf_counter()))
    try:
        async with asyncio.timeout(client.server.timeout_s):
            async with client.http.stream("POST", PATH, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    if response.status_code in REFUSALS:
                        said = client.hide(message_of(response))
                        raise Fault(f"HTTP {response.status_code}: {said[:200]}", final=True)
                    client.check_status(response, PATH)
                async for line in response.aiter_lines():
                    reader.line(line)
    except TimeoutError:
        raise Fault(LATE) from None
    except httpx.RequestError as error:  # refused, reset, cut off in the body, not HTTP
        raise Fault(f"connection: {type(error).__name__}") from None
    return reader.finished()
