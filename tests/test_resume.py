"""Checkpoints of one process: what a resume needs, what stops it, what a full disk leaves."""

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_train import base, build, moments, same, weights  # noqa: F401

from data.batching import Plan
from drafters import checkpoint
from recipes import files
from recipes.errors import ConfigError, RunError
from train import checkpoints
from train.checkpoints import Split, check_split

RUN = {"train__epochs": 2 / 3, "train__batch_rows": 1, "train__accumulation": 3, "train__save_every": 1,
       "drafter__options__hidden_noise": 0.1}  # four rows a step are three: four steps an epoch


def drop(trainer) -> None:
    """Gives the drafter dropout, which takes its numbers from torch's own generator."""
    fuse = trainer.drafter.fuse
    trainer.drafter.fuse = lambda taps: F.dropout(fuse(taps), 0.2, trainer.drafter.training)


def test_killed_within_an_accumulation(build, capsys):  # noqa: F811
    """A run that dies in the second of three micro-batches of its third step, in the middle of an epoch, ends after a
    resume with the bits of an undisturbed run: weights, moments, curve; so does torch's own random state (case 19)."""
    whole, first = build(folder="whole", **RUN), build(**RUN)
    drop(whole)
    whole.run()
    drop(first)
    forward, calls = first.drafter.forward, []

    def dying(*args):
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return forward(*args)

    first.drafter.forward = dying
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert checkpoints.steps_in(first.folder) == [1, 2]
    torch.manual_seed(123)
    again = build(**RUN)
    drop(again)
    again.resume()
    assert f"goes on from {again.folder / 'step-000002'}, step 2 of 3" in capsys.readouterr().out
    again.run()
    assert again.total == 3 < again.plan.steps_per_epoch
    assert same(weights(again), weights(whole)) and same(moments(again), moments(whole))
    assert again.progress.curve == whole.progress.curve


def test_state_is_stored_by_name(build):  # noqa: F811
    """Moments lie under the parameter's name, with its shape; a restored optimizer holds the same tensors."""
    trainer = build(**RUN)
    trainer.run()
    stored = load_file(trainer.folder / "step-000003" / "optimizer.safetensors")
    named = dict(trainer.drafter.named_parameters())
    for name, p in named.items():
        state = trainer.parts.optimizer.state[p]
        assert torch.equal(stored[f"exp_avg/{name}"], state["exp_avg"]) and stored[f"step/{name}"] == 3
    fresh = build(**RUN)
    checkpoints.load(trainer.folder / "step-000003", fresh.parts)
    assert same(moments(fresh), moments(trainer)) and same(weights(fresh), weights(trainer))


@pytest.mark.parametrize("damage, message", [
    (lambda tensors: tensors.pop("norm.weight"), "norm.weight is missing, not"),
    (lambda tensors: tensors.update({"norm.weight": torch.zeros(0)}), r"norm.weight is \(0,\), not")])
def test_a_checkpoint_that_does_not_fit_is_refused(build, damage, message):  # noqa: F811
    """A tensor that is missing or of size 0 stops the resume; none stays at its random start (case 18)."""
    trainer = build(**RUN)
    trainer.run()
    path = trainer.folder / "step-000003"
    tensors = load_file(path / checkpoint.WEIGHTS)
    damage(tensors)
    save_file(tensors, path / checkpoint.WEIGHTS)
    with pytest.raises(RunError, match=message):
        checkpoints.load(path, build(**RUN).parts)


def test_empty_tensors_are_never_saved(build):  # noqa: F811
    """A parameter that is not gathered has size 0: the save stops, and nothing is left of it (case 18)."""
    trainer = build(**RUN)
    trainer.drafter.fc.weight.data = torch.zeros(0)
    with pytest.raises(RunError, match=r"fc.weight is \(0,\) instead of \(\d+, \d+\); a partitioned parameter"):
        trainer.save()
    assert list(trainer.folder.iterdir()) == []


@pytest.fixture
def largest_file():
    """Sets the size beyond which no file can grow: the kernel refuses the write, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kept(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("file", [checkpoint.WEIGHTS, checkpoints.STATE])
def test_a_refused_write_leaves_the_earlier_checkpoint(build, largest_file, file):  # noqa: F811
    """The kernel refuses a tensor file in the middle of the second save: an OSError with its reason that names the
    checkpoint; the first one and best.json stay as they were, and the half-written one is gone."""
    trainer = build(**RUN)
    trainer.model.train()
    trainer.step()
    trainer.progress.best_step = 1
    trainer.save()
    before = kept(trainer.folder)
    trainer.progress.step = trainer.progress.best_step = 2
    largest_file((trainer.folder / "step-000001" / file).stat().st_size - 100)
    with pytest.raises(OSError) as raised:
        trainer.save()
    assert raised.value.errno == errno.EFBIG and raised.value.filename.endswith("step-000002")
    assert kept(trainer.folder) == before
    largest_file(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    trainer.save()
    assert checkpoints.steps_in(trainer.folder) == [1, 2]


@pytest.mark.parametrize("file", [checkpoint.META, "trainer.json"])
def test_full_disk_leaves_the_earlier_checkpoint(build, monkeypatch, file):  # noqa: F811
    """The same where the disk is full when the small files are written (the kernel's ENOSPC, from /dev/full)."""
    trainer = build(**RUN)
    trainer.save()
    before, mkdir = kept(trainer.folder), Path.mkdir

    def full(path: Path, *args, **kwargs) -> None:
        mkdir(path, *args, **kwargs)
        (path / f".{file}.drawn.tmp").symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr(files, "token_hex", lambda n: "drawn")
    trainer.progress.step = 2
    with pytest.raises(OSError) as raised:
        trainer.save()
    assert raised.value.errno == errno.ENOSPC and raised.value.filename.endswith("step-000002")
    assert kept(trainer.folder) == before


def test_the_reason_is_read_from_safetensors():
    """Its error carries the system's number in its text alone."""
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert checkpoints.refused(full, Path("c")).errno == errno.ENOSPC
    assert checkpoints.refused(SafetensorError("something else"), Path("c")).errno == errno.EIO


def test_global_batch_must_stay():
    """The message names the splits that give the old global batch, or the numbers of processes that can."""
    before = Split(2, 4, 1)
    check_split(Path("c"), before, Split(1, 2, 4))
    with pytest.raises(ConfigError, match=r"c: trained on 8 rows a step, this launch has 4 \(train.batch_rows 2 x 2 "
                                          r"processes x train.accumulation 1\); set train.batch_rows and "
                                          r"train.accumulation to 1 and 4, 2 and 2 or 4 and 1"):
        check_split(Path("c"), before, Split(2, 2, 1))
    with pytest.raises(ConfigError, match="launch 1, 2, 4 or 8 processes"):
        check_split(Path("c"), before, Split(2, 3, 1))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 40), share=st.integers(1, 3), ranks=st.integers(1, 3), more=st.integers(1, 3))
def test_every_split_takes_the_same_rows(rows, share, ranks, more):
    """Splits of one global batch train on the same rows at every step, in the same number of steps."""
    def plan(batch_rows: int, world: int, accumulation: int) -> Plan:
        return Plan(tuple(range(rows)), tuple(7 * i % 11 for i in range(rows)), batch_rows, world, accumulation, 3)

    def at(made: Plan, step: int) -> list[int]:
        return sorted(i for rank in range(made.ranks) for part in made.micro_batches(step, rank) for i in part)

    one, other = plan(share * ranks * more, 1, 1), plan(share, ranks, more)
    assert one.steps_per_epoch == other.steps_per_epoch
    assert all(at(one, step) == at(other, step) for step in range(2 * one.steps_per_epoch))


def test_another_split_resumes(build):  # noqa: F811
    """A run of three micro-batches of one row goes on with one of three rows: the weights of the undisturbed run, up
    to rounding (noise is drawn by micro-batch: without it)."""
    plain = {**RUN, "drafter__options__hidden_noise": 0.0}
    whole, first = build(folder="whole", **plain), build(**plain)
    whole.run()
    first.model.train()
    first.step()
    first.step()
    first.save()
    other = build(**{**plain, "train__batch_rows": 3, "train__accumulation": 1})
    other.resume()
    assert other.progress.step == 2
    other.run()
    for name, wanted in weights(whole).items():
        torch.testing.assert_close(weights(other)[name], wanted, rtol=1e-4, atol=1e-5)


def test_checkpoint_of_an_earlier_version_is_named(build):  # noqa: F811
    """A folder without `split` is not guessed at."""
    trainer = build(**RUN)
    trainer.run()
    path = trainer.folder / "step-000003" / "trainer.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in stored.items() if k != "format"}))
    path.with_name(checkpoint.SUMS).unlink()
    with pytest.raises(ConfigError, match="of format None, this version resumes drafthouse.trainer/2 only"):
        build(**RUN).resume()
