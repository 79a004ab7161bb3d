"""States computed in training (trace.mode online and cache): the store's numbers, the same bits at every reading."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from data import online, statecache
from data.codec import DTYPES, error_bound
from data.collect import COMMAND as TRACE
from data.reader import open_rows, with_states
from data.statecache import CachedReader, kept_rows
from data.store import TraceReader, TraceRow
from data.tracetool import COMMAND as INSPECT
from drafters.registry import FINAL
from drafters.target import Target
from recipes.cli import run
from recipes.errors import ConfigError, RunError
from recipes.files import alone
from recipes.loader import load_recipe
from tests.tiny import call, write_prompts, write_recipe, write_target
from train.loop import Trainer
from train.run import COMMAND as TRAIN

TEXTS = [f"how does one forecast {thing}?" for thing in
         ("rain", "snow", "wind", "fog", "hail", "frost", "dew", "mist", "ice", "heat")]
FIELDS = ("ids", "turns", "taps", "final")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The recipe of ten prompts, three of them held out; the runs `stored` and `online` are traced."""
    folder = tmp_path_factory.mktemp("online")
    model, prompts = write_target(folder / "model"), write_prompts(folder / "prompts.jsonl", TEXTS)
    recipe = write_recipe(folder / "r.yaml", model,
                          prompts={"sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 3},
                          generation={"max_tokens": 8, "unit_rows": 4},
                          train={"epochs": 2.0, "batch_rows": 2, "validate_every": 3, "save_every": 3, "keep": 9})
    assert call(TRACE, recipe, "--name", "stored") == 0
    assert call(TRACE, recipe, "--name", "online", "--trace.mode", "online") == 0
    return recipe


def traces(recipe: Path, name: str) -> Path:
    return recipe.parent / "runs" / name / "traces"


@pytest.fixture(scope="module")
def target(base):
    recipe = load_recipe(base, {})
    return Target(recipe.target, recipe.trace.layers)


def opened(base: Path, target: Target, folder: Path, **flags: str):
    """The reader of a copied or original folder under trace.* flags, as train/run.py makes it."""
    section = load_recipe(base, {f"trace.{name}": value for name, value in flags.items()}).trace
    return with_states(open_rows(section, folder.parent), section, folder.parent, target)


def test_a_target_that_shows_its_final_state_leaves_the_cache_alone(base, target, tmp_path):
    """Case 35: doctor and export's check of a drafter that reads final states compute them: rows without the tapped
    states never stand under the key of training's cache, and none of its rows is removed."""
    folder = copied(base, tmp_path)
    shown = Target(load_recipe(base, {}).target, FINAL)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (folder.parent / "cache").rglob("*") if path.is_file()}

    first = opened(base, shown, folder, mode="cache")
    finals = [first[i].final for i in range(len(first))]
    assert not files()
    trained = opened(base, target, folder, mode="cache", cache_gb="0.0001")
    rows = [trained[i] for i in range(len(trained))]
    before = files()
    assert before and all(torch.equal(row.final, final) for row, final in zip(rows, finals))
    again = opened(base, shown, folder, mode="cache", cache_gb="0.0001")
    assert all(torch.equal(again[i].final, final) for i, final in enumerate(finals)) and files() == before


def copied(base: Path, tmp_path: Path) -> Path:
    """A run's trace folder of mode online that may be damaged."""
    return Path(shutil.copytree(traces(base, "online"), tmp_path / "run" / "traces"))


def same_bits(a: TraceRow, b: TraceRow) -> bool:
    return (a.id, a.split, a.tail) == (b.id, b.split, b.tail) and all(
        torch.equal(getattr(a, f), getattr(b, f)) and getattr(a, f).dtype == getattr(b, f).dtype for f in FIELDS)


def test_trace_writes_rows_without_states(base):
    """Mode online keeps ids, masks, splits and tails as mode store does, and ten bytes a token (case 14)."""
    stored, rows = TraceReader(traces(base, "stored")), TraceReader(traces(base, "online"), mode="online")
    assert len(rows) == len(stored) == 10 and rows.split("validation") == stored.split("validation")
    for i in range(10):
        assert torch.equal(rows[i].ids, stored[i].ids) and torch.equal(rows[i].turns, stored[i].turns)
        assert rows[i].tail == stored[i].tail and rows[i].taps.shape == (len(rows[i].ids), 0)
    assert rows.manifest["mode"] == "online" and rows.manifest["predicted_bytes"] == 10 * rows.manifest["tokens"]
    for field in ("rows", "tokens", "supervised_tokens", "draft_vocabulary_counts", "layers", "finish"):
        assert rows.manifest[field] == stored.manifest[field]


def test_online_rows_are_the_stores_rows(base, target):
    """Computed rows equal those of a float32 store within its tolerance, and themselves bit for bit."""
    stored, computed = TraceReader(traces(base, "stored")), opened(base, target, traces(base, "online"), mode="online")
    assert len(computed) == len(stored)
    for i in range(len(stored)):
        a, b = stored[i], computed[i]
        assert (a.id, a.split, a.tail) == (b.id, b.split, b.tail) and torch.equal(a.final_at, b.final_at)
        torch.testing.assert_close(b.taps, a.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.final, a.final, rtol=1e-4, atol=1e-4)
        assert (computed.tokens(i), computed.supervised(i)) == (stored.tokens(i), stored.supervised(i))
    again = [computed[i] for i in reversed(range(len(stored)))][::-1]
    assert all(same_bits(computed[i], row) for i, row in enumerate(again))


def test_autocast_does_not_reach_the_target(base, target):
    """Under the autocast of a bfloat16 validation the states have the bits that they have without it."""
    reader = opened(base, target, traces(base, "online"), mode="online")
    with torch.autocast("cpu", torch.bfloat16):
        under = reader[0]
    assert same_bits(under, reader[0]) and under.taps.dtype == torch.float32


def test_a_refused_run_leaves_the_cache_of_the_one_at_work(base, tmp_path, capsys):
    """While a run trains, a second one with a smaller trace.cache_gb ends with a message before it removes a row."""
    copied(base, tmp_path)
    flags = ("--runs_dir", str(tmp_path), "--name", "run", "--trace.mode", "cache", "--train.epochs", "0.3")
    assert call(TRAIN, base, *flags) == 0
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert len([path for path in before if path.match("cache/*/*.safetensors")]) > 1
    capsys.readouterr()
    with alone(run / "checkpoints"):
        assert call(TRAIN, base, *flags, "--trace.cache_gb", "0.00001") == 1
    assert "another run is at work there" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e4m3"])
def test_states_pass_through_the_storage_dtype(base, target, tmp_path, dtype):
    """What is learned from does not depend on the mode: computed states are rounded as stored ones are, and a cached
    row has exactly the bits of a computed one."""
    folder = copied(base, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"dtype": dtype}))
    computed = opened(base, target, folder, mode="online")
    exact = opened(base, target, traces(base, "online"), mode="online")[0]
    row = computed[0]
    for part, n in (("taps", 3), ("final", 1)):
        got, wanted = getattr(row, part), getattr(exact, part)
        off = (got.float() - wanted).abs()
        assert bool((off <= error_bound(wanted, n, DTYPES[dtype])).all()) and off.max() > 0
    for _ in range(2):
        cached = opened(base, target, folder, mode="cache")
        assert all(same_bits(cached[i], computed[i]) for i in range(len(computed)))


@pytest.mark.parametrize("traced, wanted", [("online", "store"), ("stored", "online"), ("stored", "cache")])
def test_folder_of_another_mode_is_refused(base, capsys, traced, wanted):
    """A folder without states is never taken for a store, nor the reverse, by either stage (cases 30, 35)."""
    for command in (TRACE, TRAIN):
        assert call(command, base, "--name", traced, "--trace.mode", wanted) == 2
        error = capsys.readouterr().err
        assert "trace.mode" in error and "another" in error and "Traceback" not in error
    with pytest.raises(ConfigError, match="was traced for trace.mode = online; set trace.mode to online or cache"):
        TraceReader(traces(base, "online"))


def test_cache_needs_no_other_traces(base):
    """Traces of mode online serve mode cache: nothing is made again (case 16)."""
    before = {p: p.read_bytes() for p in traces(base, "online").rglob("*.safetensors")}
    assert call(TRACE, base, "--name", "online", "--trace.mode", "cache", "--trace.cache_gb", "1") == 0
    assert {p: p.read_bytes() for p in traces(base, "online").rglob("*.safetensors")} == before


def forbid_target(monkeypatch) -> None:
    def work(*args, **kwargs):
        raise AssertionError("a kept row was computed again")

    monkeypatch.setattr(online, "capture", work)


def test_kept_rows_are_read_and_have_the_same_bits(base, target, tmp_path, monkeypatch):
    """First readings compute, later ones and those of another process read, bit for bit the same; no file is left
    but the rows' own."""
    folder = copied(base, tmp_path)
    first = opened(base, target, folder, mode="cache")
    computed = [first[i] for i in range(len(first))]
    wanted = opened(base, target, folder, mode="online")
    assert all(same_bits(row, wanted[i]) for i, row in enumerate(computed))
    forbid_target(monkeypatch)
    assert all(same_bits(first[i], row) for i, row in enumerate(computed))
    later = opened(base, target, folder, mode="cache")
    assert all(same_bits(later[i], row) for i, row in enumerate(computed))
    assert {p.suffix for p in first.cache.iterdir()} == {".json", ".safetensors"}
    assert first.cache.parent == tmp_path / "run" / "cache" and len(list(first.cache.iterdir())) == 20


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data())
def test_kept_rows_fit_and_none_more_would(sizes, data):
    """The chosen rows fit the limit, no other fits beside them, and those to come first are chosen first (case 14)."""
    first = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True))
    limit = data.draw(st.integers(0, sum(sizes) + 5))
    kept = kept_rows(sizes, first, limit)
    used = sum(sizes[i] for i in kept)
    assert used <= limit and all(used + size > limit for i, size in enumerate(sizes) if i not in kept)
    alone = [size if i in first else limit + 1 for i, size in enumerate(sizes)]  # the others do not fit
    assert kept & set(first) == kept_rows(alone, first, limit)


def test_folder_stays_within_its_size(base, target, tmp_path, monkeypatch):
    """A cache for half of the rows holds the validation rows and others, never more bytes than allowed (case 14);
    the rows beyond it are computed at every reading, with the same bits."""
    folder = copied(base, tmp_path)
    whole = opened(base, target, folder, mode="online")
    sizes = opened(base, target, folder, mode="cache").sizes
    reader = CachedReader(whole, tmp_path / "c", sum(sizes) // 2)
    for _ in range(2):
        assert all(same_bits(reader[i], whole[i]) for i in range(len(reader)))
    files = list(reader.cache.iterdir())
    assert len(files) == 2 * len(reader.kept) and 3 < len(reader.kept) < 10
    assert sum(p.stat().st_size for p in files) <= sum(sizes) // 2
    smaller = CachedReader(whole, tmp_path / "c", sum(sizes) // 3)
    assert {p.stem for p in smaller.cache.iterdir()} == {statecache.name_of(i) for i in smaller.kept}
    assert sum(p.stat().st_size for p in smaller.cache.iterdir()) <= sum(sizes) // 3
    forbid_target(monkeypatch)
    for i in reader.split("validation"):
        assert smaller[i].id == whole.rows[i].id


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def swap(path: Path) -> None:
    shutil.copy(path.with_name("row-00000001.safetensors"), path)


def lose_list(path: Path) -> None:
    path.with_suffix(".json").unlink()


def other_row(path: Path) -> None:
    for kind in (".safetensors", ".json"):
        shutil.copy(path.with_name(f"row-00000001{kind}"), path.with_suffix(kind))


@pytest.mark.parametrize("damage", [truncate, flip, swap, lose_list, other_row, Path.unlink], ids=lambda f: f.__name__)
def test_damaged_cached_row_is_computed_again(base, target, tmp_path, damage):
    """A torn, edited, swapped or foreign file is never read; the row is computed and its file written (case 35)."""
    folder = copied(base, tmp_path)
    reader = opened(base, target, folder, mode="cache")
    wanted, path = [reader[i] for i in range(2)], reader.cache / "row-00000000.safetensors"
    whole = path.read_bytes()
    damage(path)
    later = opened(base, target, folder, mode="cache")
    assert same_bits(later[0], wanted[0]) and same_bits(later[1], wanted[1]) and path.read_bytes() == whole


def test_rows_of_another_set_are_not_read(base, target, tmp_path):
    """Answers that were written again differ though their settings do not: their rows have another folder, and the old
    one goes, since the size is that of the run's whole cache (cases 30, 14)."""
    folder = copied(base, tmp_path)
    old = opened(base, target, folder, mode="cache")
    assert old[0].id and old.cache.is_dir()
    listing = folder / "shards" / "shard-00000.json"
    listed = json.loads(listing.read_text())
    changed = statecache.set_key(folder, old.manifest)
    shutil.copytree(old.cache, old.cache.parent / ("0" * 64))
    listed["sha256"] = "1" * 64
    listing.write_text(json.dumps(listed))
    assert statecache.set_key(folder, old.manifest) != changed
    CachedReader(old.online, old.cache.parent, 10**9)
    assert not old.cache.exists() and not (old.cache.parent / ("0" * 64)).exists()


def test_cache_that_cannot_fit_or_be_written_is_refused(base, target, tmp_path, monkeypatch):
    """No room on the disk, or no folder: one message before the first step (cases 14, 61)."""
    folder = copied(base, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="trace.cache_dir: .*cannot write there"):
        opened(base, target, folder, mode="cache", cache_dir=str(tmp_path / "file"))
    monkeypatch.setattr(statecache.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    with pytest.raises(RunError, match="lower trace.cache_gb, make room, or set trace.mode to online"):
        opened(base, target, folder, mode="cache")


@pytest.mark.parametrize("mode", ["online", "cache"])
def test_row_of_bad_states_teaches_nothing(base, target, tmp_path, monkeypatch, mode):
    """A row with NaN states comes without a supervised token and is not kept; above the share the run stops (34)."""
    folder = copied(base, tmp_path)
    reader = opened(base, target, folder, mode=mode, max_bad_share="0.1")
    capture, faulty = online.capture, {reader[0].id}
    if mode == "cache":
        shutil.rmtree(reader.cache)
        reader = opened(base, target, folder, mode=mode, max_bad_share="0.1")

    def broken(target, rows, *rest):
        kept, bad = capture(target, rows, *rest)
        wrong = [r for r in rows if r.id in faulty]
        return ([], {r.id: "NaN" for r in wrong}) if wrong else (kept, bad)

    monkeypatch.setattr(online, "capture", broken)
    for _ in range(2):
        row = reader[0]
        assert not row.turns.any() and row.final.shape == (0, 32)
        assert not row.taps.any() and row.taps.shape == (len(row.ids), 96)
    faulty.add(reader[1].id)
    if mode == "cache":
        (reader.cache / "row-00000001.json").unlink()
        reader.checked.clear()
    with pytest.raises(RunError, match="2 of 10 rows have NaN or Inf states"):
        reader[1]


def result(base: Path, name: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Weights and validation curve of a run's last checkpoint."""
    folder = base.parent / "runs" / name / "checkpoints"
    path = sorted(folder.glob("step-*"))[-1]
    return load_file(path / "drafter.safetensors"), json.loads((folder / "curve.json").read_text())


def train(base: Path, name: str, traced: str, *flags: str) -> int:
    if not traces(base, name).exists():
        shutil.copytree(traces(base, traced), traces(base, name))
    return call(TRAIN, base, "--name", name, *flags)


class Killed(BaseException):
    """Passes every handler, as a kill would."""


def test_training_is_the_same_in_every_mode(base, monkeypatch):
    """Two epochs: online learns what the store teaches within fp32 tolerance with the same validation; cache and a
    resumed cache end with the bits of online; in the second epoch a cache computes nothing (cases 16, 19)."""
    assert train(base, "a", "stored") == 0
    assert train(base, "b", "online", "--trace.mode", "online") == 0
    weights, curve = result(base, "b")
    for name, tensor in result(base, "a")[0].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-4)
    assert [(r["step"], r["drafts"], r["per_position"]) for r in curve] == [
        (r["step"], r["drafts"], r["per_position"]) for r in result(base, "a")[1]]

    step, computed = Trainer.step, []
    capture = online.capture
    monkeypatch.setattr(online, "capture", lambda *args: (computed.append(args[1][0].id), capture(*args))[1])
    with monkeypatch.context() as patch:
        def dying(self):
            if self.progress.step == 6:
                raise Killed
            return step(self)

        patch.setattr(Trainer, "step", dying)
        AcceleratorState._reset_state(True)
        with pytest.raises(Killed):
            shutil.copytree(traces(base, "online"), traces(base, "c"))
            run(TRAIN, ["--config", str(base), "--name", "c", "--trace.mode", "cache"])
    assert len(computed) == len(set(computed)) == 10
    assert train(base, "c", "online", "--trace.mode", "cache") == 0 and len(computed) == 10
    found, again = result(base, "c")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert [r["per_position"] for r in again] == [r["per_position"] for r in curve]


def test_folder_without_states_is_verified_and_mended(base, tmp_path, capsys):
    """`make inspect` knows the mode, finds a torn shard of rows and makes it again without the target's states (35)."""
    shutil.copytree(traces(base, "online"), traces(base, "mend"))
    flags = ("--name", "mend", "--trace.mode", "online")
    assert call(INSPECT, base, *flags, "--verify") == 0 and "online" in capsys.readouterr().out
    path = traces(base, "mend") / "shards" / "shard-00000.safetensors"
    whole = path.read_bytes()
    truncate(path)
    assert call(INSPECT, base, *flags, "--verify") == 1
    assert call(INSPECT, base, *flags, "--repair") == 0 and path.read_bytes() == whole
