"""The kinds of drafters with EAGLE-3's layers, as exported folders tell them apart: what mappings, checks and readers
share. V target vocabulary, Ht target hidden size, n taps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from drafters.layers import MOST_LAYERS, MOST_PARALLEL_LAYERS

# Flag of the exported config, true where the option has the second value; the native layout writes it only then.
VARIANTS = {
    "fc_norm": ("tap_norms", True, False),
    "norm_output": ("feedback", "post_norm", "pre_norm"),
    "norm_before_residual": ("norm_before_residual", True, False),
}
# Where vLLM looks for the token of the masks; the first one that is there counts (_init_parallel_drafting_params).
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
MASK_KEY, PARALLEL = "ptd_token_id", "parallel_drafting"  # what the native layout writes
MASK_HIDDEN, MASK_EMBEDDING, TABLE = "mask_hidden", "mask_embedding", "embed_tokens.weight"
MASK_TOKEN = "mask_token"  # the option that says which row of the table the mask embedding is


@dataclass(frozen=True)
class Kind:
    """One kind. `speculator` and `architecture`: how the speculators layout names it; `tensors`: those that it has
    besides EAGLE-3's; `own_row`: an option that names a row of the embedding that is the drafter's own."""

    name: str
    most_layers: int
    variants: dict[str, tuple[str, Any, Any]]
    speculator: str
    architecture: str
    owned: dict[str, str]
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    own_row: str = ""

    @property
    def structure(self) -> tuple[str, ...]:
        """`drafter.options` that a checkpoint fixes; the others say how it is trained."""
        return ("draft_vocab_size", "intermediate_size", "num_layers",
                *(option for option, _, _ in self.variants.values()), *([self.own_row] if self.own_row else []))


KINDS = {
    "eagle3": Kind("eagle3", MOST_LAYERS, VARIANTS, "eagle3", "Eagle3Speculator",
                   {"embed_tokens": "target", "lm_head": "drafter"}),
    # Nothing is fed back in one pass: norm_output has no meaning.
    "parallel": Kind("parallel", MOST_PARALLEL_LAYERS, {k: v for k, v in VARIANTS.items() if k != "norm_output"},
                     "peagle", "PEagleSpeculator",
                     {"embed_tokens": "target, but for the mask token's row", "lm_head": "drafter"},
                     {MASK_HIDDEN: ("1", "1", "n*Ht")}, MASK_TOKEN),
}


def kind_of(config: dict[str, Any], tensors: Iterable[str] = ()) -> Kind:
    """The kind that a config in native keys describes, or the names of its tensors."""
    masked = any(config.get(key) is not None for key in MASK_KEYS) or bool(config.get(PARALLEL))
    return KINDS["parallel" if masked or MASK_HIDDEN in tensors else "eagle3"]


def mask_token(config: dict[str, Any]) -> Any:
    """The token of the masks as engines read it from native keys; None where no key names one."""
    return next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
