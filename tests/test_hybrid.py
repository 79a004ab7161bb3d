"""Drafters that hold drafters: who drafts when, that the one that waited missed nothing, and how they are opened.

Their text is proven with every other drafter's (tests/test_every_drafter.py).
"""

import json

import pytest
import torch
from evaluated import evaluate, world
from fakes import RuleDrafter, RuleTarget, oracle
from tiny import LAYERS, load_target, write_target

from data.sampling import Sampling
from drafters.deferred import MOST, Deferred, together
from drafters.fallback import Fallback, Pace
from drafters.fallback import Options as FallbackOptions
from drafters.hybrid import Hybrid
from drafters.imported import open_drafter
from drafters.lookup import Lookup
from drafters.registry import REGISTRY, entry, options_of
from drafters.tree import Draft, DynamicTree, StaticTree, chain, mixed
from eval.decode import Decoder, Output
from eval.figures import by_drafter
from recipes.errors import ConfigError
from recipes.schema import Drafter as Section

V = 40


def counting() -> RuleTarget:
    """x is followed by x + 1 mod V."""
    def rule(seen, positions):
        return torch.nn.functional.one_hot((seen.gather(1, positions) + 1) % V, V).double() * 50

    return RuleTarget(rule)


def answers(prompts: list[list[int]], limit: int) -> list[list[int]]:
    return [o.tokens for o in Decoder(counting(), limit, end_ids=[]).plain(prompts)]


def held(drafter: RuleDrafter, **more):
    """A scripted drafter as another one may hold it."""
    drafter.kind, drafter.t2d = "layer_cut", torch.ones(V, dtype=torch.bool)
    for name, value in more.items():
        setattr(drafter, name, value)
    return drafter


def hybrid(then: RuleDrafter, **options) -> Hybrid:
    options = options_of("hybrid", {"first": {"kind": "lookup", "options": {"longest": 3}},
                                    "then": {"kind": "layer_cut"}, **options})
    return Hybrid(options, Lookup(options_of("lookup", options.first.options), V), held(then))


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
    drafter = held(oracle([[1, 2]], [[3] * 400], V))
    session = Deferred(drafter, 500)
    session.begin([[1, 2]])
    most = 0
    for place in range(300):
        session.observe(torch.zeros(1, 1, 1), torch.tensor([[3]]), torch.tensor([[place]]), torch.tensor([0]))
        most = max(most, len(session.kept))
    assert most <= MOST + 1 and len(drafter.starts) >= 4


# --- lookup first ---


def test_a_long_match_drafts_and_the_other_otherwise():
    """The prompt of row 0 holds its answer up to 14: it is looked up behind a match of 3; from 15 on, and in row 1, the
    scripted drafter drafts, which is right."""
    prompts = [[*range(5, 15), 3, 5, 6], [20]]
    told = answers(prompts, 20)
    then = oracle(prompts, told, V)
    out = Decoder(counting(), 20, end_ids=[]).speculative(prompts, hybrid(then, match=3), 4)
    assert [o.tokens for o in out] == told
    first, second = ([by for by, _, _ in o.drafted_by] for o in out)
    assert first[:2] == ["lookup"] * 2 and set(first[2:]) == {"layer_cut"} and set(second) == {"layer_cut"}
    assert [n for o in out for _, n in o.drafts] == [a for o in out for _, n, a in o.drafted_by if n]
    assert out[0].drafted_by[:2] == [("lookup", 4, 4), ("lookup", 4, 2)]
    assert {pair[1:] for pair in [*out[0].drafted_by[2:-1], *out[1].drafted_by[:-1]]} == {(4, 4)}


def test_no_row_asks_for_what_nobody_needs():
    """While all rows look up, the other drafter does not run."""
    prompts = [[*range(5, 30), 3, 5, 6, 7]]
    then = oracle(prompts, answers(prompts, 12), V)
    out = Decoder(counting(), 12, end_ids=[]).speculative(prompts, hybrid(then, match=3), 4)
    assert {by for by, _, _ in out[0].drafted_by} == {"lookup"} and not then.starts


def test_the_other_may_draft_shorter_chains():
    prompts = [[20], [30]]
    then = oracle(prompts, answers(prompts, 9), V)
    out = Decoder(counting(), 9, end_ids=[]).speculative(prompts, hybrid(then, match=3, length=2), 6)
    assert {drafted for o in out for _, drafted, _ in o.drafted_by} == {2}
    drafter = hybrid(held(oracle(prompts, [], V), longest=3), match=3, length=2)
    assert not hasattr(drafter, "longest") and drafter.steady(chain(6))[1] == chain(2)
    assert hybrid(held(oracle(prompts, [], V), longest=3), match=3).longest == 3


@pytest.mark.parametrize("plan", [StaticTree(((0,), (1,), (0, 0), (1, 0))), DynamicTree(3, 2, 5), DynamicTree(4, 1, 2)])
def test_a_chain_stands_beside_a_tree(plan):
    """The lookup cannot branch: its row drafts a chain as deep, of no more tokens than the tree has; the other's the
    tree. A sure target's sampled text is its greedy one, whatever numbers each row draws."""
    prompts = [[*range(5, 15), 3, 5, 6, 7], [20]]
    told = answers(prompts, 10)
    out = Decoder(counting(), 10, end_ids=[]).speculative(prompts, hybrid(oracle(prompts, told, V), match=3), plan)
    assert [o.tokens for o in out] == told
    first = "lookup", min(plan.depth, plan.nodes)
    assert out[0].drafted_by[0][:2] == first and out[1].drafted_by[0][0] == "layer_cut"
    sampled = Decoder(counting(), 10, Sampling(1.0), end_ids=[]).speculative(
        prompts, hybrid(oracle(prompts, told, V), match=3), plan)
    assert [o.tokens for o in sampled] == told and sampled[0].drafted_by[0][:2] == first


@pytest.mark.parametrize("values,message", [
    ({"first": {"kind": "eagle3"}}, "first.kind = eagle3: must be one of suffix, lookup"),
    ({"then": {"kind": "suffix"}}, "then.kind = suffix: looks up too"),
    ({"then": {"kind": "eagle"}}, "drafter.kind = 'eagle': unknown"),
    ({"first": {"kind": "suffix", "options": {"depth": 3}}}, "drafter.options .suffix.: unknown key depth"),
    ({"first": {"kind": "suffix", "match": 3}}, "unknown key first.match"),
])
def test_parts_are_checked(values, message):
    with pytest.raises(ConfigError, match=message):
        options_of("hybrid", values)


# --- fallback ---


def test_pauses_by_hand():
    """Two drafts are judged together: below 2 tokens a pass a pause of 3, then of 6, 12, 24 and no more; a trial that
    pays begins anew."""
    pace = Pace(FallbackOptions(window=2, pause=3))
    lengths = []
    for _ in range(5):
        for accepted in (0, 2):
            assert not pace.left
            pace.judge(4, accepted, 2.01)
        lengths.append(pace.left)
        for _ in range(pace.left):
            pace.judge(0, 0, 2.01)
    assert lengths == [3, 6, 12, 24, 24]
    for accepted in (1, 2, 2, 0):
        pace.judge(4, accepted, 2.01)
    assert pace.left == 3 and pace.next == 6, "means of the last two: 2.5, 3, 2, and then it stops"
    fresh = Pace(FallbackOptions(window=1, pause=3))
    fresh.judge(0, 0, 2.0)
    assert not fresh.left, "a pass for which nothing was proposed says nothing of drafts"


@pytest.mark.parametrize("slots", [0, 1])
def test_a_request_whose_drafts_fail_stops_drafting(slots):
    """Row 0's drafts are all wrong, row 1's right: row 0 alone pauses, and tries again; the text stays."""
    prompts = [[5], [20]]
    told = answers(prompts, 16)
    drafter = Fallback(options_of("fallback", {"drafter": {"kind": "layer_cut"}, "break_even": 1.5, "window": 2,
                                               "pause": 3}), held(oracle(prompts, told, V, lambda row, _: row == 0)))
    out = Decoder(counting(), 16, end_ids=[], slots=slots).speculative(prompts, drafter, 3)
    assert [o.tokens for o in out] == told
    names = ["layer_cut"] * 2 + ["paused"] * 3 + ["layer_cut"] * 2 + ["paused"] * 6 + ["layer_cut"] * 2
    assert out[0].drafted_by == [(name, 3 * (name != "paused"), 0) for name in names]
    assert {by for by, _, _ in out[1].drafted_by} == {"layer_cut"} and len(out[1].drafted_by) == 4
    if slots == 1:
        assert len(drafter.drafter.starts) == 2 + 2 + 2 + 4, "a pause is no work for the drafter"


def test_without_a_price_nothing_pauses():
    """An unstated threshold is what a cycle costs, once somebody measured it."""
    prompts = [[5]]
    script = held(oracle(prompts, answers(prompts, 16), V, lambda row, _: True))
    drafter = Fallback(options_of("fallback", {"drafter": {"kind": "layer_cut"}, "window": 2}), script)
    out = Decoder(counting(), 16, end_ids=[]).speculative(prompts, drafter, 3)
    assert drafter.unpriced and {by for by, _, _ in out[0].drafted_by} == {"layer_cut"}
    drafter.price(1.2)
    out = Decoder(counting(), 16, end_ids=[]).speculative(prompts, drafter, 3)
    assert [by for by, _, _ in out[0].drafted_by] == ["layer_cut"] * 2 + ["paused"] * 13
    assert "under 1.20 tokens a pass (measured here)" in drafter.remarks()[0]


# --- opened by a recipe ---


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe with a trained EAGLE-3 drafter in `drafter`."""
    return world(tmp_path_factory.mktemp("world"))


def flags_of(recipe, kind: str, options: dict) -> list[str]:
    return ["--drafter.kind", kind, "--drafter.path", "", "--drafter.options", json.dumps(options)]



def test_a_hybrid_is_opened_with_its_checkpoint(recipe, tmp_path):
    """The target is tapped where the trained part reads, the text stays, and another option is another evaluation."""
    target = load_target(recipe.parent / "model", "float32")
    target.tap(None)
    options = {"first": {"kind": "lookup"}, "then": {"kind": "eagle3", "path": str(recipe.parent / "drafter")}}
    found, other = (open_drafter(Section(kind="hybrid", options={**options, "match": n}), target, tmp_path)
                    for n in (2, 3))
    assert target.layers == [2, 4, 5] and found.folder.name == "drafter" and found.digest != other.digest
    prompts = [[5, 6, 7, 5, 6], [9, 8]]
    out, plain = Decoder(target, 6, end_ids=[]).speculative(prompts, found.drafter, 3), Decoder(target, 6, end_ids=[])
    assert [o.tokens for o in out] == [o.tokens for o in plain.plain(prompts)]


def test_who_drafted_is_counted_by_hand():
    outputs = [Output(drafted_by=[("a", 3, 2), ("b", 0, 0)]), Output(drafted_by=[("a", 2, 1), ("b", 4, 0)])]
    assert by_drafter(outputs)["by_drafter"] == {
        "a": {"passes": 2, "drafts": 2, "drafted": 5, "accepted": 3, "mean_length": 2.5, "rate": 0.6},
        "b": {"passes": 2, "drafts": 1, "drafted": 4, "accepted": 0, "mean_length": 1.0, "rate": 0.0}}
    assert by_drafter([Output()]) == {}

@pytest.mark.slow
def test_a_hybrid_of_a_trained_drafter_is_evaluated(recipe):
    """Case 59: a whole report, lossless; it says who drafted, and what that depends on."""
    code, report = evaluate(recipe, *flags_of(recipe, "hybrid", {
        "match": 2, "length": 2, "first": {"kind": "suffix"},
        "then": {"kind": "eagle3", "path": str(recipe.parent / "drafter")}}))
    total = report["total"]
    assert code == 0 and total["lossless"]["greedy"]["mismatches"] == 0
    assert report["drafter"]["kind"] == "hybrid" and report["drafter"]["checkpoint"] == "drafter"
    assert report["target"]["layers"] == [2, 4, 5] and report["drafter"]["parameters"] > 0
    by = total["by_drafter"]
    assert sum(one["passes"] for one in by.values()) == total["target_passes"]
    assert sum(one["drafts"] for one in by.values()) == total["drafts"] and by["eagle3"]["passes"]
    assert any("grew by each finished answer" in line for line in report["settings"]["remarks"])
    page = (recipe.parent / "runs" / "tiny" / "eval" / "report.html").read_text()
    assert "Who drafted" in page and "grew by each finished answer" in page


@pytest.mark.slow
def test_a_fallback_is_priced_by_what_it_costs_here(recipe):
    """A random drafter pays nowhere: requests stop drafting, by the break-even that was measured before."""
    code, report = evaluate(recipe, *flags_of(recipe, "fallback", {
        "window": 1, "drafter": {"kind": "eagle3", "path": str(recipe.parent / "drafter")}}), "--again")
    assert code == 0 and report["total"]["lossless"]["greedy"]["mismatches"] == 0
    by = report["total"]["by_drafter"]
    assert set(by) == {"eagle3", "paused"} and by["paused"]["drafts"] == 0 and by["paused"]["mean_length"] is None
    assert "(measured here)" in report["settings"]["remarks"][0]


@pytest.mark.parametrize("options,message", [
    ({"then": {"kind": "eagle3"}}, "drafter.options.then.path: name the trained drafter of kind eagle3"),
    ({"then": {"kind": "eagle3", "path": "runs/nowhere"}}, "drafter.options.then.path"),
    ({"then": {"kind": "medusa", "path": "DRAFTER"}}, "a drafter of kind eagle3, but"),
])
def test_parts_that_cannot_be_opened_are_named(recipe, capsys, options, message):
    options = {"first": {"kind": "lookup"}, **json.loads(json.dumps(options).replace(
        "DRAFTER", str(recipe.parent / "drafter")))}
    code, _ = evaluate(recipe, *flags_of(recipe, "hybrid", options))
    assert code == 2 and message in capsys.readouterr().err
