"""From questions to the rows that are decoded: rendered prompts, and behind each answer the question's next turn."""

from collections import Counter
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from data.chat import Message, prompt_ids, reply_message, said_message
from data.evalsets import Question, Questions
from data.literal import Unrenderable
from drafters.target import Target
from eval.decode import Output
from eval.stops import Stops
from recipes.errors import ConfigError

PROBES = ("a", "zebra 7")  # two user texts; what follows both is the template's


@dataclass
class Row:
    """One answer that is asked for. `ids`: exactly what is sent to the model."""

    set: str
    question: Question
    round: int
    ids: list[int]
    history: list[Message] = field(default_factory=list)
    templated: bool = True  # False: token ids that do not end as the chat template does before an answer

    @property
    def key(self) -> tuple[str, str]:
        """Names the conversation; its answers depend on each other."""
        return self.set, self.question.id

    @property
    def name(self) -> str:
        """No other row's."""
        return str((*self.key, self.round))


class Asking:
    """Renders the rounds of all sets. `dropped`: of each set, questions and later turns left out, by reason.

    `strict`: a question that the target cannot take is an error, not a count. `room`: longest prompt in tokens.
    """

    def __init__(self, target: Target, sets: list[Questions], room: int, strict: bool) -> None:
        self.target, self.sets, self.room, self.strict = target, sets, room, strict
        self.dropped = {one.name: Counter(one.dropped) for one in sets}
        self.cut: Counter = Counter()  # sets' later turns that follow an answer cut by the length limit
        a, b = (prompt_ids(target.tokenizer, [{"role": "user", "content": text}])[::-1] for text in PROBES)
        same = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
        self.ending = a[:same][::-1]  # what the template puts between a user's text and the answer

    def first(self) -> list[Row]:
        """The first round of every set. Raises ConfigError for a set of which nothing is left."""
        rows = []
        for one in self.sets:
            found = [self.row(one.name, question, 0, []) for question in one.questions]
            if not any(found):
                raise ConfigError(f"evaluation set {one.name}: no question is left ({dict(self.dropped[one.name])} "
                                  "dropped)")
            rows += [row for row in found if row]
        return rows

    def following(self, rows: list[Row], outputs: list[Output]) -> list[Row]:
        """The next round of those questions that have one, behind the target's own answers."""
        found = []
        for row, output in zip(rows, outputs):
            if row.round + 1 < len(row.question.rounds):
                finished = output.finish == "stop"
                self.cut[row.set] += not finished
                reply = reply_to(self.target.tokenizer, output)
                found.append(self.row(row.set, row.question, row.round + 1, [*row.history, reply]))
        return [row for row in found if row]

    def row(self, name: str, question: Question, number: int, history: list[Message]) -> Row | None:
        """One rendered row; None, and counted, where the target cannot take it."""
        history = history + question.rounds[number]
        try:
            ids = question.ids or prompt_ids(self.target.tokenizer, history, question.tools)
        except Unrenderable as error:
            return self.drop(name, question, str(error))
        if min(ids) < 0 or max(ids) >= self.target.vocab_size:
            return self.drop(name, question, "ids outside the vocabulary")
        if len(ids) > self.room:
            return self.drop(name, question, "prompt beyond the context",
                             f"{len(ids)} tokens, the context leaves {self.room}")
        return Row(name, question, number, ids, history,
                   question.ids is None or ids[-len(self.ending):] == self.ending)

    def drop(self, name: str, question: Question, reason: str, detail: str = "") -> None:
        if self.strict:
            raise ConfigError(f"evaluation prompt {question.id}: {detail or reason}")
        self.dropped[name][reason] += 1


def reply_to(tokenizer: PreTrainedTokenizerBase, output: Output) -> Message:
    """An answer as a client sends it back: without its end token, or from its stop string on."""
    if output.stopped_by:
        return said_message(tokenizer, Stops(tokenizer, [output.stopped_by]).cut(output.tokens))
    return reply_message(tokenizer, output.tokens[:-1] if output.finish == "stop" else output.tokens)
