"""Refuses a speculators folder that vLLM or the `speculators` package would reject, or load with wrong results.

Source: formats.md sections 2 and 4; vLLM `vllm/transformers_utils/configs/speculators/` (0.32) and the package's
`Eagle3SpeculatorConfig` (0.9.0). Cases 04, 13, 32, 47, 56.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.export.check import (
    FIXED,
    SIZES,
    UNSUPPORTED,
    folder_violations,
    head_violations,
    layers_violation,
    mask_violations,
    rope_violations,
)
from drafters.export.kinds import KINDS, MASK_KEY, MASK_KEYS, PARALLEL, VARIANTS, Kind
from drafters.export.native import DTYPES, engine_layer_ids
from drafters.export.speculators import IDS, INSIDE, renamed
from drafters.export.tensor_check import expected_tensors, is_size
from recipes.errors import ConfigError

# Key -> the only value, and why. All must be written: vLLM and the package fill in different ones.
OUTER = {
    "tie_word_embeddings": (False, "the reduced head is no embedding"),
    "norm_before_fc": (False, "the drafter has no norm over all taps"),
}
INNER = tuple(key for key in FIXED if key != "architectures")


def kind_named(config: dict[str, Any]) -> Kind:
    """The kind that the package's own keys name, any of them; EAGLE-3 where none does."""
    parallel = KINDS["parallel"]
    named = (config.get("speculators_model_type") == parallel.speculator, config.get(MASK_KEYS[0]) is not None,
             config.get("architectures") == [parallel.architecture])
    return parallel if any(named) else KINDS["eagle3"]


def outer_of(kind: Kind) -> dict[str, tuple[Any, str]]:
    """OUTER with what names this kind."""
    return OUTER | {
        "architectures": ([kind.architecture], "the package chooses its class by this name"),
        "speculators_model_type": (kind.speculator, "vLLM chooses the method by it"),
        "embed_requires_grad": (bool(kind.own_row), "it says whether a part of the embedding was trained"),
    }


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of both levels under their native names, as far as they are of the form that is expected."""
    inner = config.get(INSIDE)
    inner = dict(inner) if isinstance(inner, dict) else {}
    ids = config.get(IDS)
    outer = {key: config[key] for key in ("draft_vocab_size", "torch_dtype", *VARIANTS) if key in config}
    if kind_named(config).own_row:
        outer |= {PARALLEL: True, MASK_KEY: config.get(MASK_KEYS[0])}
    wider = config.get("target_hidden_size")
    return inner | outer | {"target_hidden_size": inner.get("hidden_size") if wider is None else wider, IDS: ids,
                            "num_aux_hidden_states": len(ids) if isinstance(ids, list) else None}


def violations(folder: Path) -> Iterator[str]:
    """Every violation of the folder, as one sentence each."""
    return folder_violations(folder, config_violations, tensors_of)


def tensors_of(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Flat keys, names and shapes of the tensors that must be there; none may be missing."""
    keys = flat(config)
    names, _ = expected_tensors(keys)
    return keys, {renamed(name): shape for name, shape in names.items()}, set()


def config_violations(config: dict[str, Any]) -> Iterator[str]:
    """Violations that config.json shows by itself."""
    for key, (value, why) in outer_of(kind_named(config)).items():
        if key not in config or config[key] != value or type(config[key]) is not type(value):
            yield f"config.json: {key} = {config.get(key, 'missing')!r}, must be {value!r}: {why}"
    if not isinstance(config.get("speculators_version"), str) or not config["speculators_version"]:
        yield f"config.json: speculators_version = {config.get('speculators_version', 'missing')!r}: state the version"
    for flag in VARIANTS:
        if not isinstance(config.get(flag), bool):
            yield (f"config.json: {flag} = {config.get(flag, 'missing')!r}: must be true or false, since readers' "
                   "defaults differ")
    if str(config.get("torch_dtype")) not in DTYPES:
        yield f"config.json: torch_dtype = {config.get('torch_dtype')!r}, must be one of {', '.join(DTYPES)}"
    if "target_hidden_size" not in config:
        yield "config.json: target_hidden_size: missing; write null where it is the drafter's own"
    for level, where in ((config, ""), (config.get(INSIDE) or {}, f"{INSIDE}.")):
        for key, why in UNSUPPORTED.items():
            if isinstance(level, dict) and level.get(key):
                yield f"config.json: {where}{key} = {level[key]!r}: {why}; remove it"
    try:
        engine_layer_ids(config.get(IDS) if isinstance(config.get(IDS), list) else [])
    except ConfigError as error:
        yield f"config.json: {IDS}: {error}; without it vLLM guesses them"
    yield from inner_violations(config)
    yield from mask_violations(flat(config))
    yield from proposal_violations(config.get("speculators_config"), kind_named(config).speculator)


def inner_violations(config: dict[str, Any]) -> Iterator[str]:
    """The decoder's own config, whose defaults are a 7B Llama's."""
    inner = config.get(INSIDE)
    if not isinstance(inner, dict):
        yield f"config.json: {INSIDE} = {inner!r}: must be the decoder's config"
        return
    for key in INNER:
        value, why = FIXED[key]
        if key not in inner or inner[key] != value or type(inner[key]) is not type(value):
            yield f"config.json: {INSIDE}.{key} = {inner.get(key, 'missing')!r}, must be {value!r}: {why}"
    keys = flat(config)
    for key in SIZES:
        if not is_size(keys.get(key)):
            yield f"config.json: {key} = {keys.get(key, 'missing')!r}, must be a whole number above 0"
    yield from layers_violation(keys)
    if not is_size(keys.get("target_hidden_size")):
        yield f"config.json: target_hidden_size = {config.get('target_hidden_size')!r}, must be null or a whole number"
    eps = inner.get("rms_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1:
        yield f"config.json: {INSIDE}.rms_norm_eps = {eps!r}, must be a number between 0 and 1"
    yield from head_violations(keys)
    yield from rope_violations(inner)


def proposal_violations(section: Any, algorithm: str) -> Iterator[str]:
    """What `vllm serve PATH` takes the target and the draft length from."""
    if not isinstance(section, dict):
        yield f"config.json: speculators_config = {section!r}: must name verifier and proposal"
        return
    methods, verifier = section.get("proposal_methods"), section.get("verifier")
    if section.get("algorithm") != algorithm or section.get("default_proposal_method") != "greedy":
        yield (f"config.json: speculators_config: algorithm = {section.get('algorithm')!r}, default_proposal_method = "
               f"{section.get('default_proposal_method')!r}: must be {algorithm!r} and 'greedy'")
    greedy = methods[0] if isinstance(methods, list) and len(methods) == 1 and isinstance(methods[0], dict) else {}
    wanted = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    if not is_size(greedy.get("speculative_tokens")) or {k: greedy.get(k) for k in wanted} != wanted:
        yield (f"config.json: speculators_config.proposal_methods = {methods!r}: must be one, {wanted} with "
               "speculative_tokens above 0")
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    named = isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)
    if not isinstance(verifier, dict) or not isinstance(verifier.get("name_or_path"), str) or not (
            verifier["name_or_path"] and named):
        yield f"config.json: speculators_config.verifier = {verifier!r}: must name the target and its architectures"
