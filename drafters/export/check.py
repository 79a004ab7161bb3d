"""Refuses a native folder of an EAGLE-3 or parallel drafter that an engine would reject, or load with silently wrong
results.

Source: formats.md sections 1 and 4 (keys, names, shapes) and section 8 (load failures); cases 04, 13, 18, 47, 56. Which
engine reads which flag is drafters/export/engines.py; the other layout is drafters/export/check_speculators.py.
V target vocabulary, D draft vocabulary.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drafters.export.kinds import MASK_KEY, MASK_KEYS, PARALLEL, VARIANTS, kind_of
from drafters.export.native import DTYPES, canonical_rope, engine_layer_ids, legacy_rope
from drafters.export.tensor_check import expected_tensors, is_size, tensor_violations
from recipes.errors import ConfigError, RunError

MOST_JSON = 4_000_000  # bytes of a config.json, whose key lists are kilobytes
# Key -> the only value that is portable, and why. All must be written, because engines' defaults differ.
FIXED = {
    "architectures": (["LlamaForCausalLMEagle3"], "engines choose the drafter class by this name"),
    "model_type": ("llama", "other types are loaded with other defaults"),
    "hidden_act": ("silu", "the engines' drafter layer is a gated SiLU"),
    "attention_bias": (False, "the layout has no bias tensors"),
    "mlp_bias": (False, "the layout has no bias tensors"),
    "tie_word_embeddings": (False, "SGLang would use the embedding as head"),
}
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "vocab_size", "draft_vocab_size", "max_position_embeddings", "num_aux_hidden_states")
UNSUPPORTED = {
    "norm_before_fc": "has no tensors in this layout", "quantization_config": "the tensors are not quantised",
    "auto_map": "names code that a reader would run",
}
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def check_native(folder: Path) -> None:
    """Passes for a folder that the engines load with the meaning it was trained with, as far as each of them can
    serve such a drafter (drafters/export/engines.py).

    Raises RunError that names every violation: config keys, tensor names, shapes, precisions, values.
    """
    found = list(violations(folder))
    if found:
        listed = "\n".join(f"  - {each}" for each in found)
        raise RunError(f"{folder}: not a servable native EAGLE-3 export; mend and export again:\n{listed}")


def violations(folder: Path) -> Iterator[str]:
    """Every violation of the folder, as one sentence each."""
    return folder_violations(folder, config_violations, lambda config: (config, *expected_tensors(config)))


def folder_violations(folder: Path, of_config: Callable[[dict[str, Any]], Iterator[str]],
                      tensors_of: Callable[[dict[str, Any]], tuple]) -> Iterator[str]:
    """Every violation of a folder of some layout. of_config: those that config.json shows by itself; tensors_of: from
    it the flat keys, the tensors that must be there and those that may be missing, as `tensor_violations` takes them.
    """
    try:
        config = read_config(folder / "config.json")
    except ConfigError as error:
        yield str(error)
        return
    yield from of_config(config)
    yield from stray_files(folder)
    yield from tensor_violations(folder / "model.safetensors", *tensors_of(config))


def read_config(path: Path) -> dict[str, Any]:
    """A JSON mapping of at most MOST_JSON bytes. ConfigError naming the file where it is none."""
    try:
        with open(path, "rb") as f:
            content = f.read(MOST_JSON + 1)
        if len(content) > MOST_JSON:
            raise ConfigError(f"{path.name}: larger than {MOST_JSON} bytes: no description of a drafter")
        config = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path.name}: must be a mapping, not {type(config).__name__}")
    return config


def stray_files(folder: Path, weights: str = "model.safetensors") -> Iterator[str]:
    """Files that an engine may load, or run, instead of or beside the checked ones."""
    for stray in sorted(folder.iterdir()):
        if stray.name != weights and (stray.suffix in (".safetensors", ".bin", ".pt", ".pth", ".py", ".pkl")
                                      or stray.name.endswith(".index.json")):
            yield f"{stray.name}: an engine may load it beside {weights}; remove it"


def config_violations(config: dict[str, Any]) -> Iterator[str]:
    """Violations that config.json shows by itself."""
    for key, (value, why) in FIXED.items():
        if key not in config or config[key] != value or type(config[key]) is not type(value):
            yield f"config.json: {key} = {config.get(key, 'missing')!r}, must be {value!r}: {why}"
    for key in SIZES:
        if not is_size(config.get(key)):
            yield f"config.json: {key} = {config.get(key, 'missing')!r}, must be a whole number above 0"
    yield from layers_violation(config)
    if not is_size(config.get("target_hidden_size")):
        yield (f"config.json: target_hidden_size = {config.get('target_hidden_size', 'missing')!r}: engines multiply "
               f"it by the number of taps; write a whole number")
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1:
        yield f"config.json: rms_norm_eps = {eps!r}, must be a number between 0 and 1"
    dtype = config.get("torch_dtype", "missing")
    if str(dtype) not in DTYPES:
        yield f"config.json: torch_dtype = {dtype!r}, must be one of {', '.join(DTYPES)}"
    for key in VARIANTS:
        if not isinstance(config.get(key, False), bool):
            yield f"config.json: {key} = {config[key]!r}, must be true or false"
    for key, why in UNSUPPORTED.items():
        if config.get(key):
            yield f"config.json: {key} = {config[key]!r}: {why}; remove it"
    yield from own_violations(config)
    yield from head_violations(config)
    yield from layer_violations(config)
    yield from rope_violations(config)
    yield from mask_violations(config)


def mask_violations(config: dict[str, Any]) -> Iterator[str]:
    """What vLLM reads of a parallel drafter (formats.md section 4); several keys can name the token there."""
    if not kind_of(config).own_row:
        return
    if config.get(PARALLEL) is not True:
        yield f"config.json: {PARALLEL} = {config.get(PARALLEL, 'missing')!r}, must be true beside the masks' token"
    token, V = config.get(MASK_KEY, "missing"), config.get("vocab_size")
    whole = isinstance(token, int) and not isinstance(token, bool)
    if not whole or token < 0 or (is_size(V) and token >= V):
        yield f"config.json: {MASK_KEY} = {token!r}: must be a token of the target; vLLM embeds the masks by it"
    for key in MASK_KEYS:
        if config.get(key) not in (None, token):
            yield f"config.json: {key} = {config[key]!r}, but {MASK_KEY} = {token!r}: vLLM takes one of them"


def layers_violation(config: dict[str, Any]) -> Iterator[str]:
    layers, most = config.get("num_hidden_layers", "missing"), kind_of(config).most_layers
    if not is_size(layers) or layers > most:
        yield f"config.json: num_hidden_layers = {layers!r}, must be 1, or up to {most} for vLLM alone"


def own_violations(config: dict[str, Any]) -> Iterator[str]:
    """The section that ties an export to its target and options: a flag that is lost changes what an engine computes
    without touching a tensor, and only this section still knows it (case 13)."""
    ours = config.get("drafthouse")
    needed = ("kind", "options", "target", "target_layers", "owned")
    if not isinstance(ours, dict) or any(key not in ours for key in needed):
        lacking = needed if not isinstance(ours, dict) else [key for key in needed if key not in ours]
        yield f"config.json: drafthouse: {', '.join(lacking)} missing; it says which target the drafter is for"
        return
    kind = kind_of(config)
    if ours["kind"] != kind.name or ours["owned"] != kind.owned:
        yield (f"config.json: drafthouse: kind = {ours['kind']!r}, owned = {ours['owned']!r}: must be {kind.name!r}, "
               f"{kind.owned}")
    if not is_size(ours["target_layers"]):
        yield f"config.json: drafthouse: target_layers = {ours['target_layers']!r}, must be a whole number above 0"
    target = ours["target"] if isinstance(ours["target"], dict) else {}
    if not target.get("model") or not target.get("fingerprint"):
        yield f"config.json: drafthouse: target = {ours['target']!r}: must hold model and fingerprint"
    options = ours["options"] if isinstance(ours["options"], dict) else {}
    for flag, (option, on, _) in VARIANTS.items():
        if bool(config.get(flag)) != (options.get(option) == on):
            yield (f"config.json: {flag} = {config.get(flag, 'missing')!r}, but the drafter was trained with "
                   f"{option} = {options.get(option)!r}")
    if kind.own_row and options.get(kind.own_row) != config.get(MASK_KEY):
        yield (f"config.json: {MASK_KEY} = {config.get(MASK_KEY, 'missing')!r}, but the drafter was trained with "
               f"{kind.own_row} = {options.get(kind.own_row)!r}")


def head_violations(config: dict[str, Any]) -> Iterator[str]:
    heads, groups, dim = (config.get(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if is_size(heads) and is_size(groups) and heads % groups:
        yield f"config.json: num_attention_heads = {heads} is no multiple of num_key_value_heads = {groups}"
    if is_size(dim) and dim % 2:
        yield f"config.json: head_dim = {dim}: rotary positions need an even number"
    V, D = config.get("vocab_size"), config.get("draft_vocab_size")
    if is_size(V) and is_size(D) and D > V:
        yield f"config.json: draft_vocab_size = {D} is above vocab_size = {V}; are they exchanged?"


def layer_violations(config: dict[str, Any]) -> Iterator[str]:
    """The tapped layers must be named, in both conventions, one apart (cases 01 and 04)."""
    entering = config.get("eagle_aux_hidden_state_layer_ids")
    try:
        output_of = engine_layer_ids(entering if isinstance(entering, list) else [])["output_of"]
    except ConfigError as error:
        yield f"config.json: eagle_aux_hidden_state_layer_ids: {error}; without it vLLM guesses them"
        return
    taps = config.get("num_aux_hidden_states")
    if taps != len(entering):
        yield f"config.json: num_aux_hidden_states = {taps!r}: {len(entering)} taps; vLLM sizes fc from it"
    wanted = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": output_of}
    if config.get("eagle_config") != wanted:
        yield (f"config.json: eagle_config = {config.get('eagle_config')!r}, must be {wanted}: its ids count "
               f"the OUTPUT of a layer, one less than the top-level ids")
    ours = config.get("drafthouse")
    depth = ours.get("target_layers") if isinstance(ours, dict) else None
    if is_size(depth) and entering[-1] > depth:
        yield f"config.json: eagle_aux_hidden_state_layer_ids = {entering}: the target has {depth} layers"


def rope_violations(config: dict[str, Any]) -> Iterator[str]:
    """Engines that read only the top-level keys must see what the others see (case 32)."""
    theta = config.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or theta <= 0:
        yield f"config.json: rope_theta = {config.get('rope_theta', 'missing')!r}, must be a number above 0"
        return
    scaling = config.get("rope_scaling", "missing")
    if scaling is not None and not isinstance(scaling, dict):
        yield f"config.json: rope_scaling = {scaling!r}, must be null or a mapping"
        return
    if scaling and ("type" in scaling or "rope_type" not in scaling):
        yield f"config.json: rope_scaling = {scaling}: must have rope_type, not the older key type"
        return
    kind = str((scaling or {}).get("rope_type", "default"))
    if kind not in ROPE_NEEDS:
        yield f"config.json: rope_scaling = {scaling}: unknown rope_type"
    lacking = [key for key in ROPE_NEEDS.get(kind, ()) if key not in scaling]
    if lacking:
        yield f"config.json: rope_scaling = {scaling}: {', '.join(lacking)} missing"
    partial, dim = config.get("partial_rotary_factor", 1.0), config.get("head_dim")
    known = isinstance(partial, (int, float)) and 0 < partial <= 1
    if not known or (is_size(dim) and int(dim * partial) % 2):
        yield f"config.json: partial_rotary_factor = {partial!r}: must leave an even part of head_dim = {dim}"
    if not isinstance(config.get("rope_parameters"), dict):
        yield f"config.json: rope_parameters = {config.get('rope_parameters', 'missing')!r}: transformers 5 reads it"
    else:
        top = {k: config[k] for k in ("rope_theta", "rope_scaling", "partial_rotary_factor") if k in config}
        try:
            whole = canonical_rope({"rope_parameters": config["rope_parameters"]})
        except ConfigError as error:
            yield f"config.json: {error}"
            return
        if legacy_rope(whole) != top or whole != config["rope_parameters"]:
            yield f"config.json: rope_parameters = {config['rope_parameters']} says other than {top}"
