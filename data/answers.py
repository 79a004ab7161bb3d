"""From prompts to finished rows: the target's own answers, turn by turn, or the given ones. See docs/chat.md."""

from collections import Counter
from collections.abc import Callable
from typing import Literal

from data.capture import Conversation
from data.chat import Message, answer_points, prompt_ids, render, reply_message, truncate, user_header_ids, user_span
from data.generate import Answer, Request
from data.literal import Unrenderable
from data.prompts import Prompt, hold_out
from data.sampling import Sampling
from drafters.target import Target
from recipes.errors import ConfigError, RunError
from recipes.schema import Recipe

Ask = Callable[[int, list[Request]], list[Answer]]


def check_answers(recipe: Recipe) -> None:
    """ConfigError where the recipe wants what its prompt sources cannot give: answers of prompts that the target writes
    itself, or user turns of the target where it writes none."""
    kinds = {source.kind for source in recipe.prompts.sources} or {"synthesis"}
    if recipe.generation.answers == "keep" and "synthesis" in kinds:
        raise ConfigError("generation.answers = keep: a synthesis source has no given answers; use a source with "
                          "answers, or generation.answers: regenerate")
    if recipe.generation.answers == "keep" and recipe.trace.user_turns == "all":
        raise ConfigError("trace.user_turns = all: user turns before given answers (generation.answers = keep) are not "
                          "marked; set it to own, or have the target answer (generation.answers: regenerate)")
    if recipe.train.user_turns and recipe.trace.user_turns == "own" and "synthesis" not in kinds:
        raise ConfigError("train.user_turns = true: no prompt source is of kind synthesis, so no user turn is the "
                          "target's own; set it to false, add such a source, or set trace.user_turns to all")


class Answering:
    """Rows of all prompts. `ask(round, requests)` gets the target's answers; `counts` says what was left out and why.

    Validation rows are always the target's greedy answers, with the overrun that a replay needs: validation measures
    what serving does. Training rows are the target's answers (generation.answers: regenerate) or the given ones (keep).
    """

    def __init__(self, recipe: Recipe, target: Target, limit: int, ask: Ask) -> None:
        self.recipe, self.target, self.limit, self.ask = recipe, target, limit, ask
        self.counts: Counter = Counter()

    def rows(self, prompts: list[Prompt]) -> list[Conversation]:
        """Rows in the order of rounds. Raises RunError where no token of any row is supervised (case 06)."""
        held = hold_out([p.id for p in prompts], self.recipe.prompts.validation, self.recipe.prompts.seed)
        keep = self.recipe.generation.answers == "keep"
        rows = [row for p in prompts if keep and p.id not in held for row in self.kept(p)]
        rows += self.regenerated([p for p in prompts if p.id in held or not keep], held)
        if not any(turn > 0 for c in rows for turn in c.turns):
            raise RunError("no supervised token in any row: the loss mask is empty (case 06); left out: "
                           f"{dict(self.counts)}")
        return rows

    def kept(self, prompt: Prompt) -> list[Conversation]:
        """Rows of a prompt whose answers are given: cut at the length limit, marked as off-policy."""
        if prompt.ids is not None:
            self.counts["token ids without a given answer"] += 1
            return []
        try:
            rendered = render(self.target.tokenizer, prompt.messages + prompt.given, self.target.end_ids, prompt.tools)
        except Unrenderable as error:
            self.counts[str(error)] += 1
            return []
        rows = []
        for number, whole in enumerate(rendered):
            row = truncate(whole, self.limit)
            if any(row.turns):
                finish = "stop" if len(row.ids) == len(whole.ids) else "length"
                name = prompt.id if number == 0 else f"{prompt.id}/{number}"
                rows.append(Conversation(name, "train", row.ids, row.turns, [], finish, off_policy=True))
            else:
                self.counts["given answer beyond the length limit"] += 1
        return rows

    def regenerated(self, prompts: list[Prompt], held: set[str]) -> list[Conversation]:
        """The target's answer at every point where it has to speak.

        Turns are answered in rounds, each on the history that the target itself gave, so a conversation of n answers
        is n rows whose ids are exactly those of serving. It ends early where an answer was cut by length.
        """
        rows: list[Conversation] = []
        live = []
        for p in prompts:
            turns, given = answer_points(p.messages)
            self.counts["given turns kept as context"] += given
            live.append((p, turns, []))
        number = 0
        while live:
            requests, asked = self.requests(number, live, held)
            live = []
            for answer in self.ask(number, requests):
                p, turns, history, mask = asked[answer.id]
                split = "validation" if p.id in held else "train"
                rows.append(Conversation(answer.id, split, answer.prompt + answer.tokens,
                                         mask + [1] * len(answer.tokens), answer.overrun, answer.finish))
                if number + 1 < len(turns) and answer.finish == "stop":
                    reply = reply_message(self.target.tokenizer, answer.tokens[:-1])
                    live.append((p, turns, [*history, reply]))
                elif number + 1 < len(turns):
                    self.counts["turns behind an answer cut by length"] += len(turns) - number - 1
            number += 1
        self.counts = +self.counts
        return rows

    def requests(self, number: int, live: list[tuple[Prompt, list, list[Message]]],
                 held: set[str]) -> tuple[list[Request], dict[str, tuple]]:
        """Requests of one round and, by their id, what they continue. Counts conversations that cannot go on."""
        section = self.recipe.generation
        sampling = Sampling(section.temperature, section.top_k, section.top_p)
        overrun = self.recipe.train.validation_draft_length
        requests, asked = [], {}
        for p, turns, history in live:
            history = history + turns[number]
            try:
                ids = p.ids or prompt_ids(self.target.tokenizer, history, p.tools)
                mask = prompt_turns(self.target, p, history, ids, self.recipe.trace.user_turns)
            except Unrenderable as error:
                self.counts[str(error)] += len(turns) - number
                continue
            if len(ids) + section.max_tokens > self.limit:
                self.counts["turns beyond the length limit"] += len(turns) - number
                continue
            name, greedy = p.id if number == 0 else f"{p.id}/{number}", p.id in held
            if greedy:  # validation rows carry no loss
                mask = [0] * len(ids)
            requests.append(Request(name, ids, Sampling() if greedy else sampling, overrun if greedy else 0, mask))
            asked[name] = p, turns, history, mask
        return requests, asked


def prompt_turns(target: Target, prompt: Prompt, history: list[Message], ids: list[int],
                 wanted: Literal["own", "all"]) -> list[int]:
    """Turn of each token of a training prompt `ids`, which `history` renders to: 0, and -1 for a user turn that a
    drafter may learn from too (train.user_turns), its end token included.

    own: of a prompt that the target wrote itself, a given opening (`starts`) included; all: the last one of any prompt
    of messages, since each round of a conversation brings one more.
    """
    turns = [0] * len(ids)
    if prompt.own:
        start = len(user_header_ids(target.tokenizer))
        stop = next((i for i in range(start, len(ids)) if ids[i] in target.end_ids), start - 1) + 1
    elif wanted == "all" and prompt.ids is None:
        start, stop = user_span(target.tokenizer, history, prompt.tools)
        stop += stop > start and stop < len(ids) and ids[stop] in target.end_ids
    else:
        return turns
    turns[start:stop] = [-1] * (stop - start)
    return turns
