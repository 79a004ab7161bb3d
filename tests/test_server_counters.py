"""What is read from engines' /metrics pages and from streamed events, by hand."""

import asyncio
import json

import pytest
from live_server import LiveServer

from data.backends.base import Fault
from data.backends.client import Client
from data.backends.stream import Reader, Stream, chat_body
from data.evalsets import Question
from eval import server_counters
from eval.live import Reply, Run, Work, turns_of
from eval.live_figures import Record, paired, side_block, token_gaps
from eval.server_counters import Counters, Watch, counters_of, drafting, foreign
from recipes.errors import RunError
from recipes.schema import Server


def vllm_page(drafts: int, positions: list[int], replica: str = "0") -> str:
    label = f'engine="{replica}",model_name="a {{b}} c"'
    return "\n".join([
        "# TYPE vllm:spec_decode_num_drafts_total counter", f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts}.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {2.0 * drafts}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {float(sum(positions))}",
        f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7e9", "vllm:kv_cache_usage_perc{} NaN",
        *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} {float(n)} 1700000000000'
          for i, n in enumerate(positions))]) + "\n"


def test_replicas_are_summed():
    """Case 55: 8 of 10 and 18 of 20 are 26 of 30, in any order: labels of one page, or pages of several replicas."""
    one, two = vllm_page(10, [8, 4]), vllm_page(20, [18], "1")
    for found in (counters_of(one + two), counters_of(two + one), counters_of(one) + counters_of(two)):
        assert (found.engine, found.drafts, found.drafted, found.accepted) == ("vllm", 30, 60, 30)
        assert found.per_position == (26, 4) and found.generated is None


def test_differences_of_counters():
    """A counter that appears later began at 0; one that fell is a server that was started anew."""
    before, after = counters_of(vllm_page(10, [8, 4])), counters_of(vllm_page(25, [18, 9, 2]))
    assert (after - before).per_position == (10, 5, 2) and (after - before).drafts == 15
    assert (Counters("sglang", drafts=5) - Counters("sglang")).drafts == 5
    with pytest.raises(RunError, match="started anew"):
        before - after


@pytest.mark.parametrize("counted, expected", [
    (None, None), (Counters("vllm", drafts=3), True), (Counters("vllm", drafts=0), False), (Counters("vllm"), False),
    (Counters("sglang"), None), (Counters("sglang", gauge=1.6), True), (Counters("sglang", gauge=0.0), False),
    (Counters("tensorrt-llm", drafted=4), True), (Counters("tensorrt-llm", drafted=0), False)])
def test_does_it_draft(counted, expected):
    assert drafting(counted) is expected


@pytest.mark.parametrize("counted, failed, signs", [
    (Counters(drafts=6, accepted=9, per_position=(5, 3, 1), generated=20, finished=2), 0, []),
    # 20 tokens, and of each answer at most K + 1 more that were cut: 28
    (Counters(drafts=10, accepted=18, per_position=(5, 3, 1)), 0, []),
    (Counters(drafts=10, accepted=19, per_position=(5, 3, 1)), 0, ["drafts with 19"]),
    (Counters(drafts=10, accepted=19, drafted=30), 0, ["drafts with 19"]),
    (Counters(drafts=10, accepted=19, per_position=(5, 3, 1)), 1, []),
    (Counters(generated=21), 0, ["21 answer tokens"]), (Counters(generated=28), 1, []),
    (Counters(finished=3), 0, ["3 requests"]), (Counters(finished=3), 1, []), (Counters(), 0, [])])
def test_signs_of_other_clients_by_hand(counted, failed, signs):
    """Two answers of 12 and 8 tokens; a failed attempt may have left 8 more."""
    found = foreign(counted, [12, 8], failed, 8)
    assert len(found) == len(signs) and all(sign in text for sign, text in zip(signs, found))


def test_counters_that_never_rest(monkeypatch):
    """They move with every reading, while this client sends nothing: said, and not waited for again."""
    monkeypatch.setattr(server_counters, "PAUSE", 0.001)

    async def read(server: LiveServer) -> tuple[bool, bool]:
        async with Client(Server(server.url, "m"), 0) as client:
            watch = Watch(client, [])
            await watch.settled()
            quiet = watch.restless
            server.on_page = lambda: server.count([[1], [2]])
            await watch.settled()
            return quiet, watch.restless

    with LiveServer() as server:
        assert asyncio.run(read(server)) == (False, True)


def read_events(*events: object, model: str = "m") -> Stream:
    reader = Reader(model, Stream(0.0))
    for event in events:
        reader.line(event if isinstance(event, str) else f"data: {json.dumps(event)}")
    return reader.finished()


def piece(text: str = "", ids: list[int] | None = None, finish: str | None = None, **delta: object) -> dict:
    return {"choices": [{"delta": {"content": text, **delta}, "token_ids": ids, "finish_reason": finish}]}


def usage(tokens: int) -> dict:
    return {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}


def test_events_of_a_stream():
    """Pieces are events with text or tokens; ids count where they are all there; reasoning and calls are text too."""
    found = read_events(": ping", {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, piece("a", [5]),
                        piece("", [6, 7]), piece("b", [8], "stop"), usage(4), "data: [DONE]")
    assert (found.text, found.ids, found.counts) == ("ab", [5, 6, 7, 8], [1, 2, 1])
    assert (found.tokens, found.prompt_tokens, found.finish) == (4, 4, "stop")
    cut = read_events(piece("a", [5]), piece("b", [6], "length"), usage(3))
    assert cut.ids is cut.counts is None and len(cut.times) == 2  # an id was left out
    said = read_events(piece(reasoning="hm"), piece("x", tool_calls=[{"index": 0}]), piece(finish="stop"), usage(9))
    assert said.text == 'hmx[{"index": 0}]' and said.content == "x" and len(said.times) == 2
    nothing = read_events(piece(finish="stop"), usage(1))
    assert nothing.text == "" and len(nothing.times) == 1


@pytest.mark.parametrize("events, error, message", [
    ([piece("a", [1])], Fault, "ended early"), ([usage(3), "data: [DONE]"], Fault, "ended early"),
    (["data: {"], Fault, "not JSON"), (["data: []"], Fault, "no object"),
    ([piece("a"), {"error": {"message": "x"}}], Fault, "error in the stream"),
    ([piece("a", finish="stop")], RunError, "include_usage"), ([piece("a") | {"model": "x"}], RunError, "'x'"),
    ([piece("a", finish="stop"), {"usage": {"completion_tokens": "many"}}], RunError, "include_usage")])
def test_events_that_are_no_answer(events, error, message):
    with pytest.raises(error, match=message):
        read_events(*events)


def test_bodies():
    """Greedy, every sampling field off, fields that only some servers know left out for the others; tool arguments as
    text."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    body = chat_body("vllm", "m", [call], [{"type": "function"}], 5, "salt")
    assert body["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert (body["temperature"], body["top_k"], body["repetition_penalty"], body["cache_salt"]) == (0.0, 0, 1.0, "salt")
    assert body["stream_options"] == {"include_usage": True} and body["tools"]
    plain = chat_body("plain", "m", [call], None, 5, "salt")
    assert not {"top_k", "cache_salt", "return_token_ids", "tools", "repetition_penalty"} & set(plain)


def reply(times: list[float], counts: list[int] | None, tokens: int, ended: float) -> Reply:
    stream = Stream(10.0, times, ended, counts, tokens=tokens, prompt_tokens=2)
    return Reply(Work("s", Question("q", [[]]), 0), 0, [], stream)


def test_latencies_by_hand():
    """A first token after 0.5 s, 2 tokens 0.2 s later, 1 more 0.1 s later; a piece of text alone ends no token."""
    known = reply([10.5, 10.7, 10.8], [1, 2, 1], 4, 10.8)
    assert token_gaps(known) == pytest.approx([100, 100, 100])
    assert token_gaps(reply([10.5, 10.6, 10.7], [1, 0, 1], 2, 10.7)) == pytest.approx([200])
    assert token_gaps(reply([10.5, 10.7, 10.8], None, 6, 10.8)) == pytest.approx([100, 100, 50, 50])  # 2 a piece
    run = Run(2, [known, known], wall_s=1.0, client_s=2.0, cpu_s=0.5)
    found = side_block(run, 2)
    assert (found["tok_s"], found["client_busy"], found["tokens_per_piece"]) == (8.0, 0.25, 8 / 6)
    assert found["steady_tok_s"] == pytest.approx(2 * 8 / 1.6) and found["ttft_ms"]["n"] == 2


def test_pairs_of_conversations():
    """Only conversations that both servers had as often; repeats and turns are summed."""
    def one(name: str, tokens: int, repeat: int = 0) -> Record:
        return Record("s", name, 0, repeat, 3, tokens, 2, 0.5, 1.0, "x")

    fast, base = paired([one("a", 4), one("a", 4, 1), one("b", 6), one("c", 2)],
                        [one("a", 5), one("a", 5, 1), one("b", 7), one("b", 7, 1)])
    assert (fast.tokens, base.tokens, fast.seconds) == ([8], [10], [1.0])


@pytest.mark.parametrize("count, clients, sizes", [(6, 1, [3, 3]), (7, 1, [3, 4]), (12, 2, [6, 6]), (96, 16, [48, 48]),
                                                  (11, 1, [5, 6]), (2, 1, [2])])
def test_turns(count, clients, sizes):
    found = turns_of(count, clients)
    assert [len(part) for part in found] == sizes and [i for part in found for i in part] == list(range(count))
