"""Attention of the unrolled training steps: each chain sees step-0 keys up to its start and its own later keys.

Worked in parts of consecutive chains, over the columns that any chain of the part sees, forwards and backwards; only
the outputs and their log-sum-exps are kept between the two. So memory grows with the chains and not with chains times
sequence, and columns ahead of a part, or of other packed conversations, cost nothing. The recurrences are those of
FlashAttention (Dao et al. 2022, appendix B).
Legend: B rows, P chains, S sequence, W columns of a part, J own keys of a chain, nkv key/value heads, g query heads a
group, hd head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Chains of a part: enough for the products, few enough that a CPU's cache holds their scores. A GPU waits for Python
# between small parts.
CHAINS = {"cpu": 128, "cuda": 1024}


@dataclass(frozen=True)
class Part:
    """Chains first..last-1 of a row, and the columns that they see between them."""

    row: int
    first: int
    last: int
    left: int
    right: int


def parts_of(starts: Tensor, at: Tensor, chains: int | None = None) -> list[Part]:
    """Parts of at most `chains` neighbours (None: what suits the device). starts, at [B, P]: a chain sees the columns
    starts..at of its row."""
    chains = chains or CHAINS[at.device.type]
    found = []
    for row, (lefts, rights) in enumerate(zip(starts.tolist(), at.tolist())):
        for first in range(0, len(lefts), chains):
            last = min(first + chains, len(lefts))
            found.append(Part(row, first, last, min(lefts[first:last]), max(rights[first:last]) + 1))
    return found


class ChainAttention(torch.autograd.Function):
    """See `chain_attention`."""

    @staticmethod
    def forward(ctx, queries, keys, values, own_keys, own_values, starts, at, parts):
        out = torch.empty_like(queries)
        total = queries.new_empty(queries.shape[:-1]).float()  # log-sum-exp [B, nkv, g, P]
        for part in parts:
            scores, own, q = scored(part, queries, keys, own_keys, starts, at)
            peak = scores.amax(-1)
            peak = torch.maximum(peak, own.amax(-1)) if own.shape[-1] else peak
            sums = scores.sub_(peak[..., None]).exp_().sum(-1) + own.sub_(peak[..., None]).exp_().sum(-1)
            mixed = (scores.to(q.dtype).flatten(1, 2) @ values[part.row, :, part.left : part.right]).unflatten(
                1, q.shape[1:3])
            mixed = mixed + (own.to(q.dtype)[..., None] * laid_out(own_values, part)).sum(-2)
            row, chains = part.row, slice(part.first, part.last)
            out[row, :, :, chains] = (mixed / sums[..., None]).to(out.dtype)
            total[row, :, :, chains] = sums.log() + peak
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, starts, at, out, total)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx, gradient):
        queries, keys, values, own_keys, own_values, starts, at, out, total = ctx.saved_tensors
        d_queries, d_own_keys, d_own_values = map(torch.empty_like, (queries, own_keys, own_values))
        d_keys, d_values = (torch.zeros_like(x).float() for x in (keys, values))
        for part in ctx.parts:
            row, chains, columns = part.row, slice(part.first, part.last), slice(part.left, part.right)
            scores, own, q = scored(part, queries, keys, own_keys, starts, at)
            d_out = gradient[row, :, :, chains]  # [nkv, g, p, hd]
            level = total[row, :, :, chains, None]
            weights, own = scores.sub_(level).exp_(), own.sub_(level).exp_()
            share = (d_out.float() * out[row, :, :, chains].float()).sum(-1, keepdim=True)
            flat = d_out.flatten(1, 2)  # [nkv, g*p, hd]
            d_values[row, :, columns] += (weights.to(q.dtype).flatten(1, 2).transpose(1, 2) @ flat).float()
            d_weights = (flat @ values[row, :, columns].transpose(1, 2)).unflatten(1, q.shape[1:3])
            d_scores = weights.mul_(d_weights - share).to(q.dtype).flatten(1, 2)
            d_keys[row, :, columns] += (d_scores.transpose(1, 2) @ q.flatten(1, 2)).float()
            d_q = (d_scores @ keys[row, :, columns]).unflatten(1, q.shape[1:3])
            own_k, own_v = laid_out(own_keys, part), laid_out(own_values, part)
            d_own = (own * ((d_out[..., None, :] * own_v).sum(-1) - share)).to(q.dtype)[..., None]
            d_queries[row, :, :, chains] = d_q + (d_own * own_k).sum(-2)
            d_own_keys[:, row, :, chains] = (d_own * q[..., None, :]).sum(1).permute(2, 0, 1, 3)
            d_own_values[:, row, :, chains] = (own.to(q.dtype)[..., None] * d_out[..., None, :]).sum(1).permute(
                2, 0, 1, 3)
        return d_queries, d_keys.to(keys.dtype), d_values.to(values.dtype), d_own_keys, d_own_values, None, None, None


def laid_out(own: Tensor, part: Part) -> Tensor:
    """Own keys or values [J, B, nkv, P, hd] of a part's chains: [nkv, 1, p, J, hd]."""
    return own[:, part.row, :, part.first : part.last].permute(1, 2, 0, 3)[:, None]


def scored(part: Part, queries: Tensor, keys: Tensor, own_keys: Tensor, starts: Tensor, at: Tensor
           ) -> tuple[Tensor, Tensor, Tensor]:
    """float32 scores of a part over its columns [nkv, g, p, W], hidden ones -inf, over own keys [nkv, g, p, J], and
    its queries [nkv, g, p, hd]."""
    row, chains = part.row, slice(part.first, part.last)
    q = queries[row, :, :, chains]
    scores = (q.flatten(1, 2) @ keys[row, :, part.left : part.right].transpose(1, 2)).unflatten(1, q.shape[1:3]).float()
    columns = torch.arange(part.left, part.right, device=at.device)
    hidden = (columns > at[row, chains, None]) | (columns < starts[row, chains, None])  # [p, W]
    own = (q[..., None, :] * laid_out(own_keys, part)).sum(-1).float()
    return scores.masked_fill_(hidden, -torch.inf), own, q


def chain_attention(queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor,
                    starts: Tensor, at: Tensor, parts: list[Part]) -> Tensor:
    """Softmax attention of P chains: [B, nkv, g, P, hd], the queries' shape.

    queries: scaled already; keys, values [B, nkv, S, hd], of which a chain sees the columns starts..at [B, P];
    own_keys, own_values [J, B, nkv, P, hd], of which each chain sees its own; `parts`: parts_of(starts, at). Scores,
    sums and the gradients of keys and values are float32, products have the operands' dtype.
    """
    return ChainAttention.apply(queries, keys, values, own_keys, own_values, starts, at, parts)
