"""Batched, refilled generation against transformers, one row at a time, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.generate import Answer, Generator, Request
from data.sampling import Sampling, draw, probabilities, row_generator
from drafters.cache import RowCache
from tests.tiny import V, left_to_the_collector, load_target, plain_model, write_target

ENDS = list(range(40, 46))  # several end ids, so that rows stop at different lengths
LIMIT = 12
GREEDY = Sampling()
WARM = Sampling(1.3, 20, 0.9)
MIXED = [WARM, Sampling(), Sampling(0.7), WARM, Sampling(1.0, 0, 0.8), WARM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return plain_model(folder)


def prompts(count: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(3, 40, (1 + 5 * i % 9,), generator=g).tolist() for i in range(count)]


def requests(count: int, sampling: Sampling = GREEDY, overrun: int = 0) -> list[Request]:
    return [Request(f"r{i}", p, sampling, overrun) for i, p in enumerate(prompts(count))]


@torch.inference_mode()
def slow(model, request: Request, ends: list[int], limit: int, seed: int = 0) -> Answer:
    """The obvious way: the whole sequence through the plain model for every token, no cache, no batch."""
    uniforms = torch.rand(limit, generator=row_generator(seed, request.id))
    tokens, finish = [], "length"
    while len(tokens) < limit and finish != "stop":
        logits = model(torch.tensor([request.prompt + tokens])).logits[:, -1]
        if request.sampling.greedy:
            token = int(logits.argmax())
        else:
            probs, order = probabilities(logits, request.sampling)[0].sort(descending=True, stable=True)
            token = int(order[draw(probs[None], uniforms[len(tokens)][None])])
        tokens.append(token)
        finish = "stop" if token in ends else "length"
    beyond = []
    while len(beyond) < request.overrun:
        beyond.append(int(model(torch.tensor([request.prompt + tokens + beyond])).logits[0, -1].argmax()))
    return Answer(request.id, request.prompt, tokens, finish, beyond)


def test_greedy_batch_equals_transformers_generate_row_by_row(target, reference):
    """Refilled batches give the tokens of transformers' own generate, the end token last (case 22)."""
    answers = Generator(target, LIMIT, 4, end_ids=ENDS).run(requests(14))
    for answer, prompt in zip(answers, prompts(14), strict=True):
        whole = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                                   max_new_tokens=LIMIT, eos_token_id=ENDS, pad_token_id=0)
        assert answer.tokens == whole[0, len(prompt):].tolist()
        assert (answer.finish == "stop") == (answer.tokens[-1] in ENDS)
        assert not set(answer.tokens[:-1]) & set(ENDS)
        assert answer.finish == "stop" or len(answer.tokens) == LIMIT
    assert {a.finish for a in answers} == {"stop", "length"}, "both ways to finish must occur"


def test_sampled_rows_equal_the_slow_reference(target, reference):
    """A sampled answer is the inverse-CDF draw of the full model's distribution with the row's own numbers."""
    asked = [Request(f"r{i}", p, s, 2) for i, (p, s) in enumerate(zip(prompts(6), MIXED))]
    answers = Generator(target, LIMIT, 3, seed=7, end_ids=ENDS).run(asked)
    assert answers == [slow(reference, r, ENDS, LIMIT, seed=7) for r in asked]


@pytest.mark.parametrize("common, batch", [(3, 3), (4, 3), (11, 3), (11, 9)])
def test_rows_that_begin_alike_equal_the_slow_reference(target, reference, common, batch):
    """A system message before every prompt is computed once (from four tokens on); freed rows, dummies and
    compaction leave it alone."""
    head = [(5 * i) % 37 + 3 for i in range(common)]
    asked = [Request(f"r{i}", head + [20 + i] + p, s, 2) for i, (p, s) in enumerate(zip(prompts(6), MIXED))]
    assert target.prefix([r.prompt for r in asked]).length == (common if common >= 4 else 0)
    answers = Generator(target, LIMIT, batch, seed=7, end_ids=ENDS).run(asked)
    assert answers == [slow(reference, r, ENDS, LIMIT, seed=7) for r in asked]


def test_prompts_that_are_all_alike_keep_a_token_of_their_own(target, reference):
    """One prompt sampled many times, as in self-synthesis: the last prompt token is each row's own."""
    asked = [Request(f"r{i}", list(range(3, 12)), WARM) for i in range(5)]
    assert target.prefix([r.prompt for r in asked]).length == 8
    answers = Generator(target, LIMIT, 3, seed=7, end_ids=ENDS).run(asked)
    assert answers == [slow(reference, r, ENDS, LIMIT, seed=7) for r in asked]


@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(6)), count=st.integers(1, 6), batch=st.integers(1, 7))
def test_sampled_rows_do_not_depend_on_their_neighbours(target, order, count, batch):
    """Alone, in any batch, of any size, in any order: a row's answer is the same."""
    asked = [Request(f"r{i}", p, s, i % 3) for i, (p, s) in enumerate(zip(prompts(6), MIXED))]
    alone = [Generator(target, 8, 1, seed=3, end_ids=ENDS).run([r])[0] for r in asked]
    chosen = order[:count]
    together = Generator(target, 8, batch, seed=3, end_ids=ENDS).run([asked[i] for i in chosen])
    assert together == [alone[i] for i in chosen]


def test_end_token_and_length_limit_at_every_place(target):
    """[.., END] is kept up to the end token for each of its places and each limit; the rest is dropped (case 22)."""
    request = requests(3)[2]
    free = Generator(target, 8, 1, end_ids=[]).run([request])[0]
    assert free.finish == "length" and len(free.tokens) == 8
    for end in set(free.tokens):
        place = free.tokens.index(end) + 1
        for limit in range(1, 9):
            got = Generator(target, limit, 1, end_ids=[end]).run([request])[0]
            assert got.tokens == free.tokens[: min(place, limit)]
            assert got.finish == ("stop" if place <= limit else "length")


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_overrun_goes_on_greedily_and_stays_apart(target, reference, sampling):
    """Overrun tokens follow the stop greedily and change nothing of the answer (case 22)."""
    asked = requests(7, sampling, overrun=3)
    answers = Generator(target, LIMIT, 4, end_ids=ENDS).run(asked)
    plain = Generator(target, LIMIT, 4, end_ids=ENDS).run(requests(7, sampling))
    assert [(a.tokens, a.finish) for a in answers] == [(a.tokens, a.finish) for a in plain]
    assert all(a.overrun == [] for a in plain)
    assert [a.overrun for a in answers] == [slow(reference, r, ENDS, LIMIT).overrun for r in asked]


def test_draining_batch_is_compacted_without_changing_answers(target, monkeypatch):
    """Towards the end finished rows leave the batch, and the others' answers stay the same."""
    kept, widths = [], []
    keep, forward = RowCache.keep, target.forward

    def spy_keep(self, rows):
        kept.append(rows.tolist())
        keep(self, rows)

    def spy_forward(ids, positions, cache=None, rows=None, logits=True):
        if logits:
            widths.append(len(ids))
        return forward(ids, positions, cache, rows, logits)

    asked = requests(2, WARM) + requests(6, WARM, overrun=20)[2:]  # rows 0 and 1 end first, so the others move
    alone = [Generator(target, 16, 1, end_ids=ENDS).run([r])[0] for r in asked]
    monkeypatch.setattr(RowCache, "keep", spy_keep)
    monkeypatch.setattr(target, "forward", spy_forward)
    assert Generator(target, 16, 6, end_ids=ENDS).run(asked) == alone
    assert kept and widths[0] == 6 and widths[-1] < 6
    by_length = sorted(asked, key=lambda r: len(r.prompt))[::-1]  # the order of the slots
    going_on = [slot for slot, r in enumerate(by_length) if r.overrun]
    assert kept[0] == going_on and going_on != [0, 1, 2, 3]


def test_prompts_of_a_pass_are_of_like_length(target, monkeypatch):
    """Prompts run by length, longest first, at most eight together in a small batch; answers keep their order."""
    shapes, forward = [], target.forward

    def spy(ids, positions, cache=None, rows=None, logits=True):
        if rows is not None:
            shapes.append(tuple(ids.shape))
        return forward(ids, positions, cache, rows, logits)

    asked = requests(14)
    monkeypatch.setattr(target, "forward", spy)
    answers = Generator(target, LIMIT, 14, end_ids=ENDS).run(asked)
    assert [a.id for a in answers] == [r.id for r in asked]
    assert [rows for rows, _ in shapes] == [8, 6]
    lengths = sorted((len(r.prompt) for r in asked), reverse=True)
    assert shapes[0][1] - shapes[1][1] == lengths[0] - lengths[8]


def test_progress_counts_every_token_and_no_request_is_no_work(target):
    """The progress numbers add up to the tokens made, overrun included; an empty list needs no target."""
    counted = []
    answers = Generator(target, LIMIT, 3, end_ids=ENDS).run(requests(5, WARM, overrun=2), counted.append)
    assert sum(counted) == sum(len(a.tokens) + len(a.overrun) for a in answers)
    assert Generator(target, LIMIT, 3).run([]) == []


def test_end_ids_default_to_the_targets_own(target):
    """Without explicit end ids the target's are used: its config and its tokenizer agree on <|im_end|> here."""
    assert Generator(target, 1, 1).end_ids == {2} and target.vocab_size == V


def test_caches_of_a_batch_are_gone_with_it(target):
    assert left_to_the_collector(lambda: Generator(target, LIMIT, 4).run(requests(6))) == []
