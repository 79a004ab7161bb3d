"""Greedy answers and acceptance counters of a real vLLM: in a process of its own, or over HTTP.

The engine's interpreter may be another one than this: vLLM pins other versions.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from data.backends.wire import completion_body
from data.sampling import Sampling
from eval.server_counters import counters_of
from recipes.errors import RunError

HERE = Path(__file__).resolve().parent
WORKER, GUARD = HERE / "serve_worker.py", HERE / "engine_guard.py"
SERVER = "vllm.entrypoints.openai.api_server"
PATIENCE = 900.0  # seconds for a server to be ready: it loads, and compiles where it may
ENDING = 30.0  # seconds that the guard has to end what it runs
TOGETHER = 16  # requests in flight
SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|API_KEY|ACCESS_KEY|CREDENTIAL|^HUGGING_FACE_HUB", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """What an engine is to do. Prompts are token ids; `engine`: further arguments of vllm.LLM."""

    model: str
    speculation: dict[str, Any] | None  # vLLM's speculative_config; None: it drafts nothing
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


def job_for(target: Any, prompts: list[list[int]], max_tokens: int, drafted: int, engine: dict[str, Any],
            chats: list[Any] | None = None) -> Job:
    """What an engine without a drafter is to do for a loaded target (drafters.target.Target), with room for the longest
    prompt, its answer and a draft."""
    longest = max(map(len, prompts)) + max_tokens + drafted + 1
    arguments = {"max_model_len": min(target.max_length, max(512, longest)), **engine}
    return Job(target.path, None, drafted, prompts, max_tokens, target.end_ids, target.section.dtype, arguments,
               chats or [])


def settings(threads: int) -> dict[str, str]:
    """The engine's environment: one process, threads that do not spin (two spinning ones on a busy machine are several
    times slower), a small cache on a CPU, nothing from the Hub, and no variable whose name is that of a secret."""
    kept = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    return kept | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",
                   "VLLM_CPU_KVCACHE_SPACE": kept.get("VLLM_CPU_KVCACHE_SPACE", "1"), "VLLM_NO_USAGE_STATS": "1",
                   "HF_HUB_OFFLINE": "1"}


@contextmanager
def started(command: list[Any], threads: int, log: Path) -> Iterator[subprocess.Popen]:
    """The command while the block runs, its output in `log`. It ends with the block, with every process that it
    started itself (a server's engine), and where this process is killed: its guard reads a pipe that ends then."""
    with open(log, "w", encoding="utf-8") as said:
        process = subprocess.Popen([sys.executable, "-P", GUARD, *command], env=settings(threads), stdout=said,
                                   stdin=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
        with suppress(ProcessLookupError):  # whatever of its group has outlived it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_words(log: Path) -> str:
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{said[-1] if said else 'it said nothing'} (see {log})"


def offline(python: str, job: Job, threads: int, log: Path) -> Answers:
    """`LLM.generate` in a process that ends with it; the job lies beside the log meanwhile. RunError where there are no
    answers."""
    written, result = log.with_suffix(".job.json"), log.with_suffix(".result.json")
    try:
        result.unlink(missing_ok=True)  # of a run that was killed
        written.write_text(json.dumps(asdict(job)), encoding="utf-8")
        with started([python, "-P", WORKER, written, result], threads, log) as process:
            process.wait()
        found = json.loads(result.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # none, or torn
        raise RunError(f"the engine ended without answers: {last_words(log)}") from None
    finally:
        for path in (written, result):
            path.unlink(missing_ok=True)
    if "error" in found:
        raise RunError(f"the engine: {found['error']} (see {log})")
    return Answers(found["tokens"], found["drafts"], found["accepted"],
                   {"name": "vllm", "version": found["version"], "torch": found["torch"], "device": found["device"]},
                   found["seconds"], found["rendered"])


def arguments(engine: dict[str, Any]) -> Iterator[str]:
    """vllm.LLM's arguments as the server's flags."""
    for name, value in engine.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):  # a default may be true: leaving a flag out does not say no
            yield flag if value else "--no-" + flag.removeprefix("--")
        elif value is not None:
            yield from (flag, value if isinstance(value, str) else json.dumps(value))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def server(python: str, job: Job, threads: int, log: Path) -> Iterator[httpx.Client]:
    """An OpenAI-compatible server of vLLM on loopback while the block runs. RunError where it does not start."""
    port = free_port()
    more = {"generation_config": "vllm"} | job.engine  # the model's own would fill in, say, a repetition penalty
    command = [python, "-P", "-m", SERVER, "--model", job.model, "--served-model-name", "target", "--dtype", job.dtype,
               "--host", "127.0.0.1", "--port", str(port), *arguments(more)]
    if job.speculation is not None:
        command += ["--speculative-config", json.dumps(job.speculation)]
    with started(command, threads, log) as process, httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:
        wait_until_ready(client, process, log)
        yield client


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
    pool = ThreadPoolExecutor(TOGETHER)
    try:
        with server(python, job, threads, log) as client:
            started_at = time.monotonic()
            tokens = list(pool.map(lambda prompt: complete(client, job, prompt), job.prompts))
            seconds = time.monotonic() - started_at
            counted = counters_of(client.get("/metrics").text)
            version = client.get("/version").json().get("version", "unknown")
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(f"the server's answer is no completion with token ids: {error!r} (see {log})") from None
    finally:
        pool.shutdown(cancel_futures=True)  # the server is gone: what is under way fails at once
    engine = {"name": "vllm", "version": version}
    return Answers(tokens, counted.drafts or 0, list(counted.per_position), engine, seconds)


def complete(client: httpx.Client, job: Job, prompt: list[int]) -> list[int]:
    """A greedy answer. Every sampling field is sent: a server fills in its own for those that are not."""
    body = completion_body("vllm", "target", prompt, Sampling(), job.max_tokens, job.stop, 0, "serve-check")
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])
