"""What `make plan` says of Medusa heads, against the module and the operations that torch counts."""

import re
from pathlib import Path

import pytest
import torch
from test_plan import LLAMA_8B, recipe
from torch.utils.flop_counter import FlopCounterMode

from drafters.base import Batch
from drafters.export.layouts import LAYOUTS, Served
from drafters.medusa import Medusa, Options, Shape, cost
from eval import plan
from recipes import draft_cost
from recipes.draft_cost import MedusaSize
from recipes.errors import ConfigError
from recipes.loader import load_recipe

H, V, D, K = 32, 64, 48, 3
ROOT = Path(__file__).resolve().parent.parent


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
    assert size.head_gradients == sum(head.weight.numel() for head in module.lm_heads)


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


def test_the_shipped_recipe_and_the_documented_command_fit_together():
    """Nothing that the recipe drafts, in validation, evaluation or `make roi ARGS=measure`, is longer than its heads,
    nor than those that docs/drafters.md trains."""
    made = load_recipe(ROOT / "recipes/smollm2-135m/medusa.yaml")
    longest = max(made.train.validation_draft_length, made.eval.draft_length, *made.roi.draft_lengths,
                  *made.roi.held_out)
    said = re.findall(r"--drafter\.options\.heads (\d+)", (ROOT / "docs/drafters.md").read_text())
    assert said and longest <= made.drafter.options["heads"] and all(longest <= int(heads) for heads in said)


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("layout, full", [("medusa", False), ("medusa", True), ("medusa-original", True)])
def test_an_export_is_as_large_as_planned(layout, full, projection):
    """The projection of shared heads is in the files too: once in vLLM's layout, K times in the original one."""
    chosen = {"projection": projection} | ({"draft_vocab_size": 0} if full else {})
    made, rows = Options(**{"heads": K, "draft_vocab_size": D} | chosen), V if full else D
    module = Medusa(made, Shape(H, V, rows, 6), torch.arange(rows), torch.randn(V, H))
    size = MedusaSize(H, H, 1, 0, 0, 0, 0, rows, V, train_head=projection == "own", count=K)
    meta = {**module.meta(), "format": "drafthouse.drafter/1", "target": {"model": "x", "fingerprint": {}}}
    served = Served([], {}, head=torch.randn(V, H))
    tensors = LAYOUTS[layout].tensors(module.tensors(), meta, "float32", served)
    assert size.exported(layout) == sum(t.numel() for name, t in tensors.items() if name != "token_map")


def test_a_plan_counts_the_projections_of_its_layouts(tmp_path):
    """Issue 8: K copies of a shared projection are K times the disk of one, and training holds K heads' gradients."""
    def stages_of(name: str, **changes) -> dict:
        (tmp_path / name).mkdir()
        return plan.make(load_recipe(recipe(tmp_path / name, LLAMA_8B, **changes)))["stages"]

    shared = {"kind": "medusa", "options": {"heads": 5, "projection": "shared"}}
    one, many = (stages_of(layout, drafter=shared, export={"formats": [layout]})["export"]["disk_bytes"][0]
                 for layout in ("medusa", "medusa-original"))
    assert many - one == 4 * 4 * 4096 * 128256
    few, all_five = (draft_cost.activation_bytes(MedusaSize(H, H, 1, 0, 0, 0, 0, D, V, count=count), 1, 14, [9.0], 4)
                     for count in (1, 5))
    assert all_five - few == 4 * 4 * H * D


def test_the_acceptance_that_is_assumed_is_the_kinds(tmp_path):
    """Medusa's published figure bounds its plan, EAGLE-3's its own; the reason names it."""
    for kind, best, word in (("medusa", 2.6, "Medusa on Vicuna-13B"), ("eagle3", 3.0, "EAGLE-3 chain")):
        (tmp_path / kind).mkdir()
        found = plan.make(load_recipe(recipe(tmp_path / kind, LLAMA_8B, drafter={"kind": kind})))
        [accepted] = [one for one in found["assumptions"] if one["name"] == "plan.acceptance"]
        assert accepted["best"] == best and word in accepted["why"]


def test_a_kind_without_a_cost_is_refused(tmp_path):
    made = load_recipe(recipe(tmp_path, LLAMA_8B, drafter={"kind": "lookup"}))
    with pytest.raises(ConfigError, match="its cost is not known yet; make plan knows eagle3, parallel, medusa"):
        plan.make(made)


def test_the_module_gives_its_own_cost():
    shape = plan.shape_of(LLAMA_8B, "here")
    size = cost(Options(heads=2, num_layers=2), shape, LLAMA_8B, 3)
    assert (size.hidden, size.taps, size.draft_vocab, size.count, size.blocks) == (4096, 3, 128256, 2, 2)
