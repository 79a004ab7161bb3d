"""Seconds of training until a drafter reaches a mean acceptance length: ours and peers on the same stored traces.

Every training is a unit of its own with a result in runs/bench/time_to_quality/: units that are done are not run
again, so that hours of work can be cut into stages. All train on the same rows in the same batches and order with the
same schedule of rates; each peer has its own architecture, optimizer, loss and first weights. Checkpoints are judged
by the replay of our decoding loop over conversations that were held out; only the time inside steps counts.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from safetensors.torch import load_file, save_file

from bench.material import float32_traces
from bench.quality_rows import Outcome, Unit, quality_rows, units
from bench.rows import Result, bench_folder
from bench.sides import OWN, Peers, Side, interpreters, opened, python_of
from bench.step_cases import TAPS, Tables, compared, dense, differing, entropies, favourites, write_tables
from bench.step_cases import case as case_of
from bench.trained import Judged, answered, conversation
from bench.turns import CPU
from data.batching import Plan, collate, with_user_turns
from data.console import console
from data.prompts import hold_out
from data.store import TraceReader, TraceRow
from drafters import eagle3, eagle3_build
from drafters.base import Batch
from drafters.layers import RMSNorm
from drafters.registry import options_of
from drafters.target import Target
from eval.replay import replay
from recipes.errors import ConfigError, RunError
from recipes.files import write_json
from recipes.provenance import difference
from recipes.schema import NonNegativeInt, PositiveInt, Recipe, opt
from train.schedule import share_of_peak

TOLERANCE = 1e-3  # of the losses by which a peer's weights are checked in our drafter
# What the peers' own architecture is in our drafter's options; `tap_norm` (see NormedTaps) comes on top.
STYLES = {"speculators": {"feedback": "post_norm", "norm_before_residual": True}, "specforge": {}}


@dataclass
class Options(Peers):
    compile: bool = opt(False, "specforge: let it compile what it marks for it; compiling counts as training")
    length: PositiveFloat = opt(1.6, "mean acceptance length that is to be reached")
    depths: list[PositiveInt] = opt([3, 7], "unrolled steps K, each a training")
    own_lrs: list[PositiveFloat] = opt([], "peak learning rates of ours; the best counts; empty: the recipe's alone")
    peer_lrs: list[PositiveFloat] = opt([3e-4, 1e-3, 3e-3], "peak learning rates of the peers; the best counts")
    peer_optimizer: Literal["adamw", "own"] = opt(
        "adamw", "own: what speculators trains with by default, Muon for its matrices; it orthogonalises them in "
                 "bfloat16, which a CPU without such products takes half a minute for; specforge has AdamW only")
    judges: PositiveInt = opt(60, "conversations of the training split that are held out and judge")
    judge_every: PositiveInt = opt(50, "optimizer steps between checkpoints that are judged")
    max_seconds: PositiveFloat = opt(3600.0, "seconds of training after which a unit gives up")
    units: NonNegativeInt = opt(0, "units to run this time, at most; 0 is all that are left")


class NormedTaps:
    """A reader whose taps went through one norm over all of them, which speculators has and our drafter has not."""

    def __init__(self, reader: Any, norm: RMSNorm) -> None:
        self.reader, self.norm = reader, norm

    def __getitem__(self, index: int) -> TraceRow:
        row = self.reader[index]
        return replace(row, taps=self.norm(row.taps.float()))


def training_case(rows: list[TraceRow], user_turns: bool) -> dict[str, torch.Tensor]:
    """A batch of conversations as bench/peers/serving.py describes it.

    To the peers every supervised token counts; their masks leave out those where the traces have no teacher: the
    state behind a turn's last token is not stored.
    """
    batch = collate(rows)
    turns = with_user_turns(batch.turns[0]) if user_turns else batch.turns[0]
    taught = (batch.final[0] != 0).any(-1)
    mask = turns > 0
    return {"ids": batch.ids[0], "turns": turns.clamp_min(0), "starts": batch.starts[0], "taps": batch.taps[0],
            "final": batch.final[0], "mask.speculators": mask & taught,
            "mask.specforge": mask & taught.roll(-1).index_fill(0, torch.tensor([len(mask) - 1]), False)}


class Traces:
    """The rows that all train on, in batches, and those that judge."""

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.reader, self.K = float32_traces(recipe), recipe.train.validation_draft_length
        manifest, section = self.reader.manifest, recipe.train
        if recipe.generation.temperature > 0 or manifest.get("off_policy"):
            raise ConfigError(f"{self.reader.folder}: a replay judges by the target's greedy answers; these are "
                              "sampled or given")
        if len(manifest["layers"]) != TAPS:
            raise ConfigError(f"{self.reader.folder}: holds {len(manifest['layers'])} taps; the peers need {TAPS}")
        self.rows, self.judges = split(self.reader, options.judges, self.K)
        self.plan = Plan(tuple(self.rows), tuple(map(self.reader.tokens, self.rows)), section.batch_rows, 1,
                         section.accumulation, section.seed, tuple(map(self.reader.shard, self.rows)),
                         section.shuffle_shards)
        self.user_turns = section.user_turns

    def batches(self, epochs: float) -> Iterator[dict[str, torch.Tensor]]:
        """One case an optimizer step: the rows of all its micro-batches."""
        for step in range(self.plan.total_steps(epochs)):
            rows = sorted(i for part in self.plan.micro_batches(step, 0) for i in part)
            yield training_case([self.reader[i] for i in rows], self.user_turns)


def split(reader: TraceReader, judges: int, K: int) -> tuple[list[int], list[int]]:
    """(training rows, judging rows) of the training split, whole conversations apart. RunError where one is empty."""
    ids = {reader.places[i].listed["id"]: i for i in reader.split("train")}
    chosen = hold_out(sorted({conversation(name) for name in ids}), judges, "judges")
    judging = sorted(i for name, i in ids.items() if conversation(name) in chosen and answered(reader[i]) > K)
    rows = [i for name, i in ids.items() if conversation(name) not in chosen]
    if not rows or not judging:
        raise RunError(f"{reader.folder}: {len(ids)} training rows are too few for time_to_quality.judges = {judges}")
    return rows, judging


class Trainings:
    """Runs units, and judges what they save."""

    def __init__(self, recipe: Recipe, options: Options, traces: Traces, folder: Path) -> None:
        self.recipe, self.options, self.traces, self.folder = recipe, options, traces, folder
        target = Target(recipe.target, traces.reader.manifest["layers"])
        counts = {int(t): n for t, n in traces.reader.manifest["draft_vocabulary_counts"].items()}
        self.drafters = {start: eagle3_build.build(self.own(3, start), target, counts, recipe.train.seed)
                         for start in ("random", "target_layer")}
        drafter = self.drafters["random"]
        self.shape, self.layers = drafter.shape, drafter.tapped
        self.tables = Tables(target.embedding.clone(), target.head_weight.clone(), drafter.draft_ids)

    def own(self, depth: int, start: str) -> eagle3.Options:
        """The recipe's drafter with this depth."""
        return replace(options_of("eagle3", self.recipe.drafter.options), depth=depth, start=start)

    def settings(self, unit: Unit) -> dict[str, Any]:
        """What a unit's result depends on."""
        o = self.options
        theirs = {} if unit.side == OWN else {"optimizer": o.peer_optimizer}
        return {"unit": asdict(unit), "train": asdict(self.recipe.train), "drafter": self.recipe.drafter.options,
                "traces": self.traces.reader.manifest["key"], "judges": self.traces.judges, "length": o.length,
                "judge_every": o.judge_every, "max_seconds": o.max_seconds, "compile": o.compile,
                "threads": torch.get_num_threads(), **theirs}

    def opening(self, unit: Unit, tables: Path) -> dict[str, Any]:
        options = asdict(self.own(unit.depth, unit.start)) if unit.side == OWN else {}
        return {"tables": str(tables), "threads": torch.get_num_threads(), "seed": self.recipe.train.seed,
                "shape": asdict(self.shape), "depth": unit.depth, "compile": self.options.compile, "style": "own",
                "optimizer": self.options.peer_optimizer, "options": options, "layers": self.layers,
                "train": asdict(self.recipe.train)}

    def run(self, unit: Unit, python: str) -> Outcome:
        """Trains until the length is reached, the time is over or the schedule ends."""
        with TemporaryDirectory(prefix=".unit-", dir=self.folder) as name:
            folder = Path(name)
            weights = self.drafters[unit.start].state_dict() if unit.side == OWN else {}
            write_tables(folder / "tables.safetensors", self.tables, weights)
            with opened(unit.side, python, self.opening(unit, folder / "tables.safetensors")) as side:
                return Outcome(side.reference, list(self.checkpoints(unit, side, folder)))

    def checkpoints(self, unit: Unit, side: Side, folder: Path) -> Iterator[tuple[int, float, float]]:
        section, options = self.recipe.train, self.options
        total, seconds = self.traces.plan.total_steps(section.epochs), 0.0
        if unit.side != OWN:
            self.check(unit, side, folder)
        yield 0, 0.0, self.judged(unit, side, folder, f"before any of {total} steps")
        for step, case in enumerate(self.traces.batches(section.epochs)):
            save_file(case, folder / "case.safetensors")
            rate = unit.lr * share_of_peak(section.schedule, step, total, section.warmup_steps, section.min_lr_share,
                                           section.decay_share)
            seconds += sum(side.ask("forward_backward", "optimizer", do="step", case=str(folder / "case.safetensors"),
                                    lr=rate, options={"progress": step / total, "seed": section.seed + step}))
            over = step + 1 == total or seconds >= options.max_seconds
            if over or (step + 1) % options.judge_every == 0:
                length = self.judged(unit, side, folder, f"step {step + 1} of {total}, {seconds:.0f} s")
                yield step + 1, seconds, length
                if over or length >= options.length:
                    return

    def judged(self, unit: Unit, side: Side, folder: Path, when: str) -> float:
        """Mean acceptance length of the side as it is now."""
        side.ask(do="save", path=str(folder / "saved.safetensors"))
        length = self.judge(unit, load_file(folder / "saved.safetensors"))
        console.print(f"{unit.name}: {when}: length {length:.3f}", highlight=False, soft_wrap=True)
        return length

    def reading(self, unit: Unit, tensors: dict[str, torch.Tensor]) -> tuple[eagle3.Eagle3, RMSNorm | None]:
        """Our own drafter with saved weights, and the norm that its taps go through before it, if any."""
        options = self.own(unit.depth, "random")
        if unit.side != OWN:
            options = eagle3.Options(draft_vocab_size=options.draft_vocab_size, depth=unit.depth,
                                     intermediate_size=options.intermediate_size, **STYLES[unit.side])
        drafter = eagle3.Eagle3(options, self.shape, self.layers, self.tables.ids, self.tables.embedding,
                                self.tables.head)
        weight, norm = tensors.pop("tap_norm.weight", None), None
        if weight is not None:
            norm = RMSNorm(len(weight), self.shape.rms_norm_eps).requires_grad_(False)
            norm.weight.copy_(weight)
        try:
            drafter.load_state_dict(tensors)
        except RuntimeError as error:
            raise RunError(f"{unit.side}: its weights are not those of an EAGLE-3 drafter: {error}") from None
        return drafter, norm

    def judge(self, unit: Unit, tensors: dict[str, torch.Tensor]) -> float:
        """Mean acceptance length of saved weights, replayed."""
        drafter, norm = self.reading(unit, tensors)
        reader: Any = Judged(self.traces.reader, self.traces.K)
        if norm is not None:
            reader = NormedTaps(reader, norm)
        return replay(drafter, reader, self.traces.judges, self.traces.K, CPU, torch.float32).mean_length

    @torch.no_grad()
    def check(self, unit: Unit, side: Side, folder: Path) -> None:
        """RunError where a peer's weights give another loss in our drafter than in its own: it would be misjudged."""
        tokens = 4 * (unit.depth + 2)
        one = compared(case_of(dense(tokens), self.shape, 0) | {"final": favourites(self.tables, tokens)})
        save_file(one, folder / "compared.safetensors")
        theirs, = side.ask("losses", do="losses", case=str(folder / "compared.safetensors"))
        side.ask(do="save", path=str(folder / "saved.safetensors"))
        drafter, norm = self.reading(unit, load_file(folder / "saved.safetensors"))
        one["taps"] = one["taps"] if norm is None else norm(one["taps"])
        out = drafter(Batch(**{field.name: one[field.name][None] for field in fields(Batch)}))
        wrong = differing(unit.side, theirs, (out.depth_loss / out.depth_count).tolist(),
                          entropies(one, self.tables, unit.depth), TOLERANCE)
        if wrong:
            raise RunError(f"{side.reference}: its weights give another loss in our drafter ({wrong[0]}), which so "
                           "cannot judge it")


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only time_to_quality"`, of the units that are done. `repeats` has no meaning here.

    Raises ConfigError where no peer is given or the recipe trains another drafter, RunError where a peer dies or the
    traces do not serve.
    """
    found = interpreters("time_to_quality", options.pythons)
    if recipe.drafter.kind != "eagle3":
        raise ConfigError(f"drafter.kind = {recipe.drafter.kind!r}: the peers train eagle3")
    folder = bench_folder(recipe) / "time_to_quality"
    folder.mkdir(exist_ok=True)
    trainings = Trainings(recipe, options, Traces(recipe, options), folder)
    outcomes: dict[Unit, Outcome] = {}
    left, ran = [], 0
    own_lrs = options.own_lrs or [recipe.train.lr]
    for unit in units(list(found), options.depths, own_lrs, options.peer_lrs):
        path, settings = folder / f"{unit.name}.json", trainings.settings(unit)
        outcome = finished(path, settings)
        if outcome is None and options.units and ran == options.units:
            left.append(unit.name)
            continue
        if outcome is None:
            outcome, ran = trainings.run(unit, python_of(unit.side, found)), ran + 1
            write_json(path, {"settings": settings, **asdict(outcome)})
        outcomes[unit] = outcome
    if left:
        console.print(f"{len(left)} units are left; run the same command again to go on", soft_wrap=True)
    rows = quality_rows(outcomes, options.depths, len(own_lrs), len(options.peer_lrs), options.length)
    return Result(rows, notes={"left": left, "judges": len(trainings.traces.judges)})


def finished(path: Path, settings: dict[str, Any]) -> Outcome | None:
    """The result of a unit that has run with these settings."""
    if not path.exists():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    changed = difference(stored["settings"], json.loads(json.dumps(settings)))
    if changed:
        console.print(f"{path}: {changed}; this unit is run again", highlight=False, soft_wrap=True)
        return None
    return Outcome(stored["reference"], [tuple(point) for point in stored["curve"]])
