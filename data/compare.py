"""Whether stored or foreign hidden states are the target's: by the error that storage and the order of sums allow."""

import torch

from data.codec import error_bound
from data.store import TraceRow

# How far one pass of the target may lie from another with other rows beside it, as a share of a state's largest
# number: sums are taken in another order. docs/store.md says what was measured.
NOISE = {torch.float32: 1e-4, torch.float16: 0.04, torch.bfloat16: 0.3}


def compare(stored: TraceRow, again: TraceRow, dtype: torch.dtype, noise: float) -> tuple[float, str]:
    """The largest difference over its tolerance, and what to say where that is above 1 (or not a number)."""
    worst, said = 0.0, ""
    for part, n in (("taps", again.taps.shape[1] // again.final.shape[1]), ("final", 1)):
        ours, theirs = getattr(stored, part).float(), getattr(again, part)
        if not theirs.numel():
            continue
        largest = theirs.reshape(len(theirs), n, -1).abs().amax(-1)  # [T, n]
        allowed = error_bound(theirs, n, dtype) + noise * largest.repeat_interleave(theirs.shape[1] // n, 1)
        share = (ours - theirs).abs() / allowed
        ratio, wrong = float(share.max()), int((~(share <= 1)).any(1).sum())
        worst = max(worst, ratio)
        if wrong:
            said = said or (f"{part} of {wrong} of {len(theirs)} tokens are not the target's: off by {ratio:.3g} times "
                            "the tolerance")
    return worst, said
