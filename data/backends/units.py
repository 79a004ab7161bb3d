"""One atomic unit of answers: read where it is complete, otherwise made, with what a kill left of it."""

import json
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data.backends.base import Backend, Losses
from data.backends.journal import Journal
from data.generate import Answer, Request
from data.recorder import Keeper
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


def answer_unit(backend: Backend, path: Path, requests: list[Request], max_tokens: int, allowed: int,
                keeping: AbstractContextManager[Keeper | None] | None = None) -> Unit:
    """The unit of these requests, stored in `path`. At most `allowed` rows may be lost.

    keeping: entered where the unit has to be made, and left before it is stored: what it keeps is there whenever the
    unit is.
    Raises ConfigError or RunError as the backend does; the answers finished by then are kept beside `path`.
    """
    key = sha256_json([[r.id, r.prompt, asdict(r.sampling), r.overrun] for r in requests])
    journal_path = path.with_suffix(".jsonl")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            unit = Unit([Answer(**row) for row in stored["answers"]], stored.get("lost", {}), stored.get("counts", {}))
            journal_path.unlink(missing_ok=True)
            return unit
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or not readable: this unit is (re)made
    journal, losses = Journal(journal_path, key), Losses(allowed)
    try:
        with keeping or nullcontext() as keeper:
            answers = backend.run(requests, max_tokens, journal, losses, keeper)
    finally:
        journal.close()
    unit = Unit(answers, losses.rows, dict(journal.counts))
    notes = {name: value for name, value in (("lost", unit.lost), ("counts", unit.counts)) if value}
    write_json(path, {"key": key, "answers": [asdict(a) for a in answers], **notes})
    journal.remove()
    return unit
