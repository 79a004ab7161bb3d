"""Answers and hidden states of a real vLLM on the CPU. Optional: `make test-vllm` builds the environment it needs."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parallel_train import repeating_run
from tiny import call, chat_tokenizer, conversations, llama, load_target, write_prompts, write_recipe, write_traces
from tiny_medusa import medusa_run
from tiny_run import EVAL, counted_rows, counting_target, cycling_target, tiny_run

from data.backends.base import Losses
from data.backends.server import ServerBackend
from data.backends.units import make_unit
from data.capture import capture
from data.compare import NOISE, compare
from data.generate import Generator, Request
from data.sampling import Sampling
from data.states import open_states
from drafters.export.serving import speculation
from drafters.lookup import Options, Text
from drafters.registry import entry
from eval import doctor, serve_check, ship
from eval import run as eval_run
from eval.engine_run import Job, server
from recipes.schema import Generation, Server, Trace
from train import run as train_run

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LIMIT, PORT = 12, 18437
# One process, and threads that do not spin: two spinning ones on a busy machine are several times slower.
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
IN_PROCESS = """
import json, sys
from dataclasses import asdict
from types import SimpleNamespace
from pathlib import Path
from data.backends.base import Losses
from data.backends.engine import EngineBackend
from data.backends.journal import Journal
from data.generate import Request
from recipes.schema import Generation
folder, out, limit, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
loaded = SimpleNamespace(dtype="float32", model=folder)
target = SimpleNamespace(path=folder, section=loaded, vocab_size=64, end_ids=[2])
section = Generation(backend="vllm", engine={"enforce_eager": True, "max_model_len": 128})
requests = [Request(id, prompt, overrun=overrun) for id, prompt, overrun in rows]
answers = EngineBackend(section, target).run(requests, limit, Journal(out / "j.jsonl", "k"), Losses(0))
(out / "answers.json").write_text(json.dumps([asdict(a) for a in answers]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with heads of 64, the smallest that vLLM's CPU attention takes without padding."""
    folder = tmp_path_factory.mktemp("target")
    llama(hidden=256).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def requests() -> list[Request]:
    return [Request(f"r{i}", [(7 * i + 5 * j) % 30 + 3 for j in range(3 + i % 4)], Sampling(), 3 * (i % 2))
            for i in range(8)]


def test_vllm_server_gives_the_targets_own_greedy_answers(folder, tmp_path):
    """Name, tokenizer and weights pass the checks at the start, and ids, finish and overrun are our own (case 36)."""
    target = load_target(folder, "float32")
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "tiny",
               "--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--port", str(PORT)]
    process = subprocess.Popen(command, env=os.environ | SETTINGS, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("vLLM ended: " + "".join(seen[-20:]))
        server = Server(f"http://127.0.0.1:{PORT}", "tiny", concurrency=4)
        backend = ServerBackend(Generation(backend="openai", server=server), target)
        unit = make_unit(backend, tmp_path / "0.json", requests(), LIMIT, Losses(0))
    finally:
        process.terminate()
        process.communicate()
    assert unit.answers == Generator(target, LIMIT, 1).run(requests()) and unit.counts == {}


def test_vllm_in_process_gives_the_targets_own_greedy_answers(folder, tmp_path):
    """The same ids from `LLM.generate` with token prompts, overrun included (case 22)."""
    rows = json.dumps([[r.id, r.prompt, r.overrun] for r in requests()])
    subprocess.run([PYTHON, "-c", IN_PROCESS, folder, tmp_path, str(LIMIT), rows], env=os.environ | SETTINGS,
                   cwd=ROOT, check=True)
    answers = json.loads((tmp_path / "answers.json").read_text())
    expected = Generator(load_target(folder, "float32"), LIMIT, 1).run(requests())
    assert [(a["tokens"], a["finish"], a["overrun"]) for a in answers] == [
        (a.tokens, a.finish, a.overrun) for a in expected]


@pytest.mark.parametrize("layers", [[0, 2, 5], [1, 3, 6]], ids=["embedding to last layer", "before the final norm"])
def test_vllm_hands_out_the_targets_own_states(folder, tmp_path, monkeypatch, layers):
    """Every tap and final state of every row, rows that begin alike too: ids mean the same there, and no prefix cache
    withholds a state (cases 01, 08). What was handed over is gone (case 61)."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    target, rows = load_target(folder, "float32", layers), conversations(6, 2)
    rows[1].ids[: len(rows[0].ids)] = rows[0].ids
    rows[1].turns = [0] * (len(rows[1].ids) - 2) + [1, 1]
    section = Trace(backend="vllm", max_length=100, engine={"enforce_eager": True}, engine_python=str(PYTHON))
    with open_states(section, target, tmp_path) as states:
        traced, bad = states(rows, torch.float32)
        assert not list(states.staging.iterdir())
    assert bad == {}
    for got, own in zip(traced, capture(target, rows, 256)[0], strict=True):
        assert got.ids.equal(own.ids)
        assert compare(got, own, torch.float32, NOISE[torch.float32])[1] == ""
    assert [p.name for p in tmp_path.iterdir()] == ["vllm.log"]


def test_vllm_serves_the_export(tmp_path, monkeypatch, capsys):
    """Cases 12, 13, 59: the exported drafter in both layouts, in process and over HTTP: vLLM's own greedy ids, the
    report's acceptance to the count, and no stage that departs; a drafter with another head is noticed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = tiny_run(tmp_path)
    formats = ["--export.formats", "[native, speculators]"]
    assert call(ship.COMMAND, made.recipe, *formats) == 0 == call(eval_run.COMMAND, made.recipe)
    assert call(serve_check.COMMAND, made.recipe, *formats, "--python", str(PYTHON)) == 0, capsys.readouterr().err
    found = json.loads((made.run / "serve" / "report.json").read_text())
    assert found["greedy_equal"] and len(found["checks"]) == 4
    for row in found["checks"]:
        assert row["per_position"] == found["per_position_report"] and 0 < row["per_position"][2] < 1
    assert call(doctor.COMMAND, made.recipe, *formats, "--python", str(PYTHON)) == 0
    capsys.readouterr()
    path = made.run / "export" / "native" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(1, 0)}, path)
    proof = made.run / "export" / "native-check.json"
    proof.write_text(json.dumps(json.loads(proof.read_text()) | {"files": ship.digests(path.parent)}))
    assert call(serve_check.COMMAND, made.recipe, "--python", str(PYTHON), "--http", "false") == 1
    assert "the engine accepts [0.0, 0.0, 0.0] by position" in capsys.readouterr().err


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_vllm_serves_medusa_heads(tmp_path, monkeypatch, capsys, projection):
    """Cases 12, 13, 56, 59: the heads with a draft vocabulary, served by vLLM's own method: its greedy ids, the
    report's acceptance to the count; heads that name other tokens are noticed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = medusa_run(tmp_path, {"projection": projection})
    assert call(ship.COMMAND, made.recipe) == 0 == call(eval_run.COMMAND, made.recipe)
    assert call(serve_check.COMMAND, made.recipe, "--python", str(PYTHON)) == 0, capsys.readouterr().err
    found = json.loads((made.run / "serve" / "report.json").read_text())
    assert found["greedy_equal"] and len(found["checks"]) == 2
    for row in found["checks"]:
        assert row["per_position"] == found["per_position_report"]
        assert (row["per_position"][2] > 0) == (projection == "own")
    if projection == "own":
        path = made.run / "export" / "medusa" / "model.safetensors"
        tensors = load_file(path)
        save_file({name: t.roll(1, 0) if name.startswith("lm_heads.") else t for name, t in tensors.items()}, path)
        proof = made.run / "export" / "medusa-check.json"
        proof.write_text(json.dumps(json.loads(proof.read_text()) | {"files": ship.digests(path.parent)}))
        assert call(serve_check.COMMAND, made.recipe, "--python", str(PYTHON), "--http", "false") == 1
        assert "the engine accepts [0.0, 0.0, 0.0] by position" in capsys.readouterr().err


def test_vllm_serves_a_parallel_drafter(tmp_path, monkeypatch, capsys):
    """Cases 12, 13, 47, 59: all tokens in one pass, in both layouts: vLLM's greedy ids, the report's acceptance to the
    count; another head is noticed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe, formats = repeating_run(tmp_path), ["--export.formats", "[native, speculators]"]
    run = tmp_path / "runs" / "tiny"
    assert call(ship.COMMAND, recipe, *formats) == 0 == call(eval_run.COMMAND, recipe)
    assert call(serve_check.COMMAND, recipe, *formats, "--python", str(PYTHON)) == 0, capsys.readouterr().err
    found = json.loads((run / "serve" / "report.json").read_text())
    assert found["greedy_equal"] and len(found["checks"]) == 4
    for row in found["checks"]:
        assert row["per_position"] == found["per_position_report"] and row["per_position"][2] > 0.3
    path = run / "export" / "native" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(1, 0)}, path)
    proof = run / "export" / "native-check.json"
    proof.write_text(json.dumps(json.loads(proof.read_text()) | {"files": ship.digests(path.parent)}))
    assert call(serve_check.COMMAND, recipe, "--export.formats", "[native]", "--python", str(PYTHON), "--http",
                "false") == 1
    assert "the engine accepts [" in capsys.readouterr().err


def test_vllm_serves_a_small_model(tmp_path, monkeypatch, capsys):
    """Cases 12, 13, 59: a trained small language model by draft_model: vLLM's greedy ids, the report's drafts and
    acceptance to the count; another head is noticed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, run = counting_target(tmp_path / "model"), tmp_path / "runs" / "tiny"
    write_traces(run, model, counted_rows(8, 2))
    texts = write_prompts(tmp_path / "eval.jsonl", [f"say {word}" for word in ("abc", "tea", "42", "no")])
    recipe = write_recipe(tmp_path / "r.yaml", model, drafter={"kind": "small_lm", "options": {"layers": 2}},
                          eval={**EVAL, "prompts": str(texts)}, train={"epochs": 2.0, "lr": 0.001},
                          export={"formats": ["plain"], "check_prompts": 2, "check_tokens": 8})
    assert call(train_run.COMMAND, recipe) == 0 == call(ship.COMMAND, recipe) == call(eval_run.COMMAND, recipe)
    assert call(serve_check.COMMAND, recipe, "--python", str(PYTHON)) == 0, capsys.readouterr().err
    found = json.loads((run / "serve" / "report.json").read_text())
    assert found["greedy_equal"] and len(found["checks"]) == 2
    for row in found["checks"]:
        assert row["per_position"] == found["per_position_report"] and row["per_position"][0] > 0
        assert row["drafts"] == row["drafts_report"]
    path, proof = run / "export" / "plain" / "model.safetensors", run / "export" / "plain-check.json"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(1, 0)}, path, {"format": "pt"})
    proof.write_text(json.dumps(json.loads(proof.read_text()) | {"files": ship.digests(path.parent)}))
    assert call(serve_check.COMMAND, recipe, "--python", str(PYTHON), "--http", "false") == 1
    assert "the engine " in capsys.readouterr().err


def test_vllm_under_load(tmp_path, monkeypatch, capsys):
    """Cases 12, 23, 55: `make eval` against a real vLLM with the drafter and one without, in turns: its counters are
    the offline report's to the count, the prompts' ids too (case 53), and no text differs."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = tiny_run(tmp_path)
    assert call(ship.COMMAND, made.recipe) == 0 == call(eval_run.COMMAND, made.recipe)
    offline = json.loads((made.run / "eval" / "report.json").read_text())

    def job(drafter: Path | None) -> Job:
        return Job(str(made.model), drafter and speculation(str(drafter), 3), 3, [], 8, [2], "float32",
                   {"enforce_eager": True, "max_model_len": 128})

    with (server(str(PYTHON), job(made.run / "export" / "native"), 1, tmp_path / "with.log") as fast,
          server(str(PYTHON), job(None), 1, tmp_path / "without.log") as plain):
        flags = ["--eval.server.base_url", str(fast.base_url), "--eval.server.baseline_url", str(plain.base_url),
                 "--eval.server.concurrency", "[1, 3]", "--gate", str(tmp_path / "g.yaml")]
        (tmp_path / "g.yaml").write_text("bounds: [{metric: server.offline.largest_difference, max: 0}]")
        assert call(eval_run.COMMAND, made.recipe, *flags) == 0, capsys.readouterr().err
    report = json.loads((made.run / "eval" / "server" / "report.json").read_text())
    found, total = report["server"], report["total"]
    assert (found["engine"], found["drafting"], found["token_ids"], found["restless"]) == ("vllm", True, True, False)
    assert total["acceptance"]["per_position"] == offline["total"]["acceptance"]["per_position"]
    for key in ("ids_sha256", "prompt_tokens", "tokens", "drafts", "accepted"):
        assert [p[key] for p in report["prompts"]] == [p[key] for p in offline["prompts"]]
    assert found["greedy"]["equal"] == found["greedy"]["prompts"] == 4 and found["greedy"]["gap_unknown"] == 0
    for level in found["levels"].values():
        assert level["foreign"] == [] and level["speedup"] > 0 and level["speculative"]["lost"] == 0
        assert level["acceptance"]["mean_length"] == total["acceptance"]["mean_length"]


LOOKING = """
import json, sys
from pathlib import Path
import numpy as np
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as propose
cases = json.loads(Path(sys.argv[1]).read_text())
found = [propose(np.array(tokens, dtype=np.int32), low, high, 4096, K).tolist() for tokens, low, high, K in cases]
Path(sys.argv[2]).write_text(json.dumps(found))
"""


def test_vllm_looks_up_what_the_loop_does(tmp_path):
    """Case 12: its own ngram proposer continues what `match: first` continues, on texts that repeat themselves."""
    g, cases, ours = torch.Generator().manual_seed(5), [], []
    for _ in range(400):
        length, low, more, K = (int(torch.randint(1, most, (1,), generator=g)) for most in (40, 4, 4, 6))
        tokens = torch.randint(0, 4, (length,), generator=g).tolist()
        text = Text(Options(longest=low + more, shortest=low, match="first"), tokens[0])
        text.add(tokens[1:])
        cases.append([tokens, low, low + more, K])
        ours.append(text.continuation(K))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    subprocess.run([PYTHON, "-c", LOOKING, tmp_path / "cases.json", tmp_path / "found.json"], env=os.environ | SETTINGS,
                   check=True)
    assert json.loads((tmp_path / "found.json").read_text()) == ours and sum(map(bool, ours)) > 100


@pytest.mark.parametrize("kind, options", [("lookup", {"match": "first", "shortest": 1, "longest": 3}),
                                           ("layer_cut", {"layers": 5})])
def test_vllm_serves_what_needs_no_training(tmp_path, monkeypatch, capsys, kind, options):
    """Cases 12, 13, 59: lookup by its ngram method, a cut of the target by its draft_model: vLLM's greedy ids, the
    report's drafts and acceptance to the count; another window, or model, is noticed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tmp_path / "model"
    if kind == "lookup":
        cycling_target(model)
    else:
        llama(hidden=256).save_pretrained(model)
        chat_tokenizer().save_pretrained(model)
    texts = write_prompts(tmp_path / "eval.jsonl", [f"{word} and {word}" for word in ("abc", "tea", "42", "no")])
    recipe = write_recipe(tmp_path / "r.yaml", model, drafter={"kind": kind, "options": options},
                          eval={**EVAL, "prompts": str(texts), "max_tokens": 24})
    assert call(eval_run.COMMAND, recipe) == 0
    assert call(serve_check.COMMAND, recipe, "--python", str(PYTHON)) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "runs" / "tiny" / "serve" / "report.json").read_text())
    assert found["greedy_equal"] and len(found["checks"]) == 2
    for row in found["checks"]:
        assert row["per_position"] == found["per_position_report"] and row["per_position"][0] > 0
        assert row["drafts"] == row["drafts_report"]

    right = entry(kind).code.speculation

    def otherwise(drafter, K, folder):
        told = right(drafter, K, folder)
        if kind == "lookup":
            return told | {"prompt_lookup_min": 4, "prompt_lookup_max": 4}
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(1, 0)}, folder / "model.safetensors",
                  {"format": "pt"})
        return told

    monkeypatch.setattr(entry(kind).code, "speculation", otherwise)
    assert call(serve_check.COMMAND, recipe, "--python", str(PYTHON), "--http", "false") == 1
    assert "the engine " in capsys.readouterr().err
