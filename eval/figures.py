"""The report's block for a set of answers; definitions in docs/report.md. K draft length."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from eval.decode import Output
from eval.metrics import Acceptance, bootstrap, repeated_share
from eval.rows import Row

CONTEXTS = [0, 512, 2048, 8192, 32768, 131072]  # tokens before a draft
PLACES = [0, 16, 64, 256, 1024, 4096]  # tokens of the answer before a draft
REPETITIVE = 0.2  # share of an answer inside repeated 8-grams above which it counts as repetitive
UNBOUNDED = 1 << 30


def spread(items: list, count: int) -> list[int]:
    """`count` indices spread evenly over the items, so that every kind is met."""
    count = min(count, len(items))
    return [i * len(items) // count for i in range(count)]


def per_pass(outputs: list[Output]) -> float:
    """Kept tokens over the target's decode passes; the first token of each answer comes from the prefill."""
    passes = sum(o.passes for o in outputs)
    return sum(len(o.tokens) - 1 for o in outputs) / passes if passes else 1.0


def by_bucket(drafts: Iterable[tuple[int, int]], starts: list[int]) -> list[dict[str, Any]]:
    """Mean acceptance length of the drafts (place, accepted) whose place lies in each bucket."""
    found: dict[int, list[int]] = {}
    for place, accepted in drafts:
        found.setdefault(max(b for b in starts if b <= place), []).append(accepted)
    ends = dict(zip(starts, [*starts[1:], UNBOUNDED]))
    return [{"from": b, "to": ends[b], "drafts": len(v), "mean_length": 1 + sum(v) / len(v)}
            for b, v in sorted(found.items())]


def by_conversation(rows: list[Row], values: Iterable[float]) -> np.ndarray:
    """Sums over the rows of each conversation: the unit that intervals resample."""
    sums: dict[tuple[str, str], float] = {}
    for row, value in zip(rows, values):
        sums[row.key] = sums.get(row.key, 0.0) + value
    return np.array(list(sums.values()))


def statistics(rows: list[Row], outputs: list[Output], K: int, vocabulary: Tensor | None, seed: int) -> dict[str, Any]:
    """`vocabulary` [V] bool: what the drafter can propose; None is everything."""
    total = sum((o.acceptance for o in outputs), Acceptance(K))
    accepted = by_conversation(rows, (sum(o.acceptance.accepted) for o in outputs))
    drafts = by_conversation(rows, (o.acceptance.drafts for o in outputs))
    ci95 = ([1 + x for x in bootstrap(accepted, drafts, seed)] if np.count_nonzero(drafts) > 1
            else [1.0, float(K + 1)])
    rejected = [t for o in outputs for t in o.rejected]
    outside = 0 if vocabulary is None else sum(not bool(vocabulary[t]) for t in rejected)
    shares = [repeated_share(o.tokens) for o in outputs]
    tokens = sum(len(o.tokens) for o in outputs)
    fresh = [o for o, share in zip(outputs, shares) if share <= REPETITIVE]
    placed = [(context - len(row.ids), n) for row, o in zip(rows, outputs) for context, n in o.drafts]
    return {
        "prompts": len(outputs), "tokens": tokens, "drafts": total.drafts,
        "acceptance": {"rate": total.rate, "mean_length": total.mean_length, "per_position": total.per_position,
                       "conditional_per_position": total.conditional,
                       "by_context_bucket": by_bucket((d for o in outputs for d in o.drafts), CONTEXTS),
                       "by_answer_position": by_bucket(placed, PLACES), "ci95": ci95},
        "tokens_per_target_pass": per_pass(outputs), "target_passes": sum(o.passes for o in outputs),
        "repetition": {"share": sum(s * len(o.tokens) for s, o in zip(shares, outputs)) / max(tokens, 1),
                       "tokens_per_target_pass_without": per_pass(fresh) if fresh else None},
        "vocabulary_misses": {"rejections": len(rejected), "outside_draft_vocabulary": outside,
                              "share": outside / len(rejected) if rejected else None},
    } | by_drafter(outputs)


def by_drafter(outputs: list[Output]) -> dict[str, Any]:
    """Who drafted, where the drafter says so: `by_drafter` with the counts of each name; nothing elsewhere."""
    counts: dict[str, list[int]] = {}
    for name, drafted, accepted in (one for o in outputs for one in o.drafted_by):
        found = counts.setdefault(name, [0, 0, 0, 0])
        counts[name] = [a + b for a, b in zip(found, (1, drafted > 0, drafted, accepted))]
    blocks = {name: {"passes": passes, "drafts": drafts, "drafted": drafted, "accepted": accepted,
                     "mean_length": 1 + accepted / drafts if drafts else None,
                     "rate": accepted / drafted if drafted else None}
              for name, (passes, drafts, drafted, accepted) in sorted(counts.items())}
    return {"by_drafter": blocks} if blocks else {}


def by_set(rows: list[Row], outputs: list[Output], K: int, vocabulary: Tensor | None, seed: int) -> dict[str, Any]:
    """The block of each set, with those of its categories under `categories`."""
    found = {}
    for name in dict.fromkeys(row.set for row in rows):
        pairs = [(row, o) for row, o in zip(rows, outputs) if row.set == name]
        found[name] = statistics(*map(list, zip(*pairs)), K, vocabulary, seed)
        categories = dict.fromkeys(row.question.category or "all" for row, _ in pairs)
        found[name]["categories"] = {
            category: statistics(*map(list, zip(*[p for p in pairs if (p[0].question.category or "all") == category])),
                                 K, vocabulary, seed) for category in categories}
    return found


def arrivals(times: list[float | None]) -> dict[str, Any] | None:
    """How the requests of a log came: `requests` with a time, seconds from the first to the last, requests a second,
    most in any one second. None where no row has a time."""
    known = sorted(t for t in times if t is not None)
    if not known:
        return None
    span = known[-1] - known[0]
    return {"requests": len(known), "span_s": span, "per_s": (len(known) - 1) / span if span else None,
            "most_in_1_s": max(bisect_left(known, t + 1) - i for i, t in enumerate(known))}
