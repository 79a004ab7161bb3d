"""Checkpoints of a run: complete folders only, the best by replayed acceptance kept, resume from the latest.

checkpoints/step-000200/{drafter.safetensors, drafter.json, trainer.json, state/}; a folder is written under a
temporary name and renamed when every rank has finished, so a kill leaves the earlier one.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from drafters import checkpoint
from recipes.errors import ConfigError, RunError
from recipes.files import sync_folder, write_json
from recipes.provenance import difference

NAME = re.compile(r"step-(\d{6,})")


@dataclass
class Progress:
    """Where a run stands: all that is not weights or optimizer state."""

    step: int = 0
    tokens: int = 0
    rows: int = 0
    skipped: int = 0
    best_step: int = -1
    best_length: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


def steps_in(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := NAME.fullmatch(p.name)))


def save(accelerator: Accelerator, folder: Path, progress: Progress, drafter: Any, origin: dict[str, Any],
         settings: dict[str, Any], keep: int) -> None:
    """Writes one checkpoint on all ranks together, points best.json at the best, and drops old ones."""
    final = checkpoint.path_of(folder, progress.step)
    temporary = folder / f".{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary / "state"))
    if accelerator.is_main_process:
        checkpoint.save(temporary, drafter.tensors(), {**drafter.meta(), "target": origin})
        write_json(temporary / "trainer.json", {"progress": asdict(progress), "settings": settings,
                                                "ranks": accelerator.num_processes})
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync_folder(folder)
        point_best(folder, progress)
        prune(folder, keep, progress.best_step)
    accelerator.wait_for_everyone()


def point_best(folder: Path, progress: Progress) -> None:
    """best.json for this state of the run; repeated on a resume, since a kill can fall between the two writes."""
    if progress.best_step >= 0:
        write_json(folder / checkpoint.BEST, {"step": progress.best_step, "mean_length": progress.best_length})


def prune(folder: Path, keep: int, best_step: int) -> None:
    """Deletes all but the last `keep` checkpoints, the best, and the drafter that the run started from (step 0)."""
    for step in steps_in(folder)[:-keep]:
        if step not in (best_step, 0):
            shutil.rmtree(checkpoint.path_of(folder, step))


def latest(folder: Path, settings: dict[str, Any], ranks: int) -> tuple[Path, Progress] | None:
    """The checkpoint to resume from, or None. ConfigError where it was trained with other settings."""
    steps = steps_in(folder)
    if not steps:
        return None
    path = checkpoint.path_of(folder, steps[-1])
    try:
        stored = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        progress = Progress(**stored["progress"])
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path}: damaged checkpoint; delete it to resume from the one before") from None
    changed = difference(stored["settings"], settings)
    if changed:
        raise ConfigError(f"{path}: trained with other settings: {changed}; "
                          "use another `name`, or delete the checkpoints to start over")
    if stored["ranks"] != ranks:
        raise ConfigError(f"{path}: written by {stored['ranks']} processes, this run has {ranks}")
    return path, progress
