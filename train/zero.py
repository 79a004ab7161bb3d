"""DeepSpeed ZeRO: what a launch's config may say beside a recipe, and a drafter as ZeRO-3 has to see it."""

import importlib
import json
from collections import namedtuple
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.schema import Train

USE_AUTO = "use auto, or leave it out"
# What the recipe decides for every launch: a launch's config has no say in it.
REFUSED = {
    "optimizer": "the recipe's train section makes the optimizer",
    "scheduler": "the recipe's train section makes the schedule",
    "amp": "train.dtype is the precision",
    "data_efficiency": "the recipe decides which rows a step trains on",
    "curriculum_learning": "the recipe decides which rows a step trains on",
    "elasticity": "the global batch is the recipe's; a run continues on other processes by itself",
    "tensor_parallel": "a drafter is not split by layers; target.tp_plan shares out the target",
}
# Derived from a model's width by accelerate, which finds none in a drafter; without them DeepSpeed's defaults hold.
BY_WIDTH = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def stated(config: dict[str, Any], environment: dict[str, str]) -> set[str]:
    """Keys of accelerate's DeepSpeed config that the user wrote, not accelerate (it writes 1 where nothing is said)."""
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path != "none" and Path(path).is_file():
        return set(json.loads(Path(path).read_text(encoding="utf-8")))
    named = {name for name in environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",") if name}
    # Options on accelerate's command line are not listed; accelerate's own value for both is 1.
    named |= {key for key in ("gradient_accumulation_steps", "gradient_clipping") if config.get(key) not in (1, 1.0)}
    return named


def configure(config: dict[str, Any], section: Train, ranks: int, named: set[str]) -> None:
    """Fills the `auto` values of a DeepSpeed config, in place, from the recipe. `named`: keys that the user wrote.

    Raises ConfigError where the config says other things than the recipe, or asks for what drafters do not have.
    """
    zero = config.get("zero_optimization", {})
    if zero.get("stage") not in (1, 2, 3):
        raise ConfigError(f"the DeepSpeed config sets zero stage {zero.get('stage')}; use 1, 2 or 3, or "
                          "recipes/accelerate/ddp.yaml for training without DeepSpeed")
    for key, why in REFUSED.items():
        if config.get(key):
            raise ConfigError(f"the DeepSpeed config has a section {key}: {why}; leave it out")
    wanted = {
        "train_micro_batch_size_per_gpu": section.batch_rows,
        "gradient_accumulation_steps": section.accumulation,
        "gradient_clipping": section.clip,
        "train_batch_size": section.batch_rows * section.accumulation * ranks,
    }
    for key, value in wanted.items():
        given = config.get(key, "auto")
        if given not in ("auto", value) and key in named:
            raise ConfigError(f"the DeepSpeed config sets {key} = {given}, the recipe {value}; {USE_AUTO}")
        config[key] = value
    check_precision(config, section.dtype)
    check_offload(zero)
    for key in BY_WIDTH:
        if zero.get(key) == "auto":
            del zero[key]
    # Weights stay float32, as without DeepSpeed; its own bf16 mode casts parameters but not our tables.
    config["torch_autocast"] = {"enabled": section.dtype == "bfloat16", "dtype": "bfloat16"}
    config["zero_allow_untested_optimizer"] = True
    # DeepSpeed's own optimizer for offloaded states would replace the recipe's.
    config["zero_force_ds_cpu_optimizer"] = False
    for name in autos(config):
        raise ConfigError(f"the DeepSpeed config sets {name} = auto, which the recipe has no value for; leave it out")


def check_precision(config: dict[str, Any], dtype: str) -> None:
    """ConfigError for another precision than the recipe's; turns DeepSpeed's own modes off."""
    for mode in ("fp16", "bf16"):
        section = config.setdefault(mode, {"enabled": False})
        if section.get("enabled", False) not in (False, "auto"):
            raise ConfigError(f"the DeepSpeed config enables {mode}: train.dtype = {dtype} is the precision of the "
                              f"forward pass, and weights stay float32; {USE_AUTO}")
        section["enabled"] = False
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled", "auto") not in ("auto", dtype == "bfloat16"):
        raise ConfigError(f"the DeepSpeed config sets torch_autocast.enabled = {autocast['enabled']}, the recipe "
                          f"train.dtype = {dtype}; {USE_AUTO}")


def check_offload(zero: dict[str, Any]) -> None:
    """ConfigError for states or parameters kept on NVMe."""
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") == "nvme":
            raise ConfigError(f"the DeepSpeed config sets zero_optimization.{part}.device = nvme: a drafter's states "
                              "fit the CPU's memory; use cpu or none")


def autos(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the values that are still `auto`."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"


def check_mixed_precision(launched: str, dtype: str) -> None:
    """ConfigError where the launch asks for another precision than train.dtype; `no` leaves it to the recipe."""
    if launched not in ("no", {"bfloat16": "bf16"}.get(dtype, "no")):
        raise ConfigError(f"the launch sets mixed_precision = {launched}, the recipe train.dtype = {dtype}; launch "
                          "with --mixed_precision no, which leaves it to the recipe")


class OneModule(nn.Module):
    """A drafter as ZeRO-3 sees it: one module that owns all parameters and has no parts.

    So they are gathered once a pass, together, whichever parts of the drafter the pass calls and how often: ranks with
    unlike rows cannot differ in it, which would hang them, and the drafter's own methods, which DeepSpeed does not know
    of, may be called within `gathered`. A drafter is about one layer and a head, so little is saved by less.
    Frozen tables are the drafter's buffers: not partitioned.
    """

    def __init__(self, drafter: nn.Module) -> None:
        super().__init__()
        self.drafter = (drafter,)  # in a tuple, so that it is no submodule
        for index, parameter in enumerate(drafter.parameters()):
            self.register_parameter(f"parameter_{index}", parameter)

    def train(self, mode: bool = True) -> "OneModule":
        self.drafter[0].train(mode)
        return super().train(mode)

    def forward(self, *args: Any) -> Any:
        """The drafter's forward; a dataclass becomes a named tuple, in which DeepSpeed finds the tensors."""
        out = self.drafter[0](*args)
        names = [f.name for f in fields(out)]
        return namedtuple(type(out).__name__, names)(*(getattr(out, name) for name in names))


def as_launched(accelerator: Accelerator, drafter: nn.Module) -> nn.Module:
    """The module to prepare: the drafter, or what stands for it under ZeRO-3."""
    plugin = accelerator.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    return OneModule(drafter) if plugin and plugin.zero_stage == 3 else drafter


def partitioned(drafter: nn.Module) -> bool:
    """True where ZeRO-3 has dealt out the parameters: each is empty until it is gathered."""
    return any(hasattr(p, "ds_id") for p in drafter.parameters())


def gathered(drafter: nn.Module, write: bool = False) -> AbstractContextManager:
    """Within it the drafter's parameters are whole. All ranks enter and leave it together; between, they may do
    different things. write: what rank 0 puts into them is kept, on all ranks."""
    if not partitioned(drafter):
        return nullcontext()
    deepspeed = importlib.import_module("deepspeed")
    return deepspeed.zero.GatheredParameters(list(drafter.parameters()), modifier_rank=0 if write else None)


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items()}
