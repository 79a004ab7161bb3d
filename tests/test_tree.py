"""Draft trees: their shapes by hand, how they grow, and what their tokens see."""

import pytest
import torch

from drafters.growth import growth, levels_of
from drafters.tree import Draft, DynamicTree, StaticTree, Topology, chain

IDS = torch.tensor([3, 5, 8, 9])  # target ids of a draft vocabulary of four, of V = 10


def test_chain_is_a_tree_of_width_one():
    plan = chain(3)
    assert plan.paths == ((0,), (0, 0), (0, 0, 0)) and plan.narrow and (plan.depth, plan.nodes, plan.room) == (3, 3, 3)
    assert StaticTree(((0,),)) == chain(1)


@pytest.mark.parametrize("paths", [(), ((),), ((0,), (0,)), ((0, 0),), ((1,),), ((0,), (2,)), ((0,), (-1,))])
def test_a_tree_has_every_parent_and_smaller_sibling(paths):
    """A tree with a gap could not be grown, or would waste draws."""
    with pytest.raises(ValueError):
        StaticTree(paths)


def test_shapes_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="only a chain stops early"):
        StaticTree(((0,), (1,)), stop=0.5)
    with pytest.raises(ValueError, match="at least 1"):
        DynamicTree(3, 0, 8)
    with pytest.raises(ValueError, match="would bias drawn drafts"):
        growth(DynamicTree(2, 2, 3), 1, IDS, 10, sample=lambda q: q.argmax(-1))
    with pytest.raises(ValueError, match="needs a draft vocabulary of as many"):
        growth(StaticTree(tuple((i,) for i in range(5))), 1, IDS, 10).take(torch.zeros(1, 1, 4))


TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0)))


def test_levels_by_hand():
    first, second, third = levels_of(TREE)
    assert (first.parents, first.ranks, first.places, first.going, first.going_places) == ([0, 0], [0, 1], [0, 0],
                                                                                           [0, 1], [1, 2])
    assert (second.parents, second.ranks, second.places) == ([0, 0, 1], [0, 1, 0], [1, 1, 2])
    assert (second.going, second.going_places) == ([2], [5])
    assert (third.parents, third.ranks, third.places, third.going) == ([0], [0], [5], [])


def test_static_tree_takes_ranks():
    """Each token is the guess of its rank behind its parent, in target ids."""
    grown = growth(TREE, 1, IDS, 10)
    assert not grown.take(torch.tensor([[[1.0, 4, 3, 2]]]))  # 5, 8
    assert grown.frontier.tolist() == [[5, 8]] and grown.follows.tolist() == [[0, 0]]
    assert not grown.take(torch.tensor([[[9.0, 0, 1, 8], [0, 0, 7, 1]]]))  # behind 5: 3, 9; behind 8: 8
    assert grown.frontier.tolist() == [[8]] and grown.follows.tolist() == [[1]]
    assert grown.take(torch.tensor([[[0.0, 0, 0, 1]]]))  # 9
    draft = grown.draft()
    assert draft.tokens.tolist() == [[5, 8, 3, 9, 8, 9]] and draft.parents.tolist() == [[0, 0, 1, 1, 2, 5]]
    assert draft.q is None and draft.real is None and draft.counts() == [6]


def test_topology_by_hand():
    draft = Draft(torch.zeros(1, 6, dtype=torch.long), parents=torch.tensor([[0, 0, 1, 1, 2, 5]]))
    shape = Topology.of(draft)
    paths = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {0, 2, 5, 6}]
    assert [set(row.nonzero()[:, 0].tolist()) for row in shape.sees[0]] == paths
    assert shape.depth.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    straight = Topology.of(Draft(torch.zeros(2, 3, dtype=torch.long)))
    again = Topology.of(Draft(torch.zeros(1, 3, dtype=torch.long), parents=torch.tensor([[0, 1, 2]])))
    assert torch.equal(straight.sees, again.sees) and torch.equal(straight.depth, again.depth)


def grow_all(plan, table: torch.Tensor, rows: int = 1, sample=None) -> Draft:
    """The draft where log-probabilities behind a token are table[token] [V, D], and table[0] behind the last one."""
    grown = growth(plan, rows, IDS, 10, sample)
    logits = table[torch.zeros(rows, 1, dtype=torch.long)]
    while not grown.take(logits):
        logits = table[grown.frontier]
    return grown.draft()


def slow_dynamic(plan: DynamicTree, table: torch.Tensor) -> set[tuple[int, ...]]:
    """Paths of target ids of the nodes that are kept, by a plain search over lists."""
    logp = table.log_softmax(-1)
    frontier, nodes = [((), 0.0)], []
    for _ in range(plan.depth):
        level = []
        for path, score in frontier:
            behind = logp[path[-1] if path else 0]
            for d in behind.argsort(descending=True)[: plan.top_k].tolist():
                level.append(((*path, int(IDS[d])), score + float(behind[d])))
        nodes += level
        frontier = sorted(level, key=lambda node: -node[1])[: plan.top_k]
    return {path for path, _ in sorted(nodes, key=lambda node: -node[1])[: plan.total]}


def paths_of(draft: Draft, row: int) -> list[tuple[int, ...]]:
    paths = {0: ()}
    for i, (token, parent) in enumerate(zip(draft.tokens[row].tolist(), draft.parents[row].tolist())):
        assert parent <= i  # a parent stands before its children
        paths[i + 1] = (*paths[parent], token)
    return [paths[i + 1] for i in range(len(paths) - 1)]


@pytest.mark.parametrize("plan", [DynamicTree(3, 2, 5), DynamicTree(4, 3, 12), DynamicTree(2, 4, 99),
                                  DynamicTree(1, 3, 2), DynamicTree(3, 9, 7)])
def test_dynamic_tree_keeps_the_most_probable_nodes(plan):
    """EAGLE-2: expansion by cumulative probability, then the best of all nodes; each kept node has its parent."""
    for seed in range(4):
        table = torch.randn(10, 4, generator=torch.Generator().manual_seed(seed)) * 2
        draft = grow_all(plan, table, rows=2)
        for row in range(2):
            assert set(paths_of(draft, row)) == slow_dynamic(plan, table)
        assert draft.tokens.shape[1] == min(plan.total, len(slow_dynamic(plan, table))) <= plan.nodes


def test_certain_tokens_keep_their_parents():
    """A child of probability one is as probable as its parent: the parent is kept first."""
    table = torch.full((10, 4), -1000.0)
    table[:, 1] = 0.0  # 5 follows everything, surely
    for total in (1, 2, 3):
        draft = grow_all(DynamicTree(4, 3, total), table)
        assert set(paths_of(draft, 0)) == {(5,) * (k + 1) for k in range(total)}


def test_draws_are_without_replacement_and_named():
    """The second sibling is drawn from q without the first, renormalised; q is kept for verification."""
    given, picks = [], iter([1, 0, 2, 0, 1])

    def sample(q):
        given.append(q.clone())
        return IDS[[next(picks)]]

    table = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(10, 4)
    draft = grow_all(StaticTree(((0,), (1,), (0, 0), (0, 1))), table, sample=sample)
    assert draft.tokens.tolist() == [[5, 3, 8, 3]]
    wide = [q[0, IDS].tolist() for q in given]
    assert wide == [pytest.approx(q) for q in ([0.5, 0.25, 0.125, 0.125], [2 / 3, 0, 1 / 6, 1 / 6],
                                               [0.5, 0.25, 0.125, 0.125], [4 / 7, 2 / 7, 0, 1 / 7])]
    assert draft.q.shape == (1, 2, 10) and bool(draft.real.all())
    torch.testing.assert_close(draft.q[0], torch.zeros(2, 10).index_add_(1, IDS, table[:2].exp()))


def test_a_distribution_of_one_token_has_one_draw():
    """Where q holds fewer tokens than siblings, the rest are none, and so is what would follow them."""
    table = torch.full((10, 4), -torch.inf)
    table[:, 2] = 0.0
    draft = grow_all(StaticTree(((0,), (1,), (1, 0), (0, 0))), table, sample=lambda q: q.argmax(-1))
    assert draft.real.tolist() == [[True, False, True, False]] and draft.counts() == [2]


@pytest.mark.parametrize("stop,kept", [(0.0, 4), (0.2, 4), (0.45, 2), (0.95, 1)])
def test_a_chain_stops_behind_an_unsure_token(stop, kept):
    """The token that falls below the threshold is still drafted, as transformers' assisted generation does."""
    chances = iter([0.9, 0.4, 0.5, 0.3])
    grown = growth(chain(4, stop), 1, IDS, 10)
    done = False
    while not done:
        top = next(chances)
        done = grown.take(torch.tensor([[[top, *[(1 - top) / 3] * 3]]]).log())
    assert grown.draft().counts() == [kept]


def test_rows_stop_apart():
    """A row that stopped proposes no more tokens while another goes on; both draw what they would alone."""
    grown = growth(chain(3, 0.5), 2, IDS, 10)
    sure, unsure = [0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]
    for pair in ([unsure, sure], [sure, sure], [sure, unsure]):
        grown.take(torch.tensor(pair)[:, None].log())
    assert grown.draft().real.tolist() == [[True, False, False], [True, True, True]]
