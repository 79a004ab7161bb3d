"""What a run says of itself: recipe.yaml, provenance.json and the hours that `make roi` reads from it."""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from tiny import call, write_prompts, write_recipe, write_target

from data.collect import COMMAND as TRACE
from eval.roi_serving import training_hours
from eval.run import COMMAND as EVAL
from eval.ship import COMMAND as EXPORT
from recipes.loader import load_recipe
from train.run import COMMAND as TRAIN

TEXTS = [f"how does one forecast {thing}?" for thing in ("rain", "snow", "wind", "fog", "hail", "frost")]
LONG_AGO = 1_700_000_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The recipe of a run that was traced and trained."""
    folder = tmp_path_factory.mktemp("finished")
    prompts = write_prompts(folder / "prompts.jsonl", TEXTS)
    recipe = write_recipe(folder / "r.yaml", write_target(folder / "model"), generation={"max_tokens": 8},
                          prompts={"sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 2},
                          train={"save_every": 1, "keep": 1})
    assert call(TRACE, recipe) == 0 and call(TRAIN, recipe) == 0
    return recipe


@pytest.fixture
def run(finished, tmp_path) -> tuple[Path, Path]:
    """(recipe, folder of a copy of the run)"""
    shutil.copytree(finished.parent / "runs", tmp_path / "runs")
    values = yaml.safe_load(finished.read_text()) | {"runs_dir": str(tmp_path / "runs")}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "r.yaml", tmp_path / "runs" / "tiny"


def stamps(run: Path) -> list[bytes]:
    return [(run / name).read_bytes() for name in ("provenance.json", "traces/provenance.json")]


def records(run: Path) -> list[bytes]:
    return [(run / "recipe.yaml").read_bytes(), *stamps(run)]


def stamped(path: Path) -> float:
    return datetime.fromisoformat(json.loads(path.read_text())["time"]).timestamp()


def test_stamps_come_before_the_work(finished):
    """The stamp of each stage is older than everything that the stage made."""
    run = finished.parent / "runs" / "tiny"
    for stamp, made in (("traces/provenance.json", ("traces/answers/*.json", "traces/shards/*.json")),
                        ("provenance.json", ("checkpoints/step-*/trainer.json",))):
        written = [path.stat().st_mtime_ns for pattern in made for path in run.glob(pattern)]
        assert written and (run / stamp).stat().st_mtime_ns <= min(written)


def test_hours_are_those_from_the_stamps_to_the_last_shard_and_checkpoint(run):
    """Two hours of tracing and three of training on four GPUs are 20; the stages found finished add nothing. Where a
    stamp was written behind its work, as earlier versions did, the hours are not known instead of none."""
    recipe, folder = run
    ends = {"traces/provenance.json": ("traces/shards/*.json", 2), "provenance.json": ("checkpoints/step-*/*.json", 3)}
    for stamp, (made, hours) in ends.items():
        end = stamped(folder / stamp) + 3600 * hours
        for path in folder.glob(made):
            os.utime(path, (end, end))
    asked = load_recipe(recipe, {"plan.gpus": "4"})
    assert training_hours(asked)[0] == pytest.approx(4 * (2 + 3))
    before = stamps(folder)
    assert call(TRACE, recipe) == 0 and call(TRAIN, recipe) == 0
    assert training_hours(asked)[0] == pytest.approx(20) and stamps(folder) == before
    assert training_hours(load_recipe(recipe, {"trace.url": "memory://traces"})) == (None, "")
    for path in folder.glob("checkpoints/step-*/*.json"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    assert training_hours(asked) == (None, "")


def test_what_goes_on_keeps_its_stamp_and_what_begins_gets_one(run):
    """A run that resumes, or collects a lost shard again, began when it began; without its checkpoints or its traces
    it begins anew."""
    recipe, folder = run
    old = json.dumps({"time": datetime.fromtimestamp(LONG_AGO, UTC).isoformat()})
    for name in ("provenance.json", "traces/provenance.json"):
        (folder / name).write_text(old)
    next((folder / "traces" / "shards").glob("*.safetensors")).unlink()
    assert call(TRACE, recipe) == 0 and call(TRAIN, recipe) == 0
    assert (folder / "traces" / "provenance.json").read_text() == (folder / "provenance.json").read_text() == old
    shutil.rmtree(folder / "checkpoints")
    assert call(TRAIN, recipe) == 0 and stamped(folder / "provenance.json") > LONG_AGO
    for part in ("prompts", "answers", "shards"):
        shutil.rmtree(folder / "traces" / part)
    assert call(TRACE, recipe) == 0 and stamped(folder / "traces" / "provenance.json") > LONG_AGO


@pytest.mark.parametrize("flags, message", [
    (("--train.lr", "0.02"), "trained with other settings: train.lr was 0.01, now 0.02"),
    (("--trace.max_length", "9"), "trace.max_length = 9"), (("--trace.layers", "[1, 2, 4]"), "traced layers")])
def test_a_refused_training_changes_nothing(run, capsys, flags, message):
    """recipe.yaml and provenance.json stay those of the run that made the checkpoints (case 36); a change that is
    accepted is written down."""
    recipe, folder = run
    before = records(folder)
    assert call(TRAIN, recipe, *flags) == 2
    assert message in capsys.readouterr().err and records(folder) == before
    assert call(TRAIN, recipe, "--train.keep", "3") == 0
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["train"]["keep"] == 3


@pytest.mark.parametrize("flags, message", [
    (("--trace.dtype", "bfloat16"), "traced with other settings: trace.dtype was 'float32', now 'bfloat16'"),
    (("--generation.max_tokens", "9"), "traced with other settings: generation.max_tokens was 8, now 9"),
    (("--trace.max_length", "2000"), "traced with other settings: trace.max_length was 1024, now 2000")])
def test_a_training_says_what_its_traces_are(run, capsys, flags, message):
    """Case 30: a recipe that the traces were not collected with is refused, also by a training that is finished; where
    the log or server of the answers is now is not asked."""
    recipe, folder = run
    before = records(folder)
    assert call(TRAIN, recipe, *flags) == 2
    assert message in capsys.readouterr().err and records(folder) == before
    assert call(TRAIN, recipe, "--generation.server.base_url", "http://elsewhere", "--trace.verify_rows", "1") == 0


def test_later_stages_record_their_own_sections(run, capsys):
    """Case 36: an evaluation or export of another drafter than the recipe's is refused and changes no record; what is
    accepted stands in recipe.yaml beside what the stages before it worked with."""
    recipe, folder = run
    before = records(folder)
    for command in (EXPORT, EVAL):
        for flags, message in ((("--drafter.options.draft_vocab_size", "24"), "options.draft_vocab_size was"),
                               (("--drafter.options.hidden_noise", "0.5"), "options.hidden_noise was")):
            assert call(command, recipe, *flags) == 2
            assert f"trained with other settings: drafter.{message}" in capsys.readouterr().err
            assert records(folder) == before
    assert call(EXPORT, recipe, "--export.dtype", "bfloat16", "--export.check", "false", "--train.lr", "0.5") == 0
    found = yaml.safe_load((folder / "recipe.yaml").read_text())
    trained = yaml.safe_load(before[0])
    assert found["export"]["dtype"] == "bfloat16" and found["train"] == trained["train"]
    (folder / "recipe.yaml").write_text("{")
    assert call(EXPORT, recipe, "--export.check", "false") == 0
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["train"] == trained["train"]
