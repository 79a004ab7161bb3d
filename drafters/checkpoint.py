"""A drafter on disk: drafter.safetensors (trained parameters, vocabulary maps) and drafter.json (shape, origin).

checksums.json, where a folder has it, names the SHA-256 of every file as it was saved.
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.export.check import read_config
from drafters.registry import entry, options_of
from drafters.target import Target
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sha256_json, sync_folder, write_json

FORMAT = "drafthouse.drafter/1"
WEIGHTS, META = "drafter.safetensors", "drafter.json"
BEST = "best.json"
TIMING = "timing.json"  # optimizer steps of the process that ended the run, seconds inside them and in the first
SUMS, SUMS_FORMAT = "checksums.json", "drafthouse.checksums/1"
STEP = re.compile(r"step-(\d{6,})")  # the folder of one optimizer step
MOST_STEPS = 10**12
IMPORTED = "imported"  # folder of a run with the published drafters that it converted
FORM = {"kind": str, "options": dict, "shape": dict, "layers": list, "target": dict}


def save(folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Writes a drafter into an existing folder. RunError for an empty or non-finite tensor (case 18)."""
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise RunError(f"{folder}: tensor {name} has no elements; a partitioned parameter was not gathered")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise RunError(f"{folder}: tensor {name} holds NaN or Inf; training diverged, lower train.lr")
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / WEIGHTS)
    write_json(folder / META, {"format": FORMAT, **meta})
    sync_folder(folder)


def seal(folder: Path) -> None:
    """Writes the checksums of all files of a folder that is complete but for them."""
    sums = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name != SUMS}
    write_json(folder / SUMS, {"format": SUMS_FORMAT, "sha256": sums})
    sync_folder(folder)


def check_sums(folder: Path, *names: str) -> None:
    """ConfigError, which names the file, where one is missing or not as it was saved. names: the files to look at; none
    is all of them. Passes for a folder without checksums, as earlier versions wrote them."""
    path = folder / SUMS
    if not path.is_file():
        return
    try:
        stored = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"{folder}/{error}: damaged; {remedy(folder)}") from None
    sums = stored.get("sha256")
    if stored.get("format") != SUMS_FORMAT or not isinstance(sums, dict) or not {META, WEIGHTS, *names} <= sums.keys():
        raise ConfigError(f"{path}: damaged: not the checksums of a checkpoint; {remedy(folder)}")
    for name in names or sums:
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise ConfigError(f"{folder / name}: damaged checkpoint: {error.strerror}; {remedy(folder)}") from None
        if found != sums[name]:
            raise ConfigError(f"{folder / name}: damaged: not the bytes that were saved (SHA-256 in {SUMS}); "
                              f"{remedy(folder)}")


def remedy(folder: Path) -> str:
    """What to do about a damaged checkpoint."""
    if STEP.fullmatch(folder.name):
        return (f"delete {folder} and any later one beside it, and run `make train` again: training goes on from the "
                "checkpoint before it, or begins anew where there is none")
    if folder.parent.name == IMPORTED:
        return f"delete {folder} and run again: the drafter is converted once more"
    return f"restore {folder}"


def path_of(folder: Path, step: int) -> Path:
    """Folder of one optimizer step's checkpoint among a run's `folder` of them."""
    return folder / f"step-{step:06d}"


def best(folder: Path) -> Path:
    """The run's checkpoint with the best replayed acceptance. ConfigError where nothing was trained, or where best.json
    is damaged."""
    path, mend = folder / BEST, "run `make train` again, which writes it anew"
    if not path.is_file():
        raise ConfigError(f"{path}: no trained drafter here; run `make train` first, or set drafter.path")
    try:
        step = read_config(path).get("step")
    except ConfigError as error:
        raise ConfigError(f"{folder}/{error}: damaged; {mend}") from None
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        raise ConfigError(f"{path}: step = {step!r:.80}: damaged, names no checkpoint; {mend}")
    return path_of(folder, step)


def read_meta(folder: Path) -> dict[str, Any]:
    """drafter.json of a checkpoint. ConfigError where it is missing, unreadable, damaged or of another format."""
    path = folder / META
    if not path.is_file():
        raise ConfigError(f"{path}: no drafter checkpoint here; train first, or set drafter.path")
    try:
        meta = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"{folder}/{error}; train again or restore the file") from None
    if meta.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a checkpoint of format {FORMAT}")
    for key, kind in FORM.items():
        if not isinstance(meta.get(key), kind):
            what = "missing" if key not in meta else f"= {meta[key]!r:.80}: must be a {kind.__name__}"
            raise ConfigError(f"{path}: {key} {what}; train again or restore the file")
    if not all(type(k) is int for k in meta["layers"]):
        raise ConfigError(f"{path}: layers = {meta['layers']!r:.80}: must be layer ids; restore the file")
    check_sums(folder, META)
    return meta


def digest_of(weights: str, meta: dict[str, Any]) -> str:
    """Digest of all that decides what a drafter drafts: the SHA-256 of its weights, and how they are read. `meta`: its
    drafter.json, or the provenance.json of its export; the same weights draft otherwise with another option or rotary
    base. A part that an earlier export does not hold counts as none."""
    return sha256_json([weights, *(meta.get(key) for key in ("kind", "options", "shape", "layers"))])


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """drafter.safetensors of a checkpoint. ConfigError where it is missing, unreadable or damaged."""
    check_sums(folder, WEIGHTS)
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / WEIGHTS}: cannot be read: {error}") from None


def load(folder: Path, target: Target) -> Any:
    """The drafter of a checkpoint folder on `target`. ConfigError where it was trained for another target."""
    meta = read_meta(folder)
    check_target(meta, target.fingerprint(), str(folder))
    if meta["layers"] != target.layers:
        raise ConfigError(f"{folder}: trained on layers {meta['layers']}, but the target is tapped at {target.layers}")
    options = options_of(meta["kind"], meta["options"])
    try:
        drafter = entry(meta["kind"]).code.load(options, meta["shape"], meta["layers"], read_tensors(folder), target)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return drafter.to(target.device, target.dtype).eval()


def check_target(meta: dict[str, Any], fingerprint: dict[str, str], where: str) -> None:
    """ConfigError naming the part of the target's fingerprint that differs (case 36)."""
    trained_for = meta["target"].get("fingerprint")
    if not isinstance(trained_for, dict):
        raise ConfigError(f"{where}: target.fingerprint = {trained_for!r:.80}: says nothing of the target that it was "
                          "made for")
    for part, value in fingerprint.items():
        if trained_for.get(part) != value:
            raise ConfigError(f"{where}: made for {meta['target'].get('model')}, whose {part} differs from this "
                              "target's; trace and train for this target")
