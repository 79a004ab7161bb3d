"""`make doctor` names the first stage that departs: every departure is injected into a run that agrees."""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from tiny import call
from tiny_run import change_json, change_shard, change_tensors, roll_states, tiny_run

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from drafters.target import Target
from eval import doctor, ship
from eval.decode import Decoder
from eval.departures import compare_all
from eval.metrics import Acceptance
from eval.witnesses import Evidence, loop

FORMATS = ["--export.formats", "[native, speculators]"]
QUICK = ["--rows", "2", "--starts", "2", "--prompts", "2"]
ENGINE = Path(__file__).resolve().parent / "fake_engine"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run in both layouts, and what a right engine answers."""
    made = tiny_run(tmp_path_factory.mktemp("doctor"))
    assert call(ship.COMMAND, made.recipe, *FORMATS) == 0
    prompts, _ = evaluation_prompts(str(made.recipe.parent / "eval.jsonl"))
    ids = [prompt_ids(made.target.tokenizer, p.messages) for p in prompts]
    outputs = Decoder(made.target, 8).speculative(ids, made.drafter, 3)
    made.right = {"answers": {str(i): o.tokens for i, o in zip(ids, outputs)},
                  "rendered": {p.messages[-1]["content"]: i for p, i in zip(prompts, ids)},
                  "drafts": sum(o.acceptance.drafts for o in outputs),
                  "accepted": [sum(o.acceptance.accepted[i] for o in outputs) for i in range(3)], "faults": {}}
    return made


@pytest.fixture
def whole(base):
    """Puts every file back that a test changed."""
    files = [*base.run.rglob("*.json"), *base.run.rglob("*.safetensors")]
    before = {path: path.read_bytes() for path in files}
    yield
    for path, content in before.items():
        path.write_bytes(content)


def findings(base) -> dict:
    return json.loads((base.run / "doctor" / "report.json").read_text())


def test_a_run_that_agrees(base, capsys):
    """All stages, three witnesses: training, loop, and the second reader on both layouts (cases 01, 12, 32, 45, 56)."""
    assert call(doctor.COMMAND, base.recipe, *FORMATS) == 0
    assert "agree at every stage" in capsys.readouterr().out
    found = findings(base)
    assert found["first"] is None
    assert found["witnesses"] == ["training", "loop", "reader of native", "reader of speculators"]
    stages = list(dict.fromkeys(f["stage"] for f in found["findings"]))
    assert found["not_compared"] == []
    assert stages == ["checkpoint", "dtype", "vocabulary", "layers", "positions", "token ids", "layer states",
                      "teacher", "drafter logits at step 1", "drafter logits at step 2", "drafter logits at step 3",
                      "acceptance"]
    between = {f["between"] for f in found["findings"] if f["stage"] == "acceptance"}
    assert between == {"training and loop", "loop and reader of native", "loop and reader of speculators",
                       "reader of native and reader of speculators"}


def newer_checkpoint(origin):
    origin["checkpoint_sha256"] = "0" * 64


def other_text(tensors):
    tensors["ids"][tensors["turns"] == 0] = 60  # no text has this token


def other_vocabulary(tensors):
    tensors["d2t"][-1] += 1
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill(0, ids, True)


def other_theta(config):
    config["rope_theta"] = 77.0


def other_layers(config):
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]


def other_feedback(config):
    config["norm_output"] = True


def other_head(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)


def other_dtype(manifest):
    manifest["target"]["dtype"] = "bfloat16"


def deaf_to_states(tensors):
    tensors["midlayer.mlp.down_proj.weight"] *= 0.2


NATIVE = "export/native"
DEPARTURES = {
    "checkpoint": (f"{NATIVE}/provenance.json", newer_checkpoint,
                   "checkpoint: loop and reader of native depart: weights"),
    "dtype": ("traces/manifest.json", other_dtype, "dtype: training and loop depart: traces: bfloat16"),
    "vocabulary": (f"{NATIVE}/model.safetensors", other_vocabulary, "vocabulary: loop and reader of native depart"),
    "layers": (f"{NATIVE}/config.json", other_layers, "layers: loop and reader of native depart: first at 0: [1] and"),
    "positions": (f"{NATIVE}/config.json", other_theta, "positions: loop and reader of native depart"),
    "token ids": ("shard", other_text, "token ids: training and loop depart: row r6"),
    "layer states": ("shard", roll_states, "layer states: training and loop depart: row r"),
    "head": (f"{NATIVE}/model.safetensors", other_head, "drafter logits at step 1: loop and reader of native depart"),
    "mlp": (f"{NATIVE}/model.safetensors", deaf_to_states, "drafter logits at step 1: loop and reader of native"),
    "feedback": (f"{NATIVE}/config.json", other_feedback, "drafter logits at step 2: loop and reader of native depart"),
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_the_first_departure_is_named(base, whole, capsys, name):
    """Cases 01, 12, 32, 45, 48, 56: whatever follows from it, the first stage is what is said."""
    where, change, message = DEPARTURES[name]
    if where == "shard":
        change_shard(base.run, change)
    else:
        (change_json if where.endswith(".json") else change_tensors)(base.run / where, change)
    assert call(doctor.COMMAND, base.recipe, *QUICK) == 1
    assert message in capsys.readouterr().err
    assert findings(base)["first"]["departs"] is True


ENGINES = {
    "right": ({}, 0, ""),
    "token ids": ({"rendered": None}, 1, "token ids: loop and vLLM with native depart: row prompt p0"),
    "teacher": ({"answers": None}, 1, "teacher: loop and vLLM with native depart: row prompt p2, answer token 2"),
    "acceptance": ({"accepted": [2, 1, 0]}, 1, "acceptance: loop and vLLM with native depart: on prompts"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_departs(base, monkeypatch, capsys, name):
    """Cases 12, 45, 53, 59: an engine that renders, answers or accepts otherwise."""
    fault, code, message = ENGINES[name]
    if name == "token ids":
        fault = {"rendered": {key: [7, *ids] for key, ids in base.right["rendered"].items()}}
    if name == "teacher":
        answers = {key: list(ids) for key, ids in base.right["answers"].items()}
        answers[list(answers)[2]][2] += 1
        fault = {"answers": answers}
    (base.model / "engine.json").write_text(json.dumps(base.right | {"faults": {"native": fault}}))
    monkeypatch.setenv("PYTHONPATH", str(ENGINE))
    assert call(doctor.COMMAND, base.recipe, *QUICK, "--python", sys.executable) == code
    assert message in capsys.readouterr().err


def stored_in_bfloat16(base, share):
    """Makes the stored states smaller by a share, in bfloat16."""
    def change(tensors):
        tensors["taps"] = (tensors["taps"] * (1 - share)).bfloat16()
        tensors["final"] = tensors["final"].bfloat16()

    change_shard(base.run, change)
    change_json(base.run / "traces" / "manifest.json", lambda manifest: manifest.update(dtype="bfloat16"))


@pytest.mark.parametrize("share, code", [(2**-8, 0), (2**-6, 1)])
def test_what_storage_costs_is_no_departure(base, whole, capsys, share, code):
    """Case 48: states that were stored in less than the target's precision are compared by what that precision loses;
    what is beyond it still departs."""
    stored_in_bfloat16(base, share)
    assert call(doctor.COMMAND, base.recipe, *QUICK, "--trace.dtype", "bfloat16") == code
    out, err = capsys.readouterr()
    assert "agree at every stage" in out if code == 0 else "layer states: training and loop depart: row r" in err


def account(name, drafts, **more):
    return Evidence(name, drafts={("r0", 0): torch.tensor([drafts]).log()}, **more)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_precision_loosens_only_what_it_touches(weights):
    """Case 48: an export in bfloat16 allows its reader more, not training against the loop."""
    training, loop = account("training", [0.5, 0.5]), account("loop", [0.47, 0.53])
    reader = account("reader", [0.5, 0.5], weights=weights)
    [first, second] = compare_all([training, loop, reader], 1e-4)
    assert first.departs and second.departs is (weights == "float32")


def test_sampled_traces_have_greedy_validation(base, capsys):
    """Case 12: traces whose answers were sampled keep their second witness at teacher and acceptance."""
    assert call(doctor.COMMAND, base.recipe, *QUICK, "--generation.temperature", "0.7") == 0
    seen = {(f["stage"], f["between"]) for f in findings(base)["findings"]}
    assert {("teacher", "training and loop"), ("acceptance", "training and loop")} <= seen


def test_near_ties_of_prompts(base):
    """Case 59: an answer that parts from another where the target's best two are closer than eval.gap_tolerance is no
    departure, nor is the acceptance that follows from it; elsewhere both are."""
    ids = {"prompt p0": prompt_ids(base.target.tokenizer, [{"role": "user", "content": "say abc"}])}
    one = loop(base.drafter, base.target, [], ids, 3, 2, 6)
    [gaps], [answer] = one.gaps.values(), one.teacher.values()
    assert len(gaps) == len(answer) and min(gaps) > 0
    other = Evidence("vLLM", teacher={"prompt p0": [*answer[:2], 9]}, counted={"prompts": ["prompt p0"]},
                     acceptance={"prompts": Acceptance(3, 4, [1, 0, 0])})
    [found] = [f for f in compare_all([one, other], 1e-4) if f.stage == "teacher"]
    assert found.departs
    one.gaps["prompt p0"] = [1.0, 1.0, 1e-5]
    assert not any(f.departs for f in compare_all([one, other], 1e-4))


def test_sigterm_and_memory(base, monkeypatch):
    """SIGTERM is exit code 143; before an engine starts the target of this process is gone."""
    (base.model / "engine.json").write_text(json.dumps(base.right))
    monkeypatch.setenv("PYTHONPATH", str(ENGINE))
    gc.collect()
    before, seen = sum(type(o) is Target for o in gc.get_objects()), []

    def look(*arguments):
        seen.append(sum(type(o) is Target for o in gc.get_objects()))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(doctor, "offline", look)
    assert call(doctor.COMMAND, base.recipe, *QUICK, "--python", sys.executable) == 143
    assert seen == [before]


def test_a_drafter_from_elsewhere(base, capsys):
    """Without traces of its own a published drafter is compared from the loop on, and what only one witness knows is
    not called equal."""
    path = base.run / "export" / "native"
    flags = ["--name", "theirs", "--drafter.path", str(path)]
    assert call(doctor.COMMAND, base.recipe, *flags) == 2
    assert "run `make export` first" in capsys.readouterr().err
    assert call(ship.COMMAND, base.recipe, *flags) == 0 == call(doctor.COMMAND, base.recipe, *flags)
    out = capsys.readouterr().out
    assert "no second witness at: token ids, layer states, drafter logits" in out
    assert "loop, reader of native agree at every stage that two of them know" in out
    assert call(doctor.COMMAND, base.recipe, "--python", "/nowhere/python") == 2
    capsys.readouterr()
    for formats, message in (("[native, foo]", "export.formats = ['native', 'foo']: known layouts: native, "),
                             ("[medusa]", "export.formats = ['medusa']: a drafter of kind eagle3 has the layouts")):
        assert call(doctor.COMMAND, base.recipe, "--export.formats", formats) == 2
        assert message in capsys.readouterr().err
