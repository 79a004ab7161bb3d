"""Validation acceptance: the decoding loop's own walk, replayed over answers that the target gave greedily.

A draft starts after each rejection; every position's draft is computed in one batched pass.
"""

import torch

from data.batching import collate
from data.reader import RowReader
from drafters.base import Drafter
from eval.metrics import Acceptance


def walk(drafts: list[list[int]], answer: list[int], tail: list[int], K: int) -> Acceptance:
    """Counts of the loop on one answer.

    drafts[i]: the K tokens drafted when answer[i] was the last token; answer ends with its end token or at the
    length limit; tail: the target's greedy tokens beyond it, at least K, which the last drafts are compared with.
    """
    counts, following = Acceptance(K), answer + tail
    i = 0
    while i < len(answer) - 1:
        length = 0
        while length < K and drafts[i][length] == following[i + 1 + length]:
            length += 1
        counts.add(length)
        i += length + 1
    return counts


@torch.no_grad()
def replay(drafter: Drafter, reader: RowReader, rows: list[int], K: int, device: torch.device,
           dtype: torch.dtype) -> Acceptance:
    """Acceptance over validation rows, in eval mode; the module's mode is restored (case 51)."""
    was_training = drafter.training
    drafter.eval()
    total = Acceptance(K)
    for index in rows:
        row = reader[index]
        tokens, _, valid = drafter.chains(collate([row]).to(device, dtype), K)
        answer = row.ids[row.turns > 0].tolist()
        drafts = tokens[0][valid[0]].tolist()
        total = total + walk(drafts, answer, row.tail, K)
    drafter.train(was_training)
    return total
