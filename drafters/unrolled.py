"""The loss of the training-time test (Li et al. 2025, EAGLE-3, section 3), for any drafter that unrolls.

At depth k the chain of position t predicts x[t+2+k], taught by the target's distribution at t+1+k.
Legend: B rows, S sequence, P chains of a row (padded), N steps of all chains, D draft vocabulary, V target vocabulary,
Ht target hidden.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters import losses
from drafters.base import Batch, LossOutput, draw, loss_mask, pack
from drafters.head_loss import DraftHead

LOGITS = {"cpu": 32e6, "cuda": 512e6}  # bytes of the logits that are held at a time


class Chains:
    """The chains of a batch: one from each position that carries loss; of those that can go on, a random `share` does
    from each step, weighted up, so that the loss stays the same in expectation (conditional drop, P-EAGLE). Where
    share^k would fall below `floor`, that share of them is at step k."""

    def __init__(self, batch: Batch, share: float, seed: int, floor: float = 0.0) -> None:
        self.batch, self.share, self.floor = batch, share, floor
        self.generator = torch.Generator().manual_seed(seed)
        self.at, self.valid = pack(loss_mask(batch.turns, 0))
        self.scale = self.valid.float()  # [B, P] weight of each chain

    def ahead(self, k: int) -> Tensor:
        return (self.at + k).clamp(max=self.batch.ids.shape[1] - 1)

    def token(self, k: int) -> Tensor:
        """What step k of each chain predicts, and the next step is given: [B, P]."""
        return self.batch.ids.gather(1, self.ahead(k + 2))

    def carry(self, k: int) -> Tensor:
        """Chains whose step k carries loss: [B, P]."""
        return loss_mask(self.batch.turns, k).gather(1, self.at) & self.valid

    def kept(self, k: int) -> float:
        """Share of the chains of step k - 1 that goes on to step k."""
        if self.share**k >= self.floor:
            return self.share
        return self.floor / max(self.share ** (k - 1), self.floor)

    def thin(self, k: int) -> Tensor:
        """Draws those that go on to step k: their indices [B, P'], which they have from now on."""
        index, weight = draw(self.carry(k), self.kept(k), self.generator)
        self.at, self.valid, self.scale = self.at.gather(1, index), weight > 0, self.scale.gather(1, index) * weight
        return index


def greedy_drafts(batch: Batch, draft_ids: Tensor, logits: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy drafts from every position that can start one, by the logits [B, P, D] of their steps: tokens [B, P, K],
    at [B, P], valid [B, P]. draft_ids [D]: target ids."""
    chains = Chains(batch, 1.0, 0)
    return torch.stack([draft_ids[step.argmax(-1)] for step in logits], dim=-1), chains.at, chains.valid


@dataclass
class Steps:
    """All steps that carry loss, those of a chain together, in order."""

    outputs: Tensor  # [N, H] before the norm
    chain: Tensor  # [N] ascending
    step: Tensor  # [N] k
    token: Tensor  # [N] target id that the step predicts
    taught: Tensor  # [N] row of batch.final, flattened, that teaches it
    scale: Tensor  # [N] weight of its chain
    counts: Tensor  # [K] steps of each depth


def gather(unrolled: Iterable[tuple[Chains, Tensor]]) -> Steps:
    """Runs the steps, each the chains as they then are and their outputs, and keeps what carries loss."""
    parts: list[list[Tensor]] = []
    for k, (chains, output) in enumerate(unrolled):
        carries, S = chains.carry(k), chains.batch.ids.shape[1]
        row = torch.arange(len(carries), device=carries.device)[:, None] * S
        parts.append([output[carries], (row + chains.at)[carries], torch.full_like(chains.at, k)[carries],
                      chains.token(k)[carries], (row + chains.ahead(k + 1))[carries], chains.scale[carries]])
    outputs, chain, step, token, taught, scale = (torch.cat(part) for part in zip(*parts))
    order = chain.argsort(stable=True)
    counts = torch.tensor([len(part[0]) for part in parts], device=order.device)
    return Steps(outputs[order], chain[order], step[order], token[order], taught[order], scale[order], counts)


def cut(chain: Tensor, most: int) -> list[slice]:
    """Parts of at most `most` steps, or of one chain, that leave chains whole; at least one, perhaps of no step.
    chain [N] ascending."""
    parts, first, last = [], 0, 0
    for end in [*(chain.diff().nonzero()[:, 0] + 1).tolist(), len(chain)]:
        if end - first > most and last > first:
            parts.append(slice(first, last))
            first = last
        last = end
    return [*parts, slice(first, last)]


@dataclass(frozen=True)
class Aim:
    """What a step learns; see drafters.losses. `full_head` [V, Ht] is needed for all but plain divergences."""

    loss: str  # kl, reverse_kl, tv, lk
    labels: str  # distribution, greedy, token
    step_decay: float
    prefix: bool
    eta: float
    drop_outside: bool
    ids: Tensor  # [D] target ids of the draft vocabulary
    inside: Tensor  # [V] bool
    teacher_head: Tensor  # [D, Ht]
    full_head: Tensor | None

    @staticmethod
    def wants_all(loss: str, labels: str, prefix: bool) -> bool:
        """True where the target's mass or choice outside the draft vocabulary matters."""
        return labels == "greedy" or (labels == "distribution" and (prefix or loss in ("tv", "lk")))


class Teacher:
    """The judge of DraftHead: gives each part's loss and notes sums by depth."""

    def __init__(self, aim: Aim, steps: Steps, final: Tensor) -> None:
        """final [B*S, Ht]: the target's states after its final norm."""
        self.aim, self.steps, self.final = aim, steps, final
        self.weight = steps.scale * aim.step_decay**steps.step.float()  # [N]; prefix weights join in as they are known
        depth = len(steps.counts)
        self.loss, self.hits = final.new_zeros(2, depth).float()

    def __call__(self, logits: Tensor, part: slice) -> Tensor:
        aim, steps = self.aim, self.steps
        step, token = steps.step[part], steps.token[part]
        if aim.labels == "distribution":
            per_step, accepted = self.by_distribution(logits, part)
        else:
            per_step, accepted = self.by_label(logits, part)
        if aim.drop_outside:
            per_step = per_step * aim.inside[token]
        if aim.prefix:
            chain = steps.chain[part].unique_consecutive(return_inverse=True)[1]
            self.weight[part] *= losses.prefix_weights(accepted, chain, step, len(steps.counts))
        with torch.no_grad():
            self.loss.index_add_(0, step, per_step.detach().float())
            self.hits.index_add_(0, step, (aim.ids[logits.argmax(-1)] == token).float())
        return (self.weight[part] * per_step).sum()

    def by_distribution(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """Loss [n] and, where it is needed, acceptance [n] by the target's distribution."""
        aim = self.aim
        states, which = self.steps.taught[part].unique(return_inverse=True)  # a state teaches up to K steps
        final = self.final[states]
        scores = F.linear(final, aim.teacher_head).float()
        restricted = scores.softmax(-1)
        accepted = None
        if Aim.wants_all(aim.loss, aim.labels, aim.prefix):
            mass = (scores.logsumexp(-1) - full_logsumexp(final, aim.full_head)).exp()
            accepted = losses.acceptance(logits, (restricted * mass[:, None])[which])
        divergence = losses.reverse_kl if aim.loss == "reverse_kl" else losses.soft_cross_entropy
        return self.valued(lambda: divergence(logits, restricted[which]), accepted), accepted

    def by_label(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The same by a single token: the target's first choice, or the one that the trace has."""
        aim, token = self.aim, self.steps.token[part]
        if aim.labels == "greedy":
            states, which = self.steps.taught[part].unique(return_inverse=True)
            token = full_argmax(self.final[states], aim.full_head)[which]
        label = torch.where(aim.inside[token], aim.inside.cumsum(0)[token] - 1, -1)
        accepted = losses.label_share(logits, label)
        return self.valued(lambda: losses.hard_cross_entropy(logits, label), accepted), accepted

    def valued(self, divergence: Callable[[], Tensor], accepted: Tensor | None) -> Tensor:
        """The loss that the aim names, [n]; a divergence is computed where it has a part in it."""
        if self.aim.loss == "tv":
            return losses.total_variation(accepted)
        return losses.likelihood_blend(divergence(), accepted, self.aim.eta) if self.aim.loss == "lk" else divergence()


def row_parts(rows: int, width: int, device: torch.device) -> list[slice]:
    """Runs of rows of which `width` float32 numbers each are held at a time; at least one, perhaps of no row."""
    most = max(1, int(LOGITS[device.type] / (4 * width)))
    return [slice(first, min(first + most, rows)) for first in range(0, max(rows, 1), most)]


def full_logsumexp(final: Tensor, head: Tensor) -> Tensor:
    """Log of the sum of exponentials of all V logits of each state [n, Ht]: [n] float32."""
    parts = row_parts(len(final), len(head), head.device)
    return torch.cat([F.linear(final[part], head).float().logsumexp(-1) for part in parts])


def full_argmax(final: Tensor, head: Tensor) -> Tensor:
    """The target's first choice after each state [n, Ht]: [n] target ids."""
    parts = row_parts(len(final), len(head), head.device)
    return torch.cat([F.linear(final[part], head).argmax(-1) for part in parts])


def unrolled_loss(steps: Steps, normed: Tensor, head: DraftHead, aim: Aim, final: Tensor, feature_loss: float = 0.0
                  ) -> LossOutput:
    """The loss of all steps from their normed outputs [N, H]; final [B, S, Ht] as in Batch."""
    flat = final.flatten(0, 1)
    teacher = Teacher(aim, steps, flat)
    parts = cut(steps.chain, max(1, int(LOGITS[normed.device.type] / (4 * len(aim.ids)))))
    loss = head(normed, teacher, parts)
    if feature_loss:
        loss = loss + feature_loss * (teacher.weight * losses.feature_distance(normed, flat[steps.taught])).sum()
    return LossOutput(loss, teacher.loss, teacher.hits, steps.counts)
