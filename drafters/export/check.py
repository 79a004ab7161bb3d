"""Refuses a native EAGLE-3 folder that an engine would reject, or load with silently wrong results.

Source: formats.md section 1 (keys, names, shapes) and section 8 (load failures); cases 04, 13, 18, 47, 56.
H draft hidden size, Ht target hidden size, V target vocabulary, D draft vocabulary, I intermediate size,
Q = heads * head_dim, KV = key/value heads * head_dim, n taps.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.export.native import DTYPES, VARIANTS, canonical_rope, engine_layer_ids, legacy_rope
from drafters.layers import MOST_LAYERS
from recipes.errors import ConfigError, RunError

# formats.md section 1. Products are spelled as in `sizes`.
TENSORS = {
    "fc.weight": ("H", "n*Ht"),
    "midlayer.self_attn.q_proj.weight": ("Q", "2H"),
    "midlayer.self_attn.k_proj.weight": ("KV", "2H"),
    "midlayer.self_attn.v_proj.weight": ("KV", "2H"),
    "midlayer.self_attn.o_proj.weight": ("H", "Q"),
    "midlayer.mlp.gate_proj.weight": ("I", "H"),
    "midlayer.mlp.up_proj.weight": ("I", "H"),
    "midlayer.mlp.down_proj.weight": ("H", "I"),
    "midlayer.hidden_norm.weight": ("H",),
    "midlayer.input_layernorm.weight": ("H",),
    "midlayer.post_attention_layernorm.weight": ("H",),
    "norm.weight": ("H",),
    "lm_head.weight": ("D", "H"),
    "d2t": ("D",),
    "t2d": ("V",),
}
INTEGER_TENSORS = {"d2t": torch.int64, "t2d": torch.bool}
# Names seen in the wild that are wrong here, and what goes wrong with each.
FORBIDDEN = (
    ("layers.0.", "SGLang skips this name and serves a random layer; the native name begins with midlayer."),
    ("layers.", "num_hidden_layers says that there is no such layer, or no layer has such a tensor"),
    ("model.", "the native names have no model. prefix"),
    ("input_norm.", "belongs to norm_before_fc, which only the speculators layout carries"),
    ("mask_hidden", "belongs to P-EAGLE, not to EAGLE-3"),
)
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
UNSUPPORTED = ("norm_before_fc", "quantization_config")
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def check_native(folder: Path) -> None:
    """Passes for a folder that vLLM, SGLang and TensorRT-LLM load with the meaning it was trained with; vLLM alone
    where it has more than one layer, or a flag of VARIANTS.

    Raises RunError that names every violation: config keys, tensor names, shapes, precisions, values.
    """
    found = list(violations(folder))
    if found:
        listed = "\n".join(f"  - {each}" for each in found)
        raise RunError(f"{folder}: not a servable native EAGLE-3 export; mend and export again:\n{listed}")


def violations(folder: Path) -> Iterator[str]:
    """Every violation of the folder, as one sentence each."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"config.json: cannot be read: {error}"
        return
    if not isinstance(config, dict):
        yield f"config.json: must be a mapping, not {type(config).__name__}"
        return
    yield from config_violations(config)
    for stray in sorted(folder.iterdir()):
        if stray.name != "model.safetensors" and (stray.suffix in (".safetensors", ".bin", ".pt", ".pth")
                                                  or stray.name.endswith(".index.json")):
            yield f"{stray.name}: an engine may load it beside model.safetensors; remove it"
    yield from tensor_violations(folder / "model.safetensors", config)


def config_violations(config: dict[str, Any]) -> Iterator[str]:
    """Violations that config.json shows by itself."""
    for key, (value, why) in FIXED.items():
        if key not in config or config[key] != value or type(config[key]) is not type(value):
            yield f"config.json: {key} = {config.get(key, 'missing')!r}, must be {value!r}: {why}"
    for key in SIZES:
        if not is_size(config.get(key)):
            yield f"config.json: {key} = {config.get(key, 'missing')!r}, must be a whole number above 0"
    layers = config.get("num_hidden_layers", "missing")
    if not is_size(layers) or layers > MOST_LAYERS:
        yield f"config.json: num_hidden_layers = {layers!r}, must be 1, or up to {MOST_LAYERS} for vLLM alone"
    if "target_hidden_size" in config and not is_size(config["target_hidden_size"]):
        yield (f"config.json: target_hidden_size = {config['target_hidden_size']!r}: engines multiply it by "
               f"the number of taps; write a whole number or leave it out")
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1:
        yield f"config.json: rms_norm_eps = {eps!r}, must be a number between 0 and 1"
    dtype = config.get("torch_dtype", "missing")
    if str(dtype) not in DTYPES:
        yield f"config.json: torch_dtype = {dtype!r}, must be one of {', '.join(DTYPES)}"
    for key in VARIANTS:
        if not isinstance(config.get(key, False), bool):
            yield f"config.json: {key} = {config[key]!r}, must be true or false"
    for key in UNSUPPORTED:
        if config.get(key):
            yield f"config.json: {key} = {config[key]!r}: has no tensors in this layout; remove it"
    yield from head_violations(config)
    yield from layer_violations(config)
    yield from rope_violations(config)


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
    depth = config.get("drafthouse", {}).get("target_layers")
    if depth is not None and entering[-1] > depth:
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
    if "rope_parameters" in config:
        top = {k: config[k] for k in ("rope_theta", "rope_scaling", "partial_rotary_factor") if k in config}
        try:
            nested = legacy_rope(canonical_rope({"rope_parameters": config["rope_parameters"]}))
        except ConfigError as error:
            yield f"config.json: {error}"
            return
        if nested != top:
            yield f"config.json: rope_parameters = {config['rope_parameters']} says other than {top}"


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def sizes(config: dict[str, Any]) -> dict[str, int]:
    """The sizes that `TENSORS` names, as far as the config states them."""
    get = {key: value for key, value in config.items() if is_size(value)}.get
    H, hd = get("hidden_size"), get("head_dim")
    Ht = get("target_hidden_size", H)
    product = {
        "H": (H,), "2H": (2, H), "Ht": (Ht,), "n*Ht": (get("num_aux_hidden_states"), Ht),
        "Q": (get("num_attention_heads"), hd), "KV": (get("num_key_value_heads"), hd),
        "I": (get("intermediate_size"),), "V": (get("vocab_size"),), "D": (get("draft_vocab_size"),),
    }
    return {name: factors[0] * (factors[1] if len(factors) > 1 else 1)
            for name, factors in product.items() if None not in factors}


def further_layer(i: int) -> dict[str, tuple[str, ...]]:
    """Tensors of layer i > 0 as vLLM names them: the first one's, but its attention reads the state alone."""
    return {f"layers.{i}." + name.removeprefix("midlayer."): tuple("H" if s == "2H" else s for s in symbols)
            for name, symbols in TENSORS.items() if name.startswith("midlayer.") and "hidden_norm" not in name}


def expected_tensors(config: dict[str, Any]) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Every allowed name with its symbolic shape, and the names that may be left out."""
    names, layers = dict(TENSORS), config.get("num_hidden_layers")
    for i in range(1, min(layers, MOST_LAYERS) if is_size(layers) else 1):
        names |= further_layer(i)
    if config.get("fc_norm") is True and is_size(config.get("num_aux_hidden_states")):
        names |= {f"fc_norm.{i}.weight": ("Ht",) for i in range(config["num_aux_hidden_states"])}
    names["embed_tokens.weight"] = ("V", "H")
    # The target's own embedding fits only a drafter of the target's width.
    shared = config.get("target_hidden_size", config.get("hidden_size")) == config.get("hidden_size")
    return names, {"embed_tokens.weight"} if shared else set()


def tensor_violations(path: Path, config: dict[str, Any]) -> Iterator[str]:
    """Violations of model.safetensors against the config. Holds one tensor at a time besides the maps."""
    names, optional = expected_tensors(config)
    size, maps = sizes(config), {}
    try:
        with safe_open(path, framework="pt") as f:
            present = set(f.keys())
            for name in sorted(present):
                tensor = f.get_tensor(name)
                if name in INTEGER_TENSORS:
                    maps[name] = tensor
                if name in names:
                    yield from content_violations(name, tensor, names[name], size, config)
                else:
                    known = (why for start, why in FORBIDDEN if name.startswith(start))
                    yield f"{name}: unknown tensor: {next(known, 'vLLM refuses it, SGLang skips it')}"
    except (OSError, SafetensorError) as error:
        yield f"{path.name}: cannot be read: {error}"
        return
    for name in sorted(set(names) - present - optional):
        why = "; the drafter's width is not the target's" if name == "embed_tokens.weight" else ""
        yield f"{name}: missing{why}; an engine would serve it random or as zeros"
    if maps.keys() == INTEGER_TENSORS.keys():
        yield from map_violations(maps["d2t"], maps["t2d"], config)


def content_violations(name: str, tensor: Tensor, symbols: tuple[str, ...], size: dict[str, int],
                       config: dict[str, Any]) -> Iterator[str]:
    """Shape, precision and values of one expected tensor (case 18: a gathered tensor is never empty)."""
    if tensor.numel() == 0:
        yield f"{name}: has no elements, shape {list(tensor.shape)}; it was saved before it was gathered"
        return
    wanted = [size.get(s) for s in symbols]
    if None not in wanted and list(tensor.shape) != wanted:
        yield f"{name}: shape {list(tensor.shape)}, the config implies [{', '.join(symbols)}] = {wanted}"
    dtype = INTEGER_TENSORS.get(name, DTYPES.get(str(config.get("torch_dtype"))))
    if dtype is not None and tensor.dtype != dtype:
        reason = "" if name in INTEGER_TENSORS else " (torch_dtype)"
        yield f"{name}: is {tensor.dtype}, must be {dtype}{reason}"
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        yield f"{name}: holds NaN or infinite values"


def map_violations(d2t: Tensor, t2d: Tensor, config: dict[str, Any]) -> Iterator[str]:
    """d2t [D] must hold OFFSETS, target id = i + d2t[i], in agreement with t2d [V] (case 56)."""
    V, D = config.get("vocab_size"), config.get("draft_vocab_size")
    if (d2t.dtype, t2d.dtype, d2t.dim(), t2d.dim()) != (torch.int64, torch.bool, 1, 1) or not len(d2t):
        return  # named by content_violations
    if is_size(V) and len(t2d) != V:
        hint = "; vocab_size is set to the DRAFT vocabulary" if V == D else ""
        yield f"t2d: covers {len(t2d)} target ids, vocab_size = {V}{hint}"
    marked = t2d.nonzero()[:, 0]
    if len(marked) != len(d2t):
        yield f"t2d: marks {len(marked)} target ids, the draft vocabulary has {len(d2t)}"
    target = torch.arange(len(d2t)) + d2t
    absolute = "; d2t holds ABSOLUTE ids, subtract each one's index" if torch.equal(d2t, marked) else ""
    outside = (target < 0) | (target >= len(t2d))
    if outside.any():
        i = int(outside.nonzero()[0])
        yield f"d2t: index {i} decodes to target id {int(target[i])}, outside 0..{len(t2d) - 1}{absolute}"
    repeated = len(target) - len(target.unique())
    if repeated:
        yield f"d2t: {repeated} draft ids decode to a target id already taken{absolute}"
    elif (target[1:] <= target[:-1]).any():
        yield f"d2t: decoded target ids are not strictly ascending{absolute}"
    if not outside.any() and not torch.equal(target.sort().values, marked):
        yield f"d2t: decodes to other target ids than t2d marks{absolute}"
