"""`make compare RECIPE=...`: drafters of one recipe on the same traces, with the same time each."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from test_engine_run import gone, until
from tiny import call, write_prompts, write_recipe
from tiny_run import EVAL, cycling_target

from data import collect
from drafters.registry import entry, options_of
from eval import compare
from eval import run as eval_run
from eval.contest import Contest, choices, entrants, share_traces, table
from recipes.errors import ConfigError, RunError
from recipes.loader import load_recipe
from train import run as train_run

ROOT = Path(__file__).resolve().parent.parent
DRAFTERS = [{"name": "heads", "kind": "medusa", "options": {"draft_vocab_size": 64, "heads": 3}},
            {"name": "lookup", "kind": "lookup", "eval": {"draft_length": 2}},
            {"name": "taught", "kind": "eagle3", "options": {"draft_vocab_size": 64}, "train": {"lr": 0.02}}]


def written(folder: Path, **changes) -> Path:
    """A recipe on a target that goes round in threes, so that looking up pays; the words make short prompts."""
    words = ["tea", "no", "abc", "42", "cab", "bat", "ace", "fed"]
    asked = write_prompts(folder / "eval.jsonl", [f"say {word}" for word in words[:4]])
    told = write_prompts(folder / "train.jsonl", [f"{one} {other}" for one in words for other in words if one != other])
    return write_recipe(
        folder / "r.yaml", cycling_target(folder / "model"),
        prompts={"sources": [{"kind": "jsonl", "path": str(told)}], "validation": 4}, generation={"max_tokens": 12},
        eval={**EVAL, "prompts": str(asked), "batch_sizes": [2]}, train={"validate_every": 10, "save_every": 10},
        compare={"drafters": DRAFTERS, "minutes": 0.02, "probe_steps": 4} | changes)


class Here:
    """Runs stages in this process, and remembers them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, arguments: list[str]) -> int:
        path = Path(arguments[-1])
        self.done.append(f"{path.stem} {[word for word in arguments if not word.startswith('-')][-2].split('/')[-1]}")
        command = (collect.COMMAND if "data.collect" in arguments else
                   eval_run.COMMAND if "eval.run" in arguments else train_run.COMMAND)
        return call(command, path)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contest")
    recipe, here, patch = written(folder), Here(), pytest.MonkeyPatch()
    patch.setattr(compare, "Contest", partial(Contest, stage=here))
    assert call(compare.COMMAND, recipe) == 0
    yield recipe, here
    patch.undo()


def test_all_are_trained_on_the_same_traces_for_the_same_time(held):
    """Traces once, linked; who trains is timed first and gets as many steps as fit into the minutes; each is evaluated
    with what is its own; the file has their figures and the fastest at each batch size."""
    recipe, here = held
    runs, place = recipe.parent / "runs", recipe.parent / "runs" / "tiny" / "compare"
    assert here.done[:7] == ["traces data.collect", "heads-probe medusa.py", "heads medusa.py", "heads eval.run",
                             "lookup eval.run", "taught-probe eagle3.py", "taught eagle3.py"]
    result = json.loads((place / "compare.json").read_text())
    assert [run["drafter"] for run in result["runs"]] == ["medusa", "lookup", "eagle3"]
    rows = {row["name"]: row for row in result["drafters"]["rows"]}
    for name in ("heads", "taught"):
        assert (runs / f"tiny-{name}" / "traces").resolve() == (runs / "tiny" / "traces").resolve()
        found = json.loads((place / f"{name}.json").read_text())
        assert found["steps"] == max(1, int(1.2 / found["seconds_a_step"])) == rows[name]["steps"]
        trained = json.loads((runs / f"tiny-{name}" / "checkpoints" / "timing.json").read_text())
        assert rows[name]["seconds"] == trained["seconds"] > 0
    assert rows["lookup"]["steps"] == 0 and rows["lookup"]["tokens_per_target_pass"] > 1.5
    assert all(row["mismatches"] == 0 and row["batches"].keys() == {"1", "2"} for row in rows.values())
    lookup = json.loads((runs / "tiny-lookup" / "eval" / "report.json").read_text())
    assert lookup["settings"]["draft_length"] == 2
    assert yaml.safe_load((place / "taught.yaml").read_text())["train"]["lr"] == 0.02
    assert [one["batch"] for one in result["drafters"]["choices"]] == [1, 2]
    assert "Which drafter for which batch" in (place / "compare.html").read_text()


def test_the_same_command_again_trains_nothing(held):
    """Every stage finds what was finished, and the length of a training is not measured anew."""
    recipe, here = held
    place = recipe.parent / "runs" / "tiny" / "compare"
    before = json.loads((place / "compare.json").read_text()), len(here.done)
    assert call(compare.COMMAND, recipe) == 0
    assert not [stage for stage in here.done[before[1]:] if "probe" in stage]
    after = json.loads((place / "compare.json").read_text())
    assert [run["sha256"] for run in after["runs"]] == [run["sha256"] for run in before[0]["runs"]]


def test_a_failing_stage_is_named(held, capsys):
    """With its recipe, which can be run alone; one that was stopped says that it can go on."""
    recipe, _ = held
    for code, said in ((2, "traces of all failed with exit code 2 (its recipe: "), (143, "stopped; run the same")):
        with pytest.raises(RunError, match=said[:20]) as error:
            Contest(load_recipe(recipe), "r", lambda arguments, code=code: code).hold()
        assert said in str(error.value)


def test_a_stage_ends_with_the_comparison(tmp_path):
    """kill -9 of the comparison: the stage that it runs is ended too, and holds no run folder (case 61)."""
    stage = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"from eval.contest import by_subprocess; by_subprocess(['-c', {stage!r}])"
    parent, path = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT), tmp_path / "pid"
    assert until(lambda: path.is_file() and path.read_text())
    parent.kill()
    parent.wait()
    assert until(lambda: gone(int(path.read_text())), 30)


def test_a_stopped_comparison_stops_what_its_launcher_started(tmp_path):
    """SIGTERM: the stage's own child, to which a launcher passes nothing on, is told and waited for (case 61)."""
    saving = (f"import os, signal, sys, time; path = {str(tmp_path / 'pid')!r}\n"
              "def save(*_): time.sleep(0.5); open(path + '.saved', 'w').close(); sys.exit(143)\n"
              "signal.signal(signal.SIGTERM, save); open(path, 'w').write(str(os.getpid())); time.sleep(600)")
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {saving!r}])"
    code = ("from eval.contest import by_subprocess; from recipes.launched import stoppable\n"
            f"with stoppable(): by_subprocess(['-c', {launcher!r}])")
    parent, path = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT), tmp_path / "pid"
    assert until(lambda: path.is_file() and path.read_text())
    parent.terminate()
    assert parent.wait(60) == 143 and path.with_name("pid.saved").is_file() and gone(int(path.read_text()))


@pytest.mark.parametrize("drafters, said", [
    (DRAFTERS[:1], "compare.drafters names 1; name at least two"),
    ([DRAFTERS[0], DRAFTERS[0]], "drafters[1].name = heads: another drafter has it"),
    ([DRAFTERS[0], {"name": "a/b", "kind": "lookup"}], "drafters[1].name = 'a/b'"),
    ([DRAFTERS[0], {"name": "x", "kind": "eagle4"}], "drafter.kind = 'eagle4': unknown"),
    ([DRAFTERS[0], {"name": "x", "kind": "lookup", "train": {"epoch": 1}}], "drafters[1]: unknown key train.epoch"),
    ([DRAFTERS[0], {"name": "x", "kind": "medusa", "options": {"head": 1}}], "unknown key head")])
def test_wrong_drafters_are_refused_before_anything_runs(tmp_path, drafters, said):
    recipe = load_recipe(written(tmp_path, drafters=drafters))
    with pytest.raises(ConfigError) as error:
        entrants(recipe, "r.yaml: ")
    assert said in str(error.value)


def test_traces_of_another_run_are_not_replaced(tmp_path):
    """A link that is there already stays; other traces are refused."""
    shared, own = tmp_path / "a" / "traces", tmp_path / "b" / "traces"
    shared.mkdir(parents=True)
    for _ in range(2):
        share_traces(shared, own)
    assert own.is_symlink() and own.resolve() == shared.resolve()
    (tmp_path / "c" / "traces").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has traces of its own"):
        share_traces(shared, tmp_path / "c" / "traces")


def row(name: str, low: float, one: float, four: float, **more) -> dict:
    batches = {"1": {"speedup": one}, "4": {"speedup": four}} | more
    return {"name": name, "speedup_ci95": [low, one + 0.1], "batches": batches}


def test_choices_by_hand():
    """The fastest at each batch size that all were timed at; at batch 1 with what its interval says."""
    rows = [row("a", 1.1, 1.3, 0.9), row("b", 1.0, 1.2, 0.95), row("c", 0.5, 0.7, 0.4, **{"8": {"speedup": 9.0}})]
    first, second = choices(rows, lambda i, j: (i, j) == (0, 1))
    assert (first["batch"], first["best"], first["why"]) == (1, "a", "told apart from b, the next")
    assert (second["batch"], second["best"], second["speedup"]) == (4, "none", 0.95)
    assert "b 0.95" in second["why"]
    assert choices(rows, lambda i, j: False)[0]["why"] == "not told apart from b, the next"
    rows[0]["speedup_ci95"] = [0.9, 1.4]
    assert choices(rows, lambda i, j: True)[0]["why"] == "not told apart from plain decoding"


def test_cost_needs_a_price(tmp_path):
    """$ 3.60 an hour at 100 tokens/s: a million tokens take 10,000 s, so $ 10."""
    one = entrants(load_recipe(written(tmp_path)), "r")[1:2]
    report = {"drafter": {"kind": "lookup", "parameters": 0}, "total": {
        "tokens_per_target_pass": 1.5, "lossless": {"greedy": {"mismatches": 0}}, "memory": {"peak_bytes": 1},
        "speed": {"ci95": [1.0, 1.2], "by_batch": [{"batch": 1, "speedup": 1.1, "speculative_tok_s": 100.0,
                                                    "baseline_tok_s": 90.0}]}}}
    assert table(one, [report], 3.6)[0]["batches"]["1"]["cost"] == pytest.approx(10)
    assert table(one, [report], 0.0)[0]["batches"]["1"]["cost"] is None


def test_the_shipped_comparison_is_a_valid_one():
    """Its drafters exist, their options are read, and all that train are traced for alike."""
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m" / "compare.yaml")
    found = entrants(recipe, "compare.yaml")
    assert [one.name for one in found] == ["eagle3", "parallel", "medusa", "lookup", "suffix", "layers", "hybrid"]
    for one in found:
        kind, options = one.recipe.drafter.kind, one.recipe.drafter.options
        assert entry(kind) and options_of(kind, options)
        assert one.recipe.train.validation_draft_length == recipe.train.validation_draft_length
