"""Losses against numbers worked by hand and against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import losses
from drafters.eagle3 import Options
from drafters.registry import options_of
from recipes.errors import ConfigError

LOGITS = torch.tensor([[math.log(6.0), math.log(3.0), 0.0]], dtype=torch.float64)  # q = 0.6, 0.3, 0.1
TEACHER = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def true_float64(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def test_numbers_by_hand():
    """q = (0.6, 0.3, 0.1), p = (0.2, 0.3, 0.5); of p only 0.8 lies inside where acceptance is asked for."""
    assert losses.soft_cross_entropy(LOGITS, TEACHER).item() == pytest.approx(
        -0.2 * math.log(0.6) - 0.3 * math.log(0.3) - 0.5 * math.log(0.1))
    assert losses.reverse_kl(LOGITS, TEACHER).item() == pytest.approx(0.6 * math.log(3) - 0.1 * math.log(5))
    assert losses.acceptance(LOGITS, TEACHER).item() == pytest.approx(0.2 + 0.3 + 0.1)
    assert losses.acceptance(LOGITS, 0.8 * TEACHER).item() == pytest.approx(0.16 + 0.24 + 0.1)
    assert losses.total_variation(torch.tensor([0.6])).item() == pytest.approx(0.4)
    label = torch.tensor([1, -1])
    assert losses.label_share(LOGITS.expand(2, 3), label).tolist() == pytest.approx([0.3, 0.0])
    assert losses.hard_cross_entropy(LOGITS.expand(2, 3), label).tolist() == pytest.approx([-math.log(0.3), 0.0])


def test_blend_goes_from_divergence_to_acceptance():
    """lambda = exp(-3 alpha): all divergence where nothing is accepted, a twentieth of it where everything is."""
    found = losses.likelihood_blend(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.0]), 3.0)
    assert found.tolist() == pytest.approx([2.0, 2.0 * math.exp(-3.0)])


def test_blend_has_no_gradient_through_its_share():
    """The gradient of the acceptance is that of total variation alone, times 1 - lambda."""
    accepted = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    gradient, = torch.autograd.grad(losses.likelihood_blend(torch.tensor([7.0]), accepted, 3.0).sum(), accepted)
    assert gradient.item() == pytest.approx(-(1 - math.exp(-1.5)))


probabilities = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(
    lambda x: torch.tensor([x], dtype=torch.float64) / sum(x))


@settings(max_examples=60, deadline=None)
@given(p=probabilities, q=probabilities, mass=st.floats(0.1, 1.0))
def test_acceptance_is_one_minus_half_the_distance(p, q, mass):
    """sum min(p, q) = 1 - (sum |p - q| + the target's mass outside) / 2, in 0..1; divergences are least, and the
    reverse one 0, where the drafter is the renormalised teacher."""
    accepted = losses.acceptance(q.log(), mass * p)
    assert accepted.item() == pytest.approx(1 - ((mass * p - q).abs().sum().item() + 1 - mass) / 2)
    assert -1e-12 <= accepted.item() <= mass + 1e-12
    assert losses.soft_cross_entropy(q.log(), p) >= losses.soft_cross_entropy(p.log(), p) - 1e-9
    assert losses.reverse_kl(q.log(), p) >= -1e-9 and losses.reverse_kl(p.log(), p).abs() < 1e-9


def test_prefix_weights_by_hand():
    """A chain's step weighs the product of its earlier acceptances; chains of any length, in any order."""
    accepted = torch.tensor([0.5, 0.9, 0.25, 0.8, 0.7], requires_grad=True)
    found = losses.prefix_weights(accepted, torch.tensor([0, 1, 0, 0, 1]), torch.tensor([0, 0, 1, 2, 1]), 3)
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.125, 0.9]) and not found.requires_grad


def test_infinite_loss_is_refused():
    """KL(drafter || one token) is infinite: named with what to do."""
    with pytest.raises(ConfigError, match="reverse_kl is infinite by labels: token"):
        options_of("eagle3", {"loss": "reverse_kl", "labels": "token"})
    assert Options().loss == "kl"
