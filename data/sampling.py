"""Repetition penalty, temperature, top-k, top-p and min-p on logits, and sampling with one generator a row.

Legend: B rows, V vocabulary. Probabilities are float32 whatever the model's dtype.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.errors import ConfigError

HEAD = 256  # candidates tried first: most nuclei are smaller
WIDE = 4096  # tried next; in free sampling of a small target a fifth of the nuclei are larger than HEAD, 1 % than this


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. Greedy text is that of the
    penalised logits: a penalty acts at any temperature, as in transformers."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(f"temperature = {self.temperature}, top_k = {self.top_k}, top_p = {self.top_p}: needs "
                              "temperature >= 0, top_k >= 0 and 0 < top_p <= 1")
        if not 0 <= self.min_p <= 1 or not self.repetition_penalty > 0:
            raise ConfigError(f"min_p = {self.min_p}, repetition_penalty = {self.repetition_penalty}: needs "
                              "0 <= min_p <= 1 and repetition_penalty > 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def remembers(self) -> bool:
        """Whether the distribution depends on the tokens before, beyond the logits."""
        return self.repetition_penalty != 1.0


def row_seed(seed: int, row_id: str, size: int) -> int:
    """A seed of `size` bytes, its top bit clear, that depends on the seed and the row's id only."""
    digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
    return int.from_bytes(digest[:size], "little") >> 1


def row_generator(seed: int, row_id: str) -> torch.Generator:
    """A generator that depends on the seed and the row's id only, not on the batch it is decoded in."""
    return torch.Generator().manual_seed(row_seed(seed, row_id, 8))


def row_names(prompts: Sequence[Sequence[int]]) -> list[str]:
    """A name of each prompt's row: its ids, and how many prompts like it stand before it."""
    before: Counter = Counter()
    found = []
    for prompt in prompts:
        ids = " ".join(map(str, prompt))
        found.append(f"{before[ids]}:{ids}")
        before[ids] += 1
    return found


def row_uniforms(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """The next `count` numbers of each row's own generator, [B, count] in [0, 1), on the CPU."""
    return torch.stack([torch.rand(count, generator=one, dtype=torch.float64) for one in generators])


def penalised(logits: Tensor, penalty: float, seen: Tensor) -> Tensor:
    """Logits [..., V] where those of tokens marked in `seen` [..., V] are divided by the penalty if positive and
    multiplied by it if negative (Keskar et al. 2019, CTRL, section 4.1; transformers' form for negative ones)."""
    logits = logits.to(wide(logits))
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def wide(logits: Tensor) -> torch.dtype:
    """What logits are processed in: float64 stays, anything else is float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution sampled from: [..., V] logits to [..., V] probabilities, as transformers' warpers define it.

    Greedy gives one-hot rows. top_k keeps the k largest (ties of the k-th too); top_p then keeps the
    smallest set of largest probabilities whose sum reaches p, without sorting the vocabulary where the
    first 256 or 4096 reach it; min_p then drops what is less likely than that share of the likeliest token. A
    repetition penalty comes before all of them: give it logits that are `penalised`.
    """
    if sampling.greedy:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits.to(wide(logits)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if sampling.top_p < 1.0:
        floor = nucleus_floor(probs, sampling.top_p)
        probs = probs.masked_fill(probs < floor, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def nucleus_floor(probs: Tensor, top_p: float) -> Tensor:
    """The smallest probability inside the nucleus, [..., 1]."""
    V = probs.shape[-1]
    for width in (HEAD, WIDE, V):
        head = probs.topk(width, dim=-1).values if width < V else probs.sort(dim=-1, descending=True).values
        if width >= V or bool((head.sum(-1) >= top_p).all()):
            break
    before = head.cumsum(-1) - head  # mass of everything larger
    inside = before < top_p
    return head.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)


def sample(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """One token a row from [B, V] logits with uniforms [B] in [0, 1) -> ids [B].

    The same distribution as `draw(probabilities(...))`, but where a row's nucleus or top-k lies within its 256
    largest logits, nothing but the normaliser touches the rest of the vocabulary. Which path a row takes
    depends on that row alone, so its result does not depend on the batch. ValueError for a repetition penalty, which
    needs the tokens before.
    """
    if sampling.remembers:
        raise ValueError("sample() knows no earlier tokens: give penalised logits and no repetition_penalty")
    if sampling.greedy:
        return logits.argmax(-1)
    if sampling.min_p > 0.0:
        return draw(probabilities(logits, sampling), uniforms)
    scaled = logits.float() / sampling.temperature
    head, ids = scaled.topk(min(HEAD, scaled.shape[-1]), dim=-1)  # descending
    if 0 < sampling.top_k <= head.shape[-1]:
        head = head[:, : sampling.top_k]
        probs = head.softmax(-1).double()
    else:
        probs = (head - scaled.logsumexp(-1, keepdim=True)).exp().double()
    cdf = probs.cumsum(-1)
    complete = 0 < sampling.top_k <= head.shape[-1] or head.shape[-1] == logits.shape[-1]
    whole = (cdf[:, -1] >= sampling.top_p) | complete
    inside = cdf - probs < sampling.top_p
    cdf = (probs * inside).cumsum(-1)
    place = torch.searchsorted(cdf, uniforms.double()[:, None] * cdf[:, -1:], right=True)
    place = torch.minimum(place, inside.sum(-1, keepdim=True) - 1)
    tokens = ids.gather(-1, place)[:, 0]
    if not bool(whole.all()):
        rest = ~whole
        tokens[rest] = draw(probabilities(logits[rest], sampling), uniforms[rest])
    return tokens


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row by inverse CDF: probs [B, V], uniforms [B] in [0, 1) -> ids [B]."""
    cdf = probs.double().cumsum(-1)
    point = uniforms.double()[:, None] * cdf[:, -1:]
    picked = torch.searchsorted(cdf, point, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)
    # A uniform at the very end can round onto a token of probability zero: step back to the last possible one.
    impossible = probs.gather(-1, picked[:, None])[:, 0] == 0
    if bool(impossible.any()):
        last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
        picked = torch.where(impossible, last, picked)
    return picked
