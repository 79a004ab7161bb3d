"""The trace store: what goes in comes out, and nothing else ever does."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data.store import (
    FORMAT,
    Shard,
    TraceReader,
    TraceRow,
    bad_rows,
    final_positions,
    row_bytes,
    shard_complete,
    shard_of,
    write_shard,
)
from recipes.errors import RunError
from recipes.files import sha256_file

WIDTH, HIDDEN = 12, 4
NAMES = ["shard-00000", "shard-00001"]
LENGTHS = [[5, 9, 1], [7]]


def make_row(name: str, length: int, split: str = "train") -> TraceRow:
    g = torch.Generator().manual_seed(length)
    turns = torch.tensor([0, 0, 1, 1, 0, 2, 2, 2, 0, 0][:length])
    return TraceRow(name, split, torch.randint(0, 64, (length,), generator=g), turns,
                    torch.randn(length, WIDTH, generator=g),
                    torch.randn(int((turns[1:] > 0).sum()), HIDDEN, generator=g), [length, 3])


def make_store(folder, key: str = "k1", dtype: torch.dtype = torch.float32):
    """Two shards of three rows and one; returns (folder, rows)."""
    (folder / "shards").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "key": key, "shards": NAMES}))
    rows = []
    for name, lengths in zip(NAMES, LENGTHS):
        part = [make_row(f"{name}-{n}", n, "validation" if n == 9 else "train") for n in lengths]
        bad = {"left-out": "NaN"} if name == NAMES[0] else {}
        write_shard(folder / "shards", name, shard_of(part, dtype), bad, key)
        rows += part
    return folder, rows


def edit_list(folder, name: str, change) -> None:
    path = folder / "shards" / f"{name}.json"
    listed = json.loads(path.read_text())
    change(listed)
    path.write_text(json.dumps(listed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_bit_for_bit(tmp_path, dtype):
    """Every row is read back as written, in its storage precision, with its split, tail and lengths (case 35)."""
    folder, rows = make_store(tmp_path / "t", dtype=dtype)
    reader = TraceReader(folder)
    assert len(reader) == 4 and reader.split("validation") == [1] and reader.split("train") == [0, 2, 3]
    for i, row in enumerate(rows):
        got = reader[i]
        assert (got.id, got.split, got.tail) == (row.id, row.split, row.tail)
        assert got.ids.equal(row.ids) and got.turns.equal(row.turns) and got.turns.dtype == torch.long
        assert got.taps.equal(row.taps.to(dtype)) and got.final.equal(row.final.to(dtype))
        assert reader.tokens(i) == len(row.ids) and reader.supervised(i) == len(row.final) == len(got.final_at)


@pytest.mark.parametrize("turns, expected", [([0, 0, 1, 1, 0, 2], [1, 2, 4]), ([1, 1], [0]), ([1], []), ([0, 0], [])])
def test_final_states_are_kept_where_the_next_token_is_supervised(turns, expected):
    """A final state is stored exactly before each supervised token, the last prompt position included (case 31)."""
    assert final_positions(torch.tensor(turns)).tolist() == expected


def test_no_temporary_file_is_left(tmp_path):
    """After success and after a failed write only complete files remain (case 61)."""
    folder, _ = make_store(tmp_path / "t")
    expected = sorted(f"{name}.{kind}" for name in NAMES for kind in ("json", "safetensors"))
    assert sorted(p.name for p in (folder / "shards").iterdir()) == expected
    shared = torch.zeros(2)
    with pytest.raises(RuntimeError, match="share memory"):
        write_shard(folder / "shards", "shard-00002", Shard({"ids": shared, "turns": shared}, []), {}, "k1")
    assert sorted(p.name for p in (folder / "shards").iterdir()) == expected


def truncate(folder):
    path = folder / "shards" / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def flip(folder):
    path = folder / "shards" / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def lose(folder):
    (folder / "shards" / "shard-00001.safetensors").unlink()


def lose_list(folder):
    (folder / "shards" / "shard-00001.json").unlink()


def tear_list(folder):
    path = folder / "shards" / "shard-00001.json"
    path.write_text(path.read_text()[:60])


def swap(folder):
    shutil.copy(folder / "shards" / "shard-00000.safetensors", folder / "shards" / "shard-00001.safetensors")


def foreign(folder):
    other, _ = make_store(folder.parent / "other", key="k2")
    for path in (other / "shards").glob("shard-00001.*"):
        shutil.copy(path, folder / "shards" / path.name)


def shorten(folder):
    edit_list(folder, "shard-00001", lambda listed: listed["rows"][0].update(tokens=6))


def short_finals(folder):
    edit_list(folder, "shard-00001", lambda listed: listed["rows"][0].update(finals=1))


def drop_field(folder):
    edit_list(folder, "shard-00001", lambda listed: listed["rows"][0].pop("tokens"))


def rewrite(folder):
    path = folder / "shards" / "shard-00001.safetensors"
    tensors = load_file(path)
    save_file({k: v[:-1].contiguous() for k, v in tensors.items()}, path)
    edit_list(folder, "shard-00001", lambda listed: listed.update(sha256=sha256_file(path)))


@pytest.mark.parametrize("damage, message", [
    (truncate, "checksum differs"), (flip, "checksum differs"), (swap, "checksum differs"),
    (lose, "missing or torn"), (lose_list, "missing or torn"), (tear_list, "missing or torn"),
    (drop_field, "missing or torn"), (foreign, "belongs to another trace set"), (shorten, "its list counts"),
    (short_finals, "its list counts"), (rewrite, "its list counts"),
], ids=lambda v: v.__name__ if callable(v) else "")
def test_damaged_store_is_refused_by_name(tmp_path, damage, message):
    """A torn, truncated, edited, swapped or foreign shard is never read; the message names it (cases 35, 30)."""
    folder, _ = make_store(tmp_path / "t")
    assert len(TraceReader(folder)) == 4
    damage(folder)
    with pytest.raises(RunError, match=message) as error:
        TraceReader(folder)
    assert "shard-00001.safetensors" in str(error.value)


@pytest.mark.parametrize("manifest, message", [
    (None, "missing or unreadable; run `make trace` first"), ("{", "missing or unreadable"),
    ('{"format": "other/9", "shards": []}', "format 'other/9', this version reads"),
    (json.dumps({"format": FORMAT, "shards": []}), "holds no rows")])
def test_folder_that_is_no_store_is_refused(tmp_path, manifest, message):
    """No manifest, a torn one, another format, or zero rows is an error (case 35)."""
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(RunError, match=message):
        TraceReader(tmp_path)


def test_shard_is_complete_only_with_exactly_its_rows(tmp_path):
    """A shard counts as done when whole, of this set and with these rows, left-out ones counted (cases 16, 35)."""
    folder, rows = make_store(tmp_path / "t")
    shards, ids = folder / "shards", [r.id for r in rows[:3]] + ["left-out"]
    assert shard_complete(shards, NAMES[0], ids[::-1], "k1")
    assert bad_rows(shards, NAMES[0]) == 1 and bad_rows(shards, NAMES[1]) == 0
    assert not shard_complete(shards, NAMES[0], ids[:-1], "k1")
    assert not shard_complete(shards, NAMES[0], [*ids, "more"], "k1")
    assert not shard_complete(shards, NAMES[0], ids, "k2")
    assert not shard_complete(shards, "shard-00002", ids, "k1")


@pytest.mark.parametrize("damage", [truncate, flip, lose, lose_list, tear_list, swap, foreign],
                         ids=lambda f: f.__name__)
def test_damaged_shard_is_not_complete(tmp_path, damage):
    """Whatever the reader would refuse is written again by the next run (case 35)."""
    folder, rows = make_store(tmp_path / "t")
    damage(folder)
    assert not shard_complete(folder / "shards", NAMES[1], [rows[3].id], "k1")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(40, 90), min_size=2, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_predicted_bytes_hold_within_five_per_cent(tmp_path_factory, lengths, dtype):
    """The size stated before a run is that of the real file within 5 %, headers included (case 14)."""
    folder = tmp_path_factory.mktemp("size")
    rows = [TraceRow(f"r{i}", "train", torch.zeros(n), torch.tensor([0] * 8 + [1] * (n - 8)),
                     torch.zeros(n, 3 * 32), torch.zeros(n - 8, 32), []) for i, n in enumerate(lengths)]
    write_shard(folder, "s", shard_of(rows, dtype), {}, "k1")
    predicted = sum(row_bytes(len(r.ids), len(r.final), 96, 32, dtype) for r in rows)
    assert abs((folder / "s.safetensors").stat().st_size / predicted - 1) < 0.05
