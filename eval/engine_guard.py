"""Runs a program until it ends, or until this one's standard input does: whoever started it is gone then, or wants its
end. Nothing that the program started is left behind then.

`python -P eval/engine_guard.py PROGRAM ARGUMENT ...`, as the first process of a session, so that its process group is
the program's. Imports nothing of the project.
"""

import os
import select
import signal
import subprocess
import sys

EVERY = 0.1  # seconds between two looks
PATIENCE = 20.0  # seconds that the program has to end by itself: a server ends its engine, which frees its memory


def main() -> None:
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while program.poll() is None:
        if select.select([0], [], [], EVERY)[0] and not os.read(0, 1):
            program.terminate()
            try:
                program.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                pass
            os.killpg(0, signal.SIGKILL)  # the program's own processes, and this one
    sys.exit(program.returncode if program.returncode >= 0 else 128 - program.returncode)


if __name__ == "__main__":
    main()
