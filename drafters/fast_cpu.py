"""Two exact reformulations that make models fast for few rows on a CPU (same mathematics, other rounding).

Measured in bench/; neither is used on a GPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPED = "drafthouse_grouped"
SKINNY_ROWS = 160  # above, the library's own product is as fast


class SkinnyLinear(nn.Linear):
    """nn.Linear that lets oneDNN multiply up to 160 rows by a weight packed once, at the first such call.

    The default product streams or rearranges the weight [out, in] several times in every call, which for few rows
    costs more than the arithmetic: verifying five tokens takes far longer than one. The copy doubles the memory.
    """

    packed: Tensor | None = None
    packed_from: tuple = (None, 0, 0)  # the weight, its address and its version

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        # An inference tensor keeps no version to tell a changed weight by.
        if not 1 <= rows <= SKINNY_ROWS or torch.is_grad_enabled() or self.weight.is_inference():
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.pack(), self.bias, "none", [], "")

    def pack(self) -> Tensor:
        """The weight in oneDNN's layout; laid out again where the weight has changed since."""
        weight = self.weight
        if self.packed_from[0] is not weight or self.packed_from[1:] != (weight.data_ptr(), weight._version):
            # 8: laid out for few rows; used for more it costs nothing that could be measured.
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
            self.packed_from = (weight, weight.data_ptr(), weight._version)
        return self.packed


def use_skinny_linear(model: nn.Module) -> None:
    """Turns every plain nn.Linear of a float32 model into a SkinnyLinear, weights untouched, where torch has
    oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = SkinnyLinear


def grouped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Grouped-query attention without repeating keys and values: the g heads of a group become g queries.

    query [B, nkv*g, q, hd], key and value [B, nkv, W, hd]; attention_mask [B, 1, q, W] or, folded
    beforehand, [B, 1, g*q, W]. Returns [B, q, nkv*g, hd] as transformers' attention functions do.
    """
    B, heads, q, hd = query.shape
    g = heads // key.shape[1]
    if attention_mask is None or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask.shape[2] != g * q:
        attention_mask = fold_mask(attention_mask, g)
    folded = query.reshape(B, heads // g, g * q, hd)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(B, heads, q, -1).transpose(1, 2).contiguous(), None


def fold_mask(mask: Tensor, g: int) -> Tensor:
    """[B, 1, q, W] -> [B, 1, g*q, W], the order of a query folded by `grouped_attention`."""
    B, _, q, W = mask.shape
    return mask[:, :, None].expand(B, 1, g, q, W).reshape(B, 1, g * q, W)


AttentionInterface.register(GROUPED, grouped_attention)
