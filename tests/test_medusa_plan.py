"""What `make plan` says of Medusa heads, against the module and the operations that torch counts."""

import pytest
import torch
from test_plan import LLAMA_8B, recipe
from torch.utils.flop_counter import FlopCounterMode

from drafters.base import Batch
from drafters.medusa import Medusa, Options, Shape, cost
from eval import plan
from recipes import draft_cost
from recipes.draft_cost import MedusaSize
from recipes.errors import ConfigError
from recipes.loader import load_recipe

H, V, D, K = 32, 64, 48, 3


def drafter(**options) -> tuple[Medusa, MedusaSize]:
    made = Options(heads=K, draft_vocab_size=D, **options)
    module = Medusa(made, Shape(H, V, D, 6), torch.arange(D), torch.randn(V, H))
    size = MedusaSize(H, H, 1, 0, 0, 0, 0, D, V, train_head=made.projection == "own", count=K, blocks=made.num_layers)
    return module, size


@pytest.mark.parametrize("options", [{}, {"projection": "shared"}, {"num_layers": 3}])
def test_parameters_are_the_modules(options):
    """Case 62: all and trained parameters as the module allocates them, and what it borrows."""
    module, size = drafter(**options)
    assert size.parameters == size.trained == sum(p.numel() for p in module.parameters())
    assert size.borrowed == module.teacher_head.numel() and size.moved(9) == size.parameters  # each head once


@pytest.mark.parametrize("projection, factor", [("own", 6), ("shared", 4)])
def test_operations_are_those_that_torch_counts(projection, factor):
    """A turn of ten tokens behind four: blocks for nine positions of each head, projections where there is loss; the
    plan's figure is no smaller, the utilisation's, which counts what the loss needs, no larger."""
    module, size = drafter(projection=projection, labels="token")
    turns = torch.tensor([[0] * 4 + [1] * 10])
    batch = Batch(torch.randint(D, (1, 14)), turns, torch.zeros(1, 14, 0), torch.randn(1, 14, H))
    with FlopCounterMode(display=False) as counter:
        module(batch).loss_sum.backward()
    worked = [9.0, 8.0, 7.0]
    counted = counter.get_total_flops()
    assert counted == 4 * H * H * K * 9 + factor * H * D * 24
    assert draft_cost.worked([10.0], K) == worked
    assert 0.8 * counted < module.flops(14, worked) <= counted <= draft_cost.train_flops(size, 14, worked) < 2 * counted


def test_a_plan_of_heads(tmp_path):
    """Every stage has its figures; own projections cost memory and disk that shared ones do not."""
    plans = {}
    for projection in ("own", "shared"):
        (tmp_path / projection).mkdir()
        made = load_recipe(recipe(tmp_path / projection, LLAMA_8B, drafter={
            "kind": "medusa", "options": {"heads": 5, "projection": projection}}))
        plans[projection] = plan.make(made)
    own, shared = (plans[name]["drafter"]["parameters"] for name in ("own", "shared"))
    assert shared == 5 * (4096**2 + 4096) and own == shared + 5 * 4096 * 128256
    for stage in ("train", "export"):
        a, b = (plans[name]["stages"][stage] for name in ("own", "shared"))
        assert a["memory_bytes"][0] > b["memory_bytes"][0] and a["disk_bytes"][0] > b["disk_bytes"][0]
    assert all(stage["seconds"][0] > 0 for stage in plans["own"]["stages"].values())


def test_a_kind_without_a_cost_is_refused(tmp_path):
    made = load_recipe(recipe(tmp_path, LLAMA_8B, drafter={"kind": "lookup"}))
    with pytest.raises(ConfigError, match="its cost is not known yet; make plan knows eagle3, medusa"):
        plan.make(made)


def test_the_module_gives_its_own_cost():
    shape = plan.shape_of(LLAMA_8B, "here")
    size = cost(Options(heads=2, num_layers=2), shape, LLAMA_8B, 3)
    assert (size.hidden, size.taps, size.draft_vocab, size.count, size.blocks) == (4096, 3, 128256, 2, 2)
