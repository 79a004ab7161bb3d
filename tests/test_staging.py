"""States that wait beside the answers: used where they are whole, computed again where not, gone at the end."""

import json
from collections import namedtuple

import pytest
import torch

from data import collect, staging
from data.capture import Conversation, capture
from data.codec import DTYPES, error_bound
from data.staging import Staging
from data.store import TraceReader
from data.tracecheck import check_folder
from recipes.errors import RunError
from tests.test_collect import Killed, content, forbid_work, fresh, trace, world  # noqa: F401 - a fixture
from tests.tiny import LAYERS, conversations, load_target, write_target

ROWS = conversations(6, 1)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Rows with their states, all turns supervised."""
    target = load_target(write_target(tmp_path_factory.mktemp("target")), "float32", LAYERS)
    return capture(target, ROWS, 256)[0]


def stage(folder, traced, part_bytes: float = 1e9, key: str = "k") -> Staging:
    """A folder where the rows were kept as two units, "a" and "b"."""
    made = Staging(folder, key, torch.float32, part_bytes)
    for name, rows in (("a", traced[:4]), ("b", traced[4:])):
        with made.unit(name) as unit:
            for row in rows:
                final = torch.zeros(len(row.ids), row.final.shape[1])
                final[row.final_at] = row.final
                unit.add(row.id, row.ids.tolist(), row.turns.tolist(), row.taps, final)
    return made


def opened(folder, done=()) -> Staging:
    found = Staging(folder, "k", torch.float32, 1e9)
    found.open(list(done))
    return found


def test_rows_come_back_as_they_were_kept(tmp_path, traced):
    """Ids, turns and states are those that were kept; split, tail and origin those of the finished row."""
    stage(tmp_path, traced)
    found = opened(tmp_path)
    for kept, wanted in zip(traced, ROWS):
        row = found.row(wanted)
        assert torch.equal(row.taps, kept.taps) and torch.equal(row.final, kept.final)
        assert (row.split, row.tail, row.off_policy) == (wanted.split, wanted.tail, wanted.off_policy)


def test_parts_are_written_as_they_fill(tmp_path, traced):
    """A part is written whenever so many bytes have come: memory does not grow with a unit's rows."""
    size = traced[0].taps.nbytes + traced[0].final.nbytes
    stage(tmp_path, traced, part_bytes=size)
    parts = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(parts) >= 4 and {"a.000.safetensors", "a.001.safetensors", "b.000.safetensors"} <= set(parts)


@pytest.mark.parametrize("fault", ["torn", "no list", "other set", "other bytes"])
def test_unusable_part_is_no_fault(tmp_path, traced, fault):
    """A part that is torn, unlisted or of another set is removed and its rows are not found: they are computed again
    (cases 16, 30, 35)."""
    stage(tmp_path, traced)
    part = tmp_path / "a.000.safetensors"
    if fault == "torn":
        part.write_bytes(part.read_bytes()[:-1])
    elif fault == "no list":
        part.with_suffix(".json").unlink()
    elif fault == "other set":
        stage(tmp_path / "other", traced, key="another")
        for end in (".json", ".safetensors"):
            (tmp_path / "other" / f"a.000{end}").replace(tmp_path / f"a.000{end}")
    else:
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    found = opened(tmp_path)
    assert [found.row(row) is None for row in ROWS] == [True] * 4 + [False] * 3
    assert sorted(p.name for p in tmp_path.glob("a*")) == []


def test_row_of_other_tokens_or_turns_is_not_used(tmp_path, traced):
    """States belong to exactly these tokens and turns (case 35)."""
    stage(tmp_path, traced)
    found, row = opened(tmp_path), ROWS[0]
    longer = Conversation(row.id, row.split, [*row.ids, 3], [*row.turns, 1], row.tail, row.finish)
    other = Conversation(row.id, row.split, row.ids, [0] * len(row.ids), row.tail, row.finish)
    assert found.row(row) is not None and found.row(longer) is None and found.row(other) is None
    assert found.row(Conversation("unknown", "train", row.ids, row.turns, [], "stop")) is None


def test_parts_go_when_their_rows_are_in_shards(tmp_path, traced):
    """A part goes with its last row; one whose rows were all done before goes at once; the folder goes at the end."""
    stage(tmp_path, traced)
    found = opened(tmp_path)
    assert found.spent([r.id for r in ROWS[:3]]) == []
    assert found.spent([r.id for r in ROWS[3:5]]) == ["a.000"]
    found.remove(["a.000"])
    assert {p.name.split(".")[0] for p in tmp_path.iterdir()} == {"b"}
    assert {p.name for p in tmp_path.iterdir()} == {"b.000.json", "b.000.safetensors"}
    assert not opened(tmp_path, [r.id for r in ROWS]).index
    assert list(tmp_path.iterdir()) == []
    found.close()
    assert not tmp_path.exists()


def test_unit_that_is_made_again_leaves_nothing_of_its_first_try(tmp_path, traced):
    """A killed try may have written more parts than the next one (case 16); an error keeps no half-filled part."""
    made = stage(tmp_path, traced, part_bytes=1.0)
    assert len(list(tmp_path.glob("a.*.safetensors"))) == 4
    with pytest.raises(Killed), made.unit("a") as unit:
        unit.part_bytes = 1e9
        unit.add("r0", [1, 2], [0, 1], torch.zeros(2, 3), torch.zeros(2, 1))
        raise Killed
    assert not list(tmp_path.glob("a.*")) and list(tmp_path.glob("b.*"))


def test_room_that_comes_back_leaves_the_largest_unit_out(tmp_path, traced):
    """Parts of one unit go together, so what they hold cannot be counted on for its own shards."""
    made = stage(tmp_path, traced)
    made.part_bytes = 100
    sizes = {name: sum(p.stat().st_size for p in tmp_path.glob(f"{name}.*")) for name in "ab"}
    assert made.returns() == min(sizes.values()) - 200
    made.part_bytes = 1e9
    assert made.returns() == 0


def test_process_reads_the_parts_of_its_own_rows(tmp_path, traced):
    """Of two that write, one finds the rows of its part only and spends no part that has rows of the other; torn parts
    of its own go, the other's are left to it (cases 16, 35)."""
    stage(tmp_path, traced)
    found = Staging(tmp_path, "k", torch.float32, 1e9)
    found.open([], [ROWS[0].id, ROWS[1].id])
    assert found.index.keys() == {r.id for r in ROWS[:4]}
    assert found.spent([ROWS[0].id, ROWS[1].id]) == []
    for name in "ab":
        (tmp_path / f"{name}.000.safetensors").write_bytes(b"x")
    found.open([], [ROWS[0].id, ROWS[1].id])
    assert not found.index and {p.name.split(".")[0] for p in tmp_path.iterdir()} == {"b"}


def test_room_that_comes_back_to_several_leaves_more_out(tmp_path, traced):
    """Two that write hold two units in work and one where their rows meet, and two shards each."""
    made = Staging(tmp_path, "k", torch.float32, 100)
    for name, rows in zip("abcd", (traced[:1], traced[1:3], traced[3:4], traced[4:])):
        with made.unit(name) as unit:
            unit.part_bytes = 1e9
            for row in rows:
                unit.add(row.id, row.ids.tolist(), row.turns.tolist(), row.taps, torch.zeros(len(row.ids), 32))
    sizes = sorted(sum(p.stat().st_size for p in tmp_path.glob(f"{name}.*")) for name in "abcd")
    assert made.returns(2) == sizes[0] - 400 and made.returns(1) == sum(sizes[:3]) - 200


def test_room_of_a_removed_part_is_free(tmp_path, traced):
    """No mapping of a deleted file is left, which would keep its blocks and grow the process (case 14)."""
    stage(tmp_path, traced)
    found = opened(tmp_path)
    assert found.row(ROWS[0]) is not None
    found.remove(["a.000"])
    mapped = [line for line in open("/proc/self/maps") if str(tmp_path) in line]
    assert any("b.000" in line for line in mapped) and not any("a.000" in line for line in mapped)


def test_opening_again_forgets_what_is_gone(tmp_path, traced):
    """A repair collects twice with one collector: parts that were used up are not looked for again."""
    stage(tmp_path, traced)
    found = opened(tmp_path)
    found.remove(found.spent([r.id for r in ROWS]))
    (tmp_path / ".a.000.tmp").write_text("killed")
    found.open([])
    assert found.row(ROWS[0]) is None and found.spent([r.id for r in ROWS]) == [] and not list(tmp_path.iterdir())


def test_error_of_the_decoding_is_not_hidden_by_the_writer(tmp_path, traced, monkeypatch):
    """Interrupted while a part meets a full disk: what is raised is the interrupt."""
    def full(*args):
        raise RunError("full")

    monkeypatch.setattr(staging, "write_shard", full)
    row = traced[0]
    with pytest.raises(Killed), Staging(tmp_path, "k", torch.float32, 1.0).unit("a") as unit:
        unit.add(row.id, row.ids.tolist(), row.turns.tolist(), row.taps, torch.zeros(len(row.ids), 32))
        raise Killed


@pytest.mark.parametrize("dtype", DTYPES)
def test_traces_are_the_same_with_and_without_waiting_states(world, tmp_path, monkeypatch, dtype):  # noqa: F811
    """make trace uses the decoder's states and computes none; a run whose states were lost computes all; both stores
    hold the same rows, the states within the storage dtype's error and that of another order of sums."""
    stores, computed = [], []

    def spy(target, rows, *rest):
        computed.extend(r.id for r in rows)
        return capture(target, rows, *rest)

    monkeypatch.setattr(collect, "capture", spy)
    for name, lost in (("kept", False), ("lost", True)):
        (tmp_path / name).mkdir()
        recipe, traces = fresh(tmp_path / name, world, trace={"dtype": dtype})
        with monkeypatch.context() as patch:
            computed.clear()
            if lost:
                patch.setattr(staging.UnitParts, "add", lambda self, *row: None)
            assert trace(recipe) == 0
        assert sorted(computed) == (sorted(f"p{i}" for i in range(10)) if lost else [])
        assert not (traces / "staged").exists()
        stores.append(TraceReader(traces))
    kept, lost = stores
    assert [p.listed for p in kept.places] == [p.listed for p in lost.places]
    for ours, theirs in ((kept[i], lost[i]) for i in range(10)):
        assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.turns, theirs.turns)
        for part, n in (("taps", len(LAYERS)), ("final", 1)):
            a, b = getattr(ours, part).float(), getattr(theirs, part).float()
            assert bool(((a - b).abs() <= 2.1 * error_bound(b, n, DTYPES[dtype]) + 1e-4 * b.abs().max()).all())


def test_finished_run_with_lost_answers_states_recomputes_nothing(world, tmp_path, monkeypatch):  # noqa: F811
    """Killed after the last shard, before the waiting states are deleted: the next run only deletes them (case 16)."""
    recipe, traces = fresh(tmp_path, world)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "close", lambda self: None)
        patch.setattr(Staging, "remove", lambda self, parts: None)
        assert trace(recipe) == 0 and list((traces / "staged").iterdir())
    assert any("waits for no shard" in fault.what for fault in check_folder(traces).faults)
    forbid_work(monkeypatch)
    assert trace(recipe) == 0 and content(traces) == content(world[2])


def test_disk_that_cannot_hold_the_prompts_is_refused_before_an_answer(world, tmp_path, capsys, monkeypatch):  # noqa: F811
    """What the prompts alone need is known before the first answer: no hour is spent on a run that cannot end
    (case 14)."""
    recipe, traces = fresh(tmp_path, world)
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(100_000))
    assert trace(recipe) == 1 and "MB are free" in capsys.readouterr().err
    assert not list(traces.glob("answers/*")) and not (traces / "staged").exists()


def test_room_for_waiting_states_is_that_of_the_dtype_they_wait_in(world, tmp_path, monkeypatch):  # noqa: F811
    """States of an 8-bit store wait in float32 until their shard is written: so much room is asked for before the
    first answer (case 14)."""
    asked: dict[str, float] = {}
    for dtype in ("float32", "int8"):
        (tmp_path / dtype).mkdir()
        recipe, _ = fresh(tmp_path / dtype, world, trace={"dtype": dtype})
        with monkeypatch.context() as patch:
            patch.setattr(collect.Collector, "check_room",
                          lambda self, needed, dtype=dtype: asked.setdefault(dtype, needed))
            assert trace(recipe) == 0
    assert asked["int8"] == asked["float32"] > 0


def test_part_that_cannot_be_written_stops_the_run_with_one_message(world, tmp_path, capsys, monkeypatch):  # noqa: F811
    """A disk that fills up while answers are decoded: exit code 1, the path, what to do; with room again it goes on
    (case 14)."""
    recipe, traces = fresh(tmp_path, world)

    def full(*args, **kwargs):
        raise RunError("part cannot be written: make room and run the same command again")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "write_shard", full)
        assert trace(recipe) == 1
    error = capsys.readouterr().err
    assert "make room" in error and "Traceback" not in error
    assert not list(traces.glob("answers/*.json"))
    assert trace(recipe) == 0 and content(traces) == content(world[2])


def test_manifest_and_lists_do_not_know_where_states_came_from(world):  # noqa: F811
    """The store's contract is the same: no staged part is named in it."""
    text = (world[2] / "manifest.json").read_text()
    assert "staged" not in text and not (world[2] / "staged").exists()
    assert json.loads(text)["rows"] == 10
