"""What became of a run's files after they were written: damage is named, whoever reads the file next."""

import json

import pytest
from test_train import base, build  # noqa: F401
from tiny import call
from tiny_run import tiny_run

from drafters import checkpoint
from eval import run as eval_run
from eval.curve import read_curve

STEPS = {"train__epochs": 0.5, "train__save_every": 1}  # three of them


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize("content", ['{"step": "x"}', '{"step": 1e99}', '{"step": null}', '{"step": true}', "{}", "[]",
                                     '{"step": -1}', f'{{"step": {10**300}}}', "null", "{bad", "[" * 100_000, "\xff"])
def test_a_damaged_best_json(finished, capsys, content):
    """One message that names the file and what writes it anew."""
    path = finished.run / "checkpoints" / checkpoint.BEST
    whole = path.read_bytes()
    path.write_bytes(content.encode("latin-1"))
    assert call(eval_run.COMMAND, finished.recipe) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{path}: " in err
    assert "damaged" in err and "run `make train` again, which writes it anew" in err
    path.write_bytes(whole)


def test_train_writes_a_damaged_best_json_anew(build):  # noqa: F811
    trainer = build(**STEPS)
    trainer.run()
    path = trainer.folder / checkpoint.BEST
    whole = path.read_text()
    path.write_text("null")
    build(**STEPS).resume()
    assert path.read_text() == whole


POINT = {"step": 2, "tokens": 10, "train_loss": 0.5, "mean_length": 1.5}


@pytest.mark.parametrize("content", ["{bad", "null", "{}", "[1]", "[{}]", "\xff", "[" * 100_000, *(
    json.dumps([POINT | change]) for change in ({"step": "x"}, {"train_loss": "x"}, {"tokens": 10**99}))])
def test_a_damaged_curve_json_costs_no_measurement(finished, capsys, monkeypatch, content):
    """It is named before anything is measured."""
    path = finished.run / "checkpoints" / "curve.json"
    path.write_bytes(content.encode("latin-1"))
    monkeypatch.setattr(eval_run.Evaluation, "run", lambda self: pytest.fail("evaluated first"))
    assert call(eval_run.COMMAND, finished.recipe) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{path}: " in err and "run `make train` again, which writes it anew" in err
    path.unlink()


def test_a_curve_as_training_writes_it(tmp_path, build):  # noqa: F811
    """The validation before the first step has no loss; what a trainer records is taken as it is."""
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    trainer = build(**STEPS)
    trainer.validate()
    trainer.run()
    assert trainer.progress.curve[0]["train_loss"] is None
    (tmp_path / "checkpoints" / "curve.json").write_text(json.dumps(trainer.progress.curve))
    assert read_curve(tmp_path) == trainer.progress.curve and read_curve(tmp_path / "nowhere") == []
