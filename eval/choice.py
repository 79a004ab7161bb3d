"""Which chain or tree to draft: a search over what was measured, never over what is hoped for.

What a draft is worth: E = 1 + the sum over its nodes of the probability that their path is accepted. What it costs: one
pass of the drafter a level, or one for all levels, and one verification of all nodes and the last token.
Speedup = E * target step / cost (Leviathan et al. 2023, theorem 3.8; trees: Cai et al. 2024, Medusa, appendix C).
Pure functions; eval/adapt.py measures. Legend: D levels, R ranks.
"""

import heapq
import math
from dataclasses import dataclass, field

from drafters.tree import StaticTree, chain

Accuracies = list[list[float]]  # [D][R]: the guess of rank r behind an accepted path of length d is the target's token


@dataclass(frozen=True)
class Curve:
    """Measured milliseconds at one batch size: a plain step of the target, a verification by its tokens a row, and a
    level of drafting by the tokens a row that it goes on from. Of a drafter that has all levels in one pass: that pass
    by the levels asked for, and what its levels take besides."""

    target_ms: float
    verify_ms: dict[int, float]
    draft_ms: dict[int, float]
    batch: int = 1
    pass_ms: dict[int, float] = field(default_factory=dict)  # empty: a pass a level, which draft_ms has

    def verify(self, tokens: int) -> float:
        return between(self.verify_ms, tokens)

    def draft(self, tokens: int) -> float:
        return between(self.draft_ms, tokens)

    def whole(self, levels: int) -> float:
        """What drafting so many levels takes whatever they go on from."""
        return between(self.pass_ms, levels) if self.pass_ms else 0.0


def between(points: dict[int, float], at: int) -> float:
    """Linear between the measured points; beyond the last one by the last slope, before the first one constant."""
    known = sorted(points.items())
    if at <= known[0][0] or len(known) == 1:
        return known[0][1]
    for (x0, y0), (x1, y1) in zip(known, known[1:]):
        if at <= x1 or x1 == known[-1][0]:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    raise AssertionError("unreachable: the loop ends at the last point")


@dataclass(frozen=True)
class Choice:
    """A setting, None for not drafting at all, with what it promises and why it was taken."""

    plan: StaticTree | None
    expected: float  # tokens a pass of the target
    speedup: float
    reason: str


def chance(path: tuple[int, ...], accuracies: Accuracies) -> float:
    """Probability that a path is accepted."""
    return math.prod(accuracies[level][rank] for level, rank in enumerate(path))


def search_tree(accuracies: Accuracies, budget: int, depth: int | None = None) -> StaticTree:
    """The tree of `budget` nodes (fewer where no further one could be accepted) with the largest E, by greedy search: a
    node becomes a candidate with its parent and its smaller sibling. depth: most levels (None: all that are known)."""
    levels = len(accuracies) if depth is None else min(depth, len(accuracies))
    waiting = [(-accuracies[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < budget:
        worth, path = heapq.heappop(waiting)
        if worth == 0 and chosen:
            break
        chosen.append(path)
        sibling, child = (*path[:-1], path[-1] + 1), (*path, 0)
        if sibling[-1] < len(accuracies[len(path) - 1]):
            heapq.heappush(waiting, (-chance(sibling, accuracies), sibling))
        if len(child) <= levels:
            heapq.heappush(waiting, (-chance(child, accuracies), child))
    return StaticTree(tuple(chosen))


def expected(plan: StaticTree, accuracies: Accuracies) -> float:
    """E: tokens kept a pass of the target, its own included."""
    return 1 + sum(chance(path, accuracies) for path in plan.paths)


def cost_ms(plan: StaticTree, curve: Curve) -> float:
    """Milliseconds of a cycle."""
    parents = [sum(len(path) == level for path in {p[:-1] for p in plan.paths}) for level in range(plan.depth)]
    levels = sum(curve.draft(max(1, n)) for n in parents)
    return curve.whole(plan.depth) + levels + curve.verify(plan.nodes + 1)


def choose(accuracies: Accuracies, curve: Curve, budgets: list[int], trees: bool) -> Choice:
    """The fastest of all chains and, with `trees`, of the best trees of these numbers of nodes, at every depth."""
    levels = len(accuracies)
    plans = {chain(K): f"chain of {K}" for K in range(1, levels + 1)}
    for budget in budgets if trees else []:
        for depth in range(1, levels + 1):
            tree = search_tree(accuracies, budget, depth)
            plans.setdefault(tree, f"tree of {tree.nodes} nodes and {tree.depth} levels")
    ranked = sorted(((expected(plan, accuracies) * curve.target_ms / cost_ms(plan, curve), -plan.nodes, plan)
                     for plan in plans), key=lambda item: item[:2], reverse=True)
    speed, _, best = ranked[0]
    about = (f"{plans[best]}: {expected(best, accuracies):.2f} tokens a pass for {cost_ms(best, curve):.2f} ms of a "
             f"cycle at batch {curve.batch}, where a plain step takes {curve.target_ms:.2f} ms: {speed:.2f} times as "
             "fast as plain decoding")
    if speed <= 1.0:
        return Choice(None, 1.0, 1.0, f"no draft: the best of {len(plans)} settings loses ({about})")
    rest = f"; next, {plans[ranked[1][2]]} with {ranked[1][0]:.2f}" if len(ranked) > 1 else ""
    return Choice(best, expected(best, accuracies), speed, f"{about}, the best of {len(plans)} settings{rest}")
