"""Suffix decoding: what followed the last tokens in the request so far or in earlier outputs, by how often it did.

Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications". Every run of tokens
that the text ends with is looked up in two suffix automata, one of the request (prompt and answer so far), one of the
corpus of earlier outputs. A run of n tokens may draft factor * n: the longer the match, the longer the draft. The
continuation with the largest sum of empirical chances is drafted, as a chain or as the tree of the likeliest nodes.
Nothing is trained. Legend: B rows, q tokens a row, N drafted tokens a row, K draft length, V vocabulary.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from drafters.automaton import Automaton, Guess
from drafters.outputs import Output, digest_of, earlier_outputs
from drafters.tree import Draft, DynamicTree, Plan, planned
from recipes.schema import Amount, NonNegativeInt, Share, opt

MOST = 128  # tokens of a run, and of a chain that a plan may ask for
Run = Annotated[int, Field(gt=0, le=MOST)]


@dataclass
class Options:
    """`drafter.options` of a recipe with kind suffix."""

    longest: Run = opt(24, "longest run of last tokens that is looked up")
    shortest: Run = opt(1, "shortest run that drafts")
    factor: Amount = opt(1.0, "alpha: a run of n tokens drafts at most factor * n, and never more than the plan")
    min_probability: Share = opt(0.1, "a draft ends before a token whose path has a smaller empirical chance")
    outputs: str = opt("", "earlier outputs the corpus begins with: a trace or run folder, or a JSONL with ids, answer "
                           "or text in each line")
    grow: bool = opt(True, "finished answers join the corpus; false keeps it as it began, so that no answer's drafts "
                           "depend on another request")
    repeats: bool = opt(False, "draft from earlier answers to the very same prompt too, as a server does; a "
                               "measurement that decodes a prompt twice would meet its own answer")
    corpus_tokens: NonNegativeInt = opt(262_144, "most tokens of the corpus: the oldest outputs are dropped; 0: the "
                                                 "request alone")

    def __post_init__(self) -> None:
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is more than longest = {self.longest}")

    @property
    def depth(self) -> int:
        """Tokens of a run and its draft together: how far occurrences are counted."""
        return self.longest + min(int(self.factor * self.longest + 1e-6), MOST)


class Corpus:
    """Earlier outputs, the oldest dropped beyond `limit` tokens."""

    def __init__(self, depth: int, limit: int) -> None:
        self.depth, self.limit, self.tokens = depth, limit, 0
        self.held: deque[Output] = deque()
        self.index = self.fresh(0)

    def fresh(self, tokens: int) -> Automaton:
        """An index with room for so many tokens, and for those that are read until it is made anew."""
        return Automaton(self.depth, max(tokens, 256), 2 * self.limit)

    def add(self, output: Output) -> None:
        output = Output(output.tokens[: self.limit], output.prompt)
        if len(output.tokens):
            self.read(output)
            while self.tokens > self.limit:
                self.lose(self.held.popleft())
            self.tidy()

    def read(self, output: Output) -> None:
        self.held.append(output)
        self.tokens += len(output.tokens)
        self.index.begin()
        self.index.extend(output.tokens)

    def lose(self, output: Output) -> None:
        self.tokens -= len(output.tokens)
        self.index.forget(output.tokens)

    def drop(self, prompt: bytes) -> None:
        """Takes out the answers to this prompt."""
        gone = [output for output in self.held if output.prompt == prompt]
        if gone:
            self.held = deque(output for output in self.held if output.prompt != prompt)
            for output in gone:
                self.lose(output)

    def tidy(self) -> None:
        """Reads what is held anew once as much was dropped as may be held: an automaton gives no memory back."""
        if self.index.read > self.tokens + self.limit:
            held, self.held, self.tokens, self.index = self.held, deque(), 0, self.fresh(self.tokens)
            for output in held:
                self.read(output)

    def digest(self) -> str:
        """Digest of all that is held."""
        whole = hashlib.sha256()
        for output in self.held:
            whole.update(len(output.tokens).to_bytes(8, "little") + output.prompt + output.tokens.tobytes())
        return whole.hexdigest()


class Suffix(nn.Module):
    """The drafter: no weights, every token of the vocabulary. The corpus is shared by all that it drafts."""

    kind = "suffix"
    vocabulary_modules = ()

    def __init__(self, options: Options, vocab_size: int, end_ids: list[int], outputs: Sequence[Output] = (),
                 ) -> None:
        """end_ids: an answer joins the corpus up to the first of them, whatever was accepted behind it."""
        super().__init__()
        self.options, self.end_ids = options, frozenset(end_ids)
        self.corpus = Corpus(options.depth, options.corpus_tokens)
        for output in outputs:
            self.corpus.add(output)
        self.begun = {"outputs": len(self.corpus.held), "tokens": self.corpus.tokens, "sha256": self.corpus.digest()}
        self.register_buffer("t2d", torch.ones(vocab_size, dtype=torch.bool), persistent=False)

    def session(self, rows: int, capacity: int) -> "SuffixSession":
        return SuffixSession(self)

    def meta(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self.options), "corpus": self.begun}

    def remarks(self) -> list[str]:
        """What a report has to say of its figures."""
        o, begun = self.options, f"{self.begun['outputs']} earlier outputs ({self.begun['tokens']} tokens)"
        if not o.corpus_tokens:
            return ["suffix: drafts from each request alone"]
        if not o.grow:
            return [f"suffix: the corpus is fixed: {begun}"]
        return [f"suffix: the corpus began with {begun} and grew by each finished answer, so acceptance depends on how "
                "many prompts were answered before and in which order; drafter.options.grow false keeps it fixed"]


class Row:
    """A request: its tokens so far and their automaton."""

    def __init__(self, prompt: list[int], depth: int) -> None:
        self.prompt, self.length, self.tokens = digest_of(prompt), len(prompt), prompt[:1]
        self.index = Automaton(depth, 2 * len(prompt) + 128)
        self.index.extend(np.array(self.tokens, np.int32))

    def add(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.index.extend(np.array(tokens, np.int32))

    def answer(self, end_ids: frozenset[int]) -> Output:
        """What was answered, up to the first end token."""
        tokens = self.tokens[self.length :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in end_ids), len(tokens))
        return Output(np.array(tokens[:end], np.int32), self.prompt)


class SuffixSession:
    """Suffix decoding in the decoding loop. It needs tokens only; a finished request leaves by `keep`."""

    def __init__(self, drafter: Suffix) -> None:
        self.drafter = drafter
        self.matched: list[int] = []  # of the last proposal: the run that each row's draft was found by, 0 without one

    def begin(self, prompts: list[list[int]]) -> None:
        o = self.drafter.options
        self.rows = [Row(prompt, o.depth) for prompt in prompts]
        if o.grow and not o.repeats:
            for row in self.rows:
                self.drafter.corpus.drop(row.prompt)

    def observe(self, taps: Tensor | None, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        self.device = tokens.device
        for row, found, n in zip(self.rows, tokens.tolist(), last.tolist()):
            row.add(found[: n + 1])

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        """Deterministic whatever `sample` is: there is no distribution to draw from."""
        plan = planned(plan)
        if not isinstance(plan, DynamicTree) and (not plan.narrow or plan.stop):
            raise ValueError("suffix decoding proposes chains without a confidence, and dynamic trees")
        found, by = zip(*(self.guess(row, plan) for row in self.rows))
        self.matched = [guess.matched for guess in found]
        return replace(drafted(found, plan.narrow, self.device), by=list(by))

    def guess(self, row: Row, plan: Plan) -> tuple[Guess, str]:
        """The request's own continuation, unless the corpus has one of a larger sum of chances; and which of them."""
        o, width = self.drafter.options, 1 if plan.narrow else plan.top_k
        context = np.array(row.tokens[-o.longest :], np.int32)
        asked = context, o.shortest, o.factor, plan.nodes, width, plan.depth, o.min_probability
        own, others = row.index.guess(*asked), self.drafter.corpus.index.guess(*asked)
        if others.score > own.score:
            return others, "suffix_corpus"
        return own, "suffix_request" if own.tokens else "suffix_none"

    def keep(self, rows: Tensor) -> None:
        """Those that leave are finished. Of several that answer the same prompt the last one joins the corpus: an
        answer is never there while its prompt is being answered."""
        kept = rows.tolist()
        left = [row for i, row in enumerate(self.rows) if i not in set(kept)]
        self.rows = [self.rows[i] for i in kept]
        o = self.drafter.options
        if o.grow and o.corpus_tokens:
            if not o.repeats:
                running = {row.prompt for row in self.rows}
                left = {row.prompt: row for row in left if row.prompt not in running}.values()
            for row in left:
                self.drafter.corpus.add(row.answer(self.drafter.end_ids))

    def join(self, other: "SuffixSession") -> None:
        self.rows += other.rows


def drafted(found: Sequence[Guess], narrow: bool, device: torch.device) -> Draft:
    """Guesses of B rows as a draft, filled up with tokens that are none."""
    width = max(len(guess.tokens) for guess in found)
    filled = [[0] * (width - len(guess.tokens)) for guess in found]
    tokens = torch.tensor([g.tokens + rest for g, rest in zip(found, filled)], dtype=torch.long, device=device)
    lengths = torch.tensor([len(guess.tokens) for guess in found], device=device)
    real = torch.arange(width, device=device) < lengths[:, None]
    if narrow or not width:
        return Draft(tokens, real=real)
    parents = [[parent + 1 for parent in g.parents] + rest for g, rest in zip(found, filled)]
    return Draft(tokens, parents=torch.tensor(parents, dtype=torch.long, device=device), real=real)


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> Suffix:
    """The drafter for a loaded target; counts and seed do not matter. ConfigError as earlier_outputs raises it."""
    found = earlier_outputs(options.outputs, target, "drafter.options.outputs") if options.outputs else []
    drafter = Suffix(options, target.vocab_size, target.end_ids, found)
    warm = Automaton(options.depth)  # compiles all of it before anything is timed
    warm.extend(np.array([0, 1, 0, 1], np.int32))
    warm.guess(np.array([1], np.int32), 1, options.factor, 1, 1, 1, 0.0)
    warm.forget(np.array([0, 1, 0, 1], np.int32))
    return drafter
