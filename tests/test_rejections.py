"""Entropy at rejections against a slow reference, places by hand, the most frequent rejected tokens, the clock."""

import pytest
import torch
from tiny import load_target, plain_model, write_target

from data.evalsets import Question
from eval import clock as eval_clock
from eval.breakdown import Clock
from eval.decode import Output
from eval.metrics import Acceptance
from eval.rejections import by_entropy, entropies, entropy_figures, frequent, places
from eval.rows import Row


def row(ids: list[int], name: str = "p") -> Row:
    return Row("s", Question(name, []), 0, ids)


def output(tokens: list[int], drafts: list[tuple[int, int]], rejected: tuple = (), refused: tuple = ()) -> Output:
    """An answer of drafts of 2 tokens: (context, accepted) each; what was rejected and refused where fewer are."""
    counts = Acceptance(2)
    for _, n in drafts:
        counts.add(n)
    return Output(tokens, "stop", counts, len(drafts), [], drafts, list(rejected),
                  list(zip([context + n for context, n in drafts if n < 2], refused)))


def test_places_by_hand():
    """A prompt of 3, a first token at 3; the first draft accepts 1 of 2, the next both, the last is behind the end."""
    answer = output([7, 8, 9, 10, 11, 12], [(4, 1), (6, 2), (9, 0)], rejected=(9, 13), refused=(5, 6))
    found = [(p.index, p.accepted) for p in places([row([1, 2, 3])], [answer])]
    assert found == [(4, True), (5, False), (6, True), (7, True)]


def test_entropies_equal_the_slow_reference(tmp_path):
    """One padded pass over uneven rows gives what one pass a prefix gives, in transformers' own model."""
    folder = write_target(tmp_path / "model", layers=8)
    target, model = load_target(folder), plain_model(folder)
    rows = [row([5, 6, 7]), row([9] * 8), row([4, 30])]
    outputs = [output(tokens, []) for tokens in ([11, 12, 13, 14], [20], [31, 32, 33])]
    found = entropies(target, rows, outputs)
    for one, answer, nats in zip(rows, outputs, found):
        assert len(nats) == len(answer.tokens)
        for i, value in enumerate(nats):
            logits = model(torch.tensor([one.ids + answer.tokens[:i]])).logits[0, -1].double()
            p = logits.detach().softmax(-1)
            assert value == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)


def test_by_entropy_by_hand():
    """Each bucket begins at its bound; the last has no end."""
    found = by_entropy([(0.05, True), (0.1, False), (0.1, True), (9.0, False), (-1e-9, True)])
    assert found == [{"from": 0.0, "to": 0.1, "accepted": 2, "rejected": 0},
                     {"from": 0.1, "to": 0.5, "accepted": 1, "rejected": 1},
                     {"from": 4.0, "to": None, "accepted": 0, "rejected": 1}]


def test_nothing_drafted_is_no_figure(tmp_path):
    assert entropy_figures(None, [row([1])], [output([2], [])]) is None


def test_frequent_by_hand():
    """Pairs of drafted and wanted token; texts and examples only with a decoder; an example lies in the kept answer."""
    rows = [row([1, 2, 3]), row([1, 2, 3], "q")]
    outputs = [output([7, 8, 9], [(4, 0), (5, 0)], rejected=(8, 9), refused=(5, 6)),
               output([7, 8], [(4, 0), (5, 1)], rejected=(8, 99), refused=(5, 5))]
    found = frequent(rows, outputs)
    assert found[0] == {"drafted": 5, "wanted": 8, "count": 2, "share": 0.5} and len(found) == 3
    told = frequent(rows, outputs, lambda ids: "".join(f"<{i}>" for i in ids))
    assert told[0]["drafted_text"] == "<5>" and [e["id"] for e in told[0]["examples"]] == ["p", "q"]
    assert told[0]["examples"][0] == {"set": "s", "id": "p", "before": "<7>", "after": "<8><9>"}
    beyond = next(e for e in told if e["wanted"] == 99)
    assert beyond["examples"] == []  # behind the kept answer


def test_clock_counts_a_nested_part_once(monkeypatch):
    """A cache write of 2 s inside a pass of 5 s leaves 3 s to the pass."""
    now = iter([0.0, 1.0, 3.0, 5.0])
    monkeypatch.setattr(eval_clock.time, "perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    write = clock.timed("cache", lambda: "kept")
    assert clock.timed("verify", lambda: write())() == "kept"
    assert clock.seconds == {"draft": 0.0, "verify": 3.0, "sample": 0.0, "cache": 2.0}
