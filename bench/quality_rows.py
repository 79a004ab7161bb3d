"""The trainings of `time_to_quality`, what each found, and the rows that they make."""

from dataclasses import dataclass

from bench.rows import Row
from bench.sides import OWN


@dataclass(frozen=True)
class Unit:
    """One training. start: first weights, `own` for a peer's."""

    side: str
    depth: int
    lr: float
    start: str

    @property
    def name(self) -> str:
        return f"{self.side}_{self.start}_k{self.depth}_lr{self.lr:g}"


@dataclass
class Outcome:
    """What a unit found. curve: (step, seconds of training, mean acceptance length) of each checkpoint, the first
    before any step."""

    reference: str
    curve: list[tuple[int, float, float]]

    def reached(self, length: float) -> float | None:
        """Seconds to this length, on the line between the checkpoints around it; None where it was not reached."""
        for (_, before, low), (_, seconds, found) in zip([self.curve[0], *self.curve], self.curve):
            if found >= length:
                return seconds if found <= low else before + (length - low) / (found - low) * (seconds - before)
        return None

    @property
    def seconds(self) -> float:
        return self.curve[-1][1]


def units(peers: list[str], depths: list[int], own_lrs: list[float], peer_lrs: list[float]) -> list[Unit]:
    """All trainings, ours first: from random weights and from the target's last layer."""
    found = []
    for depth in depths:
        found += [Unit(OWN, depth, rate, start) for start in ("random", "target_layer") for rate in own_lrs]
        found += [Unit(peer, depth, rate, "own") for peer in peers for rate in peer_lrs]
    return found


def quality_rows(outcomes: dict[Unit, Outcome], depths: list[int], own_rates: int, rates: int,
                 length: float) -> list[Row]:
    """Rows of each depth, from random weights and (`_warm`) from the target's last layer. Each side counts once it has
    run with all its rates: `own_rates` of ours, `rates` of a peer's."""
    rows = []
    for depth in depths:
        peers: dict[str, list[tuple[Unit, Outcome]]] = {}
        for unit, outcome in outcomes.items():
            if unit.side != OWN and unit.depth == depth:
                peers.setdefault(unit.side, []).append((unit, outcome))
        whole = {name: found for name, found in peers.items() if len(found) == rates}
        for start, ending in (("random", ""), ("target_layer", "_warm")):
            ours = [pair for pair in outcomes.items()
                    if pair[0].side == OWN and pair[0].depth == depth and pair[0].start == start]
            if len(ours) == own_rates:
                rows += against(f"k{depth}{ending}", ours, whole, length)
    return rows


def at_best(found: list[tuple[Unit, Outcome]], length: float) -> tuple[Unit, Outcome]:
    """The first to reach the length; where none did, the one that came nearest."""
    return min(found, key=lambda pair: (pair[1].reached(length) or float("inf"), -best(pair[1])))


def against(variant: str, ours: list[tuple[Unit, Outcome]], peers: dict[str, list[tuple[Unit, Outcome]]],
            length: float) -> list[Row]:
    """Ours against each peer, all at their best rate. `ratio` is against the fastest peer; where one never got there,
    `ratio_at_least` counts what it trained at its longest."""
    unit, outcome = at_best(ours, length)
    own = outcome.reached(length)
    rows = [Row(variant, "seconds", own, "s"), Row(variant, "best_length", best(outcome), "tokens"),
            Row(variant, "lr", unit.lr, "")]
    times: dict[str, float] = {}
    for name, found in peers.items():
        unit, outcome = at_best(found, length)
        seconds, reference = outcome.reached(length), outcome.reference
        rows += [Row(variant, f"reference_seconds_{name}", seconds, "s", reference),
                 Row(variant, f"reference_best_length_{name}", best(outcome), "tokens", reference),
                 Row(variant, f"reference_lr_{name}", unit.lr, "", reference)]
        if seconds is not None:
            times[reference] = seconds
        elif own:
            longest = max(pair[1].seconds for pair in found)
            rows.append(Row(variant, f"ratio_at_least_{name}", longest / own, "x", reference))
    if own and times:
        fastest = min(times, key=times.__getitem__)
        rows.append(Row(variant, "ratio", times[fastest] / own, "x", fastest))
    return rows


def best(outcome: Outcome) -> float:
    """The longest mean acceptance length of a checkpoint."""
    return max(found for _, _, found in outcome.curve)
