"""`make serve-check` against a stand-in for vLLM; tests/test_vllm.py has the real one."""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from evaluated import TURNS, write_jsonl
from safetensors.torch import load_file, save_file
from tiny import call
from tiny_run import tiny_run

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from drafters.target import Target
from drafters.tree import DynamicTree, chain
from eval import run as eval_run
from eval import serve_check, ship
from eval.decode import Decoder
from eval.plans import described
from eval.serve_worker import ACCEPTED, DRAFTS, counters
from recipes.files import sha256_file

ENGINE = Path(__file__).resolve().parent / "fake_engine"
FORMATS = ["--export.formats", "[native, speculators]"]
FLAGS = [*FORMATS, "--python", sys.executable]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run in both layouts, evaluated; the target's folder says what a right engine answers and counts."""
    made = tiny_run(tmp_path_factory.mktemp("serve"))
    assert call(ship.COMMAND, made.recipe, *FORMATS) == 0
    assert call(eval_run.COMMAND, made.recipe) == 0
    prompts, _ = evaluation_prompts(str(made.recipe.parent / "eval.jsonl"))
    made.ids = [prompt_ids(made.target.tokenizer, p.messages) for p in prompts]
    outputs = Decoder(made.target, 8).speculative(made.ids, made.drafter, 3)
    made.right = {"answers": {str(ids): out.tokens for ids, out in zip(made.ids, outputs)},
                  "drafts": sum(o.acceptance.drafts for o in outputs),
                  "accepted": [sum(o.acceptance.accepted[i] for o in outputs) for i in range(3)], "faults": {}}
    return made


@pytest.fixture(autouse=True)
def fake(base, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ENGINE))
    says(base)


def says(base, **faults) -> None:
    (base.model / "engine.json").write_text(json.dumps(base.right | {"faults": faults}))


def test_the_report(base, capsys):
    """Both layouts, in process and over HTTP: ids equal, acceptance the report's at every position, which the report
    copies, with its checksum, the prompts' ids and the engine (cases 12, 50)."""
    assert call(serve_check.COMMAND, base.recipe, *FLAGS) == 0
    assert "serves the drafter: same greedy ids" in capsys.readouterr().out
    found = json.loads((base.run / "serve" / "report.json").read_text())
    report = json.loads((base.run / "eval" / "report.json").read_text())
    assert found["greedy_equal"] is found["passed"] is True
    assert found["per_position_report"] == report["total"]["acceptance"]["per_position"]
    assert found["per_position_engine"] == found["per_position_report"] and 0 < found["per_position_engine"][2] < 1
    assert found["report_sha256"] == sha256_file(base.run / "eval" / "report.json")
    assert found["prompt_ids"] == ["p0", "p1", "p2", "p3"]
    assert found["engine"]["name"] == "vllm" and found["engine"]["version"] == "0.32.0"
    assert [(row["layout"], row["way"]) for row in found["checks"]] == [
        ("native", "offline"), ("native", "http"), ("speculators", "offline"), ("speculators", "http")]


FAULTS = {
    "other ids": ({"native": {"answers": None}}, "native, offline: greedy ids differ on 1 of 4 prompts, first on p1"),
    "lower acceptance": ({"speculators": {"accepted": [9, 1, 0]}}, "the engine accepts [0.75, 0.083, 0.0] by position"),
    "no drafts": ({"native": {"drafts": 0, "accepted": []}}, "counted 0 drafts of 0 positions, not of 3"),
    "other draft length": ({"native": {"accepted": [12, 8]}}, "of 2 positions, not of 3"),
    "does not load": ({"native": {"refuses": True}}, "the engine: ValueError: unexpected tensor layers.0.x"),
    "dies": ({"native": {"dies": True}}, "the engine ended without answers"),
    "server does not load": ({"native": {"server_refuses": True}}, "the server ended: ValueError: unexpected tensor"),
    "server without ids": ({"native": {"no_ids": True}}, "no completion with token ids: KeyError('token_ids')"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails(base, capsys, fault):
    """Cases 12, 13, 47, 59: other ids, other acceptance, a drafter that does not draft or load, over HTTP alone too;
    each is named."""
    faults, message = FAULTS[fault]
    if fault == "other ids":
        answers = {key: list(ids) for key, ids in base.right["answers"].items()}
        answers[str(base.ids[1])][3] += 1
        faults = {"native": {"answers": answers}}
    says(base, **faults)
    flags = [*FLAGS[2:], "--export.formats", f"[{next(iter(faults))}]"]
    assert call(serve_check.COMMAND, base.recipe, *flags, "--http", str("server" in fault).lower()) == 1
    assert message in capsys.readouterr().err
    if fault in ("other ids", "lower acceptance"):
        assert json.loads((base.run / "serve" / "report.json").read_text())["passed"] is False


def test_what_is_missing(base, capsys):
    """Another prompt set than the report's, a changed export, no interpreter: said before an engine starts."""
    other = base.recipe.parent / "other.jsonl"
    other.write_text('{"prompt": "another"}\n')
    for flags, message in ((["--eval.prompts", str(other)], "give other ids than were evaluated"),
                           (["--python", "/nowhere/python"], "no such program"),
                           (["--export.formats", "[gguf]"], "known layouts"),
                           (["--name", "none"], "no evaluation here")):
        assert call(serve_check.COMMAND, base.recipe, *FLAGS, *flags) in (1, 2)
        assert message in capsys.readouterr().err
    serve = base.run / "export" / "native" / "serve.sh"
    whole = serve.read_bytes()
    serve.write_bytes(b"#!/bin/sh\n")
    assert call(serve_check.COMMAND, base.recipe, *FLAGS) == 2
    assert "not what `make export` checked last" in capsys.readouterr().err
    serve.write_bytes(whole)


def test_an_export_of_another_checkpoint_than_the_evaluation(base, capsys):
    """Cases 12, 36, 50: trained on and exported, but not evaluated again: the report is of another drafter."""
    weights = base.checkpoint / "drafter.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    try:
        save_file(tensors | {"norm.weight": tensors["norm.weight"] * 1.001}, weights)
        assert call(ship.COMMAND, base.recipe) == 0
        assert call(serve_check.COMMAND, base.recipe, *FLAGS[2:]) == 1
        assert "native: exported from another checkpoint than eval/report.json is of" in capsys.readouterr().err
    finally:
        weights.write_bytes(whole)
        assert call(ship.COMMAND, base.recipe, *FORMATS) == 0


@pytest.mark.parametrize("plan, words", [(DynamicTree(2, 3, 9), "dynamic trees of depth 2"),
                                         (chain(3, 0.25), "chains of up to 3 that end behind a token below 0.25")])
def test_a_report_of_other_drafts(base, capsys, plan, words):
    """Case 12: a tree's acceptance, or that of chains that stop early, is none that an engine's chains can have."""
    path = base.run / "eval" / "report.json"
    whole = path.read_text()
    report = json.loads(whole)
    report["settings"]["plan"] = described(plan)
    path.write_text(json.dumps(report))
    assert call(serve_check.COMMAND, base.recipe, *FLAGS) == 2
    assert f"was made with {words}" in capsys.readouterr().err
    path.write_text(whole)


def test_a_report_of_sets(base, capsys):
    """Case 53: of eval.sets the engine gets what was sent, later turns with the target's own answers among it; where
    that is other than the report's, nothing is compared."""
    sets = f"[{{name: bench, path: {write_jsonl(base.recipe.parent / 'bench.jsonl', TURNS)}}}]"
    flags = ["--name", "sets", "--drafter.path", str(base.checkpoint), "--eval.sets", sets]
    assert call(ship.COMMAND, base.recipe, *flags) == 0 == call(eval_run.COMMAND, base.recipe, *flags)
    run = base.run.parent / "sets"
    sent = run / "eval" / "sent.jsonl"
    ids = [json.loads(line)["ids"] for line in sent.read_text().splitlines()]
    outputs = Decoder(base.target, 8).speculative(ids, base.drafter, 3)
    (base.model / "engine.json").write_text(json.dumps({
        "answers": {str(i): o.tokens for i, o in zip(ids, outputs)}, "faults": {},
        "drafts": sum(o.acceptance.drafts for o in outputs),
        "accepted": [sum(o.acceptance.accepted[i] for o in outputs) for i in range(3)]}))
    flags += ["--python", sys.executable, "--http", "false"]
    assert call(serve_check.COMMAND, base.recipe, *flags) == 0, capsys.readouterr().err
    found = json.loads((run / "serve" / "report.json").read_text())
    assert found["prompt_ids"] == ["bench: 81", "bench: 82", "bench: 83", "bench: 81, turn 2", "bench: 83, turn 2"]
    sent.write_text("\n".join(sent.read_text().splitlines()[:-1]))
    assert call(serve_check.COMMAND, base.recipe, *flags) == 1
    assert "give other ids than were evaluated" in capsys.readouterr().err


def test_the_target_is_gone_when_an_engine_starts(base, monkeypatch):
    """An engine needs the memory: no target of this process is left, not by its hooks either."""
    gc.collect()
    before, seen = sum(type(o) is Target for o in gc.get_objects()), []

    def look(*arguments):
        seen.append(sum(type(o) is Target for o in gc.get_objects()))
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_check, "offline", look)
    assert call(serve_check.COMMAND, base.recipe, *FLAGS) == 130
    assert seen == [before]


def test_sigterm_ends_the_command(base, monkeypatch):
    """Exit code 143, by an exception that ends what was started; afterwards the signal means what it did before."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(serve_check, "check", lambda *arguments: os.kill(os.getpid(), signal.SIGTERM))
    assert call(serve_check.COMMAND, base.recipe, *FLAGS) == 143
    assert signal.getsignal(signal.SIGTERM) is handler


def test_counters_of_replicas_are_summed():
    """Case 55: 8 of 10 and 18 of 20 are 26 of 30, in any order."""
    class Metric:
        def __init__(self, name, value=0, values=()):
            self.name, self.value, self.values = name, value, values

    rows = [Metric(DRAFTS, 10), Metric(ACCEPTED, values=[8, 4]), Metric(DRAFTS, 20), Metric(ACCEPTED, values=[18])]
    assert counters(rows) == counters(rows[::-1]) == (30, [26, 4])
