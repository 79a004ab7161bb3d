"""A published drafter as a checkpoint of a run (`drafter.path`), so that every stage treats it as one of its own.

Only safetensors and JSON are read; nothing that the folder says names a program, another file or a host.
"""

import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafters import checkpoint, vocab
from drafters.export.foreign import Imported
from drafters.export.kinds import MASK_TOKEN
from drafters.initial import check_fit, drafter_of, resolve, same_kind, taps_of
from drafters.registry import entry, options_of
from drafters.source import find, read
from drafters.target import Target
from recipes.errors import ConfigError
from recipes.files import locked, sha256_file, sha256_json, sync_folder
from recipes.provenance import difference
from recipes.schema import Drafter as Section

FIELD = "drafter.path"


@dataclass
class Opened:
    """A drafter ready to draft; its checkpoint folder where it was trained, and a digest of what decides its drafts."""

    drafter: Any
    folder: Path | None
    digest: str


def open_drafter(section: Section, target: Target, run: Path) -> Opened:
    """The drafter of a recipe: the checkpoint that `chosen` finds, or one that needs no training. ConfigError where
    there is none."""
    if entry(section.kind).trained:
        return loaded(chosen(section, run, target), target)
    if section.path:
        raise ConfigError(f"drafter.path = {section.path}: a drafter of kind {section.kind} has no checkpoint; leave "
                          "it empty")
    options, code = options_of(section.kind, section.options), entry(section.kind).code
    if entry(section.kind).holds:
        return code.opened(options, target, run)
    drafter = code.build(options, target, {}, 0)
    return Opened(drafter.to(target.device).eval(), None, sha256_json(drafter.meta()))


def loaded(folder: Path, target: Target) -> Opened:
    """The drafter of a checkpoint folder."""
    drafter = checkpoint.load(folder, target)
    weights = sha256_file(folder / checkpoint.WEIGHTS)
    return Opened(drafter, folder, checkpoint.digest_of(weights, checkpoint.read_meta(folder)))


def fresh(section: Section, target: Target, seed: int) -> Any:
    """An untrained drafter of the recipe's kind: it shows what drafting costs and nothing else."""
    drafter = entry(section.kind).code.build(options_of(section.kind, section.options), target, {}, seed)
    return drafter.to(target.device, target.dtype).eval()


def chosen(section: Section, run: Path, target: Target) -> Path:
    """The checkpoint that `drafter.path` names, or the best of the run's own where it is empty.

    A folder or Hub id in a layout of engines is converted once, under run/imported, and the target tapped at its
    layers. Raises ConfigError naming file, key and value where it is of another kind than drafter.kind, does not fit
    the target, or was made for another.
    """
    if not section.path:
        own = checkpoint.best(run / "checkpoints")
        check_own(section, checkpoint.read_meta(own), own)
        return own
    folder = Path(section.path) if (Path(section.path) / checkpoint.META).is_file() else find(section.path, FIELD)
    if (folder / checkpoint.META).is_file():
        same_kind(checkpoint.read_meta(folder)["kind"], section, folder)
        return folder
    found, digest = read(folder, FIELD)
    same_kind(found.kind, section, folder)
    target.tap(entry(found.kind).shown(taps_of(found, target, str(folder))))
    layers = check_fit(found, target, str(folder))
    fingerprint = target.fingerprint()
    if found.target.get("fingerprint"):
        checkpoint.check_target({"target": found.target}, fingerprint, str(folder))
    stated = {key: value for key, value in section.options.items() if key in found.unsaid}
    options = resolve(found, stated, target, "keep", str(folder))
    out = run / checkpoint.IMPORTED / sha256_json([digest, fingerprint, options])[:16]
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.parent):  # two stages at once may want it
        if not (out / checkpoint.META).is_file():
            convert(found, options, layers, target, out, {"model": target.section.model, "fingerprint": fingerprint})
    return out


def check_own(section: Section, meta: dict[str, Any], folder: Path) -> None:
    """ConfigError where the run's own checkpoint was trained as another drafter than the recipe's, whose record and
    export would then say what is not in them. What it started from may have decided options that are not stated."""
    same_kind(meta["kind"], section, folder)
    now, earlier = (asdict(options_of(section.kind, options)) for options in (section.options, meta["options"]))
    stated = set(section.options if section.init_from else now)
    stated -= {MASK_TOKEN} if now.get(MASK_TOKEN) == -1 else set()  # training has looked for one
    changed = difference({key: earlier[key] for key in stated}, {key: now[key] for key in stated})
    if changed:
        raise ConfigError(f"{folder}: trained with other settings: drafter.options.{changed}; go back to those, or use "
                          "another `name` and train")


def convert(found: Imported, options: dict[str, Any], layers: list[int], target: Target, out: Path,
            origin: dict[str, Any]) -> None:
    """Writes the imported drafter as a checkpoint, whole."""
    drafter = drafter_of(found, found.ids.sort().values, layers, options_of(found.kind, options), target, longer=False)
    vocab.check(drafter.d2t, drafter.t2d)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        checkpoint.save(temporary, drafter.tensors(), {**drafter.meta(), "target": origin})
        checkpoint.seal(temporary)
        os.replace(temporary, out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
