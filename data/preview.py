"""`make trace ARGS=--preview`: a few rows with their mask, and what the whole run would take, before it is run.

Works on a copy of the recipe in a temporary folder within runs_dir, so it leaves nothing behind. Prompts from files are
all read and counted; only a handful is synthesised, a few answers are generated and their states captured. Everything
beyond that is an estimate and is printed as one.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.answers import Answering
from data.capture import Conversation
from data.chat import answer_points
from data.estimate import Estimate, Speed, bytes_of, extrapolate, marked, synthetic, workload
from data.generate import Answer, Request
from data.intake import EVALUATION, sources_of, wanted
from data.literal import special_tokens
from data.place import behind_url, open_place
from data.prompts import Intake, Prompt, hold_out
from drafters.target import Target
from recipes.errors import ConfigError, RunError
from recipes.schema import Recipe

SAMPLE = 4  # prompts answered: one alone, then the others together
SYNTHESISED = 3  # prompts a synthesis source is asked for, in tries of UNIT together
UNIT = 8
SHOWN = 400  # tokens of a row that are printed
STYLES = {1: "bold green", 0: "dim", -1: "cyan"}  # answer, prompt, user turn that training may learn from
MARKS = {1: "⟦⟧", 0: ("", ""), -1: "⟨⟩"}


class Stages(Protocol):
    """What a preview needs of data.collect.Collector."""

    folder: Path
    target: Target
    limit: int

    def at_work(self) -> AbstractContextManager[None]: ...

    def prompts_stage(self) -> Intake: ...

    def round(self, number: int, requests: list[Request]) -> list[Answer]: ...

    def capture_stage(self, rows: list[Conversation], intake: Intake) -> None: ...


def preview(recipe: Recipe, make: Callable[[Recipe], Stages], console: Console | None = None) -> Estimate:
    """Prints rows and estimate. `make` builds the stages of a recipe. Raises what the run itself would raise."""
    console = console or Console()
    with ExitStack() as held:
        stages = make(handful(recipe, held.enter_context(scratch(Path(recipe.runs_dir)))))
        held.enter_context(stages.at_work())
        began = perf_counter()
        intake = stages.prompts_stage()
        prompting = perf_counter() - began
        prompts = sum(not p.own for p in intake.prompts) + synthetic(recipe)
        count = recipe.prompts.validation * len(intake.prompts) // max(1, prompts)  # the share, where few are written
        held = hold_out([p.id for p in intake.prompts], count, recipe.prompts.seed)
        answering = Answering(recipe, stages.target, stages.limit, stages.round)
        kept = [row for p in intake.prompts if recipe.generation.answers == "keep" and p.id not in held
                for row in answering.kept(p)]
        asked = [p for p in intake.prompts if recipe.generation.answers != "keep" or p.id in held]
        rows, speed = sample(recipe, stages, spread(asked, SAMPLE))
        shown = spread(kept, SAMPLE) + rows
        if not shown:
            raise RunError(f"no prompt gives a row: {dict(answering.counts)}")
        began = perf_counter()
        stages.capture_stage(shown, intake)
        capturing = sum(len(r.ids) for r in shown) / (perf_counter() - began)
        predicted = sum(bytes_of(recipe, stages.target, len(r.ids), marked(r.turns)) for r in shown)
        files = (stages.folder / "shards").glob("*.safetensors")
        written = round(predicted), sum(f.stat().st_size for f in files)
    loads = workload(recipe, stages.target, stages.limit, intake.prompts, held, kept)
    estimate = extrapolate(recipe, stages.target, loads, rows, speed, capturing)
    estimate.written, estimate.prompts = written, prompts
    if wanted := synthetic(recipe):
        seconds = prompting / max(1, sum(p.own for p in intake.prompts)) * wanted
        estimate.synthesis = seconds * UNIT / max(UNIT, min(recipe.generation.batch_size, wanted)), seconds
    estimate.warnings += warnings(recipe, estimate)
    intake.dropped.update(answering.counts)
    show(console, stages.target.tokenizer, shown, intake, estimate, free_bytes(recipe))
    return estimate


@contextmanager
def scratch(parent: Path) -> Iterator[str]:
    """A temporary folder in `parent`, on the disk that the run would fill (case 61). Folders made for it go with it.
    ConfigError where it cannot be made."""
    made = [p for p in (parent, *parent.parents) if not p.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=".preview-", dir=parent)
    except OSError as error:
        raise ConfigError(f"{parent}: cannot write there: {error.strerror}") from None
    try:
        with folder as name:
            yield name
    finally:
        for p in made:
            with suppress(OSError):  # not empty: another run's by now
                p.rmdir()


def handful(recipe: Recipe, folder: str) -> Recipe:
    """The recipe with its outputs elsewhere, a few prompts of each synthesis source, and no held-out rows."""
    section, own = recipe.prompts, Path(recipe.runs_dir) / recipe.name / EVALUATION
    sources = [replace(s, count=min(n or 0, SYNTHESISED) if s.kind == "synthesis" else n or 0, weight=1.0)
               for s, n in zip(sources_of(section), wanted(section))]
    judged = "builtin" if Path(recipe.eval.prompts).resolve() == own.resolve() else recipe.eval.prompts
    return replace(recipe, runs_dir=folder, eval=replace(recipe.eval, prompts=judged),
                   trace=replace(recipe.trace, url=""),
                   prompts=replace(section, sources=sources, validation=0, evaluation=0, total=0),
                   generation=replace(recipe.generation, unit_rows=min(recipe.generation.unit_rows, UNIT)))


def spread(items: list, count: int) -> list:
    """At most `count` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def sample(recipe: Recipe, stages: Stages, prompts: list[Prompt]) -> tuple[list[Conversation], Speed]:
    """First answers of these prompts: the first one alone, the others together, both timed after a warm-up."""
    timed: list[tuple[float, list[Answer]]] = []

    def ask(number: int, requests: list[Request]) -> list[Answer]:
        if not timed and requests:
            stages.target.prefix([requests[0].prompt] * 2)
        began = perf_counter()
        answers = stages.round(len(timed), requests)
        timed.append((perf_counter() - began, answers))
        return answers

    answering = Answering(recipe, stages.target, stages.limit, ask)
    first_answers = [replace(p, messages=answer_points(p.messages)[0][0]) for p in prompts]
    parts = [part for part in (first_answers[:1], first_answers[1:]) if part]
    rows = [row for part in parts for row in answering.regenerated(part, set())]
    timed = [(seconds, answers) for seconds, answers in timed if answers]
    if not timed:
        return rows, Speed()
    steps = [seconds / max(len(a.tokens) for a in answers) for seconds, answers in timed]
    seconds, last = timed[-1]
    return rows, Speed(steps[0], steps[-1], len(last), sum(len(a.tokens) for a in last) / seconds)


def free_bytes(recipe: Recipe) -> int:
    """Free space where the run would write; of an object store there is no telling."""
    if behind_url(recipe.trace):
        return sys.maxsize
    folder = open_place(recipe.trace, Path(recipe.runs_dir) / recipe.name).folder.resolve()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.is_dir())).free


def warnings(recipe: Recipe, estimate: Estimate) -> list[str]:
    """What would stop the run later."""
    found = []
    if estimate.bytes[0] * 1.05 > free_bytes(recipe):
        found.append("the traces would not fit on this disk; lower the rows, use a narrower trace.dtype or another "
                     "runs_dir")
    if estimate.prompts <= recipe.prompts.validation:
        found.append(f"{estimate.prompts} usable prompts, but prompts.validation holds out {recipe.prompts.validation}")
    return found


def coloured(tokenizer: PreTrainedTokenizerBase, row: Conversation) -> Text:
    """A row's text: what a drafter learns from coloured and between brackets, prompt dim, special tokens reversed."""
    special = set(special_tokens(tokenizer).values())
    text, place = Text(), 0
    cut = SHOWN // 2 if len(row.ids) > SHOWN else len(row.ids)  # a middle is left out here: spans end, and begin anew
    begin = 0
    while place < len(row.ids):
        if place == cut:
            place = len(row.ids) - SHOWN // 2
            begin = place
            text.append(f" ... {len(row.ids) - SHOWN} tokens ... ", "italic")
        turn, control = row.turns[place], row.ids[place] in special
        stop = place + 1  # tokens are decoded together: a character may take several
        while (stop < len(row.ids) and row.turns[stop] == turn and (row.ids[stop] in special) == control
               and stop != cut):
            stop += 1
        kind = max(-1, min(1, turn))
        opening, closing = MARKS[kind]
        if place == begin or row.turns[place - 1] != turn:
            text.append(opening, STYLES[kind])
        text.append(visible(tokenizer.decode(row.ids[place:stop])), STYLES[kind] + (" reverse" if control else ""))
        if stop in (cut, len(row.ids)) or row.turns[stop] != turn:
            text.append(closing, STYLES[kind])
        place = stop
    return text


def visible(text: str) -> str:
    """Control characters as pictures: data must not steer the terminal."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)


def show(console: Console, tokenizer: PreTrainedTokenizerBase, rows: list[Conversation], intake: Intake,
         estimate: Estimate, free: int) -> None:
    """The sampled rows, then the estimate."""
    console.print(Text.assemble("mask: ", ("⟦supervised⟧", STYLES[1]), ", ", ("prompt", STYLES[0]), ", ",
                                ("⟨user turn, for train.user_turns⟩", STYLES[-1]), ", ", ("special token", "reverse")))
    for row in rows:
        origin = "given answer (off-policy)" if row.off_policy else "the target's answer"
        answer, user = sum(t > 0 for t in row.turns), sum(t < 0 for t in row.turns)
        console.print(Text(f"\n{row.id}: {len(row.ids)} tokens, {answer} supervised, {user} of a user turn, {origin}, "
                           f"ended by {row.finish}", "underline"), soft_wrap=True)
        console.print(coloured(tokenizer, row), soft_wrap=True)
    predicted, found = estimate.written
    table = Table("", "estimate", "at most", title="the whole run", title_justify="left")
    table.add_row("prompts", f"{estimate.prompts:,}", "")
    table.add_row("rows", *(f"{n:,.0f}" for n in estimate.rows))
    table.add_row("tokens", *(f"{n:,.0f}" for n in estimate.tokens))
    table.add_row("tokens learnt from", *(f"{n:,.0f}" for n in estimate.supervised))
    table.add_row("disk", *(f"{n / 1e6:,.1f} MB" for n in estimate.bytes))
    table.add_row("disk a token", *(f"{b / max(1, t):,.0f} B" for b, t in zip(estimate.bytes, estimate.tokens)))
    for name, (low, high) in (("writing prompts", estimate.synthesis), ("answers", estimate.answers),
                              ("states and storing", estimate.states)):
        table.add_row(f"time: {name}", duration(low), duration(high))
    console.print(table)
    room = "unknown behind a URL" if free == sys.maxsize else f"{free / 1e6:,.0f} MB"
    console.print(f"An estimate from {estimate.sampled} answers on this machine, not a promise: answers vary in "
                  f"length, and larger batches are extrapolated. Free on disk: {room}. Stored sample: "
                  f"{predicted:,} B predicted, {found:,} B written ({found / max(1, predicted) - 1:+.1%}). "
                  f"Dropped prompts: {dict(intake.dropped)}. Nothing of this preview is kept.", highlight=False)
    for warning in estimate.warnings:
        console.print(Text(f"warning: {warning}", "bold red"))


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
