"""The server of the fake engine: /health, /v1/completions with token ids, /metrics, /version."""

import argparse
import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vllm import __version__, check_told, load

NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
           "presence_penalty": 0.0, "frequency_penalty": 0.0, "return_token_ids": True, "n": 1}
parser = argparse.ArgumentParser()
for flag in ("model", "served-model-name", "dtype", "host", "port", "speculative-config", "max-model-len"):
    parser.add_argument(f"--{flag}", required=True)
parser.add_argument("--generation-config", required=True, choices=["vllm"])  # the model's own fills in penalties
parser.add_argument("--enforce-eager", action="store_true", required=True)
options = parser.parse_args()
try:
    told = json.loads(options.speculative_config)
    found, fault = load(options.model, told.get("model"))
    check_told(found, told)
    if fault.get("server_refuses"):
        raise ValueError("unexpected tensor layers.0.y")
except ValueError as error:
    sys.exit(f"ValueError: {error}")
if found.get("slow"):  # a process of the engine, which the end of the server does not end
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(options.model) / "engine.pid").write_text(str(engine.pid))


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            lines = [f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="target"}} {float(found["drafts"])}']
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {float(n)}'
                      for i, n in enumerate(found["accepted"])]
            self.send("\n".join(["# HELP vllm:spec_decode_num_drafts_total x", *lines, "vllm:other 3.0"]))
        else:
            self.send(json.dumps({"version": __version__}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert {key: asked.get(key) for key in NEUTRAL} == NEUTRAL and asked["stop_token_ids"] == [2]
        time.sleep(found.get("slow", 0))
        ids = found["answers"][str(asked["prompt"])][: asked["max_tokens"]]
        self.send(json.dumps({"choices": [{} if fault.get("no_ids") else {"token_ids": ids}]}))

    def send(self, text: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()
