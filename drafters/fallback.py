"""A drafter that a request stops using while it does not pay there: plain decoding, with a trial now and then.

Of each request the mean acceptance length of the last drafts is held against what a cycle with a draft costs in plain
steps of the target (Leviathan et al. 2023, theorem 3.8): below that break-even drafting makes the request slower. It
then pauses, and after each trial that fails twice as long. In a batch a pause saves the row's draft; the pass is as
wide as that of the rows that go on, so time is won where all rows of a batch pause, first of all at batch 1.
Legend: B rows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import steady
from drafters.deferred import Deferred
from drafters.imported import Opened
from drafters.parts import Part, fresh_part, open_part
from drafters.target import Target
from drafters.tree import Draft, Plan
from recipes.files import sha256_json
from recipes.schema import NonNegativeFloat, PositiveInt, opt

PAUSED = "paused"  # who drafted, in a report, where nobody did
LONGEST = 8  # pauses of a request that fails every trial grow to so many times the first


@dataclass
class Options:
    """`drafter.options` of a recipe with kind fallback."""

    drafter: Part = field(default_factory=lambda: Part("eagle3"), metadata={"help": "who drafts, with its path"})
    break_even: NonNegativeFloat = opt(0.0, "tokens a drafted pass has to keep; 0: what make eval measures here before "
                                            "it decodes")
    window: PositiveInt = opt(8, "drafts of a request that are judged together, and drafts of a trial")
    pause: PositiveInt = opt(16, "passes without a draft behind the first failure; twice as many behind each further "
                                 "one, up to 8 times as many")


class Fallback(nn.Module):
    """The drafter and its threshold, which does nothing until it is stated or measured: no pass keeps less than 1."""

    kind = "fallback"
    vocabulary_modules = ()

    def __init__(self, options: Options, drafter: Any) -> None:
        super().__init__()
        self.options, self.drafter = options, drafter
        self.break_even, self.unpriced = options.break_even or 1.0, not options.break_even
        self.shape = getattr(drafter, "shape", None)
        if getattr(drafter, "longest", None) is not None:
            self.longest = drafter.longest

    @property
    def t2d(self) -> Tensor:
        return self.drafter.t2d

    def steady(self, plan: Plan) -> tuple[Any, Plan]:
        """See base.steady: outside the loop there is no acceptance to judge by."""
        return steady(self.drafter, plan)

    def price(self, break_even: float) -> None:
        """What a cycle with a draft costs here, in plain steps of the target."""
        self.break_even = break_even

    def session(self, rows: int, capacity: int) -> "FallbackSession":
        return FallbackSession(self, capacity)

    def meta(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self.options), "drafter": self.drafter.meta()}

    def remarks(self) -> list[str]:
        """What a report has to say of its figures."""
        source = "measured here" if self.unpriced else "of the recipe"
        own = (f"fallback: a request whose last {self.options.window} drafts keep under {self.break_even:.2f} tokens "
               f"a pass ({source}) decodes without for a while; total.by_drafter counts those passes as {PAUSED}")
        return [own, *getattr(self.drafter, "remarks", list)()]


class Pace:
    """Whether one request drafts."""

    def __init__(self, options: Options) -> None:
        self.options, self.left, self.next = options, 0, options.pause
        self.lengths: deque[int] = deque(maxlen=options.window)  # 1 + accepted of its last drafts

    def judge(self, drafted: int, accepted: int, break_even: float) -> None:
        """A pass is over; drafted 0: without a draft."""
        if self.left:
            self.left -= 1
        elif drafted:
            self.lengths.append(1 + accepted)
            if len(self.lengths) == self.options.window:
                if sum(self.lengths) < break_even * self.options.window:
                    self.left, self.next = self.next, min(2 * self.next, LONGEST * self.options.pause)
                    self.lengths.clear()
                else:
                    self.next = self.options.pause


class FallbackSession:
    """The drafter in the decoding loop, for those rows that draft."""

    def __init__(self, drafter: Fallback, capacity: int) -> None:
        self.drafter, self.session = drafter, Deferred(drafter.drafter, capacity)
        self.counts: list[int] | None = None  # tokens that the last proposal has of each row

    def begin(self, prompts: list[list[int]]) -> None:
        self.paces = [Pace(self.drafter.options) for _ in prompts]
        self.session.begin(prompts)

    def observe(self, taps: Tensor | None, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        self.device = tokens.device
        if self.counts is not None:
            for pace, drafted, accepted in zip(self.paces, self.counts, last.tolist()):
                pace.judge(drafted, accepted, self.drafter.break_even)
        self.counts = None
        self.session.observe(taps, tokens, positions, last)

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        drafting = [not pace.left for pace in self.paces]
        if any(drafting):
            draft = self.session.propose(plan, sample)
            real = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.real is None else draft.real
            if not all(drafting):
                real = real & torch.tensor(drafting, device=real.device)[:, None]
            draft = replace(draft, real=real)
        else:
            draft = Draft(torch.zeros(len(drafting), 0, dtype=torch.long, device=self.device))
        by = draft.by or [self.drafter.drafter.kind] * len(drafting)
        self.counts = draft.counts()
        return replace(draft, by=[name if drafts else PAUSED for name, drafts in zip(by, drafting)])

    def keep(self, rows: Tensor) -> None:
        self.paces = [self.paces[row] for row in rows.tolist()]
        self.counts = None if self.counts is None else [self.counts[row] for row in rows.tolist()]
        self.session.keep(rows)

    def join(self, other: "FallbackSession") -> None:
        """Rows join behind what both have observed: no draft is under way."""
        self.paces += other.paces
        self.session.join(other.session)


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> Fallback:
    """With an untrained drafter."""
    return Fallback(options, fresh_part(options.drafter, target, counts, seed))


def opened(options: Options, target: Target, run: Path) -> Opened:
    """With the drafter that the recipe names. ConfigError as open_part has it."""
    found = open_part(options.drafter, target, run, "drafter.options.drafter")
    drafter = Fallback(options, found.drafter)
    return Opened(drafter.eval(), found.folder, sha256_json([drafter.meta(), found.digest]))
