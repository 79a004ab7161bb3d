"""Starts Accelerate, with DeepSpeed where the launch config says so, on GPUs or on CPU processes over gloo."""

import importlib
import os

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

from recipes.errors import ConfigError, RunError
from recipes.launched import check_launch, end_with_launcher
from recipes.schema import Train


def start(section: Train, tracker: str | None) -> Accelerator:
    """The Accelerator of this process.

    Raises RunError where it does not see as many processes as the launcher started: on a machine without a
    GPU, accelerate under DeepSpeed silently makes every process rank 0 of 1.
    """
    end_with_launcher()
    available = ["none", *map(str, get_available_trackers())]
    if tracker and tracker not in available:
        raise ConfigError(f"train.tracker = {tracker}: not installed or not known; here: {', '.join(available)}")
    check_launch()
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    zero = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    cpu = not torch.cuda.is_available()
    if cpu and zero:
        os.environ["DS_ACCELERATOR"] = "cpu"
        deepspeed = importlib.import_module("deepspeed")  # reads the line above; other runs need not load it
        # Its shared-memory reduction would be compiled at the first start, for minutes; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    accelerator = Accelerator(
        cpu=cpu and not zero,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=section.accumulation, sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(),
        mixed_precision="bf16" if section.dtype == "bfloat16" and not zero else "no",
        log_with=tracker,
    )
    if accelerator.num_processes != wanted:
        raise RunError(f"accelerate sees {accelerator.num_processes} processes, the launcher started {wanted}")
    if zero:
        if accelerator.distributed_type != DistributedType.DEEPSPEED:
            raise RunError(f"the launcher asked for DeepSpeed, accelerate runs {accelerator.distributed_type.value}")
        configure(accelerator, section)
    return accelerator


def configure(accelerator: Accelerator, section: Train) -> None:
    """Fills DeepSpeed's `auto` values from the recipe; ConfigError where its config says otherwise."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    if config.get("zero_optimization", {}).get("stage", 0) > 2:
        raise ConfigError("DeepSpeed ZeRO-3 is not supported for drafters yet; set zero_stage to 1 or 2")
    wanted = {
        "train_micro_batch_size_per_gpu": section.batch_rows,
        "gradient_accumulation_steps": section.accumulation,
        "gradient_clipping": section.clip,
    }
    for key, value in wanted.items():
        given = config.get(key, "auto")
        # accelerate writes 1.0 and 1 where its file names nothing
        if given not in ("auto", value, 1, 1.0):
            raise ConfigError(f"the DeepSpeed config sets {key} = {given}, the recipe {value}; use auto")
        config[key] = value
    config["train_batch_size"] = section.batch_rows * section.accumulation * accelerator.num_processes
    # Weights stay float32, as without DeepSpeed; its own bf16 mode casts parameters but not our tables.
    config["torch_autocast"] = {"enabled": section.dtype == "bfloat16", "dtype": "bfloat16"}
    config["zero_allow_untested_optimizer"] = True
    # Our loss is already divided by the global batch's supervised positions.
    config["zero_force_ds_cpu_optimizer"] = False
