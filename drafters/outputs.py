"""Earlier outputs of a target, for drafters that look things up in them: the answers of a trace folder, or a JSONL."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from drafters.target import Target
from recipes.errors import ConfigError

TRACES = "drafthouse.traces/1"  # `format` of a trace folder's manifest, as data/store.py writes it
TEXTS = ("answer", "text")  # fields of a JSONL line that hold an output; `ids` holds its tokens


@dataclass(frozen=True)
class Output:
    """Tokens int32 [T] of one answer, and whose it is: the digest of its prompt's ids, empty where that is not known.
    """

    tokens: np.ndarray
    prompt: bytes = b""


def digest_of(ids: list[int]) -> bytes:
    """What an output's prompt is recognised by."""
    return hashlib.sha256(np.array(ids, np.int64).tobytes()).digest()[:16]


def earlier_outputs(path: str, target: Target, field: str) -> list[Output]:
    """The answers of a trace folder (also named by its run's folder), or of a JSONL file with `ids`, `answer` or `text`
    in each line, in stored order. ConfigError naming `field`, file and line where it is neither, damaged, or of another
    tokenizer than the target's."""
    place = Path(path)
    for folder in (place, place / "traces"):
        if (folder / "manifest.json").is_file():
            return list(of_traces(folder, target, field))
    if place.suffix != ".jsonl" or not place.is_file():
        raise ConfigError(f"{field} = {path}: no trace folder with a manifest.json, and no .jsonl file")
    return list(of_lines(place, target, field))


def of_traces(folder: Path, target: Target, field: str) -> Iterator[Output]:
    """Answers of all rows, a turn at a time; what was given instead of generated is none of the target's."""
    manifest = mapping(folder / "manifest.json", field)
    if manifest.get("format") != TRACES or not isinstance(manifest.get("shards"), list):
        raise ConfigError(f"{field}: {folder / 'manifest.json'}: no finished trace folder of format {TRACES}")
    made_by = manifest.get("target")
    if not isinstance(made_by, dict) or made_by.get("tokenizer") != target.fingerprint()["tokenizer"]:
        raise ConfigError(f"{field}: {folder}: traced with another tokenizer than target.model = "
                          f"{target.section.model} has: its ids mean other tokens")
    for name in manifest["shards"]:
        yield from of_shard(folder / "shards", str(name), field)


def mapping(path: Path, field: str) -> dict[str, Any]:
    """A JSON mapping of a trace folder."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: {path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{field}: {path}: must be a mapping")
    return found


def of_shard(folder: Path, name: str, field: str) -> Iterator[Output]:
    path, listed = folder / f"{name}.safetensors", mapping(folder / f"{name}.json", field)
    try:
        whole = path.stat().st_size == listed["bytes"]
        with safe_open(path, "np") as shard:
            ids, turns = (shard.get_tensor(part).astype(np.int64) for part in ("ids", "turns"))
        rows = [(int(row["tokens"]), bool(row.get("off_policy"))) for row in listed["rows"]]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{field}: {path}: cannot be read as a shard of traces: {error!r:.200}") from None
    if not whole or sum(tokens for tokens, _ in rows) != len(ids) or len(ids) != len(turns):
        raise ConfigError(f"{field}: {path}: not as its list says; run `make inspect ARGS=--repair` on that run")
    start = 0
    for tokens, given in rows:
        if not given:
            yield from answers_of(ids[start : start + tokens], turns[start : start + tokens])
        start += tokens


def answers_of(ids: np.ndarray, turns: np.ndarray) -> Iterator[Output]:
    """Runs of one turn above 0 in a conversation [T]; what stands before is the prompt."""
    borders = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(turns)]
    for begin, end in zip(borders, borders[1:]):
        if begin < end and turns[begin] > 0:
            yield Output(ids[begin:end].astype(np.int32), digest_of(ids[:begin].tolist()))


def of_lines(path: Path, target: Target, field: str) -> Iterator[Output]:
    """Outputs of a JSONL file, empty lines left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{field}: {path}: line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where}: not JSON: {error}") from None
            tokens = np.array(tokens_of(row, target.tokenizer, where), np.int64)
            if len(tokens) and not (0 <= tokens.min() and tokens.max() < target.vocab_size):
                raise ConfigError(f"{where}: ids outside 0 to {target.vocab_size - 1}, the target's vocabulary")
            yield Output(tokens.astype(np.int32))


def tokens_of(row: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """Tokens of one line."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be an object with ids, {' or '.join(TEXTS)}")
    ids = row.get("ids")
    if isinstance(ids, list) and all(type(i) is int and abs(i) < 2**31 for i in ids):
        return ids
    text = next((row[key] for key in TEXTS if isinstance(row.get(key), str)), None)
    if ids is not None or text is None:
        raise ConfigError(f"{where}: needs ids (a list of token ids) or a text in {' or '.join(TEXTS)}")
    return tokenizer.encode(text, add_special_tokens=False)
