"""An independent reader of a small language model's folder: transformers alone, without a cache.

It shares no code with training, decoding or export, so that an error there cannot hide in here too (case 12). Source:
formats.md section 6. V vocabulary, K draft length.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from recipes.errors import RunError


class ReadLM:
    """The model of an exported folder beside its target; computes in the target's precision."""

    frequencies = None  # its rotation is transformers' own
    layers: list[int] = []  # of the target that it reads

    def __init__(self, folder: Path, model: nn.Module) -> None:
        """RunError where the folder is not a whole model of the target's vocabulary."""
        try:
            self.model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, use_safetensors=True,
                                                                      output_loading_info=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise RunError(f"{folder}: cannot be read: {error!s:.300}; export again") from None
        wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
        if wrong or self.model.config.vocab_size != model.config.vocab_size:
            raise RunError(f"{folder}: not a whole model of the target's vocabulary ({wrong[:3] or 'another size'}); "
                           "export again")
        self.model = self.model.to(model.device).eval()
        self.limit = self.model.config.max_position_embeddings
        self.target_ids = list(range(model.config.vocab_size))

    def draft(self, taps: list[Tensor], tokens: list[int], length: int) -> list[int]:
        """K target ids that follow `tokens`."""
        return [int(logits.argmax()) for logits in self.draft_logits(taps, tokens, length)]

    def draft_logits(self, taps: list[Tensor], tokens: list[int], length: int) -> list[Tensor]:
        """Logits [V] of each step of `draft`; the text is read anew for every token."""
        found, text = [], list(tokens)
        for _ in range(length):
            found.append(self.model(torch.tensor([text], device=self.model.device), use_cache=False).logits[0, -1])
            text.append(int(found[-1].argmax()))
        return found
