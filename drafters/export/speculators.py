"""The speculators layout of an EAGLE-3 or parallel drafter (formats.md sections 2 and 4), both ways: pure key and
config mappings.

vLLM loads such a folder with `vllm serve PATH`, and the `speculators` package reads and trains it.
H draft hidden size, V target vocabulary, D draft vocabulary.
"""

from typing import Any

from torch import Tensor

from drafters.export.foreign import IDS, SHAPE, Imported, assemble, check_plain, plain_of
from drafters.export.kinds import KINDS, MASK_KEYS, TABLE, VARIANTS
from drafters.export.native import (
    DTYPES,
    canonical_rope,
    check_meta,
    engine_layer_ids,
    layers_of,
    legacy_rope,
    native_tensors,
    own_table,
)
from recipes.errors import ConfigError

VERSION = "0.9.0"  # of the package that the layout was compared with
INSIDE = "transformer_layer_config"


def speculators_config(meta: dict[str, Any], dtype: str, architectures: list[str], drafted: int) -> dict[str, Any]:
    """config.json of the layout.

    meta: content of drafter.json; dtype: precision of the tensors; architectures: of the target's own config.json;
    drafted: tokens a cycle that engines draft unless told otherwise. Raises ConfigError as `native_config` does.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"export.dtype = {dtype}: must be one of {', '.join(DTYPES)}")
    check_meta(meta)
    shape, kind = meta["shape"], KINDS[meta["kind"]]
    decoder = {"model_type": "llama", "num_hidden_layers": layers_of(meta), "attention_bias": False, "mlp_bias": False,
               "tie_word_embeddings": False, "hidden_act": shape["hidden_act"]}
    decoder |= {key: shape[key] for key in SHAPE if key != "draft_vocab_size"}
    rope = canonical_rope(shape)
    decoder |= legacy_rope(rope) | {"rope_parameters": rope}
    flags = {flag: meta["options"].get(option) == on for flag, (option, on, _) in VARIANTS.items()}
    masks = {MASK_KEYS[0]: meta["options"][kind.own_row]} if kind.own_row else {}
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafted, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}
    wider = shape["target_hidden_size"] if shape["target_hidden_size"] != shape["hidden_size"] else None
    return {
        "architectures": [kind.architecture], "speculators_model_type": kind.speculator, "speculators_version": VERSION,
        "draft_vocab_size": shape["draft_vocab_size"], "norm_before_fc": False, "target_hidden_size": wider,
        # vLLM takes norm_before_residual for true where it is absent, the package for false: all flags are written.
        **flags, **masks, "embed_requires_grad": bool(masks), IDS: engine_layer_ids(meta["layers"])["entering"],
        "tie_word_embeddings": False, "torch_dtype": dtype, INSIDE: decoder,
        "speculators_config": {
            "algorithm": kind.speculator, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": meta["target"]["model"], "architectures": list(architectures)},
        },
    }


def speculators_tensors(state: dict[str, Tensor], meta: dict[str, Any], dtype: str,
                        embedding: Tensor) -> dict[str, Tensor]:
    """Tensors of the layout, floating ones in `dtype`; d2t and t2d only where D is not V.

    state: tensors of drafter.safetensors; embedding [V, H]: the target's. Raises ConfigError as `native_tensors` does.
    """
    table = {} if KINDS[meta["kind"]].own_row else {TABLE: own_table(embedding, state, meta)}  # else it is in there
    return {renamed(name): t for name, t in native_tensors(state | table, meta, dtype, embedding).items()}


def renamed(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def from_speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> Imported:
    """A folder in the layout. Raises ConfigError naming the key or tensor that has no place here."""
    kind, decoder = config.get("speculators_model_type"), config.get(INSIDE)
    known = {each.speculator: each for each in KINDS.values()}
    if kind not in known:
        raise ConfigError(f"config.json: speculators_model_type = {kind!r}: only {' and '.join(known)} can be started "
                          "from")
    if not isinstance(decoder, dict) or decoder.get("model_type") != "llama":
        model = decoder.get("model_type") if isinstance(decoder, dict) else decoder
        raise ConfigError(f"config.json: {INSIDE}.model_type = {model!r}: the drafter here has Llama's layer ('llama')")
    plain = plain_of(known[kind])
    check_plain({"num_hidden_layers": 32} | decoder, plain, f"{INSIDE}.")  # the package leaves out Llama's defaults
    check_plain(config, plain, "")
    flags, unsaid = {flag: config.get(flag) for flag in known[kind].variants}, {}
    if flags["norm_before_residual"] is None:
        unsaid["norm_before_residual"] = "norm_before_residual is absent: vLLM takes it for true, speculators for false"
    layers = config.get(IDS)
    if layers is not None:
        try:
            layers = engine_layer_ids(list(layers))["entering"]
        except (ConfigError, TypeError):
            raise ConfigError(f"config.json: {IDS} = {layers!r}: must be distinct ascending layer ids") from None
    places = {name: f"config.json: {INSIDE}.{name}" for name in SHAPE}
    places |= {name: f"config.json: {name}" for name in ("draft_vocab_size", "target_hidden_size")}
    return assemble("speculators", known[kind], decoder, config, tensors, places | {"layers": f"config.json: {IDS}"},
                    flags, unsaid, layers)
