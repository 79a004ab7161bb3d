"""`make inspect`: every kind of damage is named, and repair ends with the files of an undisturbed run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data import collect
from data.backends.units import unit_digest
from data.capture import capture
from data.collect import COMMAND as TRACE
from data.generate import Generator
from data.prompts import hold_out
from data.store import TraceReader, list_digest
from data.tracetool import COMMAND as INSPECT
from recipes.cli import Command, run
from recipes.files import sha256_file
from tests.tiny import CHATML, llama, write_prompts, write_recipe, write_target

TEXTS = [f"tell me in a few simple words how one forecasts {thing} for the next day" for thing in
         ("rain", "snow", "wind", "fog", "hail", "frost", "dew", "mist")]
FIRST, SECOND = "shard-00000", "shard-00001"


def call(command: Command, recipe: Path, *flags: str) -> int:
    """Exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as stop:
        run(command, ["--config", str(recipe), *flags])
    return stop.value.code


def write_run(folder: Path, model: Path, prompts: Path, **trace) -> Path:
    """The recipe of a run in this folder: three held-out rows, shards of the smallest size."""
    return write_recipe(
        folder / "r.yaml", model, prompts={"sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 3},
        generation={"max_tokens": 8, "batch_size": 4, "unit_rows": 4},
        trace={"layers": [1, 2, 3], "shard_mb": 1, "verify_rows": 3, **trace})


def wide_target(folder: Path, seed: int = 0) -> Path:
    """Wide states, so that eight rows fill several shards of 1 MB."""
    write_target(folder)
    llama(seed, hidden=256).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model, prompts, traces of one undisturbed run)"""
    folder = tmp_path_factory.mktemp("world")
    model, prompts = wide_target(folder / "model"), write_prompts(folder / "prompts.jsonl", TEXTS)
    assert call(TRACE, write_run(folder, model, prompts)) == 0
    return model, prompts, folder / "runs" / "tiny" / "traces"


@pytest.fixture
def copied(world, tmp_path) -> tuple[Path, Path]:
    """(recipe, traces) of a run that may be damaged."""
    traces = tmp_path / "runs" / "tiny" / "traces"
    shutil.copytree(world[2], traces)
    return write_run(tmp_path, *world[:2]), traces


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != "provenance.json"}


def shard(traces: Path, name: str) -> tuple[Path, Path]:
    return traces / "shards" / f"{name}.safetensors", traces / "shards" / f"{name}.json"


def rewrite(traces: Path, name: str, change) -> None:
    """Changes a shard's tensors and makes checksum and list agree with them again."""
    tensors, listing = shard(traces, name)
    held = load_file(tensors)
    change(held)
    save_file(held, tensors)
    listed = json.loads(listing.read_text()) | {"sha256": sha256_file(tensors), "bytes": tensors.stat().st_size}
    listing.write_text(json.dumps(listed | {"list_sha256": list_digest(listed)}))


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def truncate(traces):
    path = shard(traces, SECOND)[0]
    path.write_bytes(path.read_bytes()[:-40])


def flip(traces):
    path = shard(traces, SECOND)[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def lose(traces):
    shard(traces, SECOND)[0].unlink()


def tear_list(traces):
    path = shard(traces, SECOND)[1]
    path.write_text(path.read_text()[:60])


def edit_tail(traces):
    edit(shard(traces, SECOND)[1], lambda listed: listed["rows"][0].update(tail=[9, 9, 9, 9]))


def drop_length(traces):
    edit(shard(traces, SECOND)[1], lambda listed: listed["rows"][0].pop("tokens"))


def foreign(traces):
    edit(shard(traces, SECOND)[1], lambda listed: listed.update(key="k2"))


def exchange(traces):
    for one, other in zip(shard(traces, FIRST), shard(traces, SECOND)):
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)


def double(traces):
    for one, other in zip(shard(traces, FIRST), shard(traces, SECOND)):
        other.write_bytes(one.read_bytes())
    edit(shard(traces, SECOND)[1], lambda listed: listed.update(name=SECOND))
    edit(shard(traces, SECOND)[1], lambda listed: listed.update(list_sha256=list_digest(listed)))


def rename(traces):
    for path in shard(traces, SECOND):
        path.rename(path.with_stem("shard-00042"))


def add_nan(traces):
    rewrite(traces, SECOND, lambda held: held["taps"][4].fill_(torch.nan))


def add_inf(traces):
    rewrite(traces, SECOND, lambda held: held["final"][0, 3].fill_(torch.inf))


def shorten_finals(traces):
    rewrite(traces, SECOND, lambda held: held.update(final=held["final"][:-1].contiguous()))


def unmask(traces):
    rewrite(traces, SECOND, lambda held: held["turns"][2].fill_(1))


def wrong_ids(traces):
    rewrite(traces, SECOND, lambda held: held["ids"][2].fill_(64))


def slightly_off(traces):
    for name in (FIRST, SECOND):
        rewrite(traces, name, lambda held: held["final"].mul_(1.001))


def leave_temporary(traces):
    for name in (".shard-00001.tmp", ".tmpAbCdEf", ".shard-00001.json.77.tmp"):
        (traces / "shards" / name).write_bytes(b"half")


def tear_manifest(traces):
    path = traces / "manifest.json"
    path.write_text(path.read_text()[:200])


def other_manifest(traces):
    edit(traces / "manifest.json", lambda m: m.update(key="k2", layers=[0, 1, 2]))


def lose_a_shard_from_the_manifest(traces):
    edit(traces / "manifest.json", lambda m: m["shards"].pop())


def tear_answers(traces):
    path = traces / "answers" / "0-00001.json"
    path.write_text(path.read_text()[:-30])


def change_an_answer(traces):
    edit(traces / "answers" / "0-00001.json", lambda unit: unit["answers"][0]["tokens"].__setitem__(2, 9))


# damage, what verify says, how many shards repair captures again
DAMAGE = [
    (truncate, [f"{SECOND}.safetensors: holds"], 1),
    (flip, [f"{SECOND}.safetensors: checksum differs"], 1),
    (lose, [f"{SECOND}.safetensors: missing"], 1),
    (tear_list, [f"{SECOND}.json: missing or unreadable"], 1),
    (edit_tail, [f"{SECOND}.json: edited since it was written"], 1),
    (drop_length, [f"{SECOND}.json: field tokens is missing"], 1),
    (foreign, [f"{SECOND}.json: belongs to another trace set"], 1),
    (exchange, [f"{FIRST}.json: was written as {SECOND}", f"{SECOND}.json: was written as {FIRST}"], 2),
    (double, [f"{FIRST}.json: row p", f"{SECOND}.json: row p", "stands in the store twice"], 2),
    (rename, [f"{SECOND}.json: missing", "shard-00042.json: shard that the manifest does not name"], 1),
    (add_nan, [f"{SECOND}.safetensors: row p", "NaN or Inf in taps"], 1),
    (add_inf, [f"{SECOND}.safetensors: row p", "NaN or Inf in final"], 1),
    (shorten_finals, [f"{SECOND}.safetensors: final is torch.float32"], 1),
    (unmask, [f"{SECOND}.safetensors: row p", "loss positions"], 1),
    (wrong_ids, [f"{SECOND}.safetensors: row p", "token ids outside"], 1),
    (slightly_off, ["are not the target's: off by"], 2),
    (leave_temporary, [".shard-00001.tmp: temporary", ".tmpAbCdEf: temporary", ".77.tmp: temporary"], 0),
    (tear_manifest, ["manifest.json: missing or unreadable"], 0),
    (other_manifest, ["manifest.json: of another configuration: layers was [0, 1, 2]",
                      f"{FIRST}.json: belongs to another"], 0),
    (lose_a_shard_from_the_manifest, ["manifest.json: counts 8 rows, the shards list 4", "does not name"], 0),
    (tear_answers, ["answers/0-00001.json: torn"], 0),
    (change_an_answer, ["answers/0-00001.json: edited since it was written"], 0),
]


def same_store(traces: Path, undisturbed: Path) -> None:
    """The same files but for the bytes of states, which may differ by the order of sums."""
    ours, theirs = files(traces), files(undisturbed)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if not name.startswith("shards/"))
    a, b = TraceReader(traces), TraceReader(undisturbed)
    assert [place.listed for place in a.places] == [place.listed for place in b.places]
    for i in range(len(TEXTS)):
        assert torch.equal(a[i].ids, b[i].ids) and torch.equal(a[i].turns, b[i].turns)
        for x, y in ((a[i].taps, b[i].taps), (a[i].final, b[i].final)):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-4 * float(y.abs().max()))


@pytest.mark.parametrize("damage, said, captured", DAMAGE, ids=[d[0].__name__ for d in DAMAGE])
def test_damage_is_named_and_repaired(world, copied, capsys, monkeypatch, damage, said, captured):
    """Each fault is listed with exit code 1 and nothing touched; repair captures only what is broken from the answers
    that are there, and ends with the store of an undisturbed run: states that came with the answers are computed again
    in another order of sums, everything else is the same to the byte (cases 34, 35, 36)."""
    recipe, traces = copied
    damage(traces)
    before = files(traces)
    assert call(INSPECT, recipe, "--verify") == 1
    out = capsys.readouterr()
    faults = "\n".join(line for line in out.out.splitlines() if line.startswith("fault: "))
    assert all(part in faults for part in said), faults
    assert "Traceback" not in out.err and files(traces) == before
    runs, calls = [], []
    generate = Generator.run
    monkeypatch.setattr(Generator, "run", lambda *args, **named: runs.append(1) or generate(*args, **named))

    def spy(target, rows, *rest):
        calls.extend([len(rows)] if rows else [])
        return capture(target, rows, *rest)

    monkeypatch.setattr(collect, "capture", spy)
    sample = "8" if damage is slightly_off else "2"
    assert call(INSPECT, recipe, "--repair", "--trace.verify_rows", sample) == 0
    assert "recomputed row holds" in capsys.readouterr().out
    same_store(traces, world[2])
    assert len(calls) == captured and len(runs) == (damage in (tear_answers, change_an_answer))


def test_all_faults_are_listed_together(copied, capsys):
    """One run names them all, with their number (case 35)."""
    recipe, traces = copied
    for damage in (flip, leave_temporary, tear_answers):
        damage(traces)
    assert call(INSPECT, recipe, "--verify") == 1
    out = capsys.readouterr()
    assert out.out.count("fault: ") == 5 and "5 faults" in out.err


def test_inspect_prints_what_the_folder_holds(world, capsys):
    """Rows by split, tokens, finish reasons, layers, dtype, bytes, shards; it only reads (case 14)."""
    recipe = world[2].parents[2] / "r.yaml"
    before, resolved = files(world[2]), (world[2].parent / "recipe.yaml").read_bytes()
    assert call(INSPECT, recipe, "--trace.verify_rows", "1") == 0
    shown = {cells[1].strip(): cells[2].strip() for cells in
             (line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│"))}
    manifest = json.loads((world[2] / "manifest.json").read_text())
    size = sum(p.stat().st_size for p in (world[2] / "shards").glob("*.safetensors"))
    assert shown["rows"].startswith("8 (train 5, validation 3), 0 left out")
    assert shown["tokens"] == f"{manifest['tokens']}, of them supervised in training {manifest['supervised_tokens']}"
    assert shown["answers ended by"] == ", ".join(f"{k} {n}" for k, n in manifest["finish"].items())
    assert shown["layers"] == "[1, 2, 3], hidden size 256" and shown["dtype"] == "float32"
    assert shown["bytes"].startswith(f"{size} (+") and shown["bytes per token"] == f"{size / manifest['tokens']:.0f}"
    assert shown["shards"] == "2 of 2" and shown["target weights"] == manifest["target"]["weights"][:16]
    assert files(world[2]) == before and (world[2].parent / "recipe.yaml").read_bytes() == resolved


def test_lock_of_a_refused_run_is_no_fault(copied):
    """Processes of a launch that is refused leave the file by which they find each other: it is none of the traces'."""
    recipe, traces = copied
    (traces / ".lock").touch()
    assert call(INSPECT, recipe, "--verify", "--trace.verify_rows", "0") == 0


def test_repair_in_two_passes_counts_once(copied):
    """A broken manifest is made anew first, what a killed run left goes after it. What the units of answers count, here
    three failed attempts, is in the manifest once all the same."""
    recipe, traces = copied
    unit = sorted((traces / "answers").glob("*.json"))[0]
    edit(unit, lambda stored: stored.update(counts={"HTTP 500": 3}))
    edit(unit, lambda stored: stored.update(sha256=unit_digest(stored)))
    (traces / "manifest.json").write_text("{")
    leave_temporary(traces)
    assert call(INSPECT, recipe, "--repair") == 0
    assert json.loads((traces / "manifest.json").read_text())["answer_counts"] == {"HTTP 500": 3}


def test_sample_is_chosen_by_seed_and_size(copied, capsys):
    """A wrong state in one row is found when its row is drawn: always with all rows, never with none (case 34)."""
    recipe, traces = copied
    rewrite(traces, SECOND, lambda held: held["taps"][3].mul_(1.01))
    ids = [f"p{i}" for i in range(len(TEXTS))]
    wrong = json.loads(shard(traces, SECOND)[1].read_text())["rows"][0]["id"]
    drawn = {seed: hold_out(ids, 1, seed) for seed in range(99)}
    hit, miss = (next(s for s, chosen in drawn.items() if (chosen == {wrong}) is found) for found in (True, False))
    for rows, seed, code in ((0, hit, 0), (1, hit, 1), (1, miss, 0), (99, miss, 1)):
        assert call(INSPECT, recipe, "--verify", "--trace.verify_rows", str(rows),
                    "--trace.verify_seed", str(seed)) == code
        assert (f"{SECOND}.safetensors: row {wrong}" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize("change, named", [
    (lambda m, p: wide_target(m, seed=1), "target.weights was"),
    (lambda m, p: (write_target(m, template=CHATML + " "), llama(hidden=256).save_pretrained(m)),
     "target.template was"),
    (lambda m, p: write_prompts(p, TEXTS[::-1]), "sources[0].sha256"),
], ids=["weights", "template", "prompts"])
def test_traces_of_another_target_are_reported_and_left_alone(world, tmp_path, capsys, change, named):
    """Fingerprint by fingerprint; repair refuses with code 2 and removes nothing (cases 30, 36)."""
    model, prompts = shutil.copytree(world[0], tmp_path / "model"), tmp_path / "p.jsonl"
    write_prompts(prompts, TEXTS)
    recipe, traces = write_run(tmp_path, model, prompts), tmp_path / "runs" / "tiny" / "traces"
    assert call(TRACE, recipe) == 0
    change(model, prompts)
    leave_temporary(traces)
    before = files(traces)
    assert call(INSPECT, recipe, "--verify") == 1
    out = capsys.readouterr().out
    assert f"settings.json: of another configuration: {named}" in out and "recomputed" not in out
    assert call(INSPECT, recipe, "--repair") == 2
    assert named.rsplit(".", 1)[-1] in capsys.readouterr().err and files(traces) == before


def test_every_changed_setting_is_listed(copied, capsys):
    """Not only the first: what the recipe has otherwise than the traces (case 30)."""
    assert call(INSPECT, copied[0], "--verify", "--generation.max_tokens", "9", "--prompts.seed", "4") == 1
    out = capsys.readouterr().out
    assert "generation.max_tokens was 8, now 9" in out and "prompts.seed was 0, now 4" in out


@pytest.mark.parametrize("switch", [(), ("--verify",)])
def test_store_without_rows_is_an_error(copied, capsys, switch):
    """Zero rows never pass as an empty success (case 35)."""
    recipe, traces = copied
    for path in (traces / "shards").iterdir():
        path.unlink()
    edit(traces / "manifest.json", lambda m: m.update(shards=[], rows=0))
    assert call(INSPECT, recipe, *switch) == 1
    assert "no shard holds a row" in capsys.readouterr().out


def test_folder_without_states_says_how_far_it_is(copied, capsys):
    """A run that is still answering is no damaged store: nothing is called a fault."""
    recipe, traces = copied
    shutil.rmtree(traces / "shards")
    (traces / "manifest.json").unlink()
    assert call(INSPECT, recipe) == 1
    out = capsys.readouterr()
    assert "no states yet (2 finished units of answers); run `make trace`" in out.err and "fault" not in out.out


def test_repair_is_not_advised_where_it_would_refuse(copied, capsys):
    """Traces of another recipe are nothing to mend: the message says so (case 36)."""
    assert call(INSPECT, copied[0], "--verify", "--generation.seed", "9") == 1
    error = capsys.readouterr().err
    assert "use another `name`" in error and "--repair" not in error


@pytest.mark.parametrize("switch", ["--verify", "--repair"])
def test_missing_folder_is_an_error_and_is_not_made(world, tmp_path, capsys, switch):
    """Nothing to inspect: one message, exit code 1, no folder (case 35)."""
    assert call(INSPECT, write_run(tmp_path, *world[:2]), switch) == 1
    assert "run `make trace` first" in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("storage, precision", [
    ("float8_e4m3", "float32"), ("int8", "float32"), ("float16", "float32"), ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"), ("int8", "float16")])
def test_sound_traces_of_every_dtype_verify(world, tmp_path, capsys, storage, precision):
    """Recomputed rows lie within the tolerance of their storage and target dtypes, and one that is not is found;
    bytes as predicted within 5 % (case 14)."""
    recipe = write_run(tmp_path, *world[:2], dtype=storage)
    flags = ["--target.dtype", precision, "--trace.verify_rows", "4"]
    assert call(TRACE, recipe, *flags) == 0 and call(INSPECT, recipe, "--verify", *flags) == 0
    traces = tmp_path / "runs" / "tiny" / "traces"
    size = sum(p.stat().st_size for p in (traces / "shards").glob("*.safetensors"))
    assert abs(size / json.loads((traces / "manifest.json").read_text())["predicted_bytes"] - 1) < 0.05
    rewrite(traces, FIRST, lambda held: held.update(taps=held["taps"].view(torch.uint8).roll(1, 0).view(
        held["taps"].dtype)))  # every state one token late
    assert call(INSPECT, recipe, "--verify", *flags) == 1
    assert "tokens are not the target's" in capsys.readouterr().out
