"""`make trace` on a tiny target: resumable in units, refused where settings differ, errors without leftovers."""

import json
import os
import subprocess
import sys
from collections import Counter, namedtuple
from pathlib import Path

import pytest
import yaml

from data import collect
from data.answers import prompt_turns
from data.backends.units import Units
from data.capture import capture
from data.chat import prompt_ids
from data.collect import COMMAND
from data.generate import Answer, Generator
from data.prompts import Prompt, hold_out, read_jsonl
from data.staging import UnitParts
from data.store import TraceReader, list_digest
from recipes.cli import run
from recipes.files import alone
from recipes.loader import load_recipe
from tests.tiny import CHATML, chat_tokenizer, llama, write_prompts, write_recipe, write_target

TEXTS = [f"tell me in a few simple words how one forecasts {thing} for the next day" for thing in
         ("rain", "snow", "wind", "fog", "hail", "frost", "dew", "mist", "ice", "heat")]
ROOT = Path(__file__).resolve().parent.parent
KILLED = 9
DIE = """
import os, sys
from data.collect import COMMAND
from recipes.cli import run
left, replace = int(sys.argv[1]), os.replace
def dying(source, destination):
    global left
    if "/traces/" in str(destination):
        left -= 1
        if left < 0:
            os._exit(9)
    replace(source, destination)
os.replace = dying
run(COMMAND, sys.argv[2:])
"""


class Killed(BaseException):
    """Passes every handler, as a kill would."""


def sections(path: Path, **changes) -> dict:
    """Answers in units of four, shards of the smallest size, sampled training answers."""
    values = {
        "prompts": {"sources": [{"kind": "jsonl", "path": str(path)}], "validation": 3},
        "generation": {"max_tokens": 8, "batch_size": 3, "unit_rows": 4, "temperature": 1.0},
        "trace": {"layers": [1, 2, 3], "shard_mb": 1},
    }
    for name, section in changes.items():
        values[name] = {**values.get(name, {}), **section}
    return values


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model folder, prompt file, traces of one undisturbed run)."""
    folder = tmp_path_factory.mktemp("world")
    model = write_target(folder / "model")
    llama(hidden=256).save_pretrained(model)  # wide states, so that ten rows fill several shards of 1 MB
    prompts = write_prompts(folder / "prompts.jsonl", TEXTS)
    recipe = write_recipe(folder / "r.yaml", model, **sections(prompts))
    assert trace(recipe) == 0
    return model, prompts, folder / "runs" / "tiny" / "traces"


def trace(recipe: Path, *flags: str) -> int:
    """Exit code of `python -m data.collect`, run in this process."""
    with pytest.raises(SystemExit) as stop:
        run(COMMAND, ["--config", str(recipe), *flags])
    return stop.value.code


def fresh(tmp_path: Path, world, **changes) -> tuple[Path, Path]:
    """(recipe, traces folder) of a run that has not begun."""
    recipe = write_recipe(tmp_path / "r.yaml", world[0], **sections(world[1], **changes))
    return recipe, tmp_path / "runs" / "tiny" / "traces"


def content(traces: Path) -> dict[str, bytes]:
    """Every file that decides what a reader gets, by relative name."""
    return {str(p.relative_to(traces)): p.read_bytes() for p in sorted(traces.rglob("*"))
            if p.is_file() and p.name != "provenance.json" and p.suffix != ".tmp"}


def forbid_work(monkeypatch) -> None:
    def work(*args, **kwargs):
        raise AssertionError("finished work was done again")

    monkeypatch.setattr(Generator, "run", work)
    monkeypatch.setattr(collect, "capture", work)


def test_traces_hold_every_prompt_once_with_its_split(world):
    """Each prompt has one row; held-out rows carry the overrun of a replay; bytes as predicted (cases 16, 14, 60)."""
    reader = TraceReader(world[2])
    held = hold_out([p.id for p in read_jsonl(world[1])], 3, 0)
    assert sorted(reader[i].id for i in range(len(reader))) == sorted(f"p{i}" for i in range(10))
    assert {reader[i].id for i in reader.split("validation")} == held
    for row in (reader[i] for i in range(len(reader))):
        assert len(row.tail) == (3 if row.id in held else 0)
        prompt = f"<|im_start|>user\n{TEXTS[int(row.id[1:])]}<|im_end|>\n<|im_start|>assistant\n"
        ids = chat_tokenizer()(prompt, add_special_tokens=False)["input_ids"]
        length = len(ids)
        assert row.ids[:length].tolist() == ids
        assert row.turns.tolist() == [0] * length + [1] * (len(row.ids) - length)
    manifest = reader.manifest
    assert sum(manifest["finish"].values()) == manifest["rows"] == 10 and manifest["layers"] == [1, 2, 3]
    assert manifest["user_turn_tokens"] == 0
    written = sum(p.stat().st_size for p in (world[2] / "shards").glob("*.safetensors"))
    assert abs(written / manifest["predicted_bytes"] - 1) < 0.05


def test_rows_cut_by_length_are_marked(world, tmp_path):
    """Every entry of a shard list says how its answer ended: at the end token, or at generation.max_tokens without one;
    as many as the manifest counts. Lists without the mark are read as before (case 60)."""
    recipe, traces = fresh(tmp_path, world, generation={"temperature": 5.0, "max_tokens": 40})
    assert trace(recipe) == 0
    reader = TraceReader(traces)
    lists = [json.loads(path.read_text()) for path in sorted((traces / "shards").glob("*.json"))]
    marks = {row["id"]: row["finish"] for listed in lists for row in listed["rows"]}
    rows = [reader[i] for i in range(len(reader))]
    assert marks == {r.id: "stop" if int(r.ids[-1]) == 2 else "length" for r in rows} == {r.id: r.finish for r in rows}
    assert Counter(marks.values()) == reader.manifest["finish"] and len(reader.manifest["finish"]) == 2
    for listed in lists:
        for row in listed["rows"]:
            del row["finish"]
        listed["list_sha256"] = list_digest(listed)
        (traces / "shards" / f"{listed['name']}.json").write_text(json.dumps(listed))
    before = content(traces)
    assert {row.finish for row in map(TraceReader(traces).__getitem__, range(len(rows)))} == {""}
    assert trace(recipe) == 0 and content(traces) == before, "complete as they are: nothing is made again"


def test_manifest_is_written_before_the_first_shard(world, tmp_path, monkeypatch):
    """A reader that sees a shard can always see what it belongs to (case 35)."""
    recipe, traces = fresh(tmp_path, world)
    write, seen = collect.write_shard, []

    def spy(folder, name, *rest):
        seen.append((traces / "manifest.json").is_file() and not list(folder.glob(f"{name}.*")))
        write(folder, name, *rest)

    monkeypatch.setattr(collect, "write_shard", spy)
    assert trace(recipe) == 0 and len(seen) > 2 and all(seen)


def test_second_run_does_no_work(world, tmp_path, monkeypatch):
    """A finished run is found done: no answer, no state, the same files; training options do not matter (case 16)."""
    recipe, traces = fresh(tmp_path, world)
    assert trace(recipe) == 0
    before = content(traces)
    forbid_work(monkeypatch)
    assert trace(recipe) == 0 and trace(recipe, "--train.lr", "0.5") == 0
    assert content(traces) == before == content(world[2])


@pytest.mark.parametrize("point", [0, 1, 2, 3, 5, 9, 10, 11, 12, 13, 14, 15])
def test_run_stopped_at_any_write_goes_on_to_the_same_bytes(world, tmp_path, monkeypatch, point):
    """Stopped before its n-th rename, the same command ends with the files of an undisturbed run (cases 16, 35)."""
    recipe, traces = fresh(tmp_path, world)
    replace, left, asked = os.replace, [point], []

    def dying(source, destination):
        if "/traces/" in str(destination):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Killed):
            run(COMMAND, ["--config", str(recipe)])
    done = {p.stem for p in (traces / "answers").glob("*.json")}
    generate = Generator.run
    monkeypatch.setattr(Generator, "run", lambda self, requests, **named: (
        asked.extend(r.id for r in requests), generate(self, requests, **named))[1])
    assert trace(recipe) == 0
    assert content(traces) == content(world[2])
    assert len(asked) == len(set(asked)) == 10 - min(10, 4 * len(done))


def test_killed_process_goes_on_to_the_same_bytes(world, tmp_path):
    """A process that dies while its second shard is half there, no handler run, loses that only (cases 16, 35)."""
    recipe, traces = fresh(tmp_path, world)
    died = subprocess.run([sys.executable, "-c", DIE, "14", "--config", str(recipe)], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert died.returncode == KILLED, died.stderr
    assert list(traces.glob("shards/.*.tmp")), "the half-written shard must be there for this test to mean anything"
    assert trace(recipe) == 0 and content(traces) == content(world[2])
    assert len(TraceReader(traces)) == 10


@pytest.mark.parametrize("flags, named", [
    (["--generation.seed", "1"], "generation.seed was 0, now 1"),
    (["--generation.max_tokens", "7"], "generation.max_tokens was 8, now 7"),
    (["--trace.dtype", "bfloat16"], "trace.dtype was 'float32', now 'bfloat16'"),
    (["--trace.layers", "[1, 2, 4]"], "trace.layers was [1, 2, 3], now [1, 2, 4]"),
    (["--trace.max_length", "90"], "trace.max_length was 1024, now 90"),
    (["--prompts.seed", "3"], "prompts.seed was 0, now 3"),
    (["--target.dtype", "bfloat16"], "target.dtype was 'float32', now 'bfloat16'"),
])
def test_changed_setting_is_refused_by_name(world, capsys, flags, named):
    """Traces of other settings are never reused or mixed; the message names the setting, and what the run says of
    itself stays true (cases 30, 36)."""
    before, run = content(world[2]), world[2].parent
    records = [(run / "recipe.yaml").read_bytes(), (world[2] / "provenance.json").read_bytes()]
    assert trace(world[2].parents[2] / "r.yaml", *flags) == 2
    assert named in capsys.readouterr().err and content(world[2]) == before
    assert records == [(run / "recipe.yaml").read_bytes(), (world[2] / "provenance.json").read_bytes()]


@pytest.mark.parametrize("change, named", [
    (lambda m, p: write_target(m, seed=1), "target.weights was"),
    (lambda m, p: write_target(m, template=CHATML + " "), "target.template was"),
    (lambda m, p: write_prompts(p, TEXTS[::-1]), "sources[0].sha256"),
], ids=["weights", "template", "prompts"])
def test_changed_file_behind_the_same_path_is_refused(tmp_path, capsys, change, named):
    """Other weights, template or prompts under the same path make other traces (cases 30, 36)."""
    model, prompts = write_target(tmp_path / "model"), write_prompts(tmp_path / "p.jsonl", TEXTS[:5])
    recipe = write_recipe(tmp_path / "r.yaml", model, **sections(prompts))
    assert trace(recipe) == 0
    change(model, prompts)
    assert trace(recipe) == 2 and named in capsys.readouterr().err


LONG = "x y " * 150  # 600 characters are 600 tokens, beyond the target's 512


@pytest.mark.parametrize("texts, changes, message", [
    ([], {}, "holds no prompts"),
    (TEXTS[:3], {}, "3 usable prompts"),
    ([LONG + t for t in TEXTS], {"prompts": {"max_tokens": 5000}}, "'too long': 10"),
    (TEXTS, {"generation": {"max_tokens": 512}}, "generation.max_tokens = 512: leaves no room"),
    (TEXTS, {"generation": {"top_p": 0.0}}, "top_p = 0.0"),
], ids=["empty file", "too few", "beyond the context", "no room", "no nucleus"])
def test_unusable_input_stops_with_code_2_and_leaves_nothing(world, tmp_path, capsys, texts, changes, message):
    """A user's mistake is one message and exit code 2; no manifest, unit or shard; corrected, it runs (case 64)."""
    prompts = write_prompts(tmp_path / "p.jsonl", texts)
    recipe = write_recipe(tmp_path / "r.yaml", world[0], **sections(prompts, **changes))
    assert trace(recipe) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    traces = tmp_path / "runs" / "tiny" / "traces"
    assert set(content(traces)) <= {"settings.json"} and not list(tmp_path.rglob("*.tmp"))
    write_prompts(prompts, TEXTS)
    write_recipe(tmp_path / "r.yaml", world[0], **sections(prompts))
    assert trace(recipe) == 0 and len(TraceReader(traces)) == 10


def test_target_without_a_chat_template_is_refused(tmp_path, capsys):
    """A tokenizer that cannot render a chat stops the run before anything is written (case 06)."""
    model, prompts = write_target(tmp_path / "model", template=None), write_prompts(tmp_path / "p.jsonl", TEXTS)
    assert trace(write_recipe(tmp_path / "r.yaml", model, **sections(prompts))) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "tiny" / "traces").exists()


def test_prompt_beyond_the_context_is_dropped_and_counted(world, tmp_path):
    """One prompt that cannot fit with its answer is dropped with its reason, the others are traced (cases 60, 28)."""
    prompts = write_prompts(tmp_path / "p.jsonl", [*TEXTS[:5], LONG])
    values = sections(prompts, prompts={"max_tokens": 5000})
    assert trace(write_recipe(tmp_path / "r.yaml", world[0], **values)) == 0
    reader = TraceReader(tmp_path / "runs" / "tiny" / "traces")
    assert len(reader) == 5 and reader.manifest["dropped"] == {"too long": 1}


def test_one_id_for_two_prompts_is_refused(world, tmp_path, capsys):
    """Two files that both count p0, p1, ... would overwrite each other's answers: an error (case 16)."""
    paths = [write_prompts(tmp_path / f"{n}.jsonl", part) for n, part in enumerate((TEXTS[:5], TEXTS[5:]))]
    sources = {"prompts": {"sources": [{"kind": "jsonl", "path": str(p)} for p in paths], "validation": 3}}
    assert trace(write_recipe(tmp_path / "r.yaml", world[0], **(sections(paths[0]) | sources))) == 2
    assert "id 'p0' names two different prompts" in capsys.readouterr().err


@pytest.mark.parametrize("came", ["with the answers", "afterwards"])
def test_bad_states_stop_the_run_again_and_again(world, tmp_path, capsys, monkeypatch, came):
    """Above the allowed share of NaN rows the run stops, and running it again is no way past (case 34)."""
    recipe, _ = fresh(tmp_path, world)
    add = UnitParts.add

    def keep(self, id, ids, turns, taps, final):
        if came == "with the answers":
            add(self, id, ids, turns, taps.fill_(float("nan")) if id == "p4" else taps, final)

    def compute(target, rows, *rest):
        kept, faults = capture(target, rows, *rest)
        return [r for r in kept if r.id != "p4"], faults | {r.id: "NaN" for r in rows if r.id == "p4"}

    monkeypatch.setattr(UnitParts, "add", keep)
    monkeypatch.setattr(collect, "capture", compute)
    for _ in range(2):
        assert trace(recipe, "--trace.max_bad_share", "0.05") == 1
        assert "1 of 10 rows have NaN or Inf states" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    recipe, traces = fresh(tmp_path / "other", world)
    assert trace(recipe, "--trace.max_bad_share", "0.5") == 0
    assert "p4" not in {r.id for r in map(TraceReader(traces).__getitem__, range(9))}


def test_run_without_a_supervised_token_stops(world, tmp_path, capsys, monkeypatch):
    """An all-zero loss mask over the data set stops the run (case 06)."""
    monkeypatch.setattr(Units, "answers", lambda self, part, units, *rest: [
        [Answer(r.id, r.prompt, [], "length") for r in requests] for requests in units.values()])
    assert trace(fresh(tmp_path, world)[0]) == 1
    assert "no supervised token in any row" in capsys.readouterr().err


def test_full_disk_is_refused_before_the_first_shard(world, tmp_path, capsys, monkeypatch):
    """Where the predicted bytes do not fit, the run stops before manifest and shards (case 14)."""
    recipe, traces = fresh(tmp_path, world)
    usage = namedtuple("Usage", "free")
    answered = 1 + len(list(world[2].glob("answers/*.json")))
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda path: usage(
        10**9 if len(list(traces.glob("answers/*.json"))) + 1 < answered else 1000))
    assert trace(recipe) == 1 and "MB are free" in capsys.readouterr().err
    assert len(list(traces.glob("answers/*.json"))) + 1 == answered
    assert not (traces / "manifest.json").exists() and not list((traces / "shards").iterdir())


def test_resolved_recipe_is_written_beside_the_traces(world):
    """A run says with which settings it was made (case 36)."""
    assert yaml.safe_load((world[2].parent / "recipe.yaml").read_text())["generation"]["max_tokens"] == 8


@pytest.mark.parametrize("own, wanted, marked", [(True, "own", True), (True, "all", True), (False, "own", False),
                                                 (False, "all", True)])
def test_user_turns_that_training_may_learn_from_are_marked(world, tmp_path, own, wanted, marked):
    """-1 over exactly the user text and its end token, where the target wrote it or those of others are wanted too."""
    recipe, _ = fresh(tmp_path, world)
    collector = collect.Collector(load_recipe(recipe, {}))
    messages = [{"role": "user", "content": "is it wet?"}]
    ids = prompt_ids(collector.target.tokenizer, messages)
    turns = prompt_turns(collector.target, Prompt("p", messages, own=own), messages, ids, wanted)
    text = "".join(collector.target.tokenizer.decode([i]) for i, turn in zip(ids, turns) if turn == -1)
    assert text == ("is it wet?<|im_end|>" if marked else "")
    assert len(turns) == len(ids) and set(turns) <= {0, -1}


def test_two_runs_do_not_share_a_folder(world, tmp_path, capsys):
    """While one run collects into a folder, another one ends with a message and has changed nothing."""
    recipe, traces = fresh(tmp_path, world)
    assert trace(recipe) == 0
    before = content(traces)
    with alone(traces):
        assert trace(recipe) == 1 and "another run is at work there" in capsys.readouterr().err
    assert content(traces) == before and trace(recipe) == 0


def test_a_changed_answer_is_made_again(world, tmp_path):
    """Cases 16 and 35: a unit that is whole JSON and not what was written is no unit: the run after it ends with the
    store and counts of an undisturbed one."""
    recipe, traces = fresh(tmp_path, world)
    assert trace(recipe) == 0
    unit = sorted((traces / "answers").glob("*.json"))[0]
    stored = json.loads(unit.read_text())
    stored["answers"][0]["tokens"][0] ^= 1
    unit.write_text(json.dumps(stored))
    assert trace(recipe) == 0 and content(traces) == content(world[2])


@pytest.mark.parametrize("text", ["null", "[]", "{", ""])
def test_settings_that_are_no_object_are_named(world, tmp_path, capsys, text):
    recipe, traces = fresh(tmp_path, world)
    assert trace(recipe) == 0
    (traces / "settings.json").write_text(text)
    assert trace(recipe) == 1
    said = capsys.readouterr().err
    assert f"{traces / 'settings.json'}: missing or unreadable; delete {traces} to start over" in said


def test_a_second_run_leaves_the_settings_of_one_that_begins(world, tmp_path, capsys):
    """The first run holds the folder and has collected nothing yet: a second one with other settings is refused, and
    neither settings.json nor recipe.yaml becomes its own (case 30)."""
    recipe, traces = fresh(tmp_path, world)
    collector = collect.Collector(load_recipe(recipe, {}))
    with collector.at_work():
        collector.record()
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert trace(recipe, "--generation.seed", "5") == 1
        assert "another run is at work there" in capsys.readouterr().err
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert trace(recipe) == 0 and content(traces) == content(world[2])


def test_marked_user_turns_reach_store_manifest_and_key(world, tmp_path):
    """trace.user_turns: all through `make trace`: every training row holds final states over its user turn, the
    manifest counts them, and it is another trace set than the default, whose key names no such setting."""
    recipe, traces = fresh(tmp_path, world, trace={"user_turns": "all"})
    assert trace(recipe) == 0
    reader = TraceReader(traces)
    rows = [reader[i] for i in reader.split("train")]
    assert reader.manifest["user_turn_tokens"] == sum(int((row.turns < 0).sum()) for row in rows) > len(rows)
    assert all(len(row.final) == int((row.turns[1:] != 0).sum()) for row in rows)
    assert not any((reader[i].turns < 0).any() for i in reader.split("validation"))
    assert "user_turns" not in json.loads((world[2] / "settings.json").read_text())["trace"]
