"""A small language model through the shared loop: resume bit for bit, what is trained, and `make train`, `export`,
`eval`, `doctor` and `plan` on a tiny target from end to end; two real processes are marked slow."""

import json
import shutil

import pytest
import torch
from launched import assert_close, counts
from safetensors.torch import load_file, save_file
from test_report import SCHEMA, violations
from test_train_distributed import DDP, PLAIN, ZERO3, launch, result
from tiny import call, conversations, load_target, write_prompts, write_recipe, write_target, write_traces
from tiny_run import EVAL, counted_rows, counting_target
from tiny_trainer import assert_resumes, trained_parameters, trainer_base, trainers, weights
from transformers import AutoModelForCausalLM

from drafters import checkpoint
from drafters.export.small_lm import from_plain
from drafters.export.write import check_folder
from eval import doctor, ship
from eval import plan as planning
from eval import run as eval_run
from eval.contest import share_traces
from recipes.errors import RunError
from recipes.loader import load_recipe
from train import run as train_run
from train import script

DRAFTER = {"kind": "small_lm", "options": {"layers": 2}}
RUN = {"train__epochs": 8 / 6, "train__accumulation": 1, "train__save_every": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return trainer_base(tmp_path_factory.mktemp("small"), drafter=DRAFTER)


@pytest.fixture
def build(base, tmp_path):
    yield from trainers(base, tmp_path)


def test_loss_falls_and_the_targets_vocabulary_stays_its_own(build, base):
    """Rows of one song are learned; layers and norms move, the embedding and the head do not, and are not saved
    (cases 46, 62)."""
    trainer = build(train__epochs=12, train__validate_every=6, train__log_every=1)
    before = weights(trainer)
    trainer.run()
    losses = [row["train_loss"] for row in trainer.progress.curve]
    assert losses[-1] < 0.9 * losses[0]
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trained_parameters(trainer.drafter).values()}
    still = {name for name, w in weights(trainer).items() if torch.equal(before[name], w)}
    assert still == set(trainer.drafter.vocabulary())
    stored = load_file(checkpoint.path_of(trainer.folder, trainer.progress.step) / checkpoint.WEIGHTS)
    assert stored.keys() == (before.keys() - still) | {"d2t", "t2d"}


@pytest.mark.parametrize("options", [{}, {"drafter__options__train_vocabulary": True, "train__optimizer": "muon"},
                                     {"drafter__options__on_policy": 0.5, "drafter__options__on_policy_tokens": 4}])
def test_resume_is_bit_equal(build, options):
    """8 steps in one go equal 4, a new process and 4: rates, moments, weights and curve, text of its own too (case
    19)."""
    assert_resumes(build, RUN, **options)


def test_the_script_is_its_own(base, capsys):
    assert call(script.COMMAND, base.recipe) == 0
    assert capsys.readouterr().out.strip() == "train/small_lm.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the counting target: its answers are learned by two of its layers."""
    folder = tmp_path_factory.mktemp("end")
    model = counting_target(folder / "model")
    write_traces(folder / "runs" / "tiny", model, counted_rows(8, 2))
    texts = write_prompts(folder / "eval.jsonl", [f"say {word}" for word in ("abc", "tea", "42", "no")])
    recipe = write_recipe(folder / "r.yaml", model, drafter=DRAFTER, eval={**EVAL, "prompts": str(texts)},
                          export={"formats": ["plain"], "check_prompts": 2, "check_tokens": 8},
                          train={"epochs": 2.0, "lr": 0.001, "validate_every": 20, "save_every": 20})
    assert call(train_run.COMMAND, recipe) == 0
    return recipe


def test_train_export_eval_and_doctor_from_end_to_end(trained, capsys):
    """Cases 03, 12, 46: the export is a plain folder that transformers loads, with the trained tensors and the target's
    vocabulary; the second reader, transformers alone, gives the loop's acceptance; `make eval` reports 0 mismatches,
    also of the export opened as a drafter; `make doctor` finds all agree."""
    run = trained.parent / "runs" / "tiny"
    assert call(ship.COMMAND, trained) == 0
    proof, out = json.loads((run / "export" / "plain-check.json").read_text()), run / "export" / "plain"
    assert proof["loop"] == proof["reader"] and proof["loop"][2] > 0.3 and proof["engines"]["vllm"] == []
    assert "does not load the plain layout" in proof["engines"]["sglang"][0]
    model = AutoModelForCausalLM.from_pretrained(out)
    best = load_file(checkpoint.best(run / "checkpoints") / checkpoint.WEIGHTS)
    assert all(torch.equal(p, best[f"model.{name}"]) for name, p in model.named_parameters() if "layers" in name)
    target = load_target(trained.parent / "model", "float32")
    ours = checkpoint.load(checkpoint.best(run / "checkpoints"), target).model.eval()
    ours.set_attn_implementation(model.config._attn_implementation)
    ids = torch.tensor([[3, 9, 14, 20, 33, 5]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ours(ids).logits)
    assert '"method": "draft_model"' in (out / "SERVE.md").read_text()
    assert "draft_tensor_parallel_size" not in (out / "serve.sh").read_text()
    assert call(eval_run.COMMAND, trained) == 0
    report = json.loads((run / "eval" / "report.json").read_text())
    assert violations(report, SCHEMA) == [] and report["drafter"]["kind"] == "small_lm"
    assert report["total"]["lossless"]["greedy"]["mismatches"] == 0
    assert call(eval_run.COMMAND, trained, "--name", "theirs", "--drafter.path", str(out)) == 0
    other = json.loads((trained.parent / "runs" / "theirs" / "eval" / "report.json").read_text())
    assert other["total"]["acceptance"]["per_position"] == report["total"]["acceptance"]["per_position"]
    capsys.readouterr()
    assert call(doctor.COMMAND, trained) == 0
    assert "training, loop, reader of plain agree at every stage" in " ".join(capsys.readouterr().out.split())
    share_traces(run / "traces", trained.parent / "runs" / "on" / "traces")
    assert call(train_run.COMMAND, trained, "--name", "on", "--drafter.init_from", str(run)) == 2
    assert "name that folder in drafter.options.sibling" in capsys.readouterr().err


def test_an_export_says_which_layers_it_began_as(trained):
    """Another `keep` there is another drafter: what `drafter.path` opens has the trained one's options."""
    out = trained.parent / "runs" / "tiny" / "export" / "plain"
    assert call(ship.COMMAND, trained) == 0
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    config["drafthouse"]["options"] |= {"layers": 0, "keep": [1, 4]}
    assert from_plain(config, tensors).options["keep"] == [1, 4]


@pytest.mark.parametrize("name, change, said", [
    ("config.json", lambda c: c.pop("torch_dtype"), "dtype"),
    ("config.json", lambda c: c.update(architectures=["Other"]), "must name a causal language model"),
    ("config.json", lambda c: c.update(auto_map={"x": "y"}), "names code that a reader would run"),
    ("config.json", lambda c: c.update(num_hidden_layers=3), "missing"),
    ("config.json", lambda c: c.update(vocab_size=65), "engines want the target's"),
    ("config.json", lambda c: c.pop("drafthouse"), "did not export"),
    ("provenance.json", lambda c: c["shape"]["config"].update(rms_norm_eps=1.0), "shape.config"),
    ("model.safetensors", lambda t: t.pop("model.norm.weight"), "model.norm.weight: missing"),
    ("model.safetensors", lambda t: t.update(x=torch.ones(2)), "x: unknown tensor"),
    ("model.safetensors", lambda t: t["lm_head.weight"].zero_(), "all zeros"),
    ("model.safetensors", lambda t: t["model.norm.weight"].fill_(float("nan")), "NaN"),
    ("model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(3)}), "shape")])
def test_damaged_exports_are_refused(trained, tmp_path, name, change, said):
    """Case 13: each fault by its name."""
    run = trained.parent / "runs" / "tiny"
    assert call(ship.COMMAND, trained) == 0
    folder = shutil.copytree(run / "export" / "plain", tmp_path / "plain")
    path = folder / name
    if name.endswith("json"):
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RunError) as error:
        check_folder(folder, "plain")
    assert said in str(error.value)


def test_plan_knows_its_sizes(trained):
    """Numbers of the plan are those of checkpoint and export; a tied head is no second table."""
    recipe = load_recipe(trained)
    assert call(ship.COMMAND, trained) == 0
    config = planning.read_config(recipe)
    size = planning.draft_size(recipe, planning.shape_of(config, "x"), config)
    run = trained.parent / "runs" / "tiny"
    best = load_file(checkpoint.best(run / "checkpoints") / checkpoint.WEIGHTS)
    exported = load_file(run / "export" / "plain" / "model.safetensors")
    assert size.exported("plain") == sum(t.numel() for t in exported.values())
    assert size.trained == sum(t.numel() for name, t in best.items() if name not in ("d2t", "t2d"))
    tied = planning.draft_size(recipe, planning.shape_of(config, "x"), config | {"tie_word_embeddings": True})
    assert size.exported("plain") - tied.exported("plain") == size.borrowed - tied.borrowed == size.head
    assert tied.trained == size.trained


@pytest.mark.slow
@pytest.mark.parametrize("options, rows, accumulation", [(DDP, 2, 1), (ZERO3, 1, 2)], ids=["ddp", "zero3-accumulated"])
def test_two_processes_equal_one(tmp_path_factory, options, rows, accumulation):
    """2 ranks end with the weights and the validation counts of one process with as many rows a step (cases 38, 42,
    66)."""
    folder = tmp_path_factory.mktemp("launch")
    write_traces(folder / "runs" / "tiny", write_target(folder / "model"), conversations(12, 5))
    write_recipe(folder / "r.yaml", folder / "model", drafter=DRAFTER,
                 train={"validate_every": 2, "save_every": 2, "keep": 9})
    done = launch(folder, "alone", PLAIN, "--train.batch_rows", "4", script="train/small_lm.py")
    assert done.returncode == 0, done.stderr
    alone = result(folder, "alone")
    done = launch(folder, "two", options, "--train.batch_rows", str(rows), "--train.accumulation", str(accumulation),
                  script="train/small_lm.py")
    assert done.returncode == 0, done.stderr
    tensors, curve, trainer = result(folder, "two")
    assert trainer["split"] == {"rows": rows, "ranks": 2, "accumulation": accumulation}
    assert_close(tensors, alone[0])
    assert counts(curve) == counts(alone[1])
