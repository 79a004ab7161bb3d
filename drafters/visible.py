"""What the tokens of a pass see: causally by position, within a sliding window, along the branches of a draft.

Legend: B rows, q tokens a row, W columns of the cache, g query heads a group.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters.fast_cpu import fold_mask
from recipes.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of layers


@dataclass
class Branches:
    """A pass over tokens that do not simply continue one another: the column where each is kept, and which of them
    each sees. Those of a row lie side by side, behind all that it sees otherwise."""

    columns: Tensor  # [B, q]
    sees: Tensor  # [B, q, q]


def windows_of(model: nn.Module, config: Any, name: str) -> dict[str, int]:
    """Kinds of attention layers of a target and the positions each sees back to, itself included (0: all).

    ConfigError where a layer keeps anything else than keys and values of every position: a rejected draft could not be
    taken back from it.
    """
    kinds = getattr(config, "layer_types", None)
    size = getattr(config, "sliding_window", None)
    if kinds is None:  # then all layers are alike
        kinds = [SLIDING if size and getattr(config, "use_sliding_window", True) else FULL]
    strange = sorted(set(kinds) - {FULL, SLIDING})
    if strange or getattr(model, "_is_stateful", False):
        what = strange[0] if strange else "recurrent"
        raise ConfigError(f"target.model = {name}: {type(model).__name__} has {what} layers, from whose state a "
                          "rejected draft cannot be taken back; not supported")
    found = {kind: int(size) if kind == SLIDING else 0 for kind in sorted(set(kinds))}
    if len(found) > 1:
        check_kinds(model, found, name)
    return found


def check_kinds(model: nn.Module, windows: dict[str, int], name: str) -> None:
    """ConfigError where a model with layers of two kinds cannot be given a mask for each."""
    place = model.get_input_embeddings().weight.device
    mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=place)
    try:
        with torch.inference_mode():
            model.get_decoder()(torch.zeros(1, 1, dtype=torch.long, device=place), use_cache=False,
                                attention_mask=dict.fromkeys(windows, mask))
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):
        raise ConfigError(f"target.model = {name}: {type(model).__name__} mixes full and sliding attention but takes "
                          "no mask for each; not supported") from None


def masks(windows: dict[str, int], positions: Tensor, width: int | None, branches: Branches | None, dtype: torch.dtype,
          fold: int) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, q, W] of a pass at `positions` [B, q]: one, or one for each kind of layer.

    width: W, where there is a cache whose columns are positions; None: the tokens see one another. fold > 1: for
    grouped attention of so many heads a group.
    """
    places = positions if width is None else torch.arange(width, device=positions.device)[None]
    visible = places[:, None] <= positions[..., None]  # [B, q, W]
    if branches is not None:
        block = branches.columns
        visible = (places[:, None] < block[:, :1, None]).expand(*positions.shape, width).clone()
        visible.scatter_(2, block[:, None].expand_as(branches.sees), branches.sees)
        places = places.expand(len(block), -1).scatter(1, block, positions)
    found = {}
    for kind, window in windows.items():
        near = visible & (places[:, None] > positions[..., None] - window) if window else visible
        mask = torch.zeros(near.shape, dtype=dtype, device=positions.device)
        mask = mask.masked_fill_(~near, torch.finfo(dtype).min)[:, None]
        found[kind] = fold_mask(mask, fold) if fold > 1 else mask
    return found if len(found) > 1 else next(iter(found.values()))
