"""`make trace`: prompts, the target's own answers, hidden states; each stage in atomic units, resumable.

Run as `python -m data.collect --config RECIPE`. A kill at any moment costs at most the unit in work; the
same command goes on and ends with the same files, because a unit's computation depends on nothing outside it.
"""

import shutil
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from data.answers import Answering, check_answers
from data.backends.registry import open_backend
from data.backends.units import Tally, answer_unit
from data.capture import BAD, Conversation, bare, capture, finite
from data.codec import DTYPES, carrier
from data.console import progress_bar
from data.generate import Answer, Request
from data.intake import PromptStage
from data.place import behind_url, open_place
from data.preview import preview
from data.prompts import Intake, Prompt
from data.settings import claim, describe, folder_mode, stores_states
from data.staging import Staging
from data.states import Capture, check_states, open_states
from data.store import FORMAT, TraceRow, bad_rows, row_bytes, write_shard
from data.writer import BackgroundWriter
from drafters.target import require_chat_template
from drafters.tensor_parallel import lead, open_target
from recipes.cli import Command, run, run_dir
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_json, write_json
from recipes.provenance import stamp
from recipes.schema import Recipe


class Collector:
    """One trace run. Every `*_stage` method returns its result whether it had to work or found it done."""

    def __init__(self, recipe: Recipe) -> None:
        check_answers(recipe)
        self.recipe = recipe
        self.left_out: dict[str, int] = {}
        self.place = open_place(recipe.trace, run_dir(recipe))
        self.folder = self.place.folder
        self.target = open_target(recipe.target, recipe.trace.layers)
        require_chat_template(self.target)
        self.limit = min(recipe.trace.max_length, self.target.max_length)
        if recipe.generation.max_tokens >= self.limit:
            raise ConfigError(f"generation.max_tokens = {recipe.generation.max_tokens}: leaves no room for a prompt "
                              f"within {self.limit} tokens (trace.max_length and the target's context)")
        self.backend = open_backend(recipe.generation, self.target)
        check_states(recipe.trace, self.target)
        self.tally = Tally()
        self.settings = describe(recipe, self.target)
        self.key = sha256_json(self.settings)
        self.place.pull()
        claim(self.folder, self.settings)
        self.place.share_all()
        self.dtype = DTYPES[recipe.trace.dtype] if stores_states(recipe.trace) else torch.float32
        self.staging = Staging(self.folder / "staged", self.key, carrier(self.dtype), recipe.trace.shard_mb * 1e6)
        # Behind a URL they would have to wait on this disk until the last answer; vLLM's are another computation's.
        self.keeps_states = (stores_states(recipe.trace) and not behind_url(recipe.trace)
                             and recipe.trace.backend == "transformers")

    def prompts_stage(self) -> Intake:
        """Prompts of all sources, filtered, with the reasons of those dropped."""
        longest = self.limit - self.recipe.generation.max_tokens
        intake = PromptStage(self.recipe, self.target, longest, self.folder, self.written).run()
        self.place.share_all()
        return intake

    def written(self, part: str, name: str, requests: list[Request], max_tokens: int) -> list[Answer]:
        """One unit of self-written user turns."""
        self.tally.asked += len(requests)
        return self.unit(part, name, requests, max_tokens)

    def unit(self, part: str, name: str, requests: list[Request], max_tokens: int) -> list[Answer]:
        """Answers of one unit, read where it is complete; rows that the backend lost are missing, and counted. The
        states that a backend computes on the way are kept."""
        allowed = self.tally.allowed(self.recipe.generation.max_lost_share)
        path = self.folder / part / f"{name}.json"
        keeping = self.staging.unit(name) if part == "answers" and self.keeps_states else None
        unit = answer_unit(self.backend, path, requests, max_tokens, allowed, keeping)
        self.place.share(path)
        return self.tally.add(unit)

    def answers_stage(self, prompts: list[Prompt]) -> list[Conversation]:
        """Finished rows of all prompts (data/answers.py)."""
        answering = Answering(self.recipe, self.target, self.limit, self.round)
        rows = answering.rows(prompts)
        self.left_out = dict(answering.counts)
        return rows

    def round(self, number: int, requests: list[Request]) -> list[Answer]:
        """Answers to one round's requests, in units."""
        section, answers = self.recipe.generation, []
        self.tally.asked += len(requests)
        if number == 0 and self.keeps_states and not (self.folder / "manifest.json").exists():
            waiting = self.staging.dtype if section.backend == "transformers" else self.dtype
            least = sum(self.bytes_of(r.prompt, r.turns, waiting) for r in requests)  # answers come on top
            self.check_room(least - self.staging.held(number))
        with progress_bar() as bar:
            task = bar.add_task("answers ", total=len(requests), note="")
            for start in range(0, len(requests), section.unit_rows):
                chunk = requests[start : start + section.unit_rows]
                answers += self.unit("answers", f"{number}-{start // section.unit_rows:05d}", chunk, section.max_tokens)
                bar.update(task, advance=len(chunk), note=f"{sum(len(a.tokens) for a in answers)} tokens")
        return answers

    def capture_stage(self, rows: list[Conversation], intake: Intake) -> None:
        """Manifest first, then every shard that is not complete yet."""
        section, dtype, shards = self.recipe.trace, self.dtype, self.folder / "shards"
        plan = self.plan_shards(rows)
        sizes = {name: sum(self.bytes_of(c.ids, c.turns) for c in part) for name, part in plan.items()}
        size = sum(sizes.values())
        missing = [name for name, part in plan.items() if not self.place.complete(name, [c.id for c in part], self.key)]
        self.staging.open([c.id for name, part in plan.items() if name not in missing for c in part])
        self.check_room(self.place.room_for([sizes[name] for name in missing]) * 1.05 - self.staging.returns())
        self.write_described("manifest.json", self.manifest(rows, intake, list(plan), size))
        bad = 0

        def write(name: str, traced: list[TraceRow], faults: dict[str, str], spent: list[str]) -> None:
            write_shard(shards, name, traced, dtype, faults, self.key)
            self.place.finish_shard(name)
            self.staging.remove(spent)

        with (progress_bar() as bar, BackgroundWriter(write) as writer,
              open_states(section, self.target, self.folder, capture) as states):
            task = bar.add_task("states  ", total=len(plan), note=f"{size / 1e6:.0f} MB")
            for name, part in plan.items():
                if name in missing:
                    traced, faults = self.traced(part, states)
                    writer.put(name, traced, faults, self.staging.spent([c.id for c in part]))
                bad += len(faults) if name in missing else bad_rows(shards, name)  # running again is no way past
                if bad > section.max_bad_share * len(rows):
                    raise RunError(f"{bad} of {len(rows)} rows have NaN or Inf states (trace.max_bad_share = "
                                   f"{section.max_bad_share}); check target.dtype and trace.dtype")
                bar.advance(task)
        self.staging.close()

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
            "lost_answers": dict(self.tally.lost), "answer_counts": dict(self.tally.counts),
            "off_policy": any(c.off_policy for c in rows), "off_policy_rows": sum(c.off_policy for c in rows),
            "answers_left_out": self.left_out,
            "draft_vocabulary_counts": {str(t): n for t, n in sorted(counts.items())},
        }


def collect(collector: Collector) -> None:
    """All stages; what is finished already is found and kept."""
    intake = collector.prompts_stage()
    rows = collector.answers_stage(intake.prompts)
    collector.capture_stage(rows, intake)
    collector.write_described("provenance.json", stamp(asdict(collector.recipe)))
    tokens = sum(len(c.ids) for c in rows)
    print(f"traces: {len(rows)} rows, {tokens} tokens, {collector.place.url}; dropped prompts: {dict(intake.dropped)}, "
          f"lost answers: {dict(collector.tally.lost)}; left out: {collector.left_out}")


def main(recipe: Recipe, switches: set[str]) -> None:
    lead(recipe.target, lambda: preview(recipe, Collector) if "preview" in switches else collect(Collector(recipe)))


COMMAND = Command("make trace", "Collects the target's own answers and hidden states.", main, {
    "preview": "print a few rows with their mask and an estimate of size and time; runs and keeps nothing"})

if __name__ == "__main__":
    run(COMMAND)
