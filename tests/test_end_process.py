"""How a process of a launch ends: its exit code and all that it printed, without the interpreter's finalisation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
# What finalisation does to the thread of a library that then asks for the interpreter: the process aborts.
PROGRAM = """
import atexit, ctypes, sys
from recipes.cli import Command, process
from recipes.errors import RunError

class Held:
    def __del__(self, abort=ctypes.CDLL(None).abort):
        abort()

held = Held()
atexit.register(print, "tracker ended")

def main(recipe, switches):
    print("trained", end="")
    if "fail" in switches:
        raise RunError("no more")

process(Command("make train", "Trains.", main, {"fail": "raises"}))
"""


@pytest.mark.parametrize("flags, code, alone", [((), 0, -6), (("--fail",), 1, -6)])
def test_a_rank_ends_without_finalisation(flags, code, alone):
    """Exit code, output and atexit functions are those of a normal end; a single process has a normal end."""
    for variables, expected in ((RANK, code), ({}, alone)):
        done = subprocess.run([sys.executable, "-c", PROGRAM, *flags], cwd=ROOT, env=os.environ | variables,
                              capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        assert done.stdout == "trainedtracker ended\n"
        assert ("error: no more" in done.stderr) == bool(flags)


def test_a_closed_pipe_keeps_the_exit_code():
    """`... | head` has gone: what is left to print is lost, the code is not."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-c", PROGRAM, "--fail"], cwd=ROOT, env=os.environ | RANK, stdout=write,
                              stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert done.returncode == 1, done.stderr
