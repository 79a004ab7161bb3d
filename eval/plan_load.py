"""How much a recipe has to do, in its best and its worst case: counted where it can be, assumed where not."""

from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from data import sources
from data.chat import answer_points
from data.estimate import synthetic
from data.evalsets import read_sets
from data.intake import EVALUATION, sources_of, wanted
from data.prompts import Prompt, evaluation_prompts
from data.store import read_manifest
from drafters.registry import entry
from eval.plan_machine import Assumption, span
from recipes.errors import ConfigError, RunError
from recipes.schema import PromptSource, Recipe
from recipes.stages import Load

TOKENS_A_CHARACTER = Assumption("tokens a character of a prompt", 1 / 4.5, 1 / 3.0, "English text; other scripts more")
TEMPLATE = Assumption("tokens that the chat template adds", 8, 40, "turn markers, a default system message")
UNKNOWN_PROMPT = (64.0, 512.0)


@dataclass
class Counted:
    """Prompts of the sources that can be read here, and of those that the target writes or that lie elsewhere."""

    written: int = 0
    written_tokens: float = 0.0  # longest, summed
    read: int = 0
    turns: int = 0  # answers that the conversations read would have
    characters: float = 0.0  # of all prompts read, given turns included
    user: float = 0.0  # of their last user turns
    given: float = 0.0  # of their given answers
    elsewhere: int = 0


def written(recipe: Recipe) -> tuple[int, float]:
    """Prompts that the target writes, and their longest lengths, summed."""
    section = recipe.prompts
    longest = sum((count or 0) * source.max_tokens for source, count in zip(sources_of(section), wanted(section))
                  if source.kind == "synthesis")
    return synthetic(recipe), float(longest)


def characters(turns: list[dict]) -> int:
    return sum(len(turn["content"]) for turn in turns)


def counted(recipe: Recipe) -> Counted:
    """What the prompt sources hold, filters aside. Raises ConfigError as the run would, and for a Hub data set of which
    nothing says how many rows it gives."""
    found = Counted(*written(recipe))
    for number, (source, count) in enumerate(zip(sources_of(recipe.prompts), wanted(recipe.prompts))):
        if source.kind == "synthesis":
            continue
        if source.kind == "hub":
            found.elsewhere += hub_rows(number, source, count)
        else:
            prompts = sources.load(number, source, source, recipe.prompts.max_bad_share).prompts
            add(found, prompts, min(count or len(prompts), len(prompts)))
    return found


def hub_rows(number: int, source: PromptSource, count: int | None) -> int:
    rows = count or source.rows
    if not rows:
        raise ConfigError(f"prompts.sources[{number}].rows: make plan must know how many rows {source.name} gives; set "
                          "rows or count")
    return min(count or rows, source.rows or rows)


def add(found: Counted, prompts: list[Prompt], count: int) -> None:
    """Adds `count` of these prompts, as long as they are in the mean."""
    share = count / max(1, len(prompts))
    found.read += count
    found.turns += round(share * sum(len(answer_points(p.messages)[0]) if p.ids is None else 1 for p in prompts))
    found.characters += share * sum(characters(p.messages) if p.ids is None else 4 * len(p.ids) for p in prompts)
    found.user += share * sum(characters([m for m in p.messages if m["role"] == "user"][-1:]) for p in prompts)
    found.given += share * sum(characters(p.given) for p in prompts)


def loads(recipe: Recipe, folder: Path) -> tuple[Load, Load, list[Assumption]]:
    """Best and worst load. A finished trace folder of the run says what its rows hold."""
    held = finished(recipe, folder)
    notes: list[Assumption] = []
    best, worst = from_manifest(recipe, held) if held else from_sources(recipe, notes)
    accepted = span(recipe.plan, "acceptance", *entry(recipe.drafter.kind).code.EXPECTED_LENGTHS)
    count, mean = evaluation(recipe, folder)

    def whole(load: Load, case: str) -> Load:
        added = getattr(TEMPLATE, case)
        prompt = load.prompt if mean is None else mean * getattr(TOKENS_A_CHARACTER, case) + added
        return replace(load, accepted=getattr(accepted, case), opening=added, judged=count, judged_prompt=prompt)

    return whole(best, "best"), whole(worst, "worst"), [*notes, TOKENS_A_CHARACTER, TEMPLATE, accepted]


def evaluation(recipe: Recipe, folder: Path) -> tuple[int, float | None]:
    """Evaluation prompts and their mean characters; None where `make trace` has yet to keep them out of its prompts,
    which they then are like. ConfigError for a file that is not there."""
    own = folder / EVALUATION
    if recipe.eval.sets:
        return further_evaluation(recipe, folder)
    if Path(recipe.eval.prompts).resolve() == own.resolve() and not own.exists():
        return recipe.prompts.evaluation, None
    prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
    return len(prompts), sum(characters(p.messages) for p in prompts) / len(prompts)


def further_evaluation(recipe: Recipe, folder: Path) -> tuple[int, float | None]:
    """The same of eval.sets. A Hub data set is not read: it counts with its rows, and is as long as the others."""
    section = recipe.eval
    here = [one for one in section.sets if one.kind != "hub"]
    found = read_sets(replace(section, sets=here), folder, recipe.prompts.max_bad_share) if here else []
    rounds = [turn for one in found for question in one.questions for turn in question.rounds]
    away = 0
    for number, one in enumerate(section.sets):
        if one.kind == "hub" and not one.rows:
            raise ConfigError(f"eval.sets[{number}].rows: make plan must know how many rows {one.dataset} gives")
        away += one.rows if one.kind == "hub" else 0
    return len(rounds) + away, sum(map(characters, rounds)) / len(rounds) if rounds else None


def finished(recipe: Recipe, folder: Path) -> dict | None:
    """The manifest of the run's own traces, where they are in its folder; it counts rows once all are answered."""
    if recipe.trace.url:
        return None
    try:
        return read_manifest(folder / "traces")
    except RunError:
        return None


def from_manifest(recipe: Recipe, manifest: dict) -> tuple[Load, Load]:
    """The load that a finished trace has shown; how long its longest row is, it does not say."""
    rows, held = manifest["rows"], recipe.prompts.validation
    answer, prompt = manifest["supervised_tokens"] / rows, (manifest["tokens"] - manifest["supervised_tokens"]) / rows
    number, tokens = written(recipe)
    known = Load(
        written=asked(number, 4 / 3), written_tokens=tokens / max(1, number), rows=rows, validation=held,
        answers=rows if recipe.generation.answers == "regenerate" else held, prompt=prompt, answer=answer,
        user=manifest.get("user_turn_tokens", 0) / rows if recipe.train.user_turns else 0.0)
    cap, limit = recipe.generation.max_tokens, recipe.trace.max_length
    return (replace(known, longest=min(limit, prompt + cap)),
            replace(known, longest=min(limit, recipe.prompts.max_tokens + cap)))


def asked(written: int, tries: float) -> float:
    """Rows that the target is asked for where `written` prompts are wanted (data.intake.wave)."""
    return 16 + written * tries if written else 0.0


def from_sources(recipe: Recipe, notes: list[Assumption]) -> tuple[Load, Load]:
    """The load as the sources and caps have it, with what is assumed added to `notes`."""
    found, section, cap = counted(recipe), recipe.generation, float(recipe.generation.max_tokens)
    answers = span(recipe.plan, "answer_tokens", (cap / 2, cap), "half of generation.max_tokens, or all", False)
    going_on = Assumption("later turns of a conversation that come about", 0.0, 1.0,
                          "an answer cut by length ends its conversation")
    tries = Assumption("tries for a prompt that the target writes", 4 / 3, 8 / 3, "unfinished ones are dropped")
    unknown = Assumption("prompt tokens where no source can be read here", *UNKNOWN_PROMPT, "no sample")
    notes += [answers, *([going_on] if found.turns > found.read else []), *([tries] if found.written else []),
              *([unknown] if found.elsewhere and not recipe.plan.prompt_tokens else [])]
    cases = []
    for case in ("best", "worst"):
        pick = attrgetter(case)
        turns = found.read + (found.turns - found.read) * pick(going_on)
        rows = turns + found.written + found.elsewhere
        own = 0.5 if case == "best" else 1.0  # of the longest user turn that the target may write
        known = found.characters * pick(TOKENS_A_CHARACTER) + own * found.written_tokens
        mean = (known + found.elsewhere * pick(unknown)) / max(1, rows) + pick(TEMPLATE)
        given = span(recipe.plan, "prompt_tokens", (mean, mean), "", False)
        prompt = min(pick(given), recipe.prompts.max_tokens)
        kept = section.answers == "keep"
        answer = found.given * pick(TOKENS_A_CHARACTER) / max(1, found.read) if kept else pick(answers)
        user = 0.0
        if recipe.train.user_turns:
            others = found.user * pick(TOKENS_A_CHARACTER) if recipe.trace.user_turns == "all" else 0.0
            user = (others + own * found.written_tokens) / max(1, rows)
        longest = prompt + cap if case == "best" else recipe.prompts.max_tokens + cap
        cases.append(Load(
            written=asked(found.written, pick(tries)), rows=rows, validation=recipe.prompts.validation, prompt=prompt,
            written_tokens=own * found.written_tokens / max(1, found.written), answer=answer, user=min(user, prompt),
            answers=recipe.prompts.validation if kept else rows, longest=min(longest, recipe.trace.max_length)))
    if recipe.plan.prompt_tokens:
        notes.append(span(recipe.plan, "prompt_tokens", (0, 0), "", False))
    return cases[0], cases[1]
