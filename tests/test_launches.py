"""Collecting under real launchers, and kill -9 of ranks at random moments: slow tests beside test_ranks.py."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.test_collect import content, fresh, sections, trace, world  # noqa: F401 - a fixture
from tests.test_ranks import LAST, _hurry, files, log, said  # noqa: F401 - fixtures
from tests.tiny import write_recipe

ROOT = Path(__file__).resolve().parent.parent


def counted(folder: Path, moment: int, everyone: bool, out: Path):
    """A hook that counts this process's file operations in `folder` and kills it at number `moment` (0: never), or all
    ranks; the count is in `out` at the end."""
    done = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal done
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")) and args and (
                str(args[0]).startswith(str(folder))):
            done += 1
            if done == moment:
                (os.killpg if everyone else os.kill)(os.getpgrp() if everyone else os.getpid(), signal.SIGKILL)
            out.write_text(str(done))

    return hook


@pytest.mark.slow
def test_killed_at_random_moments_two_ranks_lose_and_repeat_nothing(world, tmp_path, log, request):  # noqa: F811
    """kill -9 of one rank or of all at a random file operation, then one to three ranks: the files of an undisturbed
    run, finished ones untouched, no finished row asked again (cases 16, 35). `--kills N`: so many moments."""
    draw = random.Random(0)
    source = {"kind": "synthesis", "count": 5, "max_tokens": 100, "temperature": 1.5}
    values = sections(world[1])
    values["prompts"]["sources"].append(source)
    values["generation"]["unit_rows"] = 3

    def run(name: str, number: int, victim: int = -1, moment: int = 0, everyone: bool = False) -> list[forked.Ended]:
        recipe = write_recipe(tmp_path / name / "r.yaml", world[0], **values)
        return forked.collect(recipe, number, folder=tmp_path, each=lambda rank: sys.addaudithook(counted(
            recipe.parent / "runs", moment if rank == victim else 0, everyone, tmp_path / f"moments{rank}")))

    (tmp_path / "whole").mkdir()
    assert run("whole", 1)[0].code == 0
    whole = tmp_path / "whole" / "runs" / "tiny" / "traces"
    moments = int((tmp_path / "moments0").read_text()) // 2  # of each of two ranks, about
    died = 0
    for number in range(request.config.getoption("--kills")):
        (tmp_path / str(number)).mkdir()
        traces = tmp_path / str(number) / "runs" / "tiny" / "traces"
        victim, everyone = draw.randrange(2), draw.random() < 0.5
        ended = run(str(number), 2, victim, draw.randint(1, moments), everyone)
        codes = [rank.code for rank in ended]
        assert codes in ([0, 0], [-signal.SIGKILL] * 2) or sorted(codes) == [-signal.SIGKILL, 1], said(ended)
        died += -signal.SIGKILL in codes
        before = files(traces)
        rows = {row for name in before if not name.startswith("shards") for row in re.findall(
            r'"id": "(.*?)"', (traces / name).read_text())}
        log.write_text("")
        again = run(str(number), draw.randint(1, 3))
        assert {rank.code for rank in again} == {0}, said(again)
        assert before.items() <= files(traces).items() and content(traces) == content(whole)
        lines = log.read_text().splitlines()
        assert len(lines) == len(set(lines)) and not rows & {line.removeprefix("asked ") for line in lines}
    assert died > number / 2


def environment() -> dict[str, str]:
    drop = ("ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    return {k: v for k, v in os.environ.items() if not k.startswith(drop)} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_accelerate_launch(world, tmp_path):  # noqa: F811
    """The documented command makes the files of one process; what the ranks find wrong is in the output once."""
    recipe, traces = fresh(tmp_path, world)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file",
               "recipes/accelerate/ddp-cpu.yaml", "-m", "data.collect", "--config", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert content(traces) == content(world[2]) and done.stdout.count("traces: 10 rows") == 1
    done = subprocess.run([*command, "--generation.seed", "1"], cwd=ROOT, env=environment(), capture_output=True,
                          text=True)
    assert done.returncode and done.stderr.count("generation.seed was 0, now 1") == 1


STOP = """
import os, pathlib, signal, sys
from data.backends import units
from data.collect import COMMAND
from recipes.cli import run
make, mark = units.make_unit, pathlib.Path(sys.argv[1]) / os.environ["RANK"]
def stop(*args):
    mark.write_text(str(os.getpid()))
    if os.environ["RANK"] == "1" and sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "wait":
        signal.pause()
    return make(*args)
units.make_unit = stop
run(COMMAND, sys.argv[3:])
"""


def nodes(tmp_path: Path, recipe: Path, count: int, each: int, how: str) -> list[subprocess.Popen]:
    """One torchrun for each of so many machines, with so many processes each."""
    script, port = tmp_path / "stop.py", forked.free_port()
    script.write_text(STOP)
    return [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--node-rank", str(node),
         "--nproc-per-node", str(each), "--master-addr", "127.0.0.1", "--master-port", str(port), str(script),
         str(tmp_path), how, "--config", str(recipe)],
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for node in range(count)]


@pytest.mark.slow
def test_death_on_another_machine_is_a_message(world, tmp_path):  # noqa: F811
    """Two launchers as on two machines; a process of the second dies: the first ends too, and says why (case 43)."""
    recipe, traces = fresh(tmp_path, world)
    first, second = nodes(tmp_path, recipe, 2, 1, "die")
    errors = [node.communicate()[1] for node in (first, second)]
    assert first.returncode and second.returncode
    assert LAST in errors[0] and "Traceback (most recent call last)" not in errors[0].split(LAST)[0]
    assert trace(recipe) == 0 and content(traces) == content(world[2])


@pytest.mark.slow
def test_death_of_the_launcher_ends_its_processes(world, tmp_path):  # noqa: F811
    """kill -9 of the launcher leaves no process behind that would go on writing."""
    recipe, _ = fresh(tmp_path, world)
    (launcher,) = nodes(tmp_path, recipe, 1, 2, "wait")
    while not all((tmp_path / rank).exists() for rank in "01") and launcher.poll() is None:
        os.sched_yield()
    launcher.kill()
    launcher.communicate()  # to its end: nobody holds the pipe any more
    for rank in "01":
        status = Path(f"/proc/{(tmp_path / rank).read_text()}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()
