"""Where a drafter that a run starts from lies: a folder, a run, or a Hub repository, read into memory and recognised.

Weights are safetensors, one file or several with an index; pytorch_model.bin is read with `weights_only`, which
executes nothing that the file holds.
"""

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters import checkpoint, vocab
from drafters.export.foreign import STRUCTURE, Imported, from_native
from drafters.export.native import layers_of
from drafters.export.speculators import from_speculators
from drafters.layers import Shape
from recipes.errors import ConfigError
from recipes.files import sha256_file, sha256_json

FIELD = "drafter.init_from"
CONFIG = "config.json"
# Stems of the files that hold the weights, in the order in which they are looked for.
STEMS: tuple[tuple[str, str], ...] = (("model", ".safetensors"), ("pytorch_model", ".bin"))


def find(init_from: str) -> Path:
    """The local folder of `drafter.init_from`: the folder itself, a run's best checkpoint, or a Hub repository's copy.

    Raises ConfigError where there is no such thing.
    """
    folder = Path(init_from)
    if (folder / "checkpoints" / checkpoint.BEST).is_file():
        return checkpoint.best(folder / "checkpoints")
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{FIELD} = {init_from}: a file; name the folder that holds it")
    try:
        found = Path(snapshot_download(init_from, allow_patterns=["*.json", "*.safetensors"]))
        if not list(found.glob("*.safetensors")):
            found = Path(snapshot_download(init_from, allow_patterns=["*.json", "pytorch_model*.bin"]))
    except (OSError, HFValidationError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{FIELD} = {init_from}: no such folder here, and not to be had from the Hub: {first}"
                          ) from None
    return found


def read(folder: Path) -> tuple[Imported, str]:
    """(the drafter in a folder, digest of the files that were read).

    Raises ConfigError, naming the file, where the folder holds no drafter or one that cannot be used here.
    """
    if (folder / checkpoint.META).is_file():
        meta, files = checkpoint.read_meta(folder), [folder / checkpoint.META, folder / checkpoint.WEIGHTS]
        found = own(meta, checkpoint.read_tensors(folder), folder)
    elif (folder / CONFIG).is_file():
        config = read_config(folder / CONFIG)
        layout = from_speculators if "speculators_model_type" in config else from_native
        files = weight_files(folder)
        tensors = read_tensors(files)
        try:
            found = layout(config, tensors)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
        files = [folder / CONFIG, *files]
    else:
        raise ConfigError(f"{FIELD} = {folder}: holds neither {checkpoint.META} (a checkpoint of this project) nor "
                          f"{CONFIG} (a drafter as engines load it)")
    return found, sha256_json({path.name: sha256_file(path) for path in files})


def own(meta: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Imported:
    """A checkpoint of this project."""
    named = dict(tensors)
    missing = sorted({"d2t", "t2d", "lm_head.weight"} - named.keys())
    if missing:
        raise ConfigError(f"{folder / checkpoint.WEIGHTS}: {', '.join(missing)} missing; restore the file")
    differ = sorted({f.name for f in fields(Shape)} ^ meta["shape"].keys())
    if differ:
        raise ConfigError(f"{folder / checkpoint.META}: shape.{differ[0]} is missing or unknown; restore the file")
    options = {key: meta["options"][key] for key in STRUCTURE if key in meta["options"]}
    options.setdefault("num_layers", layers_of(meta))
    unsaid = {key: f"{checkpoint.META} has no options.{key}" for key in STRUCTURE if key not in options}
    d2t, t2d = named.pop("d2t"), named.pop("t2d")
    vocab.check(d2t, t2d)
    places = {name: f"{checkpoint.META}: shape.{name}" for name in meta["shape"]}
    places |= {"layers": f"{checkpoint.META}: layers"}
    return Imported("own", meta["kind"], options, unsaid, dict(meta["shape"]), list(meta["layers"]), vocab.ids_of(d2t),
                    named, places, target=dict(meta["target"]))


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must be a mapping, not {type(config).__name__}")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, an index first. Raises ConfigError where there are none, or two candidates."""
    for stem, end in STEMS:
        index, single = folder / f"{stem}{end}.index.json", folder / f"{stem}{end}"
        if index.is_file():
            parts = read_config(index).get("weight_map")
            names = sorted(set(parts.values())) if isinstance(parts, dict) else []
            if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ConfigError(f"{index}: weight_map must name files of this folder")
            return [index, *(folder / name for name in names)]
        if single.is_file():
            return [single]
        others = sorted(path for path in folder.glob(f"*{end}"))
        if len(others) == 1:
            return others
        if others:
            raise ConfigError(f"{folder}: {', '.join(path.name for path in others)}: which of them is the drafter's? "
                              f"keep one, or name it {single.name}")
    raise ConfigError(f"{folder}: no {' or '.join(f'{stem}{end}' for stem, end in STEMS)} here")


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of these files together; an index must name exactly what its files hold (case 46)."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        if path.suffix != ".json":
            tensors |= READERS[path.suffix](path)
    if files[0].suffix == ".json":
        differ = sorted(read_config(files[0])["weight_map"].keys() ^ tensors.keys())
        if differ:
            raise ConfigError(f"{files[0]}: {differ[0]} is either not in the index or in none of its files")
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def read_bin(path: Path) -> dict[str, Tensor]:
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path}: cannot be read: torn, or not written by torch.save; convert it to safetensors")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path}: cannot be read as plain tensors: {first}") from None
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ConfigError(f"{path}: must be a mapping of names to tensors")
    return found


READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {".safetensors": read_safetensors, ".bin": read_bin}
