"""Verification of a drafted tree: which path is accepted, and which token follows it. Pure functions.

Greedy: a token is accepted where it is the target's argmax behind its parent. Sampled: the children of an accepted
token are tried in turn. A drawn child x is accepted with min(1, p(x)/q(x)) (Leviathan et al. 2023); on rejection p
becomes norm(max(p - q, 0)), and the next sibling, drawn without replacement, meets q without x, renormalised (Yang et
al. 2024, "Multi-candidate speculative decoding"; Jeon et al. 2024, "Recursive speculative decoding"). For a
deterministic child q is one-hot: accepted with p(x), on rejection p loses x. Where no child is accepted the next token
is drawn from what is left of p. Either way the output is distributed as the target's. A chain is a tree of width one.
`Typical` is the exception.
Legend: B rows, N drafted tokens, V vocabulary; block place 0 is the last decided token, i + 1 drafted token i.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data.sampling import Sampling, draw, penalised, probabilities
from drafters.tree import Draft, Topology


@dataclass(frozen=True)
class Typical:
    """Accepts what the target finds typical, whatever it would have drawn: p(x) > min(epsilon, delta * exp(-entropy of
    p)) (Cai et al. 2024, Medusa, section 2.3.2). LOSSY: the text is not distributed as the target's."""

    epsilon: float
    delta: float


@dataclass
class Verdict:
    """accepted [B]: length of the accepted path. tokens [B, D+1]: that path, then the target's own token at index
    `accepted`; what lies behind it is meaningless. path [B, D+1]: their block places, 0 for the last decided token
    first; None: 0..D in order. rejected [B]: whether the path ends at a place whose drafted children were all refused;
    refused [B]: the first of them, meaningless elsewhere. D: depth of the tree."""

    accepted: Tensor
    tokens: Tensor
    path: Tensor | None = None
    rejected: Tensor | None = None
    refused: Tensor | None = None

    def refusals(self) -> list[int | None]:
        """The first refused token of each row, None where no draft was refused."""
        return [token if rejected else None for token, rejected in zip(self.refused.tolist(), self.rejected.tolist())]


Numbers = torch.Generator | Tensor | None  # what sampled verdicts are drawn with: see `uniforms_of`


def verify(logits: Tensor, draft: Draft, sampling: Sampling, numbers: Numbers = None,
           seen: Tensor | None = None, shape: Topology | None = None, typical: Typical | None = None) -> Verdict:
    """Judges drafted tokens [B, N] by the target's logits [B, N+1, V] at the N+1 block places.

    seen [B, V]: tokens of each row up to the last decided one, where sampling has a repetition penalty; every place
    adds those of its own path. shape: Topology.of(draft), where it is known. typical: the lossy rule, None for an exact
    one; greedily both are the same.
    """
    shape = shape or Topology.of(draft)
    if sampling.remembers:
        logits = penalised(logits, sampling.repetition_penalty, along_paths(seen, draft, shape))
    if sampling.greedy:
        return verify_greedy(logits, draft, shape)
    if typical is not None:
        return verify_typical(probabilities(logits, sampling), draft, typical, numbers, shape)
    return verify_sampled(probabilities(logits, sampling), draft, numbers, shape)


def uniforms_of(numbers: Numbers, rows: int, drafted: int, device: torch.device) -> Tensor:
    """[rows, drafted + 1] in [0, 1): one for each drafted token, the last for the target's own. numbers: a generator
    that all rows draw from in turn (None: torch's), or numbers of each row's own [rows, drafted + 1 or more], of which
    the first ones and the last are taken, so that no row's depend on how many tokens another one drafted."""
    if isinstance(numbers, Tensor):
        return torch.cat([numbers[:, :drafted], numbers[:, -1:]], dim=1).to(device)
    return torch.rand(rows, drafted + 1, generator=numbers, dtype=torch.float64).to(device)


def along_paths(seen: Tensor, draft: Draft, shape: Topology) -> Tensor:
    """Tokens that occur before each block place's next one: seen [B, V] and the drafted ones of its path, [B, N+1, V].
    """
    B, N = draft.tokens.shape
    if not N:  # no row drafted anything
        return seen[:, None]
    tokens = draft.tokens[:, None].expand(B, N + 1, N)
    own = torch.cat([tokens[:, :1, :1], draft.tokens[..., None]], dim=1)  # stands in for what a place does not see
    tokens = torch.where(shape.sees[..., 1:], tokens, own)
    found = seen[:, None].expand(B, N + 1, -1).clone()
    return torch.cat([found[:, :1], found[:, 1:].scatter_(2, tokens[:, 1:], True)], dim=1)


def parents_of(draft: Draft) -> Tensor:
    """Block place of each drafted token's parent, [B, N]."""
    if draft.parents is not None:
        return draft.parents
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device).expand_as(draft.tokens)


def verify_greedy(logits: Tensor, draft: Draft, shape: Topology | None = None) -> Verdict:
    """logits [B, N+1, V]: the longest path of argmaxes."""
    shape = shape or Topology.of(draft)
    own = logits.argmax(-1)  # [B, N+1]
    right = own.gather(1, parents_of(draft)) == draft.tokens
    if draft.real is not None:
        right &= draft.real
    right = torch.cat([torch.ones_like(right[:, :1]), right], dim=1)  # [B, N+1]
    taken = (right[:, None] | ~shape.sees).all(-1)  # a place whose whole path is right; siblings differ: one path
    return along(taken, taken.sum(1) - 1, draft, shape, own)


def verify_sampled(p: Tensor, draft: Draft, numbers: Numbers, shape: Topology | None = None) -> Verdict:
    """p [B, N+1, V]: the target's distributions after all logits processors."""
    B, N = draft.tokens.shape
    shape, parents = shape or Topology.of(draft), parents_of(draft)
    uniforms = uniforms_of(numbers, B, N, p.device)
    rows = torch.arange(B, device=p.device)
    at = torch.zeros(B, dtype=torch.long, device=p.device)  # the place whose children are tried
    rest = p[:, 0].clone()  # [B, V]: what is left of p there
    q = None if draft.q is None else draft.q[:, 0].to(p.dtype, copy=True)  # of the children still to come
    taken = torch.zeros(B, N + 1, dtype=torch.bool, device=p.device)
    taken[:, 0] = True
    for i in range(N):
        x, tried = draft.tokens[:, i], at == parents[:, i]
        if draft.real is not None:
            tried = tried & draft.real[:, i]
        qx = 1.0 if q is None else q[rows, x]
        accepted = tried & (uniforms[:, i] * qx < rest[rows, x])
        out, went = (tried & ~accepted).nonzero()[:, 0], accepted.nonzero()[:, 0]
        if len(out):
            rest[out] = residual(rest[out], x[out], None if q is None else q[out])
            if q is not None and draft.parents is not None:  # a chain has no siblings
                q[out] = without(q[out], x[out])
        if len(went):
            at[went], taken[went, i + 1] = i + 1, True
            rest[went] = p[went, i + 1]
            if q is not None and i + 1 < draft.q.shape[1]:
                q[went] = draft.q[went, i + 1].to(p.dtype)
    following = draw(rest, uniforms[:, N])
    own = torch.zeros(B, N + 1, dtype=torch.long, device=p.device).scatter_(1, at[:, None], following[:, None])
    return along(taken, taken.sum(1) - 1, draft, shape, own)


def verify_typical(p: Tensor, draft: Draft, rule: Typical, numbers: Numbers, shape: Topology) -> Verdict:
    """p [B, N+1, V] as in verify_sampled: the longest path of typical tokens, of equally long ones the most probable,
    then a token drawn from p behind it. Nothing is taken out of p for what was refused."""
    entropy = torch.special.entr(p).sum(-1)  # [B, N+1]
    enough = (rule.delta * (-entropy).exp()).clamp(max=rule.epsilon)
    parents = parents_of(draft)
    chance = p.gather(1, parents[..., None].expand(-1, -1, p.shape[-1])).gather(2, draft.tokens[..., None])[..., 0]
    right = chance > enough.gather(1, parents)  # [B, N]
    if draft.real is not None:
        right &= draft.real
    right = F.pad(right, (1, 0), value=True)  # [B, N+1]
    sees = shape.sees.expand(len(p), -1, -1)
    whole = (right[:, None] | ~sees).all(-1)  # a place whose whole path is typical
    worth = torch.where(sees, F.pad(chance, (1, 0), value=1.0).clamp_min(1e-30).log()[:, None], 0.0).sum(-1)
    depth = shape.depth.expand_as(whole).masked_fill(~whole, -1)
    best = worth.masked_fill(depth < depth.amax(1, keepdim=True), -torch.inf).argmax(1)
    rows = torch.arange(len(p), device=p.device)
    following = draw(p[rows, best], uniforms_of(numbers, len(p), 0, p.device)[:, 0])
    own = torch.zeros(whole.shape, dtype=torch.long, device=p.device).scatter_(1, best[:, None], following[:, None])
    taken = sees[rows, best]
    return along(taken, taken.sum(1) - 1, draft, shape, own)


def residual(p: Tensor, x: Tensor, q: Tensor | None) -> Tensor:
    """What is left of p [R, V] where x [R] was rejected: norm(max(p - q, 0)); q [R, V], None: one-hot at x."""
    rest = p.scatter(1, x[:, None], 0.0) if q is None else (p - q).clamp_(min=0)
    total = rest.sum(-1, keepdim=True)
    # p <= q everywhere happens only where rounding made an exact p = q look rejected: p itself is right then.
    return torch.where(total > 0, rest / total, p)


def without(q: Tensor, x: Tensor) -> Tensor:
    """q [R, V] of the next sibling, which was drawn without replacement; zeros where no token is left."""
    rest = q.scatter(1, x[:, None], 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(1e-30)


def along(taken: Tensor, accepted: Tensor, draft: Draft, shape: Topology, own: Tensor) -> Verdict:
    """The verdict where the places `taken` [B, N+1] form a path; own [B, N+1]: the target's token behind each place."""
    if draft.parents is None:
        path, last, behind = None, accepted, draft.tokens
    else:
        depth = int(shape.depth.max())
        # Places off the path write to a column that is cut off.
        column = torch.where(taken, shape.depth.expand_as(taken), depth + 1)
        path = torch.zeros(len(taken), depth + 2, dtype=torch.long, device=taken.device)
        places = torch.arange(taken.shape[1], device=taken.device).expand_as(taken)
        path = path.scatter_(1, column, places)[:, : depth + 1]
        last = path.gather(1, accepted[:, None])[:, 0]
        behind = draft.tokens.gather(1, (path[:, 1:] - 1).clamp_min(0))  # [B, D]
    children = parents_of(draft) == last[:, None]
    if draft.real is not None:
        children = children & draft.real
    following = own.gather(1, last[:, None])
    tokens = torch.cat([behind, following], dim=1).scatter(1, accepted[:, None], following)
    first = F.pad(children.int(), (0, 1)).argmax(1, keepdim=True)  # one more: a draft may be empty
    refused = F.pad(draft.tokens, (0, 1)).gather(1, first)[:, 0]
    return Verdict(accepted, tokens, path, children.any(1), refused)
