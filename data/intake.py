"""From sources to prompts: read and detected, shown, filtered, mixed, split; each dropped row counted by its reason.

The result depends on the recipe and the sources' content only, so a second run has the same prompts.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data.chat import Message, prompt_ids, user_header_ids
from data.console import console, progress_bar
from data.evalsets import digests, judged, read_sets
from data.filters import Filter
from data.generate import Answer, Request
from data.hub import copy_of
from data.literal import Unrenderable
from data.prompts import BUILTIN_SHA256, Intake, Prompt, content_id, evaluation_prompts, hold_out, rank
from data.ranks import Ranks
from data.sampling import Sampling
from data.sources import Loaded, check_bad, load, sources_table
from drafters.target import Target
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, write_text
from recipes.schema import Eval, Prompts, PromptSource, Recipe

EVALUATION = "evaluation.jsonl"
REFUSED = ("refused by the chat template", "ids outside the vocabulary")


def sources_of(section: Prompts) -> list[PromptSource]:
    """The recipe's sources; one of self-written prompts where it names none."""
    return section.sources or [PromptSource(count=0 if section.total else 256)]


def parts(total: int, weights: list[float]) -> list[int]:
    """`total` divided by weight: each part is its exact share rounded down, the rest goes to the largest remainders
    (the earlier source on a tie)."""
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: total - sum(found)]:
        found[i] += 1
    return found


def wanted(section: Prompts) -> list[int | None]:
    """Prompts to keep from each source; None is all. Raises ConfigError where the recipe says it twice or never."""
    sources = sources_of(section)
    for number, source in enumerate(sources):
        where = f"prompts.sources[{number}]"
        if section.total and source.count:
            raise ConfigError(f"{where}: count = {source.count} and prompts.total = {section.total} both say how many; "
                              "use `weight` with prompts.total")
        if not section.total and source.weight != 1.0:
            raise ConfigError(f"{where}: weight = {source.weight}: weights divide prompts.total, which is not set")
        if source.kind == "synthesis" and not section.total and not source.count:
            raise ConfigError(f"{where}: synthesis needs `count` (or prompts.total)")
    if section.total:
        return list(parts(section.total, [s.weight for s in sources]))
    return [source.count or None for source in sources]


def evaluation_files(recipe: Recipe) -> dict[str, str]:
    """Name and checksum of the built-in prompts and of eval.prompts.

    The run's own evaluation.jsonl is none of them: it is made of the same sources, after the filters.
    """
    found = {"builtin": BUILTIN_SHA256}
    name = recipe.eval.prompts
    if name != "builtin" and not is_own(recipe, name):
        found[name] = sha256_file(Path(name)) if Path(name).is_file() else ""
    return found


def is_own(recipe: Recipe, path: str) -> bool:
    """Whether the path is the evaluation file that this run writes."""
    return Path(path).resolve() == (Path(recipe.runs_dir) / recipe.name / EVALUATION).resolve()


def further_sets(recipe: Recipe) -> Eval:
    """The eval section with those of its sets that are there before any prompt is."""
    return replace(recipe.eval, limit=0, sets=[replace(one, limit=0) for one in recipe.eval.sets
                                               if not is_own(recipe, one.path)])


def evaluation_sets(recipe: Recipe) -> dict[str, str]:
    """Name and digest of every set that no training prompt may overlap: those of eval.sets too."""
    return evaluation_files(recipe) | {f"eval.sets: {name}": digest
                                       for name, digest in digests(further_sets(recipe)).items()}


def wave(missing: int, unit_rows: int) -> list[int]:
    """Rows of the units of self-written turns that can be made together while `missing` prompts are wanted. A unit has
    a third more rows than are missing, and 16; behind a full one, another is sure to be as full if it would be so had
    every row been of use. So the units are those that are made when each waits for the one before."""
    sizes: list[int] = []
    while not sizes or (missing > 0 and sizes[-1] == min(unit_rows, 16 + missing * 4 // 3)):
        sizes.append(min(unit_rows, 16 + missing * 4 // 3))
        missing -= sizes[-1]
    return sizes


class PromptStage:
    """Makes the prompts of one trace run.

    `ask(part, units, max_tokens)` gives the target's answers to each of these units (name -> requests), kept or new;
    `longest` bounds a rendered prompt, in tokens; `folder` is the run's trace folder; `ranks` make them together.
    """

    def __init__(self, recipe: Recipe, target: Target, longest: int, folder: Path,
                 ask: Callable[[str, dict[str, list[Request]], int], list[list[Answer]]],
                 ranks: Ranks | None = None) -> None:
        self.recipe, self.section, self.target, self.ranks = recipe, recipe.prompts, target, ranks or Ranks()
        self.longest, self.folder, self.ask = min(recipe.prompts.max_tokens, longest), folder, ask
        self.intake = Intake()
        self.refusal = ""  # what was wrong with the last row that the target could not take

    def run(self) -> Intake:
        """Prompts of all sources with the reasons of those dropped. Raises ConfigError where too few remain, too many
        rows of a source are no conversation, or one id names two prompts."""
        counts = wanted(self.section)
        held_out = [p for name in evaluation_files(self.recipe) for p in evaluation_prompts(name)[0]]
        held_out += self.judged_sets()
        loaded = [self.load(number, source) for number, source in enumerate(sources_of(self.section))]
        console.print(sources_table(loaded, counts, self.recipe.generation.answers == "keep"))
        keep = Filter(held_out, self.section.filters)
        for source, count in zip(loaded, counts):
            if source.source.kind == "synthesis":
                self.synthesise(source, count or 0, keep)
            else:
                self.take(source, count, keep)
        intake = self.intake
        twice = [i for i, n in Counter(p.id for p in intake.prompts).items() if n > 1]
        if twice:
            raise ConfigError(f"prompts: id {twice[0]!r} names two different prompts; ids must differ over all sources "
                              "(id_field: '' makes them from the content)")
        self.split_evaluation()
        if len(intake.prompts) <= self.section.validation:
            raise ConfigError(f"prompts: {len(intake.prompts)} usable prompts ({dict(intake.dropped)} dropped), but "
                              f"prompts.validation holds out {self.section.validation}; give more prompts")
        return intake

    def judged_sets(self) -> list[Prompt]:
        """The questions of eval.sets."""
        section, folder = further_sets(self.recipe), self.folder / "prompts"
        if not section.sets:
            return []
        self.ranks.lead(lambda: read_sets(section, folder, self.section.max_bad_share))  # copies what is on the Hub
        return judged(read_sets(section, folder, self.section.max_bad_share))

    def load(self, number: int, source: PromptSource) -> Loaded:
        where = f"prompts.sources[{number}]"
        if source.kind == "hub":
            folder = self.folder / "prompts"
            self.ranks.lead(lambda: copy_of(source, where, folder))
            path = copy_of(source, where, folder)  # is there now
            found = load(number, source, PromptSource(kind="jsonl", path=str(path)), self.section.max_bad_share)
        else:
            found = load(number, source, source, self.section.max_bad_share)
        self.intake.dropped += found.dropped
        self.intake.normalised += found.normalised
        return found

    def take(self, loaded: Loaded, count: int | None, keep: Filter) -> None:
        """Prompts of a file: all in its order or, with a count, the first that are kept in the seeded order of ids."""
        prompts, kept, refused = loaded.prompts, 0, Counter()
        if count is not None:
            prompts = sorted(prompts, key=lambda p: rank(p.id, self.section.seed))
        with progress_bar() as bar:
            task = bar.add_task("filters ", total=count or len(prompts), note="")
            for prompt in prompts:
                if kept == count:
                    break
                reason = self.admit(prompt, keep)
                bar.update(task, advance=count is None or reason is None)
                kept += reason is None
                if reason in REFUSED:
                    refused[reason] += 1
                    loaded.first.setdefault(reason, f"id {prompt.id}: {self.refusal}")
        check_bad(loaded, refused, self.section.max_bad_share)
        if not self.section.total and count and kept < count:
            console.print(f"{loaded.label}: {kept} usable prompts, fewer than its count = {count}", soft_wrap=True)
        if self.section.total and kept < count:
            raise ConfigError(f"{loaded.label}: {kept} usable prompts, but its part of prompts.total = "
                              f"{self.section.total} by weight is {count} ({dict(self.intake.dropped)} dropped so "
                              "far); lower prompts.total or the source's weight, or give more rows")

    def admit(self, prompt: Prompt, keep: Filter) -> str | None:
        """Keeps the prompt or counts why not: the same for every source (case 60). Returns the reason."""
        tokenizer = self.target.tokenizer
        reason = None
        if prompt.ids is not None:
            if min(prompt.ids) < 0 or max(prompt.ids) >= self.target.vocab_size:
                reason, self.refusal = "ids outside the vocabulary", f"the target has {self.target.vocab_size} tokens"
            else:
                text = tokenizer.decode(prompt.ids, skip_special_tokens=True)
                prompt.messages = [{"role": "user", "content": text}]
        if reason is None and keep.too_large(prompt):
            reason = "too long"
        if reason is None:
            try:
                ids = prompt.ids or prompt_ids(tokenizer, prompt.messages, prompt.tools)
            except Unrenderable as error:
                reason, self.refusal = "refused by the chat template", str(error)
            else:
                reason = keep.reason(prompt, len(ids), self.section.min_tokens, self.longest)
        if reason:
            self.intake.dropped[reason] += 1
        else:
            self.intake.prompts.append(prompt)
        return reason

    def synthesise(self, loaded: Loaded, count: int, keep: Filter) -> None:
        """Units of self-written user turns until `count` of them are kept (Xu et al. 2024, Magpie)."""
        number, source, intake, target = loaded.number, loaded.source, self.intake, self.target
        goal = len(intake.prompts) + count
        header = user_header_ids(target.tokenizer)
        starts = [target.tokenizer(t, add_special_tokens=False)["input_ids"] for t in source.starts or [""]]
        sampling = Sampling(source.temperature, source.top_k, source.top_p)
        unit = tried = 0
        with progress_bar() as bar:
            task = bar.add_task("prompts ", total=count, note="", completed=0)
            while len(intake.prompts) < goal:
                units: dict[str, list[Request]] = {}
                # No more than keeps the ranks busy: a source that gives nothing is to be known of soon.
                together = 4 * self.ranks.world if self.ranks.world > 1 else 1
                for rows in wave(goal - len(intake.prompts), self.recipe.generation.unit_rows)[:together]:
                    units[f"{number}-{unit:05d}"] = [
                        Request(f"s{number}-{i}", header + starts[i % len(starts)], sampling)
                        for i in range(tried, tried + rows)]
                    unit, tried = unit + 1, tried + rows
                for answers, asked in zip(self.ask("prompts", units, source.max_tokens), units.values(), strict=True):
                    before = len(intake.prompts)
                    for prompt in self.as_prompts(answers, len(header)):
                        self.admit(prompt, keep)
                    if len(intake.prompts) == before:
                        raise RunError(f"the target wrote no usable prompt in {len(asked)} tries "
                                       f"({dict(intake.dropped)}); raise prompts.sources max_tokens or use a jsonl "
                                       "source")
                    del intake.prompts[goal:]
                    bar.update(task, completed=len(intake.prompts) - goal + count)

    def as_prompts(self, answers: list[Answer], header: int) -> list[Prompt]:
        """User turns from what was sampled behind the user header (`header` tokens); finished ones only."""
        kept = []
        for answer in answers:
            turn = answer.prompt[header:] + answer.tokens[:-1]
            text = self.target.tokenizer.decode(turn, skip_special_tokens=True).strip()
            if answer.finish != "stop":
                self.intake.dropped["unfinished"] += 1
            else:
                messages: list[Message] = [{"role": "user", "content": text}]
                kept.append(Prompt(content_id(messages), messages, "synthesis", own=True))
        return kept

    def split_evaluation(self) -> None:
        """Takes the evaluation prompts out, writes them into the run's folder, and drops what overlaps them.

        Only plain conversations are taken, since an evaluation file holds `messages` of system, user and assistant.
        """
        section, intake = self.section, self.intake
        if not section.evaluation:
            return
        plain = [p for p in intake.prompts if p.ids is None and not p.tools
                 and all(m.keys() == {"role", "content"} and m["role"] != "tool" for m in p.messages)]
        chosen = hold_out([p.id for p in plain], section.evaluation, f"evaluation:{section.seed}")
        if len(chosen) < section.evaluation:
            raise ConfigError(f"prompts.evaluation = {section.evaluation}: only {len(chosen)} plain prompts are usable "
                              f"({dict(intake.dropped)} dropped)")
        held = [p for p in intake.prompts if p.id in chosen]
        lines = [json.dumps({"id": p.id, "kind": p.kind, "messages": p.messages}, ensure_ascii=False) for p in held]
        path = Path(self.recipe.runs_dir) / self.recipe.name / EVALUATION
        self.ranks.lead(lambda: write_text(path, "\n".join(lines) + "\n"))
        judge = Filter(held)
        rest = [p for p in intake.prompts if p.id not in chosen]
        intake.prompts = [p for p in rest if not judge.is_judged(p)]
        if len(rest) > len(intake.prompts):
            intake.dropped["overlaps the evaluation prompts"] += len(rest) - len(intake.prompts)
