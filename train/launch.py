"""Starts Accelerate, with DeepSpeed where the launch config says so, on GPUs or on CPU processes over gloo."""

import importlib
import os
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, InitProcessGroupKwargs
from transformers.integrations import unset_hf_deepspeed_config

from recipes.errors import ConfigError, RunError
from recipes.launched import check_launch, end_with_launcher
from recipes.schema import Train
from train.zero import check_mixed_precision, configure, stated

# A process may write a checkpoint to slow storage, or read a large target, for long while the others wait (case 43).
PATIENCE = timedelta(hours=4)


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
        PartialState(cpu=True, timeout=PATIENCE)
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    check_mixed_precision(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), section.dtype)
    accelerator = Accelerator(
        cpu=cpu and not zero,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=section.accumulation, sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(),
        mixed_precision="bf16" if section.dtype == "bfloat16" and not zero else "no",
        log_with=tracker,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if accelerator.num_processes != wanted:
        raise RunError(f"accelerate sees {accelerator.num_processes} processes, the launcher started {wanted}")
    if zero:
        if accelerator.distributed_type != DistributedType.DEEPSPEED:
            raise RunError(f"the launcher asked for DeepSpeed, accelerate runs {accelerator.distributed_type.value}")
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        configure(config, section, wanted, stated(config, dict(os.environ)))
        unset_hf_deepspeed_config()  # transformers would deal out the target's weights too, under ZeRO-3
    return accelerator
