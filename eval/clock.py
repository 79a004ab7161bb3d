"""Time as a device sees it: a call on CUDA returns before its work is done."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of the performance counter, once the device has finished all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
