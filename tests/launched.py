"""Training in real gloo processes, as `accelerate launch` starts them: forks of the test's process that get the
variables which accelerate's own launcher would set for a config file. The slow tests go through the launcher itself."""

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import forked
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from recipes.cli import run
from train.run import COMMAND

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = {kind: ROOT / "recipes" / "accelerate" / f"{file}.yaml" for kind, file in (
    ("ddp", "ddp-cpu"), ("zero1", "zero1"), ("zero2", "zero2"), ("zero3", "zero3"))}


def variables(config: Path) -> dict[str, str]:
    """What `accelerate launch --config_file CONFIG` sets for the processes that it starts."""
    args = launch_command_parser().parse_args(
        ["--quiet", "--config_file", str(config), "--main_process_port", str(forked.free_port()), "train/eagle3.py"])
    with mock.patch("torch.distributed.run.run", side_effect=lambda args: seen.update(os.environ)) as started:
        seen: dict[str, str] = {}
        launch_command(args)
    assert started.called
    return {k: v for k, v in seen.items() if os.environ.get(k) != v and k != "PYTHONPATH"}


def whole_zero3(folder: Path) -> Path:
    """A ZeRO-3 config, as DeepSpeed's own JSON, that deals out the smallest parameter too."""
    config = folder / "zero3.json"
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}}))
    launch = folder / "zero3.yaml"
    launch.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\n"
                      f"num_processes: 2\nmachine_rank: 0\ndeepspeed_config:\n  deepspeed_config_file: {config}\n")
    return launch


def train(base: Path, name: str, config: Path | None, *flags: str, each: Callable[[int], None] = lambda rank: None,
          world: int = 2) -> list[forked.Ended]:
    """The run `name` on a copy of the traces of base/runs/tiny, in so many processes; each(rank) comes before it."""
    folder = base / "runs" / name
    if not folder.exists():
        shutil.copytree(base / "runs" / "tiny" / "traces", folder / "traces")
    known = variables(config) if config else {}
    if "ACCELERATE_USE_DEEPSPEED" in known:
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed")  # once, for all forks

    def work(rank: int) -> None:
        AcceleratorState._reset_state(True)  # of a test before in this process
        os.environ.update(known)
        torch.set_num_threads(1)
        each(rank)
        run(COMMAND, ["--config", str(base / "r.yaml"), "--name", name, *flags])

    return forked.together(world, work, folder)


def result(base: Path, name: str, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[dict]]:
    """Weights and optimizer state of a run's checkpoint, and its validation curve there."""
    path = base / "runs" / name / "checkpoints" / f"step-{step:06d}"
    trainer = json.loads((path / "trainer.json").read_text())
    return load_file(path / "drafter.safetensors"), load_file(path / "optimizer.safetensors"), (
        trainer["progress"]["curve"])


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal up to the order of sums."""
    assert set(found) == set(wanted)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=2e-4)


def counts(curve: list[dict]) -> list[tuple]:
    """What a validation curve counted."""
    return [(row["step"], row["drafts"], row["per_position"]) for row in curve]
