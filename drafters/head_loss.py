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


class HeadLoss(torch.autograd.Function):
    """See `DraftHead.forward`."""

    @staticmethod
    def forward(ctx, states, weight, judge, parts, learning):
        learns, trains_head = (learning and needed for needed in ctx.needs_input_grad[:2])
        total = states.new_zeros(()).float()
        d_states = torch.empty_like(states) if learns else None
        d_weight = None
        for part in parts:
            logits = F.linear(states[part], weight).detach().requires_grad_(learns or trains_head)
            with torch.set_grad_enabled(learns or trains_head):
                loss = judge(logits, part)
            total = total + loss.detach()
            if not (learns or trains_head):
                continue
            d_logits, = torch.autograd.grad(loss, logits)
            if learns:
                d_states[part] = (d_logits @ weight.to(d_logits.dtype)).to(states.dtype)
            if trains_head:
                product = (d_logits.T @ states[part].to(d_logits.dtype)).to(weight.dtype)
                d_weight = product if d_weight is None else d_weight.add_(product)
        ctx.save_for_backward(d_states, d_weight)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return *(None if part is None else part * gradient.to(part.dtype) for part in ctx.saved_tensors), *[None] * 3


class DraftHead(nn.Linear):
    """States [..., H] to draft logits [..., D], or straight to their loss."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__(hidden, vocabulary, bias=False)

    def forward(self, states: Tensor, judge: Judge | None = None, parts: Sequence[slice] = ()) -> Tensor:
        """Logits; with a `judge` its sum over all `parts` of the N states, float32: judge(logits [n, D], part) is the
        loss of a part, a scalar, and may note what it sees. The same as judge(logits of all, everything), gradients
        included; it cannot be differentiated twice."""
        if judge is None:
            return super().forward(states)
        if len(parts) == 1:  # nothing is saved by working the gradients at once, and a pass over them is
            return judge(super().forward(states), parts[0])
        return HeadLoss.apply(states, self.weight, judge, parts, torch.is_grad_enabled())
