"""Choosing a chain or tree: the search against all trees, the arithmetic by hand, and what is measured."""

from itertools import combinations, product

import pytest
import torch
from fakes import RuleTarget, counting_drafter, counting_target
from test_tree_decode import ranked
from tiny import V

from drafters.registry import entry, options_of
from drafters.tree import StaticTree, chain
from eval.adapt import Deterministic, led, measure_curve, measured_choice, rank_accuracies
from eval.choice import Curve, between, choose, cost_ms, expected, search_tree
from eval.decode import Decoder
from recipes.schema import Eval, Tree

RANKS = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.4, 0.3, 0.1]]


def test_expected_tokens_by_hand():
    """Eagle3.md: E = 1 + the sum over nodes of the probability that their path is accepted."""
    assert expected(chain(3), RANKS) == pytest.approx(1 + 0.6 + 0.6 * 0.5 + 0.6 * 0.5 * 0.4)
    tree = StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1)))
    assert expected(tree, RANKS) == pytest.approx(1 + 0.6 + 0.2 + 0.3 + 0.1 + 0.05)


def all_trees(depth: int, width: int, nodes: int):
    paths = [path for d in range(1, depth + 1) for path in product(range(width), repeat=d)]
    for chosen in combinations(paths, nodes):
        try:
            yield StaticTree(chosen)
        except ValueError:
            pass


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_search_finds_the_best_tree(budget):
    """No other tree of as many nodes has a larger E, where a guess of lower rank is never the better one."""
    found = search_tree([row[:2] for row in RANKS], budget)
    assert found.nodes == budget
    best = max(expected(tree, RANKS) for tree in all_trees(3, 2, budget))
    assert expected(found, RANKS) == pytest.approx(best)


def test_search_stops_where_nothing_is_accepted():
    assert search_tree([[0.5, 0.0], [0.0, 0.0]], 9) == chain(1)
    assert search_tree([[0.0, 0.0]], 9) == chain(1)  # a tree has a node
    assert search_tree(RANKS, 9, depth=1).depth == 1


def test_costs_by_hand():
    """Between measured widths a line, beyond the last one its slope; a tree's levels cost by the nodes gone on from."""
    points = {1: 10.0, 5: 12.0, 9: 20.0}
    assert [between(points, n) for n in (1, 3, 5, 7, 9, 11)] == [10, 11, 12, 16, 20, 24]
    assert between({4: 3.0}, 1) == between({4: 3.0}, 9) == 3.0
    curve = Curve(10.0, points, {1: 1.0, 3: 2.0})
    assert cost_ms(chain(4), curve) == 4 * 1.0 + 12.0
    assert cost_ms(StaticTree(((0,), (1,), (2,), (0, 0), (1, 0), (2, 0))), curve) == 1.0 + 2.0 + 16.0


def test_choice_by_hand():
    """The fastest setting wins, by cost as much as by acceptance, and says why."""
    cheap = choose(RANKS, Curve(10.0, {1: 10.0, 9: 10.0}, {1: 0.1}), [4, 8], trees=True)
    assert cheap.plan.nodes == 8 and cheap.expected == pytest.approx(expected(cheap.plan, RANKS))
    assert cheap.reason.startswith(f"tree of 8 nodes and {cheap.plan.depth} levels: {cheap.expected:.2f} tokens a pass")
    assert "; next, " in cheap.reason
    wide = choose(RANKS, Curve(10.0, {1: 10.0, 9: 50.0}, {1: 0.1}), [4, 8], trees=True)
    assert wide.plan == chain(1)  # each further token costs half a step
    assert wide.speedup == pytest.approx(1.6 * 10.0 / 15.1)
    chains = choose(RANKS, Curve(10.0, {1: 10.0, 9: 10.0}, {1: 0.1}), [4, 8], trees=False)
    assert chains.plan == chain(3)
    none = choose([[0.1]], Curve(10.0, {1: 10.0, 2: 14.0}, {1: 1.0}), [], trees=False)
    assert none.plan is None and none.speedup == 1.0
    assert none.reason.startswith("no draft: the best of 1 settings loses")


def test_ranks_by_hand():
    """The drafter is led along the true tokens; a rank counts the tokens that it finds more probable."""
    q = torch.tensor([[0.1, 0.4, 0.3, 0.2]])

    def propose(plan, sample):
        assert [int(sample(q)) for _ in range(plan.depth)] == [2, 0, 1]

    assert led(propose, torch.tensor([2, 0, 1])) == [1, 3, 0]
    assert led(lambda plan, sample: None, torch.tensor([2])) is None


class Whole(RuleTarget):
    """Also runs a whole text without a cache."""

    def forward(self, ids, positions, cache=None, rows=None, logits=True, branches=None):
        return super().forward(ids, positions, cache or self.new_cache(len(ids), 64), rows, logits, branches)


def test_accuracies_of_a_drafter_that_is_known():
    """Ranks that alternate by place give shares of one half each, at every level; ends of answers count for none."""
    script = [3, 4, 5, 6, 7, 8, 3, 4, 5]
    target, drafter = ranked(script, {place: place % 2 for place in range(20)})
    whole = Whole(target.rule, [])
    out = Decoder(target, 9, end_ids=[]).plain([[1, 2]])
    assert out[0].tokens == script
    found = rank_accuracies(whole, drafter, [[1, 2]], out, 3, 2)
    # level 0 sees places 1..8 of the script, level 1 places 2..8, level 2 places 3..8
    assert found == [pytest.approx([4 / 8, 4 / 8]), pytest.approx([4 / 7, 3 / 7]), pytest.approx([3 / 6, 3 / 6])]


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return counting_target(tmp_path_factory.mktemp("counting"), V)


@pytest.mark.parametrize("ahead,expected_ranks", [(2, 1.0), (3, 0.0)])
def test_accuracies_of_real_drafters(counting, ahead, expected_ranks):
    """A perfect EAGLE-3 is always right at every level, one that is one off never; the loop accepts as many."""
    drafter = counting_drafter(counting, list(range(V)), ahead)
    out = Decoder(counting, 12, end_ids=[]).plain([[5, 6], [20]])
    found = rank_accuracies(counting, drafter, [[5, 6], [20]], out, 3, 1)
    assert found == [[expected_ranks]] * 3
    loop = Decoder(counting, 12, end_ids=[]).speculative([[5, 6], [20]], drafter, 3)
    assert all(n == 3 * expected_ranks for o in loop for _, n in o.drafts)


def test_a_drafter_without_a_distribution_is_judged_by_its_chain(counting, monkeypatch):
    """Lookup ranks nothing: its chains are counted in the loop, passes without a draft as failures."""
    drafter = entry("lookup").code.build(options_of("lookup", {}), counting, {}, 0)
    out = Decoder(counting, 12, end_ids=[]).plain([[5, 6]])
    with pytest.raises(Deterministic):
        rank_accuracies(counting, drafter, [[5, 6]], out, 3, 2)
    seen = []
    monkeypatch.setattr("eval.adapt.choose", lambda accuracies, *rest: seen.append((accuracies, *rest)))
    measured_choice(counting, drafter, [[5, 6, 7, 8]], Eval(draft_length=2, choose="tree", speed_tokens=8))
    accuracies, curve, budgets, trees = seen[0]
    assert len(accuracies) == 2 and all(0 <= row[0] <= 1 for row in accuracies)
    assert budgets == [] and trees is False and set(curve.verify_ms) == {1, 2, 3}


def test_costs_are_measured(counting, monkeypatch):
    """A time for every width asked for, of the target and of the drafter, at any batch size; where all levels are one
    pass, of that pass for one and for all."""
    drafter = counting_drafter(counting, list(range(V)))
    curve = measure_curve(counting, drafter, 20, [2, 5], 3, [2, 4], batch=2, repeats=2)
    assert set(curve.verify_ms) == {1, 2, 5} and set(curve.draft_ms) == {1, 2, 4} and curve.batch == 2
    assert curve.target_ms == curve.verify_ms[1] > 0 and curve.draft_ms[1] > 0 and curve.pass_ms == {}
    monkeypatch.setattr(type(drafter), "one_pass", True, raising=False)
    curve = measure_curve(counting, drafter, 20, [2, 5], 3, [2, 4], repeats=2)
    assert set(curve.pass_ms) == {1, 3} and min(curve.pass_ms.values()) > 0
    assert set(curve.draft_ms) == {1, 2, 4} and curve.draft_ms[1] == 0.0 <= curve.draft_ms[4]


def test_choice_on_a_real_target(counting):
    """A perfect drafter is worth drafting with, as far as it may; the promise names its reason."""
    drafter = counting_drafter(counting, list(range(V)))
    section = Eval(draft_length=3, choose="tree", speed_tokens=10, tree=Tree(top_k=2, total=6))
    chosen = measured_choice(counting, drafter, [[5, 6], [20, 21]], section)
    assert chosen.plan is None or chosen.expected == pytest.approx(1 + chosen.plan.depth)
    assert "ms of a cycle at batch 1" in chosen.reason


def test_a_pass_that_drafts_all_levels_costs_what_each_adds_to_it():
    """A parallel drafter's longer chain costs no further pass: so it is taken wherever it accepts anything more. Heads
    add to the pass, each as much, and nodes that a tree goes on from to their level."""
    one = Curve(10.0, {2: 10.0, 6: 11.0}, {1: 0.0, 2: 0.5}, pass_ms={1: 4.0, 5: 4.0})
    assert cost_ms(chain(1), one) == pytest.approx(14.0) and cost_ms(chain(5), one) == pytest.approx(15.0)
    assert choose([[0.6]] * 5, one, [], False).plan == chain(5)
    assert cost_ms(StaticTree(((0,), (1,), (2,), (0, 0), (1, 0))), one) == pytest.approx(4.0 + 0.5 + 11.0)
    heads = Curve(10.0, {2: 10.0, 6: 11.0}, {1: 0.0}, pass_ms={1: 4.0, 5: 20.0})
    assert [cost_ms(chain(K), heads) for K in (1, 3, 5)] == pytest.approx([14.0, 4 + 8 + 10.5, 31.0])
    level = Curve(10.0, {2: 10.0, 6: 11.0}, {1: 4.0})
    assert cost_ms(chain(5), level) == pytest.approx(31.0) and choose([[0.6]] * 5, level, [], False).plan != chain(5)
