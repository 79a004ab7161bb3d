"""Hidden states of finished conversations: one forward pass of the target over each row, as serving computes them."""

from dataclasses import dataclass

import torch

from data.store import TraceRow, final_positions
from drafters.target import Prefix, States, Target
from recipes.errors import RunError


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
            row = rows[i]
            length, turns = len(row.ids), torch.tensor(row.turns)
            taps, final = states.taps[b, :length].cpu().to(dtype), states.final[b, :length].cpu().to(dtype)
            if len(taps) != length or len(final) != length:
                raise RunError(f"row {row.id}: {len(taps)} states for {length} tokens")
            if not (torch.isfinite(taps).all() and torch.isfinite(final).all()):
                bad[row.id] = "NaN or Inf in hidden states"
                continue
            traced[i] = TraceRow(row.id, row.split, torch.tensor(row.ids), turns, taps,
                                 final[final_positions(turns)], row.tail, row.off_policy)
    return [traced[i] for i in range(len(rows)) if i in traced], bad


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
    B = len(states.final)
    taps, final = (torch.cat([first.expand(B, -1, -1), rest], dim=1) for first, rest in (
        (prefix.states.taps, states.taps), (prefix.states.final, states.final)))
    return States(final, taps, None)


def by_tokens(lengths: list[tuple[int, int]], limit: int) -> list[list[int]]:
    """Groups (index, length) pairs, ascending by length, so that count times longest stays within `limit`."""
    batches: list[list[int]] = []
    for index, length in lengths:
        if batches and (len(batches[-1]) + 1) * length <= limit:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
