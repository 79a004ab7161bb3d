"""A small language model as a plain Hugging Face folder, which vLLM's draft_model and transformers load, both ways.

Source: formats.md section 6; vLLM 0.32 `vllm/v1/spec_decode/draft_model.py` and `vllm/config/speculative.py`. The
tokenizer is the target's, which engines take it from. Pure mappings, but for the skeleton that names and shapes are
read from, which holds no numbers.
Legend: V vocabulary, H hidden size of the drafter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafters.export.check import UNSUPPORTED, read_config, stray_files
from drafters.export.foreign import Imported
from drafters.export.foreign_values import mapping, target_of
from drafters.export.native import DTYPES, FORMAT
from drafters.export.plain import facing, skeleton_of
from drafters.export.tensor_check import is_size
from drafters.registry import options_of
from recipes.errors import ConfigError

PLAIN = "plain"
START = "model."  # of a checkpoint's names, before those of transformers
STRUCTURE = ("sibling", "layers", "pick", "keep", "train_vocabulary")  # options that say what the model is
SIZES = ("vocab_size", "draft_vocab_size", "target_hidden_size", "target_layers")
PRECISION = ("dtype", "torch_dtype")  # keys of config.json; older readers know the second


def check_meta(meta: dict[str, Any]) -> None:
    """ConfigError naming every field of drafter.json that is missing or has no form in this layout."""
    shape, options, target = (meta.get(key) or {} for key in ("shape", "options", "target"))
    fixed = {"format": FORMAT, "kind": "small_lm"}
    wrong = [f"{key} = {meta.get(key)!r}, must be {value!r}" for key, value in fixed.items() if meta.get(key) != value]
    wrong += [f"shape.{key} = {shape.get(key)!r}, must be a whole number above 0" for key in SIZES
              if not is_size(shape.get(key))]
    wrong += [] if isinstance(shape.get("config"), dict) else ["shape.config missing"]
    wrong += [f"target.{key} missing" for key in ("model", "fingerprint") if key not in target]
    wrong += [f"options.{key} missing" for key in STRUCTURE if key not in options]
    if wrong:
        raise ConfigError(f"drafter.json: {'; '.join(wrong)}; export a checkpoint that the trainer wrote")


def plain_config(meta: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json: the model's own, its precision, and the section that ties it to its target, which engines skip."""
    if dtype not in DTYPES:
        raise ConfigError(f"export.dtype = {dtype}: must be one of {', '.join(DTYPES)}")
    check_meta(meta)
    ours = {"kind": meta["kind"], "options": dict(meta["options"]), "target": dict(meta["target"]),
            "shape": {key: meta["shape"][key] for key in SIZES}}
    return meta["shape"]["config"] | dict.fromkeys(PRECISION, dtype) | {"drafthouse": ours}


def model_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Those of config.json that are the model's own."""
    return {key: value for key, value in config.items() if key not in ("drafthouse", *PRECISION)}


def plain_tensors(state: dict[str, Tensor], meta: dict[str, Any], dtype: str, embedding: Tensor | None,
                  head: Tensor | None) -> dict[str, Tensor]:
    """Tensors as transformers names them; embedding, head [V, H]: the target's, which a drafter may have borrowed."""
    named = {name.removeprefix(START): t for name, t in state.items() if name.startswith(START)}
    if options_of("small_lm", meta["options"]).borrows:
        first, last = facing(skeleton_of(meta["shape"]["config"]))
        named |= {last: head, first: embedding}
    return {name: t.detach().cpu().to(DTYPES[dtype]).contiguous().clone() for name, t in named.items()}


def from_plain(config: dict[str, Any], tensors: dict[str, Tensor]) -> Imported:
    """The inverse. ConfigError for a folder that this project did not write: it does not say which target it is for;
    any model can be named in drafter.options.sibling."""
    ours = mapping(config, "drafthouse")
    if not is_ours(config):
        raise ConfigError("config.json: a language model that this project did not export; name it in "
                          "drafter.options.sibling")
    options, shape = (mapping(ours, key, "config.json: drafthouse.") for key in ("options", "shape"))
    meta = {"format": FORMAT, "kind": "small_lm", "options": options, "target": target_of(ours),
            "shape": shape | {"config": model_keys(config) | {"dtype": "float32"}}}
    check_meta(meta)
    V, named = shape["vocab_size"], {START + name: t for name, t in tensors.items()}
    table = carried = None
    if options_of("small_lm", options).borrows:
        first, last = facing(skeleton_of(model_keys(config)))
        if {first, last} - tensors.keys():
            raise ConfigError(f"model.safetensors: {first} or {last} missing; restore the file")
        table, carried = tensors[first], tensors[last]
        named = {name: t for name, t in named.items() if name.removeprefix(START) not in (first, last)}
    places = {name: f"config.json: drafthouse.shape.{name}" for name in SIZES}
    return Imported(PLAIN, "small_lm", {key: options[key] for key in STRUCTURE}, {}, meta["shape"], [],
                    torch.arange(V), named, places, embedding=table, head="many", target=meta["target"],
                    carried=carried)


def is_ours(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a small language model that this project exported."""
    ours = config.get("drafthouse")
    return isinstance(ours, dict) and ours.get("kind") == "small_lm"


def from_checkpoint(meta: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Imported:
    """ConfigError: a small model goes on from its export, which is one that drafter.options.sibling can name."""
    raise ConfigError(f"{folder}: a drafter of kind small_lm goes on from its export: run `make export` there and name "
                      "that folder in drafter.options.sibling")


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """What the engines' table and provenance.json are compared with."""
    ours = config.get("drafthouse") if isinstance(config.get("drafthouse"), dict) else {}
    known = {"torch_dtype": config.get("torch_dtype"), "kind": ours.get("kind"), "config": model_keys(config)}
    if is_size(config.get("max_position_embeddings")):
        known["max_position_embeddings"] = config["max_position_embeddings"]
    return known | {name: ours.get(name) for name in ("options", "shape")}


def said(origin: dict[str, Any], keys: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What provenance.json and the flat keys must say alike."""
    shape = dict(origin["shape"])
    own = shape.pop("config", None)
    yield "kind", origin.get("kind"), keys["kind"]
    yield "layers", origin.get("layers"), []
    yield "options", origin["options"], keys["options"]
    yield "shape", shape, keys["shape"]
    yield "shape.config", model_keys(own) if isinstance(own, dict) else own, keys["config"]


def violations(folder: Path) -> Iterator[str]:
    """Every violation of the folder, as one sentence each: what an engine would refuse, or load as another model."""
    try:
        config = read_config(folder / "config.json")
    except ConfigError as error:
        yield str(error)
        return
    for key, why in UNSUPPORTED.items():
        if config.get(key):
            yield f"config.json: {key}: {why}"
    dtype = str(config.get("torch_dtype"))
    if dtype not in DTYPES or config.get("dtype") != dtype:
        yield (f"config.json: dtype = {config.get('dtype')!r}, torch_dtype = {config.get('torch_dtype')!r}: must both "
               f"be one of {', '.join(DTYPES)}")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    if architecture is None or config.get("architectures") != [architecture]:
        yield (f"config.json: architectures = {config.get('architectures')!r}, model_type = "
               f"{config.get('model_type')!r}: must name a causal language model of transformers")
        return
    yield from stray_files(folder)
    try:
        from_plain(config, {name: torch.empty(0) for name in facing(skeleton_of(model_keys(config)))})
    except ConfigError as error:
        yield str(error)
        return
    if config.get("vocab_size") != config["drafthouse"]["shape"]["vocab_size"]:
        yield f"config.json: vocab_size = {config.get('vocab_size')!r}: engines want the target's"
    yield from tensor_violations(folder / "model.safetensors", skeleton_of(model_keys(config)), DTYPES.get(dtype))


def tensor_violations(path: Path, skeleton: nn.Module, dtype: torch.dtype | None) -> Iterator[str]:
    """Violations of the weights against the model. Holds one tensor at a time."""
    wanted = {name: list(p.shape) for name, p in skeleton.named_parameters()}
    try:
        with safe_open(path, framework="pt") as f:
            for name in sorted(wanted.keys() - f.keys()):
                yield f"{name}: missing: transformers would go on with random numbers in its place"
            for name in sorted(f.keys()):
                if name not in wanted:
                    yield f"{name}: unknown tensor: a reader would skip it"
                    continue
                tensor = f.get_tensor(name)
                if list(tensor.shape) != wanted[name]:
                    yield f"{name}: shape {list(tensor.shape)}, the config implies {wanted[name]}"
                elif dtype is not None and tensor.dtype != dtype:
                    yield f"{name}: {tensor.dtype}, torch_dtype says {dtype}"
                elif not torch.isfinite(tensor).all():
                    yield f"{name}: holds NaN or Inf"
                elif tensor.dim() > 1 and not tensor.any():
                    yield f"{name}: all zeros, as a tensor that was never gathered"
    except (OSError, SafetensorError) as error:
        yield f"{path.name}: cannot be read: {error}"
