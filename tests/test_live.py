"""`make eval` against a running server: a real one on loopback, whose answers and counters are known by hand."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from live_server import LiveServer, hurry, ids_of
from test_report import SCHEMA, Page, sample_report, violations
from tiny import call, write_prompts
from tiny_run import tiny_run

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from eval.compare import COMMAND as COMPARE
from eval.decode import Decoder
from eval.earlier import key_of
from eval.paired import conversations, matched
from eval.roi_accepted import read_acceptance
from eval.run import COMMAND
from recipes.cli import run as run_command
from recipes.errors import ConfigError
from recipes.schema import Eval
from recipes.schema import LiveServer as LiveSection

# 7 + length % 4 ids each: 7, 8, 9, 10, 7, 8 tokens in 4, 5, 5, 5, 4, 5 pieces; see tests/live_server.py
TEXTS = ["abcd", "abcde", "abcdef", "abcdefg", "abcdefgh", "abcdefghi"]
TOKENS, PIECES, DRAFTS, ACCEPTED, POSITIONS = 49, 28, 22, 21, [14, 7, 0]
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Figures are not drawn but for the test of the page, and counters come to rest soon."""
    hurry(monkeypatch, drawn=request.function is test_page_and_markdown)


@pytest.fixture
def recipe(tmp_path):
    """Six prompts, and a target that is not there: nothing of it may be loaded."""
    write_prompts(tmp_path / "p.jsonl", TEXTS)
    return write(tmp_path)


def write(folder: Path, **settings) -> Path:
    values = {"name": "w", "runs_dir": str(folder / "runs"), "target": {"model": str(folder / "nowhere")},
              "eval": {"prompts": str(folder / "p.jsonl"), "max_tokens": 16,
                       "server": {"concurrency": [1, 2], "backoff_s": 0.01, "timeout_s": 600.0}, **settings}}
    (folder / "r.yaml").write_text(yaml.safe_dump(values))
    return folder / "r.yaml"


def flags(**server) -> list[str]:
    return [part for name, value in server.items() for part in (f"--eval.server.{name}", str(value))]


def evaluate(recipe: Path, *more: str, **server) -> tuple[int, dict]:
    """Exit code and report of `make eval` with these fields of eval.server."""
    code = call(COMMAND, recipe, *flags(**server), *more)
    path = recipe.parent / "runs" / "w" / "eval" / server.get("label", "server") / "report.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


def rate(lines: list[dict], concurrency: int, side: str) -> float:
    """Tokens a second of a server's requests at a concurrency, from requests.jsonl."""
    own = [line for line in lines if (line["concurrency"], line["side"]) == (concurrency, side)]
    return sum(line["tokens"] for line in own) / sum(line["seconds"] for line in own)


def test_two_servers_by_hand(recipe, capsys):
    """Every count of the report is the one that was made up; the two servers took turns; an offline report beside it
    stays as it is. Case 23: each concurrency has its own baseline and speedup."""
    own = recipe.parent / "runs" / "w" / "eval" / "report.json"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    log: list = []
    with LiveServer(log=log) as fast, LiveServer(drafts=False, log=log) as plain:
        code, report = evaluate(recipe, base_url=fast.url, baseline_url=plain.url)
        assert fast.most == plain.most == 2
    out = capsys.readouterr().out
    assert code == 0 and own.read_text() == "{}" and violations(report, SCHEMA) == []
    lines = [json.loads(line) for line in (own.parent / "server" / "requests.jsonl").read_text().splitlines()]
    total, server = report["total"], report["server"]
    assert (total["prompts"], total["tokens"], total["drafts"]) == (6, TOKENS, DRAFTS)
    acceptance = total["acceptance"]
    assert acceptance["mean_length"] == 1 + ACCEPTED / DRAFTS and acceptance["rate"] == ACCEPTED / (3 * DRAFTS)
    assert acceptance["per_position"] == [n / DRAFTS for n in POSITIONS]
    assert acceptance["conditional_per_position"] == [14 / 22, 7 / 14, 0]
    low, high = acceptance["ci95"]
    assert low < acceptance["mean_length"] < high
    assert report["settings"]["draft_length"] == 3 and total["tokens_per_target_pass"] is None
    for clients, level in server["levels"].items():
        n = int(clients)  # 6 requests a client at least: at 2 every prompt is sent twice
        assert (level["concurrency"], level["repeats"], level["turns"], level["prompts"]) == (n, n, 2, 6)
        assert level["acceptance"] == {"source": "counters", "drafts": n * DRAFTS, "drafted": 3 * n * DRAFTS,
                                       "accepted": n * ACCEPTED, "mean_length": 1 + ACCEPTED / DRAFTS,
                                       "rate": ACCEPTED / 66, "per_position": [m / DRAFTS for m in POSITIONS]}
        assert level["speculative"]["tokens_per_piece"] == TOKENS / PIECES
        assert level["baseline"]["tokens_per_piece"] == 1.0 and level["foreign"] == []
        assert level["speculative"]["ttft_ms"]["n"] == 6 * n
        assert level["speculative"]["piece_ms"]["n"] == n * (PIECES - 6)
        assert level["speculative"]["itl_ms"]["n"] == n * (PIECES - 6)  # times measured, not tokens
        assert level["baseline"]["itl_ms"]["n"] == n * (TOKENS - 6)
        assert level["speedup"] == pytest.approx(rate(lines, n, "speculative") / rate(lines, n, "baseline"))
        assert level["ci95"][0] < level["speedup"] < level["ci95"][1]
    assert [p["drafts"] for p in report["prompts"]] == [3, 4, 4, 4, 3, 4]
    assert [p["accepted"] for p in report["prompts"]] == [3, 3, 4, 5, 3, 3]
    assert all(p["timed_tokens"] == p["baseline_tokens"] == p["tokens"] for p in report["prompts"])
    assert server["greedy"]["equal"] == server["greedy"]["prompts"] == 6 and server["drafting"] is True
    assert total["lossless"]["greedy"]["mismatches"] == 0 and server["greedy"]["unsteady"]["baseline"] == {
        "prompts": 6, "differ": 0}
    assert report["verdict"]["reasons"][0].startswith("measured speedup") and server["offline"] is None
    assert report["stack"]["versions"] == {"vllm": "1.2.3"} and report["target"]["model"] == "m"
    assert "Greedy texts            6 of 6 greedy texts equal" in out and "Concurrency 2" in out
    names = ["fast" if one is fast else "plain" for one, _ in log]
    at_one = names[2 + 2 : 2 + 2 + 12]  # behind one first request and one warm-up of each
    assert at_one == ["plain"] * 3 + ["fast"] * 6 + ["plain"] * 3
    sent = [json.loads(line) for line in (own.parent / "server" / "sent.jsonl").read_text().splitlines()]
    assert [row["ids"] for row in sent] == [[1, len(text), 2] for text in TEXTS]


def test_page_and_markdown(recipe):
    """Self-contained, escaped, with every concurrency; Markdown has the same rows."""
    evil = "<script>alert(1)</script>|x"
    with LiveServer(models=(evil,)) as fast, LiveServer(drafts=False, models=(evil,)) as plain:
        code, report = evaluate(recipe, base_url=fast.url, baseline_url=plain.url)
    assert code == 0 and report["target"]["model"] == evil
    folder = recipe.parent / "runs" / "w" / "eval" / "server"
    html = (folder / "report.html").read_text()
    page = Page(html)
    assert "<script" not in html and evil in page.text and not {"script", "link", "img"} & set(page.tags)
    assert page.tags.count("svg") == 4 and "None" not in page.text and len(page.ids) == len(set(page.ids))
    text = (folder / "report.md").read_text()
    assert "\\<script\\>" in text and "| 2 | with the drafter | 12 |" in text and "None" not in text


def test_without_a_baseline_there_is_no_speedup(recipe, capsys):
    """The report says so, and that nothing was shown; figures of the one server are all there."""
    with LiveServer() as fast:
        code, report = evaluate(recipe, base_url=fast.url)
    assert code == 0 and violations(report, SCHEMA) == []
    assert report["total"]["speed"]["speedup"] is report["total"]["lossless"]["greedy"]["mismatches"] is None
    assert report["server"]["levels"]["2"]["speculative"]["tokens"] == 2 * TOKENS
    assert report["server"]["baseline"]["from"] is None and report["server"]["levels"]["1"]["turns"] == 1
    assert report["verdict"]["decision"] == "do not deploy" and "no baseline" in report["verdict"]["reasons"][0]
    assert "no speedup: no baseline" in capsys.readouterr().out
    page = Page((recipe.parent / "runs" / "w" / "eval" / "server" / "report.html").read_text())
    assert "no baseline" in page.text and page.tags.count("svg") == 3


def test_baseline_from_an_earlier_report(recipe, capsys):
    """Case 50: the same server, started without a drafter before; other prompts, versions or files are refused."""
    with LiveServer(drafts=False) as plain:
        code, before = evaluate(recipe, base_url=plain.url, label="plain")
    assert code == 0 and before["server"]["drafting"] is False and before["total"]["acceptance"]["mean_length"] is None
    path = recipe.parent / "runs" / "w" / "eval" / "plain" / "report.json"
    with LiveServer(answer=lambda text: ids_of(text)[:-1] if text == "abcd" else ids_of(text)) as fast:
        code, report = evaluate(recipe, base_url=fast.url, baseline_report=path)
        assert code == 0 and violations(report, SCHEMA) == [] and report["server"]["baseline"]["from"] == "report"
        level = report["server"]["levels"]["2"]
        assert level["speedup"] > 0 and level["baseline"] == before["server"]["levels"]["2"]["speculative"]
        greedy = report["server"]["greedy"]
        assert (greedy["prompts"], greedy["differ"], greedy["gap_unknown"]) == (6, 1, 1)
        assert greedy["first_difference"] == {"set": "p", "id": "p0", "round": 0, "place": None, "unit": None,
                                              "gap": None}
        assert report["prompts"][1]["baseline_tokens"] == 8
        fast_path = path.parent.parent / "server" / "report.json"
        for changes, message in (({"baseline_report": fast_path, "label": "x"}, "that server drafted"),
                                 ({"baseline_report": path, "label": "plain"}, "would be overwritten")):
            assert evaluate(recipe, base_url=fast.url, **changes)[0] == 2
            assert message in capsys.readouterr().err
        assert evaluate(recipe, "--eval.max_tokens", "9", base_url=fast.url, baseline_report=path)[0] == 2
        assert "max_tokens was 16, now 9" in capsys.readouterr().err
        requests = path.with_name("requests.jsonl")
        requests.write_text(requests.read_text() + "\n")
        assert evaluate(recipe, base_url=fast.url, baseline_report=path)[0] == 2
        assert "is not the one that" in capsys.readouterr().err
    with LiveServer(version="9") as newer:
        requests.write_text(requests.read_text()[:-1])
        assert evaluate(recipe, base_url=newer.url, baseline_report=path)[0] == 2
    assert "is of m on version 1.2.3, the server now has m on 9" in capsys.readouterr().err


def test_engines_that_say_less(recipe):
    """SGLang counts verifications: 49 tokens less 6 first ones, over 22; an older one has its own mean only;
    TensorRT-LLM counts draft tokens."""
    for metrics, source, length, rate in (("sglang", "verifications", 1 + (49 - 6 - 22) / 22, None),
                                          ("gauge", "gauge", 1.75, None), ("tensorrt-llm", "gauge", 2.5, 21 / 66)):
        with LiveServer(metrics=metrics) as fast:
            code, report = evaluate(recipe, base_url=fast.url, concurrency="[1]")
        found = report["server"]["levels"]["1"]["acceptance"]
        assert code == 0 and violations(report, SCHEMA) == [] and report["server"]["drafting"] is True
        assert (found["source"], found["rate"], found["per_position"]) == (source, rate, None)
        assert found["mean_length"] == pytest.approx(length) == report["total"]["acceptance"]["mean_length"]


@pytest.mark.parametrize("metrics, reason", [("none", "HTTP 404"), ("other", "no counters of an engine")])
def test_no_counters(recipe, capsys, metrics, reason):
    """A server without them is measured all the same, and the report says why there is no acceptance."""
    with LiveServer(metrics=metrics) as fast, LiveServer(drafts=False, metrics=metrics) as plain:
        code, report = evaluate(recipe, base_url=fast.url, baseline_url=plain.url)
    assert code == 0 and violations(report, SCHEMA) == [] and reason in report["server"]["counters"]
    assert report["total"]["drafts"] is report["total"]["acceptance"]["mean_length"] is None
    assert report["server"]["levels"]["1"]["speedup"] > 0 and report["server"]["drafting"] is None
    assert any(reason in text for text in report["verdict"]["reasons"]) and reason in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["vllm", "plain"])
def test_servers_that_group_steps(recipe, kind):
    """Two steps a piece: 2, 3, 3, 3, 2, 3 pieces, the first of 4 tokens. Acceptance is not read off the stream; without
    ids each piece is taken to hold the answer's mean."""
    with LiveServer(grouped=2) as fast:
        code, report = evaluate(recipe, base_url=fast.url, concurrency="[1]", kind=kind)
        assert all(("return_token_ids" in body) is (kind == "vllm") for body in fast.bodies)
    side, server = report["server"]["levels"]["1"]["speculative"], report["server"]
    assert code == 0 and side["tokens_per_piece"] == 49 / 16 and side["piece_ms"]["n"] == 10
    assert server["token_ids"] is (kind == "vllm") and report["total"]["drafts"] == DRAFTS
    assert side["itl_ms"]["n"] == 10  # times measured, whatever number of tokens each piece holds


def test_other_clients_are_noticed(recipe, capsys):
    """Counters that hold more than this client's answers: said, and nothing is judged by them."""
    def another(server: LiveServer) -> None:
        server.count([[1], [2, 3], [4]])

    with LiveServer() as fast, LiveServer(drafts=False) as plain:
        fast.on_end = another
        code, report = evaluate(recipe, base_url=fast.url, baseline_url=plain.url, concurrency="[2]")
    signs = report["server"]["levels"]["2"]["foreign"]
    assert code == 0 and any("requests were counted, this client made" in sign for sign in signs)
    assert any(re.match(r"\d+ answer tokens were counted, this client got", sign) for sign in signs)
    assert report["verdict"]["decision"] == "do not deploy" and "other clients" in report["verdict"]["reasons"][0]
    assert "another client's requests" in capsys.readouterr().out


def test_faults_are_counted_and_tried_again(recipe):
    """500, 429 with Retry-After, a stall, a cut, an early end and an error in the stream: each once, each mended."""
    faults = dict(zip(TEXTS, ["500", "429", "stall", "cut", "early", "error"]))
    with LiveServer(script=lambda text, before: faults[text] if before == 2 * (text == "abcd") else "") as fast:
        code, report = evaluate(recipe, base_url=fast.url, concurrency="[1]", timeout_s=1.0)
    side = report["server"]["levels"]["1"]["speculative"]
    assert code == 0 and side["requests"] == 6 and (side["lost"], side["timeouts"]) == (0, 1)
    assert sum(side["faults"].values()) == side["retries"] == 6
    assert set(side["faults"]) == {"HTTP 500", "HTTP 429", "no whole answer in time", "the stream ended early",
                                   "an error in the stream", "connection: RemoteProtocolError"}
    assert side["request_ms"]["p50"] is None and side["request_ms"]["n"] == 6
    assert report["server"]["levels"]["1"]["foreign"] == []


def test_a_lost_request_is_counted(recipe):
    """One of six has no answer: within the share that is allowed, and the others are paired."""
    with (LiveServer(script=lambda text, before: "400" if text == "abcde" else "") as fast,
          LiveServer(drafts=False) as plain):
        code, report = evaluate(recipe, base_url=fast.url, baseline_url=plain.url, max_lost_share=0.2,
                                concurrency="[1]")
        assert fast.asked["abcde"] == 1  # a refusal: no further attempt
    level = report["server"]["levels"]["1"]
    assert code == 0 and (level["speculative"]["lost"], level["prompts"], level["baseline"]["requests"]) == (1, 5, 6)
    assert report["total"]["prompts"] == 5 and level["acceptance"]["drafts"] == DRAFTS - 4


STOPS = {
    "too many errors": (dict(script=lambda text, before: "500" if before > 1 else ""), 1,
                        r"1 of 6 requests at concurrency 1 have no answer \(HTTP 500: 1\); "),
    "another model": (dict(script=lambda text, before: "model"), 1, "the server answered with 'another'"),
    "no usage": (dict(script=lambda text, before: "usage"), 1, "must support stream_options.include_usage"),
    "no such model": (dict(models=("a", "b")), 2, "eval.server.model = '': the server at .* serves a, b; name one"),
    "wrong key": (dict(key=KEY), 1, r"HTTP 401: wrong key: None"),
}


@pytest.mark.parametrize("case", STOPS)
def test_what_stops_the_run(recipe, capsys, case):
    """One clear line, and no report (case 36: another model's answers)."""
    settings, code, message = STOPS[case]
    with LiveServer(**settings) as fast:
        assert evaluate(recipe, base_url=fast.url, retries=1)[0] == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("make eval: error: ") and re.search(message, error)
    assert not (recipe.parent / "runs" / "w" / "eval" / "server").exists()


@pytest.mark.parametrize("server, message", [
    (dict(base_url="http://127.0.0.1:9"), "connection: ConnectError, after 1 attempts"),
    (dict(base_url="ftp://x"), "must be like http://"), (dict(base_url="http://me:pw@x"), "holds a password"),
    (dict(base_url="http://x?key=pw"), "holds a password or a query"),
    (dict(base_url="http://x", baseline_url="http://x/"), "is the server that is measured"),
    (dict(base_url="http://x", baseline_url="http://y", baseline_report="z"), "are both set"),
    (dict(base_url="http://x", baseline_report="none.json"), "none.json: cannot read this report"),
    (dict(base_url="http://x", label="../x"), "must be a plain folder name"),
    (dict(base_url="http://x", concurrency="[]"), "eval.server.concurrency"),
    (dict(base_url="http://x", concurrency="[0]"), "eval.server.concurrency"),
    (dict(base_url="http://x", api_key_env="NO_SUCH"), "eval.server.api_key_env = NO_SUCH: this environment"),
    (dict(baseline_url="http://x"), "eval.server.base_url is empty")])
def test_settings_that_cannot_work(recipe, capsys, server, message):
    assert evaluate(recipe, retries=0, **server)[0] in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "pw" not in error


def test_key_is_sent_and_shown_nowhere(recipe, tmp_path, monkeypatch, capsys):
    """To the server alone, not to another address's counters page; in no file and no message."""
    monkeypatch.setenv("LIVE_KEY", KEY)
    with LiveServer(key=KEY) as fast, LiveServer() as page:
        code, _ = evaluate(recipe, base_url=fast.url, api_key_env="LIVE_KEY", concurrency="[1]",
                           metrics_urls=f"[{fast.url}/metrics, {page.url}/metrics]")
        assert code == 0 and {key for _, key in fast.keys} == {f"Bearer {KEY}"}
        assert {key for _, key in page.keys} == {None}
        monkeypatch.setenv("LIVE_KEY", "sk-another-secret")
        assert evaluate(recipe, base_url=fast.url, api_key_env="LIVE_KEY")[0] == 1
    said = capsys.readouterr()
    written = "".join(p.read_text() for p in (tmp_path / "runs").rglob("*") if p.is_file())
    assert "HTTP 401: wrong key: Bearer ***" in said.err
    assert "secret" not in said.out + said.err + written


@pytest.mark.parametrize("gap, gives_ids, near, place, unit", [
    (5e-5, True, 1, 2, "token"), (0.5, True, 0, 2, "token"), (5e-5, False, 1, 10, "character"),
    (None, True, 0, 2, "token")])
def test_texts_that_differ(recipe, gap, gives_ids, near, place, unit):
    """Case 59: the first difference, and whether the baseline's two best tokens were a near-tie there."""
    def other(text: str) -> list[int]:
        ids = ids_of(text)
        return [*ids[:2], 90 + ids[2], *ids[3:]] if text == "abcdef" else ids

    with (LiveServer(answer=other, gives_ids=gives_ids) as fast,
          LiveServer(drafts=False, gives_ids=gives_ids, gap=gap) as plain):
        code, report = evaluate(recipe, base_url=fast.url, baseline_url=plain.url, concurrency="[1]", retries=0)
    greedy, found = report["server"]["greedy"], report["total"]["lossless"]["greedy"]
    assert code == 0 and (greedy["equal"], greedy["differ"], greedy["near_ties"]) == (5, 1, near)
    assert (found["mismatches"], found["near_ties"]) == (1 - near, near)
    first = greedy["first_difference"]
    assert (first["id"], first["place"], first["unit"]) == ("p2", place, unit)
    assert first["gap"] == pytest.approx(gap) if gap else first["gap"] is None
    assert ("greedy answers differ" in report["verdict"]["reasons"][0]) is (not near)


def test_later_turns_follow_the_servers_own_answers(tmp_path):
    """MT-bench: the second request holds the first answer; token ids are not asked, and counted. Case 66: each once."""
    rows = [{"question_id": 1, "category": "writing", "turns": ["abcd", "abcde"]},
            {"question_id": 2, "category": "maths", "turns": ["abcdef"]}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "i.jsonl").write_text(json.dumps({"id": "a", "prompt_ids": [3, 4]}) + "\n"
                                      + json.dumps({"id": "b", "prompt": "abcdefg"}) + "\n")
    recipe = write(tmp_path, sets=[{"name": "bench", "path": str(tmp_path / "q.jsonl")},
                                   {"name": "mixed", "path": str(tmp_path / "i.jsonl")}])
    with LiveServer() as fast:
        code, report = evaluate(recipe, "--eval.texts", "true", base_url=fast.url, concurrency="[1]")
        second = [body["messages"] for body in fast.bodies if body["messages"][-1]["content"] == "abcde"]
    assert code == 0 and violations(report, SCHEMA) == []
    answer = "".join(f"t{i} " for i in ids_of("abcd"))
    assert second[0] == [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": answer},
                         {"role": "user", "content": "abcde"}]
    assert report["settings"]["turns"] == {"1": 3, "2": 1}
    assert {name: s["prompts"] for name, s in report["sets"].items()} == {"bench": 6, "mixed": 2}  # each twice
    assert report["sets"]["mixed"]["dropped"] == {"token ids, which a chat request cannot carry": 1}
    assert {c: s["drafts"] for c, s in report["sets"]["bench"]["categories"].items()} == {"writing": 14, "maths": 8}
    assert report["prompts"][1]["answer"] == "".join(f"t{i} " for i in ids_of("abcde"))


def test_a_baseline_that_drafts_is_refused(recipe, capsys):
    with LiveServer() as fast, LiveServer() as other:
        assert evaluate(recipe, base_url=fast.url, baseline_url=other.url)[0] == 2
    assert "this server drafts too; start it without a drafter" in capsys.readouterr().err


def test_gate_and_compare(recipe, capsys):
    """Bounds on a server's own numbers, exit codes as ever; two reports of servers are compared by pairs."""
    gate = recipe.parent / "g.yaml"
    with LiveServer() as fast, LiveServer(drafts=False) as plain:
        for bound, code in ((9.0, 1), (0.01, 0)):
            gate.write_text(yaml.safe_dump({"bounds": [
                {"metric": "server.levels.2.speedup", "min": bound},
                {"metric": "total.lossless.greedy.mismatches", "max": 0},
                {"metric": "server.levels.1.speculative.itl_ms.p50", "max": 1000}]}))
            assert evaluate(recipe, "--gate", str(gate), base_url=fast.url, baseline_url=plain.url)[0] == code
        first = recipe.parent / "runs" / "w" / "eval" / "server"
        assert "| server.levels.2.speedup |" in (first / "report.md").read_text()
        assert evaluate(recipe, base_url=fast.url, baseline_url=plain.url, label="again")[0] == 0
    capsys.readouterr()
    assert call(COMMAND, recipe, "--gate", str(gate), "--report", str(first / "report.json")) == 0
    assert "Mean acceptance length  1.95 tokens per draft" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        run_command(COMPARE, [str(first), str(first.parent / "again"), "--out", str(recipe.parent / "c"),
                              "--runs_dir", str(recipe.parent)])
    assert stop.value.code == 0
    with pytest.raises(ConfigError, match="is of a running server"):
        read_acceptance(first / "report.json", "")
    result = json.loads((recipe.parent / "c" / "compare.json").read_text())
    found = {metric["metric"]: metric["against_first"][0] for metric in result["metrics"]}
    assert found["mean_length"]["paired"] and found["mean_length"]["difference"] == 0
    assert found["tokens_per_target_pass"]["difference"] is None
    assert found["speedup"]["a"] > 0 and result["timed_at"] == "concurrency 1"
    page = Page((recipe.parent / "c" / "compare.html").read_text())
    assert "Speedup at concurrency 1" in page.text and page.tags.count("svg") == 2


def test_offline_acceptance_stands_beside(recipe):
    """An evaluation of the same prompts without a server: its figures and the largest difference of a position."""
    with LiveServer() as fast:
        _, report = evaluate(recipe, base_url=fast.url, concurrency="[1]")
        offline = sample_report()
        offline["settings"] |= {key: report["settings"][key] for key in ("prompts_sha256", "max_tokens")}
        offline["total"]["acceptance"]["per_position"] = [14 / 22, 7 / 22 + 0.25, 0.0]
        (recipe.parent / "runs" / "w" / "eval" / "report.json").write_text(json.dumps(offline))
        _, report = evaluate(recipe, base_url=fast.url, concurrency="[1]")
    assert report["server"]["offline"]["largest_difference"] == pytest.approx(0.25)
    assert report["server"]["offline"]["mean_length"] == 2.14


class OwnLoop(LiveServer):
    """Serves what our own loop decodes, behind the target's own chat template, and counts what the loop counts.
    `answers`: of each text the prompt's ids and the loop's output."""

    def __init__(self, tokenizer, answers: dict) -> None:
        super().__init__()
        self.spell, self.answers = tokenizer.decode, answers

    def prompt_of(self, text):
        return self.answers[text][0]

    def pieces(self, text, limit):
        output = self.answers[text][1]
        ends = list(itertools.accumulate(n for _, n in output.times))
        return [output.tokens[a:b] for a, b in zip([0, *ends], ends)]

    def count(self, pieces, text=""):
        found = self.answers[text][1].acceptance
        with self.lock:
            self.counts += Counter(generated=sum(map(len, pieces)), finished=1, drafts=found.drafts,
                                   accepted=sum(found.accepted))
            self.counts += Counter({f"position {i}": n for i, n in enumerate(found.accepted)})


def test_the_acceptance_of_the_report_is_that_of_the_server(tmp_path):
    """Cases 12, 53: what `make eval` says without a server, and with one that decodes the same, is the same to the
    count: prompts' ids, drafts and accepted tokens of each, every position; the two reports are compared by pairs."""
    made = tiny_run(tmp_path)
    assert call(COMMAND, made.recipe) == 0
    offline = json.loads((made.run / "eval" / "report.json").read_text())
    prompts, _ = evaluation_prompts(str(tmp_path / "eval.jsonl"))
    ids = [prompt_ids(made.target.tokenizer, p.messages) for p in prompts]
    outputs = Decoder(made.target, 8).speculative(ids, made.drafter, 3)
    answers = {p.messages[-1]["content"]: pair for p, pair in zip(prompts, zip(ids, outputs))}
    with OwnLoop(made.target.tokenizer, answers) as server:
        assert call(COMMAND, made.recipe, *flags(base_url=server.url, concurrency="[1, 2]")) == 0
    report = json.loads((made.run / "eval" / "server" / "report.json").read_text())
    assert report["server"]["offline"]["largest_difference"] == 0 < report["total"]["drafts"]
    assert report["total"]["acceptance"]["per_position"] == offline["total"]["acceptance"]["per_position"]
    for key in ("set", "id", "ids_sha256", "prompt_tokens", "tokens", "drafts", "accepted"):
        assert [p[key] for p in report["prompts"]] == [p[key] for p in offline["prompts"]]
    assert all(level["foreign"] == [] for level in report["server"]["levels"].values())
    sides = [conversations(one) for one in (offline, report)]
    assert len(matched(*sides)) == 4


def test_offline_evaluations_are_recognised_as_before():
    """What of a recipe concerns a running server alone does not make an evaluation without one another."""
    assert key_of("d", Eval(), [], {}) == key_of("d", Eval(server=LiveSection("http://x")), [], {})
    assert key_of("d", Eval(), [], {}) != key_of("d", Eval(max_tokens=5), [], {})
