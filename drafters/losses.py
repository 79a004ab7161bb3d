"""Losses of drafters as pure functions, each a value a position. Legend: N positions, D draft vocabulary.

logits [N, D] are the drafter's, unnormalised; everything is computed in float32. `teacher` [N, D] is the target's
distribution over the draft vocabulary: renormalised to 1 in the divergences, which compare two distributions over the
same tokens; not so in what speaks of acceptance, where the target's mass outside is never accepted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy against the renormalised teacher: [N].

    Equals KL(teacher || drafter) up to the teacher's entropy, which has no gradient. EAGLE-3 (Li et al. 2025, section
    3).
    """
    logits = logits.float()
    return logits.logsumexp(-1) - (teacher * logits).sum(-1)


def hard_cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy against one token, an index into D [N]; 0 where it is negative: a token outside of D."""
    return F.cross_entropy(logits.float(), label, reduction="none", ignore_index=-1)


def reverse_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(drafter || renormalised teacher): [N]. Seeks a mode where soft_cross_entropy covers all (Gu et al. 2023,
    MiniLLM, section 2). The teacher is positive everywhere."""
    log_q = logits.float().log_softmax(-1)
    return (log_q.exp() * (log_q - teacher.log())).sum(-1)


def acceptance(logits: Tensor, teacher: Tensor) -> Tensor:
    """Chance that a token drawn from the drafter is accepted: sum of min(p, q), [N] (Leviathan et al. 2023, theorem
    3.5). `teacher` is not renormalised; for a single label see `label_share`."""
    return torch.minimum(teacher, logits.float().softmax(-1)).sum(-1)


def label_share(logits: Tensor, label: Tensor) -> Tensor:
    """The drafter's probability of one token, an index into D [N]: `acceptance` by a target that always gives it. 0
    where it is negative."""
    q = logits.float().softmax(-1).gather(-1, label.clamp_min(0)[:, None])[:, 0]
    return torch.where(label >= 0, q, torch.zeros_like(q))


def total_variation(accepted: Tensor) -> Tensor:
    """Total variation distance of target and drafter over the full vocabulary, from `acceptance` or `label_share`."""
    return 1 - accepted


def likelihood_blend(divergence: Tensor, accepted: Tensor, eta: float) -> Tensor:
    """Per position lambda * divergence + (1 - lambda) * total variation with lambda = exp(-eta * acceptance), which has
    no gradient: the divergence leads where little is accepted, acceptance itself where much is (Samarin et al. 2026,
    LK losses)."""
    share = (-eta * accepted.detach()).exp()
    return share * divergence + (1 - share) * total_variation(accepted)


def prefix_weights(accepted: Tensor, chain: Tensor, step: Tensor, depth: int) -> Tensor:
    """Weight of each step by the chance that its chain gets there: the product of the acceptances of the chain's
    earlier steps, [N], without gradient. `chain` [N]: small numbers, `step` [N]: 0..depth-1."""
    table = accepted.new_ones(int(chain.max()) + 1 if len(chain) else 0, depth + 1)
    table[chain, step + 1] = accepted.detach()
    return table.cumprod(1)[chain, step]


def feature_distance(state: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of [N, H] states relative to the teacher's squared length: [N], 0 where equal.

    A dense signal where traces are few: EAGLE (Li et al. 2024, section 4.2) regresses the target's states too.
    """
    state, teacher = state.float(), teacher.float()
    return (state - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-6)
