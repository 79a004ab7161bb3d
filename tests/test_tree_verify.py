"""Verification of trees by exact enumeration: several tokens jointly, whatever was drafted.

V = 3 or 4. Every uniform decides one token by a threshold, which is found by bisection; the last one, from which the
next token is drawn, is integrated by looking at the distribution that `draw` is given.
"""

from itertools import permutations, product

import pytest
import torch

from data.sampling import Sampling
from drafters.tree import Draft
from eval import verify as module
from eval.verify import verify, verify_greedy, verify_sampled

PARENTS = [0, 0, 1, 1]  # two guesses, and two behind the first of them
EPS = 2.0**-50


def outcomes(p: torch.Tensor, draft: Draft, monkeypatch) -> list[tuple[torch.Tensor, module.Verdict, torch.Tensor]]:
    """All that can happen to drafts [B, N]: (probability [B], verdict, distribution [B, V] of the next token)."""
    B, N = draft.tokens.shape
    given: list[torch.Tensor] = []
    monkeypatch.setattr(module, "draw", lambda rest, points: given.append(rest.clone()) or rest.argmax(-1))

    def judged(uniforms: torch.Tensor) -> module.Verdict:
        monkeypatch.setattr(torch, "rand", lambda *shape, **options: uniforms)
        return verify_sampled(p, draft, None)

    def went(verdict: module.Verdict, i: int) -> torch.Tensor:
        inside = torch.arange(verdict.path.shape[1]) <= verdict.accepted[:, None]
        return ((verdict.path == i + 1) & inside).any(1)

    def threshold(uniforms: torch.Tensor, i: int) -> torch.Tensor:
        low, high = torch.zeros(B, dtype=torch.float64), torch.ones(B, dtype=torch.float64)
        for _ in range(46):
            uniforms[:, i] = (low + high) / 2
            accepted = went(judged(uniforms), i)
            low, high = torch.where(accepted, uniforms[:, i], low), torch.where(accepted, high, uniforms[:, i])
        return low.round(decimals=12)

    found = []

    def branch(uniforms: torch.Tensor, weight: torch.Tensor, i: int) -> None:
        if not bool((weight > 0).any()):
            return
        if i == N:
            verdict = judged(uniforms)
            found.append((weight, verdict, given[-1]))
            return
        chance = threshold(uniforms.clone(), i)
        for value, share in ((0.0, chance), (1 - EPS, 1 - chance)):
            chosen = uniforms.clone()
            chosen[:, i] = value
            branch(chosen, weight * share, i + 1)

    branch(torch.full((B, N + 1), 1 - EPS, dtype=torch.float64), torch.ones(B, dtype=torch.float64), 0)
    return found


class Toy:
    """A target's p(x1), p(x2 | x1), p(x3 | x1, x2), zeros among them."""

    def __init__(self, V: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> torch.Tensor:
            values = torch.rand(*shape, V, generator=g, dtype=torch.float64)
            values[torch.rand(*shape, V, generator=g) < 0.25] = 0.0
            values[..., 0] += 1e-3
            return values / values.sum(-1, keepdim=True)

        self.V, self.p1, self.p2, self.p3 = V, some(1)[0], some(V), some(V, V)

    def joint(self) -> torch.Tensor:
        return self.p1[:, None, None] * self.p2[:, :, None] * self.p3

    def at_places(self, tokens: torch.Tensor) -> torch.Tensor:
        """p [B, 5, V] behind the last token and the drafted ones."""
        a, b, c, d = tokens.unbind(1)
        return torch.stack([self.p1.expand(len(a), -1), self.p2[a], self.p2[b], self.p3[a, c], self.p3[a, d]], dim=1)

    def emitted(self, draft: Draft, monkeypatch) -> torch.Tensor:
        """Exact joint [B, V, V, V] of the first three tokens for each draft, gone on as the target does."""
        B, V = len(draft.tokens), self.V
        total = torch.zeros(B, V, V, V, dtype=torch.float64)
        for weight, verdict, rest in outcomes(self.at_places(draft.tokens), draft, monkeypatch):
            for b in range(B):
                n, tokens = int(verdict.accepted[b]), verdict.tokens[b].tolist()
                after = rest[b] * weight[b]  # [V] mass of the next token
                if n == 0:
                    total[b] += after[:, None, None] * self.p2[:, :, None] * self.p3
                elif n == 1:
                    total[b, tokens[0]] += after[:, None] * self.p3[tokens[0]]
                else:
                    total[b, tokens[0], tokens[1]] += after
        return total


def one_hot(V: int, i: int) -> torch.Tensor:
    return torch.eye(V, dtype=torch.float64)[i]


def proposals(kind: str, toy: Toy) -> tuple[torch.Tensor, torch.Tensor]:
    """q(x1) [V] and q(x2 | x1) [V, V] of an adversarial drafter."""
    V = toy.V
    if kind == "p = q":
        return toy.p1, toy.p2
    if kind == "one-hot":
        return one_hot(V, 1), torch.stack([one_hot(V, (i + 1) % V) for i in range(V)])
    if kind == "disjoint":  # from p where that is possible: mass only where p has least
        least = [one_hot(V, int(p.argmin())) + one_hot(V, int((p + one_hot(V, int(p.argmin()))).argmin()))
                 for p in (toy.p1, *toy.p2)]
        return least[0] / 2, torch.stack(least[1:]) / 2
    skew = torch.arange(1.0, V + 1, dtype=torch.float64)
    return skew / skew.sum(), torch.stack([skew.roll(i) / skew.sum() for i in range(V)])


@pytest.mark.parametrize("kind,V,seed", [("p = q", 3, 0), ("one-hot", 3, 1), ("disjoint", 3, 0), ("disjoint", 4, 1),
                                         ("skewed", 4, 1)])
def test_drawn_trees_are_lossless(kind, V, seed, monkeypatch):
    """Siblings drawn without replacement: over all drafts, three tokens have exactly the target's joint."""
    toy = Toy(V, seed)
    q1, q2 = proposals(kind, toy)
    pairs = list(permutations(range(V), 2))
    weights, drafts, real = [], [], []

    def chance(q: torch.Tensor, x: int, y: int) -> tuple[float, bool]:
        """Of drawing x and then y; where nothing is left to draw, y is none and taken as the first that is free."""
        left = 1 - float(q[x])
        if left < 1e-12:
            return float(q[x]) * (y == min(set(range(V)) - {x})), False
        return float(q[x]) * float(q[y]) / left, True

    for (a, b), (c, d) in product(pairs, pairs):
        (w1, second), (w2, fourth) = chance(q1, a, b), chance(q2[a], c, d)
        if w1 * w2 > 0:
            weights.append(w1 * w2)
            drafts.append([a, b, c, d])
            real.append([True, second, True, fourth])
    tokens = torch.tensor(drafts)
    q = torch.stack([q1.expand(len(tokens), -1), q2[tokens[:, 0]]], dim=1)
    draft = Draft(tokens, q, torch.tensor(PARENTS).expand_as(tokens), torch.tensor(real))
    total = torch.einsum("b,bxyz->xyz", torch.tensor(weights, dtype=torch.float64), toy.emitted(draft, monkeypatch))
    assert sum(weights) == pytest.approx(1)
    torch.testing.assert_close(total, toy.joint(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", [0])
def test_deterministic_trees_are_lossless(seed, monkeypatch):
    """Any tree of distinct siblings, likely, unlikely or impossible ones, leaves the target's joint by itself."""
    toy = Toy(3, seed + 10)
    tokens = torch.tensor([[*one, *two] for one, two in product(permutations(range(3), 2), repeat=2)])
    draft = Draft(tokens, None, torch.tensor(PARENTS).expand_as(tokens))
    emitted = toy.emitted(draft, monkeypatch)
    torch.testing.assert_close(emitted, toy.joint().expand_as(emitted), rtol=0, atol=1e-9)


def test_forgetting_the_first_sibling_would_be_found(monkeypatch):
    """The enumeration can say no: with q not renormalised for the second sibling the joint differs."""
    monkeypatch.setattr(module, "without", lambda q, x: q)
    with pytest.raises(AssertionError):
        test_drawn_trees_are_lossless("skewed", 4, 1, monkeypatch)


def test_a_chain_judged_as_a_tree_is_the_same():
    """The same uniforms accept the same tokens whether the chain's parents are named or not."""
    g = torch.Generator().manual_seed(3)
    p = torch.rand(50, 4, 6, generator=g, dtype=torch.float64).softmax(-1)
    q = torch.rand(50, 3, 6, generator=g, dtype=torch.float64).softmax(-1)
    tokens = torch.randint(0, 6, (50, 3), generator=g)
    for spread in (q, None):
        chain, tree = (verify_sampled(p, Draft(tokens, spread, parents), torch.Generator().manual_seed(5))
                       for parents in (None, torch.arange(3).expand(50, 3)))
        assert torch.equal(chain.accepted, tree.accepted) and torch.equal(chain.rejected, tree.rejected)
        kept = torch.arange(4) <= chain.accepted[:, None]
        assert torch.equal(chain.tokens[kept], tree.tokens[kept])
        assert torch.equal(tree.path[kept], torch.arange(4).expand(50, 4)[kept])
        assert 0 < int(chain.accepted.sum()) < 150


def test_greedy_tree_by_hand():
    """The second guess is right and its child too; what is right elsewhere does not count."""
    own = torch.tensor([[5, 1, 6, 1, 7, 1, 2]])  # argmax behind each place
    logits = torch.nn.functional.one_hot(own, 8).double()
    parents = torch.tensor([[0, 0, 1, 2, 4, 4]])
    draft = Draft(torch.tensor([[4, 5, 1, 6, 7, 3]]), None, parents)
    verdict = verify_greedy(logits, draft)  # 5 (place 2), 6 (place 4), 7 (place 5), then 1
    assert verdict.accepted.tolist() == [3] and verdict.path.tolist() == [[0, 2, 4, 5]]
    assert verdict.tokens.tolist() == [[5, 6, 7, 1]] and verdict.rejected.tolist() == [False]
    masked = Draft(draft.tokens, None, parents, torch.tensor([[True, True, True, False, False, False]]))
    verdict = verify_greedy(logits, masked)
    assert verdict.accepted.tolist() == [1] and verdict.tokens[:, :2].tolist() == [[5, 6]]
    assert verdict.rejected.tolist() == [False]  # nothing was drafted behind it


def test_no_draft_gives_the_targets_own_token():
    """A block of the last token alone: accepted nothing, rejected nothing."""
    logits = torch.nn.functional.one_hot(torch.tensor([[5], [2]]), 8).double()
    none = Draft(torch.zeros(2, 0, dtype=torch.long))
    for sampling in (Sampling(), Sampling(1e-3)):
        verdict = verify(logits, none, sampling, torch.Generator().manual_seed(0))
        assert verdict.tokens.tolist() == [[5], [2]] and verdict.accepted.tolist() == [0, 0]
        assert verdict.rejected.tolist() == [False, False]


def test_repetition_penalty_depends_on_each_places_path():
    """Every place is penalised for the text before it and the drafted tokens of its own path, no others."""
    seen = torch.zeros(1, 6, dtype=torch.bool)
    seen[0, 4] = True
    draft = Draft(torch.tensor([[0, 1, 2, 3]]), None, torch.tensor([[0, 0, 1, 2]]))
    found = module.along_paths(seen, draft, module.Topology.of(draft))
    assert [set(row.nonzero()[:, 0].tolist()) for row in found[0]] == [{4}, {4, 0}, {4, 1}, {4, 0, 2}, {4, 1, 3}]
