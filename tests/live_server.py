"""A real HTTP server on loopback that streams chat answers piece by piece, counts as engines do, and fails on demand.

The answer to a text is a fixed run of token ids (`ids_of`). With a drafter its first token comes alone, the others in
pieces of 3, 1, 2, 3, 1, 2, ...: each one draft of K = 3 of which 2, 0, 1, ... tokens are accepted. Without one every
piece is one token. A piece takes `step` seconds.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from fake_server import OnLoopback
from markupsafe import Markup

from eval import live_page, plots, server_counters

K = 3
SIZES = (3, 1, 2)


def hurry(monkeypatch, drawn: bool = False) -> None:
    """Counters come to rest soon; figures are not drawn unless asked for."""
    monkeypatch.setattr(server_counters, "PAUSE", 0.01)
    if not drawn:
        for module in (plots, live_page):
            monkeypatch.setattr(module, "inline_svg", lambda figure, name, label: Markup("<svg></svg>"))


def ids_of(text: str) -> list[int]:
    """Between 7 and 10 ids that depend on the text."""
    return [10 + len(text) % 5 + i for i in range(7 + len(text) % 4)]


def pieces_of(ids: list[int], drafts: bool) -> list[list[int]]:
    if not drafts:
        return [[i] for i in ids]
    found, at = [ids[:1]], 1
    while at < len(ids):
        size = SIZES[(len(found) - 1) % 3]
        found.append(ids[at : at + size])
        at += size
    return found


def spelled(ids: list[int]) -> str:
    return "".join(f"t{i} " for i in ids)


def no_fault(text: str, before: int) -> str:
    return ""


class LiveServer(OnLoopback):
    """Use in `with`. `script(text, times asked before)` names a fault: a status, "stall" (no end), "cut" (closed in the
    middle), "early" (a stream without an end), "error" (an event of it), "model" (another one answers), "usage" (none).

    `metrics`: vllm, sglang, gauge (an older SGLang), tensorrt-llm, other (no engine), none (404). `answer`: ids of a
    text. `log`: (name, text) of every streamed request, shared between servers where the test gives one list.
    """

    def __init__(self, drafts: bool = True, metrics: str = "vllm", script: Callable[[str, int], str] = no_fault,
                 answer: Callable[[str], list[int]] = ids_of, gives_ids: bool = True, models: tuple[str, ...] = ("m",),
                 key: str = "", wait: str = "0", gap: float | None = None, log: list | None = None,
                 grouped: int = 1, version: str = "1.2.3", step: float = 0.001) -> None:
        self.drafts, self.metrics, self.script, self.answer = drafts, metrics, script, answer
        self.gives_ids, self.models, self.key, self.wait, self.gap = gives_ids, models, key, wait, gap
        self.grouped, self.version, self.step = grouped, version, step
        self.log = [] if log is None else log
        self.counts, self.asked, self.bodies, self.keys = Counter(), Counter(), [], []
        self.most = self.flying = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        self.on_end: Callable[[LiveServer], None] = lambda server: None
        self.on_page: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self.begin(_Handler)

    def prompt_of(self, text: str) -> list[int]:
        """The ids of a request's prompt."""
        return [1, len(text), 2]

    def pieces(self, text: str, limit: int) -> list[list[int]]:
        """The answer's ids as they come."""
        return pieces_of(self.answer(text)[:limit], self.drafts)

    def spell(self, ids: list[int]) -> str:
        return spelled(ids)

    def count(self, pieces: list[list[int]], text: str = "") -> None:
        """What an engine counts of one answer."""
        with self.lock:
            self.counts["generated"] += sum(map(len, pieces))
            self.counts["finished"] += 1
            for piece in pieces[1:] if self.drafts else []:
                self.counts["drafts"] += 1
                self.counts["accepted"] += len(piece) - 1
                for place in range(len(piece) - 1):
                    self.counts[f"position {place}"] += 1

    def page(self) -> str:
        """The /metrics page."""
        n = self.counts
        if self.metrics == "vllm":
            label = 'engine="0",model_name="m"'
            lines = [f"vllm:generation_tokens_total{{{label}}} {float(n['generated'])}",
                     f'vllm:request_success_total{{{label},finished_reason="stop"}} {float(n["finished"])}',
                     f'vllm:request_success_total{{{label},finished_reason="length"}} 0.0']
            if self.drafts:
                lines += [f"vllm:spec_decode_num_drafts_total{{{label}}} {float(n['drafts'])}",
                          f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {float(K * n['drafts'])}",
                          f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {float(n['accepted'])}"]
                lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} '
                          f"{float(n[f'position {i}'])}" for i in range(K)]
        elif self.metrics in ("sglang", "gauge"):
            lines = [f'sglang:spec_accept_length{{model_name="m"}} {1.75 if self.drafts else 0.0}']
            if n["finished"]:
                lines += [f'sglang:generation_tokens_total{{model_name="m"}} {n["generated"]}',
                          f'sglang:num_requests_total{{model_name="m"}} {n["finished"]}']
            if self.metrics == "sglang" and n["finished"]:
                lines += [f'sglang:spec_verify_calls_total{{model_name="m"}} {n["drafts"]}']
        elif self.metrics == "tensorrt-llm":
            lines = [f"trtllm_spec_decode_num_draft_tokens_total {K * n['drafts']}",
                     f"trtllm_spec_decode_num_accepted_tokens_total {n['accepted']}",
                     "trtllm_spec_decode_acceptance_length 2.5", f"trtllm_request_success_total {n['finished']}"]
        else:
            lines = ["process_cpu_seconds_total 1.0"]
        return "# HELP x y\n" + "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    fake: LiveServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a piece goes when it is written, not with the next one

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", self.fake.wait)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        fake = self.fake
        fake.keys.append((self.path, self.headers.get("Authorization")))
        if self.path == "/metrics":
            fake.on_page()
            self.reply(404 if fake.metrics == "none" else 200, fake.page())
        elif fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            self.reply(401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": name} for name in fake.models]})
        elif self.path == "/version":
            self.reply(200, {"version": fake.version})
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        fake, body = self.fake, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        fake.keys.append((self.path, self.headers.get("Authorization")))
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            self.reply(401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}})
            return
        with fake.lock:
            before, fake.asked[text] = fake.asked[text], fake.asked[text] + 1
            fake.flying += 1
            fake.most = max(fake.most, fake.flying)
            fake.bodies.append(body)
        try:
            fault = fake.script(text, before)
            if fault.isdigit():
                self.reply(int(fault), {"error": {"message": f"a message about {fault}"}})
            elif body["stream"]:
                fake.log.append((fake, text))
                self.stream(body, text, fault)
            else:
                self.probabilities(fake.answer(text))
        except ConnectionError:  # a client that gave up
            self.close_connection = True
        finally:
            with fake.lock:
                fake.flying -= 1

    def probabilities(self, ids: list[int]) -> None:
        """A whole answer with the two best tokens of each place, `gap` apart; refused where there is no gap."""
        fake = self.fake
        if fake.gap is None:
            self.reply(400, {"error": {"message": "no logprobs here"}})
            return
        steps = [{"token": f"t{i} ", "top_logprobs": [{"logprob": -0.1}, {"logprob": -0.1 - fake.gap}]} for i in ids]
        choice = {"index": 0, "message": {"content": spelled(ids)}, "logprobs": {"content": steps}}
        self.reply(200, {"model": fake.models[0], "choices": [choice | ({"token_ids": ids} if fake.gives_ids else {})]})

    def stream(self, body: dict[str, Any], text: str, fault: str) -> None:
        fake = self.fake
        pieces = fake.pieces(text, body["max_tokens"])
        length = sum(map(len, pieces))
        if fault == "stall":
            fake.over.wait()
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with_ids = fake.gives_ids and body.get("return_token_ids")
        model = "another" if fault == "model" else body["model"]
        role = {"role": "assistant", "content": ""}
        first: dict[str, Any] = {"model": model, "choices": [{"index": 0, "delta": role}]}
        self.event(first | ({"prompt_token_ids": fake.prompt_of(text)} if with_ids else {}))
        for place in range(0, len(pieces), fake.grouped):
            part = [i for piece in pieces[place : place + fake.grouped] for i in piece]
            time.sleep(fake.step)
            if place and fault in ("cut", "early", "error"):
                if fault == "early":
                    self.chunk(b"")
                elif fault == "error":
                    self.event({"error": {"message": "engine died"}})
                self.close_connection = True
                return
            last = place + fake.grouped >= len(pieces)
            self.event({"model": model, "choices": [{
                "index": 0, "delta": {"content": fake.spell(part)}, **({"token_ids": part} if with_ids else {}),
                "finish_reason": ("length" if length == body["max_tokens"] else "stop") if last else None}]})
        if fault != "usage":
            self.event({"model": model, "choices": [],
                        "usage": {"prompt_tokens": len(fake.prompt_of(text)), "completion_tokens": length}})
        fake.count(pieces, text)
        fake.on_end(fake)
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value: dict[str, Any]) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()
