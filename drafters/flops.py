"""Model FLOPs of training as arithmetic over parameter counts: what the loss needs, not what a machine spent on it.

A matrix of n parameters costs 2n FLOPs a position forward, 2n for the gradient of its input and 2n for its own.
Norms, embeddings, softmax and the products of queries with keys are left out, as is all that is done twice.
"""

from collections.abc import Sequence


def chain_flops(tokens: float, worked: Sequence[float], *, fuse: int, keys: int, step: int, head: int,
                teacher: int, train_head: bool) -> float:
    """FLOPs of a drafter that unrolls chains over fused target states.

    tokens: positions read; worked[k]: positions with loss at depth k. Parameters: `fuse` of the target states, `keys`
    of the key and value projections, `step` of what else a draft step applies, `head`, and the frozen `teacher` head,
    which sees every state once.
    """
    chains = sum(worked)
    return (4 * fuse * tokens  # its input is the target's: it needs no gradient
            + 6 * keys * (tokens + sum(worked[1:]))
            + 6 * step * chains
            + (6 if train_head else 4) * head * chains
            + 2 * teacher * (worked[0] if worked else 0))
