"""Verification by exact enumeration: what is emitted is distributed as the target's own tokens, whatever the draft.

V = 4, K = 2. Probabilities of the target are multiples of 1/64 and those of the drafter of 1/8 (powers of two), so
that every acceptance threshold p/q is a multiple of 1/64: the 64 x 64 midpoints of a grid of uniforms integrate
exactly. The last uniform, from which `draw` takes the next token, is integrated by looking at what it is given.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sampling import Sampling
from drafters.base import Draft
from eval import verify as module
from eval.verify import residual, verify, verify_greedy, verify_sampled

V, GRID = 4, 64


def table(*weights: int) -> torch.Tensor:
    values = torch.tensor(weights, dtype=torch.float64)
    return values / values.sum()


class Toy:
    """p(x1), p(x2 | x1), p(x3 | x1, x2) of a target and q(x1), q(x2 | x1) of a drafter."""

    def __init__(self, seed: int, q_choices: list[torch.Tensor] | None) -> None:
        g = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> torch.Tensor:
            cuts = torch.randint(0, GRID + 1, (*shape, V - 1), generator=g).sort(-1).values
            edges = torch.cat([torch.zeros(*shape, 1), cuts, torch.full((*shape, 1), GRID)], -1)
            return edges.diff(dim=-1).double() / GRID  # zeros occur

        def proposals(*shape: int) -> torch.Tensor:
            picks = torch.randint(0, len(q_choices), shape, generator=g).flatten().tolist()
            return torch.stack([q_choices[i] for i in picks]).reshape(*shape, V)

        self.p1, self.p2, self.p3 = some(1)[0], some(V), some(V, V)
        self.q1, self.q2 = (proposals(1)[0], proposals(V)) if q_choices else (None, None)

    def joint(self) -> torch.Tensor:
        """The target's own distribution of three tokens."""
        return self.p1[:, None, None] * self.p2[:, :, None] * self.p3

    def completed(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """Distribution [V, V, V] of three tokens that begin with `prefix` and go on as the target does."""
        out = torch.zeros(V, V, V, dtype=torch.float64)
        a = prefix[0]
        if len(prefix) == 1:
            out[a] = self.p2[a][:, None] * self.p3[a]
        elif len(prefix) == 2:
            out[a, prefix[1]] = self.p3[a, prefix[1]]
        else:
            out[prefix] = 1.0
        return out


def emitted(toy: Toy, drafts: list[tuple[float, int, int]], with_q: bool, monkeypatch) -> torch.Tensor:
    """Exact joint [V, V, V] of the tokens emitted for drafts given as (probability, first, second)."""
    middle = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    uniforms = torch.cat([torch.cartesian_prod(middle, middle), torch.full((GRID**2, 1), 0.123)], dim=1)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: uniforms)
    given: list[torch.Tensor] = []

    def watched(probs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        assert torch.equal(points, uniforms[:, 2])  # a number that decided nothing before
        given.append(probs.clone())
        return torch.zeros(len(probs), dtype=torch.long)

    monkeypatch.setattr(module, "draw", watched)
    total = torch.zeros(V, V, V, dtype=torch.float64)
    for weight, x, y in drafts:
        p = torch.stack([toy.p1, toy.p2[x], toy.p3[x, y]]).expand(GRID**2, 3, V)
        q = torch.stack([toy.q1, toy.q2[x]]).expand(GRID**2, 2, V) if with_q else None
        verdict = verify_sampled(p, Draft(torch.tensor([[x, y]]).expand(GRID**2, 2), q), None)
        following = given.pop()
        for accepted in range(3):
            cells = verdict.accepted == accepted
            assert bool((verdict.tokens[cells, :accepted] == torch.tensor([x, y])[:accepted]).all())
            for token, mass in enumerate(following[cells].sum(0) / GRID**2):
                total += weight * mass * toy.completed((*(x, y)[:accepted], token))
    return total


Q = {
    "spread": [table(1, 1, 2, 4), table(4, 2, 1, 1), table(2, 4, 1, 1)],
    "one-hot": [table(1, 0, 0, 0), table(0, 0, 0, 1)],
    "covers a part": [table(0, 4, 4, 0), table(4, 0, 2, 2), table(0, 0, 8, 0)],
}


@pytest.mark.parametrize("kind", Q)
@pytest.mark.parametrize("seed", range(4))
def test_sampled_drafts_are_lossless(kind, seed, monkeypatch):
    """Integrated over all drafts and uniforms, the three tokens have exactly the target's joint distribution."""
    toy = Toy(seed, Q[kind])
    drafts = [(float(toy.q1[x] * toy.q2[x, y]), x, y) for x, y in product(range(V), repeat=2)
              if toy.q1[x] * toy.q2[x, y] > 0]
    torch.testing.assert_close(emitted(toy, drafts, True, monkeypatch), toy.joint(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_deterministic_drafts_are_lossless(seed, monkeypatch):
    """A draft without q is one-hot: any two tokens, likely, unlikely or impossible, leave the target's joint."""
    toy = Toy(seed, None)
    for x, y in product(range(V), repeat=2):
        torch.testing.assert_close(emitted(toy, [(1.0, x, y)], False, monkeypatch), toy.joint(), rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(p=st.lists(st.integers(0, 9), min_size=V, max_size=V).filter(any),
       q=st.lists(st.integers(0, 9), min_size=V, max_size=V).filter(any))
def test_acceptance_and_residual_add_up_to_p(p, q):
    """Leviathan et al.: min(p, q) + (1 - sum of it) * residual = p, for every p and q; disjoint and equal ones too."""
    target, draft = table(*p), table(*q)
    kept = torch.minimum(target, draft)
    rest = residual(target[None], torch.tensor([0]), draft[None])
    torch.testing.assert_close(kept + (1 - kept.sum()) * rest[0], target)


def test_disjoint_and_equal_drafts():
    """q disjoint from p is always rejected and leaves p; q = p is always accepted, on the largest uniform too."""
    p = torch.stack([table(1, 3, 0, 0)] * 2).expand(2000, 2, V)
    g = torch.Generator().manual_seed(0)
    disjoint = verify_sampled(p, Draft(torch.full((2000, 1), 2), table(0, 0, 1, 1).expand(2000, 1, V)), g)
    assert bool((disjoint.accepted == 0).all())
    assert torch.bincount(disjoint.tokens[:, 0], minlength=V)[1].item() == pytest.approx(1500, abs=100)
    equal = verify_sampled(p, Draft(torch.ones(2000, 1, dtype=torch.long), p[:, :1]), g)
    assert bool((equal.accepted == 1).all())


def test_rejected_with_nothing_left_draws_from_p():
    """Where rounding leaves p <= q everywhere, the residual is p itself, not 0/0."""
    p, q = table(1, 1, 2, 0)[None], table(1, 1, 2, 0)[None] * 1.0001
    rest = residual(p, torch.tensor([2]), q)
    torch.testing.assert_close(rest, p)


def test_residual_takes_each_rows_own_place(monkeypatch):
    """Rows that stopped at different places, with an accepted one between them, keep their own p and q."""
    q = torch.stack([torch.stack([table(8, 0, 0, 0), table(0, 8, 0, 0)]), torch.stack([table(0, 0, 8, 0)] * 2),
                     torch.stack([table(0, 0, 0, 8), table(4, 4, 0, 0)])])
    draft = Draft(torch.tensor([[0, 1], [2, 2], [3, 0]]), q)
    p = torch.stack([torch.stack([table(8, 0, 0, 0), table(1, 1, 1, 1), table(1, 0, 0, 0)]),
                     torch.stack([table(0, 0, 8, 0), table(0, 0, 8, 0), table(0, 1, 0, 1)]),
                     torch.stack([table(1, 1, 1, 1), table(1, 0, 0, 0), table(1, 0, 0, 0)])])
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full((3, 3), 0.9, dtype=torch.float64))
    given = []
    monkeypatch.setattr(module, "draw", lambda rest, points: given.append(rest) or torch.zeros(3, dtype=torch.long))
    verdict = verify_sampled(p, draft, None)
    assert verdict.accepted.tolist() == [1, 2, 0] and verdict.rejected.tolist() == [True, False, True]
    torch.testing.assert_close(given[0], torch.stack([table(1, 0, 1, 1), table(0, 1, 0, 1), table(1, 1, 1, 0)]))


def logits_for(rows: list[list[int]]) -> torch.Tensor:
    """Logits whose argmax at each place is the given token."""
    return torch.nn.functional.one_hot(torch.tensor(rows), 8).double()


@pytest.mark.parametrize("drafted,own,accepted,kept", [
    ([5, 6, 7], [5, 6, 7, 1], 3, [5, 6, 7, 1]),
    ([5, 6, 7], [5, 6, 2, 1], 2, [5, 6, 2]),
    ([5, 6, 7], [5, 3, 7, 1], 1, [5, 3]),
    ([5, 6, 7], [4, 6, 7, 1], 0, [4]),  # what agrees behind a difference does not count
])
def test_greedy_by_hand(drafted, own, accepted, kept):
    """Accept while the draft is the target's argmax, then the target's own token."""
    verdict = verify_greedy(logits_for([own]), Draft(torch.tensor([drafted])))
    assert verdict.accepted.tolist() == [accepted] and verdict.tokens[0, : accepted + 1].tolist() == kept
    again = verify(logits_for([own]), Draft(torch.tensor([drafted])), Sampling())
    assert torch.equal(again.tokens, verdict.tokens)


def test_greedy_rows_are_independent():
    """A batch is judged row by row."""
    verdict = verify_greedy(logits_for([[1, 2, 3], [1, 2, 3], [1, 2, 3]]),
                            Draft(torch.tensor([[1, 2], [1, 0], [0, 2]])))
    assert verdict.accepted.tolist() == [2, 1, 0]


@pytest.mark.parametrize("sampling,expected", [
    (Sampling(1.0, 2, 1.0), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(1.0, 0, 0.7), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(1.0, 0, 0.8), [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
    (Sampling(2.0, 2, 1.0), [0.5**0.5 / (0.5**0.5 + 0.5), 0.5 / (0.5**0.5 + 0.5), 0, 0]),
])
def test_warpers_apply_to_p(sampling, expected, monkeypatch):
    """Temperature, top-k and top-p act on the target's distribution before any comparison with the draft."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log().expand(1, 2, V)
    seen = []
    monkeypatch.setattr(module, "verify_sampled", lambda p, *rest: seen.append(p))
    verify(logits, Draft(torch.tensor([[3]])), sampling)
    torch.testing.assert_close(seen[0][0, 0], torch.tensor(expected, dtype=torch.float64))


def test_a_token_outside_the_nucleus_is_never_emitted():
    """A draft outside the target's top-p is rejected although the unwarped target could give it."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log().expand(500, 2, V)
    for q in (None, table(0, 0, 4, 4).expand(500, 1, V)):
        verdict = verify(logits, Draft(torch.full((500, 1), 3), q), Sampling(1.0, 0, 0.7),
                         torch.Generator().manual_seed(0))
        assert bool((verdict.accepted == 0).all()) and set(verdict.tokens[:, 0].tolist()) == {0, 1}
