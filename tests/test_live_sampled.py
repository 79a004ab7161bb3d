"""`make eval` against a running server at sampling settings and stop strings."""

import json

import pytest
from live_server import LiveServer, hurry, ids_of
from test_live import TEXTS, TOKENS, evaluate, flags, write
from test_report import SCHEMA, Page, sample_report, violations
from tiny import call, write_prompts

from data.backends.stream import Stream, chat_body, unknown_to
from data.sampling import Sampling
from eval.live_texts import first_difference
from eval.run import COMMAND
from eval.server_counters import Counters, foreign

FLAGS = ["--eval.sampling.temperature", "0.6", "--eval.sampling.top_p", "0.95", "--eval.sampling.top_k", "20",
         "--eval.stop", "['###']", "--eval.lossless_prompts", "3"]
WORDS = "temperature 0.6, top-k 20, top-p 0.95, 1 stop string"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Figures are not drawn, and counters come to rest soon."""
    hurry(monkeypatch)


@pytest.fixture
def recipe(tmp_path):
    """Six prompts, and a target that is not there."""
    write_prompts(tmp_path / "p.jsonl", TEXTS)
    return write(tmp_path)


@pytest.mark.parametrize("kind, off", [("vllm", 0), ("sglang", -1), ("tensorrt-llm", 0), ("dynamo", -1)])
def test_requests_by_engine_kind(kind, off):
    """Every field is sent under the names that this kind understands, off values too; no seed, which production
    requests have not."""
    sampling = Sampling(0.7, 20, 0.9, 0.05, 1.1)
    body = chat_body(kind, "m", [], None, 5, "", sampling, ["###"])
    assert {name: body[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop")} == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "stop": ["###"]}
    plain = chat_body(kind, "m", [], None, 5)
    assert (plain["temperature"], plain["top_k"], plain["min_p"]) == (0.0, off, 0.0)
    assert not {"stop", "seed"} & set(plain) and "seed" not in body and unknown_to(kind, sampling) == []


def test_a_plain_server_knows_openais_fields_only(recipe, capsys):
    """What it has no field for is refused before anything is sent: it would sample otherwise without a word."""
    body = chat_body("plain", "m", [], None, 5, "", Sampling(0.7, top_p=0.9), ["a"])
    assert (body["temperature"], body["top_p"], body["stop"]) == (0.7, 0.9, ["a"]) and "top_k" not in body
    assert unknown_to("plain", Sampling(0.7, 20, 0.9, 0.05, 1.1)) == ["top_k", "repetition_penalty", "min_p"]
    more = flags(base_url="http://127.0.0.1:9", kind="plain")
    assert call(COMMAND, recipe, *more, "--eval.sampling.min_p", "0.1") == 2
    assert "eval.sampling.min_p = 0.1: a server of eval.server.kind = plain has no field for it" in (
        capsys.readouterr().err)


def test_a_sampling_evaluation_of_two_servers(recipe, capsys):
    """What is measured is asked at the settings; greedy texts are compared by requests of their own, eval.lossless
    prompts of them, and no measured figure has them. Case 59: a difference of sampled texts is none."""
    def other(text: str) -> list[int]:  # greedy answers of one prompt differ, sampled ones of all
        ids = ids_of(text)
        return [*ids[:2], 90, *ids[3:]] if text == "abcdef" else ids

    with LiveServer(answer=other) as fast, LiveServer(drafts=False, gap=0.5) as plain:
        code, report = evaluate(recipe, *FLAGS, base_url=fast.url, baseline_url=plain.url)
        bodies = [body for body in fast.bodies + plain.bodies if body["stream"]]
        asked = [body for body in plain.bodies if not body["stream"]]
    assert code == 0 and violations(report, SCHEMA) == []
    greedy = [body for body in bodies if body["temperature"] == 0]
    assert [body["messages"][0]["content"] for body in greedy] == [TEXTS[i] for i in (0, 2, 4)] * 2
    assert all(body["stop"] == ["###"] and body["top_k"] == 20 for body in bodies)
    assert {body["temperature"] for body in bodies} == {0.0, 0.6} and [one["temperature"] for one in asked] == [0.0]
    found, own = report["total"]["lossless"]["greedy"], report["server"]["greedy"]
    assert (found["prompts"], found["mismatches"], own["equal"]) == (3, 1, 2)
    assert own["unsteady"] == {name: {"prompts": 0, "differ": 0} for name in ("speculative", "baseline")}
    assert report["total"]["tokens"] == TOKENS and report["total"]["prompts"] == 6
    assert [report["settings"][name] for name in ("temperature", "top_k", "top_p", "stop")] == [0.6, 20, 0.95, ["###"]]
    assert report["verdict"]["reasons"][-1] == f"measured at {WORDS}; requests at other settings accept otherwise"
    folder = recipe.parent / "runs" / "w" / "eval" / "server"
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines if line["side"] == "greedy"] == ["p0", "p2", "p4"]
    page = Page((folder / "report.html").read_text())
    assert f"streamed, {WORDS}, answers up to 16 tokens" in page.text and f"Verdict, at {WORDS}" in page.text
    assert "asked greedily one by one, beside what was measured" in page.text
    text = (folder / "report.md").read_text()
    assert f", at {WORDS}\n" in text and f"Closed loop, {WORDS}, answers up to 16 tokens" in text
    assert f"Verdict                 do not deploy, at {WORDS}" in capsys.readouterr().out


def test_an_earlier_baseline_at_the_same_settings(recipe, capsys):
    """Measured before without a drafter: its greedy requests are compared by their texts; other settings are refused.
    """
    with LiveServer(drafts=False) as plain:
        assert evaluate(recipe, *FLAGS, base_url=plain.url, label="plain")[0] == 0
    before = str(recipe.parent / "runs" / "w" / "eval" / "plain" / "report.json")
    with LiveServer() as fast:
        code, report = evaluate(recipe, *FLAGS, base_url=fast.url, baseline_report=before)
        assert code == 0
        assert (report["server"]["greedy"]["prompts"], report["server"]["greedy"]["equal"]) == (3, 3)
        assert report["total"]["lossless"]["greedy"]["mismatches"] == 0
        capsys.readouterr()
        other = ["--eval.sampling.min_p", "0.1"]
        assert evaluate(recipe, *FLAGS, *other, base_url=fast.url, baseline_report=before)[0] == 2
        assert "min_p was 0.0, now 0.1; measure it again" in capsys.readouterr().err
        assert evaluate(recipe, base_url=fast.url, baseline_report=before)[0] == 2
        assert "temperature was 0.6, now 0.0" in capsys.readouterr().err


def test_offline_acceptance_of_other_settings_does_not_stand_beside(recipe):
    """A greedy `make eval` says nothing of a server that samples."""
    with LiveServer() as fast:
        _, report = evaluate(recipe, *FLAGS, base_url=fast.url, concurrency="[1]")
        offline = sample_report()
        offline["settings"] |= {key: report["settings"][key] for key in ("prompts_sha256", "max_tokens")}
        same = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "stop": ["###"]}
        for settings, beside in (({}, False), (same, True)):
            offline["settings"] |= settings
            (recipe.parent / "runs" / "w" / "eval" / "report.json").write_text(json.dumps(offline))
            _, report = evaluate(recipe, *FLAGS, base_url=fast.url, concurrency="[1]")
            assert (report["server"]["offline"] is not None) == beside


def test_tokens_behind_a_stop_string_are_no_difference():
    """An engine may have written more tokens than the text that it gives; without stop strings they are one."""
    a, b = (Stream(0.0, ids=ids, text="one ") for ids in ([1, 2], [1, 2, 3]))
    assert first_difference(a, b, stops=True) is None and first_difference(a, b) == (2, True)
    a.text = "one"
    assert first_difference(a, b, stops=True) == (2, True)


def test_steps_behind_a_stop_string_are_no_other_client():
    """10 answers of 20 tokens with drafts of 3: up to 8 tokens of each may be counted behind its end."""
    counted = Counters("vllm", 70, 210, 130, (60, 40, 30), 280, 10)
    assert len(foreign(counted, [20] * 10, 0, 64)) == 1 and foreign(counted, [20] * 10, 0, 64, stops=True) == []
    more = Counters("vllm", 70, 210, 130, (60, 40, 30), 285, 10)
    assert len(foreign(more, [20] * 10, 0, 64, stops=True)) == 1
