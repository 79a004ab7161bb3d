"""Answers in atomic units: read where one is complete, otherwise made, with what a kill left of it."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.backends.base import Backend, Losses
from data.backends.journal import Journal
from data.generate import Answer, Request
from data.place import LocalPlace
from data.ranks import Ranks, appears
from data.recorder import Keeper
from data.remote import Remote
from recipes.errors import RunError
from recipes.files import sha256_json, write_json


@dataclass
class Unit:
    """`lost`: id -> why a request has no answer; `counts`: failed attempts by reason, and how ids were got."""

    answers: list[Answer]
    lost: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Tally:
    """All units of a run: requests made, those without an answer by reason, and what was counted on the way."""

    def __init__(self) -> None:
        self.asked, self.lost, self.counts = 0, Counter(), Counter()

    def allowed(self, share: float) -> int:
        """Further rows that may be lost."""
        return int(share * self.asked) - self.lost.total()

    def add(self, unit: Unit) -> list[Answer]:
        self.lost.update(unit.lost.values())
        self.counts.update(unit.counts)
        return unit.answers


def unit_key(requests: list[Request]) -> str:
    """What ties a stored unit to its requests."""
    return sha256_json([[r.id, r.prompt, asdict(r.sampling), r.overrun] for r in requests])


def unit_digest(stored: dict[str, Any]) -> str:
    """SHA-256 of all that a unit's file says."""
    return sha256_json({key: value for key, value in stored.items() if key != "sha256"})


def unit_intact(stored: dict[str, Any]) -> bool:
    """True where the unit is as it was written; one from before it held its checksum passes."""
    return stored.get("sha256") in (None, unit_digest(stored))


def stored_unit(path: Path, requests: list[Request]) -> Unit | None:
    """The unit of these requests, where `path` holds it complete."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != unit_key(requests) or not unit_intact(stored):
            return None
        unit = Unit([Answer(**row) for row in stored["answers"]], stored.get("lost", {}), stored.get("counts", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, not readable or not a unit: it is (re)made
    path.with_suffix(".jsonl").unlink(missing_ok=True)
    return unit


def make_unit(backend: Backend, path: Path, requests: list[Request], max_tokens: int, losses: Losses,
              keeping: AbstractContextManager[Keeper | None] | None = None) -> Unit:
    """Answers the requests and stores them in `path`.

    keeping: entered first and left before the unit is stored: what it keeps is there whenever the unit is.
    Raises ConfigError or RunError as the backend does; the answers finished by then are kept beside `path`.
    """
    key = unit_key(requests)
    journal = Journal(path.with_suffix(".jsonl"), key)
    try:
        with keeping or nullcontext() as keeper:
            answers = backend.run(requests, max_tokens, journal, losses, keeper)
    finally:
        journal.close()
    unit = Unit(answers, losses.rows, dict(journal.counts))
    notes = {name: value for name, value in (("lost", unit.lost), ("counts", unit.counts)) if value}
    stored = {"key": key, "answers": [asdict(a) for a in answers], **notes}
    write_json(path, stored | {"sha256": unit_digest(stored)})
    journal.remove()
    return unit


class Units:
    """All units of a trace run, made by its ranks together.

    `keeping(part, name)`: keeps the states of a unit that is made here. `lost_share`: see
    generation.max_lost_share; it holds for all ranks together.
    """

    def __init__(self, backend: Backend, place: LocalPlace | Remote, ranks: Ranks, lost_share: float,
                 keeping: Callable[[str, str], AbstractContextManager[Keeper | None] | None]) -> None:
        self.backend, self.place, self.ranks = backend, place, ranks
        self.lost_share, self.keeping = lost_share, keeping
        self.tally = Tally()

    def answers(self, part: str, units: dict[str, list[Request]], max_tokens: int,
                progress: Callable[[int, int], None] = lambda rows, tokens: None) -> list[list[Answer]]:
        """The answers of each of these units, on every rank; rows that the backend lost are missing, and counted.
        `progress` gets the rows of units that are finished or taken, and the tokens known here.

        Raises as `make_unit`, and RunError where another rank's unit does not come to be seen here.
        """
        ranks, paths = self.ranks, {name: self.place.folder / part / f"{name}.json" for name in units}
        self.tally.asked += sum(map(len, units.values()))
        found: dict[str, Unit] = {}
        for name, requests in units.items() if ranks.rank == 0 else ():
            if (unit := stored_unit(paths[name], requests)) is not None:
                found[name] = unit
                self.place.share(paths[name])
        missing, lost = ranks.agree([[name for name in units if name not in found],
                                     sum(len(unit.lost) for unit in found.values())])
        allowed, lose, take = self.tally.allowed(self.lost_share) - lost, ranks.counter(), ranks.counter()
        rows, seen = sum(len(requests) for name, requests in units.items() if name in found), 0
        tokens = sum(map(unit_tokens, found.values()))
        while (number := take(1) - 1) < len(missing):
            rows, seen = rows + sum(len(units[name]) for name in missing[seen:number]), number
            progress(rows, tokens)
            name = missing[number]
            found[name] = make_unit(self.backend, paths[name], units[name], max_tokens, Losses(allowed, lose),
                                    self.keeping(part, name))
            self.place.share(paths[name])
            tokens += unit_tokens(found[name])
        ranks.meet()
        for name, requests in units.items():
            unit = found.get(name) or (stored_unit(paths[name], requests) if appears(paths[name]) else None)
            if unit is None:
                raise RunError(f"{paths[name]}: rank {ranks.rank} does not find what another rank has written there; "
                               "every machine needs the same storage, recipe, inputs and versions of packages")
            found[name] = unit
        progress(sum(map(len, units.values())), sum(map(unit_tokens, found.values())))
        return [self.tally.add(found[name]) for name in units]


def unit_tokens(unit: Unit) -> int:
    """Tokens of all its answers."""
    return sum(len(answer.tokens) for answer in unit.answers)
