"""`make trace`: prompts, the target's own answers, hidden states; each stage in atomic units, resumable.

Run as `python -m data.collect --config RECIPE`, or by a launcher as many processes (data/ranks.py). A kill at any
moment costs at most the units in work; the same command, with any number of processes, goes on and ends with the same
files, because a unit's computation depends on nothing outside it.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.answers import Answering, check_answers
from data.backends.registry import open_backend
from data.backends.units import Tally, Units
from data.capture import BAD, Conversation, bare, capture, finite
from data.codec import DTYPES, carrier
from data.console import console, progress_bar
from data.generate import Answer, Request
from data.intake import PromptStage
from data.place import behind_url, open_place
from data.preview import preview
from data.prompts import Intake, Prompt
from data.ranks import Ranks, check_same, check_shared, open_ranks
from data.settings import claim, describe, explicit, folder_mode, make_folders, stores_states
from data.sharing import check_ranks, neighbours, part_of, rows_digest
from data.staging import Staging, UnitParts
from data.states import Capture, check_states, open_states
from data.store import FORMAT, Shard, TraceRow, bad_rows, row_bytes, shard_of, write_shard
from data.writer import BackgroundWriter
from drafters.registry import check_taps
from drafters.target import require_chat_template
from drafters.tensor_parallel import lead, open_target
from recipes.cli import Command, process, run_folder, write_resolved
from recipes.errors import ConfigError, RunError
from recipes.files import alone, beside, sha256_json, write_json
from recipes.launched import end_with_launcher
from recipes.provenance import difference, stamp
from recipes.schema import Recipe


class Collector:
    """One trace run. Every `*_stage` method returns its result whether it had to work or found it done. All `ranks`
    call the same methods and get the same results; rank 0 alone writes what is written once."""

    def __init__(self, recipe: Recipe, ranks: Ranks | None = None) -> None:
        check_answers(recipe)
        check_taps(recipe.drafter.kind, recipe.trace.layers)
        self.recipe, self.ranks = recipe, ranks or Ranks()
        check_ranks(recipe, self.ranks.world)
        self.left_out: dict[str, int] = {}
        self.ranks.lead(lambda: run_folder(recipe))
        self.place = open_place(recipe.trace, Path(recipe.runs_dir) / recipe.name)
        self.folder = self.place.folder
        self.target = open_target(recipe.target, recipe.trace.layers)
        require_chat_template(self.target)
        self.limit = min(recipe.trace.max_length, self.target.max_length)
        if recipe.generation.max_tokens >= self.limit:
            raise ConfigError(f"generation.max_tokens = {recipe.generation.max_tokens}: leaves no room for a prompt "
                              f"within {self.limit} tokens (trace.max_length and the target's context)")
        backend = open_backend(part_of(recipe.generation, self.ranks), self.target)
        check_states(recipe.trace, self.target)
        self.settings = describe(recipe, self.target)
        self.key = sha256_json(self.settings)
        self.fresh = False  # rank 0: nothing was collected before this run
        self.dtype = DTYPES[recipe.trace.dtype] if stores_states(recipe.trace) else torch.float32
        self.staging = Staging(self.folder / "staged", self.key, carrier(self.dtype), recipe.trace.shard_mb * 1e6)
        # Behind a URL they would have to wait on this disk until the last answer; vLLM's are another computation's.
        self.keeps_states = (stores_states(recipe.trace) and not behind_url(recipe.trace)
                             and recipe.trace.backend == "transformers")
        self.units = Units(backend, self.place, self.ranks, recipe.generation.max_lost_share, self.keeping)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Holds the folder for this run and its settings, which must be those of every rank: another run is refused
        before it changes anything there."""
        ranks = self.ranks
        changed = difference(explicit(ranks.agree(self.settings)), explicit(self.settings))
        if changed:
            raise ConfigError(f"rank {ranks.rank} has other settings than rank 0: {changed}")
        with ExitStack() as held:
            ranks.lead(lambda: self.take(held))
            check_shared(ranks, self.folder)
            if ranks.rank:
                held.enter_context(beside(self.folder))
            ranks.lead(self.place.share_all)
            yield
            ranks.meet()  # so that the last one lets go of it

    def take(self, held: ExitStack) -> None:
        """Rank 0's part: the folder with what the URL has, for as long as `held` is open."""
        make_folders(self.folder)
        held.enter_context(alone(self.folder, self.ranks.world > 1))
        self.place.pull()
        self.fresh = claim(self.folder, self.settings)

    def record(self) -> None:
        """The accepted recipe, and of the first run that collects here when and with what it began."""
        write_resolved(self.recipe)
        if self.fresh or not (self.folder / "provenance.json").exists():
            self.write_described("provenance.json", stamp(asdict(self.recipe)))

    def prompts_stage(self) -> Intake:
        """Prompts of all sources, filtered, with the reasons of those dropped."""
        longest = self.limit - self.recipe.generation.max_tokens
        intake = PromptStage(self.recipe, self.target, longest, self.folder, self.units.answers, self.ranks).run()
        self.ranks.lead(self.place.share_all)
        return intake

    def keeping(self, part: str, name: str) -> UnitParts | None:
        """Keeps the states that a backend computes on the way to the answers of a unit."""
        return self.staging.unit(name) if part == "answers" and self.keeps_states else None

    def answers_stage(self, prompts: list[Prompt]) -> list[Conversation]:
        """Finished rows of all prompts (data/answers.py)."""
        answering = Answering(self.recipe, self.target, self.limit, self.round)
        rows = answering.rows(prompts)
        self.left_out = dict(answering.counts)
        return rows

    def round(self, number: int, requests: list[Request]) -> list[Answer]:
        """Answers to one round's requests, in units."""
        section = self.recipe.generation
        if number == 0 and self.keeps_states:
            waiting = self.staging.dtype if section.backend == "transformers" else self.dtype
            least = sum(self.bytes_of(r.prompt, r.turns, waiting) for r in requests)  # answers come on top
            self.ranks.lead(lambda: (self.folder / "manifest.json").exists()
                            or self.check_room(least - self.staging.held(number)))
        units = {f"{number}-{start // section.unit_rows:05d}": requests[start : start + section.unit_rows]
                 for start in range(0, len(requests), section.unit_rows)}
        with progress_bar() as bar:
            task = bar.add_task("answers ", total=len(requests), note="")
            found = self.units.answers("answers", units, section.max_tokens, lambda rows, tokens: bar.update(
                task, completed=rows, note=f"{tokens} tokens"))
        return [answer for unit in found for answer in unit]

    def capture_stage(self, rows: list[Conversation], intake: Intake) -> None:
        """Manifest first, then every shard that is not complete yet, each rank a run of neighbours."""
        ranks, section = self.ranks, self.recipe.trace
        check_same(ranks, "rows", rows_digest(rows) if ranks.world > 1 else "")
        plan = self.plan_shards(rows)
        sizes = {name: sum(self.bytes_of(c.ids, c.turns) for c in part) for name, part in plan.items()}
        size, missing, bad = sum(sizes.values()), *self.missing(plan)
        own = {name: plan[name] for name in neighbours(missing, ranks.rank, ranks.world)}
        done = plan.keys() - set(missing)
        self.staging.open([c.id for name in done for c in plan[name]], [c.id for part in own.values() for c in part])
        ranks.meet()  # nothing more is removed
        ranks.lead(lambda: self.check_room(self.place.room_for([sizes[name] for name in missing]) * 1.05
                                           - self.staging.returns(ranks.world)))
        ranks.lead(lambda: self.write_described("manifest.json", self.manifest(rows, intake, list(plan), size)))
        faulty = ranks.counter()

        def check(bad: int) -> None:
            if bad > section.max_bad_share * len(rows):  # running again is no way past
                raise RunError(f"{bad} of {len(rows)} rows have NaN or Inf states (trace.max_bad_share = "
                               f"{section.max_bad_share}); check target.dtype and trace.dtype")

        check(bad)
        with (progress_bar() as bar, BackgroundWriter(self.write) as writer,
              open_states(section, self.target, self.folder, capture) as states):
            task = bar.add_task("states  ", total=len(plan) - len(missing) + len(own), note=f"{size / 1e6:.0f} MB",
                                completed=len(plan) - len(missing))
            for name, part in own.items():
                traced, faults = self.traced(part, states)
                writer.put(name, shard_of(traced, self.dtype), faults, self.staging.spent([c.id for c in part]))
                check(bad + faulty(len(faults)))
                bar.advance(task)
        self.staging.forget()
        ranks.meet()
        ranks.lead(self.staging.close)

    def missing(self, plan: dict[str, list[Conversation]]) -> tuple[list[str], int]:
        """Shards that are not complete, in order, and the rows that the others leave out; each rank looks at its part
        of them, since checksums are read."""
        names = list(plan)[self.ranks.rank :: self.ranks.world]
        torn = [name for name in names if not self.place.complete(name, [c.id for c in plan[name]], self.key)]
        bad = sum(bad_rows(self.folder / "shards", name) for name in set(names) - set(torn))
        found = self.ranks.gather([torn, bad])
        absent = {name for names, _ in found for name in names}
        return [name for name in plan if name in absent], sum(bad for _, bad in found)

    def write(self, name: str, shard: Shard, faults: dict[str, str], spent: list[str]) -> None:
        """Writes a shard, and then deletes the waiting parts that have no other rows."""
        write_shard(self.folder / "shards", name, shard, faults, self.key)
        self.place.finish_shard(name)
        self.staging.remove(spent)

    def traced(self, rows: list[Conversation], states: Capture) -> tuple[list[TraceRow], dict[str, str]]:
        """The rows with their states, in order, and those left out with the reason: states that came with the answers
        as they are, those of other rows computed; none where training computes them."""
        if not stores_states(self.recipe.trace):
            return bare(rows), {}
        staged = {row.id: found for row in rows if (found := self.staging.row(row)) is not None}
        others, bad = states([row for row in rows if row.id not in staged], carrier(self.dtype))
        bad |= {name: BAD for name, row in staged.items() if not finite(row)}
        found = staged | {row.id: row for row in others}
        return [found[row.id] for row in rows if row.id not in bad], bad

    def write_described(self, name: str, value: dict[str, Any]) -> None:
        """Writes a JSON file of the trace folder."""
        write_json(self.folder / name, value)
        self.place.share(self.folder / name)

    def check_room(self, needed: float) -> None:
        """Raises RunError where so many bytes more do not fit on the disk."""
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise RunError(f"{self.folder}: traces need {needed / 1e6:.0f} MB more, {free / 1e6:.0f} MB are free")

    def bytes_of(self, ids: list[int], turns: list[int], dtype: torch.dtype | None = None) -> int:
        """Bytes of a row in a shard, or in another dtype than the store's."""
        finals = sum(turn != 0 for turn in turns[1:])
        width = len(self.target.layers) * self.target.hidden if stores_states(self.recipe.trace) else 0
        return row_bytes(len(ids), finals, width, self.target.hidden, dtype or self.dtype)

    def plan_shards(self, rows: list[Conversation]) -> dict[str, list[Conversation]]:
        """Rows of each shard, in order, cut where a shard reaches its size: the same on every run."""
        plan: dict[str, list[Conversation]] = {}
        filled = float("inf")
        for row in rows:
            if filled >= self.recipe.trace.shard_mb * 1e6:
                plan[f"shard-{len(plan):05d}"], filled = [], 0
            plan[f"shard-{len(plan) - 1:05d}"].append(row)
            filled += self.bytes_of(row.ids, row.turns)
        return plan

    def manifest(self, rows: list[Conversation], intake: Intake, shards: list[str], size: int) -> dict[str, Any]:
        """What a reader must know before it trusts a shard."""
        counts = Counter(t for c in rows if c.split == "train" for t, turn in zip(c.ids, c.turns) if turn > 0)
        tokens = sum(len(c.ids) for c in rows)
        return {
            "format": FORMAT, "mode": folder_mode(self.recipe.trace), "key": self.key,
            "target": self.settings["target"], "model": self.recipe.target.model, "layers": self.target.layers,
            "convention": "hidden_states[k]: state entering layer k; final after the final norm",
            "hidden_size": self.target.hidden, "vocab_size": self.target.vocab_size,
            "end_ids": self.target.end_ids, "dtype": self.recipe.trace.dtype, "max_length": self.limit,
            "seed": self.recipe.prompts.seed, "shards": shards, "rows": len(rows), "tokens": tokens,
            "supervised_tokens": sum(counts.values()),
            "user_turn_tokens": sum(turn < 0 for c in rows for turn in c.turns), "predicted_bytes": size,
            "bytes_per_token": size / tokens, "dropped": dict(intake.dropped),
            "normalised": dict(intake.normalised),
            "finish": dict(Counter(c.finish for c in rows)), "backend": self.recipe.generation.backend,
            "lost_answers": dict(self.units.tally.lost), "answer_counts": dict(self.units.tally.counts),
            "off_policy": any(c.off_policy for c in rows), "off_policy_rows": sum(c.off_policy for c in rows),
            "answers_left_out": self.left_out,
            "draft_vocabulary_counts": {str(t): n for t, n in sorted(counts.items())},
        }


def collect(collector: Collector) -> None:
    """All stages; what is finished already is found and kept."""
    with collector.at_work():
        stages(collector)


def stages(collector: Collector) -> None:
    """Prompts, answers, states."""
    ranks = collector.ranks
    tally = collector.units.tally = Tally()  # a repair goes through them twice
    ranks.lead(collector.record)
    intake = collector.prompts_stage()
    rows = collector.answers_stage(intake.prompts)
    collector.capture_stage(rows, intake)
    if ranks.rank == 0:
        tokens = sum(len(c.ids) for c in rows)
        print(f"traces: {len(rows)} rows, {tokens} tokens, {collector.place.url}; dropped prompts: "
              f"{dict(intake.dropped)}, lost answers: {dict(tally.lost)}; left out: {collector.left_out}")


def main(recipe: Recipe, switches: set[str]) -> None:
    end_with_launcher()
    if recipe.target.tp_plan:  # all processes are one target, and one rank here
        lead(recipe.target, lambda: preview(recipe, Collector) if "preview" in switches else collect(Collector(recipe)))
        return
    with open_ranks() as ranks:
        console.quiet = ranks.rank > 0
        if "preview" in switches:
            ranks.lead(lambda: preview(recipe, Collector))
        else:
            collect(Collector(recipe, ranks))


COMMAND = Command("make trace", "Collects the target's own answers and hidden states.", main, {
    "preview": "print a few rows with their mask and an estimate of size and time; runs and keeps nothing"})

if __name__ == "__main__":
    process(COMMAND)
