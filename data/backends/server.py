"""Answers by an OpenAI-compatible server: vLLM, SGLang, TensorRT-LLM, Dynamo (docs/answers.md).

Before the first request the server must prove that it serves the target: its name, its tokenizer, and greedy
tokens that our own copy of the target finds likely (case 36).
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import torch

from data.backends.base import Fault, Losses, accept
from data.backends.client import Client, api_key, server_url
from data.backends.journal import Journal
from data.backends.wire import answer_ids, completion_body, prompt_ids_of, read_completion
from data.generate import Answer, Request
from data.recorder import Keeper
from data.sampling import Sampling, row_seed
from drafters.target import Target
from recipes.errors import ConfigError
from recipes.schema import Generation

TEXTS = ["Hello, world!", "  two spaces,\ttab\nand a line ", "1234567890 3.14159 0x7f",
         "naïve café, 東京, Привет", "def f(x):\n    return x ** 2  # comment"]
FROM_TEXT = "ids from text"  # a count, no failure: the server gave no ids, so its text was tokenised again
PROBES, PROBE_TOKENS = 3, 16
WIDEST_GAP = 2.0  # logits; rounding to bf16 or fp8 moves a greedy choice by less, other weights by much more


class ServerBackend:
    """`concurrency` workers share the rows; each takes the next when its own is answered and journaled."""

    def __init__(self, section: Generation, target: Target) -> None:
        self.section, self.server, self.target = section, section.server, target
        server_url(self.server)
        api_key(self.server)
        if not self.server.model:
            raise ConfigError("generation.server.model: name the model as the server lists it in /v1/models")
        self.checked = False

    def run(self, requests: list[Request], max_tokens: int, journal: Journal, losses: Losses,
            keeper: Keeper | None = None) -> list[Answer]:
        """See Backend.run."""
        todo = [r for r in requests if r.id not in journal.answers]
        if todo:
            asyncio.run(self.work(todo, max_tokens, journal, losses))
        return [journal.answers[r.id] for r in requests if r.id in journal.answers]

    async def work(self, todo: list[Request], max_tokens: int, journal: Journal, losses: Losses) -> None:
        async with Client(self.server, self.section.seed) as client:
            if not self.checked:
                await self.check(client, todo[:PROBES], min(max_tokens, PROBE_TOKENS))
                self.checked = True
            queue = iter(todo)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.server.concurrency, len(todo))):
                        group.create_task(self.worker(client, queue, max_tokens, journal, losses))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def worker(self, client: Client, queue: Iterator[Request], max_tokens: int, journal: Journal,
                     losses: Losses) -> None:
        for request in queue:
            try:
                answer = await self.answer(client, request, max_tokens, journal.count)
            except Fault as fault:
                losses.add(request.id, fault.reason)
            else:
                journal.add(answer)

    async def answer(self, client: Client, request: Request, max_tokens: int,
                     count: Callable[[str], None]) -> Answer:
        """The answer, then as many greedy tokens beyond its end as a replay needs.

        Those are asked for as a continuation of prompt and answer; where a server stops at end tokens whatever it
        is told, it is asked again from there.
        """
        def read(ids: list[int], finish: str) -> Answer:
            return accept(request, ids, finish, max_tokens, self.target.end_ids)

        answer = await self.complete(client, request.id, request.prompt, request.sampling, max_tokens, False, read,
                                     count)
        while len(answer.overrun) < request.overrun:
            wanted = request.overrun - len(answer.overrun)

            def beyond(ids: list[int], finish: str, wanted: int = wanted) -> list[int]:
                if not 0 < len(ids) <= wanted:
                    raise Fault("no tokens" if not ids else "more tokens than asked")
                return ids

            so_far = request.prompt + answer.tokens + answer.overrun
            answer.overrun += await self.complete(client, request.id, so_far, Sampling(), wanted, True, beyond,
                                                  count)
        return answer

    async def complete(self, client: Client, row: str, prompt: list[int], sampling: Sampling, max_tokens: int,
                       beyond: bool, accepted: Callable[[list[int], str], Any],
                       count: Callable[[str], None]) -> Any:
        """`accepted` of the ids and finish reason of one completion; its Faults are tried again too."""
        end_ids = self.target.end_ids
        body = completion_body(self.server.kind, self.server.model, prompt, sampling, max_tokens,
                               None if beyond else end_ids, row_seed(self.section.seed, row, 4), row)

        def read(value: Any) -> Any:
            found = read_completion(value, self.server.model, prompt)
            result = accepted(answer_ids(found, self.target.tokenizer, self.target.vocab_size, end_ids), found.finish)
            if found.ids is None:
                count(FROM_TEXT)
            return result

        return await client.call("POST", "/v1/completions", body, read, row, count)

    async def check(self, client: Client, requests: list[Request], tokens: int) -> None:
        """Raises ConfigError where the server serves another name, tokenizer or model than the recipe's target."""
        try:
            await self.check_name(client)
            for text in filter(None, [*TEXTS, "".join(self.target.tokenizer.all_special_tokens)]):
                await self.check_tokens(client, text)
            await self.check_weights(client, requests, tokens)
        except Fault as fault:
            raise ConfigError(f"generation.server.base_url = {self.server.base_url}: {fault.reason}, after "
                              f"{self.server.retries + 1} attempts") from None

    async def check_name(self, client: Client) -> None:
        served = await client.models()
        if self.server.model not in served:
            raise ConfigError(f"generation.server.model = {self.server.model}: the server at {self.server.base_url} "
                              f"serves {', '.join(served) or 'no model'}")

    async def check_tokens(self, client: Client, text: str) -> None:
        """Compares the ids of a text, or their number where the server has no `/tokenize`."""
        tokenizer = self.target.tokenizer
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        begun = tokenizer(text)["input_ids"]  # a server may begin a text with the tokenizer's own special tokens
        body = {"model": self.server.model, "prompt": text, "add_special_tokens": False}
        theirs = await client.call("POST", "/tokenize", body, tokens_of, "tokenize", ignore, optional=True)
        if theirs is None:
            body = completion_body(self.server.kind, self.server.model, [], Sampling(), 1, self.target.end_ids, 0,
                                   "tokenizer check") | {"prompt": text}
            theirs = await client.call("POST", "/v1/completions", body, prompt_of, "tokenize", ignore)
        if isinstance(theirs, int):
            same = theirs in (len(ours), len(begun))
        else:
            same = theirs is None or theirs in (ours, begun)
        if not same:
            raise ConfigError(f"target.model = {self.target.section.model}: its tokenizer and the server's disagree on "
                              f"{text!r}: here {ours}, there {theirs}")

    async def check_weights(self, client: Client, requests: list[Request], wanted: int) -> None:
        """Greedy tokens of the server must be the best of our copy of the target, up to rounding. Raises Fault where
        none of the requests can be answered at all."""
        faults = []
        for request in requests:
            try:
                tokens = await self.probe(client, request.prompt, wanted)
            except Fault as fault:  # of text, say, that cannot be tokenised again: another prompt may do
                faults.append(fault)
                continue
            worst = widest_gap(self.target, request.prompt, tokens)
            if worst > WIDEST_GAP:
                raise ConfigError(f"generation.server.model = {self.server.model}: a greedy token of the server lies "
                                  f"{worst:.1f} logits below the best of target.model = "
                                  f"{self.target.section.model}: these are different weights, or the server changes "
                                  "logits")
        if len(faults) == len(requests):
            raise faults[-1]

    async def probe(self, client: Client, prompt: list[int], wanted: int) -> list[int]:
        """The server's greedy answer, its length aside."""
        def read(ids: list[int], finish: str) -> list[int]:
            return accept(Request("", prompt), ids, "stop" if finish == "stop" else "length", len(ids),
                          self.target.end_ids).tokens

        return await self.complete(client, "weights check", prompt, Sampling(), wanted, False, read, ignore)


def ignore(reason: str) -> None:
    """Faults of the checks are not faults of rows."""


def tokens_of(value: Any) -> list[int] | None:
    """Ids out of a `/tokenize` response; None where the server has no such path."""
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("tokens"), list):
        raise Fault("/tokenize gives no tokens")
    return value["tokens"]


def prompt_of(value: Any) -> list[int] | int | None:
    """What a completion says of its prompt: ids, else their number, else nothing."""
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Fault("not a completion")
    usage = value.get("usage")
    return prompt_ids_of(value) or (usage.get("prompt_tokens") if isinstance(usage, dict) else None)


def widest_gap(target: Target, prompt: list[int], tokens: list[int]) -> float:
    """The largest logit difference between the target's best token and the given one, over the tokens."""
    ids = torch.tensor([prompt + tokens[:-1]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    logits = target.forward(ids, positions).logits[0, len(prompt) - 1 :].float()  # [n, V]
    chosen = logits.gather(1, torch.tensor(tokens, device=target.device)[:, None])[:, 0]
    return float((logits.amax(-1) - chosen).max())
