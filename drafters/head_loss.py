"""An output head whose loss never holds the logits of all positions.

Logits, loss and both gradients of the head's product are worked part by part in the forward pass, so that a part's
logits are gone before the next one's come (the scheme of Liger-Kernel's fused linear losses, Hsu et al. 2024).
Legend: N positions, H hidden, D draft vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Judge = Callable[[Tensor, slice], Tensor]
Rows = list[Tensor | slice]


def rows_of(which: Tensor | None, part: slice, heads: int) -> Rows:
    """The rows of a part that each head is for."""
    return [slice(None)] if which is None else [(which[part] == k).nonzero()[:, 0] for k in range(heads)]


def products(states: Tensor, weights: Sequence[Tensor], rows: Rows) -> Tensor:
    """Logits [n, D] of a part's states [n, H], each by its own head."""
    if len(rows) == 1 and isinstance(rows[0], slice):
        return F.linear(states, weights[0])
    parts = [F.linear(states[own], weight) for own, weight in zip(rows, weights)]
    return torch.cat(parts)[torch.cat(rows).argsort()]


class HeadLoss(torch.autograd.Function):
    """See `heads_loss`."""

    @staticmethod
    def forward(ctx, states, which, judge, parts, learning, *weights):
        learns, *trained = (learning and ctx.needs_input_grad[i] for i in (0, *range(5, 5 + len(weights))))
        total = states.new_zeros(()).float()
        d_states = torch.empty_like(states) if learns else None
        d_weights: list[Tensor | None] = [None] * len(weights)
        for part in parts:
            rows = rows_of(which, part, len(weights))
            logits = products(states[part], weights, rows).detach().requires_grad_(learns or any(trained))
            with torch.set_grad_enabled(learns or any(trained)):
                loss = judge(logits, part)
            total = total + loss.detach()
            if not (learns or any(trained)):
                continue
            d_logits, = torch.autograd.grad(loss, logits)
            for k, (own, weight) in enumerate(zip(rows, weights)):
                d_own = d_logits[own]
                if learns:
                    d_states[part][own] = (d_own @ weight.to(d_own.dtype)).to(states.dtype)
                if trained[k]:
                    product = (d_own.T @ states[part][own].to(d_own.dtype)).to(weight.dtype)
                    d_weights[k] = product if d_weights[k] is None else d_weights[k].add_(product)
        ctx.save_for_backward(d_states, *d_weights)
        return total

    @staticmethod
    def backward(ctx, gradient):
        d_states, *d_weights = (None if part is None else part * gradient.to(part.dtype) for part in ctx.saved_tensors)
        return d_states, *[None] * 4, *d_weights


def heads_loss(states: Tensor, judge: Judge, parts: Sequence[slice], weights: Sequence[Tensor],
               which: Tensor | None = None) -> Tensor:
    """The judge's sum over all `parts` of the N states, float32: judge(logits [n, D], part) is the loss of a part, a
    scalar, and may note what it sees. The same as judge(logits of all, everything), gradients included; it cannot be
    differentiated twice. weights: heads [D, H] each; which [N]: the one that each state goes through (None: all go
    through the only one)."""
    if len(parts) == 1:  # nothing is saved by working the gradients at once, and a pass over them is
        return judge(products(states, weights, rows_of(which, parts[0], len(weights))), parts[0])
    return HeadLoss.apply(states, which, judge, parts, torch.is_grad_enabled(), *weights)


class DraftHead(nn.Linear):
    """States [..., H] to draft logits [..., D], or straight to their loss."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__(hidden, vocabulary, bias=False)

    def forward(self, states: Tensor, judge: Judge | None = None, parts: Sequence[slice] = ()) -> Tensor:
        """Logits; with a `judge` its sum over all `parts` of the N states, as `heads_loss` gives it."""
        if judge is None:
            return super().forward(states)
        return heads_loss(states, judge, parts, [self.weight])
