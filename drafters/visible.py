"""What the tokens of a pass see: causally by position, within a sliding window, along the branches of a draft.

Legend: B rows, q tokens a row, W columns of the cache, g query heads a group.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import take
from drafters.fast_cpu import fold_mask
from recipes.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of layers


@dataclass
class Branches:
    """A pass over tokens of a draft that do not simply continue one another. A row's draft lies side by side, behind
    all that its tokens see otherwise."""

    columns: Tensor  # [B, q] where the tokens of this pass are kept
    block: Tensor  # [B, n] columns of the draft, up to those of this pass
    places: Tensor  # [B, n] positions of its tokens
    sees: Tensor  # [B, q, n] what each token of this pass sees of it


class Paths:
    """A draft that grows by passes over its levels: its tokens are kept behind the last real position, `last` [B], in
    the order of the levels, and each sees of them what it follows."""

    def __init__(self, last: Tensor) -> None:
        self.last = last
        self.sees: Tensor | None = None  # [B, q, n] of the newest level
        self.depth: list[int] = []  # [n] of each token, how many levels behind `last` it lies

    def go_on(self, follows: Tensor) -> None:
        """The next level's tokens follow these ones of the newest level, [B, q]; at first all follow the last token."""
        q = follows.shape[1]
        own = torch.eye(q, dtype=torch.bool, device=follows.device).expand(len(follows), q, q)
        self.sees = own if self.sees is None else torch.cat([take(self.sees, follows), own], dim=-1)
        self.depth += [self.depth[-1] + 1 if self.depth else 1] * q

    def branches(self) -> Branches:
        """The pass over the newest level."""
        _, q, n = self.sees.shape
        block = self.last[:, None] + 1 + torch.arange(n, device=self.last.device)
        places = self.last[:, None] + torch.tensor(self.depth, device=self.last.device)
        return Branches(block[:, n - q :], block, places, self.sees)


def windows_of(model: nn.Module, config: Any, name: str, device: torch.device) -> dict[str, int]:
    """Kinds of attention layers of a target, which computes on `device`, and the positions that each sees back to,
    itself included (0: all).

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
        check_kinds(model, found, name, device)
    return found


def check_kinds(model: nn.Module, windows: dict[str, int], name: str, device: torch.device) -> None:
    """ConfigError where a model with layers of two kinds cannot be given a mask for each."""
    mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=device)
    try:
        with torch.inference_mode():
            model.get_decoder()(torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False,
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
        visible = along_branches(branches, places, positions.shape[1])
        places = places.expand(len(positions), -1).scatter(1, branches.block, branches.places)
    return additive({kind: visible & (places[:, None] > positions[..., None] - window) if window else visible
                     for kind, window in windows.items()}, dtype, fold)


def additive(visible: dict[str, Tensor], dtype: torch.dtype, fold: int) -> Tensor | dict[str, Tensor]:
    """Masks of what is seen [B, q, W] in each kind of layer; see `masks`."""
    found = {}
    for kind, near in visible.items():
        mask = torch.zeros(near.shape, dtype=dtype, device=near.device)
        mask = mask.masked_fill_(~near, torch.finfo(dtype).min)[:, None]
        found[kind] = fold_mask(mask, fold) if fold > 1 else mask
    return found if len(found) > 1 else next(iter(found.values()))


def along_branches(branches: Branches, columns: Tensor, q: int) -> Tensor:
    """Which `columns` [1, W] each token of the pass sees, [B, q, W]: all before the draft, and its own path."""
    before = columns[:, None] < branches.block[:, :1, None]
    visible = before.expand(len(branches.block), q, columns.shape[1]).clone()
    return visible.scatter_(2, branches.block[:, None].expand_as(branches.sees), branches.sees)
