"""A calibrated engine of known constants, a recipe, an acceptance: what tests of `make roi ARGS=plan` share."""

import json
import shutil
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from tiny import call

from eval import roi, roi_plan, roi_worth
from eval.roi_accepted import Acceptance
from eval.roi_files import Calibration, Steps, Timed, calibrate
from eval.roi_plan import Method, Planner
from recipes.schema import Roi
from recipes.speculation import Constants, Step, step_seconds

TRUE = Constants(0.7, 0.45, 20.0, 10.0, 1200.0, 400.0, 12.0, 0.8, 1.0)
MODEL = "llama-3.1-8b"
RATES = [0.75, 0.55, 0.4, 0.3, 0.22]
GRID = ((8, 0), (8, 2), (8, 5), (64, 5), (128, 0))


def steps(*grid: tuple[int, int], **changes) -> Steps:
    """What an engine with the constants TRUE would measure on an H100, without prefill."""
    empty = Steps(engine={"name": "engine", "version": "1"}, hardware={"name": "h100-sxm"}, target={"model": MODEL},
                  drafter={"kind": "eagle3"})
    place, draft = empty.place(), empty.draft()
    points = [Timed("step", rows, K, 0, 640.0, 1e3 * step_seconds(draft, place, TRUE, Step(rows, K, 640.0)))
              for rows, K in grid]
    return replace(empty, points=points, **changes)


def acceptance(**changes) -> dict:
    own = Acceptance(name="ours", per_position=RATES, context=[0.0, 4096.0], target=MODEL, weight_bits=16.0,
                     relative_sd=0.02)
    return asdict(own) | changes


@cache
def calibration(grid: tuple[tuple[int, int], ...]) -> Calibration:
    return calibrate(steps(*grid))


def planner(*grid: tuple[int, int], measured: Steps | None = None, **section) -> Planner:
    """The planner of this traffic on an H100, from steps at GRID where none are named."""
    found = calibrate(measured) if measured else calibration(grid or GRID)
    return Planner(Roi(model=MODEL, **section), found, found.steps.place(), 80e9)


def method(made: Planner, **changes) -> Method:
    own = Acceptance(**acceptance(**changes))
    return Method(own.name, made.calibration.steps.draft(), own)


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory):
    """A recipe, steps.json and the acceptance of one drafter, calibrated."""
    folder = tmp_path_factory.mktemp("calibrated")
    values = {"name": "w", "runs_dir": "runs",
              "roi": {"model": MODEL, "price_per_gpu_hour": 2.0, "demand_tok_s": 30000.0, "slo_ms": 30.0,
                      "training_gpu_hours": 48.0}}
    (folder / "r.yaml").write_text(yaml.safe_dump(values))
    (folder / "steps.json").write_text(json.dumps(asdict(steps(*GRID))))
    (folder / "ours.json").write_text(json.dumps(acceptance()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call(roi.COMMAND, folder / "r.yaml", "calibrate", "--steps", "steps.json") == 0
    return folder


@pytest.fixture
def world(calibrated, tmp_path, monkeypatch, request):
    """A copy of it, as the current folder. The page is drawn only for tests with `page` in their name, and intervals
    come from fewer draws than a plan takes."""
    folder = shutil.copytree(calibrated, tmp_path / "world")
    monkeypatch.chdir(folder)
    for module in (roi_plan, roi_worth):
        monkeypatch.setattr(module, "DRAWS", 40)
    if "page" not in request.node.name:
        monkeypatch.setattr(roi.roi_page, "render", lambda plan: "")
    return folder


def planned(world: Path, *argv: str, name: str = "ours.json") -> int:
    return call(roi.COMMAND, world / "r.yaml", "plan", "--reports", str(world / name), *argv)


def found(world: Path) -> dict:
    return json.loads((world / "runs" / "w" / "roi" / "roi.json").read_text())
