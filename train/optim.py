"""Optimisers by name. Each is one torch Optimizer whose groups hold their peak rate in `peak_lr`."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn
from torch.optim import Optimizer

from recipes.errors import ConfigError
from recipes.schema import Train


class Composite(Optimizer):
    """Several optimizers, each over groups of its own, as one: one list of groups, one state, one state_dict."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every part. The closure, if any, is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)
        for part in self.parts:
            # load_state_dict and whoever wraps this object replace groups and state: the parts take what is here now.
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state
            part.step()
        return loss


def split(drafter: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters as (hidden matrices, the rest), in the module's order.

    The rest is vectors, and every matrix with a row for each token (`vocabulary_modules`), which Muon is not made for:
    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is Scalable
    for LLM Training", section 2.2.
    """
    facing = {id(p) for name in drafter.vocabulary_modules for p in drafter.get_submodule(name).parameters()}
    trained = [p for p in drafter.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in facing]
    chosen = set(map(id, matrices))
    return matrices, [p for p in trained if id(p) not in chosen]


def adamw_over(parameters: list[nn.Parameter], section: Train) -> Optimizer:
    group = {"params": parameters, "name": "adamw", "peak_lr": section.lr}
    return torch.optim.AdamW([group], lr=section.lr, betas=(section.beta1, section.beta2),
                             weight_decay=section.weight_decay, fused=True)


def adamw(drafter: Any, section: Train) -> Optimizer:
    """AdamW for all trained parameters."""
    return adamw_over([p for p in drafter.parameters() if p.requires_grad], section)


def muon(drafter: Any, section: Train) -> Optimizer:
    """Muon for the hidden matrices, AdamW for the rest. Muon's update is scaled to the size of AdamW's (Liu et al.
    2025, equation 4), so that one rate and one weight decay serve both."""
    matrices, rest = split(drafter)
    peak = section.muon_lr or section.lr
    group = {"params": matrices, "name": "muon", "peak_lr": peak}
    return Composite([
        torch.optim.Muon([group], lr=peak, weight_decay=section.weight_decay, momentum=section.muon_momentum,
                         ns_steps=section.ns_steps, adjust_lr_fn="match_rms_adamw"),
        adamw_over(rest, section)])


OPTIMIZERS: dict[str, Callable[[Any, Train], Optimizer]] = {"adamw": adamw, "muon": muon}
WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def build(drafter: Any, section: Train) -> Optimizer:
    """The optimizer that `train.optimizer` names, over the drafter's trained parameters."""
    return OPTIMIZERS[section.optimizer](drafter, section)


def check(section: Train, distributed: DistributedType) -> None:
    """ConfigError for Muon where the parameters are not whole on every process.

    ZeRO (and FSDP) hand an optimizer pieces of the parameters; Muon needs whole matrices. DeepSpeed's own Muon
    orthogonalises before the gradients are clipped: clipping would then shrink the update itself, by the global norm.
    """
    if section.optimizer == "muon" and distributed not in WHOLE:
        raise ConfigError(f"train.optimizer = muon: Muon needs whole matrices, which {distributed.value} cuts into "
                          "pieces; launch with plain data parallelism (docs/training.md), or set train.optimizer "
                          "to adamw")
