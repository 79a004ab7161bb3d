"""Key/value caches with one length a row: ragged batches write where they are, and rollback is a shorter length.

Legend: B rows in this call, R rows of the cache, q tokens a row, S capacity, W columns in use,
nkv key/value heads, hd head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class RowStore:
    """Keys and values of one layer, [R, S, nkv, hd], addressed by (row, position); they lie where the first keys
    came from, whatever device the addresses are on."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Stores [B, q, nkv, hd] at `positions` [B, q] of `rows` [B]; what was there is replaced."""
        if self.keys is None:
            self.keys = keys.new_zeros(self.rows, self.capacity, *keys.shape[2:])
            self.values = values.new_zeros(self.rows, self.capacity, *values.shape[2:])
        rows, positions = rows.to(keys.device), positions.to(keys.device)  # of a target over several devices
        self.keys[rows[:, None], positions] = keys
        self.values[rows[:, None], positions] = values

    def read(self, rows: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
        """Columns [0, width) as [B, nkv, W, hd] each; `rows` None is every row, without a copy."""
        keys, values = self.keys[:, :width], self.values[:, :width]
        if rows is not None:
            rows = rows.to(keys.device)
            keys, values = keys[rows], values[rows]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def begin_with(self, other: "RowStore", columns: int) -> None:
        """Every row of this empty store begins with the first `columns` of the other's only row."""
        self.keys = other.keys.new_zeros(self.rows, self.capacity, *other.keys.shape[2:])
        self.values = other.values.new_zeros(self.rows, self.capacity, *other.values.shape[2:])
        self.keys[:, :columns], self.values[:, :columns] = other.keys[:, :columns], other.values[:, :columns]

    def move(self, sources: Tensor, places: Tensor) -> None:
        """Copies columns `sources` [R, n] of every row to the columns `places` [R, n]."""
        rows = torch.arange(len(sources), device=self.keys.device)[:, None]
        sources, places = sources.to(self.keys.device), places.to(self.keys.device)
        self.keys[rows, places], self.values[rows, places] = self.keys[rows, sources], self.values[rows, sources]

    def keep(self, rows: Tensor) -> None:
        """Drops every row but these and moves them to the front, in this order."""
        self.rows = len(rows)
        if self.keys is not None:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys[rows], self.values[rows]

    def join(self, other: "RowStore") -> None:
        """Takes over the rows of another store of the same capacity, behind its own. Both hold keys."""
        self.rows += other.rows
        self.keys = torch.cat([self.keys, other.keys])
        self.values = torch.cat([self.values, other.values])


@dataclass
class Place:
    """Where the next forward writes and reads; a cache and its layers share one, so that none of them holds another.
    A cycle would keep the keys of a whole batch until Python's collector comes by."""

    rows: Tensor  # [B]
    positions: Tensor  # [B, q]
    whole: bool  # every row, in order
    width: int  # W


class _Layer(CacheLayerMixin):
    """One layer as transformers sees it."""

    is_sliding = False

    def __init__(self, place: Place, rows: int, capacity: int) -> None:
        super().__init__()
        self.place = place
        self.store = RowStore(rows, capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        place = self.place
        self.store.write(key_states.transpose(1, 2), value_states.transpose(1, 2), place.rows, place.positions)
        return self.store.read(None if place.whole else place.rows, place.width)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.width, 0

    def get_seq_length(self) -> int:
        return self.place.width

    def get_max_length(self) -> int:
        return self.store.capacity


class RowCache(Cache):
    """A transformers cache over RowStores. Positions decide what is visible; the cache keeps no length."""

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.place = Place(torch.empty(0), torch.empty(0), True, 0)
        super().__init__(layers=[_Layer(self.place, rows, capacity) for _ in range(layers)])

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.place.width

    def aim(self, rows: Tensor | None, positions: Tensor) -> None:
        """Says which rows [B] (None: all) and columns `positions` [B, q] the next forward writes and reads."""
        place = self.place
        place.whole = rows is None
        place.rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        place.positions, place.width = positions, int(positions.max()) + 1
        if self.width > self.capacity:
            raise ValueError(f"position {self.width - 1} is beyond the cache of {self.capacity}")

    def begin_with(self, other: "RowCache", columns: int) -> None:
        """See RowStore.begin_with."""
        for layer, given in zip(self.layers, other.layers):
            layer.store.begin_with(given.store, columns)

    def move(self, sources: Tensor, places: Tensor) -> None:
        """See RowStore.move."""
        for layer in self.layers:
            layer.store.move(sources, places)

    def keep(self, rows: Tensor) -> None:
        """Drops every row but these; see RowStore.keep."""
        self.rows = len(rows)
        for layer in self.layers:
            layer.store.keep(rows)

    def join(self, other: "RowCache") -> None:
        """See RowStore.join."""
        self.rows += other.rows
        for layer, given in zip(self.layers, other.layers):
            layer.store.join(given.store)
