"""Where a target's weights lie: on one device, or spread over several by transformers' `device_map`.

Accelerate's hooks then move each layer's inputs to its device, and fetch the weights of a module that is kept on the
CPU or on disk for as long as it runs.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device, check_device_map, get_max_memory
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.errors import ConfigError
from recipes.launched import local_processes, local_rank, processes
from recipes.schema import Target as TargetSection

NAMED = ("auto", "balanced", "balanced_low_0", "sequential")


def pick_device(name: str, field: str = "target.device") -> torch.device:
    """The device of that name; auto is CUDA where there is one, for the processes of a launch each its own (shared
    where there are fewer). ConfigError names `field`."""
    if name == "auto" and torch.cuda.is_available() and processes() > 1:
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{field} = {name}: not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{field} = {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def loading_options(section: TargetSection) -> dict[str, Any]:
    """What `from_pretrained` is told about devices; nothing where the target goes to one device.

    Raises ConfigError for settings that contradict one another and for devices that this machine does not have.
    """
    spread = section.device_map
    if section.tp_plan and spread:
        raise ConfigError("target.tp_plan and target.device_map: either shares out a target; set one of them")
    if (section.tp_plan or spread) and section.device != "auto":
        which = "tp_plan" if section.tp_plan else "device_map"
        raise ConfigError(f"target.device = {section.device}: target.{which} places the weights; leave device at auto")
    if not spread:
        return {}
    if isinstance(spread, str) and spread not in NAMED:
        raise ConfigError(f"target.device_map = {spread}: use {', '.join(NAMED)} or a map of modules to devices")
    if isinstance(spread, dict):
        for module, place in spread.items():
            if place != "disk":
                pick_device(f"cuda:{place}" if isinstance(place, int) else place, f"target.device_map.{module}")
    # Only weights that transformers rearranges while it loads are written there; others stay in the checkpoint.
    name = hashlib.sha256(section.model.encode()).hexdigest()[:16]
    options = {"device_map": spread, "offload_folder": str(Path(section.cache_dir) / "offload" / name)}
    return options | own_devices(spread)


def own_devices(spread: str | dict[str, int | str]) -> dict[str, Any]:
    """For one of several processes on a machine: its share of the GPUs, the one that it trains on among them, so that
    each process spreads a target of its own. ConfigError where a literal map would put all of them on the same."""
    ranks, rank = local_processes(), local_rank()
    if ranks == 1 or not torch.cuda.is_available():
        return {}
    if isinstance(spread, dict):
        raise ConfigError(f"target.device_map: each of the {ranks} processes of this machine would put its target on "
                          "these devices; use auto, which gives each its share of the GPUs")
    if ranks > torch.cuda.device_count():
        raise ConfigError(f"target.device_map = {spread}: this machine has {torch.cuda.device_count()} GPUs for "
                          f"{ranks} processes; start one process a GPU at most")
    return {"max_memory": {place: size for place, size in get_max_memory().items()
                           if place == "cpu" or place % ranks == rank}}


def check_map(section: TargetSection, model: nn.Module) -> None:
    """ConfigError where a literal map names a module that the model lacks, or leaves out a weight: transformers
    would ignore the one and choose a device for the other."""
    if not isinstance(section.device_map, dict):
        return
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    unknown = sorted(set(section.device_map) - known)
    if unknown:
        raise ConfigError(f"target.device_map: the target has no module {unknown[0]}; its modules begin with "
                          f"{', '.join(name for name, _ in model.named_children())}")
    try:
        check_device_map(model, section.device_map)
    except ValueError as error:
        raise ConfigError(f"target.device_map: {str(error).splitlines()[0]}") from None


def device_of(module: nn.Module) -> torch.device:
    """The device where a module computes, which is not where its weight lies if that is kept elsewhere."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        place = getattr(part, "execution_device", None)
        if place is not None:
            return torch.device(place)
    return module.weight.device


def weight_of(module: nn.Module) -> Tensor:
    """A module's whole weight, read from where it is kept. Processes that share the module call it together."""
    with align_module_device(module):
        weight = module.weight.detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight


def on_one_process(section: TargetSection) -> TargetSection:
    """The section for a stage that is one process: the target over all devices of the machine instead of over the
    processes of a launch."""
    return replace(section, tp_plan="", device_map="auto") if section.tp_plan else section


def on_the_cpu(section: TargetSection) -> TargetSection:
    """The section for what another process is to compute with: all that is asked of the target is on the CPU."""
    return replace(section, tp_plan="", device_map="", device="cpu")
