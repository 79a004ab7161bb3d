"""The learning rate is a pure function of the optimizer step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching import Plan
from train.schedule import cosine


def test_by_hand():
    """Warm-up 2 of 6 steps, peak 1, floor 0.1: 0.5, 1, then a cosine whose midpoint is the mean of its ends."""
    rates = [cosine(step, 7, 2, 1.0, 0.1) for step in range(7)]
    third = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rates == pytest.approx([0.5, 1.0, 1.0, third, 0.55, 1.1 - third, 0.1])


@settings(max_examples=50, deadline=None)
@given(total=st.integers(1, 200), warmup=st.integers(0, 50), share=st.floats(0, 1))
def test_bounds_and_end(total, warmup, share):
    """Never above the peak; from the warm-up on it only falls and it ends at the floor at the last step (case 39)."""
    rates = [cosine(step, total, warmup, 2.0, share) for step in range(total)]
    after = rates[warmup:]
    assert all(0 < r <= 2.0 + 1e-12 for r in rates[:warmup]) and all(r <= 2.0 + 1e-12 for r in after)
    assert all(a >= b - 1e-12 for a, b in zip(after, after[1:]))
    if len(after) > 1:
        assert after[-1] == pytest.approx(2.0 * share)


def test_same_by_optimizer_step_for_any_accumulation():
    """Accumulation 1 with four rows, 4 with one, 2 ranks of two: the same steps and rates (case 39)."""
    plans = [Plan(tuple(range(19)), (5,) * 19, rows, ranks, accumulation, 0)
             for rows, ranks, accumulation in ((4, 1, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2))]
    totals = {plan.total_steps(3.0) for plan in plans}
    assert totals == {15}
    assert cosine(14, 15, 5, 1.0, 0.05) == pytest.approx(0.05)
