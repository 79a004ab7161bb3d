"""Drafters that a drafter holds: how a recipe names them, and how they are opened."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters import imported
from drafters.checkpoint import read_meta
from drafters.registry import entry, options_of
from drafters.target import Target
from recipes.errors import ConfigError
from recipes.schema import Drafter as Section
from recipes.schema import opt


@dataclass
class Part:
    """One drafter inside another's options."""

    kind: str = opt("", "a registered drafter")
    options: dict[str, Any] = opt({}, "of that kind; of a trained one the checkpoint's count")
    path: str = opt("", "of a trained one: its checkpoint or run folder, or a folder or Hub id in a layout of engines")

    def __post_init__(self) -> None:
        options_of(self.kind, self.options)


def open_part(part: Part, target: Target, run: Path, field: str) -> imported.Opened:
    """The drafter of a recipe's part; the target then shows what it reads. run: where published ones are converted.

    ConfigError, which names the part's fields, where a trained one has no checkpoint, or as imported.open_drafter has
    it."""
    section, found = Section(kind=part.kind, options=part.options, path=part.path), entry(part.kind)
    if found.trained and not part.path:
        raise ConfigError(f"{field}.path: name the trained drafter of kind {part.kind}: its run folder, such as "
                          "runs/demo")
    try:
        if not found.trained:
            return imported.open_drafter(section, target, run)
        folder = imported.chosen(section, run, target)
        target.tap(found.shown(read_meta(folder)["layers"]))
        return imported.loaded(folder, target)
    except ConfigError as error:
        raise ConfigError(re.sub(r"\bdrafter\.(?=kind|path|options)", f"{field}.", str(error))) from None


def fresh_part(part: Part, target: Target, counts: dict[int, int], seed: int) -> Any:
    """An untrained drafter of a part; the target then shows what it reads, at the layers at which it is tapped."""
    found = entry(part.kind)
    if found.reads != "none":
        target.tap(found.shown(target.layers))
    return found.code.build(options_of(part.kind, part.options), target, counts, seed)
