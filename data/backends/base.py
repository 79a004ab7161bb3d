"""The contract of answer backends, and the rules that every answer keeps wherever it came from."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from data.backends.journal import Journal
from data.generate import Answer, Request
from data.recorder import Keeper
from recipes.errors import RunError


class Fault(Exception):
    """An answer that cannot be used. `reason` is counted; `wait` are the seconds that the server asked for; `final`:
    no further attempt at this request can succeed."""

    def __init__(self, reason: str, wait: float = 0.0, final: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.wait, self.final = reason, wait, final


class Losses:
    """Rows without a usable answer, each with its reason. More than `allowed` of them stop the run; `count` adds to
    what units in work elsewhere lose from the same allowance, and gives the sum."""

    def __init__(self, allowed: int, count: Callable[[int], int] | None = None) -> None:
        self.allowed, self.count = allowed, count
        self.rows: dict[str, str] = {}

    def add(self, row: str, reason: str) -> None:
        """Raises RunError where the share that the recipe allows is passed."""
        new = row not in self.rows
        self.rows[row] = reason
        if (self.count(new) if self.count else len(self.rows)) > self.allowed:
            reasons = dict(Counter(self.rows.values()))
            raise RunError(f"rows without a usable answer: {reasons}; generation.max_lost_share allows "
                           f"{max(0, self.allowed)} more here. Finished answers are kept: mend the cause and run again")


class Backend(Protocol):
    """Answers requests with the target's token ids."""

    def run(self, requests: list[Request], max_tokens: int, journal: Journal, losses: Losses,
            keeper: Keeper | None = None) -> list[Answer]:
        """Answers in the order of the requests; a row that `losses` names has none.

        A backend whose answers come one by one adds each to the journal as it comes and asks for none that is
        there. One that runs the target itself hands the states of rows with turns to the keeper as they are finished.
        Raises ConfigError or RunError where going on would be wrong or useless.
        """


def check_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as a list. Raises Fault for anything that is no token of a vocabulary of this size."""
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise Fault("ids outside the vocabulary")
    return list(ids)


def restore_end(ids: list[int], finish: str, named: int | None, trimmed: bool, end_ids: Sequence[int]) -> list[int]:
    """The ids with the end token that some servers cut off.

    named: the id that the server says it stopped at. trimmed: one token more was generated than was returned.
    Raises Fault where the answer stopped at something that is no end token of the target, or does not say at what.
    """
    if finish != "stop" or (ids and ids[-1] in end_ids):
        return ids
    if named in end_ids:
        return [*ids, named]
    if named is None and trimmed and len(end_ids) == 1:
        return [*ids, end_ids[0]]
    raise Fault("stopped without an end token of the target")


def accept(request: Request, ids: list[int], finish: str, max_tokens: int, end_ids: Sequence[int]) -> Answer:
    """The answer without its overrun. Raises Fault where ids and finish reason contradict each other.

    An end token that is also the last token allowed counts as a stop, as in our own decoding (case 22).
    """
    if not ids:
        raise Fault("no tokens")
    if len(ids) > max_tokens:
        raise Fault("more tokens than asked")
    if set(ids[:-1]) & set(end_ids):
        raise Fault("tokens after an end token")
    if finish not in ("stop", "length"):
        raise Fault(f"finish_reason {finish!r}")
    ended, full = ids[-1] in end_ids, len(ids) == max_tokens
    if (finish == "stop" and not ended) or (finish == "length" and not full):
        raise Fault("finish_reason contradicts the ids")
    return Answer(request.id, request.prompt, ids, "stop" if ended else "length")
