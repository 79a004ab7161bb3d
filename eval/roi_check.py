"""`make roi ARGS="check CLAIM"`: figures of an offer or an article, held against one another and against physics.

A claim is a YAML file (one mapping or a list) or words key=value on the command line. Every rule speaks only where the
claim has the figures that it needs; a claim that no rule can judge is said to be so, never passed.
"""

from eval.roi_bounds import cycles, memory, rates, replicas, room
from eval.roi_claim import Claim
from eval.roi_figures import costs, end_to_end, fleet, hours, shares
from eval.roi_finding import IMPOSSIBLE, UNSAID, WRONG, Finding
from eval.roi_grounds import measured, moved, priced, sides
from recipes.errors import ConfigError

RULES = (costs, shares, hours, end_to_end, cycles, rates, room, fleet, replicas, memory, moved, sides, measured, priced)


def check(claim: Claim) -> list[Finding]:
    """Everything that can be said about a claim. A name that nobody knows is a finding, so that the figures that do not
    need it, and the claims behind it, are judged all the same."""
    found, unknown = [], {}
    for rule in RULES:
        try:
            found += rule(claim)
        except ConfigError as error:
            unknown[str(error)] = Finding("a name", "", "", UNSAID, str(error), unknown=True)
    found += unknown.values()
    return found or [Finding("the claim", "", "", UNSAID, "no two of its figures can be held against each other")]


def is_wrong(found: list[Finding]) -> bool:
    """Whether a figure does not hold."""
    return any(f.verdict in (WRONG, IMPOSSIBLE) for f in found)


def is_refused(found: list[Finding]) -> bool:
    """Whether the claim rests on what may not be concluded from, or on a name that nobody knows."""
    return any(f.verdict == UNSAID and (f.number or f.unknown) for f in found)


def lines(claim: Claim, found: list[Finding]) -> list[str]:
    """What the terminal shows of one claim."""
    said = [claim.name]
    for f in found:
        figures = f"{f.claimed} -> {f.correct}" if f.claimed or f.correct else ""
        said.append(f"  {f.verdict:14} {f.about}: {figures}{' ' if figures else ''}({f.why})")
    return said
