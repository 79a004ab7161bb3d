"""Greedy answers and acceptance counters of a real vLLM: in a process of its own, or over HTTP.

The engine's interpreter may be another one than this: vLLM pins other versions.
"""

import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from drafters.export.serving import speculative_config
from recipes.errors import RunError

WORKER = Path(__file__).resolve().parent / "serve_worker.py"
SERVER = "vllm.entrypoints.openai.api_server"
PATIENCE = 900.0  # seconds for a server to be ready: it loads, and compiles where it may
TOGETHER = 16  # requests in flight
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)_total\{([^}]*)\}\s+(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """What an engine is to do. Prompts are token ids; `engine`: further arguments of vllm.LLM."""

    model: str
    drafter: str | None
    drafted: int
    prompts: list[list[int]]
    max_tokens: int
    stop: list[int]
    dtype: str
    engine: dict[str, Any] = field(default_factory=dict)
    chats: list[Any] = field(default_factory=list)  # messages that the engine's own tokenizer is to render
    parallel: bool = False  # the drafter gives all its tokens in one pass


@dataclass
class Answers:
    """What an engine did: answers, drafts, tokens accepted at each position, and which engine it was."""

    tokens: list[list[int]]
    drafts: int
    accepted: list[int]
    engine: dict[str, Any]
    seconds: float
    rendered: list[list[int]] = field(default_factory=list)  # ids of the job's chats

    @property
    def per_position(self) -> list[float]:
        return [n / self.drafts if self.drafts else 0.0 for n in self.accepted]


def settings(threads: int) -> dict[str, str]:
    """The engine's environment: one process, threads that do not spin (two spinning ones on a busy machine are several
    times slower), a small cache on a CPU, and no host but this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_TOKEN", "HUGGING_FACE_HUB"))}
    return kept | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",
                   "VLLM_CPU_KVCACHE_SPACE": kept.get("VLLM_CPU_KVCACHE_SPACE", "1"), "VLLM_NO_USAGE_STATS": "1"}


def last_words(log: Path) -> str:
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{said[-1] if said else 'it said nothing'} (see {log})"


def offline(python: str, job: Job, threads: int, log: Path) -> Answers:
    """`LLM.generate` in a process that ends with it. RunError where there are no answers."""
    with tempfile.TemporaryDirectory() as folder, open(log, "w", encoding="utf-8") as said:
        written, result = Path(folder) / "job.json", Path(folder) / "result.json"
        written.write_text(json.dumps(asdict(job)), encoding="utf-8")
        subprocess.run([python, "-P", WORKER, written, result], env=settings(threads), stdout=said,
                       stderr=subprocess.STDOUT, check=False)
        if not result.is_file():
            raise RunError(f"the engine ended without answers: {last_words(log)}")
        found = json.loads(result.read_text(encoding="utf-8"))
    if "error" in found:
        raise RunError(f"the engine: {found['error']} (see {log})")
    return Answers(found["tokens"], found["drafts"], found["accepted"],
                   {"name": "vllm", "version": found["version"], "torch": found["torch"], "device": found["device"]},
                   found["seconds"], found["rendered"])


def arguments(engine: dict[str, Any]) -> Iterator[str]:
    """vllm.LLM's arguments as the server's flags."""
    for name, value in engine.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            yield flag
        elif value is not False:
            yield from (flag, value if isinstance(value, str) else json.dumps(value))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def server(python: str, job: Job, threads: int, log: Path) -> Iterator[httpx.Client]:
    """An OpenAI-compatible server of vLLM on loopback while the block runs. RunError where it does not start."""
    port = free_port()
    command = [python, "-P", "-m", SERVER, "--model", job.model, "--served-model-name", "target", "--dtype", job.dtype,
               "--host", "127.0.0.1", "--port", str(port), *arguments(job.engine)]
    if job.drafter is not None:
        command += ["--speculative-config", speculative_config(job.drafter, job.drafted, job.parallel)]
    with open(log, "w", encoding="utf-8") as said:
        process = subprocess.Popen(command, env=settings(threads), stdout=said, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:
                wait_until_ready(client, process, log)
                yield client
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(client: httpx.Client, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RunError(f"the server ended: {last_words(log)}")
        try:
            if client.get("/health", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RunError(f"the server was not ready in {PATIENCE:.0f} seconds (see {log})")


def over_http(python: str, job: Job, threads: int, log: Path) -> Answers:
    """The same answers by /v1/completions, counters from /metrics. RunError where the server does not answer."""
    with server(python, job, threads, log) as client, ThreadPoolExecutor(TOGETHER) as pool:
        started = time.monotonic()
        try:
            tokens = list(pool.map(lambda prompt: complete(client, job, prompt), job.prompts))
            seconds = time.monotonic() - started
            drafts, accepted = read_counters(client.get("/metrics").text)
            version = client.get("/version").json().get("version", "unknown")
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            raise RunError(f"the server's answer is no completion with token ids: {error!r} (see {log})") from None
    return Answers(tokens, drafts, accepted, {"name": "vllm", "version": version}, seconds)


def complete(client: httpx.Client, job: Job, prompt: list[int]) -> list[int]:
    body = {"model": "target", "prompt": prompt, "max_tokens": job.max_tokens, "temperature": 0.0,
            "stop_token_ids": job.stop, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def read_counters(text: str) -> tuple[int, list[int]]:
    """(drafts, accepted by position) of a /metrics page, summed over replicas (case 55)."""
    drafts, accepted = 0, {}
    for kind, labels, value in COUNTER.findall(text):
        if kind == "drafts":
            drafts += int(float(value))
        else:
            position = int(re.search(r'position="(\d+)"', labels)[1])
            accepted[position] = accepted.get(position, 0) + int(float(value))
    return drafts, [accepted.get(i, 0) for i in range(max(accepted, default=-1) + 1)]
