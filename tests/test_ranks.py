"""Several processes collect one trace set together: the files of one process, whoever dies, and with however many
processes it goes on. Ranks are forks over real gloo (tests/forked.py); launchers and random kills: test_launches.py."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import collect, ranks, tracetool
from data.backends import units
from data.backends.units import Units
from data.capture import capture
from data.generate import Answer, Generator, Request
from data.place import LocalPlace
from data.ranks import GONE, LaunchedRanks, Ranks, open_ranks
from data.sharing import check_ranks, neighbours, part_of
from data.store import TraceReader
from drafters.placement import pick_device
from drafters.target import use_threads
from recipes.errors import ConfigError, RunError
from recipes.launched import check_launch
from recipes.schema import Generation, Recipe, Server, Target, Trace
from tests import forked
from tests.fake_server import NAME, FakeServer
from tests.test_collect import content, fresh, trace, world  # noqa: F401 - a fixture
from tests.tiny import call, load_target

LAST = "another process of this launch has ended"


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    """Who has nothing to say waits for no launcher, which is not there."""
    monkeypatch.setattr(ranks, "QUIET", 0.2)


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What all processes did, in the order of their doing: "asked ROW" and "shard NAME" lines of a file."""
    path = tmp_path / "log"
    path.touch()
    generate, write = Generator.run, collect.write_shard

    def note(*lines: str) -> None:
        with open(path, "a") as f:
            f.write("".join(f"{line}\n" for line in lines))

    def run(self, requests, **named):
        note(*(f"asked {r.id}" for r in requests))
        return generate(self, requests, **named)

    def shard(folder, name, *rest):
        note(f"shard {name}")
        write(folder, name, *rest)

    monkeypatch.setattr(Generator, "run", run)
    monkeypatch.setattr(collect, "write_shard", shard)
    return path


def files(traces: Path) -> dict[str, tuple[int, int]]:
    """Finished units and shards, and what changes where one is written again."""
    found = [p for part in ("prompts", "answers") for p in traces.glob(f"{part}/[!.]*.json")]
    found += [p for name in traces.glob("shards/[!.]*.json") for p in (name, name.with_suffix(".safetensors"))]
    return {str(p.relative_to(traces)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}


def said(ended: list[forked.Ended]) -> str:
    """What all ranks said on stderr; none of it may be a traceback."""
    text = "".join(rank.err for rank in ended)
    assert "Traceback" not in text, text
    return text


@pytest.mark.parametrize("number", [2, 3])
def test_ranks_make_the_files_of_one_process(world, tmp_path, log, number):  # noqa: F811
    """Three units and several shards on two ranks, which do not divide evenly, and on three: every file has the bytes
    that one process writes, each row was answered once and each shard written once, and one rank reports (case 66)."""
    recipe, traces = fresh(tmp_path, world)
    done = forked.collect(recipe, number, folder=tmp_path)
    assert [rank.code for rank in done] == [0] * number, said(done)
    assert content(traces) == content(world[2])
    lines = log.read_text().splitlines()
    assert len(lines) == len(set(lines)) and {f"asked p{i}" for i in range(10)} < set(lines)
    assert [rank.out.count("traces: 10 rows") for rank in done] == [1] + [0] * (number - 1)
    assert not [rank.err for rank in done[1:] if rank.err]
    assert json.loads((traces / "provenance.json").read_text())


def test_ranks_without_states_and_with_a_server(world, tmp_path):  # noqa: F811
    """trace.mode online on two ranks gives the files of one process. A server gets every request once from them, and
    never more at a time than the recipe allows."""
    served, asked = load_target(world[0], "float32"), []
    for name, number in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        with FakeServer(served) as server:
            recipe, traces = fresh(tmp_path / name, world, trace={"mode": "online"}, generation={
                "backend": "openai", "server": {"base_url": server.url, "model": NAME, "concurrency": 3}})
            done = forked.collect(recipe, number, folder=tmp_path)
            assert {rank.code for rank in done} == {0}, said(done)
            asked.append(server.rows())
            assert server.most <= 3
    assert asked[0] == asked[1] and set(asked[0]) == {f"p{i}" for i in range(10)}
    assert content(traces) == content(tmp_path / "one" / "runs" / "tiny" / "traces")


def test_work_is_shared(world, tmp_path):  # noqa: F811
    """Ranks wait for each other at their first unit, so each makes one: none does it all."""
    recipe, _ = fresh(tmp_path, world)
    make = units.make_unit

    def each(rank: int) -> None:
        def waiting(backend, path, *rest):
            signal.alarm(300)  # rather dead than waiting for one that never comes
            (tmp_path / f"rank{rank}.began").touch()
            while not (tmp_path / f"rank{1 - rank}.began").exists():
                os.sched_yield()
            return make(backend, path, *rest)

        units.make_unit = waiting

    assert [rank.code for rank in forked.collect(recipe, 2, folder=tmp_path, each=each)] == [0, 0]


def test_death_of_a_rank_loses_nothing(world, tmp_path, log, monkeypatch):  # noqa: F811
    """One of two ranks is killed in its first unit: the other ends with a message. Three ranks go on, one is killed in
    a shard; one process ends it. What was finished is never touched, no finished row asked again (cases 16, 35)."""
    recipe, traces = fresh(tmp_path, world)

    make = units.make_unit

    def in_answers(rank: int) -> None:
        def taken(*args):  # rank 0 makes none before rank 1 has one
            if rank == 1:
                (tmp_path / "taken").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            signal.alarm(300)
            while not (tmp_path / "taken").exists():
                os.sched_yield()
            return make(*args)

        units.make_unit = taken

    def in_shards(rank: int) -> None:
        if rank == 2:
            forked.die_at(monkeypatch, collect, "write_shard", 1)

    died = forked.collect(recipe, 2, folder=tmp_path, each=in_answers)
    assert [rank.code for rank in died] == [1, -signal.SIGKILL] and said(died).count(GONE) == 1
    before = files(traces)
    assert len(before) == 2  # rank 0 made what the other did not take
    died = forked.collect(recipe, 3, folder=tmp_path, each=in_shards)
    assert [rank.code for rank in died] == [1, 1, -signal.SIGKILL] and said(died).count(GONE) == 1
    middle = files(traces)
    assert before.items() <= middle.items() and len(list(traces.glob("answers/*.json"))) == 3
    assert list(traces.glob("shards/*.json"))
    assert trace(recipe) == 0
    assert middle.items() <= files(traces).items() and content(traces) == content(world[2])
    asked = [line for line in log.read_text().splitlines() if line.startswith("asked")]
    assert len(asked) == len(set(asked)) == 10


@pytest.mark.parametrize("flags, code, message", [
    (["--trace.layers", "[1, 1, 2]"], 2, "trace.layers = [1, 1, 2]"),
    (["--prompts.validation", "10"], 2, "prompts.validation holds out 10"),
    (["--trace.shard_mb", "2"], 2, "trace.shard_mb was 1, now 2")])
def test_error_of_all_ranks_is_shown_once(world, tmp_path, flags, code, message):  # noqa: F811
    """What every rank finds wrong, or rank 0 for all, is one message and one exit code."""
    recipe, _ = fresh(tmp_path, world)
    if "shard_mb" in message:
        assert forked.collect(recipe, 2, folder=tmp_path)[0].code == 0
    done = forked.collect(recipe, 2, *flags, folder=tmp_path)
    assert [rank.code for rank in done] == [code, code]
    assert said(done).count("error:") == said(done).count(message) == 1


def test_ranks_that_are_not_alike_are_refused(world, tmp_path, monkeypatch):  # noqa: F811
    """A rank with other settings, or that works in another folder, is named before anything is made (case 30)."""
    monkeypatch.setattr(ranks, "LATE", 0.1)
    recipe, traces = fresh(tmp_path, world)
    done = forked.collect(recipe, 2, folder=tmp_path, own={1: ["--generation.seed", "1"]})
    assert [rank.code for rank in done] == [1, 2] and LAST in done[0].err
    assert "rank 1 has other settings than rank 0: generation.seed was 0, now 1" in said(done)
    done = forked.collect(recipe, 2, folder=tmp_path, own={1: ["--runs_dir", str(tmp_path / "mine")]})
    assert [rank.code for rank in done] == [1, 2] and LAST in done[0].err
    assert "rank 1 does not see what rank 0 writes there" in said(done)
    assert not files(traces) and not list(tmp_path.rglob(".seen-*"))


@pytest.mark.parametrize("values, message", [
    ({"trace": Trace(url="memory://a")}, "trace.url = memory://a: 3 processes"),
    ({"trace": Trace(backend="vllm")}, "trace.backend = vllm"),
    ({"generation": Generation(backend="vllm")}, "generation.backend = vllm"),
    ({"generation": Generation(backend="openai", server=Server(concurrency=2))}, "generation.server.concurrency = 2"),
    ({"target": Target(device_map="auto")}, "target.device_map = auto")])
def test_what_several_processes_cannot_do_is_refused(monkeypatch, values, message):
    """Each is named with its field; one process may do all of it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=message):
        check_ranks(Recipe(**values), 3)
    check_ranks(Recipe(**values), 1)
    check_ranks(Recipe(trace=Trace(url="file:///x"), generation=Generation(backend="openai")), 3)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 30), st.integers(1, 9), st.integers(9, 40))
def test_shards_and_server_limits_are_shared_out(count, number, concurrency):
    """Runs of neighbours make up all shards in order, none more than one longer than another; the ranks' concurrency
    adds up to the recipe's, and so does the rate."""
    names = [str(i) for i in range(count)]
    runs = [neighbours(names, rank, number) for rank in range(number)]
    assert sum(runs, []) == names and max(map(len, runs)) - min(map(len, runs)) <= 1
    section, found = Generation(server=Server(concurrency=concurrency, requests_per_s=5.0)), []
    for rank in range(number):
        one = Ranks()
        one.rank, one.world = rank, number
        found.append(part_of(section, one).server)
    assert sum(s.concurrency for s in found) == concurrency and min(s.concurrency for s in found) >= 1
    assert sum(s.requests_per_s for s in found) == pytest.approx(5.0)
    assert part_of(section, Ranks()) == section


class Losing:
    """A backend that loses the first row of every unit."""

    def run(self, requests, max_tokens, journal, losses, keeper=None):
        losses.add(requests[0].id, "lost")
        return [Answer(r.id, r.prompt, [2], "stop") for r in requests[1:]]


@pytest.mark.parametrize("share, code", [(0.35, 1), (0.4, 0)])
def test_lost_rows_are_counted_over_all_ranks(tmp_path, share, code):
    """Four units of ten rows lose one each: 35 % allows three, in whichever ranks they are lost; with 40 % every rank
    ends with the same answers and tally, and a later run counts what is stored."""
    (tmp_path / "answers").mkdir()
    asked = {f"0-{u}": [Request(f"{u}{i}", [1, u, i]) for i in range(3 if u else 1)] for u in range(4)}

    def work(rank: int) -> None:
        with open_ranks() as here:
            found = Units(Losing(), LocalPlace(tmp_path), here, share, lambda part, name: None)
            answers = found.answers("answers", asked, 4)
            print(json.dumps([[a.id for unit in answers for a in unit], dict(found.tally.lost)]))

    done = forked.together(2, lambda rank: guarded(work, rank), tmp_path)
    if code:
        assert [rank.code for rank in done].count(1) >= 1
        assert "rows without a usable answer: {'lost'" in "".join(rank.err for rank in done)
    else:
        expected = [[f"{u}{i}" for u in range(1, 4) for i in (1, 2)], {"lost": 4}]
        assert [json.loads(rank.out) for rank in done] == [expected] * 2
        again = Units(None, LocalPlace(tmp_path), Ranks(), share, lambda part, name: None)
        assert [a.id for unit in again.answers("answers", asked, 4) for a in unit] == expected[0]
        assert again.tally.lost.total() == 4


def guarded(work, rank: int) -> None:
    """An error as the command line shows it."""
    try:
        work(rank)
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def test_bad_rows_are_counted_over_all_ranks(world, tmp_path, monkeypatch):  # noqa: F811
    """NaN rows in shards of different ranks stop the run together, and running again is no way past (case 34)."""
    recipe, traces = fresh(tmp_path, world)
    assert trace(recipe) == 0
    order = [TraceReader(traces)[i].id for i in range(10)]
    bad = {order[0], order[-1]}
    (tmp_path / "other").mkdir()
    recipe, traces = fresh(tmp_path / "other", world)

    def compute(target, rows, *rest):
        kept, faults = capture(target, rows, *rest)
        return [r for r in kept if r.id not in bad], faults | {r.id: "NaN" for r in rows if r.id in bad}

    monkeypatch.setattr(collect, "capture", compute)
    monkeypatch.setattr(collect.Collector, "keeping", lambda self, part, name: None)
    for number in (2, 2, 1):
        done = forked.collect(recipe, number, "--trace.max_bad_share", "0.1", folder=tmp_path)
        assert all(rank.code == 1 for rank in done)
        assert said(done).count("2 of 10 rows have NaN or Inf states") == 1


def test_ranks_tell_each_other_values(tmp_path):
    """Rank 0's value, all values in order, one count; a lead's error is everyone's; after a death the others' next
    meeting is a message (case 43: they wait without a limit until then)."""
    def work(rank: int) -> None:
        with open_ranks() as here:
            assert isinstance(here, LaunchedRanks) and (here.rank, here.world) == (rank, 3)
            assert here.agree({"a": [rank, "ä"]}) == {"a": [0, "ä"]} and here.gather(rank * 10) == [0, 10, 20]
            count, other = here.counter(), here.counter()
            count(rank + 1)
            here.meet()
            assert count(0) == 6 and other(0) == 0
            did = []
            here.lead(lambda: did.append(rank))
            assert did == [0] * (rank == 0)
            with pytest.raises(ConfigError, match="no such thing"):
                here.lead(lambda: (_ for _ in ()).throw(ConfigError("no such thing")))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(RunError, match=LAST):
                here.meet()

    done = forked.together(3, work, tmp_path)
    assert [rank.code for rank in done] == [0, -signal.SIGKILL, 0], said(done)


def test_preview_and_inspect_are_one_process(world, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A preview is shown by rank 0 and keeps nothing; an inspection that was launched as several is refused."""
    recipe, traces = fresh(tmp_path, world)
    done = forked.collect(recipe, 2, "--preview", folder=tmp_path)
    assert [rank.code for rank in done] == [0, 0] and "the whole run" in done[0].out and not done[1].out
    assert not traces.exists()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert call(tracetool.COMMAND, recipe) == 2
    assert "make inspect: 2 processes were started" in capsys.readouterr().err


def test_launches_that_are_none(monkeypatch):
    """accelerate's MULTI_CPU starts one process silently: refused. A cluster's own variables start nothing."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with open_ranks() as here:
        assert type(here) is Ranks and here.world == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    check_launch()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(RunError, match="asked for several processes but started one"):
        check_launch()


def test_each_process_has_its_own_device_and_cores(monkeypatch):
    """Five processes on two GPUs take them in turn; two on eight cores have four threads each, unless the recipe
    says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda")
    for name, value in {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5", "MASTER_ADDR": "x",
                        "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    found = []
    for rank in range(5):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found.append(pick_device("auto").index)
    assert found == [0, 1, 0, 1, 0] and pick_device("cuda:1").index == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for wanted in (0, 3):
        use_threads(wanted)
    assert threads == [4, 3]
