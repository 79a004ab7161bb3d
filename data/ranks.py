"""The processes of one launch that collect one trace set together.

They share the trace folder. What a unit of work is called and what it holds does not depend on who makes it, so ranks
only agree on what is missing, each takes the next unit that nobody has taken, and they meet when all are taken. Then
every rank reads what the others made: all ranks hold the same rows, and a later run may have another number of them.

Ranks talk through gloo and the launcher's store, in JSON. A process that dies closes its connections, which ends those
that wait for it; they wait for nothing else, however long it takes (case 43).
"""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from drafters.tensor_parallel import PATIENCE
from recipes.errors import FAILED, INTERRUPTED, USAGE, ConfigError, DrafthouseError, RunError
from recipes.launched import check_launch, processes

JOIN = timedelta(minutes=30)  # between the first process of a launch and its last: imports from a slow disk, no work
LATE = 70.0  # seconds until a network file system shows on one machine what another one wrote
QUIET = 10.0  # seconds for another process to say what this one would say, and to be gone
GONE = ("another process of this launch has ended (its own message says why); what was finished is kept: run the same "
        "command again, with any number of processes")
KINDS: dict[int, type[DrafthouseError]] = {USAGE: ConfigError, FAILED: RunError}


class Ranks:
    """One process by itself. Every rank calls the same methods in the same order, `first_to_say` aside."""

    rank, world = 0, 1

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on every rank."""
        return [value]

    def meet(self) -> None:
        """Returns when every rank is here."""

    def counter(self) -> Callable[[int], int]:
        """A number that all ranks add to: gives the sum so far, this addition included."""
        total = 0

        def add(n: int) -> int:
            nonlocal total
            total += n
            return total

        return add

    def lead(self, work: Callable[[], object]) -> None:
        """Does `work` on rank 0 while the others wait. A DrafthouseError is raised on every rank."""
        said = None
        if self.rank == 0:
            try:
                work()
            except DrafthouseError as error:
                said = error
        told = self.agree(None if said is None else [said.exit_code, str(said)])
        if said is not None:
            raise said
        if told is not None:
            raise KINDS[told[0]](told[1])


class LaunchedRanks(Ranks):
    """One of the processes that a launcher started. Every method raises RunError where another one has ended."""

    def __init__(self) -> None:
        try:
            store, self.rank, self.world = next(rendezvous("env://", timeout=JOIN))
            self.store = dist.PrefixStore("ranks", store)
            self.store.set(f"here/{self.rank}", "")
            self.store.wait([f"here/{rank}" for rank in range(processes())], JOIN)
        except dist.DistStoreError as error:
            raise RunError(f"not all of the {processes()} processes of this launch came together within "
                           f"{JOIN.total_seconds() / 60:.0f} minutes: {first_line(error)}") from None
        except RuntimeError as error:
            raise RunError(f"the processes of this launch cannot meet at {os.environ['MASTER_ADDR']}:"
                           f"{os.environ['MASTER_PORT']}: {first_line(error)}") from None
        try:
            dist.init_process_group("gloo", store=dist.PrefixStore("group", self.store), rank=self.rank,
                                    world_size=self.world, timeout=JOIN)
            # Connecting has an end, working together has none.
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        except RuntimeError as error:
            raise RunError(f"the processes of this launch cannot connect to one another: {first_line(error)}; "
                           "the variable GLOO_SOCKET_IFNAME names the network interface to use") from None
        self.counters = 0

    def agree(self, value: Any) -> Any:
        return self.said_by(0, value)

    def gather(self, value: Any) -> list[Any]:
        return [self.said_by(rank, value) for rank in range(self.world)]

    def said_by(self, rank: int, value: Any) -> Any:
        """That rank's value."""
        text = bytearray(json.dumps(value).encode())
        with others():
            length = torch.tensor([len(text)])
            dist.broadcast(length, rank, self.group)
            content = torch.frombuffer(text, dtype=torch.uint8) if rank == self.rank else (
                torch.empty(int(length), dtype=torch.uint8))
            dist.broadcast(content, rank, self.group)
        return json.loads(content.numpy().tobytes())

    def meet(self) -> None:
        with others():
            dist.barrier(self.group)

    def counter(self) -> Callable[[int], int]:
        self.counters += 1
        name = f"count/{self.counters}"

        def add(n: int) -> int:
            with others():
                return self.store.add(name, n)

        return add

    def first_to_say(self, message: str) -> bool:
        """True for one of the ranks of a machine that have the same thing to say; another returns when that one must
        be gone."""
        name = hashlib.sha256(f"{socket.gethostname()}\n{message}".encode()).hexdigest()
        with suppress(RuntimeError):  # a store that is gone leaves it to everyone
            if self.store.add(f"said/{name}", 1) > 1:
                time.sleep(QUIET)
                return False
        return True


def first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]


@contextmanager
def others() -> Iterator[None]:
    """Within it, other processes are needed: RunError where one has ended."""
    try:
        yield
    except RuntimeError:  # all of torch.distributed's errors are
        raise RunError(GONE) from None


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """The ranks of this launch, one where there is no launcher. An error that several of them raise is shown once.
    Raises RunError where the launcher did not start what it was asked for, or a process does not come."""
    check_launch()
    if processes() == 1:
        yield Ranks()
        return
    ranks = LaunchedRanks()
    try:
        yield ranks
    except (DrafthouseError, OSError, KeyboardInterrupt) as error:
        if ranks.first_to_say(str(error)):
            raise
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED))
    dist.destroy_process_group()


def appears(path: Path) -> bool:
    """True once the file is there; False where it does not come, though another rank has written it."""
    end = time.monotonic() + LATE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def check_shared(ranks: Ranks, folder: Path) -> None:
    """ConfigError where a rank does not see what rank 0 writes into the folder."""
    if ranks.world == 1:
        return
    path = folder / ranks.agree(f".seen-{uuid4().hex}.tmp")

    def put() -> None:
        for left in folder.glob(".seen-*.tmp"):  # of a launch that was killed
            left.unlink(missing_ok=True)
        path.touch()

    try:
        ranks.lead(put)
        if not appears(path):
            raise ConfigError(f"{folder}: rank {ranks.rank} does not see what rank 0 writes there; the run's folder "
                              "(runs_dir, or trace.url with file://) must be on storage that all machines share")
        ranks.meet()
    finally:
        if ranks.rank == 0:
            path.unlink(missing_ok=True)


def check_same(ranks: Ranks, what: str, value: str) -> None:
    """RunError where ranks differ in what they all must have."""
    if value != ranks.agree(value):
        raise RunError(f"rank {ranks.rank} has other {what} than rank 0: every machine needs the same recipe, inputs "
                       "and versions of packages")
