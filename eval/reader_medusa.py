"""An independent reader of exported Medusa heads: plain torch, written from the formats alone.

It shares no code with training, decoding or export, so that an error there cannot hide in here too (case 12). Source:
formats.md section 3 and eagle3.md. H hidden size, V target vocabulary, D draft vocabulary, K heads.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from recipes.errors import RunError


class ReadMedusa:
    """The heads of an exported folder beside their target; computes in the target's precision."""

    frequencies = None  # nothing is rotated

    def __init__(self, folder: Path, model: nn.Module) -> None:
        """Raises RunError for unreadable files, missing or unexpected tensors, a map outside the target."""
        try:
            self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            original = "medusa_num_heads" in self.config
            weights = load_file(folder / ("medusa_lm_head.safetensors" if original else "model.safetensors"))
        except (OSError, ValueError, SafetensorError) as error:
            raise RunError(f"{folder}: cannot be read: {error}; export again") from None
        V = model.config.vocab_size
        self.layers = [model.config.num_hidden_layers + 1]  # as read_target counts: behind the final norm
        self.limit = model.config.max_position_embeddings
        self.target_ids = weights.pop("token_map", torch.arange(V)).tolist()  # ids, not offsets
        if len(set(self.target_ids)) != len(self.target_ids) or not all(0 <= i < V for i in self.target_ids):
            raise RunError(f"{folder}: token_map has repeated ids or ids not in 0..{V - 1}; export again")
        # Where the config cuts no vocabulary vLLM skips the map: any row can be proposed, though some were never meant.
        self.skips_map = not original and self.config.get("truncated_vocab_size", V) == V
        unread = dict(weights)
        try:
            self.heads = (self.original if original else self.vllm)(unread)
        except KeyError as error:
            raise RunError(f"{folder}: {error.args[0]} missing; export again") from None
        rows = {len(projection) for _, projection in self.heads}
        if unread or rows != {V if self.skips_map else len(self.target_ids)}:
            raise RunError(f"{folder}: unexpected: {', '.join(sorted(unread)) or f'projections of {rows} rows'}; "
                           "export again")
        device, dtype = model.device, model.dtype
        self.heads = [([(w.to(device, dtype), b.to(device, dtype)) for w, b in blocks], projection.to(device, dtype))
                      for blocks, projection in self.heads]

    def original(self, weights: dict[str, Tensor]) -> list[tuple[list[tuple[Tensor, Tensor]], Tensor]]:
        """Blocks (weight, bias) and projection of each head; takes them out of `weights`."""
        n = self.config["medusa_num_layers"]
        return [([(weights.pop(f"{i}.{j}.linear.weight"), weights.pop(f"{i}.{j}.linear.bias")) for j in range(n)],
                 weights.pop(f"{i}.{n}.weight")) for i in range(self.config["medusa_num_heads"])]

    def vllm(self, weights: dict[str, Tensor]) -> list[tuple[list[tuple[Tensor, Tensor]], Tensor]]:
        """The same of vLLM's layout."""
        n, K = self.config["num_hidden_layers"], self.config["num_heads"]
        blocks = []
        for i in range(K):
            names = [f"blocks.{i}.layers.{j}" for j in range(n)]
            matrices = [weights.pop(f"{name}.weight") for name in names]
            biases = ([weights.pop(f"{name}.bias") for name in names] if self.config.get("medusa_fc_bias")
                      else [w.new_zeros(len(w)) for w in matrices])
            blocks.append(list(zip(matrices, biases)))
        shared = self.config.get("original_lm_head")
        projections = ([weights.pop("lm_heads.0.weight")] * K if shared
                       else [weights.pop(f"lm_heads.{i}.weight") for i in range(K)])
        return list(zip(blocks, projections))

    def draft(self, taps: list[Tensor], tokens: list[int], length: int) -> list[int]:
        """K target ids that follow `tokens` (t + 2 of them), from the target's final state at position t."""
        best = [int(logits.argmax()) for logits in self.logits(taps, length)]
        return best if self.skips_map else [self.target_ids[row] for row in best]

    def draft_logits(self, taps: list[Tensor], tokens: list[int], length: int) -> list[Tensor]:
        """Logits [D] of each head of `draft`, of the tokens that it is meant to propose."""
        found = self.logits(taps, length)
        return [logits[self.target_ids] for logits in found] if self.skips_map else found

    def logits(self, taps: list[Tensor], length: int) -> list[Tensor]:
        """Logits of all rows of each head. RunError where there are fewer heads than tokens are asked for."""
        if length > len(self.heads):
            raise RunError(f"{length} tokens a draft, but the export has {len(self.heads)} heads")
        found = []
        for blocks, projection in self.heads[:length]:
            x = taps[0][-1]
            for weight, bias in blocks:
                x = x + F.silu(weight @ x + bias)
            found.append(projection @ x)
        return found
