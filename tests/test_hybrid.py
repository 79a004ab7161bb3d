"""Drafters that hold drafters: who drafts when. How they are opened: tests/test_parts.py.

Their text is proven with every other drafter's (tests/test_every_drafter.py).
"""

import pytest
import torch
from fakes import RuleDrafter, RuleTarget, oracle

from data.sampling import Sampling
from drafters.fallback import Fallback, Pace
from drafters.fallback import Options as FallbackOptions
from drafters.hybrid import Hybrid
from drafters.lookup import Lookup
from drafters.registry import options_of
from drafters.tree import DynamicTree, StaticTree, chain
from eval.decode import Decoder
from recipes.errors import ConfigError

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
