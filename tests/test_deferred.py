"""Drafts and observations put together row by row, and that a drafter which waits has missed nothing."""

import pytest
import torch
from fakes import oracle
from tiny import LAYERS, load_target, write_target

from drafters.deferred import MOST, Deferred, together
from drafters.registry import REGISTRY, entry, options_of
from drafters.tree import Draft, StaticTree, chain, mixed

# --- together, mixed ---


def test_observations_are_joined_by_hand():
    """Row 0 kept 2 and 1 of the tokens, row 1 kept 1 and 3: what lay behind is gone, and row 0 repeats its last."""
    tokens = torch.tensor([[5, 6, 99], [7, 99, 99]]), torch.tensor([[8, 99, 99], [10, 11, 12]])
    places = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[2, 3, 4], [1, 2, 3]])
    lasts = torch.tensor([1, 0]), torch.tensor([0, 2])
    seen = [(t[..., None] * 10, t, p, last) for t, p, last in zip(tokens, places, lasts)]
    taps, joined, positions, last = together(seen)
    assert joined.tolist() == [[5, 6, 8, 8], [7, 10, 11, 12]] and last.tolist() == [2, 3]
    assert positions.tolist() == [[0, 1, 2, 2], [0, 1, 2, 3]]
    assert torch.equal(taps[..., 0], joined * 10)
    assert together([(None, *one[1:]) for one in seen])[0] is None and together(seen[:1]) is seen[0]


def test_drafts_are_mixed_by_hand():
    """A chain of two beside a tree of three, filled up with tokens that are none."""
    a = Draft(torch.tensor([[1, 2], [1, 0]]), real=torch.tensor([[True, True], [True, False]]), by=["a", "a"])
    b = Draft(torch.tensor([[5, 6, 7], [5, 6, 7]]), parents=torch.tensor([[0, 0, 1], [0, 0, 1]]), by=["b", "b"])
    both = mixed(a, b, [True, False])
    assert both.tokens.tolist() == [[1, 2, 0], [5, 6, 7]] and both.by == ["a", "b"]
    assert both.parents[0, :2].tolist() == [0, 1] and both.parents[1].tolist() == [0, 0, 1]
    assert both.real.tolist() == [[True, True, False], [True, True, True]] and both.counts() == [2, 3]
    assert mixed(a, a, [True, False]).parents is None


def test_certain_guesses_have_a_distribution_beside_drawn_ones():
    """q of a looked-up chain is one at its tokens, place by place; a tree has none."""
    a = Draft(torch.tensor([[3, 1], [0, 0]]), real=torch.tensor([[True, True], [False, False]]))
    q = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]]).repeat(2, 1, 1)
    both = mixed(a, Draft(torch.tensor([[1], [0]]), q), [True, False])
    assert both.q[0].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert both.q[1].tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0, 0]] and both.real.tolist()[1] == [True, False]
    a.parents = torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="cannot stand beside drawn ones"):
        mixed(a, Draft(torch.tensor([[1], [0]]), q), [True, False])


# --- a drafter that waits ---


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("target")), "float64", LAYERS)


WAITING = [kind for kind in REGISTRY if REGISTRY[kind].reads != "none" or kind == "layer_cut"]
OPTIONS = {"layer_cut": {"layers": 4}, "eagle3": {"draft_vocab_size": 40}, "medusa": {"draft_vocab_size": 40},
           "parallel": {"draft_vocab_size": 40, "num_layers": 2}}


def built(kind: str, target):
    target.tap(entry(kind).shown(LAYERS))
    drafter = entry(kind).code.build(options_of(kind, OPTIONS.get(kind, {})), target,
                                     {i: 1 for i in range(3, 60)}, 0).double().eval()
    with torch.no_grad():
        g = torch.Generator().manual_seed(0)
        for weight in drafter.blocks.parameters() if kind == "medusa" else ():
            weight.copy_(torch.randn(weight.shape, generator=g))
    return drafter


class Walk:
    """Two rows led along given texts in uneven steps, as verification would."""

    def __init__(self, target, session, prompts: list[list[int]], texts: list[list[int]]) -> None:
        self.target, self.session, self.texts = target, session, [p + t for p, t in zip(prompts, texts)]
        self.places = [len(p) for p in prompts]
        session.begin(prompts)
        self.show([0] * len(prompts), self.places)

    def show(self, starts: list[int], ends: list[int]) -> None:
        """The states at positions start .. end - 1 of each row, and the tokens that follow them."""
        width = max(end - start for start, end in zip(starts, ends))
        taps, tokens = [], torch.full((len(starts), width), 7)
        for row, (text, start, end) in enumerate(zip(self.texts, starts, ends)):
            whole = torch.tensor([text[:end]])
            shown = self.target.forward(whole, torch.arange(end)[None], logits=False).taps
            if shown is not None:
                taps.append(torch.nn.functional.pad(shown[:, start:], (0, 0, 0, width - (end - start)), value=3.0))
            tokens[row, : end - start] = torch.tensor(text[start + 1 : end + 1])
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        self.session.observe(torch.cat(taps) if taps else None, tokens, positions,
                             torch.tensor([e - s - 1 for s, e in zip(starts, ends)]))
        self.places = ends

    def go(self, steps: list[int]) -> None:
        self.show(self.places, [place + n for place, n in zip(self.places, steps)])

    def keep(self, rows: list[int]) -> None:
        self.session.keep(torch.tensor(rows))
        self.texts, self.places = [self.texts[r] for r in rows], [self.places[r] for r in rows]


# Accepted tokens of each row and cycle; behind the second the first row leaves, behind the third another joins.
STEPS = [[1, 3], [2, 1], [1], [1, 2], [1, 2]]
PROMPTS, TEXTS = [[3, 9, 14, 3, 9], [7, 8]], [[(5 * i * i + 3) % 37 + 3 for i in range(20)],
                                             [(7 * i * i + i) % 37 + 3 for i in range(20)]]


@torch.inference_mode()
@pytest.mark.parametrize("kind", WAITING)
@pytest.mark.parametrize("asked", [{0, 1, 2, 3, 4}, {4}, {2, 4}, {1, 2}])
def test_who_waited_drafts_as_if_it_had_not(target, kind, asked):
    """Case 59: whatever cycles a drafter sits out, with rows that leave and rows that join, its drafts are those of one
    that proposed in all of them."""
    drafter = built(kind, target)
    always = Walk(target, drafter.session(2, 60), PROMPTS, TEXTS)
    waits = Walk(target, Deferred(drafter, 60), PROMPTS, TEXTS)
    late = [Walk(target, s, PROMPTS[:1], TEXTS[:1]) for s in (drafter.session(1, 60), Deferred(drafter, 60))]
    for cycle, steps in enumerate(STEPS):
        plan = StaticTree(((0,), (1,), (0, 0))) if cycle == 4 else chain(3)
        expected = always.session.propose(plan)
        if cycle in asked:
            assert torch.equal(waits.session.propose(plan).tokens, expected.tokens)
        for walk in (always, waits):
            walk.go(steps)
        if cycle == 1:
            for walk in (always, waits):
                walk.keep([1])
        if cycle == 2:
            for walk, other in zip((always, waits), late):
                walk.session.join(other.session)
                walk.texts, walk.places = walk.texts + other.texts, walk.places + other.places


def test_what_is_kept_is_bounded():
    """A drafter that is never asked reads now and then, so that a long answer does not pile up."""
    drafter = oracle([[1, 2]], [[3] * 400], 40)
    session = Deferred(drafter, 500)
    session.begin([[1, 2]])
    most = 0
    for place in range(300):
        session.observe(torch.zeros(1, 1, 1), torch.tensor([[3]]), torch.tensor([[place]]), torch.tensor([0]))
        most = max(most, len(session.kept))
    assert most <= MOST + 1 and len(drafter.starts) >= 4
