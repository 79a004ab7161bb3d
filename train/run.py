"""`make train`: trains any registered drafter on a finished trace store.

    accelerate launch [--config_file F] train/run.py --config RECIPE
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any

from accelerate import Accelerator

from data.batching import plan_for
from data.reader import RowReader, open_rows, with_states
from data.remoterows import RemoteRows
from data.settings import check_recipe
from data.store import TraceReader
from drafters.checkpoint import TIMING
from drafters.initial import begin
from drafters.placement import on_one_process
from drafters.registry import check_taps, options_of, require_training
from drafters.target import Target
from drafters.tensor_parallel import ShardedTarget
from eval.plans import check_longest
from recipes.cli import Command, process, run_folder, write_resolved
from recipes.errors import ConfigError
from recipes.files import alone, write_json, written
from recipes.provenance import stamp
from recipes.schema import Recipe
from train import optim
from train.checkpoints import Progress, together
from train.launch import start
from train.loop import Trainer


def check_target(reader: RowReader, target: Target) -> None:
    """ConfigError where the traces are of another target (case 36)."""
    for part, value in target.fingerprint().items():
        if reader.manifest["target"].get(part) != value:
            raise ConfigError(f"{reader.folder}: traced from {reader.manifest['model']}, whose {part} differs from "
                              "this target's; run `make trace` under another name")


def check_traces(reader: RowReader, target: Target, layers: list[int]) -> None:
    """ConfigError where the traces are of another target or of other layers (cases 36, 04)."""
    check_target(reader, target)
    if reader.manifest["layers"] != layers:
        raise ConfigError(f"{reader.folder}: traced layers {reader.manifest['layers']}, the recipe wants {layers}")


def check_rows(rows: TraceReader | RemoteRows, recipe: Recipe) -> None:
    """ConfigError where a stored row is longer than the recipe allows (case 49), or where validation rows do not reach
    as far beyond their end as the recipe's drafts do."""
    longest = max(map(rows.tokens, range(len(rows))))
    if longest > recipe.trace.max_length:
        raise ConfigError(f"trace.max_length = {recipe.trace.max_length}: {rows.folder} holds a row of {longest} "
                          f"tokens; set it to {longest} or more, or run `make trace` under another name")
    reach = min(map(rows.overrun, rows.split("validation")), default=None)
    if reach is not None and reach < recipe.train.validation_draft_length:
        raise ConfigError(f"train.validation_draft_length = {recipe.train.validation_draft_length}: {rows.folder} was "
                          f"traced for {reach}; set it to {reach} or less, or run `make trace` under another name")


def check_user_turns(reader: RowReader, wanted: bool) -> None:
    """ConfigError where the recipe learns from user turns and the traces mark none."""
    manifest = reader.manifest  # one from before others' turns could be marked counts the target's own
    if wanted and manifest.get("user_turn_tokens", manifest.get("own_prompt_tokens")) == 0:
        raise ConfigError(f"train.user_turns = true: {reader.folder} marks no user turn; set it to false, or trace "
                          "with a prompt source of kind synthesis, or with trace.user_turns: all")


def track(accelerator: Accelerator, recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Starts the tracker; wandb stays offline without a key. A resumed run continues the tracker's run, whose id is in
    every checkpoint; a new run gets a new id, so that it never writes into another one of the same name."""
    if recipe.train.tracker == "none":
        return
    progress.tracker_id = progress.tracker_id or token_hex(4)
    keyed = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    settings = {"wandb": {"name": recipe.name, "id": progress.tracker_id, "resume": "allow", "dir": str(folder),
                          "mode": os.environ.get("WANDB_MODE", keyed), "settings": {"silent": True}}}
    accelerator.init_trackers("drafthouse", config=flat(asdict(recipe)), init_kwargs=settings)


def open_target(recipe: Recipe, ranks: int) -> Target:
    """The frozen target: a process's own, or, where it computes in training and `target.tp_plan` says so, one whose
    layers all processes share. Raises ConfigError as Target does."""
    if recipe.target.tp_plan and ranks > 1 and recipe.trace.mode != "store":
        return ShardedTarget(recipe.target, recipe.trace.layers)
    return Target(on_one_process(recipe.target), recipe.trace.layers)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping to dotted names with plain values, as trackers want them."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return out


@contextmanager
def at_work(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Holds the checkpoints' folder for this run: another one ends with all its processes before it changes anything,
    also not in the run's cache. A folder that gets no checkpoint goes with it."""
    held = ExitStack()

    def take() -> None:
        with written(folder):
            folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(alone(folder))

    try:
        with held:
            together(accelerator, take)
            yield
    finally:
        if accelerator.is_main_process:
            with suppress(OSError):  # not empty
                folder.rmdir()


def record(recipe: Recipe, folder: Path, resumed: bool, finished: bool) -> None:
    """The accepted recipe, and of a run that begins when and with what it did."""
    write_resolved(recipe)
    path = folder / "provenance.json"
    if not resumed or not (finished or path.exists()):
        write_json(path, stamp(asdict(recipe)))


def main(recipe: Recipe, switches: set[str]) -> None:
    require_training(recipe.drafter.kind)
    check_taps(recipe.drafter.kind, recipe.trace.layers)
    options_of(recipe.drafter.kind, recipe.drafter.options)  # a wrong one is named before the target is loaded
    accelerator = start(recipe.train, None if recipe.train.tracker == "none" else recipe.train.tracker)
    optim.check(recipe.train, accelerator.distributed_type)
    folder = run_folder(recipe)
    with at_work(accelerator, folder / "checkpoints"):
        work(recipe, accelerator, folder)


def work(recipe: Recipe, accelerator: Accelerator, folder: Path) -> None:
    """The whole run, from its traces to its last checkpoint; `folder`: runs/<name>, which is this run's alone."""
    rows = open_rows(recipe.trace, folder)
    target = open_target(recipe, accelerator.num_processes)
    check_traces(rows, target, target.layers)
    check_rows(rows, recipe)
    check_recipe(rows.folder, recipe, target.layers)
    check_user_turns(rows, recipe.train.user_turns)
    reader = with_states(rows, recipe.trace, folder, target)
    counts = {int(t): n for t, n in reader.manifest["draft_vocabulary_counts"].items()}
    begun = begin(recipe.drafter, target, counts, recipe.train.seed)
    check_longest(recipe.train.validation_draft_length, begun.drafter, "train.validation_draft_length")
    for note in begun.notes:
        accelerator.print(note)
    origin = {"model": recipe.target.model, "fingerprint": target.fingerprint()}
    del target
    plan = plan_for(reader, recipe.train.batch_rows, accelerator.num_processes, recipe.train.accumulation,
                    recipe.train.seed, recipe.train.shuffle_shards)
    # A resume may change what the weights do not depend on; of the batch's split only the product counts.
    harmless = ("tracker", "log_every", "save_every", "keep", "batch_rows", "accumulation", "peak_tflops")
    trained = {key: value for key, value in asdict(recipe.train).items() if key not in harmless}
    settings = {"train": trained, "drafter": asdict(begun.options), "traces": reader.manifest["key"]}
    if begun.origin:
        settings["init_from"] = begun.origin
    trainer = Trainer(accelerator, begun.drafter, reader, plan, recipe.train, folder / "checkpoints", origin, settings)
    if trainer.total <= recipe.train.warmup_steps:
        reached = trainer.total / recipe.train.warmup_steps
        accelerator.print(f"train.warmup_steps = {recipe.train.warmup_steps}: this run has {trainer.total} steps, so "
                          f"its rate still rises at the end, at {reached:.0%} of train.lr; set fewer", file=sys.stderr)
    resumed = trainer.resume()
    finished = trainer.progress.step >= trainer.total
    together(accelerator, lambda: record(recipe, folder, resumed, finished))
    if not finished:  # the trackers' servers would show a run without any step
        track(accelerator, recipe, folder, trainer.progress)
    trainer.run()
    accelerator.end_training()
    if accelerator.is_main_process:
        progress = trainer.progress
        write_json(folder / "checkpoints" / "curve.json", progress.curve)
        if trainer.steps:
            write_json(folder / "checkpoints" / TIMING,
                       {"steps": trainer.steps, "seconds": trainer.seconds, "first": trainer.first})
        print(f"trained: {progress.step} steps, {progress.tokens} tokens, {progress.skipped} steps without loss; "
              f"best replayed acceptance length {progress.best_length:.3f} at step {progress.best_step}"
              + (f", {progress.curve[0]['mean_length']:.3f} before the first" if begun.origin else ""))


COMMAND = Command("make train", "Trains a drafter on collected traces.", main)

if __name__ == "__main__":
    process(COMMAND)
