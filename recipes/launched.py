"""What a launcher (accelerate launch, torchrun) says of the processes that it started, this one among them."""

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from recipes.errors import TERMINATED, RunError

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl


class Stopped(SystemExit):
    """SIGTERM has come; the process ends with exit code 143."""


def by_accelerate() -> bool:
    """True where `accelerate launch` started this process, alone or with others."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def end_with_launcher() -> None:
    """Asks Linux for SIGTERM when the launcher dies: accelerate's single-process launcher passes no signal on, none
    passes kill -9 on, and what is left behind would go on unseen. Processes without a launcher are left alone."""
    if by_accelerate() or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Asks Linux for SIGTERM when the process that started this one dies; elsewhere this does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)


def check_launch() -> None:
    """RunError where accelerate was asked for several processes and started one, of which it says nothing."""
    if by_accelerate() and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise RunError("accelerate launch was asked for several processes but started one (distributed_type MULTI_CPU "
                       "needs mpirun); use the settings of recipes/accelerate/ddp-cpu.yaml")


def processes() -> int:
    """Processes that were started to work together; 1 without a launcher."""
    known = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if known else 1


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """Processes of the launch on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends the block by Stopped, as Ctrl-C would: engines end and files are put away first. One of several
    processes is ended at once, as ever: while it waits for the others no handler of Python's would run."""
    if processes() > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_process(code: int) -> NoReturn:
    """Ends this process with that exit code; one of several without the interpreter's finalisation.

    Threads of torch.distributed may still let go of a last tensor then, and where that needs the interpreter the
    process aborts (SIGABRT): a run that has succeeded would count as failed, and its launcher would end the others.
    """
    if processes() == 1:
        sys.exit(code)
    atexit._run_exitfuncs()  # a tracker's, for one
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe is no reason for another exit code
            stream.flush()
    os._exit(code)
