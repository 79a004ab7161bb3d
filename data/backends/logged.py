"""Answers out of a log that holds token ids (`generation.backend: logs`), matched by the prompt's ids.

A line is a vLLM or SGLang completion made with `return_token_ids`, or one choice of it: `prompt_token_ids`,
`token_ids` and, where known, `finish_reason`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from data.backends.base import Fault, Losses, accept, check_ids, restore_end
from data.backends.journal import Journal
from data.backends.local import LocalBackend
from data.backends.wire import prompt_ids_of
from data.generate import Answer, Request
from data.recorder import Keeper
from drafters.target import Target
from recipes.errors import ConfigError
from recipes.schema import Generation


def prompt_key(ids: list[int]) -> bytes:
    return hashlib.sha256(",".join(map(str, ids)).encode()).digest()


def read_line(line: bytes) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """A line's object, its choice and its prompt's ids. Raises Fault where it holds no answer."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise Fault("not JSON") from None
    if not isinstance(row, dict):
        raise Fault("not an object")
    if not isinstance(row.get("choices"), list):
        row = {**row, "choices": [row]}
    choice = row["choices"][0] if row["choices"] else None
    if not isinstance(choice, dict) or not isinstance(choice.get("token_ids"), list):
        raise Fault("no token ids")
    prompt = prompt_ids_of(row)
    if prompt is None:
        raise Fault("no prompt token ids")
    return row, choice, prompt


class LogBackend:
    """The first answer of each prompt. Held-out rows are answered by the target itself: a replay needs its greedy
    tokens and what follows them, which no log holds."""

    def __init__(self, section: Generation, target: Target) -> None:
        """Raises ConfigError where the log cannot be read or holds no answer with token ids."""
        self.section, self.target, self.path = section, target, Path(section.log)
        self.local = LocalBackend(section, target)
        self.places: dict[bytes, int] = {}
        first = ""
        try:
            with open(self.path, "rb") as f:
                place = 0
                for number, line in enumerate(f, 1):
                    try:
                        if line.strip():
                            self.admit(line, number, place)
                    except Fault as fault:
                        first = first or f" (line {number}: {fault.reason})"
                    place += len(line)
        except OSError as error:
            raise ConfigError(f"generation.log = {self.path}: cannot read it: {error.strerror}") from None
        if not self.places:
            raise ConfigError(f"generation.log = {self.path}: holds no answer with prompt and answer token ids{first}")

    def admit(self, line: bytes, number: int, place: int) -> None:
        """Remembers where the first answer of a prompt is. Raises ConfigError for another model's (case 36)."""
        row, _, prompt = read_line(line)
        wanted = self.section.server.model
        if wanted and row.get("model") not in (None, wanted):
            raise ConfigError(f"generation.log = {self.path}, line {number}: an answer of {row['model']!r}, not of "
                              f"generation.server.model = {wanted}")
        self.places.setdefault(prompt_key(prompt), place)

    def run(self, requests: list[Request], max_tokens: int, journal: Journal, losses: Losses,
            keeper: Keeper | None = None) -> list[Answer]:
        """See Backend.run."""
        own = self.local.run([r for r in requests if r.overrun], max_tokens, journal, losses, keeper)
        found = {a.id: a for a in own}
        with open(self.path, "rb") as f:
            for request in requests:
                if request.overrun:
                    continue
                try:
                    found[request.id] = self.logged(f, request, max_tokens)
                except Fault as fault:
                    losses.add(request.id, fault.reason)
        return [found[r.id] for r in requests if r.id in found]

    def logged(self, file: Any, request: Request, max_tokens: int) -> Answer:
        place = self.places.get(prompt_key(request.prompt))
        if place is None:
            raise Fault("not in the log")
        file.seek(place)
        _, choice, prompt = read_line(file.readline())
        if prompt != request.prompt:
            raise Fault("the log changed while it was read")
        end_ids = self.target.end_ids
        ids = check_ids(choice["token_ids"], self.target.vocab_size)
        named = choice.get("stop_reason", choice.get("matched_stop"))
        ids = restore_end(ids, choice.get("finish_reason"), named if type(named) is int else None, False, end_ids)
        ids = ids[:max_tokens]
        return accept(request, ids, "stop" if set(ids[-1:]) & set(end_ids) else "length", len(ids), end_ids)
