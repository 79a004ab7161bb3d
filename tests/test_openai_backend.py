"""Answers by an OpenAI-compatible server: a real one on loopback that also fails in every way a server can."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from fake_server import NAME, FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import V, load_target, write_target

from data.backends.base import Fault, Losses, accept, restore_end
from data.backends.client import LONGEST_BACKOFF, Pace, backoff, retry_after
from data.backends.server import FROM_TEXT, ServerBackend, widest_gap
from data.backends.units import Unit, make_unit, stored_unit
from data.backends.wire import completion_body
from data.generate import Answer, Generator, Request
from data.sampling import Sampling
from drafters.target import Target
from recipes.errors import ConfigError, RunError
from recipes.schema import Generation, Server

ENDS = list(range(36, 46))
LIMIT = 10
GREEDY = Sampling()
WARM = Sampling(1.0, 5, 0.9)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def several_ends(monkeypatch):
    """Many end ids, so that a random target's answers stop at different lengths."""
    monkeypatch.setattr(Target, "end_ids", property(lambda self: ENDS))


def requests(count: int, sampling: Sampling = GREEDY, overrun: int = 0) -> list[Request]:
    return [Request(f"r{i}", [(7 * i + 5 * j) % 30 + 3 for j in range(3 + i % 4)], sampling, overrun)
            for i in range(count)]


def own(target: Target, asked: list[Request]) -> list[Answer]:
    """What the target itself answers: the reference of every greedy test."""
    return Generator(target, LIMIT, 1).run(asked)


def section(server: FakeServer, **changes) -> Generation:
    values = {"base_url": server.url, "model": NAME, "concurrency": 3, "retries": 2, "backoff_s": 1e-3,
              "timeout_s": 120.0}
    return Generation(backend="openai", server=Server(**values | changes))


def ask(server: FakeServer, target: Target, asked: list[Request], folder: Path, allowed: int = 0, **changes) -> Unit:
    path, backend = folder / "0.json", ServerBackend(section(server, **changes), target)
    return stored_unit(path, asked) or make_unit(backend, path, asked, LIMIT, Losses(allowed))


@pytest.mark.parametrize("kind, manner, ignores", [
    ("vllm", "ids", True), ("sglang", "trimmed", True), ("dynamo", "named", True), ("tensorrt-llm", "ids", False)])
def test_answers_equal_the_targets_own(target, tmp_path, kind, manner, ignores):
    """Ids, end token, finish and overrun are those of our own decoding, whatever way a server gives ids and whether
    or not it can be told to pass end tokens (cases 22, 45)."""
    asked = requests(12, overrun=3)
    with FakeServer(target, manner=manner, ignores_eos=ignores) as server:
        unit = ask(server, target, asked, tmp_path, kind=kind)
    assert unit.answers == own(target, asked) and unit.lost == {} and unit.counts == {}
    assert {a.finish for a in unit.answers} == {"stop", "length"}
    assert any(set(a.overrun) & set(ENDS) for a in unit.answers), "an overrun must pass an end token"
    first = [b for b in server.bodies if b["user"] == "r0"][0]
    assert first["prompt"] == asked[0].prompt and first["temperature"] == 0 and first["repetition_penalty"] == 1.0


def test_text_is_tokenised_again_only_where_that_is_certain(target, tmp_path, monkeypatch):
    """A server that gives only text: an answer is taken where text, count and end token fix the ids, and marked; the
    others are lost with their reason, never guessed."""
    texts = set(range(3, 54))  # ids that the tokenizer writes as one character
    free = Generator(target, LIMIT, 8, end_ids=[]).run(requests(60))
    plain = [a for a in free if set(a.tokens) <= texts]
    end = plain[0].tokens[3]
    monkeypatch.setattr(Target, "end_ids", property(lambda self: [end]))
    chosen = [a.id for a in plain][:6] + [a.id for a in free if a not in plain and end not in a.tokens][:4]
    asked = [r for i in chosen for r in requests(60) if r.id == i]
    with FakeServer(target, manner="text", tokenize="absent") as server:
        unit = ask(server, target, asked, tmp_path, allowed=9, kind="plain", retries=0)
    truth = {a.id: a for a in own(target, asked)}
    assert unit.answers and unit.lost and all(a == truth[a.id] for a in unit.answers)
    assert {a.finish for a in unit.answers} == {"stop", "length"}
    assert unit.counts[FROM_TEXT] == len(unit.answers)
    assert set(unit.lost.values()) <= {"usage contradicts the ids", "text that the tokenizer does not give back"}
    assert all(set(truth[row].tokens) - texts for row in unit.lost)


FAULTS = {"500": "HTTP 500", "503": "HTTP 503", "429": "HTTP 429", "reset": "connection: RemoteProtocolError",
          "truncate": "connection: RemoteProtocolError", "garbage": "body is not JSON", "deep": "body is not JSON",
          "list": "not a completion", "no choices": "empty choices", "outside": "ids outside the vocabulary",
          "float": "ids outside the vocabulary", "long": "more tokens than asked",
          "early": "finish_reason contradicts the ids", "unended": "stopped without an end token of the target",
          "prompt": "the server changed the prompt's ids", "filtered": "finish_reason 'content_filter'"}


def test_every_passing_fault_is_repeated_and_counted(target, tmp_path):
    """Each kind of failure once, each on another row: all answers are right, that row was asked twice, the others
    once (issue 3: a server that fails, truncates and returns garbage)."""
    asked = requests(len(FAULTS) + 2)
    faults = dict(zip([r.id for r in asked], FAULTS))
    with FakeServer(target, lambda user, before: faults.get(user, "") if before == 0 else "") as server:
        unit = ask(server, target, asked, tmp_path)
    assert unit.answers == own(target, asked) and unit.lost == {}
    assert unit.counts == Counter(FAULTS.values())
    assert server.rows() == {r.id: 2 if r.id in faults else 1 for r in asked}


def test_stalled_request_is_given_up_and_repeated(target, tmp_path):
    """A server that accepts a request and never answers costs the time-out, not the run."""
    asked = requests(4)
    with FakeServer(target, lambda user, before: "stall" if user == "r1" and before == 0 else "") as server:
        unit = ask(server, target, asked, tmp_path, timeout_s=4.0)
        assert unit.answers == own(target, asked) and unit.counts["no whole answer in time"] >= 1
        assert server.rows()["r1"] >= 2


def test_row_that_always_fails_is_lost_with_its_reason(target, tmp_path):
    """After the last attempt the row is dropped and named, the others are there; the unit then stays as it is."""
    asked = requests(5)
    with FakeServer(target, lambda user, before: "garbage" if user == "r2" else "") as server:
        unit = ask(server, target, asked, tmp_path, allowed=1)
        assert unit.lost == {"r2": "body is not JSON"} and [a.id for a in unit.answers] == ["r0", "r1", "r3", "r4"]
        assert server.rows()["r2"] == 3 and unit.counts == {"body is not JSON": 3}
        seen = len(server.bodies)
        assert ask(server, target, asked, tmp_path, allowed=1) == unit and len(server.bodies) == seen


def test_too_many_losses_stop_the_run_and_keep_the_rest(target, tmp_path):
    """Above the allowed share the run stops, naming reasons; a later run asks for the missing rows only (case 16)."""
    asked = requests(6)
    with FakeServer(target, lambda user, before: "500" if user == "r3" else "") as server:
        with pytest.raises(RunError, match=r"'HTTP 500': 1.*max_lost_share allows 0"):
            ask(server, target, asked, tmp_path, concurrency=1)
        assert set(server.rows()) == {"r0", "r1", "r2", "r3"} and not (tmp_path / "0.json").exists()
        server.counts.clear()
        server.script = lambda user, before: ""
        unit = ask(server, target, asked, tmp_path)
        assert unit.answers == own(target, asked) and server.rows() == {"r3": 1, "r4": 1, "r5": 1}
        assert unit.counts == {"HTTP 500": 3} and [p.name for p in tmp_path.iterdir()] == ["0.json"]


@pytest.mark.parametrize("fault, message", [
    ("400", "/v1/completions: HTTP 400: a message about 400"), ("413", "HTTP 413: a message about 413"),
    ("model", "generation.server.model = tiny: the server answered with 'another'")])
def test_what_no_attempt_can_mend_stops_at_once(target, tmp_path, fault, message):
    """A refused request is not repeated and shows the server's words; another model's answer ends the run (case 36)."""
    with FakeServer(target, lambda user, before: fault if user == "r0" else "") as server:
        with pytest.raises(RunError, match=message):
            ask(server, target, requests(1), tmp_path, allowed=9)
        assert server.rows() == {"r0": 1}


def test_server_that_asks_for_a_long_wait_ends_the_run(target, tmp_path):
    """Retry-After beyond ten minutes is not slept through: the run stops, to be started again later."""
    with FakeServer(target, lambda user, before: "429" if user == "r0" else "", wait="3600") as server:
        with pytest.raises(RunError, match="HTTP 429: asks to wait 3600 s; run again later"):
            ask(server, target, requests(1), tmp_path)
        assert server.rows() == {"r0": 1}


def test_requests_in_flight_are_bounded_and_reach_the_bound(target, tmp_path):
    """The server, which answers only once three requests are there, sees three at a time and never four."""
    asked = requests(12)
    with FakeServer(target, gate=3) as server:
        unit = ask(server, target, asked, tmp_path, concurrency=3)
    assert unit.answers == own(target, asked) and server.most == 3


def test_sampled_answers_depend_on_seed_and_row_only(target, tmp_path):
    """Each row carries a seed of its own that concurrency and order do not change; top_k off is said as the server
    says it."""
    with FakeServer(target) as server:
        units = [ask(server, target, asked, tmp_path / str(n), concurrency=n) for n, asked in
                 ((1, requests(6, WARM)), (4, requests(6, WARM)[::-1])) if (tmp_path / str(n)).mkdir() is None]
    assert {a.id: a.tokens for a in units[0].answers} == {a.id: a.tokens for a in units[1].answers}
    sent = {b["user"]: b["seed"] for b in server.bodies if "seed" in b}
    assert len(set(sent.values())) == 6
    off = {kind: completion_body(kind, NAME, [1], Sampling(0.7), 4, [2], 1, "r").get("top_k")
           for kind in ("vllm", "sglang", "tensorrt-llm", "plain")}
    assert off == {"vllm": 0, "sglang": -1, "tensorrt-llm": 0, "plain": None}
    with pytest.raises(ConfigError, match="kind = plain knows no top_k"):
        completion_body("plain", NAME, [1], WARM, 4, [2], 1, "r")


@pytest.mark.parametrize("options, message", [
    ({"models": ("other", "more")}, "generation.server.model = tiny: the server at .* serves other, more"),
    ({"tokenize": "wrong"}, r"tokenizer and the server's disagree on '1234567890 3.14159 0x7f'"),
    ({"script": lambda user, before: "prompt" if user == "tokenizer check" else "", "tokenize": "absent"},
     "disagree on 'Hello, world!'"),
    ({"script": lambda user, before: "no choices" if user == "tokenizer check" else "", "tokenize": "absent"},
     "not a completion, after 3 attempts"),
    ({"script": lambda user, before: "500"}, r"HTTP 500, after 3 attempts")])
def test_server_that_does_not_serve_the_target_is_refused(target, tmp_path, options, message):
    """Another name, another tokenizer (with and without /tokenize), a broken server: refused before any row is asked,
    naming what differs (case 36)."""
    with FakeServer(target, **options) as server:
        with pytest.raises(ConfigError, match=message):
            ask(server, target, requests(3), tmp_path)
        assert not server.rows()


def test_server_with_other_weights_under_the_same_name_is_refused(target, tmp_path, tmp_path_factory):
    """Its greedy tokens are far from the best of our copy of the target (case 36); the target's own are the best."""
    other = load_target(write_target(tmp_path_factory.mktemp("other"), seed=1))
    with FakeServer(other) as server:
        with pytest.raises(ConfigError, match="these are different weights"):
            ask(server, target, requests(3), tmp_path)
        assert not server.rows()
    assert all(widest_gap(target, a.prompt, a.tokens) == 0 for a in own(target, requests(3)))


def test_nobody_at_the_address(target, tmp_path):
    """No server there: one message with the address, no traceback of a library."""
    with FakeServer(target) as server:
        pass
    with pytest.raises(ConfigError, match=r"base_url = http://127.0.0.1:\d+: connection: ConnectError"):
        ask(server, target, requests(1), tmp_path)


@pytest.mark.parametrize("changes, message", [
    ({"base_url": ""}, "must be like http://"), ({"base_url": "ftp://x"}, "must be like http://"),
    ({"base_url": "http://me:secret@x"}, "holds a password"), ({"model": ""}, "generation.server.model: name"),
    ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env = NO_SUCH_KEY: this environment variable holds no key")])
def test_settings_that_cannot_work_are_refused_before_anything_is_sent(target, changes, message):
    """Address, name and key are checked when the backend is opened; a password in the address is not repeated."""
    server = Server(**{"base_url": "http://x", "model": "m"} | changes)
    with pytest.raises(ConfigError, match=message) as error:
        ServerBackend(Generation(backend="openai", server=server), target)
    assert "secret" not in str(error.value)


def test_key_is_sent_and_shown_nowhere(target, tmp_path, monkeypatch):
    """The key comes from the variable that the recipe names, and a server that repeats it does not publish it."""
    monkeypatch.setenv("TINY_KEY", "sk-very-secret")
    with FakeServer(target, key="sk-very-secret") as server:
        assert len(ask(server, target, requests(2), tmp_path, api_key_env="TINY_KEY").answers) == 2
        monkeypatch.setenv("TINY_KEY", "sk-other-secret")
        with pytest.raises(RunError, match=r"HTTP 401: wrong key: Bearer \*\*\*$"):
            ask(server, target, requests(3), tmp_path, api_key_env="TINY_KEY")
    assert not any(b"secret" in p.read_bytes() for p in tmp_path.iterdir())


END = 40
ACCEPT = [  # ids, finish, limit -> ids and finish kept, or the reason against them
    ([3, END], "stop", 4, ([3, END], "stop")), ([3, 4, 5, 6], "length", 4, ([3, 4, 5, 6], "length")),
    ([3, 4, 5, END], "length", 4, ([3, 4, 5, END], "stop")), ([3, 4], "length", 4, "contradicts"),
    ([3, 4], "stop", 4, "contradicts"), ([3, END, 4], "length", 3, "tokens after an end token"),
    ([], "stop", 4, "no tokens"), ([3] * 5, "length", 4, "more tokens than asked"), ([3, END], "abort", 4, "abort"),
    ([3, END], None, 4, "None")]


@pytest.mark.parametrize("ids, finish, limit, wanted", ACCEPT)
def test_accepted_answers_by_hand(ids, finish, limit, wanted):
    """The rules that an answer of any backend keeps (case 22)."""
    if isinstance(wanted, str):
        with pytest.raises(Fault, match=wanted):
            accept(Request("r", [1]), ids, finish, limit, [END])
    else:
        answer = accept(Request("r", [1]), ids, finish, limit, [END])
        assert (answer.tokens, answer.finish) == wanted


@pytest.mark.parametrize("ids, finish, named, trimmed, ends, wanted", [
    ([3, END], "stop", None, False, [END], [3, END]), ([3], "stop", END, False, [2, END], [3, END]),
    ([3], "stop", None, True, [END], [3, END]), ([3], "length", None, True, [END], [3]),
    ([3], "stop", None, True, [2, END], None), ([3], "stop", 7, True, [END], None),
    ([3], "stop", None, False, [END], None)])
def test_cut_off_end_token_by_hand(ids, finish, named, trimmed, ends, wanted):
    """An end token is put back only where it is known which and that one was generated."""
    if wanted is None:
        with pytest.raises(Fault, match="without an end token"):
            restore_end(ids, finish, named, trimmed, ends)
    else:
        assert restore_end(ids, finish, named, trimmed, ends) == wanted


@settings(max_examples=60, deadline=None)
@given(attempt=st.integers(0, 2000), base=st.floats(1e-3, 100), draw=st.floats(0, 1, exclude_max=True))
def test_backoff_doubles_with_jitter_up_to_a_limit(attempt, base, draw):
    """At least half, at most all of min(limit, base * 2^attempt)."""
    full = min(LONGEST_BACKOFF, base * 2.0**min(attempt, 30))
    assert full / 2 <= backoff(attempt, base, draw) <= full


@settings(max_examples=60, deadline=None)
@given(rate=st.floats(0.1, 100), steps=st.lists(st.floats(0, 5), min_size=2, max_size=20), pause=st.floats(0, 50))
def test_pace_keeps_the_rate_and_the_pause(rate, steps, pause):
    """Starts are never early, at least 1/rate apart, and none lies before the end of a pause."""
    pace, now, last = Pace(rate), 0.0, -1e9
    for number, step in enumerate(steps):
        now += step
        if number == 1:
            pace.pause(pause)
        start = pace.reserve(now)
        assert start >= now and start >= last + 1 / rate - 1e-9 and (number == 0 or start >= pause)
        last = start
    free = Pace(0.0)
    assert [free.reserve(t) for t in (1.0, 1.0, 3.0)] == [1.0, 1.0, 3.0]


def test_retry_after_is_seconds_or_a_date():
    """Both forms of the header; nothing, nonsense and the past are no wait."""
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=90), usegmt=True)
    headers = ["7", "0.5", date, format_datetime(now - timedelta(seconds=9), usegmt=True), "soon", "-3"]
    assert [retry_after({"retry-after": h}, now) for h in headers] == [7, 0.5, 90, 0, 0, 0]
    assert retry_after({}, now) == 0


def test_wrong_answers_never_reach_the_unit_file(target, tmp_path):
    """What is written is what was accepted: every id of the vocabulary, every prompt as sent."""
    with FakeServer(target, lambda user, before: "outside" if before == 0 else "") as server:
        ask(server, target, requests(4), tmp_path, retries=1)
    stored = json.loads((tmp_path / "0.json").read_text())
    assert all(0 <= t < V for row in stored["answers"] for t in row["tokens"])
    assert [row["prompt"] for row in stored["answers"]] == [r.prompt for r in requests(4)]
    assert stored["counts"] == {"ids outside the vocabulary": 4}
