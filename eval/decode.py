"""Speculative decoding, and plain decoding beside it, over ragged batches. The loop knows no drafter's algorithm.

Legend: B rows, K draft length, q tokens a row, V vocabulary. A row's `length` is the number of tokens whose keys
the target's cache holds; its `last` token is decided but not yet run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.capture import behind
from data.sampling import Sampling, draw, probabilities
from drafters.base import Drafter, DraftSession
from drafters.target import Target
from eval.metrics import Acceptance
from eval.verify import verify

GREEDY = Sampling()


@dataclass
class Output:
    """One row's answer: tokens kept (an end token last where finish is 'stop'), its draft counts, target passes,
    the seconds at which tokens appeared (time, how many), and the context length of each draft."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    acceptance: Acceptance = None
    passes: int = 0
    times: list[tuple[float, int]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)  # (context length, accepted)
    rejected: list[int] = field(default_factory=list)  # target tokens at which a draft was rejected
    refused: list[int] = field(default_factory=list)  # and the drafted tokens there

    def take(self, tokens: list[int], end_ids: set[int], max_tokens: int, now: float) -> bool:
        """Keeps tokens up to the first end token or the limit, whichever comes first; True where that ends the row."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token in end_ids:
                self.finish = "stop"
            elif len(self.tokens) == max_tokens:
                self.finish = "length"
            if self.finish:
                break
        self.times.append((now, len(self.tokens) - before))
        return bool(self.finish)


@dataclass
class Rows:
    """The rows still running."""

    cache: object
    index: list[int]  # which prompt each row answers
    length: Tensor  # [B]
    last: Tensor  # [B]


class Decoder:
    """Decodes prompts with a target, with or without a drafter."""

    def __init__(self, target: Target, max_tokens: int, sampling: Sampling = GREEDY,
                 end_ids: list[int] | None = None, seed: int = 0) -> None:
        self.target, self.max_tokens, self.sampling, self.seed = target, max_tokens, sampling, seed
        self.end_ids = set(target.end_ids if end_ids is None else end_ids)

    def plain(self, prompts: list[list[int]]) -> list[Output]:
        """One token a pass."""
        return self.run(prompts, None, 0)

    def speculative(self, prompts: list[list[int]], drafter: Drafter, K: int, sampled_drafts: bool = False,
                    ) -> list[Output]:
        """Drafts K tokens a pass. `sampled_drafts`: draw proposals from the drafter instead of taking its argmax."""
        return self.run(prompts, drafter, K, sampled_drafts)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], drafter: Drafter | None, K: int, sampled_drafts: bool = False,
            ) -> list[Output]:
        self.generator = torch.Generator().manual_seed(self.seed)
        outputs = [Output(acceptance=Acceptance(max(K, 1))) for _ in prompts]
        capacity = max(map(len, prompts)) + self.max_tokens + K + 1
        session = drafter.session(len(prompts), capacity) if drafter else None
        rows = self.prefill(prompts, outputs, session, capacity)
        propose_with = self.sample_draft if sampled_drafts and not self.sampling.greedy else None
        while rows.index:
            if session:
                self.speculative_step(rows, outputs, session, K, propose_with)
            else:
                self.plain_step(rows, outputs)
            self.retire(rows, outputs, session)
        return outputs

    def prefill(self, prompts: list[list[int]], outputs: list[Output], session: DraftSession | None,
                capacity: int) -> Rows:
        """Runs the prompts together, what all begin with once, and decides each row's first token."""
        device = self.target.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=device)
        for b, prompt in enumerate(prompts):
            ids[b, : len(prompt)] = torch.tensor(prompt, device=device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids).contiguous()
        prefix = self.target.prefix(prompts)
        cache = prefix.fill(self.target.new_cache(len(prompts), capacity))
        own = slice(prefix.length, None)
        states = behind(prefix, self.target.forward(ids[:, own], positions[:, own], cache, logits=False))
        at = torch.arange(len(prompts), device=device)
        first = self.choose(self.target.head(states.final[at, lengths - 1]))
        rows = Rows(cache, list(range(len(prompts))), lengths, first)
        if session:
            following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
            following[at, lengths - 1] = first
            session.observe(states.taps, following, positions, lengths - 1)
        now = time.perf_counter()
        for index, token in zip(rows.index, first.tolist()):
            outputs[index].take([token], self.end_ids, self.max_tokens, now)
        self.retire(rows, outputs, session)
        return rows

    def speculative_step(self, rows: Rows, outputs: list[Output], session: DraftSession, K: int,
                         propose_with: Callable[[Tensor], Tensor] | None) -> None:
        """Draft K, verify K+1 in one target pass, keep the accepted prefix and the target's next token."""
        draft = session.propose(K, propose_with)  # tokens [B, K]
        block = torch.cat([rows.last[:, None], draft.tokens], dim=1)  # [B, K+1]
        positions = rows.length[:, None] + torch.arange(K + 1, device=block.device)
        states = self.target.forward(block, positions, rows.cache)
        verdict = verify(states.logits, draft, self.sampling, self.generator)
        session.observe(states.taps, verdict.tokens, positions, verdict.accepted)
        now = time.perf_counter()
        accepted, drafted = verdict.accepted.tolist(), draft.tokens.tolist()
        for b, (index, tokens) in enumerate(zip(rows.index, verdict.tokens.tolist())):
            out, n = outputs[index], accepted[b]
            out.acceptance.add(n)
            out.drafts.append((int(rows.length[b]) + 1, n))
            if n < K:
                out.rejected.append(tokens[n])
                out.refused.append(drafted[b][n])
            out.passes += 1
            out.take(tokens[: n + 1], self.end_ids, self.max_tokens, now)
        rows.last = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        rows.length = rows.length + verdict.accepted + 1

    def plain_step(self, rows: Rows, outputs: list[Output]) -> None:
        """One token for every row."""
        states = self.target.forward(rows.last[:, None], rows.length[:, None], rows.cache)
        rows.last, rows.length = self.choose(states.logits[:, 0]), rows.length + 1
        now = time.perf_counter()
        for index, token in zip(rows.index, rows.last.tolist()):
            outputs[index].passes += 1
            outputs[index].take([token], self.end_ids, self.max_tokens, now)

    def retire(self, rows: Rows, outputs: list[Output], session: DraftSession | None) -> None:
        """Drops finished rows from every state."""
        running = [b for b, index in enumerate(rows.index) if not outputs[index].finish]
        if len(running) == len(rows.index):
            return
        rows.index = [rows.index[b] for b in running]
        keep = torch.tensor(running, dtype=torch.long, device=rows.last.device)
        rows.length, rows.last = rows.length[keep], rows.last[keep]
        rows.cache.keep(keep)
        if session:
            session.keep(keep)

    def choose(self, logits: Tensor) -> Tensor:
        """The target's own next token from logits [B, V]."""
        if self.sampling.greedy:
            return logits.argmax(-1)
        return draw(probabilities(logits, self.sampling), self.uniforms(len(logits)).to(logits.device))

    def sample_draft(self, q: Tensor) -> Tensor:
        """A proposal drawn from the drafter's distribution [B, V]."""
        return draw(q, self.uniforms(len(q)).to(q.device))

    def uniforms(self, n: int) -> Tensor:
        return torch.rand(n, generator=self.generator, dtype=torch.float64)
