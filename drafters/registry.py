"""Every drafter this version knows. A new one is a file and a line here."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from recipes.errors import ConfigError
from recipes.loader import parse_into


@dataclass(frozen=True)
class Entry:
    """A drafter's module, which has `Options` (the dataclass of `drafter.options`), `build` (a fresh drafter) and
    `load` (a drafter from a checkpoint's parts), and the script that trains it. Without a script there is nothing to
    train: `build` gives the drafter itself, and there are no checkpoints.

    The module is imported where it is used: a table of all drafters must not load torch.
    """

    module: str
    script: str = ""

    @property
    def trained(self) -> bool:
        return bool(self.script)

    @property
    def code(self) -> ModuleType:
        return import_module(self.module)


REGISTRY: dict[str, Entry] = {
    "eagle3": Entry("drafters.eagle3_build", "train/eagle3.py"),
    "parallel": Entry("drafters.parallel", "train/parallel.py"),
    "lookup": Entry("drafters.lookup"),
    "layer_cut": Entry("drafters.layer_cut"),
}


def entry(kind: str) -> Entry:
    """The registered drafter. ConfigError names the known ones."""
    if kind not in REGISTRY:
        raise ConfigError(f"drafter.kind = {kind!r}: unknown; known kinds: {', '.join(REGISTRY)}")
    return REGISTRY[kind]


def options_of(kind: str, values: dict[str, Any]) -> Any:
    """`drafter.options` as the drafter's own dataclass, strictly."""
    return parse_into(entry(kind).code.Options, values, f"drafter.options ({kind})")


def require_training(kind: str) -> None:
    """ConfigError for a drafter that is used as it is."""
    if not entry(kind).trained:
        raise ConfigError(f"drafter.kind = {kind}: there is nothing to train or export; run make eval")
