"""Which rows a step trains on, and how they are padded."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching import Plan, collate, epoch_order
from data.store import TraceRow
from drafters.base import loss_mask

plans = st.builds(Plan, rows=st.just(()), lengths=st.just(()), batch_rows=st.integers(1, 3), ranks=st.integers(1, 4),
                  accumulation=st.integers(1, 3), seed=st.integers(0, 5), mix=st.integers(0, 3))


def filled(plan: Plan, count: int) -> Plan:
    """The same split over `count` rows whose indices are not 0..count-1."""
    return Plan(tuple(range(100, 100 + count)), tuple((i * 7) % 11 + 2 for i in range(count)), plan.batch_rows,
                plan.ranks, plan.accumulation, plan.seed, tuple(f"s{i * i // 9}" for i in range(count)), plan.mix)


def rows_of(plan: Plan, step: int) -> list[int]:
    return sorted(i for rank in range(plan.ranks) for micro in plan.micro_batches(step, rank) for i in micro)


@settings(max_examples=60, deadline=None)
@given(plan=plans, count=st.integers(1, 20))
def test_every_row_once_an_epoch(plan, count):
    """On any ranks, batch, accumulation and order every row is trained on exactly once in each epoch (case 66)."""
    plan = filled(plan, count)
    for epoch in range(2):
        first = epoch * plan.steps_per_epoch
        seen = [i for step in range(first, first + plan.steps_per_epoch) for i in rows_of(plan, step)]
        assert sorted(seen) == list(plan.rows)


@settings(max_examples=60, deadline=None)
@given(plan=plans, count=st.integers(1, 20), step=st.integers(0, 30))
def test_split_is_pure_and_fair(plan, count, step):
    """A step's rows depend on seed and step only, no micro-batch is above its size, and none is short by two."""
    plan = filled(plan, count)
    for rank in range(plan.ranks):
        micro = plan.micro_batches(step, rank)
        assert micro == filled(plan, count).micro_batches(step, rank)
        assert len(micro) == plan.accumulation and all(len(m) <= plan.batch_rows for m in micro)
    sizes = [len(m) for rank in range(plan.ranks) for m in plan.micro_batches(step, rank)]
    assert max(sizes) - min(sizes) <= 1


def test_global_batch_does_not_depend_on_the_split():
    """4 rows a step as 4x1, 1x4 accumulated, 2 ranks x 2: the same rows at every step (cases 38, 39)."""
    whole, accumulated, ranks = (Plan(tuple(range(13)), tuple(range(2, 15)), b, r, a, 3)
                                 for b, r, a in ((4, 1, 1), (1, 1, 4), (2, 2, 1)))
    for step in range(8):
        assert rows_of(whole, step) == rows_of(accumulated, step) == rows_of(ranks, step)
    assert [rows_of(whole, s) for s in range(4)] != [rows_of(whole, s) for s in range(4, 8)]  # shuffled anew


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8), mix=st.integers(1, 9), seed=st.integers(0, 99))
def test_shards_are_read_a_window_at_a_time(sizes, mix, seed):
    """The order is one run of rows after another, each holding `mix` whole shards and nothing else."""
    shards = [s for s, size in enumerate(sizes) for _ in range(size)]
    order = epoch_order(len(shards), shards, mix, seed)
    assert sorted(order) == list(range(len(shards)))
    appearing, begin = list(dict.fromkeys(shards[i] for i in order)), 0
    for w in range(0, len(appearing), mix):
        window = set(appearing[w : w + mix])
        end = begin + sum(sizes[s] for s in window)
        assert {shards[i] for i in order[begin:end]} == window
        begin = end


def test_order_within_and_between_windows_is_random_and_the_seeds():
    """Rows of a window are mixed, windows change from seed to seed, the same seed gives the same order."""
    shards = [i // 50 for i in range(400)]
    orders = [epoch_order(400, shards, 2, seed) for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    first = orders[0][:100]
    assert {shards[i] for i in orders[1][:100]} != {shards[i] for i in first}
    assert 30 < sum(shards[a] != shards[b] for a, b in zip(first, first[1:])) < 70  # half, where well mixed


def test_no_window_is_the_global_shuffle():
    """Without `mix` the order is torch.randperm of the seed, as in every run before the option."""
    expected = torch.randperm(30, generator=torch.Generator().manual_seed(7)).tolist()
    assert epoch_order(30, [0] * 30, 0, 7) == expected


@settings(max_examples=40, deadline=None)
@given(plan=plans, count=st.integers(1, 20), start=st.integers(0, 12))
def test_run_resumed_at_any_step_reads_the_same_rows(plan, count, start):
    """A plan that begins at a step gives what one that came there gives, over the border of an epoch too (case 66)."""
    came = filled(plan, count)
    whole = [rows_of(came, step) for step in range(start + 6)]
    resumed = filled(plan, count)
    assert [rows_of(resumed, step) for step in range(start, start + 6)] == whole[start:]


def row(ids: list[int], turns: list[int], fill: float) -> TraceRow:
    finals = sum(t != 0 for t in turns[1:])
    return TraceRow("r", "train", torch.tensor(ids), torch.tensor(turns), torch.full((len(ids), 6), fill),
                    torch.full((finals, 2), fill), [])


def test_collate_by_hand():
    """Rows end to end, with where each starts; finals stand where the next token has a turn; nothing is predicted over
    a border, even where a turn ends on one side and begins on the other."""
    batch = collate([row([5, 6, 7], [0, 1, 1], 1.0), row([8, 9, 10, 11, 12], [1, 1, 0, 2, 2], 2.0),
                     row([13, 14], [-1, -1], 3.0)])
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]
    assert batch.turns.tolist() == [[0, 1, 1, 0, 1, 0, 2, 2, 0, -1]]
    assert batch.taps[0, :, 0].tolist() == [1] * 3 + [2] * 5 + [3] * 2
    assert batch.final[0, :, 1].tolist() == [1, 1, 0, 2, 0, 2, 2, 0, 3, 0]
    assert batch.starts.tolist() == [[0, 0, 0, 3, 3, 3, 3, 3, 8, 8]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
    assert loss_mask(batch.turns, 0)[0].nonzero()[:, 0].tolist() == [0, 5]
