"""The unrolled attention in parts against one plain softmax over every column."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.chain_attention import Part, chain_attention, parts_of

G, NKV, HD = 2, 2, 4


def plain(queries, keys, values, own_keys, own_values, starts, at):
    """The definition, one query at a time."""
    out = torch.zeros_like(queries)
    B, nkv, g, P, _ = queries.shape
    rows = []
    for b in range(B):
        for head in range(nkv):
            for group in range(g):
                for p in range(P):
                    seen = slice(int(starts[b, p]), int(at[b, p]) + 1)
                    k = torch.cat([keys[b, head, seen], own_keys[:, b, head, p]])
                    v = torch.cat([values[b, head, seen], own_values[:, b, head, p]])
                    rows.append((k @ queries[b, head, group, p]).softmax(0) @ v)
    return torch.stack(rows).reshape(out.shape)


def case(S: int, at: list[list[int]], starts: list[list[int]], own: int, seed: int, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    B, P = len(at), len(at[0])
    shapes = [(B, NKV, G, P, HD), (B, NKV, S, HD), (B, NKV, S, HD), (own, B, NKV, P, HD), (own, B, NKV, P, HD)]
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return tensors, torch.tensor(starts), torch.tensor(at)


@st.composite
def cases(draw):
    """Packed conversations of 1..6 tokens, two rows, chains anywhere, 0..3 own keys, parts of 1..4 chains."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    S, P = sum(lengths), draw(st.integers(1, 7))
    begins = [b for b, n in zip([sum(lengths[:i]) for i in range(len(lengths))], lengths) for _ in range(n)]
    at = [sorted(draw(st.lists(st.integers(0, S - 1), min_size=P, max_size=P))) for _ in range(2)]
    starts = [[begins[t] for t in row] for row in at]
    return S, at, starts, draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 99))


@settings(max_examples=50, deadline=None)
@given(cases())
def test_outputs_and_gradients_are_those_of_the_definition(drawn):
    """Cases 49, 67: any packing, any chains, any parts, in float64; every input's gradient too."""
    S, at, starts, own, chains, seed = drawn
    tensors, starts, at = case(S, at, starts, own, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # sums are float32 on purpose
        out = chain_attention(*tensors, starts, at, parts_of(starts, at, chains))
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ours = torch.autograd.grad((out * weight).sum(), tensors)
    expected = plain(*tensors, starts, at)
    wanted = torch.autograd.grad((expected * weight).sum(), tensors, allow_unused=True)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(ours, wanted):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_other_precisions(dtype, tolerance):
    """Products in the operands' dtype, sums in float32: within the dtype's rounding of the float64 result."""
    at, starts = [list(range(3, 60, 2))], [[0] * 29]
    tensors, starts, at = case(60, at, starts, 2, 1, dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    out, expected = chain_attention(*tensors, starts, at, parts_of(starts, at, 8)), plain(*exact, starts, at)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(out.float().sum(), tensors)
    for a, b in zip(ours, torch.autograd.grad(expected.sum(), exact)):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=10 * tolerance, atol=10 * tolerance)


def test_large_scores_do_not_overflow():
    """Scores far beyond exp's range: the softmax of their differences."""
    tensors, starts, at = case(6, [[2, 5]], [[0, 3]], 1, 3)
    with torch.no_grad():
        tensors[0].mul_(1e4)
    out = chain_attention(*tensors, starts, at, parts_of(starts, at, 2))
    torch.testing.assert_close(out, plain(*tensors, starts, at), rtol=1e-6, atol=1e-6)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), tensors))


def test_parts_by_hand():
    """Chains of two packed conversations, at most two a part: each with the columns that its chains see."""
    starts, at = torch.tensor([[0, 0, 4, 4, 4]]), torch.tensor([[1, 3, 4, 6, 7]])
    assert parts_of(starts, at, 2) == [Part(0, 0, 2, 0, 4), Part(0, 2, 4, 4, 7), Part(0, 4, 5, 4, 8)]


def test_nothing_is_kept_of_the_size_of_chains_times_sequence():
    """Case 49: what autograd holds grows with the chains, not with chains times columns."""
    def held(S: int) -> int:
        sizes: list[int] = []
        tensors, starts, at = case(S, [list(range(S))], [[0] * S], 1, 0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            chain_attention(*tensors, starts, at, parts_of(starts, at, 16))
        return sum(sizes)

    assert held(128) == 2 * held(64)
