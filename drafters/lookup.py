"""Prompt lookup: what followed the last tokens where they occurred before is proposed again. Nothing is trained.

Saxena 2023, "Prompt lookup decoding". Legend: B rows, q tokens a row, K draft length, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drafters.export import untrained
from drafters.tree import Draft, Plan, planned
from recipes.errors import ConfigError
from recipes.schema import PositiveInt, opt


@dataclass
class Options:
    """`drafter.options` of a recipe with kind lookup."""

    longest: PositiveInt = opt(3, "longest run of last tokens that is looked up; the longest that occurred before wins")
    shortest: PositiveInt = opt(1, "shortest run of last tokens that is looked up")
    match: Literal["latest", "first"] = opt("latest", "which occurrence is continued: the most recent, or the first "
                                                      "(as transformers does, and vLLM's ngram)")

    def __post_init__(self) -> None:
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is more than longest = {self.longest}")


class Lookup(nn.Module):
    """The drafter: no weights, every token of the vocabulary."""

    kind = "lookup"
    vocabulary_modules = ()

    def __init__(self, options: Options, vocab_size: int) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("t2d", torch.ones(vocab_size, dtype=torch.bool), persistent=False)

    def session(self, rows: int, capacity: int) -> "LookupSession":
        return LookupSession(self.options)

    def meta(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self.options)}


class Text:
    """A row's tokens, and where each run of them was followed by what. A run counts once a token follows it, so the
    last tokens never find themselves."""

    def __init__(self, options: Options, first: int) -> None:
        self.options, self.tokens = options, [first]
        self.matched = 0  # tokens of the run that the last continuation was found by, 0 where there is none
        self.behind: dict[tuple[int, ...], int] = {}  # run of tokens -> place of what followed it

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            for n in range(self.options.shortest, min(self.options.longest, len(self.tokens)) + 1):
                run = tuple(self.tokens[-n:])
                if self.options.match == "latest" or run not in self.behind:
                    self.behind[run] = len(self.tokens)
            self.tokens.append(token)

    def continuation(self, K: int) -> list[int]:
        """At most K tokens: fewer where the text ends, none where no run of the last tokens occurred before."""
        for n in range(min(self.options.longest, len(self.tokens)), self.options.shortest - 1, -1):
            place = self.behind.get(tuple(self.tokens[-n:]))
            if place is not None:
                self.matched = n
                return self.tokens[place : place + K]
        self.matched = 0
        return []


class LookupSession:
    """Lookup in the decoding loop. It needs tokens only, and proposes chains."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def begin(self, prompts: list[list[int]]) -> None:
        self.texts = [Text(self.options, prompt[0]) for prompt in prompts]

    def observe(self, taps: Tensor | None, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        self.device = tokens.device
        for text, row, n in zip(self.texts, tokens.tolist(), last.tolist()):
            text.add(row[: n + 1])

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        """Deterministic whatever `sample` is: there is no distribution to draw from."""
        plan = planned(plan)
        if not plan.narrow or plan.stop:
            raise ValueError("lookup proposes one continuation: use a chain without a confidence")
        found = [text.continuation(plan.depth) for text in self.texts]
        self.matched = [text.matched for text in self.texts]
        width = max(map(len, found))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.long, device=self.device)
        lengths = torch.tensor([len(row) for row in found], device=self.device)
        return Draft(tokens, real=torch.arange(width, device=self.device) < lengths[:, None])

    def keep(self, rows: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]

    def join(self, other: "LookupSession") -> None:
        self.texts += other.texts


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> Lookup:
    """The drafter for a loaded target; counts and seed do not matter."""
    return Lookup(options, target.vocab_size)


def speculation(drafter: Lookup, drafted: int, folder: Path) -> dict[str, Any]:
    """vLLM's speculative_config that drafts the same, as `make export` writes it; it loads nothing.

    Its ngram proposer (`vllm/v1/spec_decode/ngram_proposer.py`, 0.32) looks up the longest run of the last
    prompt_lookup_min to prompt_lookup_max tokens that occurred before and continues its first occurrence, as far as the
    text goes. ConfigError for a drafter that continues the most recent one.
    """
    config, apart = untrained.lookup(drafter.options, drafted)
    if apart:
        raise ConfigError(f"drafter.options.match = {drafter.options.match}: {' '.join(apart)}")
    return config
