"""Every layout that an export can have: its mappings, their inverse, and what is checked before it ships."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.export import check, check_speculators
from drafters.export.foreign import Imported, from_native
from drafters.export.native import native_config, native_tensors
from drafters.export.speculators import from_speculators, speculators_config, speculators_tensors


@dataclass(frozen=True)
class Served:
    """What an export states or carries besides the checkpoint."""

    layers: list[int]  # that the traces hold, entering
    fingerprint: dict[str, Any]  # of the target to be served
    embedding: Tensor | None = None  # [V, H], the target's
    architectures: list[str] = field(default_factory=list)  # of the target's config.json
    drafted: int = 3  # tokens a cycle that engines draft unless told otherwise


Meta, Tensors = dict[str, Any], dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """One layout. `config` and `tensors` are pure; `back` is their inverse; `flat` gives the keys of its config.json
    under their native names; `violations` yields a sentence for every fault of a folder."""

    config: Callable[[Meta, str, Served], dict[str, Any]]
    tensors: Callable[[Tensors, Meta, str, Served], Tensors]
    back: Callable[[dict[str, Any], Tensors], Imported]
    flat: Callable[[dict[str, Any]], dict[str, Any]]
    violations: Callable[[Path], Iterator[str]]
    carries_embedding: bool


LAYOUTS: dict[str, Layout] = {
    "native": Layout(
        lambda meta, dtype, served: native_config(meta, dtype),
        lambda state, meta, dtype, served: native_tensors(state, meta, dtype, served.embedding),
        from_native, lambda config: config, check.violations, carries_embedding=False),
    "speculators": Layout(
        lambda meta, dtype, served: speculators_config(meta, dtype, served.architectures, served.drafted),
        lambda state, meta, dtype, served: speculators_tensors(state, meta, dtype, served.embedding),
        from_speculators, check_speculators.flat, check_speculators.violations, carries_embedding=True),
}
