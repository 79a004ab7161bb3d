"""`make layers`: which of the target's layers feed a drafter best, found by short trainings on a part of the traces.

The search starts from the recipe's taps and moves one at a time to every other candidate; the best place is kept. Every
set of taps trains a fresh drafter on the same rows for the same steps, with the recipe's own settings, and is judged as
`make train` judges: by replayed acceptance over the validation rows. A set that was judged is never trained again.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from rich.table import Table
from torch import Tensor

from data.batching import epoch_order, plan_for
from data.capture import Conversation, capture
from data.codec import DTYPES, carrier
from data.console import console
from data.online import as_stored
from data.reader import open_rows
from data.store import TraceReader, TraceRow
from drafters.initial import begin
from drafters.placement import on_one_process
from drafters.registry import entry, options_of
from drafters.target import Target
from eval.metrics import bootstrap_difference
from eval.replay import replay
from recipes.cli import Command, process, run_folder
from recipes.errors import ConfigError
from recipes.files import alone, sha256_json, write_json
from recipes.schema import NonNegativeInt, PositiveInt, Recipe, opt
from train.launch import start
from train.loop import Trainer
from train.run import check_rows, check_target, check_user_turns

CANDIDATES = 10  # about so many places are tried unless told otherwise
FEWEST = 8  # validation rows; an interval from fewer says nothing
DRAWS = 20_000  # enough for the narrow tails of many intervals
METHOD = 1  # of judging a set: sets judged by another one are not compared
UNUSED = ("epochs", "tracker", "log_every", "validate_every", "save_every", "keep", "peak_tflops", "shuffle_shards")
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
        for tap in before.layers:  # those not moved yet are still there
            rest = [k for k in best.layers if k != tap]
            for k in sorted(set(candidates) - set(rest)):
                found = judge(tuple(sorted([*rest, k])))
                if found.mean_length > best.mean_length:
                    best = found
        if best is before:
            break
    return best


class Judge:
    """Trains and judges one set of taps after another on rows that are captured once."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, target: Target, source: TraceReader,
                 options: Search, folder: Path) -> None:
        self.recipe, self.accelerator, self.target, self.source, self.options = (
            recipe, accelerator, target, source, options)
        self.held = list(target.layers)
        self.path = folder / "layers.json"
        self.counts = {int(t): n for t, n in source.manifest["draft_vocabulary_counts"].items()}
        self.dtype = DTYPES[source.manifest["dtype"]]
        trained = {name: value for name, value in asdict(recipe.train).items() if name not in UNUSED}
        self.key = sha256_json({"method": METHOD, "traces": source.manifest["key"], "rows": options.rows,
                                "steps": options.steps, "train": trained, "drafter": recipe.drafter.kind,
                                "options": asdict(options_of(recipe.drafter.kind, recipe.drafter.options))})
        self.judged = self.earlier()
        self.rows: list[TraceRow] = []

    def earlier(self) -> dict[Taps, Judged]:
        """What a run of the same settings has judged. A file of other settings is moved aside."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["key"] == self.key:
                sets = {tuple(row["layers"]): Judged(**row) for row in found["sets"]}
                console.print(f"{self.path}: {len(sets)} sets are known from an earlier run", highlight=False)
                return sets
            aside = self.path.with_name(f"layers-{found['key'][:8]}.json")
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError):
            aside = self.path.with_name("layers-unreadable.json")
        self.path.replace(aside)
        console.print(f"{self.path} was of other settings: moved to {aside.name}", highlight=False)
        return {}

    def __call__(self, layers: Taps) -> Judged:
        if layers not in self.judged:
            self.rows = self.rows or self.capture()
            found = self.judged[layers] = self.train(layers)
            self.accelerator.free_memory()
            gc.collect()  # under mixed precision accelerate leaves a drafter that holds itself
            self.save({})
            console.print(f"{list(layers)}: length {found.mean_length:.3f}, {found.seconds:.0f} s", highlight=False)
        return self.judged[layers]

    def save(self, result: dict[str, Any]) -> None:
        write_json(self.path, {"key": self.key, **result, "sets": [asdict(row) for row in self.judged.values()]})

    def train(self, layers: Taps) -> Judged:
        """A fresh drafter of these taps, trained for the steps of the search."""
        began = time.perf_counter()
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
        with trainer.precision():
            counts = [replay(begun.drafter, reader, [i], section.validation_draft_length, self.accelerator.device,
                             trainer.dtype) for i in reader.split("validation")]
        return Judged(list(layers), [sum(c.accepted) for c in counts], [c.drafts for c in counts],
                      time.perf_counter() - began)

    def capture(self) -> list[TraceRow]:
        """The rows of the search with their states at every candidate, as a store of trace.dtype gives them back."""
        chosen = self.source.split("train")
        order = epoch_order(len(chosen), [], 0, self.recipe.train.seed)[: self.options.rows]
        picked = [chosen[i] for i in sorted(order)] + self.source.split("validation")
        tokens = sum(map(self.source.tokens, picked))
        size = tokens * (len(self.held) + 1) * self.target.hidden * carrier(self.dtype).itemsize
        console.print(f"states of {len(picked)} rows at {len(self.held)} layers: {size / 1e9:.1f} GB in memory",
                      highlight=False)
        rows = []
        for i in picked:
            r = self.source[i]  # its own states are not needed
            rows.append(Conversation(r.id, r.split, r.ids.tolist(), r.turns.tolist(), r.tail, "", r.off_policy))
        self.target.layers = self.held
        found, bad = capture(self.target, rows, self.recipe.trace.batch_tokens, carrier(self.dtype))
        for name, reason in bad.items():
            console.print(f"row {name}: {reason}; left out")
        return [as_stored(row, self.dtype) for row in found]


def compared(sets: Sequence[Judged], first: Judged, seed: int) -> list[dict[str, Any]]:
    """Each set with its length less the first's and an interval of that over the same resampled rows. The intervals of
    all sets hold together with 95 % (Bonferroni): the best of many would else be shown to be better by chance."""
    level = 1 - 0.05 / max(1, len(sets) - 1)

    def interval(found: Judged) -> list[float]:
        counts = (np.array(x) for x in (found.accepted, found.drafts, first.accepted, first.drafts))
        return bootstrap_difference(*counts, seed, level, DRAWS)

    return [{"layers": s.layers, "mean_length": s.mean_length, "drafts": sum(s.drafts), "seconds": s.seconds,
             "difference": s.mean_length - first.mean_length,
             "interval": [0.0, 0.0] if s is first else interval(s)} for s in sets]


def advice(rows: list[dict[str, Any]], first: list[int], judges: int) -> str:
    """What the recipe should say, and how sure that is; `judges`: validation rows."""
    basis = f"{judges} validation rows, one training of each of {len(rows)} sets"
    shown = [row for row in rows if row["interval"][0] > 0]
    if judges < FEWEST:
        return f"keep trace.layers: {first}; {basis}: fewer than {FEWEST} rows show nothing"
    if not shown:
        return f"keep trace.layers: {first}; no other set is shown to be better ({basis})"
    row = max(shown, key=lambda row: row["mean_length"])
    low, high = row["interval"]
    return (f"set trace.layers: {row['layers']} and run `make trace` under another `name`: {row['difference']:+.3f} "
            f"({low:+.3f} to {high:+.3f}) against {first} ({basis})")


def report(rows: list[dict[str, Any]]) -> Table:
    table = Table("layers", "length", "drafts", "against the first", "interval", "seconds")
    for row in sorted(rows, key=lambda r: -r["mean_length"]):
        low, high = row["interval"]
        table.add_row(str(row["layers"]), f"{row['mean_length']:.3f}", f"{row['drafts']:,}",
                      f"{row['difference']:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{row['seconds']:.0f}")
    return table


def main(recipe: Recipe, switches: set[str], options: Any) -> None:
    section = options.search
    options_of(recipe.drafter.kind, recipe.drafter.options)  # a wrong one is named before the target is loaded
    if entry(recipe.drafter.kind).reads != "taps":
        raise ConfigError(f"drafter.kind = {recipe.drafter.kind}: reads no layers; there is nothing to search")
    if recipe.drafter.init_from:
        raise ConfigError("drafter.init_from: an existing drafter has its layers; leave it out of a search")
    accelerator = start(recipe.train, None)
    if accelerator.distributed_type != DistributedType.NO:
        raise ConfigError(f"make layers runs in one plain process, not under {accelerator.distributed_type.value}")
    folder = run_folder(recipe)
    source = open_rows(recipe.trace, folder)
    check_rows(source, recipe)
    check_user_turns(source, recipe.train.user_turns)
    judges = len(source.split("validation"))
    if not judges:
        raise ConfigError(f"{source.folder}: holds no validation rows, by which a search is judged; set "
                          "prompts.validation and run `make trace` under another name")
    target = Target(on_one_process(recipe.target), recipe.trace.layers)
    check_target(source, target)
    first, candidates = tuple(target.layers), section.candidates or spread(target.depth)
    if max(candidates) > target.depth:
        raise ConfigError(f"search.candidates = {candidates}: layer ids are 0..{target.depth}")
    target.tap(sorted({*first, *candidates}))
    console.print(f"at most {1 + section.sweeps * len(first) * len(candidates)} trainings of {section.steps} steps",
                  highlight=False)
    with alone(folder):
        judge = Judge(recipe, accelerator, target, source, section, folder)
        best = search(first, candidates, judge, section.sweeps)
        rows = compared(list(judge.judged.values()), judge.judged[first], recipe.train.seed)
        judge.save({"start": list(first), "best": best.layers, "result": rows})
    console.print(report(rows))
    print(advice(rows, list(first), judges))


COMMAND = Command("make layers", "Searches the target layers that feed a drafter best.", main, options=Options)

if __name__ == "__main__":
    process(COMMAND)
