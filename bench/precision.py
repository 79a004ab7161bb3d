"""What each storage dtype costs in precision, on the traces of a run that stored float32.

Reads a seeded sample of rows; for each dtype: bytes per token; relative error of the tapped and of the final states
(mean over vectors); the teacher distribution softmax(head(final)) from stored against full precision: mean and largest
KL divergence in nats, share of equal argmax; and, where the run has a trained drafter, its replayed acceptance length
on the validation rows when it reads decoded states (it was trained on full precision).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.material import float32_traces
from bench.rows import Result, Row
from data.codec import DTYPES, carrier, decode, encode
from data.prompts import hold_out
from data.store import TraceReader, TraceRow, row_bytes
from drafters import checkpoint, imported
from drafters.target import Target
from eval.replay import replay
from recipes.schema import PositiveInt, Recipe, opt


@dataclass
class Options:
    rows: PositiveInt = opt(300, "rows of the traces that are read, at most")
    every: PositiveInt = opt(8, "one final state in so many goes through the head")


def stored(states: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """States [N, n*H] as a reader of this dtype would give them, in float32."""
    return decode(*encode(states.to(carrier(dtype)), n, dtype)).float()


class Decoded:
    """A reader whose rows went through a storage dtype."""

    def __init__(self, reader: TraceReader, n: int, dtype: torch.dtype) -> None:
        self.reader, self.n, self.dtype = reader, n, dtype

    def tokens(self, index: int) -> int:
        return self.reader.tokens(index)

    def __getitem__(self, index: int) -> TraceRow:
        row = self.reader[index]
        return replace(row, taps=stored(row.taps, self.n, self.dtype), final=stored(row.final, 1, self.dtype))


def relative(states: Tensor, back: Tensor, n: int) -> float:
    """Mean over vectors of |back - states| / |states|, euclidean."""
    states, back = (x.reshape(len(x) * n, -1) for x in (states, back))
    return float(((back - states).norm(dim=-1) / states.norm(dim=-1)).mean())


@torch.inference_mode()
def teacher(head: torch.nn.Module, final: Tensor, back: Tensor) -> tuple[float, float, float]:
    """(mean KL, largest KL, share of equal argmax) of the distributions of full and stored final states [N, H]."""
    divergences, equal = [], 0
    for full, low in zip(final.split(256), back.split(256)):
        p, q = (head(x).float().log_softmax(-1) for x in (full, low))
        divergences.append((p.exp() * (p - q)).sum(-1).clamp_min(0))
        equal += int((p.argmax(-1) == q.argmax(-1)).sum())
    kl = torch.cat(divergences)
    return float(kl.mean()), float(kl.max()), equal / len(final)


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only precision"`; variants are the storage dtypes. `repeats` has no meaning here."""
    run_folder = Path(recipe.runs_dir) / recipe.name
    reader = float32_traces(recipe)
    target = Target(recipe.target, reader.manifest["layers"])
    n, H = len(target.layers), target.hidden
    where = {place.listed["id"]: i for i, place in enumerate(reader.places)}
    rows = [reader[where[i]] for i in sorted(hold_out(list(where), options.rows, 0))]
    taps, final = torch.cat([r.taps for r in rows]), torch.cat([r.final for r in rows])
    best = run_folder / "checkpoints" / checkpoint.BEST
    drafter = imported.open_drafter(recipe.drafter, target, run_folder).drafter if (
        recipe.drafter.path or best.is_file()) else None
    found = []
    for name, dtype in DTYPES.items():
        size = sum(row_bytes(len(r.ids), len(r.final), n * H, H, dtype) for r in rows) / len(taps)
        back = stored(final, 1, dtype)
        mean, largest, equal = teacher(target.head, final[:: options.every], back[:: options.every])
        found += [Row(name, "bytes_per_token", size, "bytes"),
                  Row(name, "error_taps", relative(taps, stored(taps, n, dtype), n), ""),
                  Row(name, "error_finals", relative(final, back, 1), ""), Row(name, "kl_mean", mean, "nats"),
                  Row(name, "kl_max", largest, "nats"), Row(name, "same_argmax", 100 * equal, "%")]
        if drafter is not None:
            counts = replay(drafter, Decoded(reader, n, dtype), reader.split("validation"),
                            recipe.train.validation_draft_length, target.device, target.dtype)
            found += [Row(name, "accepted_length", counts.mean_length, "tokens"),
                      Row(name, "drafts", counts.drafts, "")]
    return Result(found, notes={"rows": len(rows), "tokens": len(taps), "loss_positions": len(final),
                                "loss_positions_read": len(final[:: options.every])})
