"""Pure mappings between a Drafthouse checkpoint and the native EAGLE-3 layout (vLLM, SGLang, TensorRT-LLM).

Source: formats.md sections 1, 4 and 8. Tensor names are the same on both sides, so only precision changes; but a
parallel drafter's mask embedding is a row of the embedding table, which it therefore ships.
H draft hidden size, Ht target hidden size, V target vocabulary, D draft vocabulary, L target layers.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.export.kinds import KINDS, MASK_EMBEDDING, MASK_KEY, PARALLEL, TABLE, kind_of, mask_token
from recipes.errors import ConfigError

FORMAT = "drafthouse.drafter/1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Present under the same name in `shape` of drafter.json and in the exported config.json.
SHAPE_KEYS = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "draft_vocab_size", "max_position_embeddings",
)


def engine_layer_ids(layers: list[int]) -> dict[str, list[int]]:
    """The tapped layers in both conventions that engines read.

    layers: Hugging Face `hidden_states` ids, the state ENTERING layer k (L: what enters the final norm).
    Returns `entering` (vLLM, top level of config.json: the same ids) and `output_of` (SGLang, inside
    eagle_config: the layer whose OUTPUT that is, one less; -1 is the embedding's output).
    Raises ConfigError where the ids are not distinct, ascending, whole and at least 0.
    """
    whole = bool(layers) and all(isinstance(k, int) and not isinstance(k, bool) for k in layers)
    if not whole or sorted(set(layers)) != list(layers) or layers[0] < 0:
        raise ConfigError(f"layers = {layers}: must be distinct ascending ids from 0 on; set trace.layers")
    return {"entering": list(layers), "output_of": [k - 1 for k in layers]}


def canonical_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config in transformers 5's form, from either layout.

    config: holds `rope_parameters`, or `rope_theta` with `rope_scaling` and `partial_rotary_factor`.
    Returns {"rope_theta", "rope_type", ...}. Raises ConfigError where the base is nowhere (an engine would
    silently take 10000) or the settings differ between layer types.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(f"rope_parameters = {rope}: differ between layer types; those of a drafter are alike")
    legacy_type = rope.pop("type", None)
    rope.setdefault("rope_type", legacy_type or "default")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in rope and config.get(key) is not None:
            rope[key] = config[key]
    if rope.get("rope_theta") is None:
        raise ConfigError("rope_theta is neither in rope_parameters nor at the top level; state the base")
    return rope


def legacy_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The same settings as top-level `rope_theta`, `rope_scaling` and, where set, `partial_rotary_factor`.

    rope: canonical form. Engines older than transformers 5's layout read only these keys.
    """
    top = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in top}
    return {**top, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def layers_of(meta: dict[str, Any]) -> int:
    """Decoder layers of a checkpoint; a drafter.json that does not say is older than the choice, and has one."""
    return meta["options"].get("num_layers", 1)


def native_config(meta: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the export. meta: content of drafter.json; dtype: precision of the exported tensors.

    Raises ConfigError naming the field where `meta` lacks one, `dtype` is unknown or a variant has no flag.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"export.dtype = {dtype}: must be one of {', '.join(DTYPES)}")
    check_meta(meta)
    shape, ids, kind = meta["shape"], engine_layer_ids(meta["layers"]), KINDS[meta["kind"]]
    rope = canonical_rope(shape)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
              "num_hidden_layers": layers_of(meta)}
    config |= {key: shape[key] for key in SHAPE_KEYS}
    config |= legacy_rope(rope) | {"rope_parameters": rope}
    config |= {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": dtype}
    config["eagle_aux_hidden_state_layer_ids"] = ids["entering"]
    config["num_aux_hidden_states"] = len(ids["entering"])
    config["eagle_config"] = {
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids["output_of"],
    }
    for flag, (option, on, _) in kind.variants.items():
        if meta["options"][option] == on:
            config[flag] = True
    if kind.own_row:
        config |= {PARALLEL: True, MASK_KEY: meta["options"][kind.own_row]}
    # Engines skip this section; it ties the export to the target and the options it was trained with.
    config["drafthouse"] = {
        "kind": meta["kind"], "options": dict(meta["options"]), "target": dict(meta["target"]),
        "target_layers": shape["target_layers"], "owned": dict(kind.owned),
    }
    return config


def meta_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `native_config`: drafter.json's content, rotary settings in canonical form.

    Layers, shape and variants come from the keys that engines read, the rest from the `drafthouse` section.
    Raises ConfigError naming a missing key.
    """
    needed = (*SHAPE_KEYS, "num_hidden_layers", "eagle_aux_hidden_state_layer_ids", "drafthouse")
    missing = [key for key in needed if key not in config]
    if missing:
        raise ConfigError(f"config.json: {', '.join(missing)} missing; not a Drafthouse export, export again")
    ours = config["drafthouse"]
    shape = {key: config[key] for key in SHAPE_KEYS}
    shape |= {"rope_parameters": canonical_rope(config), "target_layers": ours["target_layers"]}
    options = dict(ours["options"]) | {"num_layers": config["num_hidden_layers"]}
    kind = kind_of(config)
    options |= {option: on if config.get(flag) else off for flag, (option, on, off) in kind.variants.items()}
    options |= {kind.own_row: mask_token(config)} if kind.own_row else {}
    return {"format": FORMAT, "kind": ours["kind"], "options": options, "shape": shape,
            "layers": list(config["eagle_aux_hidden_state_layer_ids"]), "target": dict(ours["target"])}


def check_meta(meta: dict[str, Any]) -> None:
    """Raises ConfigError naming every field of drafter.json that is missing or has no native form."""
    wrong = [f"{key} missing" for key in ("layers", "target", "shape", "options") if key not in meta]
    if meta.get("format") != FORMAT:
        wrong.append(f"format = {meta.get('format')!r}, must be {FORMAT!r}")
    if meta.get("kind") not in KINDS:
        wrong.append(f"kind = {meta.get('kind')!r}, must be {' or '.join(map(repr, KINDS))}")
    kind = KINDS.get(meta.get("kind"), KINDS["eagle3"])
    shape, options, target = (meta.get(key, {}) for key in ("shape", "options", "target"))
    wrong += [f"shape.{key} missing" for key in (*SHAPE_KEYS, "target_layers") if key not in shape]
    wrong += [f"target.{key} missing" for key in ("model", "fingerprint") if key not in target]
    for option, on, off in kind.variants.values():
        if options.get(option) not in (on, off):
            wrong.append(f"options.{option} = {options.get(option)!r}, must be {on!r} or {off!r}")
    if options.get("num_layers", 1) not in range(1, kind.most_layers + 1):
        wrong.append(f"options.num_layers = {options['num_layers']!r}, must be 1 to {kind.most_layers}")
    if kind.own_row and not isinstance(options.get(kind.own_row), int):
        wrong.append(f"options.{kind.own_row} = {options.get(kind.own_row)!r}, must be a token's id")
    if wrong:
        raise ConfigError(f"drafter.json: {'; '.join(wrong)}; export a checkpoint that the trainer wrote")


def own_table(embedding: Tensor | None, state: dict[str, Tensor], meta: dict[str, Any]) -> Tensor:
    """The embedding [V, H] as the drafter reads it: the target's, with the row that is the drafter's own.

    Raises ConfigError where the target's is not given, or of another size.
    """
    shape, kind = meta["shape"], KINDS[meta["kind"]]
    wanted = [shape["vocab_size"], shape["hidden_size"]]
    if embedding is None or list(embedding.shape) != wanted:
        raise ConfigError(f"embedding {None if embedding is None else [*embedding.shape]}: the drafter reads {wanted}")
    if not kind.own_row:
        return embedding
    row, token = state.get(MASK_EMBEDDING), meta["options"][kind.own_row]
    if row is None or list(row.shape) != wanted[1:] or not 0 <= token < wanted[0]:
        raise ConfigError(f"drafter.safetensors: {MASK_EMBEDDING} must have hidden_size = {wanted[1]} numbers, and "
                          f"options.{kind.own_row} = {token} name one of {wanted[0]} tokens; train again")
    table = embedding.to(torch.promote_types(embedding.dtype, row.dtype), copy=True)
    table[token] = row
    return table


def native_tensors(state: dict[str, Tensor], meta: dict[str, Any], dtype: str, embedding: Tensor | None = None,
                   ) -> dict[str, Tensor]:
    """Tensors of the export: floating ones in `dtype`, d2t int64 [D] offsets and t2d bool [V] as they are; no maps
    where the draft vocabulary is the target's, for which vLLM has no place then.

    state: tensors of drafter.safetensors; embedding [V, H]: the target's, for a kind that has a row of its own in it.
    Which names must be there is checked by export/check.py. Raises ConfigError where `state` has no d2t of D entries:
    without it every draft id would be wrong.
    """
    if KINDS[meta["kind"]].own_row:
        table = own_table(embedding, state, meta)
        state = {name: t for name, t in state.items() if name != MASK_EMBEDDING} | {TABLE: table}
    D, wanted = meta["shape"]["draft_vocab_size"], DTYPES[dtype]
    if "d2t" not in state or state["d2t"].shape != (D,):
        raise ConfigError(f"drafter.safetensors: d2t must have draft_vocab_size = {D} entries; train again")
    mapped = D != meta["shape"]["vocab_size"]
    return {name: (t.to(wanted) if t.is_floating_point() else t).contiguous() for name, t in state.items()
            if mapped or name not in ("d2t", "t2d")}


def state_from_native(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `native_tensors`: floating tensors in float32, bit-equal where the export is float32."""
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
