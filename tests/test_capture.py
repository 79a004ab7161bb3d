"""Hidden states of finished rows against transformers' own output_hidden_states, one row at a time."""

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.capture import A_PASS, Conversation, by_tokens, capture
from drafters.target import Prefix, States
from recipes.errors import RunError
from tests.tiny import LAYERS, L, conversations, left_to_the_collector, load_target, plain_model, write_target

ROWS = conversations(9, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tapped(folder):
    return load_target(folder, "float32", LAYERS)


@pytest.fixture(scope="module")
def reference(folder):
    """ids -> (tapped states, final states) of the plain model for one row, in float32."""
    model = plain_model(folder, torch.float32)

    def states(ids: list[int], layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[k][0] for k in layers], dim=-1), hidden[L][0]

    return states


@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000], ids=["row by row", "some batches", "one batch"])
def test_batched_capture_equals_row_by_row_transformers(folder, reference, batch_tokens):
    """Whatever the batch, states are those entering each tapped layer, the final one after the norm (case 01)."""
    target = load_target(folder, "float32", LAYERS)
    traced, bad = capture(target, ROWS, batch_tokens, torch.float32)
    assert bad == {} and [r.id for r in traced] == [r.id for r in ROWS]
    for got, row in zip(traced, ROWS):
        taps, final = reference(row.ids, LAYERS)
        supervised = [p for p in range(len(row.ids) - 1) if row.turns[p + 1]]
        torch.testing.assert_close(got.taps, taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.final, final[supervised], rtol=1e-4, atol=1e-4)
        assert (got.ids.tolist(), got.turns.tolist(), got.tail) == (row.ids, row.turns, row.tail)
        assert got.split == row.split and got.final_at.tolist() == supervised


@pytest.mark.parametrize("common", [3, 4, 20])
def test_rows_that_begin_alike_equal_row_by_row_transformers(folder, reference, common):
    """A system message before every row is computed once (from four tokens on), and no state differs for it."""
    head = [(5 * i) % 37 + 3 for i in range(common)]
    rows = [Conversation(r.id, r.split, head + [40 + n] + r.ids, [0] * (common + 1) + r.turns, r.tail, r.finish)
            for n, r in enumerate(ROWS)]
    target = load_target(folder, "float32", LAYERS)
    assert target.prefix([r.ids for r in rows]).length == (common if common >= 4 else 0)
    traced, bad = capture(target, rows, 150, torch.float32)
    assert bad == {}
    for got, row in zip(traced, rows):
        taps, final = reference(row.ids, LAYERS)
        torch.testing.assert_close(got.taps, taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.final, final[got.final_at], rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(common=st.integers(0, 8), lengths=st.lists(st.integers(2, 24), min_size=1, max_size=7),
       limit=st.integers(1, 200), seed=st.integers(0, 10**6))
def test_any_rows_in_any_batches_equal_row_by_row_transformers(tapped, reference, common, lengths, limit, seed):
    """Random lengths, a beginning that all rows share or none, any limit: every state is that of the row alone."""
    random = torch.Generator().manual_seed(seed)
    head = torch.randint(3, 60, (common,), generator=random).tolist()
    rows = [Conversation(f"r{i}", "train", head + torch.randint(3, 60, (n,), generator=random).tolist(),
                         [0] * (common + n - 1) + [1], [], "stop") for i, n in enumerate(lengths)]
    traced, bad = capture(tapped, rows, limit)
    assert bad == {} and [got.id for got in traced] == [row.id for row in rows]
    for got, row in zip(traced, rows):
        taps, final = reference(row.ids, LAYERS)
        torch.testing.assert_close(got.taps, taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.final, final[got.final_at], rtol=1e-4, atol=1e-4)


def test_first_and_other_taps_are_transformers_hidden_states(folder, reference):
    """hidden_states[0] is the embedding; the ids mean the same for first and middle layers (case 01)."""
    layers = [0, 1, L - 1]
    traced, _ = capture(load_target(folder, "float32", layers), ROWS[:2], 64, torch.float32)
    for got, row in zip(traced, ROWS):
        torch.testing.assert_close(got.taps, reference(row.ids, layers)[0], rtol=1e-4, atol=1e-4)


class Fake:
    """A target whose states are its token ids, with faults on demand."""

    device = torch.device("cpu")

    def __init__(self, fault=None) -> None:
        self.fault, self.widths = fault, []

    def prefix(self, rows) -> Prefix:
        return Prefix()

    def forward(self, ids, positions, cache=None, rows=None, logits=True) -> States:
        assert not logits and positions.equal(torch.arange(ids.shape[1]).expand_as(ids))
        self.widths.append(ids.numel())
        taps, final = ids[..., None].float().repeat(1, 1, 2), ids[..., None].float()
        return self.fault(ids, taps, final) if self.fault else States(final, taps, None)


def talk(name: str, ids: list[int]) -> Conversation:
    return Conversation(name, "train", ids, [0, 0] + [1] * (len(ids) - 2), [], "stop")


TALKS = [talk("a", [5, 6, 7, 8]), talk("b", [9, 13, 10]), talk("c", [1, 2, 3, 4, 5])]


@pytest.mark.parametrize("part, value", [("taps", torch.nan), ("taps", -torch.inf), ("final", torch.inf)])
def test_row_with_a_bad_state_is_listed_and_not_stored(part, value):
    """NaN or Inf anywhere in a row lists the row with its reason; its neighbours in the batch stay (case 34)."""
    def poison(ids, taps, final):
        (taps if part == "taps" else final)[ids == 13] = value
        return States(final, taps, None)

    traced, bad = capture(Fake(poison), TALKS, 100, torch.float32)
    assert [r.id for r in traced] == ["a", "c"] and bad == {"b": "NaN or Inf in hidden states"}
    assert traced[0].final[:, 0].tolist() == [6, 7]


def test_padding_cannot_make_a_row_bad():
    """A fault in the padding behind a shorter row is no fault of that row (case 34)."""
    def poison(ids, taps, final):
        taps[ids == 0] = torch.nan
        return States(final, taps, None)

    assert capture(Fake(poison), TALKS, 100, torch.float32)[1] == {}


def test_state_that_overflows_in_storage_is_listed():
    """A finite state beyond float16 would be stored as Inf: the row is listed instead (case 34)."""
    def huge(ids, taps, final):
        taps[ids == 13] = 1e5
        return States(final, taps, None)

    traced, bad = capture(Fake(huge), TALKS, 100, torch.float16)
    assert [r.id for r in traced] == ["a", "c"] and list(bad) == ["b"] and traced[0].taps.dtype == torch.float16
    assert capture(Fake(huge), TALKS, 100, torch.float32)[1] == {}


def test_states_of_a_suffix_only_stop_the_run():
    """An engine that returns only uncached positions is found out by length, nothing is padded to fit (case 08)."""
    with pytest.raises(RunError, match="row .: 3 states for 4 tokens"):
        capture(Fake(lambda ids, taps, final: States(final[:, 1:], taps[:, 1:], None)), TALKS[:1], 100, torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=15), st.integers(1, 90))
def test_batches_hold_every_row_once_within_the_limit(lengths, limit):
    """Each row is in one batch; padded tokens stay within the limit unless a single row exceeds it (case 14)."""
    ordered = sorted(enumerate(lengths), key=lambda pair: pair[1])
    batches = by_tokens(ordered, limit)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= limit for b in batches)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=9), st.integers(150, 900))
def test_batches_are_the_cheapest_of_all(lengths, limit):
    """No other way to cut the rows by length has fewer padded tokens and passes together: against every way."""
    ordered = sorted(lengths)

    def cost(cuts: tuple[int, ...]) -> float:
        parts = [ordered[a:b] for a, b in zip((0, *cuts), (*cuts, len(ordered)))]
        fits = all(len(p) == 1 or len(p) * p[-1] <= limit for p in parts)
        return sum(len(p) * p[-1] + A_PASS for p in parts) if fits else inf

    every = (cuts for n in range(len(ordered)) for cuts in combinations(range(1, len(ordered)), n))
    batches = by_tokens(list(enumerate(ordered)), limit)
    assert sum(len(b) * ordered[b[-1]] + A_PASS for b in batches) == min(map(cost, every))


def test_forward_passes_stay_within_the_token_limit():
    """The forward passes really are as large as batch_tokens allows and no larger (case 14)."""
    fake = Fake()
    capture(fake, TALKS, 8, torch.float32)
    assert fake.widths == [8, 5]


def test_states_of_a_pass_are_gone_with_it(tapped):
    """Keys of a batch that wait for the collector make memory grow with the rows, by its chance."""
    rows = [replace(row, ids=[7] * 5 + row.ids, turns=[0] * 5 + row.turns) for row in ROWS]  # a beginning to share
    assert left_to_the_collector(lambda: capture(tapped, rows, 60)) == []
