"""Our training core and those of peers, each in a process that answers on a pipe (bench/peers/serving.py)."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data.console import console
from recipes.errors import ConfigError, RunError
from recipes.schema import opt

HERE = Path(__file__).resolve().parent
OWN = "drafthouse"
SCRIPTS = {OWN: HERE / "peers" / "step_drafthouse.py", "speculators": HERE / "peers" / "step_speculators.py",
           "specforge": HERE / "peers" / "step_specforge.py"}


@dataclass
class Peers:
    """The options that say where peers are, of every measurement that has some."""

    speculators_python: str = opt("", "Python of the environment that has speculators; empty leaves it out")
    specforge_python: str = opt("", "Python of the environment that has specforge; empty leaves it out")

    @property
    def pythons(self) -> dict[str, str]:
        """The Python of each peer, empty where it is left out."""
        return {"speculators": self.speculators_python, "specforge": self.specforge_python}


class Side:
    """A process that steps one drafter. `begin` tells it which."""

    def __init__(self, name: str, python: str, log: BinaryIO) -> None:
        self.name, self.log = name, log
        path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])] if name == OWN else []
        self.process = subprocess.Popen(
            [python, str(SCRIPTS[name])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            encoding="utf-8", env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})

    def begin(self, opening: dict[str, Any]) -> None:
        """Builds the drafter. `reference` says then what it is, with its version, `trained` how many parameters it has,
        `imported` how many bytes its modules take, None where the system cannot tell."""
        name, version, torch, self.trained, self.imported = self.ask("name", "version", "torch", "trained", "imported",
                                                                     **opening)
        self.reference = f"{name} {version}, torch {torch}"

    def ask(self, *wanted: str, **message: Any) -> list[Any]:
        """The wanted parts of the answer to a message. RunError, with the last line of its stderr, where the process
        ends or answers something else."""
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RunError(f"{self.name}: the process ended with status {self.process.wait()}{self.last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RunError(f"{self.name}: answered {line.strip()[:200]!r}, which is no JSON object{self.last_words()}")
        missing = [name for name in wanted if name not in answer]
        if missing:
            raise RunError(f"{self.name}: its answer lacks {missing[0]}: {answer}{self.last_words()}")
        return [answer[name] for name in wanted]

    def last_words(self) -> str:
        self.log.flush()
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", "replace").strip().splitlines()
        return f"; last line of its stderr: {lines[-1].strip()}" if lines else "; it left nothing on stderr"

    def close(self) -> None:
        """Ends the process, which stops where its input does."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextmanager
def opened(name: str, python: str, opening: dict[str, Any]) -> Iterator[Side]:
    """A running side, ended behind the block."""
    with tempfile.TemporaryFile() as log:
        side = Side(name, python, log)
        try:
            side.begin(opening)
            yield side
        finally:
            side.close()


def interpreters(measure: str, given: dict[str, str]) -> dict[str, str]:
    """The Python of each peer that can be measured. given: peer to path, empty where it is left out.

    Raises ConfigError where a path is no file, or where all are empty.
    """
    for name, python in given.items():
        if python and not Path(python).is_file():
            raise ConfigError(f"--{measure}.{name}_python {python}: no such file; docs/bench.md says how to build the "
                              "environment")
        if not python:
            console.print(f"{measure}: {name} is left out, since --{measure}.{name}_python is not given",
                          highlight=False, soft_wrap=True)
    found = {name: python for name, python in given.items() if python}
    if not found:
        flags = " or ".join(f"--{measure}.{name}_python" for name in given)
        raise ConfigError(f"{flags} is needed: there is nothing to compare with; docs/bench.md says how to build the "
                          "environments")
    return found


def python_of(name: str, found: dict[str, str]) -> str:
    """Ours is the one that runs this."""
    return sys.executable if name == OWN else found[name]
