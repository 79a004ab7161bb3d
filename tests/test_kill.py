"""kill -9 at random moments of every stage, the same command again: the same numbers as without.

A moment is a file operation inside the runs folder (open for writing, rename, removal, new folder), counted by an
audit hook, so that kills fall where something can be half done and not into the imports.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny import write_prompts, write_recipe, write_target

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["data.collect", "train.run", "eval.ship", "eval.run"]
TEXTS = [f"tell me in a few simple words how one forecasts {thing} for the next day" for thing in
         ("rain", "snow", "wind", "fog", "hail", "frost", "dew", "mist", "ice", "heat")]
KILLED, TRIES = -9, 3
COUNTED = """
import importlib, os, signal, sys
folder, left, module = sys.argv[1], int(sys.argv[2]), sys.argv[3]
done = 0
def hook(event, args):
    global done
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")) and args and (
            str(args[0]).startswith(folder)):
        done += 1
        if done == left:
            os.kill(os.getpid(), signal.SIGKILL)
from recipes.cli import run
command = importlib.import_module(module).COMMAND
sys.addaudithook(hook)
try:
    run(command, sys.argv[4:])
finally:
    print("moments", done, file=sys.stderr)
"""


def recipe_in(folder: Path, model: Path) -> Path:
    """A run of seconds that has several units, shards, checkpoints and validations."""
    return write_recipe(
        folder / "r.yaml", model,
        prompts={"sources": [{"kind": "jsonl", "path": str(folder.parent / "train.jsonl")},
                             {"kind": "synthesis", "count": 4, "max_tokens": 40, "temperature": 1.5}], "validation": 3},
        generation={"max_tokens": 8, "batch_size": 4, "unit_rows": 4, "temperature": 1.0},
        trace={"layers": [1, 2, 3], "shard_mb": 1},
        train={"validate_every": 3, "save_every": 3, "batch_rows": 2, "epochs": 2.0},
        eval={"prompts": str(folder.parent / "eval.jsonl"), "max_tokens": 8, "lossless_prompts": 4, "speed_prompts": 2,
              "speed_tokens": 4, "batch_sizes": [], "sampling_contexts": 2, "sampling_draws": 20},
        export={"check_prompts": 2, "check_tokens": 6, "tolerance": 1.0})


def stage(module: str, recipe: Path, moment: int) -> subprocess.CompletedProcess:
    """One stage, killed at its file operation number `moment` (0: never)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "WANDB_", "DS_"))}
    return subprocess.run([sys.executable, "-c", COUNTED, str(recipe.parent / "runs"), str(moment), module,
                           "--config", str(recipe)], cwd=ROOT, capture_output=True, text=True,
                          env=environment | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})


def tensors(path: Path) -> dict[str, bytes]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}


def numbers(run: Path) -> dict:
    """Everything a run ends with, times and machine aside."""
    report = json.loads((run / "eval" / "report.json").read_text())
    untimed = ("acceptance", "tokens_per_target_pass", "target_passes", "repetition", "vocabulary_misses", "lossless",
               "prompts", "tokens", "drafts")
    blocks = {"total": report["total"], **report["sets"]}
    return {
        "report": {name: {k: block[k] for k in untimed if k in block} for name, block in blocks.items()},
        "settings": report["settings"], "drafter": report["drafter"],
        "curve": [{k: v for k, v in row.items() if k != "seconds"}
                  for row in json.loads((run / "checkpoints" / "curve.json").read_text())],
        "manifest": json.loads((run / "traces" / "manifest.json").read_text()),
        "tensors": {str(f.relative_to(run)): tensors(f) for part in ("traces", "export", "checkpoints")
                    for f in sorted((run / part).rglob("*.safetensors"))},
    }


@pytest.mark.slow
def test_killed_at_random_moments_of_every_stage_ends_with_the_same_numbers(tmp_path):
    """Up to three kills in each of trace, train, export and eval lose and change nothing (cases 16, 35)."""
    model = write_target(tmp_path / "model")
    write_prompts(tmp_path / "train.jsonl", TEXTS)
    write_prompts(tmp_path / "eval.jsonl", [text.replace("tell me", "say") for text in TEXTS[:5]])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    moments = {}
    for folder in (whole, killed):
        folder.mkdir()
        recipe_in(folder, model)
    for module in STAGES:
        done = stage(module, whole / "r.yaml", 0)
        assert done.returncode == 0, done.stderr
        moments[module] = int(done.stderr.split()[-1])
    chosen = random.Random(0)
    for module in STAGES:
        kills = 0
        for _ in range(TRIES):
            died = stage(module, killed / "r.yaml", chosen.randint(1, moments[module] * 3 // 5))
            assert died.returncode in (0, KILLED), died.stderr
            kills += died.returncode == KILLED
        assert kills, f"{module}: {moments[module]} moments"
        done = stage(module, killed / "r.yaml", 0)
        assert done.returncode == 0, done.stderr
    assert numbers(killed / "runs" / "tiny") == numbers(whole / "runs" / "tiny")
