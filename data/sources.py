"""One source of the recipe read to its last row: prompts, formats, what was normalised, what was no conversation."""

import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

from rich import box
from rich.table import Table
from rich.text import Text

from data.formats import Parsed, Unusable, parse
from data.prompts import Prompt
from data.rows import Row, local_rows
from recipes.errors import ConfigError
from recipes.schema import PromptSource

EXAMPLE = 60  # characters of the example shown


@dataclass
class Loaded:
    """What one source holds, every row of it counted once: as a prompt in `formats`, or in `dropped` by reason."""

    number: int
    source: PromptSource
    list_name: str = "prompts.sources"  # the recipe's list whose item it is
    prompts: list[Prompt] = field(default_factory=list)
    rows: int = 0
    formats: Counter = field(default_factory=Counter)
    normalised: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> where it was met first

    @property
    def label(self) -> str:
        place = self.source.name if self.source.kind == "hub" else self.source.path
        return f"{self.list_name}[{self.number}] {self.source.kind} {place}".rstrip()


def load(number: int, source: PromptSource, files: PromptSource, max_bad_share: float) -> Loaded:
    """Reads `source`, whose rows lie in the local `files` (itself, but for a Hub data set; nothing for synthesis).

    Raises ConfigError where a file cannot be read, holds no prompts, or has too large a share of bad rows (case 64).
    """
    loaded = Loaded(number, source)
    if source.kind == "synthesis":
        return loaded
    for row in islice(local_rows(files, f"prompts.sources[{number}]"), source.rows or None):
        loaded.rows += 1
        take(row, loaded)
    if not loaded.rows:
        raise ConfigError(f"{loaded.label}: holds no prompts")
    check_bad(loaded, Counter(), max_bad_share)
    return loaded


def take(row: Row, loaded: Loaded) -> Parsed | None:
    """Counts one row, as a prompt, which is returned, or by the reason why it is none."""
    source = loaded.source
    try:
        if row.fault:
            raise Unusable(row.fault)
        parsed = parse(row.value, source.text_field, source.id_field, source.kind == "log")
    except Unusable as error:
        loaded.dropped[str(error)] += 1
        loaded.first.setdefault(str(error), row.where)
        return None
    loaded.formats[parsed.format] += 1
    loaded.normalised.update(parsed.notes)
    loaded.prompts.append(parsed.prompt)
    return parsed


def check_bad(loaded: Loaded, refused: Counter, max_bad_share: float) -> None:
    """Raises ConfigError where more than the share of rows is no conversation; `refused`: rows found so later."""
    bad = loaded.dropped + refused
    if bad.total() > max_bad_share * loaded.rows:
        reasons = [f"{reason} {n}" + (f" (first: {loaded.first[reason]})" if reason in loaded.first else "")
                   for reason, n in bad.most_common()]
        named = "" if loaded.source.kind == "log" else "name its text_field, "
        raise ConfigError(f"{loaded.label}: {bad.total()} of {loaded.rows} rows are unusable, more than "
                          f"prompts.max_bad_share = {max_bad_share}: {', '.join(reasons)}; correct the file, "
                          f"{named}or raise that share")


def shortened(text: str) -> str:
    """One line of a text, fit to be shown: control characters are spaces."""
    line = "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text[: 4 * EXAMPLE])
    line = " ".join(line.split())
    return line if len(line) <= EXAMPLE else line[: EXAMPLE - 3] + "..."


def example(loaded: Loaded) -> str:
    first = loaded.prompts[0]
    if first.ids is not None:
        return shortened(f"ids {first.ids}")
    return shortened(next(m["content"] for m in first.messages if m["role"] == "user"))


def sources_table(loaded: list[Loaded], counts: list[int | None], kept: bool) -> Table:
    """What was found, for a look before the run: a few lines a source, empty ones left out. `kept`: given
    answers are learnt from."""
    table = Table("prompt sources", "", show_header=True, box=box.SIMPLE, pad_edge=False)
    table.columns[1].overflow = "fold"
    for one, count in zip(loaded, counts):
        lines = {"source": one.label, "wanted": "all" if count is None else str(count)}
        if one.source.kind == "synthesis":
            lines["formats"] = "written by the target"
        else:
            answers = sum(bool(p.given) for p in one.prompts)
            fate = "kept for training (off-policy)" if kept else "which the target replaces by its own"
            lines |= {"rows": str(one.rows), "formats": listed(one.formats),
                      "with answers": f"{answers}, {fate}" if answers else "",
                      "normalised": listed(one.normalised), "dropped": listed(one.dropped),
                      "first prompt": example(one) if one.prompts else ""}
        for name, text in lines.items():
            if text:
                table.add_row(Text(name), Text(text))
        table.add_section()
    return table


def listed(counts: Counter) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.most_common())
