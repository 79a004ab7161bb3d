"""EAGLE-3 and parallel checkpoints that other tools wrote, in this project's names: pure mappings from config and
tensors.

The layouts are those of formats.md sections 1, 2 and 4, with the spellings that are met in published folders. What
engines fill in is filled in the same way; what they read differently is left open for the recipe to say.
H draft hidden size, Ht target hidden size, V target vocabulary, D draft vocabulary, n taps.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from drafters.export.foreign_values import mapping, rope_of, target_of
from drafters.export.kinds import (
    KINDS,
    MASK_EMBEDDING,
    MASK_HIDDEN,
    MASK_KEYS,
    PARALLEL,
    TABLE,
    Kind,
    kind_of,
    mask_token,
)
from drafters.export.native import engine_layer_ids
from drafters.export.tensor_check import expected_tensors, is_size, sizes
from recipes.errors import ConfigError

STRUCTURE = KINDS["eagle3"].structure  # `drafter.options` that an EAGLE-3 checkpoint fixes
IDS = "eagle_aux_hidden_state_layer_ids"
# Field of drafters.layers.Shape that a decoder config has under the same name.
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "draft_vocab_size", "rms_norm_eps", "max_position_embeddings")
MOST_TOKENS = 1 << 24  # of a vocabulary: what a config says of it is allocated before any tensor bears it out
# What wrappers put in front of the names, and what does not belong to the drafter: frequencies follow from the
# config, the verifier's head and norm are the target's own.
PREFIXES = ("module.", "draft_model.", "model.")
IGNORED_ENDS = ("rotary_emb.inv_freq",)
IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight")
# Beginning or end of a name that the drafter here has no place for, and what it means.
UNKNOWN = (
    ("layers.", "it has more layers than num_hidden_layers says, or this one is not Llama's"),
    ("additional_layers.", "it has SGLang's further layers, which leave out a residual; the drafter here has vLLM's"),
    ("midlayer.0.", "it has TensorRT-LLM's numbered layers; the drafter here has vLLM's, layers.N.*"),
    ("midlayer.1.", "it has TensorRT-LLM's numbered layers; the drafter here has vLLM's, layers.N.*"),
    ("input_norm.", "it norms all taps at once (norm_before_fc), which the drafter here does not"),
    (MASK_HIDDEN, "it is a parallel drafter's (P-EAGLE), whose config names the token of its masks"),
    ("midlayer.self_attn.q_norm.", "its layer norms queries (Qwen3), the drafter's here is Llama's"),
    ("midlayer.self_attn.k_norm.", "its layer norms keys (Qwen3), the drafter's here is Llama's"),
    (".bias", "it has biases, the drafter here has none"),
    ("_scale", "it is quantised; start from the checkpoint before quantisation"),
)
# Key -> values that mean what the drafter here computes; an absent key does.
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None), "mlp_bias": (False, None), "bias": (False, None),
    "qkv_bias": (False, None), "norm_before_fc": (False, None), "logit_scale": (1.0, None),
    "quantization_config": (None,), "compression_config": (None,), "partial_rotary_factor": (1.0, None),
}
PLAIN_EAGLE: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}


@dataclass
class Imported:
    """A checkpoint as its folder describes it, before it is compared with a target."""

    layout: str
    kind: str
    options: dict[str, Any]  # those that a checkpoint of this kind fixes, as far as the folder says them
    unsaid: dict[str, str]  # the rest of those: why the folder leaves it open
    shape: dict[str, Any]  # the kind's own Shape; target_layers None where the folder does not say
    layers: list[int] | None  # entering, empty where it reads none; None: what engines take, target.default_layers
    ids: Tensor  # [D] target id of each row of the head
    tensors: dict[str, Tensor]  # native names, the head among them where the folder has one
    places: dict[str, str]  # field of the shape, and `layers`: where the folder says it
    embedding: Tensor | None = None  # [V, H] where the folder has one
    head: str = "own"  # own, or what serves as the head: the target's `head` or its `embedding`; many: lm_heads.*
    target: dict[str, Any] = field(default_factory=dict)  # model and fingerprint, of this project's own checkpoints
    notes: list[str] = field(default_factory=list)  # what was filled in
    own_row: int | None = None  # of the embedding, which is the drafter's; the target's where the folder has no table
    carried: Tensor | None = None  # [D, H] rows of the target's head, where the folder has them for all heads


def from_native(config: dict[str, Any], tensors: dict[str, Tensor]) -> Imported:
    """A folder in the native layout (SGLang, vLLM, TensorRT-LLM; formats.md section 1).

    config: content of config.json. Raises ConfigError naming the key or tensor that has no place here.
    """
    ours, inner, kind = mapping(config, "drafthouse"), mapping(config, "eagle_config"), kind_of(config)
    check_plain(config, plain_of(kind), "")
    check_plain(inner, PLAIN_EAGLE, "eagle_config.")
    flags, unsaid = {flag: config.get(flag) for flag in kind.variants}, {}
    if flags.get("norm_output") is not None and not ours:
        unsaid["feedback"] = (
            f"norm_output = {config['norm_output']!r} is read in two ways: vLLM feeds back the normed state where it "
            "is true (post_norm), a drafter that SpecForge wrote has the norm before its head then and feeds back "
            "pre_norm")
    layers, where = native_layers(config, inner)
    places = {name: f"config.json: {name}" for name in (*SHAPE, "target_hidden_size")} | {"layers": where}
    found = assemble("native", kind, config, config, tensors, places, flags, unsaid, layers)
    found.target = target_of(ours)
    found.shape["target_layers"] = ours.get("target_layers")
    places["target_layers"] = "config.json: drafthouse.target_layers"
    return found


def native_layers(config: dict[str, Any], inner: dict[str, Any]) -> tuple[list[int] | None, str]:
    """(ids of the states entering the tapped layers, key that names them); None where no key does.

    The top-level ids count the state that ENTERS a layer, those of eagle_config a layer's OUTPUT, one less.
    """
    top, output_of = config.get(IDS), inner.get(IDS)
    if top is None and output_of is None:
        return None, f"config.json: {IDS}"
    name = f"config.json: {IDS if top is not None else f'eagle_config.{IDS}'}"
    try:
        entering = list(top) if top is not None else [k + 1 for k in output_of]
        ids = engine_layer_ids(entering)
    except (ConfigError, TypeError):
        raise ConfigError(f"{name} = {top if top is not None else output_of!r}: must be distinct ascending layer ids"
                          ) from None
    if top is not None and output_of is not None and list(output_of) != ids["output_of"]:
        raise ConfigError(f"config.json: {IDS} = {top} names the states that enter layers, eagle_config.{IDS} = "
                          f"{output_of} must be one less each: correct the one that is wrong")
    return entering, name


def assemble(layout: str, kind: Kind, decoder: dict[str, Any], outer: dict[str, Any], tensors: dict[str, Tensor],
             places: dict[str, str], flags: dict[str, Any], unsaid: dict[str, str],
             layers: list[int] | None) -> Imported:
    """The import from what both layouts have.

    decoder: keys of a Llama config; outer: the level that has draft_vocab_size and target_hidden_size. flags: value of
    each of the kind's variants, None where absent. unsaid: options that these do not decide.
    """
    notes: list[str] = []
    shape = shape_of(decoder, outer, places, notes)
    named = native_names(tensors)
    embedding, ids = named.pop(TABLE, None), draft_ids(named, shape)
    wrong = [f"{flag} = {value!r}" for flag, value in flags.items() if not isinstance(value, bool | None)]
    if wrong:
        raise ConfigError(f"config.json: {wrong[0]}: must be true or false")
    options = {option: on if flags[flag] else off for flag, (option, on, off) in kind.variants.items()
               if option not in unsaid}
    options |= {"draft_vocab_size": shape["draft_vocab_size"], "intermediate_size": shape["intermediate_size"],
                "num_layers": decoder.get("num_hidden_layers") or 1}
    head = "own" if "lm_head.weight" in named else shared_head(shape, bool(decoder.get("tie_word_embeddings")))
    row = None
    if kind.own_row:
        row = options[kind.own_row] = own_row_of(outer, shape, named)
    check_tensors(named, embedding, shape, bool(flags["fc_norm"]), head, layers, options["num_layers"], kind)
    if embedding is not None and row is not None:
        named[MASK_EMBEDDING] = embedding[row].clone()
    return Imported(layout, kind.name, options, unsaid, shape, layers, ids, named, places, embedding, head,
                    notes=notes, own_row=row)


def own_row_of(outer: dict[str, Any], shape: dict[str, Any], named: dict[str, Tensor]) -> int:
    """The token of a parallel drafter's masks; their learned state in `named` gets the form [1, 1, n*Ht]."""
    row = mask_token(outer)
    if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < shape["vocab_size"]:
        raise ConfigError(f"config.json: one of {', '.join(MASK_KEYS)} must name the token of the masks, within "
                          f"vocab_size = {shape['vocab_size']}, not {row!r}")
    state = named.get(MASK_HIDDEN)
    if state is not None and state.dim() and state.numel() == state.shape[-1] > 0:  # engines read it as one line
        named[MASK_HIDDEN] = state.reshape(1, 1, -1)
    return row


def plain_of(kind: Kind) -> dict[str, tuple[Any, ...]]:
    """PLAIN with what a drafter of this kind may have."""
    return {"num_hidden_layers": tuple(range(1, kind.most_layers + 1))} | PLAIN


def check_plain(values: dict[str, Any], table: dict[str, tuple[Any, ...]], prefix: str) -> None:
    """ConfigError for the first key whose value means another computation than the drafter's here."""
    for key, plain in table.items():
        if key in values and values[key] not in plain:
            more = f" to {plain[-1]}" if key == "num_hidden_layers" else ""
            raise ConfigError(f"config.json: {prefix}{key} = {values[key]!r}: the drafter here has {plain[0]!r}{more}")
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ConfigError(f"config.json: {prefix}layer_types = {kinds!r:.80}: the drafter here attends fully")


def shape_of(decoder: dict[str, Any], outer: dict[str, Any], places: dict[str, str],
             notes: list[str]) -> dict[str, Any]:
    """Sizes and rotary settings. An absent key has transformers' Llama default, as in the engines."""
    default = LlamaConfig().to_dict()
    values = {key: decoder[key] if decoder.get(key) is not None else default.get(key) for key in SHAPE}
    values["num_key_value_heads"] = decoder.get("num_key_value_heads") or values["num_attention_heads"]
    for key in ("hidden_size", "num_attention_heads"):
        if not is_size(values[key]):
            raise ConfigError(f"{places[key]} = {values[key]!r}: must be a whole number above 0")
    values["head_dim"] = decoder.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    values["draft_vocab_size"] = outer.get("draft_vocab_size") or values["vocab_size"]
    values["target_hidden_size"] = outer.get("target_hidden_size") or values["hidden_size"]
    wrong = next((key for key in values if key != "rms_norm_eps" and not is_size(values[key])), None)
    if wrong:
        raise ConfigError(f"{places[wrong]} = {values[wrong]!r}: must be a whole number above 0")
    if values["vocab_size"] > MOST_TOKENS:
        raise ConfigError(f"{places['vocab_size']} = {values['vocab_size']}: at most {MOST_TOKENS}")
    eps = values["rms_norm_eps"]
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise ConfigError(f"{places['rms_norm_eps']} = {eps!r}: must be a number between 0 and 1")
    rope = rope_of(decoder, default["rope_parameters"]["rope_theta"], notes)
    return values | {"hidden_act": "silu", "rope_parameters": rope, "target_layers": None}


def native_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under their native names; what does not belong to the drafter left out."""
    found, origin = {}, {}
    for name, tensor in tensors.items():
        short = name
        while prefix := next((p for p in PREFIXES if short.startswith(p)), ""):
            short = short.removeprefix(prefix)
        if short.startswith("layers.0."):
            short = "midlayer." + short.removeprefix("layers.0.")
        if short in IGNORED or short.endswith(IGNORED_ENDS):
            continue
        if short in found:
            raise ConfigError(f"tensors {origin[short]} and {name} both are {short}")
        found[short], origin[short] = tensor, name
    return found


def draft_ids(tensors: dict[str, Tensor], shape: dict[str, Any]) -> Tensor:
    """Target id [D] of each draft id; takes d2t and t2d out of `tensors`.

    d2t is an OFFSET in every engine, but some writers stored the ids themselves: t2d, or the only one of the two
    that gives distinct ids of the target, tells which (case 56). Without a map the vocabulary is the target's.
    """
    V, D = shape["vocab_size"], shape["draft_vocab_size"]
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if D == V:
            return torch.arange(V)
        raise ConfigError(f"tensor d2t is missing: draft_vocab_size = {D} of vocab_size = {V}, and without the map no "
                          "draft id has a meaning")
    if d2t.shape != (D,) or d2t.is_floating_point() or (t2d is not None and t2d.shape != (V,)):
        raise ConfigError(f"tensors d2t {list(d2t.shape)} {d2t.dtype} and t2d {None if t2d is None else [*t2d.shape]}: "
                          f"draft_vocab_size = {D} and vocab_size = {V} imply whole numbers [{D}] and [{V}]")
    marked = None if t2d is None else t2d.ne(0).nonzero()[:, 0]

    def fits(ids: Tensor) -> bool:
        distinct = ids.unique()
        inside = len(distinct) == D and 0 <= int(distinct[0]) and int(distinct[-1]) < V
        return inside and (marked is None or torch.equal(distinct, marked))

    readings = [torch.arange(D) + d2t.long(), d2t.long()]
    right = [ids for ids in readings if fits(ids)]
    if not right:
        raise ConfigError(f"tensor d2t: neither as offsets nor as ids does it give {D} distinct ids of 0..{V - 1}"
                          f"{'' if marked is None else ' that t2d marks'}")
    if len(right) == 2 and not torch.equal(*right):
        raise ConfigError("tensor d2t can be read as offsets and as ids, and no t2d tells which; add t2d to the file")
    return right[0]


def shared_head(shape: dict[str, Any], tied: bool) -> str:
    """What engines take for the head of a folder that has none; only the full vocabulary has such a head."""
    if shape["draft_vocab_size"] != shape["vocab_size"]:
        raise ConfigError(f"tensor lm_head.weight is missing: draft_vocab_size = {shape['draft_vocab_size']} needs a "
                          "head of its own")
    return "embedding" if tied else "head"


def check_tensors(named: dict[str, Tensor], embedding: Tensor | None, shape: dict[str, Any], tap_norms: bool,
                  head: str, layers: list[int] | None, depth: int, kind: Kind = KINDS["eagle3"],
                  stored: bool = False) -> None:
    """ConfigError naming every tensor that is missing, unknown, of another shape or not finite (cases 13, 18). stored:
    they are a checkpoint's, in which the row that is the drafter's own is a tensor."""
    Ht, fc = shape["target_hidden_size"], named.get("fc.weight")
    n = fc.shape[-1] // Ht if fc is not None and fc.dim() == 2 else len(layers or range(3))
    if n != len(layers or range(3)):
        raise ConfigError(f"tensor fc.weight {list(fc.shape)} fuses {n} states of {Ht}, but the layers are "
                          f"{layers or 'the default three'}")
    names, _ = expected_tensors(shape | {"fc_norm": tap_norms, "num_aux_hidden_states": n, "num_hidden_layers": depth,
                                         PARALLEL: bool(kind.own_row)})
    absent = {"d2t", "t2d", TABLE} | (set() if head == "own" else {"lm_head.weight"})
    size = sizes(shape | {"num_aux_hidden_states": n})
    wanted = {name: [size[s] for s in symbols] for name, symbols in names.items() if name not in absent}
    if stored and kind.own_row:
        wanted[MASK_EMBEDDING] = [size["H"]]
    for name in sorted(named.keys() - wanted.keys()):
        why = next((why for part, why in UNKNOWN if name.startswith(part) or name.endswith(part)),
                   "no drafter here has it")
        raise ConfigError(f"tensor {name}: {why}")
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - named.keys())]
    wrong += [f"{name} {list(t.shape)}, the config implies {wanted[name]}" for name, t in sorted(named.items())
              if list(t.shape) != wanted[name]]
    if embedding is not None and list(embedding.shape) != [shape["vocab_size"], shape["hidden_size"]]:
        wrong.append(f"embed_tokens.weight {list(embedding.shape)}, the config implies "
                     f"{[shape['vocab_size'], shape['hidden_size']]}")
    wrong = wrong or [f"{name} is {t.dtype} or holds NaN or infinite values" for name, t in sorted(named.items())
                      if not t.is_floating_point() or not bool(torch.isfinite(t).all())]
    if wrong:
        title = "a parallel" if kind.own_row else "an EAGLE-3"
        raise ConfigError(f"tensors do not fit {title} drafter of this config: {'; '.join(wrong)}")
