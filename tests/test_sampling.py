"""The distribution sampled from, and the draw itself, against transformers and exact arithmetic."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from data import sampling
from data.sampling import Sampling, draw, nucleus_floor, penalised, probabilities, row_generator
from recipes.errors import ConfigError

UNIT = 64  # probabilities are multiples of 1/64: sums are exact in float64, and p often falls on one


@st.composite
def exact_probabilities(draw_value) -> list[int]:
    """Weights that sum to 64, zeros and ties included: the distances of random cuts."""
    cuts = [0, *sorted(draw_value(st.lists(st.integers(0, UNIT), max_size=20))), UNIT]
    return [high - low for low, high in zip(cuts, cuts[1:])]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([5, 64, 700]), temperature=st.floats(0.2, 3.0),
       top_k=st.sampled_from([0, 1, 4, 50, 700]), top_p=st.floats(0.05, 1.0), min_p=st.sampled_from([0.0, 0.05, 0.6]),
       penalty=st.sampled_from([1.0, 1.3, 0.8]))
def test_probabilities_equal_transformers_warpers(seed, vocab, temperature, top_k, top_p, min_p, penalty):
    """Repetition penalty, temperature, top-k, top-p, min-p, exactly as transformers' own processors define them."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=g, dtype=torch.float64)
    ids = torch.randint(0, vocab, (3, 7), generator=g)
    seen = torch.zeros(3, vocab, dtype=torch.bool).scatter_(1, ids, True)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if penalty != 1.0:
        warpers.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(ids, logits.clone()).softmax(-1)
    settings = Sampling(temperature, top_k, top_p, min_p, penalty)
    torch.testing.assert_close(probabilities(penalised(logits, penalty, seen), settings), expected)


def test_probabilities_are_float32_for_half_precision_logits():
    """Half-precision logits are normalised in float32, greedy gives one-hot rows."""
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16)
    assert probabilities(logits, Sampling(1.0)).dtype == torch.float32
    assert probabilities(logits, Sampling()).tolist() == [[0.0, 1.0, 0.0]]


@settings(max_examples=120, deadline=None)
@given(exact_probabilities(), st.integers(1, UNIT - 1), st.integers(1, 24))
@example([8, 32, 16, 8], 32, 4)  # p falls exactly on a sum
@example([8, 32, 16, 8], 48, 1)  # the first candidates do not reach p
def test_nucleus_without_sorting_equals_the_sorted_one(weights, share, head):
    """Whatever number of candidates is tried first, the nucleus is the shortest sorted prefix that reaches p."""
    mass, floor = 0, 0
    for weight in sorted(weights, reverse=True):
        if mass >= share:
            break
        mass, floor = mass + weight, weight
    probs = torch.tensor([weights], dtype=torch.float64) / UNIT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "HEAD", head)
        patch.setattr(sampling, "WIDE", 2 * head)
        assert nucleus_floor(probs, share / UNIT).item() == floor / UNIT


@settings(max_examples=60, deadline=None)
@given(exact_probabilities())
def test_draw_gives_each_token_its_exact_share_of_the_uniforms(weights):
    """Over 64 evenly spread uniforms a token of probability w/64 is drawn exactly w times."""
    probs = (torch.tensor([weights], dtype=torch.float64) / UNIT).expand(UNIT, -1)
    picked = draw(probs, (torch.arange(UNIT, dtype=torch.float64) + 0.5) / UNIT)
    assert torch.bincount(picked, minlength=len(weights)).tolist() == weights
    assert picked.tolist() == sorted(picked.tolist())


@pytest.mark.parametrize("uniform, expected", [(0.0, 1), (0.25, 2), (1.0 - 2.0**-53, 2), (1.0, 2)])
def test_draw_never_returns_an_impossible_token(uniform, expected):
    """At both ends of [0, 1) and on a boundary a token of probability zero is never drawn."""
    probs = torch.tensor([[0.0, 0.25, 0.75, 0.0, 0.0]])
    assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_row_generator_depends_on_seed_and_id_only():
    """A row's random numbers are its own: same seed and id give the same, another seed or id gives others."""
    def numbers(seed: int, row: str) -> list[float]:
        return torch.rand(4, generator=row_generator(seed, row)).tolist()

    before = numbers(1, "a")
    torch.manual_seed(99)
    numbers(1, "b")
    assert numbers(1, "a") == before
    assert len({tuple(numbers(s, r)) for s, r in [(1, "a"), (1, "b"), (2, "a"), (11, "a"), (1, "1:a")]}) == 5


@pytest.mark.parametrize("values", [(-0.1, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.1)])
def test_settings_without_a_distribution_are_refused(values):
    """A setting that leaves no distribution (top_p 0 made every probability NaN) is an error that names it."""
    with pytest.raises(ConfigError, match="temperature = .*top_k = .*top_p = "):
        Sampling(*values)


@pytest.mark.parametrize("values", [{"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0.0}])
def test_processors_without_a_distribution_are_refused(values):
    with pytest.raises(ConfigError, match="min_p = .*repetition_penalty = "):
        Sampling(1.0, **values)


def test_sample_refuses_what_it_cannot_know():
    """A repetition penalty would be ignored where no earlier tokens are known."""
    with pytest.raises(ValueError, match="knows no earlier tokens"):
        sampling.sample(torch.zeros(1, 4), Sampling(1.0, repetition_penalty=1.2), torch.tensor([0.5]))


@pytest.mark.parametrize("head", [2, 8, 64])
@pytest.mark.parametrize("top_k, top_p, min_p", [(0, 1.0, 0.0), (0, 0.7, 0.0), (3, 1.0, 0.0), (3, 0.8, 0.0),
                                                 (20, 0.9, 0.0), (0, 0.9, 0.2)])
def test_sample_follows_probabilities(head, top_k, top_p, min_p, monkeypatch):
    """Over an even grid of uniforms each token is drawn in proportion to its exact probability, on both paths."""
    monkeypatch.setattr(sampling, "HEAD", head)
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(4)) * 2
    setting, n = Sampling(0.9, top_k, top_p, min_p), 20000
    tokens = sampling.sample(logits.expand(n, -1), setting, (torch.arange(n) + 0.5) / n)
    shares = torch.bincount(tokens, minlength=24) / n
    torch.testing.assert_close(shares, probabilities(logits, setting)[0], atol=2 / n, rtol=0)


def test_sample_of_a_row_does_not_depend_on_the_others(monkeypatch):
    """Rows that need the slow path and rows that do not keep their results beside each other."""
    monkeypatch.setattr(sampling, "HEAD", 4)
    logits = torch.stack([torch.zeros(30), torch.arange(30.0)])  # flat: slow path; peaked: fast path
    uniforms = torch.tensor([0.4, 0.6])
    both = sampling.sample(logits, Sampling(1.0, 0, 0.9), uniforms)
    alone = [sampling.sample(logits[i : i + 1], Sampling(1.0, 0, 0.9), uniforms[i : i + 1])[0] for i in range(2)]
    assert both.tolist() == [int(t) for t in alone]
