"""Every drafter this version knows. A new one is a file and a line here."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from recipes.errors import ConfigError
from recipes.loader import parse_into

FINAL = "final"  # what a target shows where it is the state after its final norm


@dataclass(frozen=True)
class Entry:
    """A drafter's module, which has `Options` (the dataclass of `drafter.options`), `build` (a fresh drafter) and
    `load` (a drafter from a checkpoint's parts), and the script that trains it. Without a script there is nothing to
    train: `build` gives the drafter itself, there are no checkpoints, and `speculation` says how vLLM drafts the same.

    reads: the states of the target that it drafts from: those that enter the tapped layers, the final one, or none.

    The module is imported where it is used: a table of all drafters must not load torch.
    """

    module: str
    script: str = ""
    reads: Literal["taps", "final", "none"] = "taps"

    @property
    def trained(self) -> bool:
        return bool(self.script)

    def shown(self, layers: list[int]) -> list[int] | str | None:
        """What a target is to show this drafter, as `Target.tap` takes it; layers: those that would be tapped."""
        return {"taps": layers, "final": FINAL, "none": None}[self.reads]

    @property
    def code(self) -> ModuleType:
        return import_module(self.module)


TAPS = 3  # tapped layers, at least

REGISTRY: dict[str, Entry] = {
    "eagle3": Entry("drafters.eagle3_build", "train/eagle3.py"),
    "parallel": Entry("drafters.parallel", "train/parallel.py"),
    "medusa": Entry("drafters.medusa", "train/medusa.py", reads="final"),
    "lookup": Entry("drafters.lookup", reads="none"),
    "layer_cut": Entry("drafters.layer_cut", reads="none"),
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


def check_taps(kind: str, layers: list[int]) -> None:
    """ConfigError where a drafter that reads tapped layers is given fewer than it fuses: low, middle and high (EAGLE-3,
    section 3.1). layers: `trace.layers`; empty is the default three."""
    if entry(kind).reads == "taps" and 0 < len(layers) < TAPS:
        raise ConfigError(f"trace.layers = {layers}: a drafter of kind {kind} reads three layers of its target or "
                          "more; empty is [2, L//2, L-3]")
