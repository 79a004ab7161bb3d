"""Backends behind one contract: journal, vLLM in process, logs, and whole trace runs by a server, killed too."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import NAME, FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import load_target, write_prompts, write_recipe, write_target

from data.backends.base import Losses
from data.backends.engine import EngineBackend
from data.backends.journal import Journal
from data.backends.local import LocalBackend
from data.backends.logged import LogBackend
from data.backends.registry import BACKENDS, content_settings
from data.backends.units import Tally, Unit
from data.collect import COMMAND
from data.generate import Answer, Generator, Request
from data.sampling import Sampling
from data.store import TraceReader
from recipes.cli import run
from recipes.errors import ConfigError, RunError
from recipes.schema import Generation, Server

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 8
TEXTS = [f"tell me in a few simple words how one forecasts {thing} for the next day" for thing in
         ("rain", "snow", "wind", "fog", "hail", "frost")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def target(folder):
    target = load_target(folder, "float32")
    target.model.generation_config.eos_token_id = list(range(36, 46))  # so that answers stop at different lengths
    return target


def requests(count: int, sampling: Sampling | None = None, overrun: int = 0) -> list[Request]:
    return [Request(f"r{i}", [(7 * i + 5 * j) % 30 + 3 for j in range(3 + i % 4)], sampling or Sampling(), overrun)
            for i in range(count)]


def own(target, asked: list[Request]) -> list[Answer]:
    return Generator(target, LIMIT, 1).run(asked)


def outcome(backend, asked: list[Request], folder: Path, allowed: int = 0) -> tuple[list[Answer], dict[str, str]]:
    losses = Losses(allowed)
    answers = backend.run(asked, LIMIT, Journal(folder / "0.jsonl", "k"), losses)
    return answers, losses.rows


ANSWERS = [Answer(f"r{i}", [1, 2], [3] * (i + 1), "stop", [4]) for i in range(3)]


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 400), key=st.sampled_from(["k", "other"]))
def test_journal_cut_anywhere_keeps_whole_answers_and_goes_on(tmp_path_factory, cut, key):
    """Cut at any byte, as a kill may: a prefix of the answers is read, a further one is added behind it, and another
    key begins anew (cases 16, 35)."""
    path = tmp_path_factory.mktemp("j") / "0.jsonl"
    first = Journal(path, "k")
    first.count("HTTP 500")
    for answer in ANSWERS:
        first.add(answer)
    first.close()
    left = path.read_bytes()[:cut]
    path.write_bytes(left)
    again = Journal(path, key)
    kept = list(again.answers.values())
    whole = max(0, left.count(b"\n") - 2) if key == "k" else 0  # lines behind the key and the count
    assert kept == ANSWERS[:whole]
    late = Answer("late", [1], [2], "stop")
    again.add(late)
    again.close()
    assert list(Journal(path, key).answers.values()) == [*kept, late]


def test_losses_and_tally_by_hand():
    """Rows may be lost up to the share of all requests so far; one more stops the run with the reasons."""
    tally = Tally()
    tally.asked = 30
    tally.add(Unit([], {"a": "x"}, {"x": 4}))
    assert tally.allowed(0.1) == 2 and tally.lost == {"x": 1} and tally.counts == {"x": 4}
    losses = Losses(tally.allowed(0.1))
    losses.add("b", "x")
    losses.add("c", "y")
    with pytest.raises(RunError, match="'x': 1, 'y': 2"):
        losses.add("d", "y")


def test_settings_that_decide_answers_and_those_that_do_not(tmp_path):
    """Where a server stands and how it is driven may change in mid-run, what it serves may not; the transformers
    backend's settings are those of traces made before there were others (case 30)."""
    log = tmp_path / "log.jsonl"
    log.write_text("{}\n")
    assert set(content_settings(Generation())) == {"max_tokens", "temperature", "top_k", "top_p", "batch_size",
                                                   "unit_rows", "seed", "answers"}
    here = Generation(backend="openai", server=Server("http://a", "m"))
    moved = Generation(backend="openai", server=Server("http://b", "m", concurrency=2, retries=0), max_lost_share=0.5)
    other = Generation(backend="openai", server=Server("http://a", "n"))
    assert content_settings(here) == content_settings(moved) != content_settings(other)
    logs = Generation(backend="logs", log=str(log))
    before = content_settings(logs)
    log.write_text("{} \n")
    assert content_settings(logs) != before
    assert set(BACKENDS) == set(Generation.__annotations__["backend"].__args__)


def fake_vllm(target, spoil=lambda ids: ids) -> SimpleNamespace:
    """vLLM's documented `LLM.generate` over the tiny target: token prompts in, token ids out."""
    class LLM:
        def __init__(self, **options) -> None:
            self.options, self.calls = options, []
            if "bogus" in options:
                raise TypeError("unexpected keyword bogus")

        def generate(self, prompts, params, use_tqdm=True):
            self.calls.append(len(prompts))
            outputs = []
            for prompt, p in zip(prompts, params, strict=True):
                ends = [] if p.ignore_eos else p.stop_token_ids
                asked = Request("r", prompt["prompt_token_ids"], Sampling(p.temperature, p.top_k, p.top_p))
                answer = Generator(target, p.max_tokens, 1, p.seed or 0, ends).run([asked])[0]
                output = SimpleNamespace(token_ids=tuple(spoil(answer.tokens)), finish_reason=answer.finish)
                outputs.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output]))
            return outputs

    return SimpleNamespace(LLM=LLM, SamplingParams=lambda **values: SimpleNamespace(**values))


def test_vllm_in_process_answers_as_the_target(target, folder, tmp_path):
    """One engine for all units, loaded with the target's own weights and precision; ids, finish and overrun are those
    of our own decoding; the overrun is a second call (case 22)."""
    backend = EngineBackend(Generation(backend="vllm", engine={"max_model_len": 64}), target, fake_vllm(target))
    asked = requests(9) + [Request(f"v{r.id}", r.prompt, r.sampling, 3) for r in requests(3)]
    assert outcome(backend, asked, tmp_path) == (own(target, asked), {})
    assert outcome(backend, asked[:2], tmp_path) == (own(target, asked[:2]), {})
    assert backend.llm.options == {"model": str(folder), "dtype": "float32", "seed": 0, "max_model_len": 64}
    assert backend.llm.calls == [12, 3, 2]
    sampled = outcome(backend, requests(3, Sampling(1.0, 5, 0.9)), tmp_path)[0]
    assert all(1 <= len(a.tokens) <= LIMIT for a in sampled)


def test_vllm_rows_and_options_that_cannot_be_right(target, tmp_path):
    """Impossible ids lose the row with its reason; options that the recipe decides, or that vLLM refuses, are a
    message (case 36)."""
    backend = EngineBackend(Generation(), target, fake_vllm(target, lambda ids: [*ids[:-1], 64]))
    answers, lost = outcome(backend, requests(2), tmp_path, allowed=2)
    assert not answers and set(lost.values()) == {"ids outside the vocabulary"}
    with pytest.raises(ConfigError, match="generation.engine: model is decided"):
        EngineBackend(Generation(engine={"model": "x"}), target, fake_vllm(target))
    with pytest.raises(ConfigError, match="vLLM cannot load it: unexpected keyword bogus"):
        outcome(EngineBackend(Generation(engine={"bogus": 1}), target, fake_vllm(target)), requests(1), tmp_path)


def as_log(answers: list[Answer]) -> list[dict]:
    """The same answers as a vLLM response, an SGLang response without its end token, and bare choices, in turn."""
    lines = []
    for number, a in enumerate(answers):
        ids = a.tokens[:-1] if number % 3 == 1 and a.finish == "stop" else a.tokens
        choice = {"prompt_token_ids": a.prompt, "token_ids": ids, "finish_reason": a.finish}
        choice |= {"matched_stop": a.tokens[-1]} if ids is not a.tokens else {}
        lines.append(choice if number % 3 == 2 else {"model": NAME, "choices": [choice]})
    return lines


def write_log(path: Path, lines: list) -> Generation:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return Generation(backend="logs", log=str(path), server=Server(model=NAME))


def test_logged_answers_are_matched_by_prompt_ids(target, tmp_path):
    """In any order, by the prompt's ids; held-out rows are answered by the target; a longer answer is cut at the
    limit; lines that are no answers lose nothing but themselves."""
    asked = requests(9)
    long = Generator(target, 2 * LIMIT, 1).run(asked)
    lines = ["{torn", "[1]", {"choices": []}, {"text": "only text"}, *as_log(long)[::-1], ""]
    held = [Request("held", [9, 9, 9], Sampling(), 3)]
    backend = LogBackend(write_log(tmp_path / "log.jsonl", lines), target)
    assert outcome(backend, asked + held, tmp_path) == (own(target, asked + held), {})
    assert {a.finish for a in own(target, asked)} == {"stop", "length"}


def test_logged_answers_that_cannot_be_right_are_lost(target, tmp_path):
    """Unknown prompts, foreign ids and answers that run past an end token are named, the rest is taken."""
    good = own(target, requests(6))
    bad = [{"prompt_token_ids": [5, i], "token_ids": ids, "finish_reason": "stop"} for i, ids in
           enumerate([[3, 99], [3, 36, 4, 37], [3, 4], []])]
    backend = LogBackend(write_log(tmp_path / "log.jsonl", as_log(good) + bad), target)
    asked = requests(6) + [Request(f"b{i}", [5, i]) for i in range(5)]
    answers, lost = outcome(backend, asked, tmp_path, allowed=5)
    assert answers == good and list(lost.values()) == [
        "ids outside the vocabulary", "tokens after an end token", "stopped without an end token of the target",
        "stopped without an end token of the target", "not in the log"]


@pytest.mark.parametrize("lines, message", [
    ([], "holds no answer with prompt and answer token ids$"),
    ([{"choices": [{"text": "words"}]}], r"holds no answer .* \(line 1: no token ids\)"),
    ([{"token_ids": [3]}], r"\(line 1: no prompt token ids\)"),
    ([{"model": "another", "prompt_token_ids": [3], "token_ids": [4]}], "line 1: an answer of 'another', not of"),
    (None, "cannot read it: No such file")])
def test_logs_that_are_refused(target, tmp_path, lines, message):
    """No ids, another model (case 36), no file: refused at the start with the file and the first reason."""
    section = write_log(tmp_path / "log.jsonl", lines or [])
    if lines is None:
        (tmp_path / "log.jsonl").unlink()
    with pytest.raises(ConfigError, match=message):
        LogBackend(section, target)


def test_local_backend_is_the_generator(target, tmp_path):
    """The transformers backend adds and changes nothing, and journals nothing."""
    asked = requests(5, Sampling(1.0), 2)
    section = Generation(batch_size=2, seed=3)
    answers, lost = outcome(LocalBackend(section, target), asked, tmp_path)
    assert answers == Generator(target, LIMIT, 2, 3).run(asked) and not lost and not list(tmp_path.iterdir())


def recipe_for(tmp_path: Path, folder: Path, **generation) -> Path:
    prompts = write_prompts(tmp_path / "p.jsonl", TEXTS)
    return write_recipe(tmp_path / "r.yaml", folder, trace={"layers": [1, 2, 3]}, prompts={
        "sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 2}, generation={
        "max_tokens": LIMIT, "unit_rows": 4, **generation})


def trace(recipe: Path, *flags: str) -> int:
    with pytest.raises(SystemExit) as stop:
        run(COMMAND, ["--config", str(recipe), *flags])
    return stop.value.code


def rows_of(traces: Path) -> dict[str, list]:
    reader = TraceReader(traces)
    return {r.id: [r.split, r.ids.tolist(), r.turns.tolist(), list(r.tail)] for r in
            (reader[i] for i in range(len(reader)))}


def test_killed_trace_by_a_server_repeats_no_finished_request(folder, tmp_path, monkeypatch):
    """kill -9 when the server gets the fourth row, and half a line behind it: the next run asks once for each row that
    was not finished, a third run asks nothing, and the traces are those of the transformers backend (case 16)."""
    plain = load_target(folder, "float32")
    with FakeServer(plain) as server:
        options = {"base_url": server.url, "model": NAME, "concurrency": 1, "backoff_s": 1e-3}
        recipe = recipe_for(tmp_path, folder, backend="openai", server=options)
        command = [sys.executable, "-m", "data.collect", "--config", str(recipe)]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

        def kill(user: str) -> None:
            if len(server.rows()) == 4:
                process.send_signal(signal.SIGKILL)
                process.wait()

        server.on_request = kill
        assert process.wait() == -signal.SIGKILL
        server.on_request = lambda user: None
        traces = tmp_path / "runs" / "tiny" / "traces"
        journal = traces / "answers" / "0-00000.jsonl"
        done = [json.loads(line)["answer"]["id"] for line in journal.read_text().splitlines() if '"answer"' in line]
        assert len(done) == 3 and not (traces / "answers" / "0-00000.json").exists()
        journal.write_bytes(journal.read_bytes() + b'{"answer": {"id": "p')
        server.counts.clear()
        assert trace(recipe) == 0
        held = {row for row, (split, *_) in rows_of(traces).items() if split == "validation"}
        assert len(held) == 2
        assert server.rows() == {f"p{i}": 1 + (f"p{i}" in held) for i in range(6) if f"p{i}" not in done}
        server.counts.clear()
        assert trace(recipe, "--generation.server.concurrency", "7") == 0 and not server.counts
        assert not journal.exists()
    (tmp_path / "own").mkdir()
    recipe = recipe_for(tmp_path / "own", folder)
    assert trace(recipe) == 0
    assert rows_of(traces) == rows_of(tmp_path / "own" / "runs" / "tiny" / "traces")


def test_lost_rows_and_their_reasons_are_in_the_manifest(folder, tmp_path, capsys):
    """A row that no attempt answers is missing, counted with its reason, and named at the end; too many stop the
    command with exit code 1 and no traceback."""
    plain = load_target(folder, "float32")
    with FakeServer(plain, lambda user, before: "500" if user == "p1" else "") as server:
        options = {"base_url": server.url, "model": NAME, "retries": 1, "backoff_s": 1e-3}
        recipe = recipe_for(tmp_path, folder, backend="openai", server=options)
        assert trace(recipe) == 1
        error = capsys.readouterr().err
        assert "rows without a usable answer: {'HTTP 500': 1}" in error and "Traceback" not in error
        assert trace(recipe, "--generation.max_lost_share", "0.2") == 0
        assert "lost answers: {'HTTP 500': 1}" in capsys.readouterr().out
        assert trace(recipe, "--generation.server.model", "other") == 2
    manifest = TraceReader(tmp_path / "runs" / "tiny" / "traces").manifest
    assert manifest["backend"] == "openai" and manifest["lost_answers"] == {"HTTP 500": 1}
    assert manifest["rows"] == 5 and manifest["answer_counts"]["HTTP 500"] >= 2


def test_answers_out_of_a_log_make_the_traces_of_the_target(folder, tmp_path):
    """`make trace` from a log of the target's own greedy answers: the rows of the transformers backend."""
    assert trace(recipe_for(tmp_path, folder)) == 0
    traces = tmp_path / "runs" / "tiny" / "traces"
    stored = [row for p in sorted((traces / "answers").glob("*.json")) for row in json.loads(p.read_text())["answers"]]
    (tmp_path / "logged").mkdir()
    section = write_log(tmp_path / "log.jsonl", as_log([Answer(**row) for row in stored]))
    recipe = recipe_for(tmp_path / "logged", folder, backend="logs", log=section.log)
    assert trace(recipe) == 0
    assert rows_of(tmp_path / "logged" / "runs" / "tiny" / "traces") == rows_of(traces)
    assert len(stored) == 6
