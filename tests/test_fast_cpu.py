"""The CPU's fast paths against the plain ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import repeat_kv

from drafters.fast_cpu import SKINNY_ROWS, SkinnyLinear, fold_mask, grouped_attention, use_skinny_linear


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_skinny_linear_equals_linear(bias, monkeypatch):
    """nn.Linear's result for any number of rows in any leading shape; the packed product is used up to its limit."""
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    skinny = SkinnyLinear(24, 40, bias=bias)
    skinny.load_state_dict(plain.state_dict())
    packs, pack = [], SkinnyLinear.pack
    monkeypatch.setattr(SkinnyLinear, "pack", lambda layer: packs.append(rows) or pack(layer))
    for rows in range(0, SKINNY_ROWS + 20):
        x = torch.randn(rows, 24)
        for shaped in (x, x[:, None], x[None]):
            ours = skinny(shaped)
            torch.testing.assert_close(ours, plain(shaped), rtol=1e-5, atol=1e-5)
            assert ours.is_contiguous()
    assert sorted(set(packs)) == list(range(1, SKINNY_ROWS + 1))


@torch.no_grad()
def test_a_changed_weight_is_packed_again():
    """Neither a weight loaded, nor one changed in place, nor one replaced later leaves the old product behind; the
    packed copy is no part of the state."""
    torch.manual_seed(0)
    skinny, x = SkinnyLinear(24, 40), torch.randn(3, 24)
    for change in (lambda: None, lambda: skinny.load_state_dict(nn.Linear(24, 40).state_dict()),
                   lambda: skinny.weight.mul_(2), lambda: setattr(skinny, "weight", nn.Parameter(torch.randn(40, 24)))):
        change()
        torch.testing.assert_close(skinny(x), x @ skinny.weight.t() + skinny.bias, rtol=1e-5, atol=1e-5)
        packed = skinny.packed
        skinny(x)
        assert skinny.packed is packed
    assert set(skinny.state_dict()) == {"weight", "bias"}


def test_a_weight_without_a_version_is_not_packed():
    """Weights made in inference mode cannot tell that they were changed: the plain product is taken."""
    torch.manual_seed(0)
    with torch.inference_mode():
        skinny, x = SkinnyLinear(24, 40), torch.randn(3, 24)
        skinny(x)
        skinny.weight.mul_(2)
        torch.testing.assert_close(skinny(x), x @ skinny.weight.t() + skinny.bias)
        assert skinny.packed is None


def test_skinny_linear_has_gradients():
    """With gradients on, the plain product is taken: training sees no other path."""
    torch.manual_seed(0)
    skinny = SkinnyLinear(8, 6)
    x = torch.randn(4, 8, requires_grad=True)
    skinny(x).square().sum().backward()
    expected = (2 * (x @ skinny.weight.t() + skinny.bias)).detach()
    torch.testing.assert_close(skinny.weight.grad, expected.t() @ x.detach())
    torch.testing.assert_close(x.grad, expected @ skinny.weight.detach())


def test_only_plain_float32_layers_are_changed():
    """Weights stay the same objects; subclasses, other precisions and other modules stay as they are."""
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4).double(), nn.LayerNorm(4))
    weight = model[0].weight
    use_skinny_linear(model)
    assert [type(m) for m in model] == [SkinnyLinear, Own, nn.Linear, nn.LayerNorm]
    assert model[0].weight is weight


def test_without_onednn_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4))
    use_skinny_linear(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_grouped_attention_equals_repeated_keys(groups, queries, scaling):
    """Grouped-query attention equals repeat_kv + SDPA, with the mask folded before or not."""
    g = torch.Generator().manual_seed(groups * 10 + queries)
    B, nkv, W, hd = 3, 2, 7, 4
    query, key, value = (torch.randn(B, n, rows, hd, generator=g, dtype=torch.float64)
                         for n, rows in ((nkv * groups, queries), (nkv, W), (nkv, W)))
    last = torch.randint(0, W, (B, 1, queries, 1), generator=g)  # each row and query sees columns of its own
    mask = torch.zeros(B, 1, queries, W, dtype=torch.float64).masked_fill_(
        torch.arange(W) > last, torch.finfo(torch.float64).min)
    expected = nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, groups), repeat_kv(value, groups), attn_mask=mask, scale=scaling).transpose(1, 2)
    for given in (mask, fold_mask(mask, groups)):
        ours, weights = grouped_attention(None, query, key, value, given, scaling=scaling)
        assert weights is None and ours.shape == (B, queries, nkv * groups, hd) and ours.is_contiguous()
        torch.testing.assert_close(ours, expected)


def test_without_a_mask_transformers_own_attention_is_used():
    """No mask means causal: left to transformers, which knows the module."""
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2)
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    ours = grouped_attention(module, query, key, value, None)[0]
    torch.testing.assert_close(ours, sdpa_attention_forward(module, query, key, value, None)[0])
