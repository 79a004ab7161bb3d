"""Medusa through the shared loop: resume bit for bit, what is trained, and `make train`, `export` and `eval` on a tiny
target from end to end."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_report import SCHEMA, violations
from tiny import call
from tiny_medusa import FORMATS, OPTIONS, medusa_run
from tiny_trainer import assert_resumes, trained_parameters, trainer_base, trainers, weights

from data.capture import Conversation
from drafters import checkpoint, source
from drafters.registry import FINAL, entry
from eval import run as eval_run
from eval import ship
from recipes.errors import ConfigError
from train import layer_search, script
from train import run as train_run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    drafter = {"kind": "medusa", "options": {"draft_vocab_size": 32, "heads": 3}}
    return trainer_base(tmp_path_factory.mktemp("medusa"), drafter=drafter)


@pytest.fixture
def build(base, tmp_path):
    yield from trainers(base, tmp_path)


RUN = {"train__epochs": 8 / 6, "train__accumulation": 1, "train__save_every": 4}


def test_loss_falls_and_only_heads_are_trained(build):
    """Rows of one song are learned; blocks and projections all move, nothing else is held or saved (cases 46,
    62)."""
    trainer = build(train__epochs=12, train__validate_every=6, train__log_every=1)
    before = weights(trainer)
    trainer.run()
    losses = [row["train_loss"] for row in trainer.progress.curve]
    assert losses[-1] < 0.85 * losses[0]
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trained_parameters(trainer.drafter).values()}
    assert not any(torch.equal(before[name], w) for name, w in weights(trainer).items())
    stored = load_file(checkpoint.path_of(trainer.folder, trainer.progress.step) / checkpoint.WEIGHTS)
    assert stored.keys() == before.keys() | {"d2t", "t2d"}
    assert sum(t.numel() for t in stored.values()) == sum(w.numel() for w in before.values()) + 32 + 64


@pytest.mark.parametrize("options", [{}, {"drafter__options__projection": "shared", "train__optimizer": "muon"}])
def test_resume_is_bit_equal(build, options):
    """8 steps in one go equal 4, a new process and 4: rates, moments, weights and curve (case 19)."""
    assert_resumes(build, RUN, **options)


def test_the_script_is_medusas(base, capsys):
    assert call(script.COMMAND, base.recipe) == 0
    assert capsys.readouterr().out.strip() == "train/medusa.py"


def test_a_draft_longer_than_the_heads_is_refused_before_training(base, capsys):
    flags = ["--train.validation_draft_length", "4"]
    assert call(train_run.COMMAND, base.recipe, *flags) == 2
    assert "validation_draft_length = 4: this drafter of kind medusa proposes at most 3" in capsys.readouterr().err


def counting(number: int, start: int) -> Conversation:
    """A row of the counting target that covers what it answers to the evaluation prompts."""
    answer = list(range(start + 1, start + 13))
    return Conversation(f"r{number}", "train" if number < 7 else "validation", [5 + number, 9, start, *answer],
                        [0] * 3 + [1] * 12, [answer[-1] + 1 + i for i in range(6)], "length")


def test_layers_are_not_searched_for_heads_that_read_none(base, capsys):
    assert call(layer_search.COMMAND, base.recipe) == 2
    assert "drafter.kind = medusa: reads no layers" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`make train` on the traces of a counting target, which EAGLE-3's taps lie in too: they are not read."""
    rows = [counting(n, start) for n, start in enumerate((14, 19, 24, 29, 34, 39, 44, 21, 38))]
    made = medusa_run(tmp_path_factory.mktemp("end"), {"draft_vocab_size": 0}, trained=False, rows=rows)
    flags = ["--train.epochs", "30", "--train.lr", "0.03", "--train.validate_every", "30", "--train.save_every", "30"]
    assert call(train_run.COMMAND, made.recipe, *flags) == 0
    return made


def test_train_export_and_eval_from_end_to_end(trained, capsys):
    """Cases 12, 46: what `make train` wrote is exported in both layouts and proven by the second reader; `make eval`
    reports 0 mismatches, and an export, opened as the drafter, is evaluated to the same counts."""
    assert call(ship.COMMAND, trained.recipe, *FORMATS) == 0
    for layout in ("medusa", "medusa-original"):
        proof = json.loads((trained.run / "export" / f"{layout}-check.json").read_text())
        assert proof["loop"] == proof["reader"] and proof["loop"][2] > 0.5
        assert proof["validation"]["replay"] == proof["validation"]["reader"] and proof["validation"]["drafts"] > 0
        assert (proof["engines"]["vllm"] == []) == (layout == "medusa")
    assert call(eval_run.COMMAND, trained.recipe) == 0
    report = json.loads((trained.run / "eval" / "report.json").read_text())
    assert violations(report, SCHEMA) == [] and report["drafter"]["kind"] == "medusa"
    assert report["total"]["lossless"]["greedy"]["mismatches"] == 0 and report["total"]["acceptance"]["rate"] > 0
    assert report["settings"]["lossy"] is False and "LOSSY" not in capsys.readouterr().out + json.dumps(report)
    out = trained.run / "export" / "medusa-original"
    assert call(eval_run.COMMAND, trained.recipe, "--name", "theirs", "--drafter.path", str(out)) == 0
    theirs = json.loads((trained.run.parent / "theirs" / "eval" / "report.json").read_text())
    assert theirs["total"]["acceptance"] == report["total"]["acceptance"]
    assert theirs["drafter"]["checkpoint"] != report["drafter"]["checkpoint"]


@pytest.mark.parametrize("source", ["checkpoint", "export"])
def test_a_run_starts_from_heads_that_exist(trained, source, tmp_path, capsys):
    """`drafter.init_from` takes Medusa heads of a run or of an export: step 0 is measured before anything is trained,
    and rows of a rebuilt vocabulary are kept."""
    assert call(ship.COMMAND, trained.recipe) == 0
    where = trained.run if source == "checkpoint" else trained.run / "export" / "medusa"
    run = trained.run.parent / f"again-{source}"
    shutil.copytree(trained.run / "traces", run / "traces")
    flags = ["--name", run.name, "--drafter.init_from", str(where), "--train.epochs", "0.5"]
    assert call(train_run.COMMAND, trained.recipe, *flags) == 0
    assert "starting from" in capsys.readouterr().out
    begun = load_file(run / "checkpoints" / "step-000000" / checkpoint.WEIGHTS)
    best = load_file(checkpoint.best(trained.run / "checkpoints") / checkpoint.WEIGHTS)
    assert all(torch.equal(begun[name], t) for name, t in best.items())
    other = trained.run.parent / f"rebuilt-{source}"
    shutil.copytree(trained.run / "traces", other / "traces")
    flags = ["--name", other.name, "--drafter.init_from", str(where), "--train.epochs", "0.5", "--drafter.vocabulary",
             "rebuild", "--drafter.options.draft_vocab_size", "40"]
    assert call(train_run.COMMAND, trained.recipe, *flags) == 0, capsys.readouterr().err
    rebuilt = load_file(other / "checkpoints" / "step-000000" / checkpoint.WEIGHTS)
    old, new = ((t["d2t"] + torch.arange(len(t["d2t"]))).tolist() for t in (best, rebuilt))
    kept = [(old.index(i), new.index(i)) for i in old if i in new]
    assert rebuilt["lm_heads.1.weight"].shape == (40, 64) and len(kept) > 20
    assert all(torch.equal(best["lm_heads.1.weight"][a], rebuilt["lm_heads.1.weight"][b]) for a, b in kept)


def test_a_run_starts_from_heads_as_the_medusa_repository_publishes_them(trained, tmp_path, capsys):
    """A config.json of three keys, which says another number of heads than the file holds, and medusa_lm_head.pt, read
    as plain tensors; for `drafter.path`, which reads safetensors alone, it is none."""
    assert call(ship.COMMAND, trained.recipe, *FORMATS) == 0
    tensors = load_file(trained.run / "export" / "medusa-original" / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"base_model_name_or_path": "x", "medusa_num_heads": 2,
                                                      "medusa_num_layers": 1}))
    torch.save(tensors, tmp_path / "optimizer.pt")  # another .pt is not taken for it
    run = trained.run.parent / "published"
    shutil.copytree(trained.run / "traces", run / "traces")
    flags = ["--name", run.name, "--drafter.init_from", str(tmp_path), "--train.epochs", "0.5"]
    assert call(train_run.COMMAND, trained.recipe, *flags) == 2
    assert "medusa_lm_head.pt here" in capsys.readouterr().err
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    assert call(train_run.COMMAND, trained.recipe, *flags) == 0, capsys.readouterr().err
    assert "medusa_num_heads = 2, but the file holds 3 heads" in capsys.readouterr().out
    begun = load_file(run / "checkpoints" / "step-000000" / checkpoint.WEIGHTS)
    best = load_file(checkpoint.best(trained.run / "checkpoints") / checkpoint.WEIGHTS)
    assert all(torch.equal(begun[name], t) for name, t in best.items())
    assert call(ship.COMMAND, trained.recipe, "--drafter.path", str(tmp_path)) == 2
    assert "no model.safetensors here" in capsys.readouterr().err


def test_the_hub_is_asked_for_published_heads(tmp_path, monkeypatch):
    """Where a repository has no safetensors, the files of both spellings are fetched, and nothing else."""
    asked = []
    monkeypatch.setattr(source, "snapshot_download",
                        lambda name, allow_patterns: asked.append(allow_patterns) or str(tmp_path))
    assert source.find("org/heads") == tmp_path
    assert asked[0] == ["*.json", "*.safetensors"] and "medusa_lm_head.pt" in asked[1] and len(asked) == 2


def test_other_heads_than_the_recipe_says_are_refused(trained, capsys):
    flags = ["--name", "more", "--drafter.init_from", str(trained.run), "--drafter.options.heads", "2"]
    shutil.copytree(trained.run / "traces", trained.run.parent / "more" / "traces")
    assert call(train_run.COMMAND, trained.recipe, *flags) == 2
    assert "drafter.options.heads = 2, but" in capsys.readouterr().err


def test_a_checkpoint_that_lost_a_head_is_refused(trained, tmp_path):
    """Cases 13, 46: a missing block is named, not filled with zeros; so is another shape of the target."""
    best = checkpoint.best(trained.run / "checkpoints")
    meta, tensors = checkpoint.read_meta(best), checkpoint.read_tensors(best)
    code = entry("medusa").code
    trained.target.tap(FINAL)
    options = code.Options(**meta["options"])
    assert code.load(options, meta["shape"], [], tensors, trained.target).longest == OPTIONS["heads"]
    with pytest.raises(ConfigError, match="blocks.1.layers.0.bias"):
        lost = {name: t for name, t in tensors.items() if name != "blocks.1.layers.0.bias"}
        code.load(options, meta["shape"], [], lost, trained.target)
    with pytest.raises(ConfigError, match="has no d2t tensor"):
        code.load(options, meta["shape"], [], {k: t for k, t in tensors.items() if k != "d2t"}, trained.target)
    for change, message in (({"vocab_size": 65}, "vocabulary 65 and hidden size 64; this target has 64"),
                            ({"draft_vocab_size": 10**10}, "d2t"), ({"wings": 2}, "shape.wings is missing or unknown"),
                            ({"hidden_size": "64"}, "shape.hidden_size = '64'"), ({"target_layers": True}, "= True")):
        with pytest.raises(ConfigError, match=message):
            code.load(options, meta["shape"] | change, [], tensors, trained.target)
    with pytest.raises(ConfigError, match="shape = None: must be a mapping"):
        code.load(options, None, [], tensors, trained.target)
