"""Storage dtypes: round trips within their stated bounds, sizes as predicted, decoded rows out of the store."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from data.codec import CODECS, DTYPES, carrier, decode, encode, error_bound, scaled
from data.store import FORMAT, TraceReader, TraceRow, row_bytes, shard_of, write_shard
from recipes.schema import Trace

QUANTISED = [torch.float8_e4m3fn, torch.int8]
H = 16


def states(seed: int, N: int, n: int, exponent: int) -> torch.Tensor:
    """[N, n*H] numbers of very different size, each tap with an outlier, one vector all zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, n, H, generator=g) * torch.exp2(torch.randint(-12, 3, (N, n, H), generator=g).float())
    x[:, :, 3] *= 50
    x[0, 0] = 0
    return (x * 2.0**exponent).reshape(N, n * H)


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(list(CODECS)), seed=st.integers(0, 1000), N=st.integers(1, 5), n=st.integers(1, 4),
       exponent=st.sampled_from([-140, -30, -14, 0, 6]))
def test_round_trip_stays_within_the_stated_bound(dtype, seed, N, n, exponent):
    """No number errs by more than its dtype's bound, for large, small and vanishing states (case 14)."""
    x = states(seed, N, n, exponent)
    back = decode(*encode(x.to(carrier(dtype)), n, dtype)).float()
    assert back.shape == x.shape and bool(torch.isfinite(back).all())
    error = (back.double() - x.double()).abs()
    assert bool((error <= error_bound(x, n, dtype).double()).all())


@settings(max_examples=30, deadline=None)
@given(dtype=st.sampled_from(QUANTISED), seed=st.integers(0, 1000), power=st.integers(-20, 20))
def test_scaled_codecs_do_not_depend_on_the_size_of_a_state(dtype, seed, power):
    """A state times a power of two is stored as the same numbers, so no magnitude is favoured."""
    x = states(seed, 3, 2, 0)
    numbers, scales = encode(x, 2, dtype)
    again, larger = encode(x * 2.0**power, 2, dtype)
    assert again.float().equal(numbers.float()) and larger[1:].equal(scales[1:] * 2.0**power)


@settings(max_examples=30, deadline=None)
@given(dtype=st.sampled_from(list(CODECS)), seed=st.integers(0, 1000))
def test_encoding_what_was_decoded_changes_nothing(dtype, seed):
    """A store written again from its own rows keeps its numbers to the rounding of a scale."""
    once = decode(*encode(states(seed, 4, 2, 0).to(carrier(dtype)), 2, dtype))
    twice = decode(*encode(once, 2, dtype))
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype, largest", [(torch.float8_e4m3fn, 448.0), (torch.int8, 127.0)])
def test_each_tap_has_its_own_scale(dtype, largest):
    """One scale a token and tap: a tap of large numbers costs the other nothing. By hand."""
    x = torch.tensor([[1.0, -0.5, 1000.0, 10.0], [0.0, 0.0, 2.0, -4.0]])
    numbers, scales = encode(x, 2, dtype)
    torch.testing.assert_close(scales, torch.tensor([[1.0, 1000.0], [0.0, 4.0]]) / largest)
    assert numbers.float()[0, 0] == largest and numbers.float()[1, 3] == -largest
    back = decode(numbers, scales)
    assert abs(float(back[0, 1]) + 0.5) < 0.02 and back[1, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("magnitude", [7e4, 3e38])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_largest_states_do_not_overflow(dtype, magnitude):
    """States beyond float16, up to the end of float32, keep a finite scale and decode finite (case 34)."""
    x = torch.tensor([[magnitude, -magnitude, 1.0]])
    back = decode(*encode(x, 1, dtype))
    torch.testing.assert_close(back[0, :2], x[0, :2], rtol=1e-6, atol=0)


def test_recipe_names_every_codec_once():
    """trace.dtype allows exactly the storage dtypes that exist, and each has a codec."""
    assert set(Trace.__annotations__["dtype"].__args__) == set(DTYPES)
    assert set(DTYPES.values()) == set(CODECS)


def store(folder, dtype, lengths, hidden=128, n=3):
    """A store of random rows; returns (folder, rows)."""
    (folder / "shards").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "key": "k", "shards": ["s"]}))
    g = torch.Generator().manual_seed(1)
    rows = []
    for i, T in enumerate(lengths):
        turns = torch.tensor([0] * (T // 2) + [1] * (T - T // 2))
        finals = int((turns[1:] > 0).sum())
        rows.append(TraceRow(f"r{i}", "train", torch.randint(0, 64, (T,), generator=g), turns,
                             torch.randn(T, n * hidden, generator=g), torch.randn(finals, hidden, generator=g), []))
    write_shard(folder / "shards", "s", shard_of(rows, dtype), {}, "k")
    return folder, rows


@pytest.mark.parametrize("name", DTYPES)
def test_reader_gives_back_each_row_within_its_bound(tmp_path, name):
    """Rows of every storage dtype come back whole and their own; 8-bit ones as float32 (cases 14, 35)."""
    dtype = DTYPES[name]
    folder, rows = store(tmp_path / "t", dtype, [5, 9, 1, 7])
    reader = TraceReader(folder)
    for index in (2, 0, 3, 1):
        got, row = reader[index], rows[index]
        assert got.ids.equal(row.ids) and got.turns.equal(row.turns)
        assert got.taps.dtype == got.final.dtype == (torch.float32 if scaled(dtype) else dtype)
        for part, n in (("taps", 3), ("final", 1)):
            ours, theirs = getattr(got, part).float(), getattr(row, part)
            assert ours.shape == theirs.shape
            if len(theirs):
                assert bool(((ours - theirs).abs() <= error_bound(theirs, n, dtype)).all())


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_predicted_for_every_dtype(tmp_path, name):
    """The stated size is the tensors' exactly and the file's within 5 %, scales and header included (case 14)."""
    dtype = DTYPES[name]
    folder, rows = store(tmp_path / "t", dtype, [60, 90, 120])
    predicted = sum(row_bytes(len(r.ids), len(r.final), 3 * 128, 128, dtype) for r in rows)
    path = folder / "shards" / "s.safetensors"
    assert sum(t.nbytes for t in load_file(path).values()) == predicted
    assert abs(path.stat().st_size / predicted - 1) < 0.05


@pytest.mark.parametrize("dtype", QUANTISED)
def test_shard_of_bad_rows_only_can_be_read(tmp_path, dtype):
    """A shard whose rows were all left out is complete and empty beside others (case 34)."""
    folder, _ = store(tmp_path / "t", dtype, [4])
    write_shard(folder / "shards", "e", shard_of([], dtype), {"x": "NaN"}, "k")
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "key": "k", "shards": ["e", "s"]}))
    assert len(TraceReader(folder)) == 1
