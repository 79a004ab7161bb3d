"""What a prompt is, the evaluation sets that are judged by, what counts as the same text, and the split.

Training prompts come from data/intake.py.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.chat import Message
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sha256_json

HERE = Path(__file__).parent
BUILTIN = HERE / "eval_prompts.jsonl"
BUILTIN_SHA256 = (HERE / "eval_prompts.sha256").read_text(encoding="ascii").strip()
ROLES = ("system", "user", "assistant")
# Scripts without spaces between words: Thai to Lao, Myanmar, Khmer, kana, CJK ideographs.
UNSPACED = ("\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
            "\U00020000-\U0003ffff")
WORD = re.compile(f"[{UNSPACED}]|[^\\W{UNSPACED}]+")


@dataclass
class Prompt:
    """A conversation that ends with the turn to be answered. `id` is stable: the row's own or made of its content.

    `own`: the target wrote it itself. `tools`: definitions that the template renders. `ids`: a prompt that came as
    token ids and is sent as they are. `given`: the answer that the source holds; the target gives its own.
    """

    id: str
    messages: list[Message]
    kind: str = ""
    own: bool = False
    tools: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    given: list[Message] = field(default_factory=list)


@dataclass
class Intake:
    """Prompts kept; of the rest, how many were dropped for which reason; how many were normalised in which way."""

    prompts: list[Prompt] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    normalised: Counter = field(default_factory=Counter)


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
    except (ValueError, RecursionError) as error:
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
    try:
        return Prompt(str(row.get("id") or content_id(messages)), messages, str(row.get("kind", "")), given=given)
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: invalid unicode: half of a surrogate pair") from None


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
    """Case, width, punctuation and spacing folded: what counts as the same text, as words with spaces between.

    A character of a script that is written without spaces is a word of its own.
    """
    return " ".join(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def rank(prompt_id: str, seed: int | str) -> bytes:
    """Place of an id in a seeded order that depends on nothing but the id."""
    return hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()


def hold_out(ids: list[str], count: int, seed: int | str) -> set[str]:
    """The `count` ids of a split: the smallest by seeded hash, so order and additions do not matter."""
    return set(sorted(ids, key=lambda i: rank(i, seed))[:count])
