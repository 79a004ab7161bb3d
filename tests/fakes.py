"""Targets and drafters that follow a rule written by hand, for tests of the loop around them.

V vocabulary, B rows, q tokens a row, W columns of the cache.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from scipy.stats import chisquare
from tiny import chat_tokenizer, load_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.eagle3 import Eagle3, Options, Shape
from drafters.growth import growth
from drafters.target import Prefix, States, Target
from drafters.tree import Draft, Plan, planned
from drafters.visible import Branches


class TokenCache:
    """Remembers which token was written where; -1 is never written."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.tokens = torch.full((rows, capacity), -1)

    def keep(self, rows: Tensor) -> None:
        self.tokens = self.tokens[rows]

    def join(self, other: "TokenCache") -> None:
        self.tokens = torch.cat([self.tokens, other.tokens])

    def move(self, sources: Tensor, places: Tensor) -> None:
        self.tokens.scatter_(1, places, self.tokens.gather(1, sources))


class RuleTarget:
    """rule(seen [B, W], positions [B, q]) -> logits [B, q, V]; `seen` is what the cache holds, not what was meant.

    A token of a draft tree is a row of its own there (q is 1), which holds at their positions the tokens that it sees.
    """

    device, dtype, layers = torch.device("cpu"), torch.float64, [0]

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor], end_ids: list[int] | None = None) -> None:
        self.rule, self.end_ids = rule, end_ids or []

    def new_cache(self, rows: int, capacity: int) -> TokenCache:
        return TokenCache(rows, capacity)

    def head(self, final: Tensor) -> Tensor:
        return final

    def prefix(self, rows: list[list[int]]) -> Prefix:
        return Prefix()

    def forward(self, ids: Tensor, positions: Tensor, cache: TokenCache, rows: Tensor | None = None,
                logits: bool = True, branches: Branches | None = None) -> States:
        columns = positions if branches is None else branches.columns
        cache.tokens[torch.arange(len(ids))[:, None], columns] = ids
        if branches is None:
            out = self.rule(cache.tokens, positions)
        else:
            out = torch.cat([self.behind(cache, positions, branches, i) for i in range(ids.shape[1])], dim=1)
        return States(out, torch.zeros(*ids.shape, 1), out)

    def behind(self, cache: TokenCache, positions: Tensor, branches: Branches, i: int) -> Tensor:
        """Logits [B, 1, V] behind the i-th token of each row."""
        seen = cache.tokens.clone()
        for b, (columns, path) in enumerate(zip(branches.columns, branches.sees[:, i])):
            seen[b, columns[0] :] = -1
            seen[b, positions[b, path]] = cache.tokens[b, columns[path]]
        return self.rule(seen, positions[:, i : i + 1])


class RuleDrafter:
    """rule(row, position of the last token, step) -> distribution over V, the same behind every token of a level. A
    row's number is its prompt's among `prompts` (None: its place in the first batch)."""

    def __init__(self, rule: Callable[[int, int, int], Tensor], prompts: list[list[int]] | None = None) -> None:
        self.rule, self.prompts = rule, prompts
        self.starts: list[list[int]] = []  # for each proposal, the last observed position of each row

    def session(self, rows: int, capacity: int) -> "RuleDrafter":
        other = copy.copy(self)
        other.rows = list(range(rows))
        return other

    def begin(self, prompts: list[list[int]]) -> None:
        if self.prompts is not None:
            self.rows = [self.prompts.index(prompt) for prompt in prompts]

    def observe(self, taps: Tensor, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        self.last = positions.gather(1, last[:, None])[:, 0]

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        plan = planned(plan)
        self.starts.append(self.last.tolist())
        q = torch.stack([torch.stack([self.rule(r, t + 1, k) for k in range(plan.depth)])
                         for r, t in zip(self.rows, self.last.tolist())])  # [B, D, V]
        V = q.shape[-1]
        grown = growth(plan, len(q), torch.arange(V), V, sample)
        p, step = 1, 0
        while not grown.take(q[:, step : step + 1].log().expand(-1, p, -1)):
            p, step = grown.frontier.shape[1], step + 1
        return grown.draft()

    def keep(self, rows: Tensor) -> None:
        self.rows, self.last = [self.rows[r] for r in rows.tolist()], self.last[rows]

    def join(self, other: "RuleDrafter") -> None:
        self.rows, self.last = self.rows + other.rows, torch.cat([self.last, other.last])


def oracle(prompts: list[list[int]], answers: list[list[int]], vocab: int,
           wrong: Callable[[int, int], bool] = lambda row, place: False) -> RuleDrafter:
    """Drafts each row's true answer, another token where wrong(row, index in the answer) and beyond its end."""
    def rule(row: int, last: int, step: int) -> Tensor:
        place = last + 1 + step - len(prompts[row])
        known = answers[row]
        token = known[place] if place < len(known) else 0
        return torch.eye(vocab)[(token + 1) % vocab if place >= len(known) or wrong(row, place) else token]

    return RuleDrafter(rule, prompts)


def counting_llama(vocab: int, layers: int = 8) -> LlamaForCausalLM:
    """A real target with next = current + 1 mod V: one-hot states that no block changes."""
    config = LlamaConfig(vocab_size=vocab, hidden_size=vocab, intermediate_size=vocab, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, eos_token_id=2,
                         bos_token_id=None, pad_token_id=None)
    model = LlamaForCausalLM(config).eval()
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.copy_(torch.eye(vocab))
    model.lm_head.weight.data.copy_(torch.eye(vocab).roll(1, 0))  # row j + 1 reads component j
    return model


def counting_target(folder: Path, vocab: int) -> Target:
    """The counting model of counting_llama in float32, written to `folder` and tapped at [2, 4, 5]."""
    counting_llama(vocab).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return load_target(folder, "float32", [2, 4, 5])


def follows(seen: list[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """p-value of drawn sequences against their exact probabilities; what is expected less than five times is one."""
    assert set(seen) <= set(exact)
    large = [path for path, p in exact.items() if p * len(seen) >= 5]
    observed = [seen.count(path) for path in large] + [sum(path not in large for path in seen)]
    expected = [exact[path] * len(seen) for path in large]
    expected.append(len(seen) - sum(expected))
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    return chisquare(observed, expected).pvalue


@torch.no_grad()
def counting_drafter(target, draft_ids: list[int], ahead: int = 2) -> Eagle3:
    """An EAGLE-3 drafter of a counting target that names x[t] + `ahead` at position t; 2 is right.

    Its MLP moves the one-hot state x to x + 1 and its head reads x + 1 as the token x + ahead.
    """
    n, ids = target.vocab_size, torch.tensor(draft_ids)
    options = Options(draft_vocab_size=len(ids), depth=3, deepen_at=0.0)
    drafter = Eagle3(options, Shape.from_target(target.config, options.draft_vocab_size), target.layers, ids,
                     target.embedding.clone(), target.head.weight.clone()).to(target.dtype)
    eye = torch.eye(n, dtype=target.dtype)
    scale = n**0.5  # of a one-hot state after a norm
    for weight in drafter.parameters():
        weight.copy_(torch.ones_like(weight) if weight.dim() == 1 else torch.zeros_like(weight))
    drafter.fc.weight[:, -n:] = eye
    drafter.midlayer.mlp.gate_proj.weight.copy_(eye)
    drafter.midlayer.mlp.up_proj.weight.copy_(eye)
    drafter.midlayer.mlp.down_proj.weight.copy_((eye.roll(1, 0) - eye)
                                                / (torch.nn.functional.silu(torch.tensor(scale)) * scale))
    drafter.lm_head.weight.copy_(eye.roll(ahead - 1, 0)[ids])
    return drafter.eval()


