"""Products with few rows on a CPU: F.linear against drafters.fast_cpu.SkinnyLinear, alternating in one process.

    python bench/skinny_linear.py

Prints, for the shapes of SmolLM2-135M, the median milliseconds of each and the ratio linear / skinny (above 1:
skinny is faster), with threads, OMP_WAIT_POLICY and load. Weights rotate so that none stays in the cache.
"""

import os
import statistics
import time

import torch
import torch.nn.functional as F

from drafters.fast_cpu import SkinnyLinear

SHAPES = [(576, 576), (1536, 576), (576, 1536), (49152, 576)]  # [out, in]
ROWS = [1, 2, 5, 16, 32, 64, 128, 160]
REPEATS = 9


def median_ms(works: list) -> list[float]:
    """Median milliseconds of each work, run in turns."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(REPEATS + 1):
        for work, record in zip(works, times):
            began = time.perf_counter()
            work()
            if turn:  # the first turn warms up
                record.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(record) for record in times]


@torch.no_grad()
def main() -> None:
    print(f"threads {torch.get_num_threads()}, OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'unset')}, "
          f"load {os.getloadavg()[0]:.2f}, torch {torch.__version__}")
    print(f"{'out x in':>12} {'rows':>5} {'linear ms':>10} {'skinny ms':>10} {'ratio':>6}")
    for out, width in SHAPES:
        count = max(2, min(60, int(6e7 / (out * width * 4))))
        layers = [SkinnyLinear(width, out, bias=False) for _ in range(count)]
        for rows in ROWS:
            x = torch.randn(rows, width)
            linear, skinny = median_ms([
                lambda x=x, layers=layers: [F.linear(x, layer.weight) for layer in layers],
                lambda x=x, layers=layers: [layer(x) for layer in layers],
            ])
            print(f"{out:>6} x {width:<5} {rows:>3} {linear / count:>10.3f} {skinny / count:>10.3f} "
                  f"{linear / skinny:>6.2f}")


if __name__ == "__main__":
    main()
