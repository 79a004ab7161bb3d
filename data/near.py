"""Near duplicates: MinHash proposes pairs (datasketch), the exact Jaccard similarity of their word runs decides."""

import hashlib

from datasketch import MinHash, MinHashLSH

PERMUTATIONS = 128
RECALL = 0.999  # of pairs at the threshold; pairs above it are found more surely still


def bands(threshold: float) -> tuple[int, int]:
    """(bands, rows of a band) of the narrowest index that proposes a pair at the threshold with RECALL."""
    for rows in range(PERMUTATIONS // 2, 1, -1):
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= RECALL:
            return PERMUTATIONS // rows, rows
    return PERMUTATIONS, 1


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """Shared runs over all runs of two sets."""
    return len(a & b) / len(a | b)


class NearDuplicates:
    """The texts taken so far. `threshold` is the similarity from which a text repeats one of them; 0 is off."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.kept: list[frozenset[int]] = []
        self.index = MinHashLSH(num_perm=PERMUTATIONS, params=bands(threshold))

    def take(self, runs: list[str]) -> bool:
        """Takes a text by its word runs, or returns False where it repeats one that was taken."""
        if not self.threshold:
            return True
        mine = frozenset(int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest()) for run in runs)
        sketch = MinHash(PERMUTATIONS, hashfunc=lambda value: value & 0xFFFFFFFF)
        sketch.update_batch(mine)
        for key in self.index.query(sketch):
            if jaccard(mine, self.kept[key]) >= self.threshold:
                return False
        self.index.insert(len(self.kept), sketch)
        self.kept.append(mine)
        return True
