"""The optimizer's state by parameter name: the same on any number of processes, with plain data parallelism and under
every ZeRO stage, so that any launch goes on where another one stopped.

A key is `exp_avg/midlayer.mlp.up_proj.weight`: a name of the optimizer's own, then the parameter's. Values have the
parameter's shape or none (`step`). `master/...` is the float32 copy of a weight of lower precision.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recipes.errors import RunError
from train.zero import gathered

MASTER = "master"


def flat_groups(optimizer: Any) -> list[tuple[list[nn.Parameter], Tensor]]:
    """Which parameters ZeRO keeps in each of its flat float32 tensors, this rank's part of them; empty without ZeRO."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return list(zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat))
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        return list(zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups))
    return []


def fragments() -> ModuleType:
    """DeepSpeed's calls that read and write a parameter's whole state, whichever ranks hold its parts."""
    return importlib.import_module("deepspeed.utils.tensor_fragment")


def home(key_value: Tensor, p: Tensor, group: dict[str, Any]) -> Tensor:
    """A copy of a state's value where the optimizer wants it: scalars are on the CPU unless its kernel counts steps."""
    there = key_value.dim() > 0 or group.get("fused") or group.get("capturable")
    return key_value.to(p.device if there else "cpu", copy=True)


def collect(optimizer: Any, drafter: nn.Module, keep: bool) -> dict[str, Tensor]:
    """The state by name, on the CPU. All ranks call it together; only those that `keep` get it, others nothing."""
    names = {p: name for name, p in drafter.named_parameters()}
    found: dict[str, Tensor] = {}

    def put(key: str, p: nn.Parameter, value: Any) -> None:
        if keep:
            found[f"{key}/{names[p]}"] = torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()

    groups = flat_groups(optimizer)
    for params, flat in groups:
        state = optimizer.optimizer.state.get(flat, {})
        for p in params:
            if p.dtype != torch.float32:
                put(MASTER, p, fragments().safe_get_full_fp32_param(p))
            for key in sorted(state):
                shaped = torch.is_tensor(state[key]) and state[key].shape == flat.shape
                put(key, p, fragments().safe_get_full_optimizer_state(p, key) if shaped else state[key])
    if not groups:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                put(key, p, value)
    return found


def restore(optimizer: Any, drafter: nn.Module, weights: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Puts the weights of a checkpoint into the drafter and the state into its optimizer. All ranks call it together.

    Raises RunError where they do not fit.
    """
    held = drafter.tensors().keys()  # what is the target's own comes from the target
    parameters = {name: p for name, p in drafter.named_parameters() if name in held}
    check(parameters, weights, stored)
    with torch.no_grad(), gathered(drafter, write=True):
        for name, p in parameters.items():
            p.copy_(weights[name])
    by_name: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for full, value in stored.items():
        key, _, name = full.partition("/")
        by_name[name][key] = value
    names = {p: name for name, p in parameters.items()}
    groups = flat_groups(optimizer)
    for params, flat in groups:
        restore_flat(optimizer, params, flat, [by_name[names[p]] for p in params], [weights[names[p]] for p in params])
    for group in () if groups else optimizer.param_groups:
        for p in group["params"]:
            if own := by_name[names[p]]:
                optimizer.state[p] = {key: home(value, p, group) for key, value in own.items()}


def restore_flat(optimizer: Any, params: list[nn.Parameter], flat: Tensor, states: list[dict[str, Tensor]],
                 weights: list[Tensor]) -> None:
    """The same for one of ZeRO's flat tensors: masters, and a state that is made as the first step would make it."""
    whole = fragments()
    for p, own, weight in zip(params, states, weights):
        whole.safe_set_full_fp32_param(p, own.get(MASTER, weight).to(p.device, torch.float32))
    keys = {key: value for own in states for key, value in own.items() if key != MASTER}
    if not keys:
        return
    state = optimizer.optimizer.state[flat]
    for key, value in keys.items():
        shaped = value.dim() > 0
        if not shaped and any(not torch.equal(own.get(key, value), value) for own in states):
            raise RunError(f"the checkpoint's {key} differs between parameters, of which ZeRO has but one; resume "
                           "without DeepSpeed")
        state[key] = torch.zeros_like(flat) if shaped else home(value, flat, optimizer.optimizer.param_groups[0])
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # stages 1 and 2: what the first step does
        optimizer._lazy_init_hp_params_optimizer_state()
    for p, own in zip(params, states):
        for key, value in own.items():
            if key != MASTER and value.dim() > 0:
                whole.safe_set_full_optimizer_state(p, value.to(p.device, torch.float32), key)


def check(parameters: dict[str, nn.Parameter], weights: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """RunError where a parameter has no weight, a state no parameter, or a shape differs."""
    for name, p in parameters.items():
        shape = tuple(getattr(p, "ds_shape", p.shape))
        if name not in weights or tuple(weights[name].shape) != shape:
            raise RunError(f"the checkpoint's {name} is {tuple(weights[name].shape) if name in weights else 'missing'}"
                           f", not {shape}")
    for full, value in stored.items():
        name = full.partition("/")[2]
        if name not in parameters or value.dim() and value.shape != weights[name].shape:
            raise RunError(f"the checkpoint's optimizer state {full} {tuple(value.shape)} fits no parameter")
