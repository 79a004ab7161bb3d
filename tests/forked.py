"""Ranks of a launch as forks of the test's process, which has imported everything: real processes over real gloo, in a
moment. Like the processes of several machines, none is ended because another one has died."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from data.collect import COMMAND
from recipes.cli import run

BROKEN = 70  # exit code of a rank that ended with a traceback


@dataclass
class Ended:
    """What a rank left: `code` is negative for a signal."""

    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def together(world: int, work: Callable[[int], None], folder: Path) -> list[Ended]:
    """Runs work(rank) in so many processes, one process group, and waits for all; their output goes to `folder`. The
    store is in this process, as it is in a launcher."""
    store, pids = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            child(rank, world, store.port, work, folder)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return [Ended(code, *((folder / f"rank{rank}.{end}").read_text() for end in ("out", "err")))
            for rank, code in enumerate(codes)]


def child(rank: int, world: int, port: int, work: Callable[[int], None], folder: Path) -> None:
    code = BROKEN
    try:
        if rank == 0:
            os.setpgid(0, 0)  # this or the parent's comes first: a kill of the group must not meet the parent
        for number, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"rank{rank}.{end}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                           "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                           "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
                           "TOKENIZERS_PARALLELISM": "false"})
        work(rank)
        code = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        if code == BROKEN:
            traceback.print_exc()
        os._exit(code)


def collect(recipe: Path, world: int, *flags: str, folder: Path, each: Callable[[int], None] = lambda rank: None,
            own: dict[int, list[str]] | None = None) -> list[Ended]:
    """`python -m data.collect` in so many ranks; each(rank) comes before it, own[rank] are a rank's further flags."""
    def work(rank: int) -> None:
        each(rank)
        run(COMMAND, ["--config", str(recipe), *flags, *(own or {}).get(rank, [])])

    return together(world, work, folder)


def die_at(patch: pytest.MonkeyPatch, owner: object, name: str, time: int) -> None:
    """kill -9 of this process in the so-manieth call of owner.name."""
    original, left = getattr(owner, name), [time]

    def dying(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    patch.setattr(owner, name, dying)
