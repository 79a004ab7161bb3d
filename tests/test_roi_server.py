"""Step times of a live server: a real one on loopback that streams a known step, with and without a drafter."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from tiny import call, write_prompts, write_target

from eval import roi, roi_server
from eval.roi_files import read_steps
from eval.roi_server import Stream, step_of
from recipes.errors import RunError

STEP = 0.02


class Handler(BaseHTTPRequestHandler):
    """Streams one token, the prompt's, then `kept` a piece, one every STEP seconds, then the usage."""

    kept, key, version = 1, "", ""

    def do_GET(self) -> None:
        if self.path != "/version" or not self.version:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": self.version}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.send_error(401)
            return
        assert body["stream"] and body["ignore_eos"] and body["messages"][0]["role"] == "user"
        self.send_response(200)
        self.end_headers()
        pieces = body["max_tokens"] // self.kept
        for size in (sizes := [1, *[self.kept] * (pieces - 1)]):
            time.sleep(STEP)
            self.event({"choices": [{"delta": {"content": "x" * size}}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": sum(sizes)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """(recipe, the handler's class): the server answers on loopback."""
    own = type("Own", (Handler,), {})
    http = ThreadingHTTPServer(("127.0.0.1", 0), own)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    write_prompts(tmp_path / "p.jsonl", ["tell me a story", "what is the time"])
    values = {"name": "w", "runs_dir": str(tmp_path / "runs"), "eval": {"prompts": str(tmp_path / "p.jsonl")},
              "generation": {"server": {"base_url": f"http://127.0.0.1:{http.server_port}", "model": "m"}},
              "roi": {"model": "llama-3.1-8b", "hardware": "h100-sxm", "batches": [1, 3], "rounds": 1}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(roi_server, "TOKENS", 24)
    yield tmp_path / "r.yaml", own
    http.shutdown()
    http.server_close()


def test_plain_and_speculative_steps_go_into_one_file(server):
    """Two calls, one for each way the server was started; then the steps of both are there, timed and counted."""
    recipe, own = server
    assert call(roi.COMMAND, recipe, "measure") == 0
    own.kept = 3
    assert call(roi.COMMAND, recipe, "measure", "--draft_length", "4") == 0
    steps = read_steps(recipe.parent / "runs" / "w" / "roi" / "steps.json")
    assert [(p.rows, p.K, p.kept) for p in steps.points] == [(1, 0, 1), (3, 0, 1), (1, 4, 3), (3, 4, 3)]
    assert all(p.ms > 0 for p in steps.points)  # what a step is: test_step_by_hand
    assert [p.context for p in steps.points] == [52, 52, 51, 51] and steps.acceptance == "measured"
    assert steps.engine == {"name": "vllm", "model": "m"} and steps.hardware == {"name": "h100-sxm"}


def test_synthetic_acceptance_is_said(server):
    """One call against a server that accepts by lot marks the file, whichever call comes last."""
    recipe, own = server
    own.kept = 3
    assert call(roi.COMMAND, recipe, "measure", "--draft_length", "4", "--synthetic", "true") == 0
    own.kept = 1
    assert call(roi.COMMAND, recipe, "measure") == 0
    assert read_steps(recipe.parent / "runs" / "w" / "roi" / "steps.json").acceptance == "synthetic"


def test_a_server_that_groups_steps_is_refused(server, capsys):
    """Several tokens a piece without a drafter: steps cannot be told apart."""
    recipe, own = server
    own.kept = 4
    assert call(roi.COMMAND, recipe, "measure") == 1
    assert "groups steps in its stream" in capsys.readouterr().err


def test_a_server_that_refuses_is_named(server, capsys):
    """Its status, in one line."""
    recipe, own = server
    own.key = "k"
    assert call(roi.COMMAND, recipe, "measure") == 1
    assert "HTTP 401" in capsys.readouterr().err
    assert call(roi.COMMAND, recipe, "measure", "--roi.hardware", "") == 2
    assert "roi.hardware" in capsys.readouterr().err


def test_runs_are_not_mixed(server, capsys):
    """Steps of another GPU, parallelism, target, drafter or server are an error before anything is measured."""
    recipe, own = server
    assert call(roi.COMMAND, recipe, "measure", "--roi.batches", "[1]") == 0
    own.do_POST = None
    for field, value, said in (("roi.hardware", "h200", "hardware (name)"),
                               ("roi.tensor_parallel", "2", "tensor_parallel"),
                               ("roi.model", "llama-3-70b", "target (model)"),
                               ("drafter.kind", "lookup", "drafter (kind)"),
                               ("generation.server.model", "n", "engine (model)")):
        assert call(roi.COMMAND, recipe, "measure", "--draft_length", "4", f"--{field}", value) == 2
        assert f"steps.json: holds steps of another {said}; move it away" in capsys.readouterr().err


def test_the_engines_version_is_kept(server, capsys):
    """GET /version; a server that was updated between two calls is another engine (3)."""
    recipe, own = server
    own.version = "0.11.2"
    assert call(roi.COMMAND, recipe, "measure", "--roi.batches", "[1]") == 0
    steps = read_steps(recipe.parent / "runs" / "w" / "roi" / "steps.json")
    assert steps.engine == {"name": "vllm", "model": "m", "version": "0.11.2"}
    own.version = "0.12.0"
    assert call(roi.COMMAND, recipe, "measure", "--draft_length", "4") == 2
    assert "another engine (version)" in capsys.readouterr().err


def test_a_target_that_no_table_names(server, tmp_path):
    """Without roi.model the target's own config.json goes into the file, its quantisation with it; hardware of the
    recipe goes in with its figures. Both are known where the recipe is not at hand."""
    recipe, own = server
    folder = write_target(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    values = yaml.safe_load(recipe.read_text())
    gpu = {"memory_gb": 10, "bandwidth_tb_s": 1.0, "tflops": {"bfloat16": 1.0, "fp8": 2.0}}
    values |= {"target": {"model": str(folder)}, "plan": {"custom": {"mine": gpu}}}
    values["roi"] |= {"model": "", "hardware": "mine", "batches": [1]}
    recipe.write_text(yaml.safe_dump(values))
    assert call(roi.COMMAND, recipe, "measure") == 0
    steps = read_steps(recipe.parent / "runs" / "w" / "roi" / "steps.json")
    place = steps.place()
    assert steps.hardware["name"] == "mine" and (place.bandwidth, place.flops) == (1e12, 2e12)
    assert place.shape.layers == 6 and steps.target["weight_bits"] == 8
    own.kept = 2
    assert call(roi.COMMAND, recipe, "measure", "--draft_length", "2") == 0
    both = read_steps(recipe.parent / "runs" / "w" / "roi" / "steps.json")
    assert [o.step.K for o in both.observations()] == [0, 2]


def test_step_by_hand():
    """Only gaps while all are running count: from the last beginning to the first end. The first piece is the prompt's
    token: 15 tokens in 8 pieces are 2 a step."""
    slow = Stream(0.0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0], prompt_tokens=10, tokens=15)
    early = Stream(0.0, [0.5 + i for i in range(7)], prompt_tokens=30, tokens=7)
    seconds, kept, context = step_of([slow, early])
    assert seconds == 1.0 and kept == (2 + 1) / 2 and context == (10 + 7.5 + 30 + 3.5) / 2
    with pytest.raises(RunError, match="did not run together"):
        step_of([Stream(0.0, [0.0, 1.0], tokens=2), Stream(0.0, [5.0, 6.0], tokens=2)])
