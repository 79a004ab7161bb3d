"""Two commands on one run at the same time: who is refused, and who is not."""

import json

import pytest
from test_files import hold
from tiny import call
from tiny_run import tiny_run

from eval import live_run, ship
from eval import run as eval_run
from recipes.loader import load_recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("once"))


def everything(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("command, place", [pytest.param(ship.COMMAND, "export", id="export"),
                                            pytest.param(eval_run.COMMAND, "eval", id="eval")])
def test_the_second_of_two_is_refused(made, capsys, command, place):
    """It changes nothing, not even recipe.yaml, and is let in when the first was killed (kill -9 leaves no lock)."""
    folder = made.run / place
    folder.mkdir(exist_ok=True)
    before = everything(made.run)
    with hold(folder, "alone") as first:
        assert call(command, made.recipe, "--eval.limit", "3") == 1
        assert f"{folder}: another run is at work there; wait for it or end it" in capsys.readouterr().err
        assert everything(made.run) == before
        first.kill()
        first.wait()
    assert call(command, made.recipe) == 0
    assert not (folder / ".lock").exists()


def test_other_stages_go_on_beside(made):
    """An evaluation is let in while training, an export and the measurement of a server are at work, and an export
    beside an evaluation."""
    for folder in ("export", "eval/server"):
        (made.run / folder).mkdir(parents=True, exist_ok=True)
    with hold(made.run / "checkpoints", "alone") as train, hold(made.run / "eval" / "server", "alone") as live:
        with hold(made.run / "export", "alone") as export:
            assert call(eval_run.COMMAND, made.recipe) == 0
            export.kill()
        with hold(made.run / "eval", "alone") as evaluation:
            assert call(ship.COMMAND, made.recipe) == 0
            evaluation.kill()
        train.kill()
        live.kill()


def test_a_server_is_measured_once_at_a_time(made, capsys, monkeypatch):
    """By its label: the second measurement of the same one is refused, that of another one is not."""
    monkeypatch.setattr(live_run, "read_sets", lambda *args: pytest.fail("let in"))
    server = ("--eval.server.base_url", "http://127.0.0.1:9")
    (made.run / "eval" / "a").mkdir(parents=True, exist_ok=True)
    with hold(made.run / "eval" / "a", "alone") as first:
        assert call(eval_run.COMMAND, made.recipe, *server, "--eval.server.label", "a") == 1
        assert "eval/a: another run is at work there" in capsys.readouterr().err
        recipe = load_recipe(made.recipe, {"eval.server.base_url": "http://127.0.0.1:9", "eval.server.label": "b"})
        with pytest.raises(pytest.fail.Exception, match="let in"):
            eval_run.COMMAND.main(recipe, set(), eval_run.Options())
        first.kill()
    assert not (made.run / "eval" / "b").exists()


def test_reading_a_report_takes_no_lock(made, tmp_path):
    """`--report` judges what is written, also while the next evaluation is at work."""
    assert call(eval_run.COMMAND, made.recipe) == 0
    gate = tmp_path / "gate.yaml"
    gate.write_text(json.dumps({"bounds": [{"metric": "total.acceptance.mean_length", "min": 1.0}]}))
    with hold(made.run / "eval", "alone") as first:
        report = made.run / "eval" / "report.json"
        assert call(eval_run.COMMAND, made.recipe, "--gate", str(gate), "--report", str(report)) == 0
        first.kill()
