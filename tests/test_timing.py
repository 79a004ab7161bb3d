"""Timing's arithmetic; the clock itself is scripted."""

import pytest
import torch
from fakes import counting_drafter, counting_target
from tiny import V
from transformers import GenerationConfig

from eval import breakdown, timing
from eval import clock as eval_clock
from eval.decode import Decoder, Output
from eval.timing import (
    Timing,
    by_batch,
    generate,
    interleaved,
    medians_in_turns,
    percentiles,
    predict,
    rounds,
    speedup,
    step_times,
)


def test_percentiles_are_null_with_a_reason():
    """DESIGN, latency: a percentile that n is too small for is null and says what it needs."""
    assert percentiles([1.0] * 9) == {"n": 9, "p50": None, "p95": None, "p99": None,
                                      "reason": "p50 needs n >= 10; p95 needs n >= 100; p99 needs n >= 500"}
    assert percentiles([]) == {**percentiles([1.0] * 9), "n": 0}
    assert percentiles(list(range(1, 12))) == {"n": 11, "p50": 6.0, "p95": None, "p99": None,
                                               "reason": "p95 needs n >= 100; p99 needs n >= 500"}
    assert percentiles(list(range(101))) == {"n": 101, "p50": 50.0, "p95": 95.0, "p99": None,
                                             "reason": "p99 needs n >= 500"}
    assert percentiles(list(range(501))) == {"n": 501, "p50": 250.0, "p95": 475.0, "p99": 495.0}


def test_predicted_speedup_by_hand():
    """Eagle3.md: E / (K c + v); E 3, K 4, c = 2/20, v = 28/20 gives 3 / 1.8."""
    steps = {"target_step_ms": 20.0, "draft_step_ms": 2.0, "verify_ms": 28.0}
    assert predict(3.0, steps, 4) == pytest.approx(3 / 1.8)
    assert predict(1.0, {"target_step_ms": 5.0, "draft_step_ms": 0.0, "verify_ms": 5.0}, 4) == 1.0


def test_bursts_are_counted():
    """Three tokens that appear together 60 ms after the last one are three intervals of 20 ms."""
    timed = Timing()
    timed.add(10.0, Output([1, 2, 3, 4, 5], times=[(10.5, 1), (10.56, 3), (10.57, 1)]))
    assert timed.ttft_ms == [pytest.approx(500)]
    assert timed.itl_ms == pytest.approx([20, 20, 20, 10]) and timed.burst_ms == pytest.approx([60, 10])
    assert timed.latency("itl_ms")["n"] == timed.latency("burst_ms")["n"] == 2 and timed.latency("ttft_ms")["n"] == 1
    assert timed.seconds == [pytest.approx(0.57)] and timed.tokens == [5]
    timed.add(20.0, Output([1], times=[(20.43, 1)]))
    assert timed.tok_s == pytest.approx(6 / 1.0)  # of the sums, not a mean of rates
    assert Timing().tok_s == 0.0


def test_a_percentile_needs_so_many_bursts_and_not_tokens():
    """Nine bursts of five tokens are 45 equal intervals and nine times measured: too few for a median."""
    timed = Timing()
    timed.add(0.0, Output([1] * 46, times=[(1.0, 1), *((1.1 + i / 10, 5) for i in range(9))]))
    assert len(timed.itl_ms) == 45 and timed.latency("itl_ms")["p50"] is None
    timed.add(0.0, Output([1] * 6, times=[(1.0, 1), (1.1, 5)]))
    assert timed.latency("itl_ms")["p50"] == pytest.approx(20) and timed.latency("itl_ms")["n"] == 10
    assert timed.latency("burst_ms")["p50"] == pytest.approx(100)


def test_speedup_is_a_ratio_of_sums():
    """Sums over prompts, not a mean of ratios; its interval resamples prompts and holds the ratio."""
    base, fast = Timing([1.0, 3.0], [10, 30]), Timing([0.5, 2.0], [10, 30])
    ratio, (low, high) = speedup(base, fast, seed=0)
    assert ratio == pytest.approx(16 / 10) and low == pytest.approx(1.5) and high == pytest.approx(2.0)
    assert speedup(base, fast, 0) == speedup(base, fast, 0)


def test_medians_are_taken_in_turns_after_a_round_of_warming_up(monkeypatch):
    """A single slow call moves no median, the first round does not count, and the calls alternate."""
    calls = []
    took = [("a", 90), ("b", 80), ("a", 1), ("b", 7), ("a", 900), ("b", 5), ("a", 3), ("b", 6)]
    clock = iter([x for i, (_, ms) in enumerate(took) for x in (i, i + ms / 1e3)])
    monkeypatch.setattr(eval_clock.time, "perf_counter", lambda: next(clock))
    works = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = medians_in_turns(works, torch.device("cpu"), repeats=3)
    assert found == pytest.approx({"a": 3.0, "b": 6.0}) and calls == [name for name, _ in took]


class Accelerator:
    """A clock in ms, and a device whose calls return at once: their work takes its time when somebody waits for it."""

    def __init__(self, monkeypatch) -> None:
        self.ms, self.waiting = 0.0, 0.0
        monkeypatch.setattr(eval_clock.time, "perf_counter", lambda: self.ms / 1e3)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait())

    def wait(self) -> None:
        self.ms, self.waiting = self.ms + self.waiting, 0.0

    def work(self, launch: float, ms: float) -> None:
        self.ms, self.waiting = self.ms + launch, self.waiting + ms


def test_a_call_is_timed_with_its_own_work_on_the_device(monkeypatch):
    """Launches of 1 ms with 10 and 3 ms of work behind them take 11 and 4 ms: neither the launch alone nor the work of
    the call before."""
    gpu = Accelerator(monkeypatch)
    works = {"verify": lambda: gpu.work(1, 10), "draft": lambda: gpu.work(1, 3)}
    assert medians_in_turns(works, torch.device("cuda", 0), 3) == pytest.approx({"verify": 11.0, "draft": 4.0})


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    target = counting_target(tmp_path_factory.mktemp("counting"), V)
    return target, counting_drafter(target, list(range(V)))


def test_engines_take_turns_on_the_same_prompts(counting):
    """Case 23: baseline and speculation are timed on the same prompts, in turns, and keep the same tokens."""
    target, drafter = counting
    beats = []
    timings = interleaved(target, drafter, [[5, 6], [57], [20]], 3, 12, lambda: beats.append(1))
    assert len(beats) == 4  # a warm-up, then each prompt
    # 57 meets the end token 2 after nine tokens: 58 .. 63 0 1 2
    assert {name: t.tokens for name, t in timings.items()} == dict.fromkeys(timings, [12, 9, 12])
    assert len(timings[timing.SPECULATIVE].itl_ms) == 11 + 8 + 11 == len(timings[timing.PLAIN].itl_ms)
    assert all(len(t.seconds) == len(t.ttft_ms) == 3 for t in timings.values())
    assert target.model.config._attn_implementation == timing.GROUPED  # given back after `generate`


def test_transformers_gives_the_plain_text_whatever_the_model_was_published_with(counting):
    """A repetition penalty and a shortest answer in the generation settings leave the text that the loop decodes, and
    are there again afterwards; a target without an end token is timed too."""
    target, drafter = counting
    published = target.model.generation_config
    settings = GenerationConfig(repetition_penalty=1e300, min_new_tokens=11, eos_token_id=2)
    target.model.generation_config = settings
    try:
        timings = interleaved(target, drafter, [[57]], 3, 12, lambda: None)
        decoder = Decoder(target, 3)
        with timing.as_loaded(decoder, [20, 21, 22, 20]):
            assert generate(decoder, [20, 21, 22, 20]).tokens == [21, 22, 23]
        assert target.model.generation_config is settings
    finally:
        target.model.generation_config = published
    assert {name: t.tokens for name, t in timings.items()} == dict.fromkeys(timings, [9])


def test_a_target_without_end_tokens_is_timed(counting, monkeypatch):
    target, _ = counting
    monkeypatch.setattr(type(target), "end_ids", property(lambda self: []))
    decoder = Decoder(target, 12)
    with timing.as_loaded(decoder, [57]):
        assert generate(decoder, [57]).tokens == [58, 59, 60, 61, 62, 63, *range(6)]


def test_nothing_but_the_answer_is_in_its_seconds(counting, monkeypatch):
    """The switches of attention, two seconds each here, lie outside what is timed of transformers."""
    target, drafter = counting
    clock = Accelerator(monkeypatch)
    switch = type(target.model).set_attn_implementation
    monkeypatch.setattr(type(target.model), "set_attn_implementation",
                        lambda self, name: clock.work(2000, 0) or switch(self, name))
    timings = interleaved(target, drafter, [[57]], 3, 12, lambda: None)
    assert clock.ms == 8000 and timings[timing.TRANSFORMERS].seconds == [0.0]


def test_step_times_leave_figures_for_the_formula(counting):
    """The three times of the prediction are positive and finite."""
    target, drafter = counting
    steps = step_times(target, drafter, 20, 3)
    assert set(steps) == {"target_step_ms", "verify_ms", "draft_step_ms"}
    assert all(0 < v < 1e6 for v in steps.values())


def test_by_batch_by_hand(counting, monkeypatch):
    """Case 23: each engine decodes every prompt once, and begins a round in turn; a short first one does not count.
    6 x 12 tokens in 3 + 1 s and in 0.5 + 1.5 s are 18 and 36 a second."""
    target, drafter = counting
    clock, calls = Accelerator(monkeypatch), []

    def engine(name: str, *ms: float):
        took = iter(ms)

        def decode(self, prompts, *draft):
            calls.append((name, [p[0] for p in prompts], self.slots, self.max_tokens))
            clock.work(next(took), 0)
            return [Output(list(range(self.max_tokens)))] * len(prompts)
        return decode

    monkeypatch.setattr(timing.Decoder, "plain", engine("plain", 9000, 3000, 1000))
    monkeypatch.setattr(timing.Decoder, "speculative", engine("drafts", 8000, 500, 1500))
    row = by_batch(target, drafter, [[i] for i in range(6)], 3, 12, 3)
    assert row == {"batch": 3, "baseline_tok_s": 18.0, "speculative_tok_s": 36.0, "speedup": 2.0,
                   "engine": timing.PLAIN, "prompts": 6}
    assert calls == [("plain", [0, 2, 4], 3, 4), ("drafts", [0, 2, 4], 3, 4), ("plain", [0, 2, 4], 3, 12),
                     ("drafts", [0, 2, 4], 3, 12), ("drafts", [1, 3, 5], 3, 12), ("plain", [1, 3, 5], 3, 12)]


@pytest.mark.parametrize("prompts, size, expected", [
    (8, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]), (12, 4, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
    (16, 4, [[*range(0, 16, 2)], [*range(1, 16, 2)]]), (10, 4, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]),
    (7, 4, [[*range(7)]] * 2), (4, 4, [[*range(4)]] * 2), (3, 4, [[0, 1, 2, 0]] * 2), (2, 5, [[0, 1, 0, 1, 0]] * 2)])
def test_rounds_meet_every_prompt_in_whole_batches(prompts, size, expected):
    """Case 66: none is left out, whatever the order of the kinds in the file; too few are repeated."""
    assert [[p[0] for p in part] for part in rounds([[i] for i in range(prompts)], size)] == expected


def test_the_parts_of_a_cycle_are_of_prompts_from_the_whole_list(counting, monkeypatch):
    """Four of eight, evenly spaced, behind one that warms up."""
    target, drafter = counting
    seen = []
    monkeypatch.setattr(breakdown.Decoder, "speculative",
                        lambda self, prompts, *draft: seen.extend(prompts) or [Output()])
    assert breakdown.cycle(target, drafter, [[i] for i in range(8)], 3, 12)["cycles"] == 0
    assert [p[0] for p in seen] == [0, 0, 2, 4, 6]
