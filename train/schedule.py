"""Learning rate as a pure function of the optimizer step: nothing to save, nothing that can count micro-steps."""

import math


def cosine(step: int, total: int, warmup: int, peak: float, min_share: float) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then cosine to peak * min_share at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    span = max(total - 1 - warmup, 1)
    share = min((step - warmup) / span, 1.0)
    return peak * (min_share + (1 - min_share) * 0.5 * (1 + math.cos(math.pi * share)))
