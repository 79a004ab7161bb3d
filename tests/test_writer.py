"""Shards written beside the computation: in order, bounded, no error and no finished shard lost, and a full disk."""

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from data import collect
from data.collect import COMMAND
from data.store import TraceReader, shard_complete
from data.writer import BackgroundWriter
from recipes.cli import run
from recipes.errors import RunError
from tests.tiny import llama, write_prompts, write_recipe, write_target

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [f"tell me in a few simple words how one forecasts {thing} for the next day" for thing in
         ("rain", "snow", "wind", "fog", "hail", "frost", "dew", "mist", "ice")]
LIMITED = """
import resource, sys
from data.collect import COMMAND
from recipes.cli import run
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
run(COMMAND, sys.argv[2:])
"""


def test_put_returns_while_the_write_is_in_work_and_waits_for_the_one_before():
    """A write overlaps what its caller does next; a second one starts after the first, in order."""
    go, log = threading.Event(), []

    def write(name):
        assert go.wait(60)
        log.append(name)

    with BackgroundWriter(write) as writer:
        writer.put("a")
        assert log == []  # not written yet, and here we are
        go.set()
        writer.put("b")
        assert log[:1] == ["a"]
        writer.put("c")
        assert log[:2] == ["a", "b"]
    assert log == ["a", "b", "c"]


@pytest.mark.parametrize("fails, written", [("b", ["a"]), ("c", ["a", "b"])], ids=["then put", "then the end"])
def test_error_of_a_write_surfaces(fails, written):
    """At the next put, or at the end of the block; nothing is written after it (case 35)."""
    log = []

    def write(name):
        if name == fails:
            raise RunError("disk is full")
        log.append(name)

    with pytest.raises(RunError, match="disk is full"), BackgroundWriter(write) as writer:
        for name in "abc":
            writer.put(name)
    assert log == written


@pytest.mark.parametrize("error", [KeyboardInterrupt, RunError])
def test_write_in_work_is_ended_when_its_caller_stops(error):
    """An interrupt or an error of the computation does not cost the shard that was computed before (case 35)."""
    stopped, log = threading.Event(), []

    def write(name):
        assert stopped.wait(60)
        log.append(name)

    with pytest.raises(error), BackgroundWriter(write) as writer:
        writer.put("a")
        stopped.set()
        raise error("stop")
    assert log == ["a"]


def test_written_shard_is_let_go():
    """The writer keeps no shard that it has written: memory does not grow with the number of shards (case 14)."""
    class Shard:
        pass

    kept = []
    with BackgroundWriter(lambda shard: None) as writer:
        for _ in range(3):
            shard = Shard()
            kept.append(weakref.ref(shard))
            writer.put(shard)
            del shard
        writer.wait()
        gc.collect()
        assert [ref() for ref in kept] == [None] * 3


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model, prompts): nine rows of wide states fill three shards of 1 MB."""
    folder = tmp_path_factory.mktemp("world")
    model = write_target(folder / "model")
    llama(hidden=256).save_pretrained(model)
    return model, write_prompts(folder / "prompts.jsonl", TEXTS)


def fresh(tmp_path: Path, world) -> tuple[Path, Path]:
    """(recipe, traces folder) of a run that has not begun."""
    recipe = write_recipe(tmp_path / "r.yaml", world[0], generation={"max_tokens": 4},
                          prompts={"sources": [{"kind": "jsonl", "path": str(world[1])}], "validation": 3},
                          trace={"layers": [1, 2, 3], "shard_mb": 1})
    return recipe, tmp_path / "runs" / "tiny" / "traces"


def trace(recipe: Path) -> int:
    with pytest.raises(SystemExit) as stop:
        run(COMMAND, ["--config", str(recipe)])
    return stop.value.code


def shards(traces: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((traces / "shards").iterdir())}


def test_interrupted_capture_keeps_every_shard_that_was_computed(world, tmp_path, monkeypatch):
    """Ctrl-C while the second shard is computed: the first is whole, and the same command ends the job (case 35)."""
    recipe, traces = fresh(tmp_path, world)
    traced, seen = collect.Collector.traced, []

    def interrupted(self, rows, states):
        if seen:
            raise KeyboardInterrupt
        seen.append([r.id for r in rows])
        return traced(self, rows, states)

    with monkeypatch.context() as patch:
        patch.setattr(collect.Collector, "traced", interrupted)
        assert trace(recipe) == 130
    (first,) = [p.stem for p in (traces / "shards").glob("*.safetensors")]
    key = json.loads((traces / "manifest.json").read_text())["key"]
    assert shard_complete(traces / "shards", first, seen[0], key)
    assert trace(recipe) == 0 and len(TraceReader(traces)) == len(TEXTS)


def test_at_most_two_shards_are_in_memory(world, tmp_path, monkeypatch):
    """When a shard's computation begins, no more rows are alive than those of the one being written (case 14)."""
    gather, alive, sizes = collect.Collector.traced, [], []

    def watched(self, rows, states):
        gc.collect()
        held = sum(ref() is not None for ref in alive)
        assert held <= (sizes[-1] if sizes else 0)
        traced, bad = gather(self, rows, states)
        alive.extend(weakref.ref(row) for row in traced)
        sizes.append(len(traced))
        return traced, bad

    monkeypatch.setattr(collect.Collector, "traced", watched)
    assert trace(fresh(tmp_path, world)[0]) == 0 and len(sizes) == 3


def test_disk_that_fills_up_is_one_message_and_costs_nothing_finished(world, tmp_path):
    """A write that the system refuses while states come with the answers: exit code 1, one message, no half-written
    file; with room, the same command ends with the files of an undisturbed run (cases 14, 35)."""
    recipe, traces = fresh(tmp_path, world)
    (tmp_path / "whole").mkdir()
    undisturbed, reference = fresh(tmp_path / "whole", world)
    assert trace(undisturbed) == 0
    full = subprocess.run([sys.executable, "-c", LIMITED, "300000", "--config", str(recipe)], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert full.returncode == 1, full.stderr
    assert "0-00000.000.safetensors: cannot be written (" in full.stderr and "File too large" in full.stderr
    assert "Traceback" not in full.stderr and "make room and run the same command again" in full.stderr
    assert shards(traces) == {} and not list(traces.rglob(".*")) and not list((traces / "answers").iterdir())
    assert trace(recipe) == 0 and shards(traces) == shards(reference)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_a_write_does_no_arithmetic_in_its_thread(tmp_path):
    """A thread that computes has OpenMP threads of its own, and with more of them than cores every pass of the target
    takes half as long again: the writer is one thread, however large the shard."""
    script = f"""
import os, sys, threading, torch
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from data.store import TraceRow, shard_of, write_shard
from data.writer import BackgroundWriter
torch.set_num_threads(2)
row = TraceRow("a", "train", torch.zeros(4000).long(), torch.ones(4000).long(), torch.randn(4000, 600),
               torch.randn(3999, 200), [])
shard, counts = shard_of([row] * 4, torch.int8), []
def write(*args):
    write_shard(*args)
    counts.append(len(os.listdir("/proc/self/task")))
before = len(os.listdir("/proc/self/task"))
with BackgroundWriter(write) as writer:
    writer.put(Path({str(tmp_path)!r}), "s", shard, {{}})
print(counts[0] - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "1", done.stderr
