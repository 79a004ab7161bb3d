"""Where prompts come from: local JSONL, the built-in evaluation set, and the target's own (data/synthesis.py)."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from data.chat import Message
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sha256_json

HERE = Path(__file__).parent
BUILTIN = HERE / "eval_prompts.jsonl"
BUILTIN_SHA256 = (HERE / "eval_prompts.sha256").read_text(encoding="ascii").strip()
ROLES = ("system", "user", "assistant")
SHINGLE = 8  # words; two prompts that share most of their 8-word runs are the same prompt


@dataclass
class Prompt:
    """A conversation that ends with a user turn. `id` is stable: it depends on the content only. `own`: the target
    wrote it itself. `given`: the answer that the source holds."""

    id: str
    messages: list[Message]
    kind: str = ""
    own: bool = False
    tools: list | None = None
    given: list[Message] = field(default_factory=list)


@dataclass
class Intake:
    """Prompts kept and, for the rest, how many were dropped for which reason."""

    prompts: list[Prompt] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)


def content_id(messages: list[Message]) -> str:
    return sha256_json(messages)[:16]


def read_jsonl(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file, one object a line with `messages` or `prompt` (and optionally `id`, `kind`).

    Trailing assistant turns are dropped: the target answers itself. Raises ConfigError naming file and
    line for anything malformed, and where the file is missing, unreadable or empty.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read prompts: {getattr(error, 'strerror', None) or error}") from None
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path}: holds no prompts; each line needs `messages` or `prompt`")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not ({"messages", "prompt"} & set(row)):
        raise ConfigError(f"{where}: each line is an object with `messages` or `prompt`")
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages = {messages!r}: must be a list of turns")
    for turn in messages:
        if not isinstance(turn, dict) or turn.get("role") not in ROLES or not isinstance(turn.get("content"), str):
            raise ConfigError(f"{where}: turn {turn!r}: needs `role` ({', '.join(ROLES)}) and text `content`")
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
    given: list[Message] = []
    while messages and messages[-1]["role"] == "assistant":
        given.insert(0, messages.pop())
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ConfigError(f"{where}: the last turn to be answered must be a user turn with text")
    return Prompt(str(row.get("id") or content_id(messages)), messages, str(row.get("kind", "")), given=given)


def evaluation_prompts(name: str, limit: int = 0) -> tuple[list[Prompt], str]:
    """Evaluation prompts and the SHA-256 of their file. `limit` keeps the first N of every kind (0: all).

    Raises RunError where the built-in file is not the committed one: its numbers would not be comparable.
    """
    path = BUILTIN if name == "builtin" else Path(name)
    prompts = read_jsonl(path)
    checksum = sha256_file(path)
    if name == "builtin" and checksum != BUILTIN_SHA256:
        raise RunError(f"{path}: checksum {checksum[:12]} is not the committed {BUILTIN_SHA256[:12]}")
    if limit:
        seen: Counter = Counter()
        kept = []
        for prompt in prompts:
            seen[prompt.kind] += 1
            if seen[prompt.kind] <= limit:
                kept.append(prompt)
        prompts = kept
    return prompts, checksum


def normalise(text: str) -> str:
    """Case, width, punctuation and spacing folded: what counts as the same text."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def _shingles(messages: list[Message]) -> set[str]:
    words = normalise(" ".join(m["content"] for m in messages if m["role"] == "user")).split()
    return {" ".join(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}


class Filter:
    """Keeps a prompt once, of a fitting length, and never one that the evaluation will judge by."""

    def __init__(self, held_out: list[Prompt]) -> None:
        self.seen: set[str] = set()
        self.exact = {normalise(p.messages[-1]["content"]) for p in held_out}
        self.shingles = set().union(*(_shingles(p.messages) for p in held_out)) if held_out else set()

    def reason(self, prompt: Prompt, prompt_tokens: int, shortest: int, longest: int) -> str | None:
        """Why the prompt is dropped, or None. `prompt_tokens` counts the rendered prompt."""
        text = normalise(prompt.messages[-1]["content"])
        if len(text.split()) < 2 or prompt_tokens < shortest:
            return "too short"
        if prompt_tokens > longest:
            return "too long"
        if text in self.exact or self.overlap(prompt) > 0.5:
            return "overlaps the evaluation prompts"
        key = normalise(" ".join(m["content"] for m in prompt.messages))
        if key in self.seen:
            return "duplicate"
        self.seen.add(key)
        return None

    def overlap(self, prompt: Prompt) -> float:
        """Share of the prompt's 8-word runs that the evaluation prompts contain."""
        mine = _shingles(prompt.messages)
        return len(mine & self.shingles) / len(mine)


def hold_out(ids: list[str], count: int, seed: int) -> set[str]:
    """The `count` ids of the validation split: the smallest by seeded hash, so order and additions do not matter."""
    ranked = sorted(ids, key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
    return set(ranked[:count])
