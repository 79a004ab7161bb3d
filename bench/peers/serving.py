"""What a process that trains one drafter answers, one JSON object a line, on stdin and stdout.

It runs in the foreign environments too: of third parties it needs torch and safetensors alone.
A case is a safetensors file of packed conversations, N tokens: ids [N], turns [N] (above 0: supervised),
starts [N] (where the conversation of each begins), taps [N, n*H], final [N, H] (after the target's final norm).
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")  # Linux: 5 sets the peak of resident memory back to what is resident now
Case = dict[str, Tensor]


class Side(Protocol):
    """A drafter with its optimizers."""

    name: str
    version: str
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    clip: float  # largest global gradient norm

    def loss(self, case: Case, options: dict[str, Any]) -> Tensor:
        """The training loss of a case, a scalar."""

    def depth_losses(self, case: Case) -> list[float]:
        """The mean loss of each unrolled step over the positions that it counts."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint would hold."""


def serve(build: Callable[[dict[str, Any], Case], Side]) -> None:
    """Builds a side from the first line of stdin, {tables, threads, seed, shape, ...}, and answers the others.

    tables: a safetensors file of `embedding` and `head` [V, H], `ids` [D] and, where it has them, first weights.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=channel, flush=True)

    opening, imported = json.loads(sys.stdin.readline()), status("VmRSS")
    torch.set_num_threads(opening["threads"])
    torch.manual_seed(opening["seed"])
    side = build(opening, load_file(opening["tables"]))
    side.model.train()
    trained = sum(p.numel() for p in side.model.parameters() if p.requires_grad)
    answer(name=side.name, version=side.version, torch=torch.__version__, trained=trained, imported=imported)
    for line in sys.stdin:
        asked = json.loads(line)
        answer(**WORKS[asked["do"]](side, asked))


def step(side: Side, asked: dict[str, Any]) -> dict[str, float]:
    """One optimizer step: {case, lr, options} to its seconds and loss. A group of parameters that has a rate of its own
    names it `relative` to lr."""
    case = load_file(asked["case"])
    for optimizer in side.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = asked["lr"] * group.get("relative", 1.0)
    began = time.perf_counter()
    loss = side.loss(case, asked["options"])
    loss.backward()
    middle = time.perf_counter()
    nn.utils.clip_grad_norm_([p for p in side.model.parameters() if p.grad is not None], side.clip)
    for optimizer in side.optimizers:
        optimizer.step()
    for optimizer in side.optimizers:
        optimizer.zero_grad()
    return {"forward_backward": middle - began, "optimizer": time.perf_counter() - middle, "loss": float(loss.detach())}


def memory(side: Side, asked: dict[str, Any]) -> dict[str, int | None]:
    """The most resident memory during a step of its own; null where the system cannot tell."""
    gc.collect()
    if not RESET.exists():
        return {"peak_bytes": None}
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what earlier steps took
    if trim is not None:
        trim(0)
    RESET.write_text("5", encoding="ascii")
    step(side, asked)
    return {"peak_bytes": status("VmHWM")}


def status(name: str) -> int | None:
    """A size of this process, in bytes; None where the system cannot tell."""
    if not STATUS.exists():
        return None
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@torch.no_grad()
def losses(side: Side, asked: dict[str, Any]) -> dict[str, list[float]]:
    return {"losses": side.depth_losses(load_file(asked["case"]))}


def save(side: Side, asked: dict[str, Any]) -> dict[str, str]:
    """Writes the trained tensors as a safetensors file."""
    save_file({name: tensor.detach().contiguous() for name, tensor in side.tensors().items()}, asked["path"])
    return {"saved": asked["path"]}


WORKS = {"step": step, "memory": memory, "losses": losses, "save": save}


def conversations(case: Case) -> list[slice]:
    """The conversations of a case."""
    borders = [*case["starts"].unique().tolist(), len(case["starts"])]
    return [slice(first, last) for first, last in zip(borders, borders[1:])]


def supervised(case: Case, name: str) -> Tensor:
    """Tokens that carry loss, [N] bool. A case that compares losses says which for each side, so that all count the
    same positions."""
    return case.get(f"mask.{name}", case["turns"] > 0).bool()
