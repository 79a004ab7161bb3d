"""`make trace ARGS=--preview`: what it shows is what the run stores, and it leaves nothing behind."""

import json
import os
import tempfile
from collections import namedtuple
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from data import collect, preview
from data.capture import Conversation
from data.estimate import Load, Speed, combined, extrapolate
from data.generate import Generator
from data.store import TraceReader
from recipes.cli import run
from recipes.loader import load_recipe
from recipes.schema import Generation, Recipe
from tests.tiny import chat_tokenizer, llama, write_prompts, write_recipe, write_target

THINGS = ("rain", "snow", "wind", "fog", "hail", "frost", "dew", "mist", "ice", "heat", "drought", "flood")
TEXTS = [f"tell me {'please ' * i}how one forecasts {thing}" for i, thing in enumerate(THINGS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A target whose states are wide enough that a shard's header does not matter; it never ends an answer."""
    folder = write_target(tmp_path_factory.mktemp("world") / "model")
    network = llama(hidden=256)
    network.lm_head.weight.data[2] = 0  # the end token's logit is 0, and some other one's is above
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An ordinary tiny target, where sizes do not matter."""
    return write_target(tmp_path_factory.mktemp("small") / "model")


def recipe_for(tmp_path, model, **sections):
    prompts = write_prompts(tmp_path / "p.jsonl", TEXTS)
    values = {"prompts": {"sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 3},
              "generation": {"max_tokens": 8, "batch_size": 3}} | sections
    return write_recipe(tmp_path / "r.yaml", model, **values)


def trace(recipe, *flags: str) -> int:
    with pytest.raises(SystemExit) as stop:
        run(collect.COMMAND, ["--config", str(recipe), *flags])
    return stop.value.code


def look(recipe, **settings) -> tuple[preview.Estimate, str]:
    """(estimate, what was printed) of a preview in this process."""
    out = StringIO()
    console = Console(file=out, width=140, **settings)
    return preview.preview(load_recipe(recipe, {}), collect.Collector, console), out.getvalue()


def files(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def conversations(path, count: int = 12):
    """A JSONL file of given conversations of two user turns each."""
    with open(path, "w") as f:
        for i in range(count):
            turns = [{"role": "user", "content": f"what is {'very ' * i}heavy {i}"},
                     {"role": "assistant", "content": f"a stone {'of lead ' * (i % 3)}{i}"},
                     {"role": "user", "content": f"and light as {i} feathers"},
                     {"role": "assistant", "content": f"a feather {i}"}]
            f.write(json.dumps({"id": f"c{i}", "messages": turns}) + "\n")
    return {"prompts": {"sources": [{"kind": "jsonl", "path": str(path)}], "validation": 2}}


@pytest.mark.parametrize("turns", ["one turn", "two turns, kept", "two turns, answered"])
def test_predicted_size_is_what_the_run_writes(tmp_path, model, turns):
    """Rows, tokens and bytes of the estimate against those of the run: within 5 % where answers have the length that
    was met; the sample's own bytes, too (case 14)."""
    sections = {} if turns == "one turn" else conversations(tmp_path / "c.jsonl")
    sections["generation"] = {"max_tokens": 8, "batch_size": 3, "answers": "keep" if "kept" in turns else "regenerate"}
    recipe = recipe_for(tmp_path, model, **sections)
    estimate, _ = look(recipe)
    assert trace(recipe) == 0
    traces = tmp_path / "runs" / "tiny" / "traces"
    written = sum(p.stat().st_size for p in (traces / "shards").glob("*.safetensors"))
    manifest = TraceReader(traces).manifest
    assert estimate.bytes[0] == pytest.approx(written, rel=0.05)
    assert estimate.bytes[0] / estimate.tokens[0] == pytest.approx(manifest["bytes_per_token"], rel=0.05)
    assert estimate.tokens[0] == pytest.approx(manifest["tokens"], rel=0.05)
    assert estimate.written[0] == pytest.approx(estimate.written[1], rel=0.05) and estimate.written[0] > 0
    assert estimate.rows[0] == manifest["rows"]
    # of two turns the upper bound has both answered, though each first answer is cut by length
    assert estimate.rows[1] == {"one turn": 12, "two turns, kept": 14, "two turns, answered": 24}[turns]


def test_nothing_is_left_and_nothing_is_changed(tmp_path, small, monkeypatch):
    """A preview writes no run folder; after it the run gives the files of a run without it; on a finished run of other
    settings it still works and touches nothing; at most four prompts are answered (cases 16, 30)."""
    asked, generate = [], Generator.run
    monkeypatch.setattr(Generator, "run", lambda self, requests, **named: (
        asked.append({r.id for r in requests}), generate(self, requests, **named))[1])
    recipe = recipe_for(tmp_path, small)
    before = files(tmp_path)
    assert trace(recipe, "--preview") == 0
    assert files(tmp_path) == before and not (tmp_path / "runs").exists()
    assert [len(ids) for ids in asked] == [1, 3] and len(set.union(*asked)) == 4
    assert trace(recipe) == 0
    with_preview = files(tmp_path / "runs")
    (tmp_path / "other").mkdir()
    assert trace(recipe, "--runs_dir", str(tmp_path / "other")) == 0
    varying = {"tiny/recipe.yaml", "tiny/traces/provenance.json"}
    without = files(tmp_path / "other")
    assert {k: v for k, v in with_preview.items() if k not in varying} == {
        k: v for k, v in without.items() if k not in varying}
    assert trace(recipe, "--preview", "--generation.seed", "7") == 0 and files(tmp_path / "runs") == with_preview


@pytest.mark.parametrize("code, flags", [(0, ()), (2, ("--prompts.sources", "[{kind: jsonl, path: /nowhere}]"))])
def test_nothing_is_written_outside_the_runs_folder(tmp_path, small, monkeypatch, code, flags):
    """A preview that succeeds and one that fails make folders below runs_dir only, and none stays (case 61)."""
    made, runs, mkdir = [], tmp_path / "deep" / "runs", os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, *mode: (made.append(Path(path)), mkdir(path, *mode))[1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))  # which nobody makes
    recipe = recipe_for(tmp_path, small)
    assert trace(recipe, "--preview", "--runs_dir", str(runs), *flags) == code
    below = [p for p in made if runs in p.parents]
    assert any(p.name.startswith(".preview-") for p in below) and not set(made) - {*below, runs, runs.parent}
    assert not runs.parent.exists() and not (tmp_path / "elsewhere").exists()


def test_prompts_without_a_given_answer_are_counted(tmp_path, model):
    """generation.answers: keep, and two prompts are token ids without an answer: said among the dropped ones."""
    sections = conversations(tmp_path / "c.jsonl")
    with open(tmp_path / "c.jsonl", "a") as f:
        for text in ("name three birds that never fly", "why does the sea look green at noon"):
            f.write(json.dumps({"id": text, "input_ids": chat_tokenizer()(text)["input_ids"]}) + "\n")
    sections["generation"] = {"max_tokens": 8, "batch_size": 3, "answers": "keep"}
    sections["prompts"]["validation"] = 0
    _, text = look(recipe_for(tmp_path, model, **sections))
    assert "'token ids without a given answer': 2" in text


def test_synthesis_is_sampled_by_a_handful(tmp_path, small):
    """Of 5000 prompts that the target shall write, a few are written; tokens and size are scaled to all of them."""
    recipe = recipe_for(tmp_path, small, prompts={"sources": [{"kind": "synthesis", "count": 5000}], "validation": 3})
    estimate, text = look(recipe)
    assert estimate.rows == (5000, 5000) and estimate.prompts == 5000 and estimate.synthesis[1] > 0
    assert estimate.supervised[0] > 5000 * 8 + 5000 * 2, "the user turns that it writes itself are learnt from, too"
    assert estimate.tokens[0] > 5000 * 30 and text.count("5,000") >= 3 and not (tmp_path / "runs").exists()


def test_screen_shows_rows_counts_and_estimate(tmp_path, model):
    """The rows' text with the answer between brackets, special tokens spelled out, size, time, disk and the word
    estimate; without a terminal there are no colour codes."""
    _, text = look(recipe_for(tmp_path, model))
    assert f"<|im_start|>user\n{TEXTS[0]}<|im_end|>\n<|im_start|>assistant\n⟦" in text
    assert text.count("8 supervised") == 4
    for part in ("p0: ", "the target's answer, ended by length", "disk a token", "time: answers", " MB",
                 "An estimate from 4 answers", "Free on disk", "Nothing of this preview is kept"):
        assert part in text, part
    assert "\x1b" not in text
    assert "\x1b[1;32m" in look(recipe_for(tmp_path, model), force_terminal=True, color_system="standard")[1]


def test_colours_follow_the_mask():
    """Hand-written row: prompt dim, answer green, user turn to learn from cyan, special tokens reversed, markup and
    terminal codes shown as text, brackets around each span that is learnt from."""
    tokenizer = chat_tokenizer()
    ids = tokenizer("<|im_start|>ab<|im_end|>cd<|im_end|>", add_special_tokens=False)["input_ids"]
    text = preview.coloured(tokenizer, Conversation("r", "train", ids, [0, -1, -1, -1, 1, 1, 1], [], "stop"))
    assert text.plain == "<|im_start|>⟨ab<|im_end|>⟩⟦cd<|im_end|>⟧"
    assert [(text.plain[s.start : s.end], s.style) for s in text.spans] == [
        ("<|im_start|>", "dim reverse"), ("⟨", "cyan"), ("ab", "cyan"), ("<|im_end|>", "cyan reverse"), ("⟩", "cyan"),
        ("⟦", "bold green"), ("cd", "bold green"), ("<|im_end|>", "bold green reverse"), ("⟧", "bold green")]
    assert preview.visible("a\x1b[31m\tb\n[red]") == "a␛[31m\tb\n[red]"


def test_long_row_is_shown_by_its_ends():
    """A long row shows its first and last tokens and says how many are left out; the mask stays with its text."""
    tokenizer = chat_tokenizer()
    ids = tokenizer("a" * 500 + "b" * 500, add_special_tokens=False)["input_ids"]
    text = preview.coloured(tokenizer, Conversation("r", "train", ids, [0] * 500 + [1] * 500, [], "stop")).plain
    assert text == "a" * 200 + " ... 600 tokens ... ⟦" + "b" * 200 + "⟧"
    text = preview.coloured(tokenizer, Conversation("r", "train", ids, [-1] * 500 + [1] * 500, [], "stop")).plain
    assert text == "⟨" + "a" * 200 + "⟩ ... 600 tokens ... ⟦" + "b" * 200 + "⟧"


def test_what_would_stop_the_run_is_a_warning(tmp_path, small, monkeypatch):
    """Too little disk and too few prompts for the split are said before the run; the preview still exits 0 (case 14).
    """
    monkeypatch.setattr(preview, "free_bytes", lambda recipe: 1000)
    estimate, text = look(recipe_for(tmp_path, small, prompts={
        "sources": [{"kind": "jsonl", "path": str(tmp_path / "p.jsonl")}], "validation": 12}))
    assert "would not fit on this disk" in text and "12 usable prompts, but prompts.validation holds out 12" in text
    assert len(estimate.warnings) == 2


def test_free_space_is_that_of_the_runs_folder(tmp_path, monkeypatch):
    """The disk asked is the one of the nearest existing folder above runs/<name>."""
    asked = []
    monkeypatch.setattr(preview.shutil, "disk_usage", lambda p: asked.append(p) or namedtuple("U", "free")(7))
    assert preview.free_bytes(Recipe(name="n", runs_dir=str(tmp_path / "a" / "b"))) == 7 and asked == [tmp_path]


def test_bad_recipe_fails_as_the_run_does(tmp_path, small, capsys):
    """A user's mistake is the run's own message and exit code, without a run folder."""
    assert trace(recipe_for(tmp_path, small), "--preview", "--generation.max_tokens", "9000") == 2
    assert "leaves no room" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_extrapolation_by_hand():
    """Steps of 2 s alone and 3 s with three rows: half a second a row. 100 answers of the sampled length 10 in batches
    of 10: 100 steps of 1.5 + 10 * 0.5 s; or, at the measured rate of one token a second, 1000 s. Bytes by the store's
    formula: 10 a token, 4 for each of 2 taps and a final state of width 3."""
    recipe = Recipe(generation=Generation(max_tokens=20, batch_size=10))
    target = SimpleNamespace(layers=[1, 2], hidden=3)
    row = Conversation("r", "train", [0] * 15, [0] * 5 + [1] * 10, [], "stop")
    load = Load(rows=100, known=500.0, answers=100.0, repeats=100.0)
    found = extrapolate(recipe, target, [load], [row], Speed(2.0, 3.0, 3, 1.0), capturing=50.0)
    assert found.tokens == (1500.0, 2500.0) and found.supervised == (1000.0, 2000.0)
    assert found.bytes == (1500 * (10 + 24) + 1000 * 12, 2500 * (10 + 24) + 2000 * 12)
    assert found.answers == (650.0, 1000.0) and found.states == (30.0, 50.0) and found.sampled == 1


def test_later_turns_count_by_the_share_of_answers_that_end():
    """Half of the answers end: half of the second turns and a quarter of the third come about; at most all do."""
    loads = [Load(rows=8, repeats=8.0), Load(rows=8, known=80.0, repeats=16.0), Load(rows=4, repeats=12.0)]
    assert combined(loads, 0.5) == Load(rows=13.0, known=40.0, repeats=19.0) and combined(loads, 1.0).rows == 20
