"""What became of a run's files after they were written: a flipped byte is named, whoever reads the file next."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import base, build, moments, same, weights  # noqa: F401
from tiny import call
from tiny_run import tiny_run

from drafters import checkpoint, imported, source
from eval import run as eval_run
from eval import ship
from eval.curve import read_curve
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file
from recipes.schema import Drafter
from train import checkpoints

STEPS = {"train__epochs": 0.5, "train__save_every": 1}  # three of them


def flip(path: Path) -> bytes:
    """Changes one bit in the middle of a file; returns what it held."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
    return whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a sealed checkpoint."""
    made = tiny_run(tmp_path_factory.mktemp("damage"))
    checkpoint.seal(made.checkpoint)
    return made


def test_a_checkpoint_names_the_sha256_of_all_its_files(build):  # noqa: F811
    trainer = build(**STEPS)
    trainer.run()
    for step in checkpoints.steps_in(trainer.folder):
        folder = checkpoint.path_of(trainer.folder, step)
        sums = json.loads((folder / checkpoint.SUMS).read_text())["sha256"]
        files = {checkpoint.WEIGHTS, checkpoint.META, checkpoints.STATE, "trainer.json"}
        assert sums == {name: sha256_file(folder / name) for name in files}


def test_a_flipped_bit_stops_a_resume(build, capsys):  # noqa: F811
    """In each file of the checkpoint, of a finished run too: one message with file and remedy. What it says to do ends
    with the bits of the undisturbed run (case 19)."""
    whole = build(**STEPS)
    whole.run()
    last = checkpoint.path_of(whole.folder, 3)
    for path in sorted(last.iterdir()):
        before = flip(path)
        with pytest.raises(RunError, match=f"{path.name}.* delete {last} and any later one"):
            build(**STEPS).resume()
        path.unlink()
        if path.name != checkpoint.SUMS:
            with pytest.raises(RunError, match=f"{path.name}: damaged checkpoint: No such file"):
                checkpoints.check_whole(whole.accelerator, last)
        path.write_bytes(before)
    (last / checkpoint.SUMS).unlink()  # as earlier versions left it
    assert build(**STEPS).resume()
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    again = build(**STEPS)
    assert again.resume() and "step-000002, step 2 of 3" in capsys.readouterr().out
    again.run()
    assert same(weights(again), weights(whole)) and same(moments(again), moments(whole))


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.META, checkpoint.SUMS])
def test_no_stage_takes_a_damaged_drafter(finished, capsys, name):
    """Evaluation, export, a run that starts from it, and one that evaluates it by its path."""
    whole = flip(finished.checkpoint / name)
    try:
        for command, flags in ((eval_run.COMMAND, ()), (ship.COMMAND, ()),
                               (eval_run.COMMAND, ("--name", "b", "--drafter.path", str(finished.checkpoint)))):
            assert call(command, finished.recipe, *flags) == 2
            err = capsys.readouterr().err
            assert err.count("\n") == 1 and name in err and f"delete {finished.checkpoint} and any later" in err
        with pytest.raises(ConfigError, match=name):
            source.read(source.find(str(finished.run)))
    finally:
        (finished.checkpoint / name).write_bytes(whole)
    assert not (finished.run / "export").exists() and not (finished.run / "eval").exists()
    found = checkpoint.load(finished.checkpoint, finished.target)
    assert torch.equal(found.fc.weight, load_file(finished.checkpoint / checkpoint.WEIGHTS)["fc.weight"])


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "drafthouse.checksums/1", "sha256": {}}', "[" * 100_000,
                                     '{"format": "drafthouse.checksums/1", "sha256": ["drafter.safetensors"]}'])
def test_checksums_of_another_form(finished, content):
    path = finished.checkpoint / checkpoint.SUMS
    whole = path.read_bytes()
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"checksums.json: .*damaged.*; delete"):
        checkpoint.read_tensors(finished.checkpoint)
    path.write_bytes(whole)


def test_a_converted_drafter_is_sealed(finished, tmp_path):
    """A published folder's copy below imported/: what the message says to do makes it anew (case 12)."""
    assert call(ship.COMMAND, finished.recipe, "--runs_dir", str(tmp_path), "--drafter.path", str(finished.checkpoint),
                "--export.check", "false") == 0
    section = Drafter(path=str(tmp_path / "tiny" / "export" / "native"))
    opened = imported.open_drafter(section, finished.target, tmp_path)
    flip(opened.folder / checkpoint.WEIGHTS)
    with pytest.raises(ConfigError, match=f"damaged: .*; delete {opened.folder} and run again: the drafter is conv"):
        imported.open_drafter(section, finished.target, tmp_path)
    for path in opened.folder.iterdir():
        path.unlink()
    opened.folder.rmdir()
    assert imported.open_drafter(section, finished.target, tmp_path).digest == opened.digest


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
