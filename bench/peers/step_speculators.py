"""Steps the EAGLE-3 core of the PyPI package `speculators` on a CPU: `python step_speculators.py`, see serving.py.

Its Trainer wants a GPU; what a step is stands in its trainer.py: forward, backward, clip to 1.0, optimizer. On a CPU
its flex attention has no backward and its fused losses need Triton, so SDPA and the eager loss of the package serve.
Its output head is frozen, as the package has it.
"""

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from serving import Case, conversations, serve, supervised
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.optimizers import build_optimizers
from torch import Tensor, nn
from transformers import LlamaConfig

NAMES = {"layers.0.": "midlayer.", "input_norm.": "tap_norm."}  # theirs to ours
# The defaults of its command line, which `style: own` takes; `plain` is the architecture of the paper.
STYLES = {"own": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}, "plain": {}}
OPTIMIZER = {"weight_decay": 0.01, "muon_momentum": 0.95, "muon_weight_decay": 0.1, "muon_ns_steps": 5,
             "muon_adjust_lr_fn": "match_rms_adamw"}


class Speculators:
    name, version, clip = "speculators", version("speculators"), 1.0

    def __init__(self, opening: dict[str, Any], tables: Case) -> None:
        shape, depth = opening["shape"], opening["depth"]
        layer = LlamaConfig(
            vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], num_hidden_layers=1,
            intermediate_size=shape["intermediate_size"], num_attention_heads=shape["num_attention_heads"],
            num_key_value_heads=shape["num_key_value_heads"], head_dim=shape["head_dim"], pad_token_id=None,
            rms_norm_eps=shape["rms_norm_eps"], rope_parameters=shape["rope_parameters"],
            max_position_embeddings=shape["max_position_embeddings"])
        layer._attn_implementation = "sdpa"
        self.model = Eagle3DraftModel(Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=shape["draft_vocab_size"], **STYLES[opening["style"]],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depth)],
                default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]))))
        ids = tables["ids"]
        t2d = torch.zeros(shape["vocab_size"], dtype=torch.bool)
        t2d[ids] = True
        self.model.load_vocab_mappings(t2d, ids - torch.arange(len(ids)))
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(tables["embedding"])
            self.model.lm_head.weight.copy_(tables["head"][ids])
            self.model.verifier_lm_head.weight.copy_(tables["head"][ids])
            own = self.model.state_dict()
            for name, tensor in tables.items():
                if name.startswith("weights."):
                    own[theirs(name.removeprefix("weights."))].copy_(tensor)
        self.model.verifier_norm = nn.Identity()  # stored final states are behind the target's final norm
        _, self.call = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation="eager", ttt_steps=depth, ttt_step_loss_decay=1.0)
        self.optimizers = build_optimizers(self.model, SimpleNamespace(
            optimizer="muon" if opening["optimizer"] == "own" else "adamw", lr=1e-3, muon_lr=1e-3, **OPTIMIZER))

    def run(self, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics; each conversation shifted as its data loader does, packed with document ids."""
        mask, parts = supervised(case, self.name), []
        for document, part in enumerate(conversations(case)):
            tokens = part.stop - part.start
            shifted = shift_batch({
                "input_ids": case["ids"][part], "hidden_states": case["taps"][part], "loss_mask": mask[part],
                "verifier_last_hidden_states": case["final"][part], "lengths": torch.tensor([tokens]),
                "position_ids": torch.arange(tokens)})
            del shifted["lengths"]
            parts.append(shifted | {"document_ids": torch.full((tokens - 1,), document)})
        packed = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
        _, loss, metrics = self.model(**packed, **self.call)
        return loss, metrics

    def loss(self, case: Case, options: dict[str, Any]) -> Tensor:
        return self.run(case)[0]

    def depth_losses(self, case: Case) -> list[float]:
        metrics = self.run(case)[1]
        return [float(metrics[f"loss_{k}_sum"]) for k in range(self.call["ttt_steps"])]

    def tensors(self) -> dict[str, Tensor]:
        names = {name for name, p in self.model.named_parameters() if p.requires_grad} | {"lm_head.weight"}
        return {ours(name): tensor for name, tensor in self.model.state_dict().items() if name in names}


def ours(name: str) -> str:
    """The name of one of its tensors in a checkpoint of this project."""
    for there, here in NAMES.items():
        name = name.replace(there, here, 1) if name.startswith(there) else name
    return name


def theirs(name: str) -> str:
    """The other way."""
    for there, here in NAMES.items():
        name = name.replace(here, there, 1) if name.startswith(here) else name
    return name


if __name__ == "__main__":
    serve(Speculators)
