"""Where a drafter that a run starts from lies: a folder, a run, or a Hub repository, read into memory and recognised.

Weights are safetensors, one file or several with an index; pytorch_model.bin and the Medusa repository's
medusa_lm_head.pt are read with `weights_only`, which executes nothing that the file holds.
"""

import pickle
import re
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
from drafters.export import check, medusa, small_lm
from drafters.export.foreign import Imported, from_native
from drafters.export.kinds import KINDS
from drafters.export.native import layers_of
from drafters.export.speculators import from_speculators
from drafters.layers import Shape
from recipes.errors import ConfigError
from recipes.files import sha256_file, sha256_json

FIELD = "drafter.init_from"
CONFIG, ORIGIN = "config.json", "provenance.json"
PART = re.compile(r"[\w][\w.-]*")  # a file's name that leads nowhere else
# How a config.json that is not native EAGLE-3's is known, and what reads its folder.
LAYOUTS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[..., Imported]], ...] = (
    (lambda config: "speculators_model_type" in config, from_speculators),
    (lambda config: config.get("model_type") == "medusa", medusa.from_vllm),
    (lambda config: "medusa_num_heads" in config, medusa.from_original),
    (small_lm.is_ours, small_lm.from_plain))
# Checkpoints of this project that `own` does not read.
OWN = {"medusa": medusa.from_checkpoint, "small_lm": small_lm.from_checkpoint}
# Stems of the files that hold the weights, in the order in which they are looked for.
STEMS: tuple[tuple[str, str], ...] = (("model", ".safetensors"), ("pytorch_model", ".bin"), ("medusa_lm_head", ".pt"))


def find(init_from: str, field: str = FIELD) -> Path:
    """The local folder of `field`: the folder itself, a run's best checkpoint, or a Hub repository's copy.

    Raises ConfigError where there is no such thing.
    """
    folder = Path(init_from)
    if (folder / "checkpoints" / checkpoint.BEST).is_file():
        return checkpoint.best(folder / "checkpoints")
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{field} = {init_from}: a file; name the folder that holds it")
    try:
        found = Path(snapshot_download(init_from, allow_patterns=["*.json", "*.safetensors"]))
        if field == FIELD and not list(found.glob("*.safetensors")):
            found = Path(snapshot_download(init_from, allow_patterns=["*.json", "pytorch_model*.bin",
                                                                       "medusa_lm_head.pt"]))
    except (OSError, HFValidationError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{field} = {init_from}: no such folder here, and not to be had from the Hub: {first}"
                          ) from None
    return found


def read(folder: Path, field: str = FIELD) -> tuple[Imported, str]:
    """(the drafter in a folder, digest of the files that were read). Only `drafter.init_from` reads other files than
    safetensors.

    Raises ConfigError, naming the file, where the folder holds no drafter or one that cannot be used here.
    """
    if (folder / checkpoint.META).is_file():
        meta, files = checkpoint.read_meta(folder), [folder / checkpoint.META, folder / checkpoint.WEIGHTS]
        found = OWN.get(meta["kind"], own)(meta, checkpoint.read_tensors(folder), folder)
    elif (folder / CONFIG).is_file():
        config = read_config(folder / CONFIG)
        layout = next((read for known, read in LAYOUTS if known(config)), from_native)
        files = weight_files(folder, STEMS if field == FIELD else STEMS[:1])
        tensors = read_tensors(files)
        try:
            found = layout(config, tensors)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
        files = [folder / CONFIG, *files]
        if not found.target and (folder / ORIGIN).is_file():  # the layout has no place for what it was made for
            found.target = target_of(read_config(folder / ORIGIN))
    else:
        raise ConfigError(f"{field} = {folder}: holds neither {checkpoint.META} (a checkpoint of this project) nor "
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
    structure = KINDS.get(meta["kind"], KINDS["eagle3"]).structure  # a kind that is not wanted is refused by who asks
    options = {key: meta["options"][key] for key in structure if key in meta["options"]}
    options.setdefault("num_layers", layers_of(meta))
    unsaid = {key: f"{checkpoint.META} has no options.{key}" for key in structure if key not in options}
    d2t, t2d = named.pop("d2t"), named.pop("t2d")
    vocab.check(d2t, t2d)
    places = {name: f"{checkpoint.META}: shape.{name}" for name in meta["shape"]}
    places |= {"layers": f"{checkpoint.META}: layers"}
    return Imported("own", meta["kind"], options, unsaid, dict(meta["shape"]), list(meta["layers"]), vocab.ids_of(d2t),
                    named, places, target=dict(meta["target"]))


def read_config(path: Path) -> dict[str, Any]:
    try:
        return check.read_config(path)
    except ConfigError as error:
        raise ConfigError(f"{path.parent}/{error}") from None


def target_of(origin: dict[str, Any]) -> dict[str, Any]:
    """Model and fingerprint out of provenance.json; nothing where they are not of that form."""
    target = origin.get("target")
    known = isinstance(target, dict) and isinstance(target.get("fingerprint"), dict) and "model" in target
    return {"model": str(target["model"]), "fingerprint": target["fingerprint"]} if known else {}


def weight_files(folder: Path, stems: tuple[tuple[str, str], ...] = STEMS) -> list[Path]:
    """The files that hold the weights, an index first. Raises ConfigError where there are none, two candidates, or an
    index that names anything but weights beside it."""
    for stem, end in stems:
        index, single = folder / f"{stem}{end}.index.json", folder / f"{stem}{end}"
        if index.is_file():
            parts = read_config(index).get("weight_map")
            names = sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else []
            if not names or not all(PART.fullmatch(name) and name.endswith(end) for name in names):
                raise ConfigError(f"{index}: weight_map must name files of this folder ({end})")
            return [index, *(folder / name for name in names)]
        if single.is_file():
            return [single]
        others = sorted(folder.glob(f"*{end}")) if end != ".pt" else []  # a .pt of another name may be anything
        if len(others) == 1:
            return others
        if others:
            raise ConfigError(f"{folder}: {', '.join(path.name for path in others)}: which of them is the drafter's? "
                              f"keep one, or name it {single.name}")
    raise ConfigError(f"{folder}: no {' or '.join(f'{stem}{end}' for stem, end in stems)} here")


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of these files together; an index must name of each file exactly what it holds (case 46)."""
    tensors: dict[str, Tensor] = {}
    placed = read_config(files[0])["weight_map"] if files[0].suffix == ".json" else None
    for path in files:
        if path.suffix == ".json":
            continue
        held = READERS[path.suffix](path)
        if placed is not None:
            differ = sorted({name for name, file in placed.items() if file == path.name} ^ held.keys())
            if differ:
                raise ConfigError(f"{files[0]}: {differ[0]}: the index and {path.name} do not agree on whether it is "
                                  "there; restore the folder")
        tensors |= held
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


READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {".safetensors": read_safetensors, ".bin": read_bin,
                                                           ".pt": read_bin}
