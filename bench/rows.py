"""The rows of a measurement, `{variant, metric, value, unit, reference}`, and the file beside them that says where they
were measured."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from recipes.errors import ConfigError
from recipes.files import write_json
from recipes.provenance import git_revision, stamp
from recipes.schema import Recipe

# What decides how a CPU's threads wait, and what glibc gives back to the system
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
TRANSFORMERS = f"transformers {transformers.__version__}"
TORCH = f"torch {torch.__version__}"


@dataclass
class Row:
    """One figure. reference: name and version of what a ratio compares with, or of what a metric `reference_*` was
    measured on; None for a figure of our own."""

    variant: str
    metric: str
    value: float | None
    unit: str
    reference: str | None = None


@dataclass
class Result:
    """Rows, what makes them worthless (two variants that did different work; it fails the command), and what else
    belongs to the environment."""

    rows: list[Row]
    faults: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def own(what: str) -> str:
    """Name and version of a reference that is ours."""
    revision, _, changes = git_revision().partition("+")
    return f"drafthouse {revision[:12]}{'+changes' if changes else ''} {what}"


def ratio_rows(variant: str, ours: Sequence[float], theirs: Sequence[float], reference: str) -> list[Row]:
    """Ours over the reference: rates of the same turns, so that a change of the machine meets both.

    `ratio` is the median over turns of their ratio, `ratio_min` and `ratio_max` the smallest and largest.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    found = {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return [Row(variant, metric, value, "x", reference) for metric, value in found.items()]


def time_rows(variant: str, ours: Sequence[float], theirs: Sequence[float], reference: str) -> list[Row]:
    """Ratio and median milliseconds of two ways to do the same work, from their seconds in the same turns."""
    return [*ratio_rows(variant, [1 / s for s in ours], [1 / s for s in theirs], reference),
            Row(variant, "ms", statistics.median(ours) * 1e3, "ms"),
            Row(variant, "reference_ms", statistics.median(theirs) * 1e3, "ms", reference)]


def bench_folder(recipe: Recipe) -> Path:
    """runs/bench/, created."""
    folder = Path(recipe.runs_dir) / "bench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the measurements' folder: {error.strerror}") from None
    return folder


def environment(recipe: Recipe) -> dict[str, Any]:
    """Versions, machine, load and thread settings of this moment."""
    return stamp(asdict(recipe)) | {
        "threads": torch.get_num_threads(), "load": os.getloadavg(),
        "settings": {name: os.environ.get(name, "unset") for name in SETTINGS},
        "target": {"model": recipe.target.model, "dtype": recipe.target.dtype, "device": recipe.target.device},
    }


def write(folder: Path, name: str, rows: list[Row], surroundings: dict[str, Any]) -> Path:
    """NAME.json, the list of rows, and NAME.env.json beside it. Returns the first."""
    write_json(folder / f"{name}.env.json", surroundings)
    write_json(folder / f"{name}.json", [asdict(row) for row in rows])
    return folder / f"{name}.json"


def lines(rows: list[Row]) -> list[str]:
    """The rows as a table of plain text."""
    cells = [[row.variant, row.metric, number(row.value), row.unit, row.reference or ""] for row in rows]
    widths = [max((len(line[column]) for line in cells), default=0) for column in range(4)]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}} {d:<{widths[3]}}  {e}".rstrip()
            for a, b, c, d, e in cells]


def number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:.4g}"
