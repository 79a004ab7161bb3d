"""Steps the EAGLE-3 core of the PyPI package `specforge` on a CPU: `python step_specforge.py`, see serving.py.

What a step is stands in its training/strategies/base.py: the target's full logits from the stored final states, one
position ahead; the unrolled model; losses weighted by 0.8^k; backward; clip to 0.5; AdamW. Its loss kernel needs
Triton, so the reference implementation beside it in the package serves.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import torch._inductor.compile_fx  # it looks for Triton, and must not find the stub
from serving import Case, conversations, serve, supervised
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig


class Stub(ModuleType):
    """Stands for Triton while the package is imported: its kernels are declared and never run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda kernel: kernel) if name == "jit" else object


STUBS = {name: Stub(name) for name in ("triton", "triton.language")}
STUBS["triton"].language = STUBS["triton.language"]
for stub in STUBS.values():
    stub.__spec__ = ModuleSpec(stub.__name__, None)
sys.modules.update(STUBS)
from specforge.algorithms.eagle3 import model as core  # noqa: E402
from specforge.core.loss import _compute_loss  # noqa: E402
from specforge.modeling.draft import LlamaForCausalLMEagle3  # noqa: E402
from specforge.utils import padding  # noqa: E402

for name in STUBS:
    del sys.modules[name]
DECAY = 0.8


class ReferenceLoss:
    apply = staticmethod(_compute_loss)


core.LogSoftmaxLoss = ReferenceLoss


class SpecForge:
    name, version, clip = "specforge", version("specforge"), 0.5

    def __init__(self, opening: dict[str, Any], tables: Case) -> None:
        shape = opening["shape"]
        config = LlamaConfig(
            vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], num_hidden_layers=1,
            intermediate_size=shape["intermediate_size"], num_attention_heads=shape["num_attention_heads"],
            num_key_value_heads=shape["num_key_value_heads"], head_dim=shape["head_dim"], pad_token_id=None,
            rms_norm_eps=shape["rms_norm_eps"], rope_parameters=shape["rope_parameters"],
            max_position_embeddings=shape["max_position_embeddings"], draft_vocab_size=shape["draft_vocab_size"])
        if not opening["compile"]:
            torch.compiler.set_stance("force_eager")
        self.draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        self.head, ids = tables["head"], tables["ids"]
        self.draft.t2d.zero_()
        self.draft.t2d[ids] = True
        self.draft.d2t.copy_(ids - torch.arange(len(ids)))
        with torch.no_grad():
            self.draft.embed_tokens.weight.copy_(tables["embedding"])
            own = self.draft.state_dict()
            for name, tensor in tables.items():
                if name.startswith("weights."):
                    own[name.removeprefix("weights.")].copy_(tensor)
        self.draft.freeze_embedding()
        self.model = core.OnlineEagle3Model(self.draft, length=opening["depth"], attention_backend="sdpa")
        self.optimizers = [torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad],
                                             weight_decay=0.0)]

    def run(self, case: Case) -> tuple[list[Tensor], Tensor]:
        """Its losses, one a step, and its loss mask [B, S]; conversations padded at the end as its collator does."""
        def rows(values: Tensor) -> Tensor:
            return pad_sequence([values[part] for part in parts], batch_first=True)

        parts = conversations(case)
        mask = supervised(case, self.name).int()
        mask[[part.stop - 1 for part in parts]] = 0
        mask = rows(mask)
        with torch.no_grad():
            target = padding(rows(case["final"]) @ self.head.T, left=False)
        losses, *_ = self.model(
            input_ids=padding(rows(case["ids"]), left=False), attention_mask=rows(torch.ones_like(case["ids"])),
            loss_mask=mask[..., None], target=target, hidden_states=rows(case["taps"]))
        return losses, mask

    def loss(self, case: Case, options: dict[str, Any]) -> Tensor:
        return sum(DECAY**k * loss for k, loss in enumerate(self.run(case)[0]))

    def depth_losses(self, case: Case) -> list[float]:
        losses, mask = self.run(case)  # means over all positions, padding included
        return [float(loss) * mask.numel() / int(mask[:, k:].sum()) for k, loss in enumerate(losses)]

    def tensors(self) -> dict[str, Tensor]:
        names = {name for name, p in self.draft.named_parameters() if p.requires_grad}
        return {name: tensor for name, tensor in self.draft.state_dict().items() if name in names}


if __name__ == "__main__":
    serve(SpecForge)
