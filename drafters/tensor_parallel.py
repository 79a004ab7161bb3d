"""A target whose every layer is shared among the processes of one launch (transformers' tensor parallelism).

Rank 0 runs the stage alone: it alone reads prompts, writes files and decides what is to be computed. The other ranks
hold their part of the weights and repeat each pass that rank 0 announces. So ranks cannot disagree about what is done
already, and a stage needs no code for them.
"""

import json
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from drafters.cache import RowCache
from drafters.placement import loading_options
from drafters.target import States, Target, resolve_model
from recipes.errors import ConfigError, DrafthouseError, RunError
from recipes.schema import Target as TargetSection

# Rank 0 may tokenise, ask a server or write for hours between two passes (case 43). Where a process dies, its launcher
# ends the others.
PATIENCE = timedelta(days=30)


def lead(section: TargetSection, work: Callable[[], None]) -> None:
    """Calls `work` where the target is one process's own. With `target.tp_plan`, rank 0 calls it, and every other rank
    computes its part of the passes until that call has ended. An error of the user's that `work` raises is rank 0's to
    tell: the others end in peace.

    Raises ConfigError where the launch has one process, or the section contradicts itself; RunError on the other ranks
    where rank 0 has died.
    """
    if not section.tp_plan:
        work()
        return
    loading_options(section)
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        raise ConfigError("target.tp_plan = auto: launch this stage on several processes, as in `torchrun "
                          "--nproc-per-node 4 -m data.collect --config RECIPE`, or use target.device_map")
    # Announcements are CPU tensors: gloo carries them beside NCCL, which carries the passes.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    if dist.get_rank():
        follow(section)
    else:
        try:
            work()
        except (DrafthouseError, OSError):
            with suppress(RuntimeError):  # the others may have ended with the same error
                send({"op": "stop"})
            raise
        send({"op": "stop"})
    dist.destroy_process_group()


def open_target(section: TargetSection, layers: list[int] | None = None) -> Target:
    """The target of this process: whole, or as rank 0 of `lead`. Raises ConfigError as Target does."""
    if section.tp_plan and dist.is_initialized():
        return LeadingTarget(section, layers)
    return Target(section, layers)


def send(command: dict[str, Any], *tensors: Tensor) -> None:
    """Rank 0 tells all others a command and its tensors."""
    kinds = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    text = json.dumps(command | {"tensors": kinds}).encode()
    dist.broadcast(torch.tensor([len(text)]), 0)
    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
    for t in tensors:
        dist.broadcast(as_bytes(t.detach().cpu().contiguous()), 0)


def receive() -> tuple[dict[str, Any], list[Tensor]]:
    """What `send` sent."""
    length = torch.zeros(1, dtype=torch.long)
    dist.broadcast(length, 0)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, 0)
    command = json.loads(bytes(text.tolist()))
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in command.pop("tensors")]
    for t in tensors:
        dist.broadcast(as_bytes(t), 0)
    return command, tensors


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)


def follow(section: TargetSection) -> None:
    """Repeats what rank 0 announces until it says stop."""
    targets: list[ShardedTarget] = []
    caches: dict[int, RowCache] = {}
    while True:
        try:
            command, tensors = receive()
        except RuntimeError:  # all of torch.distributed's errors are
            raise RunError("the first process of this launch has ended (its own message says why)") from None
        op, cache = command["op"], command.get("cache")
        for number in command.get("dropped", []):
            del caches[number]
        if op == "stop":
            return
        if op == "open":
            targets.append(ShardedTarget(section, command["layers"]))
            continue
        target = targets[command["target"]]
        tensors = [t.to(target.device) for t in tensors]
        if op == "cache":
            caches[cache] = target.new_cache(command["rows"], command["capacity"])
        elif op == "keep":
            caches[cache].keep(*tensors)
        elif op == "begin":
            caches[cache].begin_with(caches[command["other"]], command["columns"])
        elif op == "forward":
            ids, positions, *rows = tensors
            target.forward(ids, positions, caches.get(cache), *rows, logits=command["logits"])
        elif op == "head":
            with torch.inference_mode():
                target.project(*tensors)
        else:
            target.weight(op)


class ShardedTarget(Target):
    """The part of a target that this rank holds. Every rank has to make the same calls."""

    def placement(self) -> dict[str, Any]:
        """ConfigError where the heads cannot be dealt out evenly."""
        ranks = dist.get_world_size()
        heads = self.config.num_key_value_heads
        if heads % ranks or self.config.num_attention_heads % ranks:
            raise ConfigError(f"target.tp_plan: {self.config.num_attention_heads} attention heads with {heads} "
                              f"key/value heads cannot be shared among {ranks} processes")
        return {"distributed_config": DistributedConfig(tp_size=ranks)}

    def weight(self, which: str) -> Tensor:
        """The whole weight of the "head_weight" or the "embedding", gathered from all ranks."""
        held = getattr(super(), which)
        return held.full_tensor() if isinstance(held, DTensor) else held

    @property
    def head_weight(self) -> Tensor:
        return self.weight("head_weight")

    @property
    def embedding(self) -> Tensor:
        return self.weight("embedding")


class LeadingTarget(ShardedTarget):
    """The target as rank 0 uses it, like any other: each pass is announced to the other ranks before it begins."""

    opened = 0

    def __init__(self, section: TargetSection, layers: list[int] | None = None) -> None:
        self.number, self.caches = LeadingTarget.opened, 0
        LeadingTarget.opened += 1
        self.dropped: list[int] = []  # caches that are gone here, named with the next announcement
        self.announcing = False  # all ranks construct together
        resolve_model(section)  # an embedded target is written once, before the others look for it
        send({"op": "open", "layers": layers})
        super().__init__(section, layers)
        self.announcing = True

    def tell(self, op: str, *tensors: Tensor, **values: Any) -> None:
        if self.announcing:
            dropped, self.dropped[:] = list(self.dropped), []
            send({"op": op, "target": self.number, "dropped": dropped, **values}, *tensors)

    def new_cache(self, rows: int, capacity: int) -> "MirroredCache":
        cache = MirroredCache(self, self.caches, rows, capacity)
        self.caches += 1
        return cache

    def forward(self, ids: Tensor, positions: Tensor, cache: "MirroredCache | None" = None,
                rows: Tensor | None = None, logits: bool = True) -> States:
        """See Target.forward."""
        self.tell("forward", ids, positions, *([] if rows is None else [rows]),
                  cache=None if cache is None else cache.number, logits=logits)
        return super().forward(ids, positions, cache, rows, logits)

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return self.announced_head

    @torch.inference_mode()
    def announced_head(self, states: Tensor) -> Tensor:
        self.tell("head", states)
        return self.project(states)

    def weight(self, which: str) -> Tensor:
        """See ShardedTarget.weight."""
        self.tell(which)
        return super().weight(which)


class MirroredCache(RowCache):
    """A cache of rank 0; the other ranks do to theirs what is done to it."""

    def __init__(self, owner: LeadingTarget, number: int, rows: int, capacity: int) -> None:
        super().__init__(owner.depth, rows, capacity)
        self.owner, self.number = owner, number
        owner.tell("cache", cache=number, rows=rows, capacity=capacity)
        # Not announced at once: objects end at any time, in the middle of a pass too.
        weakref.finalize(self, owner.dropped.append, number)

    def begin_with(self, other: "MirroredCache", columns: int) -> None:
        self.owner.tell("begin", cache=self.number, other=other.number, columns=columns)
        super().begin_with(other, columns)

    def keep(self, rows: Tensor) -> None:
        self.owner.tell("keep", rows, cache=self.number)
        super().keep(rows)

    def move(self, sources: Tensor, places: Tensor) -> None:
        raise RuntimeError("a target that ranks share decodes no draft trees")

    def join(self, other: RowCache) -> None:
        raise RuntimeError("a target that ranks share replaces no rows of a decoding batch")
