"""Drafters of one recipe trained on the same traces for the same time, and evaluated alike: `make compare RECIPE=...`.

Every stage is the command that a user would type, run on a recipe of the drafter's own under runs/<name>/compare/, so
that each can be repeated alone. What is finished is found finished: the same command goes on after an interruption.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.batching import plan_for
from data.reader import open_rows
from drafters.checkpoint import TIMING
from drafters.registry import entry, options_of
from recipes.cli import run_folder
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_json, write_json, write_text, written
from recipes.launched import end_with_parent
from recipes.loader import dump_values, parse_into
from recipes.schema import Contender, Recipe

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ("-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1",
          "--mixed_precision", "no", "--dynamo_backend", "no")
SAVING = 60.0  # seconds that a stage has to save after SIGTERM
MOST_EPOCHS = 10_000  # that train.epochs takes
Stage = Callable[[list[str]], int]  # runs Python with these arguments; its exit code


@dataclass
class Entrant:
    """A drafter that takes part, its whole recipe and what its training took. `steps`, `seconds` 0: nothing is
    trained here, or it was trained before it was timed."""

    name: str
    recipe: Recipe
    steps: int = 0
    seconds: float = 0.0

    @property
    def trained(self) -> bool:
        return entry(self.recipe.drafter.kind).trained and not self.recipe.drafter.path

    @property
    def run(self) -> Path:
        return Path(self.recipe.runs_dir) / self.recipe.name

    @property
    def report(self) -> Path:
        return self.run / "eval" / "report.json"


def entrants(recipe: Recipe, where: str) -> list[Entrant]:
    """Those of `compare.drafters`. ConfigError naming the first whose name, kind or field is wrong."""
    found: list[Entrant] = []
    for number, one in enumerate(recipe.compare.drafters):
        place = f"{where}: compare.drafters[{number}]"
        if not one.name.isprintable() or not one.name or "/" in one.name:
            raise ConfigError(f"{place}.name = {one.name!r}: must be a part of a folder's name")
        if one.name in [other.name for other in found]:
            raise ConfigError(f"{place}.name = {one.name}: another drafter has it")
        options_of(one.kind, one.options)
        found.append(Entrant(one.name, own_recipe(recipe, one, place)))
    if len(found) < 2:
        raise ConfigError(f"{where}: compare.drafters names {len(found)}; name at least two, or give make compare the "
                          'reports: ARGS="A/report.json B/report.json"')
    return found


def own_recipe(recipe: Recipe, one: Contender, where: str) -> Recipe:
    """The recipe of one drafter: that of all, with what is its own."""
    values = asdict(recipe)
    del values["compare"]
    values |= {"name": f"{recipe.name}-{one.name}",
               "drafter": {"kind": one.kind, "options": one.options, "path": one.path},
               "train": values["train"] | one.train, "eval": values["eval"] | one.eval}
    return parse_into(Recipe, values, where)


def by_subprocess(arguments: list[str]) -> int:
    """A stage as a process of its own, whose output is this one's, and which ends with this one: a launcher passes no
    signal on, so all that the stage has started is told, and waited for while it saves."""
    stage = subprocess.Popen([sys.executable, *arguments], preexec_fn=end_with_parent, start_new_session=True)
    try:
        return stage.wait()
    except BaseException:
        end_group(stage.pid, signal.SIGTERM, SAVING)
        end_group(stage.pid, signal.SIGKILL, 0.0)
        raise


def end_group(group: int, number: int, seconds: float) -> None:
    """Sends a signal to every process of a group, and waits so long for all of them to end."""
    end = time.monotonic() + seconds
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(group, number)
        while time.monotonic() < end:
            with suppress(ChildProcessError):
                os.waitpid(group, os.WNOHANG)  # one that has ended stays in its group until it is asked for
            os.killpg(group, 0)
            time.sleep(0.05)


class Contest:
    """The whole comparison of a recipe. `stage` runs its stages, which are named by `say` as they begin."""

    def __init__(self, recipe: Recipe, where: str, stage: Stage = by_subprocess,
                 say: Callable[[str], None] = print) -> None:
        self.recipe, self.stage, self.say = recipe, stage, say
        self.entrants = entrants(recipe, where)
        self.run = run_folder(recipe)
        self.folder = self.run / "compare"

    def hold(self) -> list[Entrant]:
        """Traces once, then each drafter's training and evaluation. RunError where a stage fails."""
        with written(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.do("the traces of all", ["-m", "data.collect"], self.recipe, "traces")
        for one in self.entrants:
            if one.trained:
                self.train(one)
            self.do(f"{one.name}: evaluation", ["-m", "eval.run"], one.recipe, one.name)
        return self.entrants

    def train(self, one: Entrant) -> None:
        """Trains a drafter for its share of time. ConfigError where its run has other traces already."""
        share_traces(self.run / "traces", one.run / "traces")
        script = [*LAUNCH, str(ROOT / entry(one.recipe.drafter.kind).script)]
        if self.recipe.compare.minutes:
            one.recipe.train.epochs = self.epochs(one, script)
        self.do(f"{one.name}: training", script, one.recipe, one.name)
        found = timing(one.run)
        one.steps, one.seconds = found.get("steps", 0), found.get("seconds", 0.0)

    def epochs(self, one: Entrant, script: list[str]) -> float:
        """Passes over the traces that fit into `compare.minutes` of steps, by a short training of the same kind, which
        goes through all that depends on a run's progress. It is not timed again: a resumed run has the same length."""
        section, path = self.recipe.compare, self.folder / f"{one.name}.json"
        key = sha256_json([asdict(one.recipe.drafter), asdict(one.recipe.train), asdict(section) | {"drafters": []}])
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if known.get("key") == key:
            return known["epochs"]
        train, rows = one.recipe.train, open_rows(one.recipe.trace, one.run)
        in_epoch = plan_for(rows, train.batch_rows, 1, train.accumulation, train.seed).steps_per_epoch
        probe = parse_into(Recipe, asdict(one.recipe) | {"name": f"{one.recipe.name}-probe"}, "compare")
        probe.train.epochs, probe.train.tracker = section.probe_steps / in_epoch, "none"
        probe.train.warmup_steps = min(train.warmup_steps, section.probe_steps - 1)
        probe_run = one.run.with_name(probe.name)
        share_traces(self.run / "traces", probe_run / "traces")
        self.do(f"{one.name}: {section.probe_steps} steps, to time them", script, probe, f"{one.name}-probe")
        found = timing(probe_run)
        if not found.get("first"):
            raise RunError(f"{probe_run}: was trained before it was timed; delete this folder and run again")
        each = (found["seconds"] - found["first"]) / (found["steps"] - 1)  # the first one makes room and compiles
        steps = max(1, int(min(60 * section.minutes / each, MOST_EPOCHS * in_epoch)))
        write_json(path, {"key": key, "epochs": steps / in_epoch, "steps": steps, "seconds_a_step": each})
        return steps / in_epoch

    def do(self, what: str, command: list[str], recipe: Recipe, name: str) -> None:
        """Runs a stage on a recipe, which is written to compare/<name>.yaml first. RunError where it fails."""
        path = self.folder / f"{name}.yaml"
        values = asdict(recipe)
        del values["compare"]
        write_text(path, dump_values(values))
        self.say(f"compare: {what}")
        code = self.stage([*command, "--config", str(path)])
        if code < 0 or code in (130, 143):
            raise RunError(f"{what}: stopped; run the same command again to go on")
        if code:
            raise RunError(f"{what} failed with exit code {code} (its recipe: {path}); mend what it says above and run "
                           "the same command again to go on")


def timing(run: Path) -> dict[str, float]:
    """Optimizer steps of a training and the seconds inside them; empty where they were not noted."""
    path = run / "checkpoints" / TIMING
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def share_traces(shared: Path, own: Path) -> None:
    """Makes the traces of one run another's too, by a link. ConfigError where that one has others."""
    if own.is_symlink() or own.exists():
        if own.resolve() != shared.resolve():
            raise ConfigError(f"{own}: this run has traces of its own; delete it, or name the comparison otherwise")
        return
    with written(own.parent):
        own.parent.mkdir(parents=True, exist_ok=True)
        own.symlink_to(os.path.relpath(shared.resolve(), own.parent.resolve()), target_is_directory=True)


def table(found: list[Entrant], reports: list[dict[str, Any]], price: float) -> list[dict[str, Any]]:
    """What the comparison's page says of each drafter beside its acceptance. price: of an hour of this machine, 0: not
    known; then no cost is given."""
    rows = []
    for one, report in zip(found, reports, strict=True):
        total, drafter = report["total"], report["drafter"]
        batches = {str(row["batch"]): {"speedup": row["speedup"], "tok_s": row["speculative_tok_s"],
                                       "plain_tok_s": row["baseline_tok_s"],
                                       "cost": price / 3600 / row["speculative_tok_s"] * 1e6 if price else None}
                   for row in total["speed"]["by_batch"]}
        rows.append({"name": one.name, "kind": drafter["kind"], "parameters": drafter["parameters"],
                     "steps": one.steps, "seconds": one.seconds,
                     "tokens_per_target_pass": total["tokens_per_target_pass"],
                     "mismatches": total["lossless"]["greedy"]["mismatches"],
                     "peak_bytes": total["memory"]["peak_bytes"], "speedup_ci95": total["speed"]["ci95"],
                     "batches": batches})
    return rows


def choices(rows: list[dict[str, Any]], differs: Callable[[int, int], bool]) -> list[dict[str, Any]]:
    """Which drafter to take at each batch size that all were timed at, and why. differs(i, j): whether the speedups of
    two at batch 1 are told apart."""
    common = [size for size in rows[0]["batches"] if all(size in row["batches"] for row in rows)]
    found = []
    for size in sorted(common, key=int):
        order = sorted(range(len(rows)), key=lambda i: -rows[i]["batches"][size]["speedup"])
        first, second = order[0], order[1]
        best, speedup = rows[first]["name"], rows[first]["batches"][size]["speedup"]
        if speedup <= 1:
            best, why = "none", f"plain decoding is faster than every drafter ({rows[first]['name']} {speedup:.2f})"
        elif size != "1":
            why = "measured once, without an interval"
        elif rows[first]["speedup_ci95"][0] <= 1:
            why = "not told apart from plain decoding"
        elif differs(first, second):
            why = f"told apart from {rows[second]['name']}, the next"
        else:
            why = f"not told apart from {rows[second]['name']}, the next"
        found.append({"batch": int(size), "best": best, "speedup": speedup, "why": why})
    return found
