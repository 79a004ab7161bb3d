"""Hidden states of finished conversations: one forward pass of the target over each row, as serving computes them."""

from dataclasses import dataclass

import torch

from data.store import TraceRow, final_positions
from drafters.target import Prefix, States, Target
from recipes.errors import RunError

BAD = "NaN or Inf in hidden states"


@dataclass
class Conversation:
    """A finished row before capture: ids and turns as in data.chat.Rendered."""

    id: str
    split: str
    ids: list[int]
    turns: list[int]
    tail: list[int]
    finish: str
    off_policy: bool = False  # the answers were given, not the target's own


def capture(target: Target, rows: list[Conversation], batch_tokens: int,
            dtype: torch.dtype = torch.float32) -> tuple[list[TraceRow], dict[str, str]]:
    """Traces of the rows in their order, and the reasons of those left out (NaN or Inf states, case 34).
    States are cast to the storage `dtype` first, so that one which overflows there counts as Inf.

    Rows are batched by length, at most `batch_tokens` padded tokens a forward pass (a longer row goes alone); what
    all rows begin with is computed once.
    Raises RunError where the states' length differs from the ids' (case 08): nothing is padded to fit.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    traced: dict[int, TraceRow] = {}
    bad: dict[str, str] = {}
    prefix = target.prefix([row.ids for row in rows])
    shared = prefix.length
    for batch in by_tokens([(i, len(rows[i].ids)) for i in order], batch_tokens):
        width = max(len(rows[i].ids) for i in batch)
        ids = torch.zeros(len(batch), width - shared, dtype=torch.long, device=target.device)
        for b, i in enumerate(batch):
            ids[b, : len(rows[i].ids) - shared] = torch.tensor(rows[i].ids[shared:])
        positions = torch.arange(shared, width, device=target.device).expand_as(ids).contiguous()
        cache = prefix.fill(target.new_cache(len(batch), width)) if shared else None
        states = behind(prefix, target.forward(ids, positions, cache, logits=False))
        for b, i in enumerate(batch):
            row, length = rows[i], len(rows[i].ids)
            taps, final = states.taps[b, :length].cpu().to(dtype), states.final[b, :length].cpu().to(dtype)
            if len(taps) != length or len(final) != length:
                raise RunError(f"row {row.id}: {len(taps)} states for {length} tokens")
            finals = final[final_positions(torch.tensor(row.turns))]
            traced[i] = TraceRow(row.id, row.split, torch.tensor(row.ids), torch.tensor(row.turns), taps, finals,
                                 row.tail, row.off_policy)
            if not finite(traced[i]):
                bad[row.id] = BAD
                del traced[i]
    return [traced[i] for i in range(len(rows)) if i in traced], bad


def finite(row: TraceRow) -> bool:
    """True where a row's states hold neither NaN nor Inf (case 34)."""
    return bool(torch.isfinite(row.taps).all() and torch.isfinite(row.final).all())


def bare(rows: list[Conversation]) -> list[TraceRow]:
    """The rows without states: taps [T, 0], final [F, 0]."""
    found = []
    for row in rows:
        turns = torch.tensor(row.turns)
        found.append(TraceRow(row.id, row.split, torch.tensor(row.ids), turns, torch.zeros(len(turns), 0),
                              torch.zeros(len(final_positions(turns)), 0), row.tail, row.off_policy))
    return found


def behind(prefix: Prefix, states: States) -> States:
    """The rows' states with those of their shared beginning in front."""
    if not prefix.length:
        return states

    def whole(first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return torch.cat([first.expand(len(rest), -1, -1), rest], dim=1)

    taps = None if states.taps is None else whole(prefix.states.taps, states.taps)
    return States(whole(prefix.states.final, states.final), taps, None)


def by_tokens(lengths: list[tuple[int, int]], limit: int) -> list[list[int]]:
    """Groups (index, length) pairs, ascending by length, so that count times longest stays within `limit`."""
    batches: list[list[int]] = []
    for index, length in lengths:
        if batches and (len(batches[-1]) + 1) * length <= limit:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
