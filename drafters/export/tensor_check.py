"""Tensors of an exported EAGLE-3 or parallel drafter: names, shapes, precisions, values and the vocabulary map.

Source: formats.md sections 1 and 4 (names, shapes) and section 8 (load failures); cases 13, 18, 56.
H draft hidden size, Ht target hidden size, V target vocabulary, D draft vocabulary, I intermediate size,
Q = heads * head_dim, KV = key/value heads * head_dim, n taps.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.export.kinds import MASK_HIDDEN, TABLE, kind_of
from drafters.export.native import DTYPES

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
    (MASK_HIDDEN, "belongs to a parallel drafter (P-EAGLE), whose config names the token of its masks"),
    ("d2t", "the draft vocabulary is the target's, and vLLM has no place for a map then"),
    ("t2d", "the draft vocabulary is the target's, and vLLM has no place for a map then"),
)


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def sizes(config: dict[str, Any]) -> dict[str, int]:
    """The sizes that `TENSORS` names, as far as the config states them."""
    get = {key: value for key, value in config.items() if is_size(value)}.get
    H, hd = get("hidden_size"), get("head_dim")
    Ht = get("target_hidden_size", H)
    product = {
        "1": (1,), "H": (H,), "2H": (2, H), "Ht": (Ht,), "n*Ht": (get("num_aux_hidden_states"), Ht),
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
    kind, layers = kind_of(config), config.get("num_hidden_layers")
    names = TENSORS | kind.tensors
    for i in range(1, min(layers, kind.most_layers) if is_size(layers) else 1):
        names |= further_layer(i)
    if config.get("fc_norm") is True and is_size(config.get("num_aux_hidden_states")):
        names |= {f"fc_norm.{i}.weight": ("Ht",) for i in range(config["num_aux_hidden_states"])}
    names[TABLE] = ("V", "H")
    if is_size(config.get("vocab_size")) and config.get("draft_vocab_size") == config["vocab_size"]:
        names = {name: symbols for name, symbols in names.items() if name not in INTEGER_TENSORS}
    # The target's own embedding fits only a drafter of the target's width, without a row of its own.
    shared = config.get("target_hidden_size", config.get("hidden_size")) == config.get("hidden_size")
    return names, {TABLE} if shared and not kind.own_row else set()


def tensor_violations(path: Path, config: dict[str, Any], names: dict[str, tuple[str, ...]],
                      optional: set[str]) -> Iterator[str]:
    """Violations of model.safetensors against the config, and `names` with their shapes, of which `optional` may be
    left out. Holds one tensor at a time besides the maps."""
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
        why = "; the target's does not fit" if name == TABLE else ""
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
    elif tensor.is_floating_point() and not bool(tensor.any()):
        yield f"{name}: holds nothing but zeros; it was never filled"


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
