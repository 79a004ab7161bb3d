"""`make layers`: which of the target's layers feed a drafter best, found by short trainings on a part of the traces.

The search starts from the recipe's taps and moves one at a time to every other candidate; the best place is kept. Every
set of taps trains a fresh drafter on the same rows for the same steps, with the recipe's own settings, and is judged as
`make train` judges: by replayed acceptance over the validation rows. A set that was judged is never trained again.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from pydantic import NonNegativeInt, PositiveInt
from rich.table import Table
from torch import Tensor

from data.batching import epoch_order, plan_for
from data.capture import Conversation, capture
from data.console import console
from data.reader import open_rows
from data.store import TraceReader, TraceRow
from drafters.initial import begin
from drafters.placement import on_one_process
from drafters.target import Target
from eval.metrics import bootstrap_difference
from eval.replay import replay
from recipes.cli import Command, run, run_dir
from recipes.errors import ConfigError
from recipes.files import alone, sha256_json, write_json
from recipes.schema import Recipe, opt
from train.launch import start
from train.loop import Trainer
from train.run import check_target, check_user_turns

CANDIDATES = 10  # about so many places are tried unless told otherwise
Taps = tuple[int, ...]


@dataclass
class Search:
    """What `make layers` is told besides the recipe."""

    candidates: list[NonNegativeInt] = opt([], "layer ids to try; empty is about ten spread over the target")
    rows: PositiveInt = opt(128, "conversations trained on; their states at all candidates are held in memory")
    steps: PositiveInt = opt(400, "optimizer steps of each training")
    sweeps: PositiveInt = opt(1, "rounds over the taps, at most")


Options = make_dataclass("Options", [("search", Search, field(default_factory=Search))])


@dataclass
class Judged:
    """A set of taps with the counts of its drafter on each validation row."""

    layers: list[int]
    accepted: list[int]
    drafts: list[int]
    seconds: float

    @property
    def mean_length(self) -> float:
        return 1 + sum(self.accepted) / max(1, sum(self.drafts))


class Columns:
    """A RowReader over rows in memory whose taps hold `held` layers, of which it gives those in `wanted`."""

    def __init__(self, rows: list[TraceRow], held: Sequence[int], wanted: Sequence[int], source: TraceReader) -> None:
        self.rows, self.count = rows, len(held)
        self.index = torch.tensor([held.index(k) for k in wanted])
        self.folder, self.manifest = source.folder, source.manifest

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, name: str) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row.split == name]

    def tokens(self, index: int) -> int:
        return len(self.rows[index].ids)

    def supervised(self, index: int) -> int:
        return len(self.rows[index].final)

    def shard(self, index: int) -> str:
        return ""

    def __getitem__(self, index: int) -> TraceRow:
        row = self.rows[index]
        return replace(row, taps=columns(row.taps, self.count, self.index))


def columns(taps: Tensor, count: int, index: Tensor) -> Tensor:
    """Of taps [T, count*H] those of the places `index` [n]: [T, n*H]."""
    return taps.unflatten(-1, (count, -1))[:, index].flatten(1)


def spread(depth: int) -> list[int]:
    """About ten ids from the first layer's output to the state that enters the last layer."""
    last = depth - 1
    return sorted({1 + round(i * (last - 1) / (CANDIDATES - 1)) for i in range(CANDIDATES)})


def search(start: Taps, candidates: Sequence[int], judge: Callable[[Taps], Judged], sweeps: int) -> Judged:
    """The best set found by moving one tap at a time, taps kept apart and in order. Ends early where a sweep moves
    none. Of equals the first found stays."""
    best = judge(start)
    for _ in range(sweeps):
        before = best
        for place in range(len(start)):
            rest = [k for i, k in enumerate(best.layers) if i != place]
            for k in sorted(set(candidates) - set(rest)):
                found = judge(tuple(sorted([*rest, k])))
                if found.mean_length > best.mean_length:
                    best = found
        if best is before:
            break
    return best


class Bench:
    """Trains and judges one set of taps after another on rows that are captured once."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, target: Target, source: TraceReader,
                 options: Search, folder: Path) -> None:
        self.recipe, self.accelerator, self.target, self.source, self.options = (
            recipe, accelerator, target, source, options)
        self.held = list(target.layers)
        self.path = folder / "layers.json"
        self.counts = {int(t): n for t, n in source.manifest["draft_vocabulary_counts"].items()}
        self.key = sha256_json({"traces": source.manifest["key"], "rows": options.rows, "steps": options.steps,
                                "train": asdict(recipe.train), "drafter": asdict(recipe.drafter)})
        self.judged = self.earlier()
        self.rows: list[TraceRow] = []

    def earlier(self) -> dict[Taps, Judged]:
        """What a run of the same settings has judged."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["key"] == self.key:
                return {tuple(row["layers"]): Judged(**row) for row in found["sets"]}
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return {}

    def __call__(self, layers: Taps) -> Judged:
        if layers not in self.judged:
            began = time.perf_counter()
            self.judged[layers] = self.train(layers, began)
            self.save({})
        found = self.judged[layers]
        console.print(f"{list(layers)}: length {found.mean_length:.3f}, {found.seconds:.0f} s", highlight=False)
        return found

    def save(self, result: dict[str, Any]) -> None:
        write_json(self.path, {"key": self.key, **result, "sets": [asdict(row) for row in self.judged.values()]})

    def train(self, layers: Taps, began: float) -> Judged:
        """A fresh drafter of these taps, trained for the steps of the search."""
        self.rows = self.rows or self.capture()
        self.target.layers = list(layers)
        begun = begin(self.recipe.drafter, self.target, self.counts, self.recipe.train.seed)
        reader = Columns(self.rows, self.held, layers, self.source)
        section = self.recipe.train
        plan = plan_for(reader, section.batch_rows, 1, section.accumulation, section.seed)
        section = replace(section, epochs=self.options.steps / plan.steps_per_epoch,
                          warmup_steps=min(section.warmup_steps, self.options.steps // 4))
        trainer = Trainer(self.accelerator, begun.drafter, reader, plan, section, self.path.parent, {}, {})
        trainer.model.train()
        while trainer.progress.step < trainer.total:
            trainer.step()
        counts = [replay(begun.drafter, reader, [i], section.validation_draft_length, self.accelerator.device,
                         trainer.dtype) for i in reader.split("validation")]
        self.accelerator.free_memory()
        return Judged(list(layers), [sum(c.accepted) for c in counts], [c.drafts for c in counts],
                      time.perf_counter() - began)

    def capture(self) -> list[TraceRow]:
        """The rows of the search with their states at every candidate."""
        chosen = self.source.split("train")
        order = epoch_order(len(chosen), [], 0, self.recipe.train.seed)[: self.options.rows]
        picked = [chosen[i] for i in sorted(order)] + self.source.split("validation")
        tokens = sum(map(self.source.tokens, picked))
        size = tokens * (len(self.held) + 1) * self.target.hidden * 4
        console.print(f"states of {len(picked)} rows at {len(self.held)} layers: {size / 1e9:.1f} GB in memory",
                      highlight=False)
        rows = [self.source[i] for i in picked]
        self.target.layers = self.held
        found, bad = capture(self.target, [
            Conversation(r.id, r.split, r.ids.tolist(), r.turns.tolist(), r.tail, "", r.off_policy) for r in rows],
            self.recipe.trace.batch_tokens)
        for name, reason in bad.items():
            console.print(f"row {name}: {reason}; left out")
        return found


def compared(sets: Sequence[Judged], first: Judged, seed: int) -> list[dict[str, Any]]:
    """Each set with its length less the first's and the 95 % interval of that, over the same rows."""
    def difference(found: Judged) -> list[float]:
        return bootstrap_difference(*(np.array(x) for x in (found.accepted, found.drafts, first.accepted,
                                                            first.drafts)), seed)

    return [{"layers": s.layers, "mean_length": s.mean_length, "drafts": sum(s.drafts), "seconds": s.seconds,
             "difference": s.mean_length - first.mean_length,
             "ci95": [0.0, 0.0] if s is first else difference(s)} for s in sets]


def advice(rows: list[dict[str, Any]], first: list[int], best: list[int]) -> str:
    """What the recipe should say, and how sure that is."""
    row = next(r for r in rows if r["layers"] == best)
    low, high = row["ci95"]
    if low > 0:
        return (f"set trace.layers: {best} and trace again: {row['difference']:+.3f} ({low:+.3f} to {high:+.3f}) "
                f"against {first}; the best of {len(rows)} sets looks better than it is")
    return f"keep trace.layers: {first}; none of {len(rows)} sets is shown to be better on these rows"


def main(recipe: Recipe, switches: set[str], options: Any) -> None:
    section = options.search
    if recipe.drafter.init_from:
        raise ConfigError("drafter.init_from: an existing drafter has its layers; leave it out of a search")
    accelerator = start(recipe.train, None)
    if accelerator.distributed_type != DistributedType.NO:
        raise ConfigError(f"make layers runs in one plain process, not under {accelerator.distributed_type.value}")
    folder = run_dir(recipe)
    source = open_rows(recipe.trace, folder)
    check_user_turns(source, recipe.train.user_turns)
    if not source.split("validation"):
        raise ConfigError("prompts.validation = 0: a search is judged by validation rows; trace some")
    target = Target(on_one_process(recipe.target), recipe.trace.layers)
    check_target(source, target)
    first, candidates = tuple(target.layers), section.candidates or spread(target.depth)
    target.tap(sorted({*first, *candidates}))
    with alone(folder):
        bench = Bench(recipe, accelerator, target, source, section, folder)
        best = search(first, candidates, bench, section.sweeps)
        rows = compared(list(bench.judged.values()), bench.judged[first], recipe.train.seed)
        bench.save({"start": list(first), "best": best.layers, "result": rows})
    table = Table("layers", "length", "drafts", "against the first", "95 %", "seconds")
    for row in sorted(rows, key=lambda r: -r["mean_length"]):
        low, high = row["ci95"]
        table.add_row(str(row["layers"]), f"{row['mean_length']:.3f}", f"{row['drafts']:,}",
                      f"{row['difference']:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{row['seconds']:.0f}")
    console.print(table)
    print(advice(rows, list(first), best.layers))


COMMAND = Command("make layers", "Searches the target layers that feed a drafter best.", main, options=Options)

if __name__ == "__main__":
    run(COMMAND)
