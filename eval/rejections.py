"""Where drafts fail: the target's entropy at accepted and rejected tokens, and which tokens are rejected most.

The entropies are of the distribution that tokens are drawn from; greedily, of that at temperature 1. They come from one
pass over prompt and answer afterwards, so that the timed loop does nothing for them.
Legend: B rows, S sequence, V vocabulary.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.sampling import Sampling, penalised, probabilities
from drafters.target import Target
from eval.decode import GREEDY, Output
from eval.rows import Row

ENTROPIES = [0.0, 0.1, 0.5, 1.0, 2.0, 4.0]  # nats
MOST = 20  # rejected tokens listed
EXAMPLES = 3  # places shown for each of them
BEFORE, AFTER = 12, 4  # tokens of the answer shown around such a place
PASS_TOKENS = 4096  # of one pass, padding included


@dataclass
class Place:
    """A drafted place of an answer: `index` in prompt and answer; whether the draft was right there."""

    row: int
    index: int
    accepted: bool


def places(rows: list[Row], outputs: list[Output]) -> list[Place]:
    """Places where a draft was judged, inside the kept answer: accepted tokens and the one that ended each draft."""
    found, ends = [], []
    for number, (row, output) in enumerate(zip(rows, outputs)):
        ends.append(len(row.ids) + len(output.tokens))
        for context, accepted in output.drafts:
            found += [Place(number, context + i, True) for i in range(accepted)]
        found += [Place(number, index, False) for index, _ in output.refused]
    return sorted((place for place in found if place.index < ends[place.row]), key=lambda p: (p.row, p.index))


@torch.inference_mode()
def entropies(target: Target, rows: list[Row], outputs: list[Output], sampling: Sampling = GREEDY) -> list[list[float]]:
    """Entropy in nats of the target's next-token distribution before each answer token, by row: behind all logits
    processors where tokens are sampled, at temperature 1 behind a repetition penalty where they are not."""
    free = Sampling(1.0) if sampling.greedy else sampling
    texts = [row.ids + o.tokens for row, o in zip(rows, outputs)]
    found: list[list[float]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda i: len(texts[i]))
    while order:
        size = max(1, PASS_TOKENS // len(texts[order[min(7, len(order) - 1)]]))
        part, order = order[:min(8, size)], order[min(8, size):]
        longest = max(len(texts[i]) for i in part)
        ids = torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in part], device=target.device)
        positions = torch.arange(longest, device=target.device).expand_as(ids).contiguous()
        final = target.forward(ids, positions, logits=False).final  # [B, S, H]
        for state, i in zip(final, part):
            logits = target.head(state[len(rows[i].ids) - 1 : len(texts[i]) - 1]).float()  # [answer, V]
            if sampling.remembers:
                seen = seen_before(rows[i].ids, outputs[i].tokens, logits.shape[-1]).to(logits.device)
                logits = penalised(logits, sampling.repetition_penalty, seen)
            found[i] = torch.special.entr(probabilities(logits, free)).sum(-1).tolist()
    return found


def seen_before(prompt: list[int], answer: list[int], vocab_size: int) -> Tensor:
    """[len(answer), V] bool: tokens of the prompt and of the answer before each token of it."""
    seen = torch.zeros(len(answer), vocab_size, dtype=torch.bool)
    seen[:, prompt] = True
    for place, token in enumerate(answer):
        seen[place + 1 :, token] = True
    return seen


def by_entropy(judged: list[tuple[float, bool]]) -> list[dict[str, Any]]:
    """Accepted and rejected places by the target's entropy there."""
    counts: dict[float, list[int]] = {}
    for nats, accepted in judged:
        counts.setdefault(max(b for b in ENTROPIES if b <= max(nats, 0.0)), [0, 0])[not accepted] += 1
    ends = dict(zip(ENTROPIES, [*ENTROPIES[1:], None]))
    return [{"from": b, "to": ends[b], "accepted": yes, "rejected": no} for b, (yes, no) in sorted(counts.items())]


def entropy_figures(target: Target, rows: list[Row], outputs: list[Output], sampling: Sampling = GREEDY,
                    ) -> dict[str, Any] | None:
    """Entropy at rejections against accepted places, over these answers; None where nothing was drafted."""
    judged_places = places(rows, outputs)
    if not judged_places:
        return None
    nats = entropies(target, rows, outputs, sampling)
    judged = [(nats[p.row][p.index - len(rows[p.row].ids)], p.accepted) for p in judged_places]
    means = {}
    for name, right in (("rejected", False), ("accepted", True)):
        values = [x for x, accepted in judged if accepted is right]
        means[name] = {"n": len(values), "mean_nats": sum(values) / len(values) if values else None}
    return {"prompts": len(rows), **means, "by_entropy": by_entropy(judged)}


def frequent(rows: list[Row], outputs: list[Output], decode: Any = None) -> list[dict[str, Any]]:
    """The most frequent rejected drafts: token drafted, token the target wanted, how often, share of all rejections.

    `decode` (ids -> text): adds both texts and a few places; None leaves every text out, since they are the users'.
    """
    pairs = [(drafted, wanted) for o in outputs for (_, drafted), wanted in zip(o.refused, o.rejected, strict=True)]
    found = []
    for (drafted, wanted), count in Counter(pairs).most_common(MOST):
        entry = {"drafted": drafted, "wanted": wanted, "count": count, "share": count / len(pairs)}
        if decode:
            entry |= {"drafted_text": decode([drafted]), "wanted_text": decode([wanted]),
                      "examples": examples(rows, outputs, (drafted, wanted), decode)}
        found.append(entry)
    return found


def examples(rows: list[Row], outputs: list[Output], pair: tuple[int, int], decode: Any) -> list[dict[str, str]]:
    """Places where the pair was met: the answer before and what follows."""
    found = []
    for row, output in zip(rows, outputs):
        for (index, refused), wanted in zip(output.refused, output.rejected):
            at = index - len(row.ids)
            if (refused, wanted) == pair and at < len(output.tokens):
                found.append({"set": row.set, "id": row.question.id,
                              "before": decode(output.tokens[max(0, at - BEFORE) : at]),
                              "after": decode(output.tokens[at : at + AFTER])})
                if len(found) == EXAMPLES:
                    return found
    return found
