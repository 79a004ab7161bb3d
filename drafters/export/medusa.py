"""Medusa heads in the layouts of vLLM and of the original repository, both ways: pure key and config mappings.

The second is what FasterDecoding/Medusa's training writes and TensorRT-LLM's converter reads; that repository's own
loader reads the same tensors from medusa_lm_head.pt (docs/export.md).
Source: formats.md section 3; vLLM `vllm/model_executor/models/medusa.py` and `transformers_utils/configs/medusa.py`;
FasterDecoding/Medusa `medusa/model/medusa_model.py`; TensorRT-LLM `tensorrt_llm/models/medusa/weight.py`. Tensor names
of a checkpoint are vLLM's.
H hidden size, V target vocabulary, D draft vocabulary, K heads, n blocks a head.
"""

import re
from typing import Any

import torch
from torch import Tensor

from drafters import vocab
from drafters.export.foreign import MOST_TOKENS, Imported
from drafters.export.foreign_values import mapping, target_of
from drafters.export.native import DTYPES, FORMAT
from drafters.export.tensor_check import is_size
from drafters.medusa import MOST_BLOCKS, MOST_HEADS
from recipes.errors import ConfigError

VLLM, ORIGINAL = "medusa", "medusa-original"
WEIGHTS = {VLLM: "model.safetensors", ORIGINAL: "medusa_lm_head.safetensors"}
STRUCTURE = ("heads", "num_layers", "projection")  # options that a folder fixes, besides sizes
SIZES = ("hidden_size", "vocab_size", "draft_vocab_size", "target_layers")
MIXED = 16  # trained rows whose mean stands for those that were not
NAME = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")  # of the original layout


def check_meta(meta: dict[str, Any]) -> None:
    """Raises ConfigError naming every field of drafter.json that is missing or has no form in these layouts."""
    shape, options, target = (meta.get(key) or {} for key in ("shape", "options", "target"))
    wrong = [f"{key} = {meta.get(key)!r}, must be {value!r}" for key, value in (("format", FORMAT), ("kind", "medusa"))
             if meta.get(key) != value]
    wrong += [f"shape.{key} = {shape.get(key)!r}, must be a whole number above 0" for key in SIZES
              if not is_size(shape.get(key))]
    wrong += [f"target.{key} missing" for key in ("model", "fingerprint") if key not in target]
    wrong += [f"options.{key} missing" for key in STRUCTURE if key not in options]
    wrong += [f"options.{key} = {options[key]!r}, must be a whole number from 1 to {most}"
              for key, most in (("heads", MOST_HEADS), ("num_layers", MOST_BLOCKS))
              if key in options and not (is_size(options[key]) and options[key] <= most)]
    if options.get("projection", "own") not in ("own", "shared"):
        wrong.append(f"options.projection = {options['projection']!r}, must be own or shared")
    if wrong:
        raise ConfigError(f"drafter.json: {'; '.join(wrong)}; export a checkpoint that the trainer wrote")


def checked(meta: dict[str, Any], dtype: str, drafted: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options, shape) of a checkpoint that can be exported. ConfigError naming the field where it cannot."""
    if dtype not in DTYPES:
        raise ConfigError(f"export.dtype = {dtype}: must be one of {', '.join(DTYPES)}")
    check_meta(meta)
    if drafted > meta["options"]["heads"]:
        raise ConfigError(f"eval.draft_length = {drafted}: engines would add heads that were never trained; this "
                          f"drafter has {meta['options']['heads']}")
    return meta["options"], meta["shape"]


def ours(meta: dict[str, Any]) -> dict[str, Any]:
    """The section that ties an export to its target and the options that it was trained with; engines skip it."""
    return {"kind": meta["kind"], "options": dict(meta["options"]), "target": dict(meta["target"]),
            "shape": dict(meta["shape"])}


def vllm_config(meta: dict[str, Any], dtype: str, drafted: int) -> dict[str, Any]:
    """config.json for vLLM. meta: content of drafter.json; dtype: precision of the tensors; drafted: tokens a cycle.

    vLLM takes the value of any key with "num" and "heads" in its name for the number of heads, likewise "layers":
    there is no further such key. Raises ConfigError as `checked` does.
    """
    options, shape = checked(meta, dtype, drafted)
    return {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": shape["hidden_size"],
            "vocab_size": shape["vocab_size"], "truncated_vocab_size": shape["vocab_size"],  # see vllm_tensors
            "num_heads": options["heads"], "num_hidden_layers": options["num_layers"], "medusa_fc_bias": True,
            "original_lm_head": options["projection"] == "shared", "torch_dtype": dtype, "drafthouse": ours(meta)}


def original_config(meta: dict[str, Any], dtype: str, drafted: int) -> dict[str, Any]:
    """config.json as the original repository's MedusaConfig has it. Raises ConfigError as `checked` does, and for what
    it has no form for."""
    options, shape = checked(meta, dtype, drafted)
    if shape["draft_vocab_size"] != shape["vocab_size"]:
        raise ConfigError(f"export.formats: {ORIGINAL} has no place for a draft vocabulary: the heads propose "
                          f"{shape['draft_vocab_size']} of {shape['vocab_size']} tokens; export {VLLM}, or train with "
                          "drafter.options.draft_vocab_size: 0")
    if options["num_layers"] != 1:
        raise ConfigError(f"export.formats: {ORIGINAL}: its loader makes all blocks of a head one, so that "
                          f"options.num_layers = {options['num_layers']} would serve another drafter; export {VLLM}")
    return {"medusa_num_heads": options["heads"], "medusa_num_layers": 1,
            "base_model_name_or_path": meta["target"]["model"], "torch_dtype": dtype, "drafthouse": ours(meta)}


def projections(state: dict[str, Tensor], meta: dict[str, Any], head: Tensor) -> list[Tensor]:
    """The vocabulary projection [D, H] of each head; head [V, H]: the target's."""
    options, ids = meta["options"], draft_ids(state)
    if options["projection"] == "shared":
        return [head[ids]] * options["heads"]
    return [state[f"lm_heads.{i}.weight"] for i in range(options["heads"])]


def draft_ids(state: dict[str, Tensor]) -> Tensor:
    """Target ids [D] of a checkpoint's rows. ConfigError where it has no map."""
    if "d2t" not in state:
        raise ConfigError("drafter.safetensors: d2t missing; train again")
    if state["d2t"].dim() != 1:
        raise ConfigError(f"drafter.safetensors: d2t {list(state['d2t'].shape)}: must be a list; restore the file")
    return vocab.ids_of(state["d2t"])


def vllm_tensors(state: dict[str, Tensor], meta: dict[str, Any], dtype: str, head: Tensor) -> dict[str, Tensor]:
    """Tensors for vLLM, floating ones in `dtype`; token_map int64 [D], the target's IDS of the rows, where D is not V.

    state: tensors of drafter.safetensors; head [V, H]: the target's, which a shared projection is. Projections are
    written for the whole vocabulary: vLLM (0.32) allocates own ones so and loads no fewer rows, and with a smaller
    truncated_vocab_size it does not start, since it misses the map among what it has loaded. Without one it skips the
    map, which tells readers here which rows are meant.
    """
    shape = meta["shape"]
    weights = projections(state, meta, head)[: None if meta["options"]["projection"] == "own" else 1]
    tensors = {name: t for name, t in state.items() if name.startswith("blocks.")}
    tensors |= {f"lm_heads.{i}.weight": weight for i, weight in enumerate(weights)}
    tensors = {name: t.to(DTYPES[dtype]).contiguous() for name, t in tensors.items()}
    if shape["draft_vocab_size"] != shape["vocab_size"]:
        ids = draft_ids(state)
        tensors |= {name: whole(t, ids, shape["vocab_size"]) for name, t in tensors.items()
                    if name.startswith("lm_heads.")} | {"token_map": ids}
    return tensors


def whole(rows: Tensor, ids: Tensor, V: int) -> Tensor:
    """A projection [V, H] that proposes what `rows` [D, H] of these ids propose: every other row is the mean of some of
    them, whose logit is the largest nowhere. One by one in float64: the same bits on every machine."""
    mean = sum(rows[i * (len(rows) - 1) // (MIXED - 1)].double() for i in range(MIXED)) / MIXED
    table = mean.to(rows.dtype).expand(V, -1).clone()
    table[ids] = rows
    return table


def original_tensors(state: dict[str, Tensor], meta: dict[str, Any], dtype: str, head: Tensor) -> dict[str, Tensor]:
    """Tensors of the original repository: {i}.{j}.linear.* and {i}.{n}.weight, floating ones in `dtype`."""
    n = meta["options"]["num_layers"]
    tensors = {}
    for name, tensor in state.items():
        if name.startswith("blocks."):
            _, i, _, j, part = name.split(".")
            tensors[f"{i}.{j}.linear.{part}"] = tensor
    tensors |= {f"{i}.{n}.weight": weight for i, weight in enumerate(projections(state, meta, head))}
    # A file holds no tensor twice: a shared projection is a copy for each head.
    return {name: t.to(DTYPES[dtype]).contiguous().clone() for name, t in tensors.items()}


def block_names(heads: int, layers: int) -> list[str]:
    """Names of all blocks' tensors in a checkpoint."""
    return [f"blocks.{i}.layers.{j}.{part}" for i in range(heads) for j in range(layers) for part in ("weight", "bias")]


# --- back ---


def number(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not is_size(value) or value > MOST_TOKENS:
        raise ConfigError(f"config.json: {key} = {config.get(key, 'missing')!r}: must be a whole number from 1 on, and "
                          "no engine's default is right for it")
    return value


def few(K: int, n: int) -> tuple[int, int]:
    """The same, where a drafter here can have so many heads and blocks: what a file says is not trusted with memory."""
    if K > MOST_HEADS or n > MOST_BLOCKS:
        raise ConfigError(f"{K} heads of {n} blocks: the drafter here has at most {MOST_HEADS} of {MOST_BLOCKS}")
    return K, n


def from_vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> Imported:
    """A folder as vLLM loads it. Raises ConfigError naming the key or tensor that has no place here."""
    traps = sorted(key for key in config if "num" in key and ("heads" in key or "layers" in key)
                   and key not in ("num_heads", "num_hidden_layers"))
    if traps:
        raise ConfigError(f"config.json: {traps[0]}: vLLM takes it for the number of heads or layers; take it out")
    if config.get("logit_scale", 1.0) != 1.0 or config.get("quantization_config"):
        raise ConfigError("config.json: logit_scale or quantization_config: the drafter here has none")
    K, n = few(number(config, "num_heads"), number(config, "num_hidden_layers"))
    H, V, shared = number(config, "hidden_size"), number(config, "vocab_size"), bool(config.get("original_lm_head"))
    D = number(config, "truncated_vocab_size") if config.get("truncated_vocab_size") is not None else V
    trained = mapping(mapping(config, "drafthouse"), "shape", "config.json: drafthouse.").get("draft_vocab_size")
    widened = D == V and is_size(trained) and trained < V  # an export of this project, see vllm_tensors
    D = trained if widened else D
    named = {name.replace("medusa_heads.", ""): t for name, t in tensors.items()}
    token_map, notes = named.pop("token_map", None), []
    if D == V and token_map is not None:
        token_map = None
        notes.append("its token_map is left out, as in vLLM where truncated_vocab_size is vocab_size")
    ids = token_ids(token_map, D, V)
    for name, table in list(named.items()):
        if D != V and name.startswith("lm_heads.") and table.shape == (V, H):  # vLLM takes the map's rows of it
            named[name] = table[ids]
            if widened and not torch.equal(whole(named[name], ids, V), table):
                raise ConfigError(f"tensor {name}: rows that token_map does not name are not those that `make export` "
                                  "writes, and vLLM would propose by them; export again")
    if not config.get("medusa_fc_bias", False):
        held = any(name.startswith("blocks.") and name.endswith(".bias") for name in named)
        notes.append("its biases are left out, as in vLLM without medusa_fc_bias: they begin at zero here" if held
                     else "its blocks have no biases: they begin at zero here")
        named |= {name: torch.zeros(1).expand(H) for name in block_names(K, n) if name.endswith("bias")}
    carried = named.pop("lm_heads.0.weight", None) if shared else None
    if shared and carried is None:
        raise ConfigError("tensor lm_heads.0.weight is missing: by original_lm_head it is every head's projection")
    places = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "draft_vocab_size": "truncated_vocab_size"}
    return assemble(VLLM, config, named, (K, n, H, V, D), ids, carried, places, notes)


def token_ids(token_map: Tensor | None, D: int, V: int) -> Tensor:
    """Target ids [D] of the rows. token_map holds IDS, not the offsets of EAGLE-3's d2t (case 56)."""
    if token_map is None:
        if D != V:
            raise ConfigError(f"tensor token_map is missing: {D} of vocab_size = {V} tokens are drafted, and without "
                              "the map no draft id has a meaning")
        return torch.arange(V)
    whole = not token_map.is_floating_point() and token_map.shape == (D,)
    if not whole or len(token_map.unique()) != D or int(token_map.min()) < 0 or int(token_map.max()) >= V:
        raise ConfigError(f"tensor token_map {list(token_map.shape)} {token_map.dtype}: must hold {D} distinct ids of "
                          f"0..{V - 1}")
    return token_map.long()


def from_original(config: dict[str, Any], tensors: dict[str, Tensor]) -> Imported:
    """A folder of the original repository. Raises ConfigError naming the key or tensor that has no place here.

    Published configs say other numbers of heads than their files hold: the tensors count.
    """
    parts = {name: NAME.fullmatch(name) for name in tensors}
    unknown = sorted(name for name, found in parts.items() if found is None)
    if unknown or not parts:
        raise ConfigError(f"tensor {unknown[0] if unknown else '0.0.linear.weight'}: a Medusa file holds "
                          "{head}.{block}.linear.weight, .bias and {head}.{blocks}.weight")
    K, n = few(1 + max(int(found[1]) for found in parts.values()), max(int(found[2]) for found in parts.values()))
    said = config.get("medusa_num_heads")
    notes = [] if said in (K, None) else [f"config.json: medusa_num_heads = {said}, but the file holds {K} heads"]
    last = tensors.get(f"0.{n}.weight")
    if n < 1 or last is None or last.dim() != 2:
        raise ConfigError(f"tensor 0.{n}.weight: the vocabulary projection is missing or no matrix")
    V, H = last.shape
    if config.get("medusa_num_layers", n) != n:
        raise ConfigError(f"config.json: medusa_num_layers = {config['medusa_num_layers']!r}, but the file has {n}")
    named = {}
    for name, found in parts.items():
        i, j, part = found.groups()
        linear = ".linear." in name
        target = f"blocks.{i}.layers.{j}.{part}" if linear else f"lm_heads.{i}.{part}"
        if linear != (int(j) < n):
            raise ConfigError(f"tensor {name}: block {j} of a head with {n} blocks")
        named[target] = tensors[name]
    carried = None
    options = mapping(mapping(config, "drafthouse"), "options", "config.json: drafthouse.")
    if options.get("projection") == "shared":
        heads = [named.pop(f"lm_heads.{i}.weight", None) for i in range(K)]
        if any(head is None or not torch.equal(head, heads[0]) for head in heads):
            raise ConfigError("drafthouse.options.projection = shared, but the heads' projections differ")
        carried = heads[0]
    places = {key: f"the shape of 0.{n}.weight" for key in ("hidden_size", "vocab_size", "draft_vocab_size")}
    return assemble(ORIGINAL, config, named, (K, n, H, V, V), torch.arange(V), carried, places, notes)


def from_checkpoint(meta: dict[str, Any], tensors: dict[str, Tensor], folder: Any) -> Imported:
    """A checkpoint of this project (`drafter.init_from`)."""
    try:
        check_meta(meta)
        shape, options, named = meta["shape"], meta["options"], dict(tensors)
        ids = draft_ids(named)
        if "t2d" not in named:
            raise ConfigError("drafter.safetensors: t2d missing; restore the file")
        vocab.check(named.pop("d2t"), named.pop("t2d"))
        sizes = (options["heads"], options["num_layers"], shape["hidden_size"], shape["vocab_size"], len(ids))
        places = {key: key for key in SIZES}
        found = assemble("own", {"drafthouse": ours(meta)}, named, sizes, ids, None, places, [],
                         shared=options["projection"] == "shared")
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    found.places = {key: f"drafter.json: shape.{key}" for key in SIZES}
    return found


def assemble(layout: str, config: dict[str, Any], named: dict[str, Tensor], sizes: tuple[int, int, int, int, int],
             ids: Tensor, carried: Tensor | None, places: dict[str, str], notes: list[str], shared: bool = False,
             ) -> Imported:
    """The import from what all forms have. sizes: K, n, H, V, D; carried [D, H]: the target's head, which all heads
    use. ConfigError naming every tensor that is missing, unknown, of another shape or not finite."""
    K, n, H, V, D = sizes
    shared = shared or carried is not None
    wanted = {name: [H, H] if name.endswith("weight") else [H] for name in block_names(K, n)}
    wanted |= {} if shared else {f"lm_heads.{i}.weight": [D, H] for i in range(K)}
    every = named if carried is None else named | {"lm_heads.0.weight": carried}
    shapes = wanted if carried is None else wanted | {"lm_heads.0.weight": [D, H]}
    wrong = [f"{name} is unknown" for name in sorted(every.keys() - shapes.keys())]
    wrong += [f"{name} is missing" for name in sorted(shapes.keys() - every.keys())]
    wrong += [f"{name} {list(t.shape)}, the config implies {shapes[name]}" for name, t in sorted(every.items())
              if name in shapes and list(t.shape) != shapes[name]]
    wrong = wrong or [f"{name} is {t.dtype} or holds NaN or infinite values" for name, t in sorted(every.items())
                      if not t.is_floating_point() or not bool(torch.isfinite(t).all())]
    if wrong:
        raise ConfigError(f"tensors do not fit Medusa heads of this config: {'; '.join(wrong)}")
    section = mapping(config, "drafthouse")
    options = {"heads": K, "num_layers": n, "projection": "shared" if shared else "own", "draft_vocab_size": D}
    shape = {"hidden_size": H, "vocab_size": V, "draft_vocab_size": D,
             "target_layers": mapping(section, "shape", "config.json: drafthouse.").get("target_layers")}
    where = {key: f"config.json: {place}" for key, place in places.items()}
    where |= {"target_layers": "config.json: drafthouse.shape.target_layers", "layers": "config.json: layers"}
    return Imported(layout, "medusa", options, {}, shape, [], ids, named, where, head="many",
                    target=target_of(section), notes=notes, carried=carried)
