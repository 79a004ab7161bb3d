"""Refuses a folder of Medusa heads that an engine would reject, or load with silently wrong results.

vLLM (0.32) skips unknown tensors, leaves a missing projection as it was allocated, loads none of fewer rows than the
vocabulary has, and takes the number of heads from any key whose name looks like it. Source: formats.md sections 3 and
8; cases 13, 18, 46, 47, 56. H hidden size, V target vocabulary, D draft vocabulary, K heads, n blocks a head.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.export.check import UNSUPPORTED, read_config, stray_files
from drafters.export.medusa import ORIGINAL, SIZES, STRUCTURE, VLLM, WEIGHTS, block_names, whole
from drafters.export.native import DTYPES
from drafters.export.tensor_check import is_size
from drafters.medusa import MOST_BLOCKS, MOST_HEADS
from recipes.errors import ConfigError

# Key -> the only value, and why. All must be written: vLLM's own defaults are another model's.
FIXED = {
    "architectures": (["MedusaModel"], "vLLM chooses the drafter class by this name"),
    "model_type": ("medusa", "vLLM chooses the config's class, and the method, by it"),
    "medusa_fc_bias": (True, "the blocks have biases, which vLLM would skip"),
}
COUNTS = {VLLM: ("hidden_size", "vocab_size", "truncated_vocab_size", "num_heads", "num_hidden_layers"),
          ORIGINAL: ("medusa_num_heads", "medusa_num_layers")}
FORBIDDEN = {"token_map": "there is no draft vocabulary in this config", "lm_head.weight": "vLLM skips this name",
             "d2t": "the map of this layout is token_map, which holds ids", "t2d": "vLLM skips this name"}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """What the engines' table and provenance.json are compared with: precision, structure and sizes. Sizes that a
    layout has no key for, the draft vocabulary's in both, are those of the section that ties the export to its
    checkpoint."""
    section = config.get("drafthouse")
    shape = section.get("shape") if isinstance(section, dict) else None
    shape = shape if isinstance(shape, dict) else {}
    known = {"torch_dtype": config.get("torch_dtype")}
    known |= {key: config.get(key, shape.get(key)) for key in SIZES}
    for option, keys in (("heads", ("num_heads", "medusa_num_heads")),
                         ("num_layers", ("num_hidden_layers", "medusa_num_layers"))):
        known[option] = next((config[key] for key in keys if key in config), None)
    if "original_lm_head" in config:
        known["projection"] = "shared" if config["original_lm_head"] else "own"
    return known


def violations(layout: str, folder: Path) -> Iterator[str]:
    """Every violation of the folder, as one sentence each."""
    try:
        config = read_config(folder / "config.json")
    except ConfigError as error:
        yield str(error)
        return
    yield from (vllm_violations if layout == VLLM else original_violations)(config)
    yield from shared_violations(config, layout)
    yield from stray_files(folder, WEIGHTS[layout])
    yield from tensor_violations(folder / WEIGHTS[layout], config, layout)


def shared_violations(config: dict[str, Any], layout: str) -> Iterator[str]:
    """Keys that both layouts have."""
    for key in COUNTS[layout]:
        if not is_size(config.get(key)):
            yield f"config.json: {key} = {config.get(key, 'missing')!r}, must be a whole number above 0"
    heads = flat(config)["heads"]
    if is_size(heads) and heads > MOST_HEADS:
        yield f"config.json: {heads} heads: at most {MOST_HEADS} are trained"
    if str(config.get("torch_dtype")) not in DTYPES:
        yield f"config.json: torch_dtype = {config.get('torch_dtype', 'missing')!r}, must be one of {', '.join(DTYPES)}"
    for key, why in UNSUPPORTED.items():
        if config.get(key):
            yield f"config.json: {key} = {config[key]!r}: {why}; remove it"
    section = config.get("drafthouse")
    needed = ("kind", "options", "target", "shape")
    if not isinstance(section, dict) or not all(isinstance(section.get(key), dict) for key in needed[1:]):
        yield f"config.json: drafthouse: must hold {', '.join(needed)}; it says which target the drafter is for"
        return
    if section.get("kind") != "medusa":
        yield f"config.json: drafthouse: kind = {section.get('kind')!r}, must be 'medusa'"
    if not section["target"].get("model") or not section["target"].get("fingerprint"):
        yield f"config.json: drafthouse: target = {section['target']!r}: must hold model and fingerprint"
    for option, found in flat(config).items():
        if option in STRUCTURE and section["options"].get(option) != found:
            yield (f"config.json: says {option} = {found!r}, but the drafter was trained with "
                   f"{section['options'].get(option)!r}")
    if section["options"].get("projection") not in ("own", "shared"):
        yield f"config.json: drafthouse: projection = {section['options'].get('projection')!r}: own or shared"
    shape, keys = section["shape"], flat(config)
    for key, said in (*((key, keys[key]) for key in SIZES[:3]), ("target_layers", None)):
        if not is_size(shape.get(key)) or (layout == VLLM and said is not None and said != shape[key]):
            yield f"config.json: drafthouse: shape.{key} = {shape.get(key, 'missing')!r}, the config says {said!r}"


def vllm_violations(config: dict[str, Any]) -> Iterator[str]:
    for key, (value, why) in FIXED.items():
        if key not in config or config[key] != value or type(config[key]) is not type(value):
            yield f"config.json: {key} = {config.get(key, 'missing')!r}, must be {value!r}: {why}"
    if not isinstance(config.get("original_lm_head"), bool):
        yield f"config.json: original_lm_head = {config.get('original_lm_head', 'missing')!r}, must be true or false"
    for key in config:
        if "num" in key and ("heads" in key or "layers" in key) and key not in ("num_heads", "num_hidden_layers"):
            yield f"config.json: {key}: vLLM takes it for the number of heads or layers; remove it"
    if config.get("logit_scale", 1.0) != 1.0:
        yield f"config.json: logit_scale = {config['logit_scale']!r}: the drafter was trained without"
    V, D, rows = config.get("vocab_size"), flat(config)["draft_vocab_size"], config.get("truncated_vocab_size")
    if is_size(V) and is_size(D) and D > V:
        yield f"config.json: a draft vocabulary of {D} is above vocab_size = {V}; are they exchanged?"
    if rows != V:
        yield (f"config.json: truncated_vocab_size = {rows!r}, must be vocab_size = {V!r}: vLLM does not start with "
               "projections of fewer rows")


def original_violations(config: dict[str, Any]) -> Iterator[str]:
    if config.get("medusa_num_layers") != 1:
        yield (f"config.json: medusa_num_layers = {config.get('medusa_num_layers', 'missing')!r}, must be 1: the "
               "original loader makes all blocks of a head one and the same")
    if not isinstance(config.get("base_model_name_or_path"), str) or not config["base_model_name_or_path"]:
        yield "config.json: base_model_name_or_path: missing; it names the target"


def expected(config: dict[str, Any], layout: str) -> dict[str, list[int]] | None:
    """Names and shapes of all tensors; None where the config does not say them."""
    keys = flat(config)
    H, V = ((config.get if layout == VLLM else keys.get)(key) for key in ("hidden_size", "vocab_size"))
    D, K, n = keys["draft_vocab_size"] if layout == VLLM else V, keys["heads"], keys["num_layers"]
    if not all(map(is_size, (H, V, D, K, n))) or K > MOST_HEADS or n > MOST_BLOCKS:
        return None
    blocks = {name: [H, H] if name.endswith("weight") else [H] for name in block_names(K, n)}
    if layout == ORIGINAL:
        named = {"{1}.{3}.linear.{4}".format(*name.split(".")): size for name, size in blocks.items()}
        return named | {f"{i}.{n}.weight": [V, H] for i in range(K)}
    named = blocks | {f"lm_heads.{i}.weight": [V, H] for i in range(1 if config.get("original_lm_head") else K)}
    return named | ({} if D == V else {"token_map": [D]})


def tensor_violations(path: Path, config: dict[str, Any], layout: str) -> Iterator[str]:
    """Violations of the weights against the config. Holds one tensor at a time, and the map."""
    wanted = expected(config, layout)
    dtype = DTYPES.get(str(config.get("torch_dtype")))
    try:
        with safe_open(path, framework="pt") as f:
            present = set(f.keys())
            mapped = wanted is not None and "token_map" in present & wanted.keys()
            ids = f.get_tensor("token_map") if mapped else None
            for name in sorted(present if wanted is not None else ()):
                if name not in wanted:
                    yield f"{name}: unknown tensor: {FORBIDDEN.get(name, 'a reader would skip it without a message')}"
                    continue
                tensor = f.get_tensor(name)
                yield from content_violations(name, tensor, wanted[name], dtype, config)
                if ids is not None and name.startswith("lm_heads.") and list(tensor.shape) == wanted[name]:
                    yield from filler_violations(name, tensor, ids)
    except (OSError, SafetensorError) as error:
        yield f"{path.name}: cannot be read: {error}"
        return
    for name in sorted((wanted or {}).keys() - present):
        yield f"{name}: missing; an engine would refuse the folder, or serve what is not set"


def content_violations(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype | None,
                       config: dict[str, Any]) -> Iterator[str]:
    """Shape, precision and values of one expected tensor."""
    if tensor.numel() == 0:
        yield f"{name}: has no elements, shape {list(tensor.shape)}; it was saved before it was gathered"
        return
    if list(tensor.shape) != shape:
        yield f"{name}: shape {list(tensor.shape)}, the config implies {shape}"
    if name == "token_map":
        yield from map_violations(tensor, config["vocab_size"])
        return
    if dtype is not None and tensor.dtype != dtype:
        yield f"{name}: is {tensor.dtype}, must be {dtype} (torch_dtype)"
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        yield f"{name}: holds NaN or infinite values"
    elif not name.endswith("bias") and not bool(tensor.any()):  # blocks begin at zero
        yield f"{name}: holds nothing but zeros; this head was never trained"


def filler_violations(name: str, table: Tensor, ids: Tensor) -> Iterator[str]:
    """Rows [V, H] that the map does not name must be those that are never proposed: vLLM knows no map for them."""
    V = len(table)
    fits = ids.dtype == torch.int64 and ids.dim() == 1 and len(ids) and 0 <= int(ids.min()) and int(ids.max()) < V
    if fits and not torch.equal(whole(table[ids], ids, V), table):
        yield f"{name}: rows that token_map does not name could be proposed; export again"


def map_violations(token_map: Tensor, V: int) -> Iterator[str]:
    """token_map [D] must hold ascending IDS of the target, not the offsets of EAGLE-3's d2t (case 56)."""
    if token_map.dtype != torch.int64 or token_map.dim() != 1:
        yield f"token_map: is {token_map.dtype} {list(token_map.shape)}, must be torch.int64 of one dimension"
        return
    outside = (token_map < 0) | (token_map >= V)
    if outside.any():
        i = int(outside.nonzero()[0])
        yield f"token_map: index {i} is target id {int(token_map[i])}, outside 0..{V - 1}"
    if (token_map[1:] <= token_map[:-1]).any():
        offsets = "; does it hold OFFSETS? add each one's index" if (token_map[1:] >= token_map[:-1]).all() else ""
        yield f"token_map: ids are not strictly ascending{offsets}"
