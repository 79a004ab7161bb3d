"""The learning rate is a pure function of the optimizer step."""

import math
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching import Plan
from recipes.schema import Train
from train.schedule import SCHEDULES, share_of_peak

NAMES = sorted(SCHEDULES)


def shares(name: str, total: int, warmup: int, floor: float, decay_share: float = 0.2) -> list[float]:
    return [share_of_peak(name, step, total, warmup, floor, decay_share) for step in range(total)]


def test_by_hand():
    """Warm-up 2 of 7 steps to the peak, floor 0.1. The cosine's midpoint is the mean of its ends, a line falls by 0.225
    a step; wsd with half of the 7 steps (round(3.5) = 4) falls from step 2, with a quarter (2) from step 4."""
    third = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert shares("cosine", 7, 2, 0.1) == pytest.approx([0.5, 1.0, 1.0, third, 0.55, 1.1 - third, 0.1])
    falling = [1.0, 0.775, 0.55, 0.325, 0.1]
    assert shares("linear", 7, 2, 0.1) == pytest.approx([0.5, 1.0, *falling])
    assert shares("wsd", 7, 2, 0.1, 0.5) == pytest.approx([0.5, 1.0, *falling])
    assert shares("wsd", 7, 2, 0.1, 0.25) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.55, 0.1])
    assert shares("wsd", 7, 0, 0.0, 0.0) == pytest.approx([1.0] * 6 + [0.0])


def test_recipe_offers_the_table():
    """`train.schedule` takes the names of the table, no other."""
    assert sorted(get_args(get_type_hints(Train)["schedule"])) == NAMES


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(NAMES), total=st.integers(1, 200), warmup=st.integers(0, 50), floor=st.floats(0, 1),
       decay_share=st.floats(0, 1))
def test_bounds_and_end(name, total, warmup, floor, decay_share):
    """The warm-up rises in equal parts to the peak, from there the rate only falls, without a jump behind the warm-up,
    and the last step is at the floor (case 39)."""
    found = shares(name, total, warmup, floor, decay_share)
    rising, after = found[:warmup], found[warmup:]
    assert all(0 < r <= 1 for r in rising) and all(0 <= r <= 1 for r in after)
    assert all(b - a == pytest.approx(1 / warmup) for a, b in zip(rising, rising[1:]))
    if after:
        assert after[0] == pytest.approx(1.0) and (not warmup or rising[-1] == 1.0)
        assert all(a >= b - 1e-12 for a, b in zip(after, after[1:]))
    if len(after) > 1:
        assert after[-1] == pytest.approx(floor, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(NAMES), rows=st.integers(1, 60), parts=st.sampled_from([(4, 1, 1), (1, 1, 4), (2, 2, 1)]))
def test_same_by_optimizer_step_for_any_split(name, rows, parts):
    """Four rows a step as 4, as 1 x 4 accumulated, or on two ranks: as many steps with the same rates (case 39)."""
    def rates(batch_rows: int, ranks: int, accumulation: int) -> list[float]:
        plan = Plan(tuple(range(rows)), (5,) * rows, batch_rows, ranks, accumulation, 0)
        return shares(name, plan.total_steps(3.0), 2, 0.05)

    assert rates(*parts) == rates(4, 1, 1)
    assert len(rates(*parts)) == 3 * math.ceil(rows / 4)
