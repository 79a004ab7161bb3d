"""Acceptance counted as vLLM counts it, intervals, repetition, and the report's block built from them."""

import numpy as np
import pytest
import torch

from data.evalsets import Question
from eval.decode import Output
from eval.figures import arrivals, by_bucket, by_set, per_pass, spread, statistics
from eval.metrics import Acceptance, bootstrap, repeated_share
from eval.rows import Row


def counted(K: int, *lengths: int) -> Acceptance:
    counts = Acceptance(K)
    for length in lengths:
        counts.add(length)
    return counts


def test_counts_by_hand():
    """Formats.md section 7: five drafts of three tokens of which 3, 0, 1, 2 and 3 were accepted."""
    counts = counted(3, 3, 0, 1, 2, 3)
    assert (counts.drafts, counts.accepted) == (5, [4, 3, 2])
    assert counts.rate == 9 / 15 and counts.mean_length == 1 + 9 / 5
    assert counts.per_position == [4 / 5, 3 / 5, 2 / 5]


def test_cumulative_and_conditional_rates_are_two_things():
    """Case 54: a conditional rate counts only the drafts that were right so far; their product is the cumulative."""
    counts = counted(3, 3, 0, 1, 2, 3)
    assert counts.conditional == [4 / 5, 3 / 4, 2 / 3]
    assert np.cumprod(counts.conditional) == pytest.approx(counts.per_position)
    assert 1 + sum(counts.per_position) == pytest.approx(counts.mean_length)
    assert counted(3, 0, 0).conditional == [0.0, 0.0, 0.0]


def test_a_conditional_rate_counts_what_can_be_judged():
    """Case 54: 8 drafted tokens: a chain of 3 that is right, one that stopped behind its first and right token, one of
    2 whose second is wrong, and a tree of two siblings, one of them right. A draft that has no second token says
    nothing of it."""
    counts = Acceptance(3)
    counts.add(3, 3)
    counts.add(1, 1)
    counts.add(1, 2)
    counts.add(1, 2, refused=False)
    assert counts.drafted == 8 and counts.accepted == [4, 1, 1] and counts.refused == [0, 1, 0]
    assert counts.conditional == [4 / 4, 1 / 2, 1 / 1] and counts.per_position == [4 / 4, 1 / 4, 1 / 4]
    assert (counts + counts).conditional == counts.conditional and (counts + counts).refused == [0, 2, 0]


def test_replicas_are_summed():
    """Case 55: 8 of 10 and 18 of 20 are 26 of 30, in any order, and the parts stay as they were."""
    a, b = Acceptance(1, 10, [8]), Acceptance(1, 20, [18])
    assert a + b == b + a == Acceptance(1, 30, [26])
    assert (a + b).rate == 26 / 30 and a == Acceptance(1, 10, [8])
    assert sum([a, b], Acceptance(1)) == Acceptance(1, 30, [26])


def test_no_draft_is_no_division():
    """Without drafts each pass yields its own token."""
    assert (Acceptance(2).rate, Acceptance(2).mean_length, Acceptance(2).per_position) == (0.0, 1.0, [0.0, 0.0])
    one, other = Acceptance(2), Acceptance(2)
    one.add(2)
    assert other.accepted == [0, 0]  # not shared


def test_bootstrap_contains_the_truth_and_shrinks():
    """The 95 % interval of a ratio of sums: it holds the known ratio in nearly all of 60 repetitions."""
    random = np.random.default_rng(0)
    inside, widths = 0, {40: [], 400: []}
    for size, repetition in ((n, r) for n in (40, 400) for r in range(30)):
        drafts = random.integers(5, 50, size).astype(float)
        low, high = bootstrap(random.binomial(drafts.astype(int), 0.3).astype(float), drafts, repetition)
        inside += low <= 0.3 <= high
        widths[size].append(high - low)
    assert 52 <= inside <= 60
    assert np.mean(widths[400]) < np.mean(widths[40]) / 2.5  # a tenth of the variance


def test_bootstrap_is_seeded_and_needs_two():
    """The same seed gives the same interval; one prompt gives none; equal prompts give a point."""
    values, weights = np.arange(20.0) ** 1.5, np.arange(20.0) + 7
    assert bootstrap(values, weights, 1) == bootstrap(values, weights, 1) != bootstrap(values, weights, 2)
    assert all(np.isnan(bootstrap(values[:1], weights[:1], 1)))
    assert bootstrap(np.array([2.0, 4.0]), np.array([4.0, 8.0]), 1) == [0.5, 0.5]


@pytest.mark.parametrize("tokens,n,share", [
    ([1, 2, 3, 4, 1, 2, 5], 2, 4 / 7),  # (1, 2) twice
    ([1, 1, 1], 2, 1.0),  # (1, 1) at 0 and 1, overlapping
    ([1, 2, 3], 2, 0.0), ([1, 2], 3, 0.0), ([], 2, 0.0),
    ([1, 2, 3, 9, 1, 2, 3], 3, 6 / 7),
    ([*range(8), *range(8)], 8, 1.0), ([*range(8), 99, *range(7)], 8, 0.0),
])
def test_repeated_share_by_hand(tokens, n, share):
    """Share of tokens inside an n-gram that occurs more than once."""
    assert repeated_share(tokens, n) == share


def answer(tokens: list[int], K: int, *lengths: int, context: int = 10, rejected: tuple = ()) -> Output:
    return Output(tokens, "stop", counted(K, *lengths), len(lengths), [], [(context, n) for n in lengths],
                  list(rejected))


def row(name: str, set_name: str = "a", category: str = "", tokens: int = 10, number: int = 0) -> Row:
    return Row(set_name, Question(name, [], category), number, [1] * tokens)


def test_statistics_by_hand():
    """The report's block: tokens per pass count kept tokens only, the prefill's excluded; misses by vocabulary."""
    fresh = answer([1, 2, 3, 4, 5], 2, 2, 2, context=600, rejected=(7, 8))  # 4 kept after the prefill in 2 passes
    looping = answer([*range(8)] * 2, 2, 1, 2, 2, 2, 0, rejected=(8,))
    vocabulary = torch.tensor([True] * 8 + [False] * 2)
    block = statistics([row("p0", tokens=598), row("p1", tokens=10)], [fresh, looping], 2, vocabulary, seed=0)
    assert block["drafts"] == 7 and block["tokens"] == 21 and block["target_passes"] == 7
    assert block["acceptance"]["rate"] == 11 / 14 and block["acceptance"]["mean_length"] == 1 + 11 / 7
    assert block["acceptance"]["per_position"] == [6 / 7, 5 / 7]
    assert block["tokens_per_target_pass"] == 19 / 7
    assert block["repetition"] == {"share": 16 / 21, "tokens_per_target_pass_without": 2.0}
    assert block["vocabulary_misses"] == {"rejections": 3, "outside_draft_vocabulary": 2, "share": 2 / 3}
    assert block["acceptance"]["by_context_bucket"] == [
        {"from": 0, "to": 512, "drafts": 5, "mean_length": 1 + 7 / 5},
        {"from": 512, "to": 2048, "drafts": 2, "mean_length": 3.0}]
    assert block["acceptance"]["conditional_per_position"] == [6 / 7, 5 / 6]
    assert block["acceptance"]["by_answer_position"] == [{"from": 0, "to": 16, "drafts": 7, "mean_length": 1 + 11 / 7}]
    low, high = block["acceptance"]["ci95"]
    assert low == pytest.approx(1 + 7 / 5) and high == pytest.approx(3.0)  # two prompts: each alone


def test_answers_without_a_pass():
    """An answer that ends at the prefill's token has no pass and divides nothing."""
    assert per_pass([answer([2], 2)]) == 1.0
    block = statistics([row("p")], [answer([2], 2)], 2, None, seed=0)
    assert block["acceptance"]["ci95"] == [1.0, 3.0] and block["vocabulary_misses"]["share"] is None


def test_spread_meets_every_kind():
    """Case 66: distinct indices over the whole list, never more than there are."""
    assert spread(list("abcdefghij"), 4) == [0, 2, 5, 7]
    assert spread(list("abc"), 9) == [0, 1, 2]


def test_buckets_by_hand():
    """Case 33: a draft belongs to the bucket that begins at or below its place; empty buckets are left out."""
    found = by_bucket([(0, 2), (511, 0), (512, 1), (9000, 3)], [0, 512, 2048, 8192])
    assert [(b["from"], b["to"], b["drafts"], b["mean_length"]) for b in found] == [
        (0, 512, 2, 2.0), (512, 2048, 1, 2.0), (8192, 1 << 30, 1, 4.0)]


def test_turns_of_one_conversation_are_resampled_together():
    """Two turns that depend on each other are one unit: with a single conversation there is no interval."""
    outputs = [answer([1, 2, 3], 2, 2), answer([1, 2, 3], 2, 0)]
    two = statistics([row("p"), row("p", number=1)], outputs, 2, None, 0)["acceptance"]["ci95"]
    apart = statistics([row("p"), row("q")], outputs, 2, None, 0)["acceptance"]["ci95"]
    assert two == [1.0, 3.0] and apart == [1.0, 3.0]
    outputs += [answer([1, 2, 3], 2, 1), answer([1, 2, 3], 2, 1)]
    rows = [row("p"), row("p", number=1), row("q"), row("q", number=1)]
    assert statistics(rows, outputs, 2, None, 0)["acceptance"]["ci95"] == [2.0, 2.0]


def test_sets_and_their_categories():
    """Each set by itself; the same category name in two sets is two categories."""
    rows = [row("p", "a", "x"), row("q", "a", "y"), row("p", "b", "x")]
    found = by_set(rows, [answer([1, 2], 2, n) for n in (0, 1, 2)], 2, None, 0)
    assert {s: {c: v["acceptance"]["mean_length"] for c, v in b["categories"].items()} for s, b in found.items()} == {
        "a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0}}
    assert found["a"]["acceptance"]["mean_length"] == 1.5


def test_arrivals_by_hand():
    """Unordered times, one missing; one alone has no rate."""
    assert arrivals([10.0, None, 12.5, 10.9]) == {"requests": 3, "span_s": 2.5, "per_s": 0.8, "most_in_1_s": 2}
    assert arrivals([5.0])["per_s"] is None and arrivals([None]) is None
    # Three within 0.3 s, whichever second they began in; a second later is the next second.
    assert arrivals([0.0, 0.9, 1.1, 1.2])["most_in_1_s"] == 3 and arrivals([0.0, 1.0, 2.0])["most_in_1_s"] == 1
