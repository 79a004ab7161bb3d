"""The report's figures in an experiment tracker, through Accelerate: the same numbers under the same names."""

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from eval.gate import numbers
from eval.settings import measured_at
from recipes.errors import ConfigError
from recipes.schema import Recipe


def check_tracker(name: str) -> None:
    """Raises ConfigError for a tracker that is not installed or not known."""
    available = ["none", *map(str, get_available_trackers())]
    if name not in available:
        raise ConfigError(f"eval.tracker = {name}: not installed or not known; here: {', '.join(available)}")


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Every number of the report by its path, such as total.acceptance.mean_length; nulls are left out."""
    parts = {key: report[key] for key in ("total", "sets", "server") if key in report}
    return {path: value for path, value in numbers(parts) if value is not None}


def log_figures(recipe: Recipe, report: dict[str, Any], folder: Path) -> None:
    """One step of a new run of eval.tracker. wandb stays offline without a key, its files in the run's folder."""
    name = recipe.eval.tracker
    if name == "none":
        return
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=str(folder))
    keyed = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    settings = {"wandb": {"name": f"{recipe.name} eval", "dir": str(folder), "job_type": "eval",
                          "mode": os.environ.get("WANDB_MODE", keyed), "settings": {"silent": True}}}
    described = {"drafter": report["drafter"]["kind"], "checkpoint": report["drafter"]["checkpoint"],
                 "target": report["target"]["model"], "verdict": report["verdict"]["decision"],
                 "measured_at": measured_at(report["settings"]),
                 **{f"settings.{key}": value for key, value in report["settings"].items()
                    if isinstance(value, str | int | float)}}
    accelerator.init_trackers("drafthouse", config=described, init_kwargs=settings)
    accelerator.log(figures(report), step=0)
    accelerator.end_training()
