"""How hidden states are stored: float32, bfloat16, float16, or 8 bits with one float32 scale a vector.

A vector is one state of one token: a token with n taps has n scales, so that a tap of large numbers costs the others
no precision. The scale maps the vector's largest magnitude to the largest number of the 8-bit format; it is float32,
since float16 would overflow for large states and add an error of its own (4 bytes beside 576 numbers are 0.7 %).
Legend: N tokens, n vectors a token, H numbers a vector.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).tiny  # a scale below it would lose bits, or be zero


@dataclass(frozen=True)
class Codec:
    """One storage dtype. Decoding an encoded x errs by at most relative * |x| + absolute * largest |x| of its vector,
    where x neither overflows nor is below `normal`, the smallest number that has full precision without a scale."""

    peak: float  # the stored number that a vector's largest magnitude becomes; 0: stored as it is, without a scale
    relative: float
    absolute: float
    normal: float = 0.0


CODECS: dict[torch.dtype, Codec] = {
    torch.float32: Codec(0.0, 0.0, 0.0),
    torch.bfloat16: Codec(0.0, 2**-8, 0.0, torch.finfo(torch.bfloat16).tiny),
    torch.float16: Codec(0.0, 2**-11, 0.0, torch.finfo(torch.float16).tiny),
    # Three bits of mantissa; below 2**-6 the steps stay 2**-9 wide. The slack is that of the float32 arithmetic.
    torch.float8_e4m3fn: Codec(448.0, 2**-4 + 2**-20, 2**-10 / 448.0 + 2**-20),
    torch.int8: Codec(127.0, 0.0, 0.5 / 127.0 + 2**-20),
}
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn, "int8": torch.int8,
}


def scaled(dtype: torch.dtype) -> bool:
    """True where the dtype is stored with scales."""
    return CODECS[dtype].peak > 0


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The precision of states before they are encoded and after they are decoded."""
    return torch.float32 if scaled(dtype) else dtype


def encode(states: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """States [N, n*H] as (numbers [N, n*H] of `dtype`, scales [N, n] float32 or None). They must be finite."""
    codec = CODECS[dtype]
    if not codec.peak:
        return states.to(dtype), None
    N = len(states)
    vectors = states.float().reshape(N, n, -1 if states.numel() else 0)
    largest = vectors.abs().amax(-1) if vectors.numel() else torch.zeros(N, n)
    scales = (largest / codec.peak).clamp_min(SMALLEST)
    # A scale rounded down would put the largest number beyond the format's end.
    numbers = (vectors / scales[..., None]).clamp_(-codec.peak, codec.peak)
    if not dtype.is_floating_point:
        numbers = numbers.round_()
    return numbers.to(dtype).reshape(states.shape), scales


def decode(numbers: Tensor, scales: Tensor | None) -> Tensor:
    """What `encode` stored, in the carrier's precision: numbers [N, n*H], scales [N, n] -> [N, n*H]."""
    if scales is None:
        return numbers
    N, n = scales.shape
    vectors = numbers.float().reshape(N, n, -1 if numbers.numel() else 0)
    return (vectors * scales[..., None]).reshape(numbers.shape)


def error_bound(states: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Largest error of each number after encode and decode: states [N, n*H] -> [N, n*H]."""
    codec, N = CODECS[dtype], len(states)
    magnitude = states.float().abs().reshape(N, n, -1)
    bound = codec.relative * magnitude.clamp_min(codec.normal) + codec.absolute * magnitude.amax(-1, keepdim=True)
    if scaled(dtype):
        bound = bound.clamp_min(SMALLEST)
    return bound.reshape(states.shape)
