"""What this machine reaches: memory bandwidth, products, and what a layer costs beside its arithmetic.

A few seconds; the figures are medians of what torch reaches here, so no share of a peak is needed.
"""

import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.hardware import Hardware

LAYERS = 8  # of the tiny model whose passes are all overhead


def seconds(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """Median seconds of one call, after two that are not counted; calls for about `budget` seconds, at least five."""
    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    for _ in range(2):
        once()
    taken = [once() for _ in range(5)]
    while sum(taken) < budget:
        taken.append(once())
    return statistics.median(taken)


def bandwidth(device: torch.device, budget: float, numbers: int) -> float:
    """Bytes a second of reading memory that no cache holds."""
    values = torch.ones(numbers, device=device)
    return values.nbytes / seconds(values.sum, device, budget)


def product_flops(device: torch.device, dtype: torch.dtype, budget: float, size: int) -> float:
    """FLOP/s of a product [size, 4 size] x [4 size, 4 size]."""
    a = torch.ones(size, 4 * size, device=device, dtype=dtype)
    b = torch.ones(4 * size, 4 * size, device=device, dtype=dtype)
    return 2 * size * (4 * size) ** 2 / seconds(lambda: a @ b, device, budget)


@torch.inference_mode()
def layer_seconds(device: torch.device, budget: float) -> float:
    """Seconds a layer of a pass of one token whose arithmetic is next to nothing."""
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    model = LlamaForCausalLM(config).to(device).eval()
    ids = torch.ones(1, 1, dtype=torch.long, device=device)
    return seconds(lambda: model(ids, use_cache=True), device, budget) / LAYERS


def memory_bytes(device: torch.device) -> int:
    """Memory of the device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(device: torch.device, dtypes: list[str], budget: float = 0.4) -> Hardware:
    """This machine as a table entry with products in these dtypes. `budget`: seconds for each figure."""
    cuda = device.type == "cuda"
    numbers, size = (2**29, 2048) if cuda else (2**26, 256)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    products = {dtype: product_flops(device, getattr(torch, dtype), budget, size) / 1e12
                for dtype in dict.fromkeys(dtypes)}
    return Hardware(
        memory_gb=memory_bytes(device) / 1e9, bandwidth_tb_s=bandwidth(device, budget, numbers) / 1e12, tflops=products,
        measured=True, cpu=not cuda, layer_us=layer_seconds(device, budget) * 1e6, note=name,
        source="measured by make plan", date=datetime.now(UTC).date().isoformat())
