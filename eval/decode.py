"""Speculative decoding, and plain decoding beside it, over ragged batches. The loop knows no drafter's algorithm.

Legend: B rows, N tokens drafted a row, D depth of a draft (a chain of K: N = D = K), q tokens a row, V vocabulary. A
row's `length` is the number of tokens whose keys the target's cache holds; its `last` token is decided but not yet run.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from data.capture import behind
from data.sampling import Sampling, draw, penalised, probabilities, row_generator, row_names, row_uniforms
from drafters.base import Drafter, DraftSession, take
from drafters.target import Prefix, States, Target
from drafters.tree import Draft, Plan, Topology, planned
from drafters.visible import Branches
from eval.metrics import Acceptance
from eval.stops import Stops
from eval.verify import Typical, Verdict, verify

GREEDY = Sampling()


@dataclass
class Output:
    """One row's answer: tokens kept (an end token or what completes a stop string last where finish is 'stop'), its
    draft counts, target passes, the seconds at which tokens appeared (time, how many), and the context length of each
    draft."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    acceptance: Acceptance = None
    passes: int = 0
    times: list[tuple[float, int]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)  # (context length, accepted)
    rejected: list[int] = field(default_factory=list)  # target tokens at which a draft was rejected
    refused: list[tuple[int, int]] = field(default_factory=list)  # their places in the text, first drafted tokens there
    stopped_by: str = ""  # the stop string that ended it
    drafted_by: list[tuple[str, int, int]] = field(default_factory=list)  # of each pass: who, drafted, accepted tokens

    def take(self, tokens: list[int], end_ids: set[int], max_tokens: int, now: float, stops: Stops | None = None,
             ) -> bool:
        """Keeps tokens up to the first stop or the limit, whichever comes first; True where that ends the row."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token not in end_ids and stops is not None:
                self.stopped_by = stops.found(self.tokens)
            if token in end_ids or self.stopped_by:
                self.finish = "stop"
            elif len(self.tokens) == max_tokens:
                self.finish = "length"
            if self.finish:
                break
        self.times.append((now, len(self.tokens) - before))
        return bool(self.finish)

    def count(self, accepted: int, drafted: int, context: int, refused: int | None, own: int, by: str = "") -> None:
        """Counts a pass, and its draft where there was one. refused: the first drafted token where it was rejected,
        None where nothing was; own: the target's token there; by: who drafted, where the drafter says so."""
        self.passes += 1
        if by:
            self.drafted_by.append((by, drafted, accepted))
        if drafted:
            self.acceptance.add(accepted, drafted, refused is not None)
            self.drafts.append((context, accepted))
        if refused is not None:
            self.rejected.append(own)
            self.refused.append((context + accepted, refused))


@dataclass
class Rows:
    """The rows still running."""

    cache: Any
    session: DraftSession | None
    index: list[int]  # which prompt each row answers
    length: Tensor  # [B]
    last: Tensor  # [B]
    seen: Tensor | None  # [B, V] tokens up to the last one, where a repetition penalty asks for them
    draws: list[torch.Generator]  # of each row, where tokens are sampled; else empty

    def keep(self, running: list[int]) -> None:
        """Drops every row but these from every state."""
        rows = torch.tensor(running, dtype=torch.long, device=self.last.device)
        self.index = [self.index[b] for b in running]
        self.length, self.last = self.length[rows], self.last[rows]
        self.seen = None if self.seen is None else self.seen[rows]
        self.draws = [self.draws[b] for b in running] if self.draws else []
        for state in (self.cache, self.session):
            if state is not None:
                state.keep(rows)

    def join(self, other: "Rows") -> None:
        """Takes over the rows of another batch of the same capacity."""
        self.index += other.index
        self.length, self.last = torch.cat([self.length, other.length]), torch.cat([self.last, other.last])
        self.seen = None if self.seen is None else torch.cat([self.seen, other.seen])
        self.draws = self.draws + other.draws
        self.cache.join(other.cache)
        if self.session is not None:
            self.session.join(other.session)

    def branches(self, draft: Draft, shape: Topology, positions: Tensor) -> Branches | None:
        """Where a block at these positions lies and what it sees; None for a chain, which lies at its positions."""
        if draft.parents is None:
            return None
        B, q = positions.shape
        columns = self.length[:, None] + torch.arange(q, device=self.last.device)
        return Branches(columns, columns, positions, shape.sees.expand(B, q, q))

    def advance(self, states: States, verdict: Verdict) -> None:
        """Keeps the accepted path in the cache, shows it to the drafter, and goes on behind it."""
        places = self.length[:, None] + torch.arange(verdict.tokens.shape[1], device=self.last.device)
        taps = states.taps
        if verdict.path is not None:
            self.cache.move(self.length[:, None] + verdict.path, places)
            taps = None if taps is None else take(taps, verdict.path)
        self.session.observe(taps, verdict.tokens, places, verdict.accepted)
        self.last = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        if self.seen is not None:
            behind_path = places - self.length[:, None] > verdict.accepted[:, None]
            self.seen.scatter_(1, torch.where(behind_path, self.last[:, None], verdict.tokens), True)
        self.length = self.length + verdict.accepted + 1


class Decoder:
    """Decodes prompts with a target, with or without a drafter.

    Where tokens are sampled, every row draws from a generator of its own, which depends on the seed and the row's name
    alone: its text is the same in any batch, up to rounding. Only proposals drawn from a drafter share one generator.

    slots: rows decoded together; a finished one is replaced by the next prompt (0: all at once). stop: strings that end
    an answer. typical: accept by this rule, which is lossy, where tokens are sampled. on_tokens(prompt index, tokens):
    called with the tokens of each answer as they are decided.
    """

    def __init__(self, target: Target, max_tokens: int, sampling: Sampling = GREEDY, end_ids: list[int] | None = None,
                 seed: int = 0, slots: int = 0, stop: Sequence[str] = (),
                 on_tokens: Callable[[int, list[int]], None] | None = None, typical: Typical | None = None) -> None:
        self.target, self.max_tokens, self.sampling, self.seed = target, max_tokens, sampling, seed
        self.typical = typical
        self.end_ids = set(target.end_ids if end_ids is None else end_ids)
        self.slots, self.on_tokens = slots, on_tokens
        self.stops = Stops(target.tokenizer, stop) if stop else None

    def plain(self, prompts: list[list[int]], names: Sequence[str] = ()) -> list[Output]:
        """One token a pass. names: of the rows, none of them twice; empty makes them of the prompts' ids."""
        return self.run(prompts, None, 0, names=names)

    def speculative(self, prompts: list[list[int]], drafter: Drafter, plan: Plan | int, sampled_drafts: bool = False,
                    names: Sequence[str] = ()) -> list[Output]:
        """Drafts a tree of this plan a pass; a number is a chain of so many tokens. `sampled_drafts`: draw proposals
        from the drafter instead of taking its most probable ones. names: as in `plain`."""
        return self.run(prompts, drafter, plan, sampled_drafts, names)

    def begin(self, prompts: list[list[int]], names: Sequence[str] = ()) -> None:
        """Seeds every random number of the answers to these prompts."""
        self.generator = torch.Generator().manual_seed(self.seed)  # of proposals drawn from a drafter
        sampled = not self.sampling.greedy
        self.draws = [row_generator(self.seed, name) for name in names or row_names(prompts)] if sampled else []

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], drafter: Drafter | None, plan: Plan | int, sampled_drafts: bool = False,
            names: Sequence[str] = ()) -> list[Output]:
        self.begin(prompts, names)
        plan = planned(plan) if drafter else None
        outputs = [Output(acceptance=Acceptance(plan.depth if drafter else 1)) for _ in prompts]
        capacity = max(map(len, prompts)) + self.max_tokens + (plan.room if drafter else 0) + 1
        prefix, waiting = self.target.prefix(prompts), deque(range(len(prompts)))
        slots = self.slots or len(prompts)
        propose_with = self.sample_draft if sampled_drafts and not self.sampling.greedy else None
        rows = None
        while waiting or rows.index:
            free = slots - (len(rows.index) if rows else 0)
            if waiting and (free >= max(1, slots // 8) or not rows.index):  # joining rows copies the cache
                index = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                started = self.prefill(prompts, index, outputs, prefix, drafter, capacity)
                if rows and rows.index and started.index:
                    rows.join(started)
                else:
                    rows = started if started.index or not rows else rows
            elif drafter:
                self.speculative_step(rows, outputs, plan, propose_with)
            else:
                self.plain_step(rows, outputs)
            self.retire(rows, outputs)
        return outputs

    def prefill(self, prompts: list[list[int]], index: list[int], outputs: list[Output], prefix: Prefix,
                drafter: Drafter | None, capacity: int) -> Rows:
        """Runs the prompts of these numbers together, what all begin with once, and decides each row's first token."""
        device, chosen = self.target.device, [prompts[i] for i in index]
        lengths = torch.tensor([len(p) for p in chosen], device=device)
        ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long, device=device)
        for b, prompt in enumerate(chosen):
            ids[b, : len(prompt)] = torch.tensor(prompt, device=device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids).contiguous()
        cache = prefix.fill(self.target.new_cache(len(chosen), capacity))
        own = slice(prefix.length, None)
        states = behind(prefix, self.target.forward(ids[:, own], positions[:, own], cache, logits=False))
        at = torch.arange(len(chosen), device=device)
        logits = self.target.head(states.final[at, lengths - 1])
        seen = self.seen_in(ids, lengths, logits.shape[-1])
        draws = [self.draws[i] for i in index] if self.draws else []
        first = self.choose(logits, seen, draws)
        session = drafter.session(len(chosen), capacity) if drafter else None
        if session is not None:
            following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
            following[at, lengths - 1] = first
            session.begin(chosen)
            session.observe(states.taps, following, positions, lengths - 1)
        rows = Rows(cache, session, list(index), lengths, first, seen, draws)
        tokens = first.tolist()  # waits for the device: only now are the tokens there
        now = time.perf_counter()
        for number, token in zip(rows.index, tokens):
            self.give(number, outputs[number], [token], now)
        self.retire(rows, outputs)
        return rows

    def speculative_step(self, rows: Rows, outputs: list[Output], plan: Plan,
                         propose_with: Callable[[Tensor], Tensor] | None) -> None:
        """Draft, verify in one target pass, keep the accepted path and the target's next token."""
        draft = rows.session.propose(plan, propose_with)  # tokens [B, N]
        shape = Topology.of(draft)
        block = torch.cat([rows.last[:, None], draft.tokens], dim=1)  # [B, N+1]
        positions = rows.length[:, None] + shape.depth
        states = self.target.forward(block, positions, rows.cache, branches=rows.branches(draft, shape, positions))
        numbers = row_uniforms(rows.draws, plan.nodes + 1) if rows.draws else None
        verdict = verify(states.logits, draft, self.sampling, numbers, rows.seen, shape, self.typical)
        contexts = (rows.length + 1).tolist()
        rows.advance(states, verdict)
        counts = zip(verdict.accepted.tolist(), draft.counts(), contexts, verdict.refusals(), draft.by or repeat(""))
        kept = verdict.tokens.tolist()
        now = time.perf_counter()
        for number, tokens, (n, drafted, context, refused, by) in zip(rows.index, kept, counts):
            outputs[number].count(n, drafted, context, refused, tokens[n], by)
            self.give(number, outputs[number], tokens[: n + 1], now)

    def plain_step(self, rows: Rows, outputs: list[Output]) -> None:
        """One token for every row."""
        states = self.target.forward(rows.last[:, None], rows.length[:, None], rows.cache)
        rows.last, rows.length = self.choose(states.logits[:, 0], rows.seen, rows.draws), rows.length + 1
        tokens = rows.last.tolist()
        now = time.perf_counter()
        for number, token in zip(rows.index, tokens):
            outputs[number].passes += 1
            self.give(number, outputs[number], [token], now)

    def give(self, number: int, out: Output, tokens: list[int], now: float) -> None:
        """Adds decided tokens to an answer."""
        before = len(out.tokens)
        out.take(tokens, self.end_ids, self.max_tokens, now, self.stops)
        if self.on_tokens is not None:
            self.on_tokens(number, out.tokens[before:])

    def retire(self, rows: Rows, outputs: list[Output]) -> None:
        """Drops finished rows."""
        running = [b for b, number in enumerate(rows.index) if not outputs[number].finish]
        if len(running) < len(rows.index):
            rows.keep(running)

    def seen_in(self, ids: Tensor, lengths: Tensor, vocab_size: int) -> Tensor | None:
        """Which tokens occur in each prompt, [B, V], where a repetition penalty asks for them."""
        if not self.sampling.remembers:
            return None
        inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        seen = torch.zeros(len(ids), vocab_size, dtype=torch.bool, device=ids.device)
        return seen.scatter_(1, torch.where(inside, ids, ids[:, :1]), True)

    def choose(self, logits: Tensor, seen: Tensor | None, draws: list[torch.Generator]) -> Tensor:
        """The target's own next token from logits [B, V], which `seen` [B, V] then includes."""
        if seen is not None:
            logits = penalised(logits, self.sampling.repetition_penalty, seen)
        if self.sampling.greedy:
            chosen = logits.argmax(-1)
        else:
            chosen = draw(probabilities(logits, self.sampling), row_uniforms(draws, 1)[:, 0].to(logits.device))
        if seen is not None:
            seen.scatter_(1, chosen[:, None], True)
        return chosen

    def sample_draft(self, q: Tensor) -> Tensor:
        """A proposal drawn from the drafter's distribution [n, V]."""
        return draw(q, torch.rand(len(q), generator=self.generator, dtype=torch.float64).to(q.device))
