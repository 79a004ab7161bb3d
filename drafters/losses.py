"""Losses of drafters as pure functions. Legend: N positions, D draft vocabulary."""

from torch import Tensor


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy against the teacher restricted to the draft vocabulary and renormalised: [N].

    logits [N, D] (unnormalised, computed in float32), teacher [N, D] its float32 probabilities. Equals
    KL(teacher || drafter) up to the teacher's entropy, which has no gradient. EAGLE-3 (Li et al. 2025, section 3).
    """
    logits = logits.float()
    return logits.logsumexp(-1) - (teacher * logits).sum(-1)


def step_weights(depth: int, decay: float) -> list[float]:
    """Weight of each unrolled step: decay^k, 0.8 in the paper."""
    return [decay**k for k in range(depth)]


def feature_distance(state: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of [N, H] states relative to the teacher's squared length: [N], 0 where equal.

    A dense signal where traces are few: EAGLE (Li et al. 2024, section 4.2) regresses the target's states too.
    """
    state, teacher = state.float(), teacher.float()
    return (state - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-6)
