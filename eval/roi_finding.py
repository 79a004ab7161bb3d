"""What is found of one figure of a claim."""

from collections.abc import Callable
from dataclasses import dataclass

from eval.roi_refuse import Refusal

ROUNDING = 0.02  # a claimed figure within it of ours was only rounded
HOLDS, POSSIBLE, WRONG, IMPOSSIBLE, UNSAID = "holds", "possible", "wrong", "impossible", "cannot be said"


@dataclass(frozen=True)
class Finding:
    """One figure: what was claimed, what it comes to, and the judgement. possible: it only breaks no bound."""

    about: str
    claimed: str
    correct: str
    verdict: str
    why: str = ""
    value: float | None = None  # the corrected figure
    number: int = 0  # of the refusal
    unknown: bool = False  # it could not be judged, since a name is not known


def compared(about: str, claimed: float, value: float, why: str, unit: str = "{:,.3g}", exact: bool = False) -> Finding:
    """A claimed figure against ours. `exact`: a count, which nobody rounds."""
    near = claimed == value if exact else abs(claimed - value) <= ROUNDING * abs(value)
    return Finding(about, unit.format(claimed), unit.format(value), HOLDS if near else WRONG, why, value)


def refused(rule: Callable[[], None], about: str, claimed: str = "", correct: str = "", verdict: str = UNSAID,
            value: float | None = None) -> list[Finding]:
    """The finding of a rule that refuses; none where it lets pass."""
    try:
        rule()
    except Refusal as error:
        return [Finding(about, claimed, correct, verdict, str(error), value, error.number)]
    return []
