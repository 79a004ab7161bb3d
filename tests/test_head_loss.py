"""The head's loss in parts against the plain formula, and how steps are cut into parts."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.head_loss import DraftHead
from drafters.unrolled import cut, full_argmax, full_logsumexp, row_parts


@pytest.mark.parametrize("trains_head", [True, False])
@pytest.mark.parametrize("sizes", [[7], [3, 4], [1] * 7])
def test_value_and_gradients_are_those_of_the_plain_formula(trains_head, sizes):
    """A nonlinear loss with weights: the same value and gradients whatever the parts, head frozen or not, a factor on
    the loss included."""
    g = torch.Generator().manual_seed(0)
    head = DraftHead(5, 11).double()
    head.weight.requires_grad_(trains_head)
    states = torch.randn(7, 5, generator=g, dtype=torch.float64, requires_grad=True)
    label, weight = torch.randint(0, 11, (7,), generator=g), torch.rand(7, generator=g, dtype=torch.float64)

    def judge(logits, part):
        return (weight[part] * F.cross_entropy(logits, label[part], reduction="none")).sum()

    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [slice(end - size, end) for end, size in zip(ends, sizes)]
    inputs = [states, head.weight] if trains_head else [states]
    loss = head(states, judge, parts)
    expected = judge(F.linear(states, head.weight), slice(None))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for a, b in zip(torch.autograd.grad(3 * loss, inputs), torch.autograd.grad(3 * expected, inputs)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_no_more_than_a_part_of_the_logits_exists():
    """Case 49: the judge meets the parts in order, each alone; nothing of their size is kept for the backward pass."""
    head, seen, kept = DraftHead(4, 1000), [], []
    states = torch.randn(60, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = head(states, lambda logits, part: seen.append((len(logits), part.start)) or logits.sum(),
                    [slice(0, 20), slice(20, 40), slice(40, 60)])
    assert seen == [(20, 0), (20, 20), (20, 40)] and max(n for n in kept if n != 4000) <= 20 * 1000
    loss.backward()
    assert states.grad.shape == (60, 4) and head.weight.grad.shape == (1000, 4)


def test_without_gradients_none_is_computed():
    """In evaluation the loss alone is worked."""
    head = DraftHead(4, 9)
    with torch.no_grad():
        loss = head(torch.randn(3, 4), lambda logits, part: logits.sum() * 0 + logits.requires_grad, [slice(0, 3)])
    assert loss.item() == 0.0


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 9))
def test_parts_keep_chains_whole(lengths, most):
    """Every step once, in order; no chain in two parts; a part above `most` is a single chain."""
    chain = torch.tensor([7 * i for i, n in enumerate(lengths) for _ in range(n)], dtype=torch.long)
    parts = cut(chain, most)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(chain)))
    for part in parts:
        held = set(chain[part].tolist())
        assert held.isdisjoint(chain[: part.start].tolist()) and held.isdisjoint(chain[part.stop :].tolist())
        assert part.stop - part.start <= most or len(held) == 1


def test_the_whole_vocabulary_is_worked_in_parts(monkeypatch):
    """Log-sum-exp and first choice over all V logits, three rows at a time."""
    monkeypatch.setattr("drafters.unrolled.LOGITS", {"cpu": 3 * 4 * 20})
    final, head = torch.randn(8, 4), torch.randn(20, 4)
    assert [p.stop - p.start for p in row_parts(8, 20, final.device)] == [3, 3, 2]
    torch.testing.assert_close(full_logsumexp(final, head), (final @ head.T).logsumexp(-1))
    assert full_argmax(final, head).tolist() == (final @ head.T).argmax(-1).tolist()
    assert full_logsumexp(final[:0], head).shape == full_argmax(final[:0], head).shape == (0,)
