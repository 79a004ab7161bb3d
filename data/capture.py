"""Hidden states of finished conversations: one forward pass of the target over each row, as serving computes them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.store import TraceRow, final_positions
from drafters.target import Prefix, States, Target
from recipes.errors import RunError

# Tokens that one more forward pass is taken to cost. Over rows of 168 tokens, passes of at most 2048 are then 4 %
# padding (13 % if each is filled) and 1000 tokens long, which is as fast by the token (docs/states.md).
A_PASS = 64
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
            length = len(rows[i].ids)
            trace = trace_row(rows[i], states.taps[b, :length], states.final[b, :length], dtype)
            if trace is None:
                bad[rows[i].id] = BAD
            else:
                traced[i] = trace
    return [traced[i] for i in range(len(rows)) if i in traced], bad


def trace_row(row: Conversation, taps: Tensor, final: Tensor, dtype: torch.dtype) -> TraceRow | None:
    """The row's trace from its states, taps [T, n*H] and final [T, H], cast to `dtype` on the CPU; None where one is
    NaN or Inf. Raises RunError where there are not as many states as tokens."""
    taps, final, turns = taps.cpu().to(dtype), final.cpu().to(dtype), torch.tensor(row.turns)
    for states in (taps, final):
        if len(states) != len(row.ids):
            raise RunError(f"row {row.id}: {len(states)} states for {len(row.ids)} tokens")
    traced = TraceRow(row.id, row.split, torch.tensor(row.ids), turns, taps, final[final_positions(turns)], row.tail,
                      row.off_policy, row.finish)
    return traced if finite(traced) else None


def finite(row: TraceRow) -> bool:
    """True where a row's states hold neither NaN nor Inf (case 34)."""
    return bool(torch.isfinite(row.taps).all() and torch.isfinite(row.final).all())


def bare(rows: list[Conversation]) -> list[TraceRow]:
    """The rows without states: taps [T, 0], final [F, 0]."""
    found = []
    for row in rows:
        turns = torch.tensor(row.turns)
        found.append(TraceRow(row.id, row.split, torch.tensor(row.ids), turns, torch.zeros(len(turns), 0),
                              torch.zeros(len(final_positions(turns)), 0), row.tail, row.off_policy, row.finish))
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
    """Groups (index, length) pairs, ascending by length, so that count times longest stays within `limit` (a longer
    row goes alone), and so that padded tokens and A_PASS for each group are fewest together."""
    fewest, first = [0.0], [0]  # of the pairs before each end: the cost, and where the last group begins
    for end in range(1, len(lengths) + 1):
        length = lengths[end - 1][1]
        begins = range(max(0, end - max(1, limit // length)), end)
        cost, begin = min((fewest[b] + (end - b) * length + A_PASS, b) for b in begins)
        fewest.append(cost)
        first.append(begin)
    groups, end = [], len(lengths)
    while end:
        groups.append([index for index, _ in lengths[first[end] : end]])
        end = first[end]
    return groups[::-1]
