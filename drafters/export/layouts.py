"""Every layout that an export can have: its mappings, their inverse, and what is checked before it ships."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.export import check, check_medusa, check_speculators, medusa, small_lm
from drafters.export.foreign import Imported, from_native
from drafters.export.kinds import KINDS, VARIANTS, kind_of, mask_token
from drafters.export.native import check_meta, native_config, native_tensors
from drafters.export.speculators import from_speculators, speculators_config, speculators_tensors


@dataclass(frozen=True)
class Served:
    """What an export states or carries besides the checkpoint."""

    layers: list[int]  # that the traces hold, entering
    fingerprint: dict[str, Any]  # of the target to be served
    embedding: Tensor | None = None  # [V, H], the target's
    architectures: list[str] = field(default_factory=list)  # of the target's config.json
    drafted: int = 3  # tokens a cycle that engines draft unless told otherwise
    head: Tensor | None = None  # [V, H], the target's


Meta, Tensors = dict[str, Any], dict[str, Tensor]


Pair = tuple[str, Any, Any]
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
         "draft_vocab_size")  # of an EAGLE-3 drafter's shape, under the same names in config.json


def said_by_flags(origin: dict[str, Any], keys: dict[str, Any]) -> Iterator[Pair]:
    """What provenance.json and config.json say of an EAGLE-3 or parallel drafter: (what, there, here)."""
    options, shape, kind = origin["options"], origin["shape"], kind_of(keys)
    yield "kind", origin.get("kind"), kind.name
    yield "layers", origin.get("layers"), keys.get("eagle_aux_hidden_state_layer_ids")
    for name in SIZES:
        yield f"shape.{name}", shape.get(name), keys.get(name)
    yield "options.num_layers", options.get("num_layers", 1), keys.get("num_hidden_layers")
    for flag, (option, on, _) in VARIANTS.items():
        yield f"options.{option}", options.get(option) == on, bool(keys.get(flag))
    if kind.own_row:
        yield f"options.{kind.own_row}", options.get(kind.own_row), mask_token(keys)


def said_by_options(origin: dict[str, Any], keys: dict[str, Any]) -> Iterator[Pair]:
    """The same of Medusa heads, which tap nothing and whose `flat` keys are sizes and options."""
    yield "layers", origin.get("layers"), []
    for name in medusa.SIZES:
        yield f"shape.{name}", origin["shape"].get(name), keys.get(name)
    for option in medusa.STRUCTURE:
        if option in keys:
            yield f"options.{option}", origin["options"].get(option), keys[option]


@dataclass(frozen=True)
class Layout:
    """One layout. `config` and `tensors` are pure; `back` is their inverse; `flat` gives the keys of its config.json
    under their native names; `violations` yields a sentence for every fault of a folder; `said` what provenance.json
    and the flat keys must say alike; `structure` the options that must come back, besides sizes."""

    config: Callable[[Meta, str, Served], dict[str, Any]]
    tensors: Callable[[Tensors, Meta, str, Served], Tensors]
    back: Callable[[dict[str, Any], Tensors], Imported]
    flat: Callable[[dict[str, Any]], dict[str, Any]]
    violations: Callable[[Path], Iterator[str]]
    carries_embedding: bool
    kinds: tuple[str, ...] = tuple(KINDS)  # of the drafters that it is for
    weights: str = "model.safetensors"
    check_meta: Callable[[Meta], None] = check_meta  # ConfigError for a checkpoint that it has no form for
    structure: Callable[[Meta], tuple[str, ...]] = lambda meta: KINDS[meta["kind"]].structure[2:]
    said: Callable[[dict[str, Any], dict[str, Any]], Iterator[Pair]] = said_by_flags


def of_medusa(layout: str) -> dict[str, Any]:
    """What both layouts of Medusa heads have."""
    return {"flat": check_medusa.flat, "violations": partial(check_medusa.violations, layout),
            "carries_embedding": False, "kinds": ("medusa",), "weights": medusa.WEIGHTS[layout],
            "check_meta": medusa.check_meta, "structure": lambda meta: medusa.STRUCTURE, "said": said_by_options}


LAYOUTS: dict[str, Layout] = {
    "native": Layout(
        lambda meta, dtype, served: native_config(meta, dtype),
        lambda state, meta, dtype, served: native_tensors(state, meta, dtype, served.embedding),
        from_native, lambda config: config, check.violations, carries_embedding=False),
    "speculators": Layout(
        lambda meta, dtype, served: speculators_config(meta, dtype, served.architectures, served.drafted),
        lambda state, meta, dtype, served: speculators_tensors(state, meta, dtype, served.embedding),
        from_speculators, check_speculators.flat, check_speculators.violations, carries_embedding=True),
    medusa.VLLM: Layout(
        lambda meta, dtype, served: medusa.vllm_config(meta, dtype, served.drafted),
        lambda state, meta, dtype, served: medusa.vllm_tensors(state, meta, dtype, served.head),
        medusa.from_vllm, **of_medusa(medusa.VLLM)),
    medusa.ORIGINAL: Layout(
        lambda meta, dtype, served: medusa.original_config(meta, dtype, served.drafted),
        lambda state, meta, dtype, served: medusa.original_tensors(state, meta, dtype, served.head),
        medusa.from_original, **of_medusa(medusa.ORIGINAL)),
    small_lm.PLAIN: Layout(
        lambda meta, dtype, served: small_lm.plain_config(meta, dtype),
        lambda state, meta, dtype, served: small_lm.plain_tensors(state, meta, dtype, served.embedding, served.head),
        small_lm.from_plain, small_lm.flat, small_lm.violations, carries_embedding=False, kinds=("small_lm",),
        check_meta=small_lm.check_meta, structure=lambda meta: small_lm.STRUCTURE, said=small_lm.said),
}


def layouts_of(kind: str) -> list[str]:
    """The layouts of a kind of drafter."""
    return [name for name, layout in LAYOUTS.items() if kind in layout.kinds]
