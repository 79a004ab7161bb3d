"""What each storage dtype costs in acceptance after training, on the traces of a run that stored float32.

One drafter a dtype, trained by the recipe's own settings on the same rows in the same order from the same first
weights; only the states that it reads went through that dtype. All are judged on the same conversations in full
precision, held out of the training rows, by replayed acceptance and by their loss at the first position.
"""

from dataclasses import dataclass, replace

import torch

from bench.material import float32_traces
from bench.precision import Decoded
from bench.rows import Result, Row
from data.batching import Plan, collate
from data.codec import DTYPES
from data.prompts import hold_out
from data.store import TraceReader, TraceRow
from drafters.registry import entry, options_of
from drafters.target import Target
from eval.metrics import Acceptance
from eval.replay import replay
from recipes.errors import ConfigError, RunError
from recipes.schema import NonNegativeInt, PositiveInt, Recipe, opt
from train.launch import start
from train.loop import Trainer


@dataclass
class Options:
    rows: NonNegativeInt = opt(0, "rows that are trained on; 0 is all training rows but the judges")
    judges: PositiveInt = opt(100, "conversations of the training split that are held out and judge")
    epochs: float = opt(0.0, "passes over the rows; 0 is train.epochs")
    dtypes: list[str] = opt(list(DTYPES), f"storage dtypes: {', '.join(DTYPES)}")


class Judged:
    """Rows whose last K answer tokens are taken off to be the overrun that a replay compares its last drafts with."""

    def __init__(self, reader: TraceReader, K: int) -> None:
        self.reader, self.K = reader, K

    def __getitem__(self, index: int) -> TraceRow:
        row, K = self.reader[index], self.K
        turns = row.turns[:-K]
        return replace(row, ids=row.ids[:-K], turns=turns, taps=row.taps[:-K], final=row.final[:-K],
                       tail=row.ids[-K:].tolist())


def answered(row: TraceRow) -> int:
    """Answer tokens of a row."""
    return int((row.turns > 0).sum())


def conversation(name: str) -> str:
    """The prompt that a row belongs to."""
    return name.partition("/")[0]


@torch.no_grad()
def judge(trainer: Trainer, judged: Judged, rows: list[int], K: int) -> tuple[Acceptance, float]:
    """Replayed acceptance, and the mean loss (nats) at the first position."""
    device, dtype = trainer.accelerator.device, trainer.dtype
    loss = positions = 0.0
    with trainer.precision():
        accepted = replay(trainer.drafter, judged, rows, K, device, dtype)
        trainer.drafter.eval()
        for row in rows:
            out = trainer.drafter(collate([judged[row]]).to(device, dtype))
            loss, positions = loss + float(out.depth_loss[0]), positions + float(out.depth_count[0])
    return accepted, loss / max(positions, 1)


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only trained"`; variants are the storage dtypes. `repeats` has no meaning here.

    Raises ConfigError for an unknown dtype or sampled answers, which a replay cannot judge by, RunError where the
    traces are not float32, hold given answers, or have too few rows.
    """
    unknown = [name for name in options.dtypes if name not in DTYPES]
    if unknown:
        raise ConfigError(f"trained.dtypes: {unknown[0]!r}: unknown; known: {', '.join(DTYPES)}")
    reader = float32_traces(recipe)
    if recipe.generation.temperature > 0 or reader.manifest.get("off_policy"):
        raise ConfigError(f"{reader.folder}: a replay judges by the target's greedy answers; these are sampled or "
                          "given")
    K, section = recipe.train.validation_draft_length, replace(recipe.train, tracker="none")
    ids = {reader.places[i].listed["id"]: i for i in reader.split("train")}
    chosen = hold_out(sorted({conversation(name) for name in ids}), options.judges, "judges")
    judges = sorted(i for name, i in ids.items() if conversation(name) in chosen and answered(reader[i]) > K)
    rows = [i for name, i in ids.items() if conversation(name) not in chosen]
    rows = rows[: options.rows or len(rows)]
    if not rows or not judges:
        raise RunError(f"{reader.folder}: {len(ids)} training rows are too few for trained.judges = {options.judges}")
    target = Target(recipe.target, reader.manifest["layers"])
    accelerator = start(section, None)
    counts = {int(t): n for t, n in reader.manifest["draft_vocabulary_counts"].items()}
    plan = Plan(tuple(rows), tuple(map(reader.tokens, rows)), section.batch_rows, accelerator.num_processes,
                section.accumulation, section.seed, tuple(map(reader.shard, rows)), section.shuffle_shards)
    found = []
    for name in options.dtypes:
        drafter = entry(recipe.drafter.kind).code.build(
            options_of(recipe.drafter.kind, recipe.drafter.options), target, counts, section.seed)
        trainer = Trainer(accelerator, drafter, Decoded(reader, len(target.layers), DTYPES[name]), plan, section,
                          reader.folder, {}, {})
        trainer.total = plan.total_steps(options.epochs or section.epochs)
        trainer.model.train()
        for _ in range(trainer.total):
            trainer.step()
        accepted, loss = judge(trainer, Judged(reader, K), judges, K)
        accelerator.free_memory()
        found += [Row(name, "accepted_length", accepted.mean_length, "tokens"),
                  Row(name, "drafts", accepted.drafts, ""), Row(name, "loss", loss, "nats")]
    return Result(found, notes={"rows": len(rows), "judges": len(judges), "steps": trainer.total, "K": K})
