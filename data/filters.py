"""Which prompts are kept: measures of a text that know no language, what the evaluation judges by, and repetition.

Every entry path passes the same Filter (case 60). A measure is a pure function of the text; its bound is a field of
`prompts.filters`.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable

from data.near import NearDuplicates
from data.prompts import Prompt, normalise
from recipes.schema import PromptFilters

OVERLAP_RUN = 8  # words; two prompts that share most of their 8-word runs are the same prompt
REPEAT_RUN = 5
NEAR_RUN = 3
LAYOUT = "\t\n\r\f"  # control characters that a text may hold


def runs(text: str, length: int) -> list[str]:
    """Every run of `length` words of the normalised text, in order; the whole text where it is shorter."""
    words = normalise(text).split()
    return [" ".join(words[i : i + length]) for i in range(max(1, len(words) - length + 1))]


def letters(text: str) -> float:
    """Share of letters and their marks, of any script, among the characters that are not spaces."""
    solid = [c for c in text if not c.isspace()]
    return sum(unicodedata.category(c)[0] in "LM" for c in solid) / max(1, len(solid))


def repeated_lines(text: str) -> float:
    """Share of the characters of non-blank lines that stand in a line which stood before."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    seen: set[str] = set()
    repeated = 0
    for line in lines:
        repeated += len(line) if line in seen else 0
        seen.add(line)
    return repeated / max(1, sum(map(len, lines)))


def repeated_ngrams(text: str) -> float:
    """Share of 5-word runs that stood before; 0 for a text of fewer than six words."""
    counts = Counter(runs(text, REPEAT_RUN))
    return 1 - len(counts) / counts.total()


def control(text: str) -> float:
    """Share of control characters other than tab, line feed, carriage return and form feed."""
    return sum(unicodedata.category(c) == "Cc" and c not in LAYOUT for c in text) / max(1, len(text))


def broken(text: str) -> float:
    """Share of replacement characters, lone surrogates and noncharacters: what remains of a failed decoding."""
    return sum(c == "\ufffd" or "\ud800" <= c <= "\udfff" or ord(c) & 0xFFFE == 0xFFFE or "\ufdd0" <= c <= "\ufdef"
               for c in text) / max(1, len(text))


# reason, measure, field of prompts.filters, whether the field is a smallest share
QUALITY: list[tuple[str, Callable[[str], float], str, bool]] = [
    ("control characters", control, "max_control", False),
    ("broken unicode", broken, "max_broken", False),
    ("few letters", letters, "min_letters", True),
    ("repeated lines", repeated_lines, "max_repeated_lines", False),
    ("repeated word runs", repeated_ngrams, "max_repeated_ngrams", False),
]


def quality(text: str, bounds: PromptFilters) -> str | None:
    """The first reason why the text is no usable prompt, or None. Bounds belong to what is kept."""
    for reason, measure, name, smallest in QUALITY:
        share, bound = measure(text), getattr(bounds, name)
        if share < bound if smallest else share > bound:
            return reason
    return None


def asked(prompt: Prompt, roles: tuple[str, ...] = ("user",)) -> str:
    """The text that others wrote: user turns, and other roles on demand, one after another."""
    return "\n".join(m["content"] for m in prompt.messages if m["role"] in roles)


class Filter:
    """Keeps a prompt once, of a fitting length and quality, and never one that the evaluation will judge by."""

    def __init__(self, held_out: list[Prompt], bounds: PromptFilters | None = None) -> None:
        self.bounds = bounds or PromptFilters()
        self.seen: set[str] = set()
        self.near = NearDuplicates(self.bounds.near_duplicate)
        self.exact = {normalise(p.messages[-1]["content"]) for p in held_out}
        self.judged = {run for p in held_out for run in runs(asked(p), OVERLAP_RUN)}

    def too_large(self, prompt: Prompt) -> bool:
        """Whether the prompt has more characters than may be tokenised."""
        return sum(len(m["content"]) for m in prompt.messages) > self.bounds.max_chars

    def reason(self, prompt: Prompt, prompt_tokens: int, shortest: int, longest: int) -> str | None:
        """Why the prompt is dropped, or None. `prompt_tokens` counts the rendered prompt."""
        if len(normalise(asked(prompt)).split()) < 2 or prompt_tokens < shortest:
            return "too short"
        if prompt_tokens > longest or self.too_large(prompt):
            return "too long"
        if self.is_judged(prompt):
            return "overlaps the evaluation prompts"
        poor = quality(asked(prompt), self.bounds)
        return poor or self.repeats(prompt)

    def is_judged(self, prompt: Prompt) -> bool:
        return normalise(prompt.messages[-1]["content"]) in self.exact or self.overlap(prompt) > 0.5

    def overlap(self, prompt: Prompt) -> float:
        """Share of the prompt's 8-word runs that the evaluation prompts contain."""
        mine = set(runs(asked(prompt), OVERLAP_RUN))
        return len(mine & self.judged) / len(mine)

    def repeats(self, prompt: Prompt) -> str | None:
        """Whether a kept prompt says the same; otherwise this one is taken as kept.

        System turns do not make two prompts alike, since a whole log may share one.
        """
        key = normalise(" ".join(m["content"] for m in prompt.messages))
        if key in self.seen:
            return "duplicate"
        if not self.near.take(runs(asked(prompt, ("user", "tool")), NEAR_RUN)):
            return "near duplicate"
        self.seen.add(key)
        return None
