"""Step times of a live server: a real one on loopback that streams a known step, with and without a drafter."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from tiny import call, write_prompts

from eval import roi, roi_server
from eval.roi_files import read_steps
from eval.roi_server import Stream, step_of
from recipes.errors import RunError

STEP = 0.02


class Handler(BaseHTTPRequestHandler):
    """Streams `tokens` a piece every STEP seconds, then the usage."""

    kept, key = 1, ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.send_error(401)
            return
        assert body["stream"] and body["ignore_eos"] and body["messages"][0]["role"] == "user"
        self.send_response(200)
        self.end_headers()
        pieces = body["max_tokens"] // self.kept
        for _ in range(pieces):
            time.sleep(STEP)
            self.event({"choices": [{"delta": {"content": "x" * self.kept}}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": pieces * self.kept}})
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
    assert all(20 <= p.ms and p.context == 52 for p in steps.points)
    assert steps.engine == {"name": "vllm", "model": "m"} and steps.hardware == {"name": "h100-sxm"}


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


def test_step_by_hand():
    """Only gaps while all are running count: from the last beginning to the first end."""
    slow = Stream(0.0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0], prompt_tokens=10, tokens=16)
    early = Stream(0.0, [0.5 + i for i in range(7)], prompt_tokens=30, tokens=7)
    seconds, kept, context = step_of([slow, early])
    assert seconds == 1.0 and kept == (2 + 1) / 2 and context == (10 + 8 + 30 + 3.5) / 2
    with pytest.raises(RunError, match="did not run together"):
        step_of([Stream(0.0, [0.0, 1.0], tokens=2), Stream(0.0, [5.0, 6.0], tokens=2)])
