"""Answers by the target itself, decoded in a batch whose finished rows are replaced.

A row's result depends on its id, prompt and settings, not on its neighbours: its random numbers come from
its own generator. Greedy answers can still differ between batches where the top two logits tie within
rounding. Legend: B rows in the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.recorder import Keeper, Recorder
from data.sampling import Sampling, row_generator, sample
from drafters.cache import RowCache
from drafters.target import Prefix, Target


@dataclass
class Request:
    """One prompt to continue. `overrun` tokens are generated greedily beyond the stop and kept apart.

    turns: the turn of each prompt token (data/chat.py) where the row is to become a trace; empty where its states are
    of no use.
    """

    id: str
    prompt: list[int]
    sampling: Sampling = Sampling()
    overrun: int = 0
    turns: list[int] = field(default_factory=list)


@dataclass
class Answer:
    """The target's tokens for a request; `finish` is 'stop' (an end token, kept last) or 'length'."""

    id: str
    prompt: list[int]
    tokens: list[int]
    finish: str
    overrun: list[int] = field(default_factory=list)


@dataclass
class _Row:
    request: Request
    uniforms: Tensor
    beyond: int  # tokens wanted beyond the stop
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    overrun: list[int] = field(default_factory=list)

    def push(self, token: int, end_ids: set[int], max_tokens: int) -> bool:
        """Takes one token; True where the row is complete."""
        if self.finish:
            self.overrun.append(token)
        else:
            self.tokens.append(token)
            if token in end_ids:
                self.finish = "stop"
            elif len(self.tokens) == max_tokens:
                self.finish = "length"
        return bool(self.finish) and len(self.overrun) >= self.beyond

    def answer(self) -> Answer:
        r = self.request
        return Answer(r.id, r.prompt, self.tokens, self.finish, self.overrun[: r.overrun])


@dataclass
class _Batch:
    """Rows in work, one place each, their caches, and what is finished."""

    cache: RowCache
    prefix: Prefix
    active: list[_Row | None]
    recorder: Recorder | None = None
    done: dict[str, Answer] = field(default_factory=dict)

    def keep(self, rows: Tensor) -> None:
        """Drops every place but these."""
        self.cache.keep(rows)
        self.active = [self.active[s] for s in rows.tolist()]
        if self.recorder:
            self.recorder.keep(rows)


TOGETHER = 8  # prompts of a prefill pass at least, where so many rows are free


class Generator:
    """Decodes many requests with one target. `refill` free rows are awaited before a prefill is worth it."""

    def __init__(self, target: Target, max_tokens: int, batch_size: int, seed: int = 0,
                 end_ids: list[int] | None = None) -> None:
        self.target, self.max_tokens, self.seed = target, max_tokens, seed
        self.batch_size = batch_size
        self.refill = max(1, batch_size // 8)
        self.end_ids = set(target.end_ids if end_ids is None else end_ids)

    def run(self, requests: list[Request], progress: Callable[[int], None] = lambda tokens: None,
            keeper: Keeper | None = None) -> list[Answer]:
        """Answers in the order of the requests. `progress` gets the number of new tokens of each step, `keeper` the
        states of rows whose requests have turns, as they are finished."""
        if not requests:
            return []
        longest = max(len(r.prompt) for r in requests) + self.max_tokens + max(r.overrun for r in requests)
        slots = min(self.batch_size, len(requests))
        prefix = self.target.prefix([r.prompt for r in requests])
        batch = _Batch(prefix.fill(self.target.new_cache(slots, longest)), prefix, [None] * slots)
        if keeper is not None and any(r.turns for r in requests):
            batch.recorder = Recorder(self.target, slots, longest, prefix, keeper)
        # By length: prompts that are run together are alike, so that little of the pass is padding.
        queue = sorted(requests, key=lambda r: len(r.prompt))
        while queue or any(batch.active):
            free = [s for s, row in enumerate(batch.active) if row is None]
            if queue and (len(free) >= self.refill or len(free) == len(batch.active)):
                started = [queue.pop() for _ in free[: min(len(queue), max(TOGETHER, self.refill))]]
                self.prefill(batch, free[: len(started)], started)
                progress(len(started))
                continue
            if free and not queue:  # draining: drop the empty rows so that a step costs what is left
                keep = [s for s, row in enumerate(batch.active) if row is not None]
                if len(keep) <= len(batch.active) * 3 // 4 or len(keep) < 4:
                    batch.keep(torch.tensor(keep, device=self.target.device))
            progress(self.step(batch))
        return [batch.done[r.id] for r in requests]

    def prefill(self, batch: _Batch, slots: list[int], requests: list[Request]) -> None:
        """Runs the prompts of new rows together, behind the shared tokens, and takes each one's first token."""
        device, shared = self.target.device, batch.prefix.length
        lengths = [len(r.prompt) - shared for r in requests]
        ids = torch.zeros(len(requests), max(lengths), dtype=torch.long, device=device)
        for i, r in enumerate(requests):
            ids[i, : lengths[i]] = torch.tensor(r.prompt[shared:], device=device)
        positions = (shared + torch.arange(ids.shape[1], device=device)).expand_as(ids).contiguous()
        rows = torch.tensor(slots, device=device)
        states = self.target.forward(ids, positions, batch.cache, rows, logits=False)
        last = states.final[torch.arange(len(requests), device=device), torch.tensor(lengths, device=device) - 1]
        for slot, r in zip(slots, requests):
            uniforms = torch.empty(0)
            if not r.sampling.greedy:
                uniforms = torch.rand(self.max_tokens, generator=row_generator(self.seed, r.id))
            # The last token has a state too, known once a further one is decoded.
            batch.active[slot] = _Row(r, uniforms, max(r.overrun, int(batch.recorder is not None and bool(r.turns))))
        if batch.recorder:
            batch.recorder.write(rows, positions, states)
        with torch.inference_mode():
            self.take(self.target.head(last), slots, batch)

    def step(self, batch: _Batch) -> int:
        """One token for every active row; empty rows compute a dummy in their own row, behind the shared tokens."""
        device = self.target.device
        ids, places = [], []
        for row in batch.active:
            sequence = [] if row is None else row.tokens + row.overrun
            ids.append(sequence[-1] if sequence else 0)
            places.append(batch.prefix.length if row is None else len(row.request.prompt) + len(sequence) - 1)
        positions = torch.tensor(places, device=device)[:, None]
        states = self.target.forward(torch.tensor(ids, device=device)[:, None], positions, batch.cache)
        if batch.recorder:
            batch.recorder.write(None, positions, states)
        slots = [s for s, row in enumerate(batch.active) if row is not None]
        self.take(states.logits[slots, 0], slots, batch)
        return len(slots)

    def take(self, logits: Tensor, slots: list[int], batch: _Batch) -> None:
        """Chooses a token for each slot from its logits [B, V] and retires the rows that are complete."""
        active = batch.active
        tokens = logits.argmax(-1)
        by_settings: dict[Sampling, list[int]] = {}
        for i, slot in enumerate(slots):
            row = active[slot]
            if not row.request.sampling.greedy and not row.finish:
                by_settings.setdefault(row.request.sampling, []).append(i)
        for sampling, picks in by_settings.items():
            uniforms = torch.stack([active[slots[i]].uniforms[len(active[slots[i]].tokens)] for i in picks])
            tokens[picks] = sample(logits[picks], sampling, uniforms.to(logits.device))
        for slot, token in zip(slots, tokens.tolist()):
            row = active[slot]
            if row.push(token, self.end_ids, self.max_tokens):
                answer = batch.done[row.request.id] = row.answer()
                if batch.recorder and row.request.turns:
                    turns = row.request.turns + [1] * len(answer.tokens)
                    batch.recorder.finish(slot, answer.id, answer.prompt + answer.tokens, turns)
                active[slot] = None
