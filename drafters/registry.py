"""Every drafter this version knows. A new one is a file and a line here."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from recipes.errors import ConfigError
from recipes.loader import parse_into

FINAL = "final"  # what a target shows where it is the state after its final norm
PLANS = ("chains", "confidence", "static trees", "dynamic trees")  # what a plan may ask for


@dataclass(frozen=True)
class Entry:
    """A drafter's module, which has `Options` (the dataclass of `drafter.options`), `build` (a fresh drafter) and
    `load` (a drafter from a checkpoint's parts), and the script that trains it. Without a script there is nothing to
    train: `build` gives the drafter itself, there are no checkpoints, and `speculation` says how vLLM drafts the same
    where it is not `unserved`.

    reads: the states of the target that it drafts from: those that enter the tapped layers, the final one, or none.
    drafts: the PLANS that it can follow.
    holds: of a drafter that is made of others, which it opens itself (`opened`) with what they read of the target: the
    option that names the one which follows a plan.
    unserved: why vLLM, as `make serve-check` runs it, cannot draft the same.

    The module is imported where it is used: a table of all drafters must not load torch.
    """

    module: str
    script: str = ""
    reads: Literal["taps", "final", "none"] = "taps"
    drafts: tuple[str, ...] = PLANS
    holds: str = ""
    unserved: str = ""

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
ONE_METHOD = "vLLM drafts by one method at a time; serve the drafter that it holds by a recipe of its own"

REGISTRY: dict[str, Entry] = {
    "eagle3": Entry("drafters.eagle3_build", "train/eagle3.py"),
    "parallel": Entry("drafters.parallel", "train/parallel.py"),
    "medusa": Entry("drafters.medusa", "train/medusa.py", reads="final"),
    "small_lm": Entry("drafters.small_lm_build", "train/small_lm.py", reads="none"),
    "lookup": Entry("drafters.lookup", reads="none", drafts=("chains",)),
    "suffix": Entry("drafters.suffix", reads="none", drafts=("chains", "dynamic trees"),
                    unserved="vLLM's suffix decoding needs the package arctic-inference, which is built from source; "
                             "`make export` writes the config for a vLLM that has it"),
    "layer_cut": Entry("drafters.layer_cut", reads="none"),
    "hybrid": Entry("drafters.hybrid", reads="none", holds="then", unserved=ONE_METHOD),
    "fallback": Entry("drafters.fallback", reads="none", holds="drafter", unserved=ONE_METHOD),
}


def entry(kind: str) -> Entry:
    """The registered drafter. ConfigError names the known ones."""
    if kind not in REGISTRY:
        raise ConfigError(f"drafter.kind = {kind!r}: unknown; known kinds: {', '.join(REGISTRY)}")
    return REGISTRY[kind]


def options_of(kind: str, values: dict[str, Any]) -> Any:
    """`drafter.options` as the drafter's own dataclass, strictly."""
    return parse_into(entry(kind).code.Options, values, f"drafter.options ({kind})")


def plans_of(kind: str, options: dict[str, Any]) -> tuple[str, ...]:
    """The PLANS that a drafter of this kind can follow with these `drafter.options`."""
    held = entry(kind).holds
    if not held:
        return entry(kind).drafts
    part = getattr(options_of(kind, options), held)
    return plans_of(part.kind, part.options)


def require_training(kind: str) -> None:
    """ConfigError for a drafter that is used as it is."""
    if entry(kind).holds:
        raise ConfigError(f"drafter.kind = {kind}: the drafters that it holds are trained and exported by recipes of "
                          "their own, and named here by their path; run make eval")
    if not entry(kind).trained:
        raise ConfigError(f"drafter.kind = {kind}: there is nothing to train or export; run make eval")


def require_serving(kind: str) -> None:
    """ConfigError, with the reason, for a drafter that no vLLM of `make serve-check` drafts by."""
    if entry(kind).unserved:
        raise ConfigError(f"drafter.kind = {kind}: {entry(kind).unserved}")


def check_taps(kind: str, layers: list[int]) -> None:
    """ConfigError where a drafter that reads tapped layers is given fewer than it fuses: low, middle and high (EAGLE-3,
    section 3.1). layers: `trace.layers`; empty is the default three."""
    if entry(kind).reads == "taps" and 0 < len(layers) < TAPS:
        raise ConfigError(f"trace.layers = {layers}: a drafter of kind {kind} reads three layers of its target or "
                          "more; empty is [2, L//2, L-3]")
