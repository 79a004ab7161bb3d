"""Sizes and small modules that drafters share. Legend: H hidden, I intermediate."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.errors import ConfigError

MOST_LAYERS = 2  # decoder layers of a drafter that are tested, and that engines are known to load
MOST_PARALLEL_LAYERS = 4  # of one that drafts in parallel, which vLLM alone serves


def check_sizes(form: type, values: Any) -> None:
    """ConfigError naming the first field of `form`, a dataclass, that the shape in a drafter.json lacks or has beside
    it, or that is a size and no whole number above 0."""
    if not isinstance(values, dict):
        raise ConfigError(f"shape = {values!r}: must be a mapping")
    differ = sorted({f.name for f in fields(form)} ^ values.keys())
    if differ:
        raise ConfigError(f"shape.{differ[0]} is missing or unknown")
    for f in fields(form):
        value = values[f.name]
        if f.type is int and (type(value) is not int or value < 1):
            raise ConfigError(f"shape.{f.name} = {value!r}: must be a whole number above 0")


@dataclass
class Shape:
    """Sizes of a drafter, all explicit, as drafter.json stores them."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    target_layers: int

    @classmethod
    def read(cls, values: Any) -> "Shape":
        """The sizes that a drafter.json states. ConfigError naming the first that is missing, unknown or none; whether
        tensors bear them out is for the caller to see, before anything of these sizes is allocated."""
        check_sizes(cls, values)
        eps, rope = values["rms_norm_eps"], values["rope_parameters"]
        if type(eps) is not float or not 0 < eps < 1:
            raise ConfigError(f"shape.rms_norm_eps = {eps!r}: must be a number between 0 and 1")
        if not isinstance(rope, dict) or not isinstance(values["hidden_act"], str):
            raise ConfigError("shape: rope_parameters must be a mapping, hidden_act a name")
        return cls(**values)

    @classmethod
    def from_target(cls, config: Any, draft_vocab_size: int, intermediate_size: int = 0) -> "Shape":
        """The shape that fits a target's config; `intermediate_size` 0 takes the target's."""
        heads = config.num_attention_heads
        # The drafter rotates whole heads: a target's partial factor would be served but not trained.
        rope = {k: v for k, v in config.rope_parameters.items() if k != "partial_rotary_factor"}
        return cls(
            config.hidden_size, config.hidden_size, intermediate_size or config.intermediate_size, heads,
            config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.rms_norm_eps, "silu", config.vocab_size, draft_vocab_size,
            config.max_position_embeddings, rope, config.num_hidden_layers,
        )


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [..., H] to [..., H]."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
