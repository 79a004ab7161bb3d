"""Raw rows of local files, one by one: whatever a row holds, the next one is still read.

Text formats are read by Python's own readers, row by row: a reader that infers a column's type from the first
rows breaks on files whose rows differ (case 65). Bytes that are no UTF-8 become lone surrogates here, so that
only the row that holds them is dropped, by the check in data/formats.py.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from recipes.errors import ConfigError
from recipes.files import sha256_file
from recipes.schema import PromptSource

CELL_LIMIT = 2**31 - 1  # characters; the csv module's own limit of 128 KiB would end the file at a long cell


@dataclass
class Row:
    """One row and where it stands; `fault` says why it could not be read, then there is no value."""

    where: str
    value: Any = None
    fault: str = ""


def files_of(source: PromptSource, where: str) -> list[Path]:
    """The files a local source names, in name order. Raises ConfigError where `path` is empty or matches nothing."""
    if not source.path:
        raise ConfigError(f"{where}: kind {source.kind} needs `path`")
    path = Path(source.path)
    if path.exists() or not any(c in source.path for c in "*?["):
        return [path]
    found = sorted(p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file())
    if not found:
        raise ConfigError(f"{where}: path = {source.path!r}: no file matches")
    return found


def describe_source(source: PromptSource, where: str) -> dict[str, Any]:
    """The source as settings of a trace set: its fields, and the checksum of every local file (case 30)."""
    local = [] if source.kind in ("synthesis", "hub") else files_of(source, where)
    return asdict(source) | {"sha256": {str(p): sha256_file(p) for p in local if p.is_file()}}


def local_rows(source: PromptSource, where: str) -> Iterator[Row]:
    """Rows of all files of a local source. Raises ConfigError naming a file that cannot be read at all."""
    for path in files_of(source, where):
        try:
            yield from READERS[source.kind](path, source)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
            raise ConfigError(f"{where}: {path}: cannot read prompts: {reason}") from None


def _jsonl(path: Path, source: PromptSource) -> Iterator[Row]:
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):  # cut at \n only: text may hold U+2028
            text = _text(line)
            if not text.strip():
                continue
            try:
                yield Row(f"{path}:{number}", json.loads(text))
            except (ValueError, RecursionError):
                yield Row(f"{path}:{number}", fault="not JSON")


def _json(path: Path, source: PromptSource) -> Iterator[Row]:
    try:
        rows = json.loads(_text(path.read_bytes()))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(rows, list):
        raise ValueError("must hold a list of rows; one object a line is kind jsonl")
    for number, row in enumerate(rows, 1):
        yield Row(f"{path}, row {number}", row)


def _csv(path: Path, source: PromptSource) -> Iterator[Row]:
    csv.field_size_limit(CELL_LIMIT)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as f:
        reader = csv.DictReader(f, strict=True)  # else a quote left open would swallow the rows after it unseen
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                yield Row(where, fault="more cells than columns") if None in row else Row(where, row)
        except csv.Error as error:
            raise ValueError(f"after line {reader.line_num}: {error}") from None


def _plain(path: Path, source: PromptSource) -> Iterator[Row]:
    if not source.separator:
        raise ValueError("`separator` is empty; a newline is one prompt a line")
    text = _text(path.read_bytes()).replace("\r\n", "\n")
    for number, piece in enumerate(text.split(source.separator), 1):
        if piece.strip():
            yield Row(f"{path}, text {number}", {source.text_field or "prompt": piece.strip()})


def _parquet(path: Path, source: PromptSource) -> Iterator[Row]:
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=512):
        for i in range(batch.num_rows):
            number += 1
            try:
                values = batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield Row(f"{path}, row {number}", fault="invalid unicode")
                continue
            yield Row(f"{path}, row {number}", json.loads(json.dumps(values, default=str)))


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")


READERS: dict[str, Callable[[Path, PromptSource], Iterator[Row]]] = {
    "jsonl": _jsonl, "log": _jsonl, "json": _json, "csv": _csv, "text": _plain, "parquet": _parquet}
