"""A real HTTP server on loopback that completes prompts with a tiny target, in several servers' manners, and fails.

A fault is what a `script` names for (user field of the request, how many times it came before):
    "500", "429", "413", "400" - statuses; "stall" - no answer until the test ends; "reset" - closed without a word;
    "truncate" - half of the body; "garbage", "deep", "list" - no completion; "no choices"; "model" - another model's;
    "outside", "float" - ids that are none; "long" - more tokens than asked; "early" - 'length' before the limit;
    "unended" - 'stop' without an end token; "prompt" - a token more before the prompt; "filtered" - another finish.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from data.generate import Generator, Request
from data.sampling import Sampling
from drafters.target import Target

NAME = "tiny"
STATUSES = {"500", "503", "429", "413", "400"}


def never(user: str, before: int) -> str:
    return ""


class OnLoopback:
    """A server on loopback while in `with`, at `url`. A subclass begins it with its handler, whose `fake` is the
    server, and has the event `over`, which is set at the end."""

    over: threading.Event

    def begin(self, handler: type[BaseHTTPRequestHandler]) -> Self:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"fake": self}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()


class FakeServer(OnLoopback):
    """Use in `with`. `manner`: ids (vLLM, SGLang), named (token_id:N), trimmed (SGLang without its end token), text.

    `gate`: completions wait until so many are in flight. Served: `counts` of completions per user, `most` in flight,
    `bodies` of all requests.
    """

    def __init__(self, target: Target, script: Callable[[str, int], str] = never, manner: str = "ids", gate: int = 0,
                 models: tuple[str, ...] = (NAME,), tokenize: str = "right", ignores_eos: bool = True,
                 key: str = "", wait: str = "0") -> None:
        self.target, self.script, self.manner = target, script, manner
        self.models, self.tokenize, self.ignores_eos, self.key = models, tokenize, ignores_eos, key
        self.wait = wait
        self.barrier = threading.Barrier(gate) if gate else None
        self.lock, self.over = threading.Lock(), threading.Event()
        self.counts, self.bodies, self.flying, self.most = Counter(), [], 0, 0
        self.on_request: Callable[[str], None] = lambda user: None

    def __enter__(self) -> Self:
        return self.begin(_Handler)

    def rows(self) -> Counter:
        """Completions a row, the checks at the start left out."""
        return Counter({u: n for u, n in self.counts.items() if not u.endswith(" check")})

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The completion of a prompt by the target itself, as vLLM's documentation describes its answer."""
        tokenizer, end_ids = self.target.tokenizer, self.target.end_ids
        prompt = body["prompt"] if isinstance(body["prompt"], list) else tokenizer(body["prompt"])["input_ids"]
        ends = [] if body.get("ignore_eos") and self.ignores_eos else end_ids
        sampling = Sampling(body["temperature"], max(0, body.get("top_k", 0)), body["top_p"])
        with self.lock:
            generator = Generator(self.target, body["max_tokens"], 1, body.get("seed", 0), ends)
            answer = generator.run([Request(body["user"], prompt, sampling)])[0]
        ids, choice = answer.tokens, {"index": 0, "text": "", "finish_reason": answer.finish}
        stopped = answer.finish == "stop"
        shown = ids[:-1] if stopped and self.manner in ("trimmed", "text") else ids
        if self.manner in ("ids", "trimmed"):
            choice |= {"token_ids": shown, "prompt_token_ids": prompt}
            choice |= {"matched_stop": ids[-1]} if stopped and self.manner == "trimmed" else {}
        elif self.manner == "named":
            choice["logprobs"] = {"tokens": [f"token_id:{i}" for i in ids]}
        choice["text"] = tokenizer.decode(shown)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"model": self.models[0], "choices": [choice], "usage": usage}


def spoil(value: dict[str, Any], fault: str, body: dict[str, Any]) -> Any:
    """The completion with a fault in it."""
    choice = value["choices"][0]
    ids = choice.get("token_ids", [])
    if fault == "model":
        value["model"] = "another"
    elif fault == "no choices":
        value["choices"] = []
    elif fault == "list":
        return [value]
    elif fault in ("outside", "float"):
        choice["token_ids"] = [*ids[:-1], 10**6 if fault == "outside" else 3.0]
    elif fault == "long":
        choice["token_ids"] = [3] * (body["max_tokens"] + 1)
    elif fault == "early":
        choice |= {"token_ids": [3], "finish_reason": "length"}
    elif fault == "unended":
        choice |= {"token_ids": [3], "finish_reason": "stop"}
    elif fault == "prompt":
        choice["prompt_token_ids"] = [1, *body["prompt"]]
    elif fault == "filtered":
        choice["finish_reason"] = "content_filter"
    if fault in ("outside", "float", "long", "early", "unended"):
        value["usage"]["completion_tokens"] = len(choice["token_ids"])
    return value


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    flies = False
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, value: Any, cut: bool = False, raw: bytes | None = None) -> None:
        self.land()
        content = json.dumps(value).encode() if raw is None else raw
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", self.fake.wait)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut

    def do_GET(self) -> None:
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self.reply(401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}})
        else:
            self.reply(200, {"data": [{"id": name} for name in self.fake.models]})

    def do_POST(self) -> None:
        fake, body = self.fake, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            ids = fake.target.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            wrong = fake.tokenize == "wrong" and "3.14" in body["prompt"]
            self.reply(404 if fake.tokenize == "absent" else 200, {"tokens": [*ids, 5] if wrong else ids})
            return
        user = body["user"]
        with fake.lock:
            before, fake.counts[user], fake.flying = fake.counts[user], fake.counts[user] + 1, fake.flying + 1
            fake.most = max(fake.most, fake.flying)
            fake.bodies.append(body)
        self.flies = True
        try:
            fake.on_request(user)
            self.answer(body, fake.script(user, before))
        finally:
            self.land()

    def land(self) -> None:
        """No longer in flight: before the client sees its answer, so that its next request is never a second one."""
        with self.fake.lock:
            self.fake.flying -= self.flies
            self.flies = False

    def answer(self, body: dict[str, Any], fault: str) -> None:
        fake = self.fake
        if fault == "stall":
            fake.over.wait()
            self.close_connection = True
        elif fault == "reset":
            self.close_connection = True
        elif fault in STATUSES:
            self.reply(int(fault), {"error": {"message": f"a message about {fault}"}})
        elif fault in ("garbage", "deep"):
            self.reply(200, None, raw=b"<html>\xff" if fault == "garbage" else b"[" * 100_000)
        else:
            if fake.barrier and not body["user"].endswith(" check"):
                fake.barrier.wait(30)
            value = spoil(fake.complete(body), fault, body)
            if isinstance(body["prompt"], str) and fake.tokenize == "absent" and fake.manner == "text":
                value["choices"][0].pop("prompt_token_ids", None)
            self.reply(200, value, cut=fault == "truncate")
