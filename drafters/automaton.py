"""A suffix automaton with counts: which runs of tokens occurred, how often, and what followed them.

Counts are exact for runs of at most `depth` tokens: a longer run may end in a state whose count nobody needs.
What a draft is: Oliaro et al. 2024, "SuffixDecoding", section 3. The work is done by compiled functions
(drafters/automaton_code.py), loaded with the first automaton: who drafts otherwise needs no compiler.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import numpy as np

from recipes.errors import ConfigError


def code() -> ModuleType:
    """The compiled functions. ConfigError where numba, an optional dependency, is not installed."""
    try:
        return import_module("drafters.automaton_code")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        raise ConfigError("drafter.kind = suffix: the package numba is not installed; run `.venv/bin/pip install -c "
                          'constraints.txt numba` here, or `pip install "drafthouse[suffix]"`') from None


@dataclass(frozen=True)
class Guess:
    """A continuation: tokens, the index of each one's parent (-1: what the text ends with), their chances by what
    followed before, and the run of last tokens that it was found by. A parent comes before its children, siblings
    begin with the likeliest. score: the sum of chances."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]
    score: float
    matched: int


class Automaton:
    """Texts that were read, one after the other. Tokens are 0 or more and below 2^31.

    depth: tokens of the longest run whose occurrences are counted. tokens: how many it has room for before it grows, to
    twice as many, but beyond `most` only as far as it must.
    """

    def __init__(self, depth: int, tokens: int = 256, most: int = 2**30) -> None:
        self.code = code()
        self.depth, self.most, self.read = depth, most, 0  # tokens read, forgotten ones included
        self.at = np.zeros(6, np.int64)
        self.states = np.zeros((0, 5), np.int32)
        self.edges = np.zeros((0, 3), np.int32)
        self.make_room(tokens)
        self.states[0], self.at[self.code.STATES] = (0, self.code.NONE, 0, 0, self.code.NONE), 1

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return self.states, self.edges, self.keys, self.slots

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def make_room(self, tokens: int) -> None:
        """For so many tokens in all: at most two states and three edges each."""
        self.room = tokens
        for name, rows in (("states", 2 * tokens + 2), ("edges", 3 * tokens + 4)):
            old = getattr(self, name)
            new = np.empty((rows, old.shape[1]), np.int32)
            new[: len(old)] = old
            setattr(self, name, new)
        places = 1 << (4 * tokens + 8).bit_length()
        self.keys, self.slots = np.full(places, self.code.FREE), np.empty(places, np.int32)
        self.code.fill(*self.parts, self.at[self.code.STATES])

    def begin(self) -> None:
        """What is read from now on is another text."""
        self.at[[self.code.LAST, self.code.DEEP, self.code.RUN]] = 0

    def extend(self, tokens: np.ndarray) -> None:
        """Reads int32 tokens [T] on in the present text."""
        self.read += len(tokens)
        if self.read > self.room:
            self.make_room(max(self.read, min(2 * self.room, self.most)))
        self.code.extend(*self.parts, self.at, self.depth, tokens)

    def forget(self, tokens: np.ndarray) -> None:
        """Takes a whole text out of the counts. Its states stay, so memory is not given back."""
        self.code.forget(*self.parts, self.depth, tokens)

    def guess(self, context: np.ndarray, shortest: int, factor: float, nodes: int, width: int, levels: int,
              floor: float) -> Guess:
        """What may follow int32 `context`, the last tokens of a text: at most factor * run tokens of `nodes`, `width`
        behind each and `levels` deep, each with a chance of `floor` or more. width 1 is a chain."""
        found, chances = np.empty((4, nodes), np.int64), np.empty((2, nodes))
        waiting, worth = np.empty(((nodes + 1) * width, 3), np.int64), np.empty((nodes + 1) * width)
        n, score, matched = self.code.best_guess(*self.parts, context, shortest, factor, nodes, width, levels, floor,
                                                 found, chances, waiting, worth)
        return Guess(found[0, :n].tolist(), found[1, :n].tolist(), chances[0, :n].tolist(), score, matched)
