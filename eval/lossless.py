"""Does speculation change the text? Greedy ids against plain decoding, sampled tokens against the target's own p."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import chi2, combine_pvalues
from torch import Tensor

from data.sampling import Sampling, penalised, probabilities
from drafters.base import Drafter
from drafters.target import Prefix, Target
from drafters.tree import Draft, StaticTree, chain
from eval.decode import GREEDY, Decoder, Output
from eval.verify import verify_sampled

FREE = Sampling(1.0, top_p=0.95)  # what the sampling test is made at where the evaluation samples nothing
ELEMENTS = 2**24  # of a distribution a row that a test holds at a time
TWO = StaticTree(((0,), (1,)))


def compare_greedy(target: Target, prompts: list[list[int]], plain: list[Output], spec: list[Output],
                   tolerance: float, sampling: Sampling = GREEDY) -> dict[str, float]:
    """Counts prompts whose greedy ids differ, each first difference classified by the target's top-2 logit gap.

    sampling: what both sides were decoded with, whose repetition penalty acts on the logits. A gap below `tolerance` at
    the first difference is a near-tie: batched verification rounds differently and either token is the target's.
    Anything else is a mismatch. `tie_gap` is the tolerance.
    """
    mismatches = near_ties = 0
    for prompt, a, b in zip(prompts, plain, spec):
        at = first_difference(a.tokens, b.tokens)
        if at is None:
            continue
        if top2_gap(target, prompt + a.tokens[:at], sampling) < tolerance:
            near_ties += 1
        else:
            mismatches += 1
    return {"prompts": len(prompts), "tokens": sum(len(a.tokens) for a in plain), "mismatches": mismatches,
            "near_ties": near_ties, "tie_gap": tolerance}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs, the shorter end included; None where equal."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def top2_gap(target: Target, ids: list[int], sampling: Sampling = GREEDY) -> float:
    """Difference of the two largest logits after `ids`, behind a repetition penalty."""
    row = torch.tensor([ids], device=target.device)
    positions = torch.arange(len(ids), device=target.device)[None]
    logits = target.forward(row, positions).logits[0, -1]
    if sampling.remembers:
        seen = torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, row[0], True)
        logits = penalised(logits, sampling.repetition_penalty, seen)
    top = logits.float().topk(2).values
    return float(top[0] - top[1])


@dataclass
class SamplingTest:
    """Statistics of one context: total variation between drawn and exact first tokens, and the chi-square p-value."""

    tv: float
    p_value: float


def judge_context(p: Tensor, drafted: Tensor, q: Tensor | None, draws: int, seed: int) -> SamplingTest:
    """Verifies `draws` drafts of one level by p [V] and compares the first emitted tokens with p.

    drafted [draws, n] as proposed, n siblings; q [V] what they were drawn from without replacement, or None for
    deterministic drafts. Tokens expected fewer than 5 times are pooled, as the chi-square test requires. p itself comes
    from the target's real logits.
    """
    generator = torch.Generator().manual_seed(seed)
    p, drafted, q = on_support(p, drafted, q)
    emitted = []
    for part in drafted.split(max(1, ELEMENTS // len(p))):
        rows, n = part.shape
        spread = None if q is None else q.expand(rows, 1, -1)
        siblings = None if n == 1 else torch.zeros_like(part)
        behind = p.expand(rows, n + 1, -1)  # what follows the first token is not looked at
        emitted.append(verify_sampled(behind, Draft(part, spread, siblings), generator).tokens[:, 0])
    counts = torch.bincount(torch.cat(emitted), minlength=p.shape[-1]).double().numpy()
    expected = (p.double() / p.double().sum()).numpy() * draws
    tv = float(np.abs(counts - expected).sum() / 2 / draws)
    if counts[expected == 0].sum():
        return SamplingTest(tv, 0.0)
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return SamplingTest(tv, float(chi2.sf(statistic, max(len(wanted) - 1, 1))) if len(wanted) > 1 else 1.0)


def on_support(p: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same test on the tokens that p, q or the drafts can name: thousands of draws over a whole vocabulary
    would not fit in memory."""
    used = p > 0
    used[drafted.flatten()] = True
    if q is not None:
        used |= q > 0
    ids = used.nonzero()[:, 0]
    return p[ids], torch.searchsorted(ids, drafted.contiguous()), None if q is None else q[ids]


def sampling_report(target: Target, drafter: Drafter, prompts: list[list[int]], draws: int, seed: int,
                    tree: bool = False, sampling: Sampling = FREE) -> dict[str, float]:
    """Chi-square and total variation over contexts, deterministic and sampled drafts in turn, at these settings, whose
    temperature is above 0.

    tree: two guesses in every other pair of contexts, as a tree has them. A context in which the drafter proposes
    nothing is left out. `p_value` combines the contexts' by Fisher's method; `max_tv` is the largest distance, which
    shrinks with draws.
    """
    results = []
    for i, prompt in enumerate(prompts):
        plan = TWO if tree and i % 4 > 1 else chain(1)
        logits, proposal = first_draft(target, drafter, prompt, i % 2 == 1, seed + i, draws, plan, sampling)
        if not proposal.tokens.numel():
            continue
        p = probabilities(logits[None], sampling)[0]
        q = None if proposal.q is None else proposal.q[0, 0]
        results.append(judge_context(p, proposal.tokens, q, draws, seed + i))
    if not results:
        return {"tests": 0, "max_tv": 0.0, "p_value": 1.0}
    combined = combine_pvalues([max(r.p_value, 1e-300) for r in results]).pvalue
    return {"tests": len(results), "max_tv": max(r.tv for r in results),
            "p_value": 1.0 if math.isnan(combined) else float(combined)}


@torch.inference_mode()
def first_draft(target: Target, drafter: Drafter, prompt: list[int], sampled: bool, seed: int, draws: int,
                plan: StaticTree, sampling: Sampling) -> tuple[Tensor, Draft]:
    """The target's logits [V] after prompt and first greedy token, behind a repetition penalty, and `draws` proposals
    [draws, n] of the drafter there."""
    decoder = Decoder(target, 2, replace(sampling, temperature=0.0), end_ids=[], seed=seed)
    decoder.begin([prompt])
    rows = decoder.prefill([prompt], [0], [Output()], Prefix(), drafter, len(prompt) + 2 + plan.room)
    proposal = rows.session.propose(plan, decoder.sample_draft if sampled else None)
    states = target.forward(rows.last[:, None], rows.length[:, None], rows.cache)
    logits = states.logits[0, 0]
    if rows.seen is not None:
        logits = penalised(logits, sampling.repetition_penalty, rows.seen[0])
    logits = logits.cpu()
    if proposal.q is None:
        return logits, Draft(proposal.tokens.cpu().expand(draws, -1))
    q = proposal.q[:, :1].cpu()
    return logits, Draft(siblings(q[0, 0], draws, proposal.counts()[0], decoder.generator), q)


def siblings(q: Tensor, draws: int, n: int, generator: torch.Generator) -> Tensor:
    """[draws, n] tokens drawn from q [V], those of a row without replacement: what repeats is drawn again."""
    drawn = torch.multinomial(q, draws * n, replacement=True, generator=generator).view(draws, n)
    for i in range(1, n):
        again = (drawn[:, i : i + 1] == drawn[:, :i]).any(1)
        while bool(again.any()):
            drawn[again, i] = torch.multinomial(q, int(again.sum()), replacement=True, generator=generator)
            again = (drawn[:, i : i + 1] == drawn[:, :i]).any(1)
    return drawn
