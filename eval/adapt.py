"""Measures what eval/choice.py chooses by: how good a drafter's guesses are by rank, and what passes cost here.

Legend: D levels, R ranks, V vocabulary, B rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.target import Target
from drafters.tree import DynamicTree, Plan, chain
from eval.choice import Accuracies, Choice, Curve, choose
from eval.decode import Decoder, Output
from eval.metrics import Acceptance
from eval.settings import exact_of
from eval.timing import medians_in_turns
from recipes.schema import Eval

CONTEXT = 200  # tokens behind which costs are measured
BUDGETS = [2, 4, 6, 8, 12, 16, 24, 32, 48, 64]
GROWN = [2, 4, 8]


class Deterministic(Exception):
    """The drafter draws from no distribution."""


@torch.inference_mode()
def rank_accuracies(target: Target, drafter: Drafter, prompts: list[list[int]], outputs: list[Output], depth: int,
                    width: int) -> Accuracies:
    """[depth][width] shares of the target's own tokens that are the drafter's guess of each rank, from every place of
    the answers, the drafter being led along the answer. Of sampled answers that is the probability that a guess of this
    rank is accepted: one that is not drawn is accepted with p(x), whatever was tried before it. Raises Deterministic
    for a drafter that has no distribution to rank tokens by."""
    hits, seen = torch.zeros(depth, width), torch.zeros(depth)
    for prompt, out in zip(prompts, outputs):
        if len(out.tokens) > 1:
            walk_ranks(target, drafter, prompt, out.tokens, hits, seen)
    return (hits / seen.clamp_min(1)[:, None]).tolist()


def walk_ranks(target: Target, drafter: Drafter, prompt: list[int], answer: list[int], hits: Tensor, seen: Tensor,
               ) -> None:
    """Adds one answer's ranks to hits [D, R] and seen [D]."""
    whole = torch.tensor([prompt + answer], device=target.device)
    positions = torch.arange(whole.shape[1], device=target.device)[None]
    taps = target.forward(whole, positions, logits=False).taps
    depth, first = len(hits), len(prompt) - 1
    session = drafter.session(1, whole.shape[1] + depth + 2)
    session.begin([prompt])
    for place in range(first, whole.shape[1] - 2):
        new = slice(0 if place == first else place, place + 1)
        last = torch.tensor([place - new.start], device=target.device)
        session.observe(None if taps is None else taps[:, new], whole[:, new.start + 1 : place + 2], positions[:, new],
                        last)
        following = whole[0, place + 2 : place + 2 + depth]
        ranks = led(session.propose, following)
        if ranks is None:
            raise Deterministic
        for level, rank in enumerate(ranks):
            seen[level] += 1
            if rank < hits.shape[1]:
                hits[level, rank] += 1


def led(propose: Callable, following: Tensor) -> list[int] | None:
    """Rank of each following token [n] in the drafter's distribution behind those before it; None without one."""
    ranks: list[int] = []

    def lead(q: Tensor) -> Tensor:  # [1, V]
        token = following[len(ranks)]
        ranks.append(int((q[0] > q[0, token]).sum()))
        return token[None]

    propose(chain(len(following)), lead)
    return ranks or None


@torch.inference_mode()
def measure_curve(target: Target, drafter: Drafter, context: int, widths: list[int], levels: int, grown: list[int],
                  batch: int = 1, repeats: int = 7) -> Curve:
    """Milliseconds of target passes over 1 and `widths` tokens a row, and of a level of drafting that goes on from 1
    and from `grown` nodes, behind `context` tokens; of a drafter that has all levels in one pass, that pass for one
    level and for all of them."""
    device, most, one_pass = target.device, max(widths), getattr(drafter, "one_pass", False)
    plans: dict[int, Plan] = {1: chain(levels)}
    plans |= {n: DynamicTree(levels, n, levels * n) for n in grown if n > 1 and levels > 1}
    plans |= {0: chain(1)} if one_pass else {}
    cache = target.new_cache(batch, context + most)
    ids = torch.ones(batch, context, dtype=torch.long, device=device)
    positions = torch.arange(context, device=device).expand(batch, -1).contiguous()
    states = target.forward(ids, positions, cache, logits=False)
    session = drafter.session(batch, context + max(plan.room for plan in plans.values()) + 4)
    session.begin([[1] * context] * batch)
    session.observe(states.taps, ids, positions, torch.full((batch,), context - 1, device=device))
    session.propose(1)
    ahead = (context + torch.arange(most, device=device)).expand(batch, -1).contiguous()
    block = torch.ones_like(ahead)
    taps = target.forward(block[:, :2], ahead[:, :2], cache).taps

    def draft(plan: Plan) -> None:
        session.observe(taps, block[:, :2], ahead[:, :2], torch.ones(batch, dtype=torch.long, device=device))
        session.propose(plan)

    works: dict[str, Callable[[], object]] = {
        f"verify {n}": lambda n=n: target.forward(block[:, :n], ahead[:, :n], cache) for n in {1, *widths}}
    works |= {f"draft {n}": lambda plan=plan: draft(plan) for n, plan in plans.items()}
    times = medians_in_turns(works, device, repeats)
    verify, every = {n: times[f"verify {n}"] for n in {1, *widths}}, times["draft 1"]
    first, common = (0.0, every) if one_pass else (every / levels, every / levels)
    # Of a tree the first level has one node.
    rest = {n: max(0.0, (times[f"draft {n}"] - common) / (levels - 1)) for n in plans if n > 1}
    passes = {1: times["draft 0"], levels: every} if one_pass else {}
    return Curve(times["verify 1"], verify, {1: first, **rest}, batch, passes)


def measured_choice(target: Target, drafter: Drafter, prompts: list[list[int]], section: Eval) -> Choice:
    """What to draft, by ranks along plain answers to these prompts at the recipe's sampling (a lossy rule aside) and by
    costs measured here at batch 1.

    Chains of at most eval.draft_length; with eval.choose = tree, trees of so many levels and at most eval.tree.total
    nodes too. A drafter without a distribution is judged by the chain that it drafts.
    """
    decoder = Decoder(target, section.speed_tokens, **exact_of(section))
    levels, trees = section.draft_length, section.choose == "tree"
    plain = decoder.plain(prompts)
    try:
        accuracies = rank_accuracies(target, drafter, prompts, plain, levels, section.tree.top_k)
    except Deterministic:
        outputs = decoder.speculative(prompts, drafter, levels)
        counts = sum((o.acceptance for o in outputs), Acceptance(levels))
        passes = max(sum(o.passes for o in outputs), 1)  # where it proposes nothing there is nothing to accept
        before = [passes, *counts.accepted[:-1]]
        accuracies, trees = [[a / b if b else 0.0] for a, b in zip(counts.accepted, before)], False
    budgets = [n for n in BUDGETS if n <= section.tree.total] if trees else []
    widths = sorted({2, levels + 1, *(n + 1 for n in budgets)})
    curve = measure_curve(target, drafter, CONTEXT, widths, levels, GROWN if trees else [])
    return choose(accuracies, curve, budgets, trees)
