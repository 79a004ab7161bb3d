"""The decoding loop against plain decoding and transformers, on real tiny targets and on scripted ones."""

import pytest
import torch
from fakes import RuleDrafter, RuleTarget, counting_drafter, counting_target, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tiny import LAYERS, V, left_to_the_collector, load_target, plain_model, write_target

from data.sampling import Sampling
from drafters.registry import entry, options_of
from eval import decode
from eval.decode import Decoder, Output
from eval.metrics import Acceptance

PROMPTS = [[3, 9, 14, 20], [7], [30, 31, 32, 33, 34, 35, 36, 37, 38], [11, 12]]
LIMIT, ENDS = 17, [40, 41, 42]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(target in float64, plain answers by transformers' own generate)"""
    folder = write_target(tmp_path_factory.mktemp("target"))
    model = plain_model(folder)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False,
                             eos_token_id=ENDS, pad_token_id=0)
        answers.append(out[0, len(prompt):].tolist())
    return load_target(folder, "float64", LAYERS), answers


def finish(tokens: list[int]) -> str:
    return "stop" if tokens[-1] in ENDS else "length"


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
def test_greedy_equals_plain_and_transformers(world, K):
    """Case 59: a real drafter changes no token, alone and in a ragged batch, for every draft length."""
    target, answers = world
    counts = {i: 1 for i in range(3, 60)}
    options = options_of("eagle3", {"draft_vocab_size": 40})
    drafter = entry("eagle3").code.build(options, target, counts, seed=0).double().eval()
    decoder = Decoder(target, LIMIT, end_ids=ENDS)
    assert [o.tokens for o in decoder.plain(PROMPTS)] == answers
    batch = decoder.speculative(PROMPTS, drafter, K)
    alone = [decoder.speculative([p], drafter, K)[0] for p in PROMPTS]
    for out in (batch, alone):
        assert [o.tokens for o in out] == answers
        assert [o.finish for o in out] == [finish(a) for a in answers]
    assert [o.drafts for o in batch] == [o.drafts for o in alone]


def test_prompts_that_begin_alike_decode_as_alone(world):
    """A shared system message is run once: texts and drafts are those of each prompt alone, with and without drafts."""
    target, _ = world
    head = [(5 * i) % 37 + 3 for i in range(9)]
    prompts = [head + p for p in PROMPTS]
    options = options_of("eagle3", {"draft_vocab_size": 40})
    drafter = entry("eagle3").code.build(options, target, {i: 1 for i in range(3, 60)}, seed=0).double().eval()
    decoder = Decoder(target, LIMIT, end_ids=ENDS)
    assert target.prefix(prompts).length == 9
    batch = decoder.speculative(prompts, drafter, 3)
    alone = [decoder.speculative([p], drafter, 3)[0] for p in prompts]
    assert [(o.tokens, o.drafts) for o in batch] == [(o.tokens, o.drafts) for o in alone]
    assert [o.tokens for o in decoder.plain(prompts)] == [o.tokens for o in batch]


@settings(max_examples=12, deadline=None)
@given(K=st.integers(1, 5), seed=st.integers(0, 10**6), order=st.permutations(range(4)))
def test_every_pattern_of_acceptance_leaves_the_text(world, K, seed, order):
    """Case 59: drafts that are right and wrong at random places, with rows that leave at different times."""
    target, answers = world
    prompts, known = [PROMPTS[i] for i in order], [answers[i] for i in order]
    wrong = (torch.rand(4, LIMIT + K + 2, generator=torch.Generator().manual_seed(seed)) < 0.3).tolist()
    drafter = oracle(prompts, known, V, lambda row, place: wrong[row][place])
    out = Decoder(target, LIMIT, end_ids=ENDS).speculative(prompts, drafter, K)
    for row, o in enumerate(out):
        assert o.tokens == known[row] and o.finish == finish(known[row])
        place, lengths = 1, []  # the first token is the prefill's
        while place < len(known[row]):
            n = 0
            while n < K and place + n < len(known[row]) and not wrong[row][place + n]:
                n += 1
            lengths.append(n)
            place += n + 1
        assert [n for _, n in o.drafts] == lengths and o.passes == len(lengths)
        assert sum(n for _, n in o.times) == len(o.tokens)


def scripted(script: list[int]) -> RuleTarget:
    """Gives script[i] as the i-th token after a prompt of two, provided that everything before it was as scripted."""
    whole = torch.tensor([1, 2, *script, *[0] * 20])

    def rule(seen, positions):
        for b in range(len(seen)):
            start = int(positions[b, 0])
            assert torch.equal(seen[b, :start], whole[:start])
        return torch.nn.functional.one_hot(whole[positions + 1], 10).double()

    return RuleTarget(rule, [9])


@pytest.mark.parametrize("end", [None, *range(8)])
@pytest.mark.parametrize("limit", range(1, 9))
def test_end_token_inside_an_accepted_block(end, limit):
    """Case 22: wherever END and the limit fall in fully accepted blocks, text, reason and counts equal plain ones."""
    script = [9 if i == end else 3 + i % 5 for i in range(12)]
    decoder = Decoder(scripted(script), limit)
    kept = script[:limit] if end is None or end >= limit else script[: end + 1]
    plain = decoder.plain([[1, 2]])[0]
    assert plain.tokens == kept and plain.finish == ("stop" if kept[-1] == 9 else "length")
    for K in (1, 2, 4):
        out = decoder.speculative([[1, 2]], oracle([[1, 2]], [script], 10), K)[0]
        assert out.tokens == kept and out.finish == plain.finish
        ran = -(-(len(kept) - 1) // (K + 1))
        assert out.acceptance == Acceptance(K, ran, [ran] * K) and out.passes == ran  # whole, before trimming


def test_block_by_hand():
    """Case 22: block [a, b, END, x, y], all accepted, gives [a, b, END]; at a limit of 3 the reason is still stop."""
    decoder = Decoder(scripted([3, 4, 5, 9, 6, 7, 8]), 20)
    drafter = oracle([[1, 2]], [[3, 4, 5, 9, 6, 7, 8]], 10)
    out = decoder.speculative([[1, 2]], drafter, 4)[0]
    assert (out.tokens, out.finish, out.drafts) == ([3, 4, 5, 9], "stop", [(3, 4)])
    decoder.max_tokens = 4
    assert decoder.speculative([[1, 2]], drafter, 4)[0].finish == "stop"
    decoder.max_tokens = 3
    limited = decoder.speculative([[1, 2]], drafter, 4)[0]
    assert (limited.tokens, limited.finish) == ([3, 4, 5], "length")


def test_take_by_hand():
    """Case 22: an end token at the limit is a stop; what follows either never shows."""
    for tokens, limit, kept, reason in (([4, 9, 5], 5, [4, 9], "stop"), ([4, 9, 5], 2, [4, 9], "stop"),
                                        ([4, 5, 9], 2, [4, 5], "length"), ([4, 5], 5, [4, 5], "")):
        out = Output()
        assert out.take(tokens, {9}, limit, 1.0) == bool(reason)
        assert (out.tokens, out.finish, out.times) == (kept, reason, [(1.0, len(kept))])


@pytest.mark.parametrize("K", [0, 2])
def test_the_clock_is_read_when_the_tokens_are(monkeypatch, K):
    """A tensor's list waits for the device, so that what is launched before has run: tokens appear behind it, in the
    prefill, a plain step and a speculative one."""
    events, plain = [], {"read": torch.Tensor.tolist, "clock": decode.time.perf_counter, "take": Output.take}

    def noted(name: str):
        return lambda *args: events.append(name) or plain[name](*args)

    decoder, drafter = Decoder(scripted([3, 4, 5, 6, 7]), 5), oracle([[1, 2]], [[3, 4, 5, 6, 7]], 10)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", noted("read"))
        patch.setattr(decode.time, "perf_counter", noted("clock"))
        patch.setattr(Output, "take", noted("take"))
        decoder.speculative([[1, 2]], drafter, K) if K else decoder.plain([[1, 2]])
    takes = [i for i, event in enumerate(events) if event == "take"]
    assert len(takes) == (3 if K else 5)
    assert all(events[i - 2 : i] == ["read", "clock"] for i in takes)


def test_rejections_and_contexts_by_hand():
    """Drafts start after each rejection; context and rejected target token are those of the loop's place."""
    script = [3, 4, 5, 6, 7, 8, 3, 4]
    drafter = oracle([[1, 2]], [script], 10, wrong=lambda row, place: place in (2, 3))
    out = Decoder(scripted(script), 8).speculative([[1, 2]], drafter, 3)[0]
    # 3 | draft 4, then 5 is wrong | draft fails at 6 | 7 8 3 +4
    assert out.drafts == [(3, 1), (5, 0), (6, 3)] and out.rejected == [5, 6] and out.passes == 3
    assert out.acceptance == Acceptance(3, 3, [2, 1, 1])


def test_proposals_start_exactly_where_the_loss_is():
    """Case 31: with every draft rejected, the loop predicts from the last prompt position to the one before last."""
    script = [3, 4, 5, 6, 9]
    drafter = oracle([[1, 2]], [script], 10, wrong=lambda row, place: True)
    Decoder(scripted(script), 20).speculative([[1, 2]], drafter, 2)
    assert drafter.starts == [[1], [2], [3], [4]]  # of 1 2 | 3 4 5 6 9


@pytest.mark.parametrize("K", [1, 3, 5])
def test_perfect_drafter_of_a_rule(K):
    """Case 09: next = current + 1 mod V with a drafter that knows it: mean length K + 1, rate 1."""
    target = RuleTarget(lambda seen, positions: torch.nn.functional.one_hot(
        (seen.gather(1, positions) + 1) % 16, 16).double())
    drafter = oracle([[15], [3]], [[i % 16 for i in range(50)], [(4 + i) % 16 for i in range(50)]], 16)
    for out in Decoder(target, 1 + 4 * (K + 1)).speculative([[15], [3]], drafter, K):
        assert out.acceptance.mean_length == K + 1 and out.acceptance.rate == 1.0 and out.passes == 4


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return counting_target(tmp_path_factory.mktemp("counting"), V)


def test_perfect_eagle3(counting):
    """Cases 09, 12: weights that are perfect by construction score K + 1 in the loop; one id off, they score 1."""
    right, wrong = (counting_drafter(counting, list(range(V)), ahead) for ahead in (2, 3))
    decoder = Decoder(counting, 21, end_ids=[])
    for out in decoder.speculative([[5, 6], [62, 63, 0]], right, 4):
        assert out.acceptance == Acceptance(4, 4, [4, 4, 4, 4])
    assert decoder.speculative([[5, 6]], wrong, 4)[0].acceptance.mean_length == 1.0


def test_a_token_outside_the_draft_vocabulary_is_a_miss(counting):
    """Eagle3.md step 6: acceptance is measured against the full vocabulary."""
    drafter = counting_drafter(counting, [i for i in range(V) if i != 10])
    out = Decoder(counting, 9, end_ids=[]).speculative([[3, 4]], drafter, 3)[0]
    # prefill 5 | 6 7 8 +9 | miss at 10, +10 | 11 12 13, the rest is cut
    assert out.tokens == list(range(5, 14)) and out.rejected == [10]
    assert out.acceptance == Acceptance(3, 3, [2, 2, 2])


P = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.55, 0.25, 0.1, 0.1], [0.05, 0.6, 0.05, 0.3], [0.25, 0.25, 0.4, 0.1]],
                 dtype=torch.float64)
DRAFT = torch.tensor([0.4, 0.1, 0.1, 0.4], dtype=torch.float64)


@pytest.mark.parametrize("sampled", [True, False, None])
def test_sampled_text_follows_the_target(sampled):
    """The joint of the first three tokens of 4000 answers passes chi-square against the exact one; None: plain."""
    target = RuleTarget(lambda seen, positions: P.log()[seen.gather(1, positions)])
    decoder = Decoder(target, 3, Sampling(temperature=1.0), seed=7)
    prompts = [[2]] * 4000
    if sampled is None:
        out = decoder.plain(prompts)
    else:
        out = decoder.speculative(prompts, RuleDrafter(lambda row, last, step: DRAFT), 2, sampled)
        assert 0 < sum((o.acceptance for o in out), Acceptance(2)).rate < 1
    exact = P[2][:, None, None] * P[:, :, None] * P[None]  # [x1, x2, x3]
    seen = torch.tensor([o.tokens for o in out]) @ torch.tensor([16, 4, 1])
    counts = torch.bincount(seen, minlength=64).double()
    assert chisquare(counts.numpy(), (exact.flatten() * 4000).numpy()).pvalue > 1e-3


def test_sampled_text_depends_on_the_seed_only():
    """The same seed gives the same text, another one gives another."""
    target = RuleTarget(lambda seen, positions: P.log()[seen.gather(1, positions)])

    def text(seed: int) -> list[list[int]]:
        decoder = Decoder(target, 10, Sampling(temperature=1.0), seed=seed)
        return [o.tokens for o in decoder.speculative([[2]] * 3, RuleDrafter(lambda *_: DRAFT), 2, True)]

    assert text(1) == text(1) != text(2)


def test_caches_of_target_and_drafter_are_gone_with_the_answers(world):
    target, _ = world
    drafter = entry("eagle3").code.build(options_of("eagle3", {"draft_vocab_size": 40}), target,
                                         {i: 1 for i in range(3, 60)}, seed=0).double().eval()
    decoder = Decoder(target, LIMIT, end_ids=ENDS)
    assert left_to_the_collector(lambda: decoder.run(PROMPTS, drafter, 3)) == []
