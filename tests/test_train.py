"""The training loop on a random target of six layers: resume, accumulation, what a checkpoint holds."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from tiny import conversations, left_to_the_collector
from tiny_trainer import moments, same, trained_parameters, trainer_base, trainers, weights

from data.batching import collate
from data.capture import Conversation
from drafters import checkpoint
from drafters.base import Batch, loss_mask
from eval.metrics import Acceptance
from recipes import storage
from recipes.errors import ConfigError, RunError
from train import checkpoints, loop
from train.loop import Trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target, the traces of 12 + 3 rows, and a recipe."""
    rows = conversations(12, 3)
    rows[4] = Conversation("one-token", "train", [5, 6, 7, 2], [0, 0, 0, 1], [], "stop")  # carries no loss
    return trainer_base(tmp_path_factory.mktemp("train"), rows)


@pytest.fixture
def build(base, tmp_path):
    """Makes a Trainer as train/run.py does; settings override the recipe's."""
    yield from trainers(base, tmp_path)


def test_loss_falls(build):
    """Twelve rows of one song are learned: the loss falls by a quarter, towards the teacher's entropy."""
    trainer = build(train__epochs=12, train__validate_every=6, train__log_every=1)
    trainer.run()
    losses = [row["train_loss"] for row in trainer.progress.curve]
    assert trainer.progress.step == 72 and losses[-1] < 0.75 * losses[0]


def test_bfloat16_trains_and_validates(build):
    """The reduced precision goes through training, replay and checkpoint; the weights stay float32."""
    trainer = build(train__epochs=0.5, train__dtype="bfloat16")
    trainer.run()
    assert trainer.progress.curve[-1]["drafts"] > 0
    assert {p.dtype for p in trainer.drafter.parameters()} == {torch.float32}


NOISY = {"drafter__options__hidden_noise": 0.1, "train__epochs": 10 / 6, "train__accumulation": 1}


def test_resume_is_bit_equal(build):
    """10 steps in one go equal 5, a new process and 5: rates, moments, weights and curve (case 19)."""
    whole = build(folder="whole", train__save_every=5, **NOISY)
    whole.run()
    first = build(train__save_every=5, **NOISY)
    first.model.train()
    for _ in range(5):
        first.step()
    first.save()
    second = build(train__save_every=5, **NOISY)
    assert not same(weights(second), weights(first))
    second.resume()
    assert second.progress.step == 5 and same(weights(second), weights(first)) and same(moments(second), moments(first))
    second.run()
    assert second.total == 10 and same(weights(second), weights(whole)) and same(moments(second), moments(whole))
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert second.progress.curve[-1]["mean_length"] == whole.progress.curve[-1]["mean_length"]


def test_sigterm_saves_and_resumes(build, monkeypatch):
    """SIGTERM during a step: that step and the agreed next one are finished and saved, exit 143; a resume ends
    with the weights of an undisturbed run (case 19)."""
    whole = build(folder="whole", **NOISY)
    whole.run()
    trainer = build(**NOISY)
    load = trainer.load

    def signalling(rows):
        if trainer.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return load(rows)

    monkeypatch.setattr(trainer, "load", signalling)
    with pytest.raises(SystemExit) as stopped:
        trainer.run()
    assert stopped.value.code == 143 and checkpoints.steps_in(trainer.folder) == [4]
    again = build(**NOISY)
    again.resume()
    again.run()
    assert same(weights(again), weights(whole))


def test_signal_on_one_rank_waits_for_the_others(build, monkeypatch):
    """A signal that comes after the ranks' exchange must not stop this rank alone: the others would hang (case 42)."""
    trainer = build(**NOISY)
    figures = trainer.figures

    def late(*args):
        if trainer.progress.step == 3:
            trainer.on_sigterm(signal.SIGTERM, None)
        return figures(*args)

    monkeypatch.setattr(trainer, "figures", late)
    with pytest.raises(SystemExit):
        trainer.run()
    assert checkpoints.steps_in(trainer.folder) == [4]


def gradient(trainer: Trainer, monkeypatch) -> dict[str, torch.Tensor]:
    """The gradient that the first step hands to the optimizer."""
    found = {}

    def record(parameters, clip):
        found.update({n: p.grad.clone() for n, p in trained_parameters(trainer.drafter).items()})

    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", record)
    trainer.model.train()
    trainer.step()
    return found


@pytest.mark.parametrize("rows, accumulation", [(4, 1), (2, 2), (1, 4)])
def test_accumulation_is_the_mean_over_positions(build, base, monkeypatch, rows, accumulation):
    """Four unequal rows, whole or in pieces: the gradient of their loss sum over their supervised positions,
    computed here without the loop (case 38)."""
    trainer = build(rows=[0, 1, 2, 3], train__batch_rows=rows, train__accumulation=accumulation)
    assert len({base.reader.supervised(i) for i in range(4)}) > 2
    batch = collate([base.reader[i] for i in range(4)])
    out = trainer.drafter(batch, 0.0, 0)
    (out.loss_sum / trainer.drafter.count(batch)).backward()
    wanted = {n: p.grad.clone() for n, p in trained_parameters(trainer.drafter).items()}
    trainer.drafter.zero_grad()
    got = gradient(trainer, monkeypatch)
    assert set(got) == set(wanted)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-6)


def test_user_turns_are_learnt_only_where_asked(build, monkeypatch):
    """Turn -1, a marked user turn, carries no loss by default; with train.user_turns it is a turn of its own:
    nothing is predicted from it into the answer, even where that follows at once."""
    turns = torch.tensor([[0, -1, -1, -1, 1, 1, 1, 0]])
    monkeypatch.setattr(loop, "collate", lambda rows: Batch(torch.ones(1, 8, dtype=torch.long), turns.clone(),
                                                            torch.zeros(1, 8, 96), torch.zeros(1, 8, 32)))
    found = {marked: loss_mask(build(train__user_turns=marked).load([0]).turns, 0)[0].nonzero()[:, 0].tolist()
             for marked in (False, True)}
    assert found == {False: [3, 4], True: [0, 1, 3, 4]}


def test_batch_without_loss_changes_nothing(build, base):
    """A step whose only row has no supervised position leaves weights, decay and moments alone and is counted;
    every other step changes the weights (case 41)."""
    trainer = build(rows=[3, 4, 5], train__batch_rows=1, train__epochs=2, train__weight_decay=0.1)
    trainer.model.train()
    assert trainer.drafter.count(collate([base.reader[4]])) == 0
    for step in range(6):
        before = weights(trainer), moments(trainer)
        trainer.step()
        empty = trainer.plan.micro_batches(step, 0) == [[4]]
        assert same(weights(trainer), before[0]) == empty
        assert same(moments(trainer), before[1]) == (empty or not before[1] and not moments(trainer))
    assert trainer.progress.skipped == 2 and trainer.progress.step == 6


@pytest.mark.parametrize("head", [True, False])
def test_optimizer_and_checkpoint_hold_the_drafter_only(build, head):
    """Exactly the trainable drafter parameters are optimised; embedding and teacher head are in no file, and a
    checkpoint is at most a tenth larger than the weights and two moments, as `make plan` says (case 62). All of them
    have moved, and what is frozen has not (case 46)."""
    trainer = build(train__epochs=0.2, drafter__options__train_head=head, drafter__options__draft_vocab_size=32)
    start = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    trainer.run()
    held = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]]
    wanted = trained_parameters(trainer.drafter)
    assert sorted(held) == sorted(map(id, wanted.values())) and ("lm_head.weight" in wanted) == head
    folder = checkpoint.best(trainer.folder)
    assert {f.name for f in folder.iterdir()} == {"drafter.json", "drafter.safetensors", "optimizer.safetensors",
                                                  "trainer.json", "checksums.json"}
    assert set(load_file(folder / "drafter.safetensors")) == {n for n, _ in trainer.drafter.named_parameters()} | {
        "d2t", "t2d"}
    assert set(load_file(folder / "optimizer.safetensors")) == {
        f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in wanted}
    after = load_file(checkpoint.path_of(trainer.folder, trainer.progress.step) / "drafter.safetensors")
    assert {name for name in start if not torch.equal(after[name], start[name])} == set(wanted)  # case 46
    size = sum(f.stat().st_size for f in folder.iterdir())
    trained, frozen = (sum(p.numel() * 4 for p in trainer.drafter.parameters() if p.requires_grad == kind)
                       for kind in (True, False))
    assert size <= 1.1 * (3 * trained + frozen) + 16_000
    assert 0 <= size - storage.checkpoint_bytes(trained / 4, frozen / 4, 32, 64) < 16_000, "as planned, headers aside"


def test_best_is_by_acceptance_not_loss(build, monkeypatch):
    """Acceptance peaks at step 4 while the loss goes on falling: that checkpoint is named best and kept beside the
    last two (case 52)."""
    accepted = iter([2, 8, 5, 4, 3, 3])
    monkeypatch.setattr(loop, "replay", lambda *args: Acceptance(3, 10, [next(accepted), 0, 0]))
    trainer = build(train__epochs=2, train__validate_every=2, train__log_every=1)
    trainer.run()
    assert [row["mean_length"] for row in trainer.progress.curve] == pytest.approx([1.2, 1.8, 1.5, 1.4, 1.3, 1.3])
    assert trainer.progress.curve[-1]["train_loss"] < trainer.progress.curve[1]["train_loss"]
    assert checkpoints.steps_in(trainer.folder) == [4, 10, 12]
    assert checkpoint.best(trainer.folder) == trainer.folder / "step-000004"


def test_without_validation_rows_the_latest_is_best(tmp_path, capsys):
    """prompts.validation 0: nothing is measured, so the last checkpoint is named best, not the first one, and the run
    says so once (case 52)."""
    (tmp_path / "traced").mkdir()
    unheld = trainer_base(tmp_path / "traced", conversations(6, 0))
    made = trainers(unheld, tmp_path)
    trainer = next(made)(train__validate_every=1, train__save_every=1, train__epochs=1)
    trainer.run()
    next(made, None)
    assert trainer.total == 3 and [row["drafts"] for row in trainer.progress.curve] == [0, 0, 0]
    assert checkpoint.best(trainer.folder).name == "step-000003"
    assert capsys.readouterr().err.count("no validation rows (prompts.validation = 0)") == 1


def test_training_mode_after_validation(build, monkeypatch):
    """Validation runs in eval mode and the next step trains again (case 51)."""
    trainer = build(train__epochs=0.5, train__validate_every=1)
    modes, chains, step = [], trainer.drafter.chains, trainer.step
    monkeypatch.setattr(trainer.drafter, "chains", lambda *a: (modes.append(trainer.drafter.training), chains(*a))[1])
    monkeypatch.setattr(trainer, "step", lambda: (modes.append(trainer.model.training), step())[1])
    trainer.run()
    assert modes == [True, *[False] * 3] * 3


def test_saves_on_the_stated_optimizer_steps(build):
    """The interval counts optimizer steps, whatever the accumulation; the last `keep` stay (cases 51, 39)."""
    trainer = build(train__batch_rows=1, train__accumulation=2, train__save_every=2, train__keep=10, train__epochs=1)
    trainer.run()
    assert checkpoints.steps_in(trainer.folder) == [2, 4, 6]
    checkpoints.prune(trainer.folder, 1, 2)
    assert checkpoints.steps_in(trainer.folder) == [2, 6]


@pytest.fixture
def saved(build):
    """A finished run of one step."""
    trainer = build(train__epochs=0.2)
    trainer.run()
    return trainer


def test_resume_with_other_settings_names_the_setting(build, saved):
    """A checkpoint made with another rate is refused, and the message names rate, old and new value."""
    with pytest.raises(ConfigError, match=r"trained with other settings: train.lr was 0.01, now 0.02"):
        build(train__epochs=0.2, train__lr=0.02).resume()


def test_kill_between_rename_and_best(build, saved):
    """A kill after the checkpoint's rename loses no best: the next start writes best.json again."""
    (saved.folder / "best.json").unlink()
    with pytest.raises(ConfigError, match="run `make train` first"):
        checkpoint.best(saved.folder)
    build(train__epochs=0.2).resume()
    assert checkpoint.best(saved.folder).name == "step-000001"


def test_half_written_checkpoints_are_not_seen(saved):
    """A folder under its temporary name is no checkpoint, and a damaged one is named, not skipped."""
    (saved.folder / ".step-000009.tmp").mkdir()
    (saved.folder / ".step-000009.tmp" / "drafter.safetensors").write_bytes(b"a part")
    assert checkpoints.steps_in(saved.folder) == [1]
    path = saved.folder / "step-000001" / "trainer.json"
    assert json.loads(path.read_text())["progress"]["step"] == 1
    path.write_text(path.read_text()[:40])
    with pytest.raises(RunError, match="step-000001: damaged checkpoint"):
        checkpoints.read_progress(path.parent, saved.parts.settings, saved.parts.split)


@pytest.mark.parametrize("steps", [0, 1])
def test_half_written_checkpoints_are_removed(build, steps):
    """What a kill left of a save is gone when the run goes on, or begins again, and at no other step is it in the way:
    the next run may never save at that step."""
    first = build(**NOISY)
    first.model.train()
    for _ in range(steps):
        first.step()
        first.save()
    half = first.folder / ".step-000009.tmp"
    half.mkdir(parents=True)
    (half / "drafter.safetensors").write_bytes(b"a part")
    again = build(**NOISY)
    assert again.resume() == bool(steps) and again.progress.step == steps
    assert sorted(p.name for p in first.folder.glob("*step*")) == ["step-000001"] * steps


def test_a_step_leaves_nothing_to_the_collector(build):
    trainer = build(train__epochs=1)
    trainer.step()
    assert left_to_the_collector(trainer.step) == []
