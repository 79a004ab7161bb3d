"""The parallel drafter through the shared loop: resume bit for bit, what is trained, and `make train`, `export`, `eval`
and `doctor` on a tiny target from end to end; two real processes are marked slow."""

import json
from pathlib import Path

import pytest
import torch
from launched import assert_close, counts
from safetensors.torch import load_file, save_file
from test_plan import SMOLLM2
from test_plan import recipe as planned
from test_report import SCHEMA, violations
from test_train_distributed import DDP, PLAIN, ZERO3, launch, result
from tiny import V, call, conversations, write_prompts, write_recipe, write_target, write_traces
from tiny_run import EVAL, counting_target
from tiny_trainer import assert_resumes, trained_parameters, trainer_base, trainers, weights

from data.capture import Conversation
from drafters import checkpoint
from drafters.registry import entry, options_of
from eval import doctor, ship
from eval import plan as planning
from eval import run as eval_run
from recipes.loader import load_recipe
from recipes.model_shape import shape_of
from train import run as train_run
from train import script

OPTIONS = {"draft_vocab_size": 32, "depth": 3, "num_layers": 2}
RUN = {"train__epochs": 8 / 6, "train__accumulation": 1, "train__save_every": 4,
       "drafter__options__hidden_noise": 0.1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return trainer_base(tmp_path_factory.mktemp("parallel"), drafter={"kind": "parallel", "options": OPTIONS})


@pytest.fixture
def build(base, tmp_path):
    yield from trainers(base, tmp_path)


def test_loss_falls_and_all_of_the_drafter_is_trained(build):
    """Rows of one song are learned, with chains dropped; mask state and mask embedding move too, and nothing of the
    target is held or saved (cases 46, 62)."""
    trainer = build(train__epochs=6, train__validate_every=6, train__log_every=1)
    before = weights(trainer)
    trainer.run()
    losses = [row["train_loss"] for row in trainer.progress.curve]
    assert losses[-1] < 0.75 * losses[0]
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trained_parameters(trainer.drafter).values()}
    assert {"mask_hidden", "mask_embedding"} < before.keys()
    assert not any(torch.equal(before[name], w) for name, w in weights(trainer).items())
    stored = load_file(checkpoint.path_of(trainer.folder, trainer.progress.step) / checkpoint.WEIGHTS)
    assert stored.keys() == before.keys() | {"d2t", "t2d"}


@pytest.mark.parametrize("options", [{}, {"train__optimizer": "muon"}])
def test_resume_is_bit_equal(build, options):
    """8 steps in one go equal 4, a new process and 4: rates, moments, weights and curve, with the drop drawn anew in
    every step (case 19)."""
    assert_resumes(build, RUN, **options)


def test_the_script_is_its_own(base, capsys):
    assert call(script.COMMAND, base.recipe) == 0
    assert capsys.readouterr().out.strip() == "train/parallel.py"


def repeated(number: int, token: int) -> Conversation:
    """A row of a target that repeats the last token; after the template's end that is 40."""
    return Conversation(f"r{number}", "train" if number < 8 else "validation", [5 + number, 9] + [token] * 13,
                        [0] * 3 + [1] * 12, [token] * 6, "length")


def repeating_run(folder: Path) -> Path:
    """The recipe of a run of `make train` on the traces of a target that repeats its last token, which masks have to
    fetch."""
    model = counting_target(folder / "model")
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.eye(V)}, model / "model.safetensors", {"format": "pt"})
    rows = [repeated(n, token) for n, token in enumerate((14, 40, 24, 40, 34, 40, 44, 40, 24, 40))]
    write_traces(folder / "runs" / "tiny", model, rows)
    texts = write_prompts(folder / "eval.jsonl", [f"say {word}" for word in ("abc", "tea", "42", "no")])
    options = {"draft_vocab_size": 64, "depth": 3}
    recipe = write_recipe(folder / "r.yaml", model, drafter={"kind": "parallel", "options": options},
                          eval={**EVAL, "prompts": str(texts)}, export={"check_prompts": 2, "check_tokens": 8},
                          train={"epochs": 10.0, "lr": 0.01, "validate_every": 20, "save_every": 20})
    assert call(train_run.COMMAND, recipe) == 0
    return recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return repeating_run(tmp_path_factory.mktemp("end"))


def test_train_export_eval_and_doctor_from_end_to_end(trained, capsys):
    """Cases 12, 46: what `make train` wrote accepts tokens at every depth; it is exported in both layouts and proven by
    the second reader; `make eval` reports 0 mismatches; an export, opened as a drafter, gives the same counts; `make
    doctor` finds training, loop and readers agree at every stage."""
    both = ["--export.formats", "[native, speculators]"]
    run = trained.parent / "runs" / "tiny"
    curve = json.loads((run / "checkpoints" / "curve.json").read_text())
    assert curve[-1]["per_position"][2] > 0.3
    assert call(ship.COMMAND, trained, *both) == 0
    for layout in ("native", "speculators"):
        proof = json.loads((run / "export" / f"{layout}-check.json").read_text())
        assert proof["loop"] == proof["reader"] and proof["loop"][2] > 0.3
        assert proof["engines"]["vllm"] == [] and "does not draft in parallel" in proof["engines"]["sglang"][0] or (
            layout == "speculators")
    assert call(eval_run.COMMAND, trained) == 0
    report = json.loads((run / "eval" / "report.json").read_text())
    assert violations(report, SCHEMA) == [] and report["drafter"]["kind"] == "parallel"
    assert report["total"]["lossless"]["greedy"]["mismatches"] == 0
    assert report["drafter"]["options"]["mask_token"] == 63  # behind the tokenizer's ids
    assert call(eval_run.COMMAND, trained, "--name", "theirs", "--drafter.path", str(run / "export" / "native")) == 0
    other = json.loads((trained.parent / "runs" / "theirs" / "eval" / "report.json").read_text())
    assert other["total"]["acceptance"]["per_position"] == report["total"]["acceptance"]["per_position"]
    capsys.readouterr()
    assert call(doctor.COMMAND, trained, *both) == 0
    assert "training, loop, reader of native, reader of speculators agree at every stage" in " ".join(
        capsys.readouterr().out.split())


@pytest.mark.slow
def test_trees_and_the_fastest_setting_are_evaluated(trained):
    """A product tree and a chosen one in `make eval`: lossless, and the tree accepts no less than the chain."""
    run = trained.parent / "runs" / "tiny"
    for name, flags in (("tree", ["--eval.tree.depth", "3", "--eval.tree.top_k", "2", "--eval.tree.total", "6"]),
                        ("chosen", ["--eval.choose", "tree"])):
        assert call(eval_run.COMMAND, trained, "--name", name, "--drafter.path", str(run), *flags) == 0
        report = json.loads((trained.parent / "runs" / name / "eval" / "report.json").read_text())
        assert report["total"]["lossless"]["greedy"]["mismatches"] == 0


@pytest.mark.parametrize("options", [{}, {"tap_norms": True}])
def test_the_plan_counts_every_parameter(base, options):
    """`make plan` counts the parameters that the drafter has, mask state and embedding among them."""
    chosen = load_recipe(base.recipe, {f"drafter.options.{name}": str(value) for name, value in options.items()})
    config = planning.read_config(chosen)
    drafter = entry("parallel").code.build(options_of("parallel", chosen.drafter.options), base.target, {9: 1}, 0)
    size = planning.draft_size(chosen, shape_of(config, "here"), config)
    assert size.parameters == sum(p.numel() for p in drafter.parameters())


def test_the_plan_knows_one_pass(tmp_path):
    """At equal layers, K and acceptance a draft costs less than EAGLE-3's K passes, and a training step moves its
    weights once; dropped chains cost less than all of them."""
    path = planned(tmp_path, SMOLLM2, drafter={"options": {"depth": 5}}, eval={"draft_length": 5},
                   plan={"acceptance": [1.3, 3.0]})
    own = {"plan.hardware": "cpu", "drafter.kind": "parallel", "drafter.options.depth_share": "1.0"}
    parallel, dropped, chain = (planning.make(load_recipe(path, flags)) for flags in (
        own, own | {"drafter.options.depth_share": "0.7"},
        {"plan.hardware": "cpu", "drafter.options.deepen_at": "0.0", "drafter.options.first_depth": "5"}))
    for bound in (0, 1):
        assert parallel["stages"]["eval"]["seconds"][bound] < chain["stages"]["eval"]["seconds"][bound]
        assert (dropped["stages"]["train"]["parts"]["passes"][bound]
                < parallel["stages"]["train"]["parts"]["passes"][bound])
        one, three = (made["stages"]["train"]["parts"]["passes"][bound] for made in (parallel, chain))
        assert one < three


# --- two real processes ---


@pytest.fixture(scope="module")
def launching(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    write_traces(folder / "runs" / "tiny", write_target(folder / "model"), conversations(12, 5))
    write_recipe(folder / "r.yaml", folder / "model", train={"validate_every": 2, "save_every": 2, "keep": 9},
                 drafter={"kind": "parallel", "options": OPTIONS})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("options, rows, accumulation", [(DDP, 2, 1), (ZERO3, 1, 2)], ids=["ddp", "zero3-accumulated"])
def test_two_processes_equal_one(launching, options, rows, accumulation):
    """2 gloo ranks under `accelerate launch train/parallel.py` end with the weights and the validation counts of one
    process with as many rows a step (cases 38, 42, 66); without drop, which every rank draws for itself."""
    whole = ("--drafter.options.depth_share", "1.0")
    if not (launching / "runs" / "alone").exists():
        done = launch(launching, "alone", PLAIN, "--train.batch_rows", "4", *whole, script="train/parallel.py")
        assert done.returncode == 0, done.stderr
    alone = result(launching, "alone")
    name = f"two-{options[1].split('/')[-1]}"
    done = launch(launching, name, options, "--train.batch_rows", str(rows), "--train.accumulation", str(accumulation),
                  *whole, script="train/parallel.py")
    assert done.returncode == 0, done.stderr
    tensors, curve, trainer = result(launching, name)
    assert trainer["split"] == {"rows": rows, "ranks": 2, "accumulation": accumulation}
    assert_close(tensors, alone[0])
    assert counts(curve) == counts(alone[1])


@pytest.mark.slow
def test_two_processes_with_drop_repeat_themselves(launching):
    """With chains dropped by each rank's own seed, some of them with none left at the last depth, two ranks finish and
    a second run gives the same bits."""
    found = []
    for name in ("drop-a", "drop-b"):
        done = launch(launching, name, DDP, "--train.batch_rows", "1", script="train/parallel.py")
        assert done.returncode == 0, done.stderr
        found.append(result(launching, name, 6)[0])
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
