"""Processes of engines: they end with what started them, whatever ends that; and what they are told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.engine_run import arguments, job_for, settings

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import sys
from pathlib import Path
from eval.engine_run import Job, offline, over_http
from recipes.launched import stoppable
way, model = sys.argv[1:]
told = {"method": "eagle3", "model": model + "/native", "num_speculative_tokens": 3}
job = Job(model, told, 3, [[5]] * 40, 4, [2], "float32", {"enforce_eager": True, "max_model_len": 512})
with stoppable():
    {"offline": offline, "http": over_http}[way](sys.executable, job, 1, Path(model) / "engine.log")
"""


def gone(pid: int) -> bool:
    """Ended, whether or not anybody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(true, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


@pytest.mark.parametrize("way, number, code", [("http", signal.SIGTERM, 143), ("http", signal.SIGKILL, -9),
                                               ("offline", signal.SIGTERM, 143)])
def test_an_engine_ends_with_what_started_it(tmp_path, way, number, code):
    """SIGTERM: exit code 143, with no engine, server or file of its job left (case 61). SIGKILL: no process left, the
    one among them that the end of its server does not end."""
    (tmp_path / "engine.json").write_text(json.dumps({"answers": {"[5]": [6]}, "faults": {}, "slow": 600}))
    search = os.pathsep.join([str(ROOT / "tests" / "fake_engine"), str(ROOT)])
    child = subprocess.Popen([sys.executable, "-c", CHILD, way, tmp_path], env=os.environ | {"PYTHONPATH": search})
    files = [tmp_path / name for name in ("pid", "engine.pid")[: 2 if way == "http" else 1]]
    try:
        assert until(lambda: all(path.is_file() and path.read_text() for path in files))
        child.send_signal(number)
        assert child.wait(60) == code
        pids = [int(path.read_text()) for path in files]
        assert until(lambda: all(map(gone, pids)), 30)
        if number == signal.SIGTERM:
            assert not list(tmp_path.glob("engine.*.json"))
    finally:
        child.kill()


def test_the_engines_environment(monkeypatch):
    """No name of a secret reaches an engine, whoever's it is; others do; and nothing is fetched from the Hub."""
    secrets = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
               "OPENAI_API_KEY", "wandb_api_key", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS"]
    for name in secrets:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = settings(2)
    assert not set(secrets) & found.keys()
    assert found["TOKENIZERS_PARALLELISM"] == "false" and found["PATH"] == os.environ["PATH"]
    assert found["HF_HUB_OFFLINE"] == "1" and found["OMP_NUM_THREADS"] == "2"


def test_the_room_of_an_engine():
    """Prompt, answer and a draft fit, up to the target's own context."""
    def room(longest: int, most: int) -> int:
        target = SimpleNamespace(path="m", max_length=most, end_ids=[2], section=SimpleNamespace(dtype="float32"))
        return job_for(target, [[5] * longest, [5]], 32, 4, {}).engine["max_model_len"]

    assert (room(10, 8192), room(3000, 8192), room(3000, 3010)) == (512, 3037, 3010)


def test_arguments_over_http():
    """An argument means the same to the server as to vllm.LLM, the one that is false too."""
    given = {"enforce_eager": True, "enable_prefix_caching": False, "seed": None, "quantization": "fp8",
             "gpu_memory_utilization": 0.5, "hf_overrides": {"a": 1}}
    assert list(arguments(given)) == [
        "--enforce-eager", "--no-enable-prefix-caching", "--quantization", "fp8", "--gpu-memory-utilization", "0.5",
        "--hf-overrides", '{"a": 1}']
