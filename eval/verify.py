"""Verification of a drafted chain: which prefix is accepted, and which token follows it. Pure functions.

Greedy: accept while the draft equals the target's argmax. Sampled (Leviathan et al. 2023): accept x with
min(1, p(x)/q(x)); on the first rejection draw from norm(max(p - q, 0)). For a deterministic draft q is one-hot:
accept with p(x), on rejection draw from p without x. Either way the output is distributed as the target's.
Legend: B rows, K draft length, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.sampling import Sampling, draw, probabilities
from drafters.base import Draft


@dataclass
class Verdict:
    """accepted [B]: length of the accepted prefix, 0..K. tokens [B, K+1]: that prefix, then the target's own token
    at index `accepted`; what lies behind it is meaningless."""

    accepted: Tensor
    tokens: Tensor


def verify(logits: Tensor, draft: Draft, sampling: Sampling, generator: torch.Generator | None = None) -> Verdict:
    """Judges draft tokens [B, K] by the target's logits [B, K+1, V] at the K+1 verified positions."""
    if sampling.greedy:
        return verify_greedy(logits, draft.tokens)
    return verify_sampled(probabilities(logits, sampling), draft, generator)


def verify_greedy(logits: Tensor, drafted: Tensor) -> Verdict:
    own = logits.argmax(-1)  # [B, K+1]
    agrees = (own[:, :-1] == drafted).int().cumprod(1)  # 1 up to the first difference
    return Verdict(agrees.sum(1), own)


def verify_sampled(p: Tensor, draft: Draft, generator: torch.Generator | None) -> Verdict:
    """p [B, K+1, V]: the target's distributions after temperature, top-k and top-p."""
    B, K = draft.tokens.shape
    uniforms = torch.rand(B, K + 1, generator=generator, dtype=torch.float64).to(p.device)
    px = p[:, :K].gather(-1, draft.tokens[..., None])[..., 0]  # [B, K]
    qx = torch.ones_like(px) if draft.q is None else draft.q.gather(-1, draft.tokens[..., None])[..., 0].to(p.dtype)
    agrees = (uniforms[:, :K] * qx < px).int().cumprod(1)
    accepted = agrees.sum(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    rest = p.gather(1, at)[:, 0]  # [B, V]: where the chain stopped
    rejected = accepted < K
    if bool(rejected.any()):
        rest[rejected] = residual(rest[rejected], draft, accepted, rejected)
    following = draw(rest, uniforms[:, K])
    tokens = torch.cat([draft.tokens, draft.tokens[:, -1:]], dim=1)
    return Verdict(accepted, tokens.scatter(1, accepted[:, None], following[:, None]))


def residual(p: Tensor, draft: Draft, accepted: Tensor, rejected: Tensor) -> Tensor:
    """norm(max(p - q, 0)) of the rows whose draft was rejected; p [R, V] at the rejected position."""
    at = accepted[rejected]
    rows = torch.arange(len(accepted), device=p.device)[rejected]
    if draft.q is None:
        rest = p.scatter(1, draft.tokens[rows, at][:, None], 0.0)
    else:
        rest = (p - draft.q[rows, at].to(p.dtype)).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    # p <= q everywhere happens only where rounding made an exact p = q look rejected: p itself is right then.
    return torch.where(total > 0, rest / total, p)
