"""What writing traces adds to computing them, and whether memory grows with the number of rows."""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.material import conversations, evaluation_ids, open_target
from bench.rows import Result, Row, bench_folder, own, ratio_rows
from bench.turns import in_turns, peak_bytes, reset_peak, timed
from data.capture import Conversation, capture
from data.codec import DTYPES, carrier
from data.store import row_bytes, shard_of, write_shard
from data.writer import BackgroundWriter
from drafters.target import Target
from recipes.schema import PositiveInt, Recipe, opt


@dataclass
class Options:
    rows: PositiveInt = opt(192, "conversations captured and stored")
    rounds: PositiveInt = opt(4, "peak memory also where the same rows come so many times")
    answer_tokens: PositiveInt = opt(96, "mean length of their answers")
    shard_mb: PositiveInt = opt(16, "size of one shard")


@dataclass
class Stored:
    """One run: wall time, time inside write_shard (beside the computation), bytes of the shards, peak memory."""

    seconds: float
    write_s: float
    bytes: int
    peak: int | None


class Store:
    """Capture in shards, as `make trace` does it, with writing or without."""

    def __init__(self, target: Target, dtype: torch.dtype, batch_tokens: int, shard_mb: int, folder: Path) -> None:
        self.target, self.dtype, self.batch_tokens = target, dtype, batch_tokens
        self.shard_mb, self.folder = shard_mb, folder
        self.write_s = 0.0

    def shards(self, rows: list[Conversation]) -> list[list[Conversation]]:
        """Rows in order, cut where a shard reaches its size."""
        found, filled, hidden = [], float("inf"), self.target.hidden
        for row in rows:
            if filled >= self.shard_mb * 1e6:
                found.append([])
                filled = 0
            found[-1].append(row)
            finals = sum(turn != 0 for turn in row.turns[1:])
            filled += row_bytes(len(row.ids), finals, len(self.target.layers) * hidden, hidden, self.dtype)
        return found

    def captured(self, part: list[Conversation]) -> tuple:
        return capture(self.target, part, self.batch_tokens, carrier(self.dtype))

    def without(self, rows: list[Conversation]) -> float:
        """Seconds to compute every shard and drop it."""
        return timed(lambda: [self.captured(part)[1] for part in self.shards(rows)], self.target.device)[0]

    def stored(self, rows: list[Conversation]) -> Stored:
        """Computes every shard and writes it into a folder that is deleted behind the measured time."""
        self.write_s = 0.0
        watched = reset_peak()
        with TemporaryDirectory(prefix=".store-", dir=self.folder) as folder:
            seconds, _ = timed(lambda: self.run(rows, Path(folder)), self.target.device)
            size = sum(f.stat().st_size for f in Path(folder).iterdir())
        return Stored(seconds, self.write_s, size, peak_bytes() if watched else None)

    def run(self, rows: list[Conversation], folder: Path) -> None:
        with BackgroundWriter(self.write) as writer:
            for number, part in enumerate(self.shards(rows)):
                traced, bad = self.captured(part)
                writer.put(folder, f"shard-{number:05d}", shard_of(traced, self.dtype), bad, "bench")

    def write(self, *args) -> None:
        began = time.perf_counter()
        write_shard(*args)
        self.write_s += time.perf_counter() - began


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only store"`."""
    target = open_target(recipe, recipe.trace.layers)
    prompts = evaluation_ids(recipe, target, options.rows, options.answer_tokens * 3 // 2)
    rows = conversations(prompts, options.rows, options.answer_tokens, target.vocab_size, recipe.prompts.seed)
    store = Store(target, DTYPES[recipe.trace.dtype], recipe.trace.batch_tokens, options.shard_mb,
                  bench_folder(recipe))
    few = store.stored(rows)  # warms up; before anything larger: memory that was once taken stays with the process
    again = [replace(row, id=f"{row.id}-{n}") for n in range(options.rounds) for row in rows]
    many = store.stored(again)
    found = in_turns({"with the store": lambda turn: store.stored(rows), "without": lambda turn: store.without(rows)},
                     range(repeats))
    return Result(store_rows(rows, found["with the store"], found["without"])
                  + memory_rows({len(rows): few.peak, len(again): many.peak})
                  + [Row("store", "stored_bytes_per_row", few.bytes / len(rows), "bytes")])


def store_rows(rows: list[Conversation], stored: list[Stored], without: list[float]) -> list[Row]:
    tokens = sum(len(row.ids) for row in rows)
    added = [run.seconds / alone - 1 for run, alone in zip(stored, without)]
    reference = own("capture without storing")
    return [
        *ratio_rows("store", [1 / run.seconds for run in stored], [1 / seconds for seconds in without], reference),
        Row("store", "share_of_capture", 100 * statistics.median(added), "%", reference),
        Row("store", "write_share", 100 * statistics.median(r.write_s / a for r, a in zip(stored, without)), "%",
            reference),
        Row("store", "tokens_per_s", statistics.median(tokens / run.seconds for run in stored), "tokens/s"),
        Row("store", "reference_tokens_per_s", statistics.median(tokens / s for s in without), "tokens/s", reference),
        Row("store", "write_mb_per_s", statistics.median(run.bytes / run.write_s / 1e6 for run in stored), "MB/s"),
        Row("store", "bytes_per_token", stored[0].bytes / tokens, "bytes"), Row("store", "rows", len(rows), "rows"),
    ]


def memory_rows(peaks: dict[int, int | None]) -> list[Row]:
    """Peak resident memory by the number of rows, few and many; null where the system cannot tell."""
    rows = [Row(f"store_rows_{n}", "peak_bytes", peak, "bytes") for n, peak in peaks.items()]
    (few, small), (many, large) = min(peaks.items()), max(peaks.items())
    grown = None if small is None or few == many else (large - small) / (many - few)
    return [*rows, Row("store", "peak_growth_per_row", grown, "bytes")]
