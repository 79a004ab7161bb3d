"""`make trace`: prompts, the target's own answers, hidden states; each stage in atomic units, resumable.

Run as `python -m data.collect --config RECIPE`. A kill at any moment costs at most the unit in work; the
same command goes on and ends with the same files, because a unit's computation depends on nothing outside it.
"""

import json
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.answers import Answering, check_answers
from data.backends.registry import content_settings, open_backend
from data.backends.units import Tally, answer_unit
from data.capture import Conversation, capture
from data.chat import prompt_ids, user_header_ids
from data.generate import Answer, Request
from data.literal import Unrenderable
from data.preview import preview
from data.prompts import Filter, Intake, Prompt, content_id, evaluation_prompts, read_jsonl
from data.sampling import Sampling
from data.store import FORMAT, bad_rows, row_bytes, shard_complete, write_shard
from drafters.target import Target, require_chat_template
from recipes.cli import Command, run, run_dir
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sha256_json, write_json
from recipes.provenance import difference, stamp
from recipes.schema import PromptSource, Recipe

console = Console(stderr=True)


def progress_bar() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                    TextColumn("{task.fields[note]}"), TimeRemainingColumn(), console=console)


class Collector:
    """One trace run. Every `*_stage` method returns its result whether it had to work or found it done."""

    def __init__(self, recipe: Recipe) -> None:
        check_answers(recipe)
        self.recipe = recipe
        self.left_out: dict[str, int] = {}
        self.folder = run_dir(recipe) / "traces"
        self.target = Target(recipe.target, recipe.trace.layers)
        require_chat_template(self.target)
        self.limit = min(recipe.trace.max_length, self.target.max_length)
        if recipe.generation.max_tokens >= self.limit:
            raise ConfigError(f"generation.max_tokens = {recipe.generation.max_tokens}: leaves no room for a prompt "
                              f"within {self.limit} tokens (trace.max_length and the target's context)")
        self.backend = open_backend(recipe.generation, self.target)
        self.tally = Tally()
        self.settings = self.describe()
        self.claim()

    def describe(self) -> dict[str, Any]:
        """Everything that decides the traces' content: another value is another trace set (case 30)."""
        recipe = self.recipe
        sources = [asdict(s) for s in self.sources()]
        for source in sources:
            if source["kind"] == "jsonl":
                source["sha256"] = sha256_file(Path(source["path"])) if Path(source["path"]).is_file() else ""
        return {
            "target": self.target.fingerprint(), "sources": sources,
            "prompts": {k: v for k, v in asdict(recipe.prompts).items() if k != "sources"},
            "generation": content_settings(recipe.generation),
            "trace": asdict(recipe.trace) | {"layers": self.target.layers},
            "validation_draft_length": recipe.train.validation_draft_length,
        }

    def sources(self) -> list[PromptSource]:
        return self.recipe.prompts.sources or [PromptSource(count=256)]

    def claim(self) -> None:
        """Takes the folder for these settings, or says which setting an earlier run had otherwise."""
        path = self.folder / "settings.json"
        try:
            for part in ("prompts", "answers", "shards"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
            collected = {".json", ".jsonl"} & {p.suffix for p in self.folder.glob("*/*")}
            if not collected:  # nothing yet, whatever was tried
                write_json(path, self.settings)
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot write there: {error.strerror}") from None
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise RunError(f"{path}: missing or unreadable; delete {self.folder} to start over") from None
        changed = difference(earlier, self.settings)
        if changed:
            raise ConfigError(f"{self.folder}: traced earlier with other settings: {changed}; "
                              "use another `name` or delete that folder")

    def prompts_stage(self) -> Intake:
        """Prompts of all sources, filtered, with the reasons of those dropped."""
        held_out, _ = evaluation_prompts("builtin")
        keep = Filter(held_out)
        intake = Intake()
        for number, source in enumerate(self.sources()):
            if source.kind == "jsonl":
                rows = read_jsonl(Path(source.path))
                self.admit(rows[: source.count or len(rows)], keep, intake)
            else:
                self.synthesise(number, source, keep, intake)
        twice = [i for i, n in Counter(p.id for p in intake.prompts).items() if n > 1]
        if twice:
            raise ConfigError(f"prompts: id {twice[0]!r} names two different prompts; ids must differ over all sources")
        if len(intake.prompts) <= self.recipe.prompts.validation:
            raise ConfigError(f"prompts: {len(intake.prompts)} usable prompts ({dict(intake.dropped)} dropped), but "
                              f"prompts.validation holds out {self.recipe.prompts.validation}; give more prompts")
        return intake

    def admit(self, rows: list[Prompt], keep: Filter, intake: Intake) -> None:
        section = self.recipe.prompts
        for prompt in rows:
            try:
                tokens = len(prompt_ids(self.target.tokenizer, prompt.messages, prompt.tools))
            except Unrenderable as error:
                intake.dropped[str(error)] += 1
                continue
            longest = min(section.max_tokens, self.limit - self.recipe.generation.max_tokens)
            reason = keep.reason(prompt, tokens, section.min_tokens, longest)
            if reason:
                intake.dropped[reason] += 1
            else:
                intake.prompts.append(prompt)

    def synthesise(self, number: int, source: PromptSource, keep: Filter, intake: Intake) -> None:
        """Units of self-written user turns until `count` of them are kept (Xu et al. 2024, Magpie)."""
        wanted = len(intake.prompts) + source.count
        header = user_header_ids(self.target.tokenizer)
        starts = [self.target.tokenizer(t, add_special_tokens=False)["input_ids"] for t in source.starts or [""]]
        sampling = Sampling(source.temperature, source.top_k, source.top_p)
        unit = tried = 0
        with progress_bar() as bar:
            task = bar.add_task("prompts ", total=source.count, note="", completed=0)
            while len(intake.prompts) < wanted:
                before = len(intake.prompts)
                rows = min(self.recipe.generation.unit_rows, 16 + (wanted - before) * 4 // 3)
                requests = [Request(f"s{number}-{i}", header + starts[i % len(starts)], sampling)
                            for i in range(tried, tried + rows)]
                self.tally.asked += rows
                answers = self.unit("prompts", f"{number}-{unit:05d}", requests, source.max_tokens)
                self.admit(self.as_prompts(answers, len(header), intake), keep, intake)
                if len(intake.prompts) == before:
                    raise RunError(f"the target wrote no usable prompt in {rows} tries ({dict(intake.dropped)}); "
                                   "raise prompts.sources max_tokens or use a jsonl source")
                del intake.prompts[wanted:]
                bar.update(task, completed=len(intake.prompts) - wanted + source.count)
                unit, tried = unit + 1, tried + rows

    def as_prompts(self, answers: list[Answer], header: int, intake: Intake) -> list[Prompt]:
        """User turns from what was sampled behind the user header (`header` tokens); finished ones only."""
        kept = []
        for answer in answers:
            turn = answer.prompt[header:] + answer.tokens[:-1]
            text = self.target.tokenizer.decode(turn, skip_special_tokens=True).strip()
            if answer.finish != "stop":
                intake.dropped["unfinished"] += 1
            else:
                messages = [{"role": "user", "content": text}]
                kept.append(Prompt(content_id(messages), messages, "synthesis", own=True))
        return kept

    def unit(self, part: str, name: str, requests: list[Request], max_tokens: int) -> list[Answer]:
        """Answers of one unit, read where it is complete; rows that the backend lost are missing, and counted."""
        allowed = self.tally.allowed(self.recipe.generation.max_lost_share)
        path = self.folder / part / f"{name}.json"
        return self.tally.add(answer_unit(self.backend, path, requests, max_tokens, allowed))

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
        with progress_bar() as bar:
            task = bar.add_task("answers ", total=len(requests), note="")
            for start in range(0, len(requests), section.unit_rows):
                chunk = requests[start : start + section.unit_rows]
                answers += self.unit("answers", f"{number}-{start // section.unit_rows:05d}", chunk, section.max_tokens)
                bar.update(task, advance=len(chunk), note=f"{sum(len(a.tokens) for a in answers)} tokens")
        return answers

    def capture_stage(self, rows: list[Conversation], intake: Intake) -> None:
        """Manifest first, then every shard that is not complete yet."""
        section = self.recipe.trace
        dtype = getattr(torch, section.dtype)
        plan = self.plan_shards(rows, dtype)
        sizes = [self.bytes_of(c, dtype) for c in rows]
        shards = self.folder / "shards"
        key = sha256_json(self.settings)
        missing = [name for name, part in plan.items() if not shard_complete(shards, name, [c.id for c in part], key)]
        needed = sum(self.bytes_of(c, dtype) for name in missing for c in plan[name])
        free = shutil.disk_usage(self.folder).free
        if needed * 1.05 > free:
            raise RunError(f"{self.folder}: traces need {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free")
        write_json(self.folder / "manifest.json", self.manifest(rows, intake, list(plan), sum(sizes)))
        bad = 0
        with progress_bar() as bar:
            task = bar.add_task("states  ", total=len(plan), note=f"{sum(sizes) / 1e6:.0f} MB")
            for name, part in plan.items():
                if name in missing:
                    traced, faults = capture(self.target, part, section.batch_tokens, dtype)
                    write_shard(shards, name, traced, dtype, faults, key)
                bad += bad_rows(shards, name)  # of finished shards too: running again is no way past the gate
                if bad > section.max_bad_share * len(rows):
                    raise RunError(f"{bad} of {len(rows)} rows have NaN or Inf states (trace.max_bad_share = "
                                   f"{section.max_bad_share}); check target.dtype and trace.dtype")
                bar.advance(task)

    def bytes_of(self, row: Conversation, dtype: torch.dtype) -> int:
        finals = sum(turn != 0 for turn in row.turns[1:])
        width = len(self.target.layers) * self.target.hidden
        return row_bytes(len(row.ids), finals, width, self.target.hidden, dtype.itemsize)

    def plan_shards(self, rows: list[Conversation], dtype: torch.dtype) -> dict[str, list[Conversation]]:
        """Rows of each shard, in order, cut where a shard reaches its size: the same on every run."""
        plan: dict[str, list[Conversation]] = {}
        filled = float("inf")
        for row in rows:
            if filled >= self.recipe.trace.shard_mb * 1e6:
                plan[f"shard-{len(plan):05d}"], filled = [], 0
            plan[f"shard-{len(plan) - 1:05d}"].append(row)
            filled += self.bytes_of(row, dtype)
        return plan

    def manifest(self, rows: list[Conversation], intake: Intake, shards: list[str], size: int) -> dict[str, Any]:
        """What a reader must know before it trusts a shard."""
        counts = Counter(t for c in rows if c.split == "train" for t, turn in zip(c.ids, c.turns) if turn > 0)
        tokens = sum(len(c.ids) for c in rows)
        return {
            "format": FORMAT, "key": sha256_json(self.settings), "target": self.settings["target"],
            "model": self.recipe.target.model, "layers": self.target.layers,
            "convention": "hidden_states[k]: state entering layer k; final after the final norm",
            "hidden_size": self.target.hidden, "vocab_size": self.target.vocab_size,
            "end_ids": self.target.end_ids, "dtype": self.recipe.trace.dtype, "max_length": self.limit,
            "seed": self.recipe.prompts.seed, "shards": shards, "rows": len(rows), "tokens": tokens,
            "supervised_tokens": sum(counts.values()),
            "own_prompt_tokens": sum(turn < 0 for c in rows for turn in c.turns), "predicted_bytes": size,
            "bytes_per_token": size / tokens, "dropped": dict(intake.dropped),
            "finish": dict(Counter(c.finish for c in rows)), "backend": self.recipe.generation.backend,
            "lost_answers": dict(self.tally.lost), "answer_counts": dict(self.tally.counts),
            "off_policy": any(c.off_policy for c in rows), "off_policy_rows": sum(c.off_policy for c in rows),
            "answers_left_out": self.left_out,
            "draft_vocabulary_counts": {str(t): n for t, n in sorted(counts.items())},
        }


def main(recipe: Recipe, switches: set[str]) -> None:
    if "preview" in switches:
        preview(recipe, Collector)
        return
    collector = Collector(recipe)
    intake = collector.prompts_stage()
    rows = collector.answers_stage(intake.prompts)
    collector.capture_stage(rows, intake)
    write_json(collector.folder / "provenance.json", stamp(asdict(recipe)))
    tokens = sum(len(c.ids) for c in rows)
    print(f"traces: {len(rows)} rows, {tokens} tokens, {collector.folder}; dropped prompts: {dict(intake.dropped)}, "
          f"lost answers: {dict(collector.tally.lost)}")


COMMAND = Command("make trace", "Collects the target's own answers and hidden states.", main, {
    "preview": "print a few rows with their mask and an estimate of size and time; runs and keeps nothing"})

if __name__ == "__main__":
    run(COMMAND)
