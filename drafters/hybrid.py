"""Lookup first, a trained drafter otherwise: each request drafts by what it repeats, and where it repeats nothing by
what was learnt.

Oliaro et al. 2024, "SuffixDecoding", combine both by the lookup's own score; here the length of the match decides, row
by row. Both see every token, so either may draft in any cycle; the trained drafter computes in those
cycles alone in which a row asks for it (drafters/deferred.py).
Legend: B rows.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drafters.base import steady
from drafters.deferred import Deferred
from drafters.imported import Opened
from drafters.parts import Part, fresh_part, open_part
from drafters.registry import entry
from drafters.target import Target
from drafters.tree import Draft, DynamicTree, Plan, StaticTree, chain, mixed, planned
from recipes.files import sha256_json
from recipes.schema import NonNegativeInt, PositiveInt, opt

LOOKUPS = ("suffix", "lookup")  # kinds whose sessions say in `matched` how long a match drafted


@dataclass
class Options:
    """`drafter.options` of a recipe with kind hybrid."""

    first: Part = field(default_factory=lambda: Part("suffix"), metadata={"help": "suffix or lookup, with its options"})
    then: Part = field(default_factory=lambda: Part("eagle3"), metadata={"help": "who drafts otherwise, with its path"})
    match: PositiveInt = opt(4, "tokens of the shortest match with which the first drafts")
    length: NonNegativeInt = opt(0, "chains: most tokens of a draft of the second; 0: as many as the plan")

    def __post_init__(self) -> None:
        if self.first.kind not in LOOKUPS:
            raise ValueError(f"first.kind = {self.first.kind}: must be one of {', '.join(LOOKUPS)}")
        if self.then.kind in LOOKUPS:
            raise ValueError(f"then.kind = {self.then.kind}: looks up too; name a trained drafter, or layer_cut")


class Hybrid(nn.Module):
    """The drafter of two."""

    kind = "hybrid"
    vocabulary_modules = ()

    def __init__(self, options: Options, first: Any, then: Any) -> None:
        super().__init__()
        self.options, self.first, self.then = options, first, then
        self.shape = getattr(then, "shape", None)
        longest = getattr(then, "longest", None)
        if longest is not None and not 0 < options.length <= longest:
            self.longest = longest
        self.register_buffer("t2d", first.t2d | then.t2d, persistent=False)

    def steady(self, plan: Plan) -> tuple[Any, Plan]:
        """See base.steady: a text made for a measurement has nothing to look up."""
        return steady(self.then, self.drafted(plan))

    def drafted(self, plan: Plan) -> Plan:
        """What the second is asked for."""
        if isinstance(plan, StaticTree) and plan.narrow and 0 < self.options.length < plan.depth:
            return chain(self.options.length, plan.stop)
        return plan

    def looked_up(self, plan: Plan) -> Plan:
        """What the first is asked for: where it cannot follow the plan itself, a chain as deep, of no more tokens."""
        if isinstance(plan, DynamicTree) and "dynamic trees" in entry(self.first.kind).drafts:
            return plan
        return chain(min(plan.depth, plan.nodes))

    def session(self, rows: int, capacity: int) -> "HybridSession":
        return HybridSession(self, rows, capacity)

    def meta(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self.options), "first": self.first.meta(),
                "then": self.then.meta()}

    def remarks(self) -> list[str]:
        """What a report has to say of its figures."""
        own = (f"hybrid: {self.first.kind} drafts behind a match of {self.options.match} tokens or more, "
               f"{self.then.kind} otherwise; total.by_drafter has both")
        return [own, *(remark for part in (self.first, self.then) for remark in getattr(part, "remarks", list)())]


class HybridSession:
    """Both in the decoding loop."""

    def __init__(self, drafter: Hybrid, rows: int, capacity: int) -> None:
        self.drafter = drafter
        self.first = drafter.first.session(rows, capacity)
        self.then = Deferred(drafter.then, capacity)

    def begin(self, prompts: list[list[int]]) -> None:
        self.first.begin(prompts)
        self.then.begin(prompts)

    def observe(self, taps: Tensor | None, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        self.first.observe(None, tokens, positions, last)
        self.then.observe(taps, tokens, positions, last)

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        """Either's draft in each row. ValueError for a plan that the second cannot follow."""
        drafter, plan = self.drafter, planned(plan)
        found = self.first.propose(drafter.looked_up(plan))
        rows = [n > 0 and matched >= drafter.options.match for n, matched in zip(found.counts(), self.first.matched)]
        found.by = found.by or [drafter.first.kind] * len(rows)
        if all(rows):
            return found
        draft = self.then.propose(drafter.drafted(plan), sample)
        draft.by = draft.by or [drafter.then.kind] * len(rows)
        return mixed(found, draft, rows) if any(rows) else draft

    def keep(self, rows: Tensor) -> None:
        self.first.keep(rows)
        self.then.keep(rows)

    def join(self, other: "HybridSession") -> None:
        self.first.join(other.first)
        self.then.join(other.then)


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> Hybrid:
    """With an untrained second drafter."""
    first, then = (fresh_part(part, target, counts, seed) for part in (options.first, options.then))
    return Hybrid(options, first.to(then.t2d.device), then)


def opened(options: Options, target: Target, run: Path) -> Opened:
    """With the drafters that the recipe names. ConfigError as open_part has it."""
    first = open_part(options.first, target, run, "drafter.options.first")
    then = open_part(options.then, target, run, "drafter.options.then")
    drafter = Hybrid(options, first.drafter, then.drafter)
    return Opened(drafter.eval(), then.folder, sha256_json([drafter.meta(), first.digest, then.digest]))
