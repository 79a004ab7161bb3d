"""Checkpoints of a run: complete folders only, the best by replayed acceptance kept, resume from the latest.

checkpoints/step-000200/{drafter.safetensors, drafter.json, optimizer.safetensors, trainer.json, checksums.json}; a
folder is written under a temporary name and renamed when it is whole and on the disk, so a kill leaves the earlier one.

Weights and optimizer state are stored by parameter name. All else that a step depends on (rows, learning rate, random
numbers) is a function of the step, the settings and the rank, and needs no state.
"""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data.ranks import appears
from drafters import checkpoint
from recipes.errors import FAILED, ConfigError, DrafthouseError, RunError
from recipes.files import sync_folder, write_json
from recipes.provenance import difference
from train import state
from train.zero import gathered, shapes_of

FORMAT = "drafthouse.trainer/2"
STATE = "optimizer.safetensors"


@dataclass
class Progress:
    """Where a run stands: all that is not weights or optimizer state."""

    step: int = 0
    tokens: int = 0
    rows: int = 0
    skipped: int = 0
    best_step: int = -1
    best_length: float = 0.0
    train_loss: float | None = None  # of the last log line
    curve: list[dict[str, Any]] = field(default_factory=list)
    tracker_id: str = ""  # of the tracker's run, which a resumed run continues


@dataclass(frozen=True)
class Split:
    """How a global batch is shared out."""

    rows: int
    ranks: int
    accumulation: int

    @property
    def whole(self) -> int:
        """Rows of an optimizer step, which a run never changes."""
        return self.rows * self.ranks * self.accumulation


@dataclass
class Parts:
    """What a checkpoint is made of, besides Progress. `origin` is what drafter.json says of the target, `settings`
    what a resume compares, `shapes` what every tensor of the drafter must have."""

    drafter: Any
    optimizer: Any
    origin: dict[str, Any]
    settings: dict[str, Any]
    split: Split
    shapes: dict[str, tuple[int, ...]]


def steps_in(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := checkpoint.STEP.fullmatch(p.name)))


def save(accelerator: Accelerator, folder: Path, progress: Progress, parts: Parts, keep: int) -> None:
    """Writes one checkpoint, points best.json at the best, and drops old ones. All ranks call it together.

    Raises RunError or OSError where it cannot be written; the earlier ones are left as they were.
    """
    moments = state.collect(parts.optimizer, parts.drafter, accelerator.is_main_process)
    with gathered(parts.drafter):
        together(accelerator, lambda: write(folder, progress, parts, moments, keep))


def together(accelerator: Accelerator, work: Callable[[], None]) -> None:
    """Does `work` on the main process while the others wait. Where it fails, all end: the others without a word."""
    said: Exception | None = None
    if accelerator.is_main_process:
        try:
            work()
        except (DrafthouseError, OSError) as error:
            said = error
    failed = accelerator.reduce(torch.tensor(float(said is not None), device=accelerator.device), "sum")
    if said is not None:
        raise said
    if failed:
        sys.exit(FAILED)


def write(folder: Path, progress: Progress, parts: Parts, moments: dict[str, torch.Tensor], keep: int) -> None:
    """One process's part of `save`: the files."""
    final = checkpoint.path_of(folder, progress.step)
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        tensors = parts.drafter.tensors()
        check_shapes(shapes_of(tensors), parts.shapes)
        checkpoint.save(temporary, tensors, {**parts.drafter.meta(), "target": parts.origin})
        save_file(moments, temporary / STATE)
        write_json(temporary / "trainer.json", {"format": FORMAT, "progress": asdict(progress),
                                                "settings": parts.settings, "split": asdict(parts.split)})
        checkpoint.seal(temporary)
        for path in temporary.iterdir():
            with open(path, "rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except SafetensorError as error:
        raise refused(error, final) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(final)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder)
    point_best(folder, progress)
    prune(folder, keep, progress.best_step)


def refused(error: SafetensorError, path: Path) -> OSError:
    """The operating system's error within safetensors' own, which gives its number in words."""
    code = re.search(r"os error (\d+)", str(error))
    number = int(code.group(1)) if code else errno.EIO
    return OSError(number, os.strerror(number), str(path))


def check_shapes(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    """RunError where a drafter's tensors are not those that it was built with (case 18)."""
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            raise RunError(f"tensor {name} is {found.get(name, 'missing')} instead of {wanted.get(name, 'absent')}; "
                           "a partitioned parameter was not gathered")


def point_best(folder: Path, progress: Progress) -> None:
    """best.json for this state of the run; repeated on a resume, since a kill can fall between the two writes."""
    if progress.best_step >= 0:
        write_json(folder / checkpoint.BEST, {"step": progress.best_step, "mean_length": progress.best_length})


def prune(folder: Path, keep: int, best_step: int) -> None:
    """Deletes all but the last `keep` checkpoints, the best, and the drafter that the run started from (step 0)."""
    for step in steps_in(folder)[:-keep]:
        if step not in (best_step, 0):
            shutil.rmtree(checkpoint.path_of(folder, step))


def sweep(folder: Path) -> None:
    """Removes what killed runs left half-written."""
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def latest(accelerator: Accelerator, folder: Path) -> Path | None:
    """The checkpoint to resume from, or None. All ranks call it together: the main process chooses, since a network
    file system may show another one less, and the others wait until they see it. RunError where one never does."""
    own = (steps_in(folder)[-1:] or [-1]) if accelerator.is_main_process else [0]
    step = int(accelerator.reduce(torch.tensor(own, device=accelerator.device), "sum"))
    if step < 0:
        return None
    path = checkpoint.path_of(folder, step)
    unseen = torch.tensor(float(not appears(path / "trainer.json")), device=accelerator.device)
    if blind := int(accelerator.reduce(unseen, "sum")):
        raise RunError(f"{path}: {blind} of {accelerator.num_processes} processes do not see this checkpoint; runs_dir "
                       "must be on storage that all machines share")
    return path


def check_whole(accelerator: Accelerator, path: Path) -> None:
    """RunError where a file of a checkpoint is not as it was saved. All ranks call it together; one of them reads."""
    def check() -> None:
        try:
            checkpoint.check_sums(path)
        except ConfigError as error:
            raise RunError(str(error)) from None

    together(accelerator, check)


def read_progress(path: Path, settings: dict[str, Any], split: Split) -> Progress:
    """Where the run stood at this checkpoint. ConfigError where it was trained with other settings."""
    try:
        stored = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        progress = Progress(**stored["progress"])
        written, before = stored.get("format"), stored["settings"]
        earlier = Split(**stored["split"]) if written == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path}: damaged checkpoint; delete it to resume from the one before") from None
    if earlier is None:
        raise ConfigError(f"{path}: of format {written}, this version resumes {FORMAT} only; use another `name`, or "
                          "delete the checkpoints to start over")
    changed = difference(before, settings)
    if changed:
        raise ConfigError(f"{path}: trained with other settings: {changed}; "
                          "use another `name`, or delete the checkpoints to start over")
    check_split(path, earlier, split)
    return progress


def check_split(path: Path, earlier: Split, now: Split) -> None:
    """ConfigError, which names what fits, where the global batch would change."""
    if now.whole == earlier.whole:
        return
    share, rest = divmod(earlier.whole, now.ranks)
    if rest:
        fits = [n for n in range(1, earlier.whole + 1) if earlier.whole % n == 0]
        advice = f"launch {either(fits)} processes"
    else:
        pairs = [f"{n} and {share // n}" for n in range(1, share + 1) if share % n == 0]
        advice = f"set train.batch_rows and train.accumulation to {either(pairs)}"
    raise ConfigError(f"{path}: trained on {earlier.whole} rows a step, this launch has {now.whole} (train.batch_rows "
                      f"{now.rows} x {now.ranks} processes x train.accumulation {now.accumulation}); {advice}")


def either(values: list) -> str:
    """'1', '1 or 2', '1, 2 or 4'."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def load(path: Path, parts: Parts) -> None:
    """Puts a checkpoint's weights and optimizer state in place. All ranks call it together.
    Raises RunError where its files are damaged or do not fit."""
    try:
        weights, moments = load_file(path / checkpoint.WEIGHTS), load_file(path / STATE)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: damaged checkpoint ({error}); delete it to resume from the one before") from None
    state.restore(parts.optimizer, parts.drafter, weights, moments)
