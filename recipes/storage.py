"""Bytes of traces and checkpoints on disk. Arithmetic only; data/store.py and data/codec.py write what is counted here.

Legend: D draft vocabulary, V target vocabulary.
"""

IDS_BYTES = 8 + 2  # of each token: its id and its turn
SCALE_BYTES = 4  # of each vector that is stored in 8 bits
# (bytes a number, with a scale for each vector), by trace.dtype
STORED: dict[str, tuple[int, bool]] = {"float32": (4, False), "bfloat16": (2, False), "float16": (2, False),
                                       "float8_e4m3": (1, True), "int8": (1, True)}


def state_bytes(vectors: float, width: int, itemsize: int, scaled: bool) -> float:
    """Bytes of `vectors` stored states of `width` numbers each."""
    return vectors * (width * itemsize + (SCALE_BYTES if scaled else 0))


def row_bytes(tokens: float, finals: float, taps: int, hidden: int, itemsize: int, scaled: bool) -> float:
    """Bytes of rows in a shard, headers aside: `taps` states for every token, one more for `finals` of them; taps 0:
    without states. Linear, so totals will do."""
    return tokens * IDS_BYTES + state_bytes((tokens * taps + finals) * (taps > 0), hidden, itemsize, scaled)


def checkpoint_bytes(trained: float, frozen: float, D: int, V: int) -> float:
    """Bytes of one checkpoint: the drafter, two moments of what is trained, the maps."""
    return 4 * (trained + frozen + 2 * trained) + 8 * D + V


def export_bytes(parameters: float, itemsize: int, D: int, V: int) -> float:
    """Bytes of one exported drafter."""
    return parameters * itemsize + 8 * D + V
