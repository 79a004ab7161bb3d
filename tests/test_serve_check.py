"""`make serve-check` against a stand-in for vLLM; tests/test_vllm.py has the real one."""

import json
import sys
from pathlib import Path

import pytest
from tiny import call
from tiny_run import tiny_run

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from eval import run as eval_run
from eval import serve_check, ship
from eval.decode import Decoder
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
    "server without ids": ({"native": {"no_ids": True}}, "no completion with token ids: KeyError('token_ids')"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails(base, capsys, fault):
    """Cases 12, 13, 59: other ids, other acceptance, a drafter that does not draft or load; each is named."""
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


def test_counters_of_replicas_are_summed():
    """Case 55: 8 of 10 and 18 of 20 are 26 of 30, in any order."""
    class Metric:
        def __init__(self, name, value=0, values=()):
            self.name, self.value, self.values = name, value, values

    rows = [Metric(DRAFTS, 10), Metric(ACCEPTED, values=[8, 4]), Metric(DRAFTS, 20), Metric(ACCEPTED, values=[18])]
    assert counters(rows) == counters(rows[::-1]) == (30, [26, 4])
