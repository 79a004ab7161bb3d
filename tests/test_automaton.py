"""The suffix automaton against counting by hand and by brute force, over growing and shrinking texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.automaton import Automaton, Guess

compiled = pytest.importorskip("drafters.automaton_code", reason="needs numba")


def ints(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


class Counted:
    """The reference: every text as it is, every run counted anew."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []  # those that count
        self.read: list[list[tuple[int, int]]] = []  # (token, place) of all texts, for which of two was met last
        self.place = 0

    def begin(self) -> None:
        self.texts.append([])
        self.read.append([])

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.place += 1
            self.texts[-1].append(token)
            self.read[-1].append((token, self.place))

    def count(self, run: list[int]) -> int:
        return sum(text[i : i + len(run)] == run for text in self.texts for i in range(len(text) - len(run) + 1))

    def latest(self, run: list[int]) -> int:
        return max((text[i + len(run) - 1][1] for text in self.read for i in range(len(text) - len(run) + 1)
                    if [token for token, _ in text[i : i + len(run)]] == run), default=0)

    def grow(self, run: list[int], nodes: int, width: int, levels: int, floor: float) -> tuple[list, list, list]:
        tokens, parents, chances, waiting = [], [], [], []
        path, parent, chance = run, -1, 1.0
        while True:
            if len(path) - len(run) < levels:
                found = {t: (self.count([*path, t]), self.latest([*path, t])) for t in range(8)}
                best = sorted((t for t in found if found[t][0]), key=found.get, reverse=True)[:width]
                for t in best:
                    share = chance * found[t][0] / self.count(path)
                    if share >= floor:
                        waiting.append((share, parent, [*path, t]))
            if not waiting or len(tokens) == nodes:
                return tokens, parents, chances
            chosen = max(range(len(waiting)), key=lambda i: (waiting[i][0], -i))
            chance, above, path = waiting.pop(chosen)
            tokens.append(path[-1])
            parents.append(above)
            chances.append(chance)
            parent = len(tokens) - 1

    def guess(self, context: list[int], shortest: int, factor: float, nodes: int, width: int, levels: int,
              floor: float) -> Guess:
        best = Guess([], [], [], 0.0, 0)
        for n in range(len(context), shortest - 1, -1):
            run, room = context[-n:], min(nodes, int(factor * n + 1e-6))
            if self.count(run) and room:
                tokens, parents, chances = self.grow(run, room, width, levels, floor)
                if sum(chances) > best.score + 1e-12:
                    best = Guess(tokens, parents, chances, sum(chances), n)
        return best


def same(a: Guess, b: Guess) -> None:
    assert (a.tokens, a.parents, a.matched) == (b.tokens, b.parents, b.matched)
    assert a.chances == pytest.approx(b.chances) and a.score == pytest.approx(b.score)


def read(*texts: list[int], depth: int = 16) -> Automaton:
    found = Automaton(depth, 1)
    for text in texts:
        found.begin()
        found.extend(ints(text))
    return found


def test_a_chain_by_hand():
    """1 2 occurs three times, behind it 3 and 4 once each: the later one is drafted, then what followed that."""
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    guess = read(text).guess(ints([4, 1, 2]), 1, 1.0, 8, 1, 8, 0.1)
    same(guess, Guess([4, 1], [-1, 0], [1 / 3, 1 / 3], 2 / 3, 2))
    assert read(text).guess(ints([4, 1, 2]), 1, 0.5, 8, 1, 8, 0.1).tokens == [4]  # alpha: half as many
    assert read(text).guess(ints([4, 1, 2]), 1, 3.0, 8, 1, 8, 0.1).tokens == [4, 1, 2]  # to the text's end
    assert read(text).guess(ints([4, 1, 2]), 1, 3.0, 2, 1, 2, 0.1).tokens == [4, 1]  # K
    assert read(text).guess(ints([4, 1, 2]), 1, 1.0, 8, 1, 8, 0.5).tokens == []  # neither is that likely
    assert read(text).guess(ints([4, 1, 2]), 3, 1.0, 8, 1, 8, 0.1).tokens == []  # 4 1 2 occurs at the end alone
    assert read(text).guess(ints([7]), 1, 1.0, 8, 1, 8, 0.1) == Guess([], [], [], 0.0, 0)


def test_a_longer_match_drafts_more_and_wins():
    """7 1 2 3 was followed by 5 6 7; behind 3 alone 9 is as frequent and met later, but may draft one token only."""
    found = read([7, 1, 2, 3, 5, 6, 7], [3, 9])
    same(found.guess(ints([7, 1, 2, 3]), 1, 1.0, 8, 1, 8, 0.1), Guess([5, 6, 7], [-1, 0, 1], [1.0] * 3, 3.0, 4))
    same(found.guess(ints([0, 3]), 1, 1.0, 8, 1, 8, 0.1), Guess([9], [-1], [0.5], 0.5, 1))
    assert found.guess(ints([3, 9]), 1, 1.0, 8, 1, 8, 0.1).tokens == []  # nothing runs on from one text to the next


def test_a_tree_by_hand():
    """The likeliest nodes of all, siblings in order: 2 (2/3) and its 3 (2/3), then 4 (1/3) and what followed it."""
    found = read([1, 2, 3], [1, 2, 3], [1, 4, 5])
    same(found.guess(ints([1]), 1, 4.0, 4, 2, 4, 0.1),
         Guess([2, 3, 4, 5], [-1, 0, -1, 2], [2 / 3, 2 / 3, 1 / 3, 1 / 3], 2.0, 1))
    assert found.guess(ints([1]), 1, 4.0, 4, 2, 1, 0.1).tokens == [2, 4]  # one level
    assert found.guess(ints([1]), 1, 4.0, 4, 1, 4, 0.1).tokens == [2, 3]  # one behind each


def test_forgotten_texts_do_not_count():
    found = read([1, 2, 3], [1, 2, 4], [1, 2, 4])
    assert found.guess(ints([1, 2]), 1, 1.0, 1, 1, 1, 0.1).tokens == [4]
    for _ in range(2):
        found.forget(ints([1, 2, 4]))
    same(found.guess(ints([1, 2]), 1, 1.0, 1, 1, 1, 0.1), Guess([3], [-1], [1.0], 1.0, 2))
    found.forget(ints([1, 2, 3]))
    assert found.guess(ints([1, 2]), 1, 1.0, 1, 1, 1, 0.1).tokens == []


TOKENS = st.lists(st.integers(0, 3), max_size=14)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS, st.booleans()), min_size=1, max_size=5), TOKENS, st.integers(1, 3),
       st.sampled_from([0.5, 1.0, 1.5]), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4),
       st.sampled_from([0.0, 0.1, 0.34]))
def test_guesses_are_those_of_brute_force(texts, context, shortest, factor, nodes, width, levels, floor):
    """Whatever is read, in whatever pieces, and forgotten again: runs of up to 5 tokens, drafts of up to 7."""
    index, counted = Automaton(12, 1), Counted()
    for first, second, gone in texts:
        index.begin()
        counted.begin()
        for part in (first, second):
            index.extend(ints(part))
            counted.extend(part)
        asked = context[-5:], shortest, factor, nodes, width, levels, floor
        same(index.guess(ints(asked[0]), *asked[1:]), counted.guess(*asked))
        ending = (first + second)[-5:], *asked[1:]  # what a request asks of its own text
        same(index.guess(ints(ending[0]), *ending[1:]), counted.guess(*ending))
        if gone:
            index.forget(ints(first + second))
            counted.texts.pop()
            counted.texts.append([])
            same(index.guess(ints(asked[0]), *asked[1:]), counted.guess(*asked))


def test_memory_and_work_grow_with_the_text_alone():
    """One token over and over is the worst text for an index of runs: as many links as tokens, and still no more work
    a token, states or bytes than of any other text."""
    found = Automaton(48)
    found.extend(ints([5] * 100_000))
    assert found.at[compiled.STATES] == 100_001 and found.nbytes < 350 * 100_000
    assert found.guess(ints([5] * 24), 1, 1.0, 16, 1, 16, 0.1).tokens == [5] * 16
    mixed = Automaton(48)
    mixed.extend(np.random.default_rng(0).integers(0, 50, 20_000).astype(np.int32))
    assert mixed.at[compiled.STATES] <= 2 * 20_000 and mixed.at[compiled.EDGES] <= 3 * 20_000


def test_without_a_folder_to_keep_it_in_it_is_compiled_all_the_same(monkeypatch):
    """numba refuses to cache where neither the package nor the user's cache can be written."""
    def refusing(work, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return work

    monkeypatch.setattr(compiled, "njit", refusing)
    assert compiled.compiled(len) is len
