"""Draft vocabulary: the target ids a drafter can propose, ascending. D draft ids, V target ids."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from recipes.errors import ConfigError


def build(counts: dict[int, int], size: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """The D = `size` target ids kept, [D] int64 ascending: `always` (end and special tokens), then the most frequent.

    Ties go to the smaller id, and where the text has fewer distinct tokens the smallest unused ids fill up, so
    the result is the same on every run (case 57). Raises ConfigError where D does not fit.
    """
    if not 0 < size <= vocab_size:
        raise ConfigError(f"drafter.options.draft_vocab_size = {size}: must be within 1..{vocab_size}, "
                          "the target's vocabulary")
    forced = sorted(set(always))
    if len(forced) > size:
        raise ConfigError(f"drafter.options.draft_vocab_size = {size}: smaller than the {len(forced)} end and "
                          "special tokens of the target")
    ranked = sorted(counts, key=lambda t: (-counts[t], t))
    chosen = dict.fromkeys(forced)
    for token in [*ranked, *range(vocab_size)]:
        if len(chosen) == size:
            break
        if not 0 <= token < vocab_size:
            raise ConfigError(f"token id {token} is outside the target's vocabulary of {vocab_size}")
        chosen.setdefault(token)
    return torch.tensor(sorted(chosen))


def forced(target: Any) -> list[int]:
    """Ids that every draft vocabulary of a loaded target has: special tokens and what ends a turn."""
    special = set(target.tokenizer.all_special_ids) | set(target.end_ids)
    return [t for t in special if 0 <= t < target.vocab_size]


def maps(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t, t2d): d2t int64 [D] is an OFFSET, target id = i + d2t[i]; t2d bool [V] marks ids that are in it."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


def ids_of(d2t: Tensor) -> Tensor:
    """Target ids [D] of an offset map."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def check(d2t: Tensor, t2d: Tensor) -> None:
    """ConfigError where a map is not an offset map onto distinct target ids that t2d marks (case 56)."""
    if d2t.dim() != 1 or t2d.dim() != 1 or d2t.is_floating_point():
        raise ConfigError(f"d2t {d2t.dtype} {list(d2t.shape)}, t2d {list(t2d.shape)}: must be lists of whole numbers")
    ids = ids_of(d2t)
    fine = bool((ids >= 0).all() and (ids < len(t2d)).all()) and len(ids.unique()) == len(ids)
    if not fine or int(t2d.sum()) != len(ids) or not bool(t2d[ids].all()):
        raise ConfigError("d2t/t2d: not an offset map (target id = i + d2t[i]) onto the ids marked in t2d")
