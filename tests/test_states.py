"""Hidden states by a vLLM engine: a process with vLLM's interface (tests/fake_vllm) against the target's own states."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import LAYERS, conversations, load_target, plain_model, write_prompts, write_recipe, write_target

from data.capture import BAD, capture
from data.collect import COMMAND
from data.settings import describe
from data.states import check_states, engine_layers, open_states
from data.store import TraceReader
from recipes.cli import run
from recipes.errors import ConfigError, RunError
from recipes.loader import load_recipe
from recipes.schema import Trace

FAKE = Path(__file__).resolve().parent / "fake_vllm"
ROWS = conversations(6, 2)
VLLM = Trace(backend="vllm", max_length=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, "float32", LAYERS)


@pytest.fixture(scope="module")
def teach(folder):
    """teach(rows of ids): the fake then knows their states by every layer id, from transformers' own model."""
    model = plain_model(folder, torch.float32)
    entering = []
    model.model.norm.register_forward_pre_hook(lambda module, args: entering.append(args[0]))

    @torch.inference_mode()
    def write(rows: list[list[int]]) -> None:
        known = {}
        for ids in rows:
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            states = [*hidden[:-1], entering.pop()]
            known["-".join(map(str, ids))] = torch.stack([s[0] for s in states], dim=1).numpy()  # [T, L + 1, H]
        np.savez(folder / "fake.npz", **known)

    return write


@pytest.fixture
def engine(folder, teach, monkeypatch):
    """Puts the fake where a process looks for vLLM, with the faults it is to have."""
    def prepare(rows=ROWS, **faults) -> None:
        teach([list(map(int, row.ids)) for row in rows])
        (folder / "fake.json").write_text(json.dumps(faults))
        monkeypatch.setenv("PYTHONPATH", str(FAKE))

    return prepare


def states(target, folder: Path, rows=ROWS, section: Trace = VLLM, calls: int = 1):
    with open_states(section, target, folder) as compute:
        return [compute(rows, torch.float32) for _ in range(calls)][-1]


def test_states_of_the_engine_are_the_targets_own(target, engine, tmp_path):
    """Taps by our layer ids, final states after the final norm, rows in their order, one engine for all calls; what
    it handed over is gone (cases 01, 61)."""
    engine()
    traced, bad = states(target, tmp_path, calls=2)
    assert bad == {} and [row.id for row in traced] == [row.id for row in ROWS]
    for got, own in zip(traced, capture(target, ROWS, 256)[0]):
        torch.testing.assert_close(got.taps, own.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.final, own.final, rtol=1e-4, atol=1e-4)
        assert got.ids.equal(own.ids) and got.turns.equal(own.turns) and got.final_at.equal(own.final_at)
    assert [p.name for p in tmp_path.iterdir()] == ["vllm.log"]
    assert (tmp_path / "vllm.log").read_text().count("loading") == 1


@given(st.integers(1, 90), st.data())
def test_the_engine_is_asked_for_our_layers_and_what_enters_the_final_norm(depth, data):
    """Ids mean the same on both sides; the engine gives each once and ascending, so ours are the first of them, and
    the last is what the final states are made from, tapped or not (case 01)."""
    layers = sorted(data.draw(st.sets(st.integers(0, depth), min_size=1)))
    asked = engine_layers(layers, depth)
    assert asked == sorted(set(asked)) and asked[: len(layers)] == layers and asked[-1] == depth
    assert set(asked) - set(layers) <= {depth}


@pytest.mark.parametrize("faults, message", [
    ({"cached": 2}, r"row r\d: \d+ states for \d+ tokens; was a prefix cache at work\?"),
    ({"other_tokens": True}, r"row r\d: vLLM names \d+ tokens for its states, which are not the row's \d+"),
    ({"shift": True}, r"row r\d: vLLM's states are others than transformers': taps of \d+ of \d+ tokens .* off by"),
    ({"prefix_caching": True}, "vLLM keeps its prefix cache on"),
    ({"die": True}, r"the vLLM engine ended: engine: out of memory \(see .*vllm\.log\)"),
], ids=["states of a suffix", "states of other tokens", "layers off by one", "prefix cache on", "engine dies"])
def test_states_that_are_not_the_targets_stop_the_run(target, engine, tmp_path, faults, message):
    """A suffix only (case 08), other tokens, another layer (case 01), a cache that the engine kept, a dead engine:
    each stops before a row is stored, with its numbers, and leaves only the log."""
    engine(**faults)
    with pytest.raises(RunError, match=message):
        states(target, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["vllm.log"]


def test_a_row_with_nan_is_listed_and_not_stored(target, engine, tmp_path):
    """A row that only the engine cannot compute stops the comparison at the start; later it is listed (case 34)."""
    rows = sorted(conversations(6, 2), key=lambda row: len(row.ids))
    rows[2].ids[1] = 63  # neither the shortest, the middle nor the longest
    engine(rows, nan_at=63)
    traced, bad = states(target, tmp_path, rows)
    assert bad == {rows[2].id: BAD} and [r.id for r in traced] == [r.id for r in rows if r is not rows[2]]
    with pytest.raises(RunError, match="vLLM's states have NaN or Inf, the target's own have not"):
        states(target, tmp_path, rows[2:3])


def test_a_trace_run_takes_its_states_from_the_engine(folder, target, engine, tmp_path):
    """`make trace` with trace.backend vllm: the same rows as with transformers, states within float32; another set of
    traces in name (case 30), so nobody goes on with it by another backend; a finished run starts no engine."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", [f"tell me how one forecasts {x}" for x in ("rain", "snow")])
    sections = {"prompts": {"sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 1},
                "generation": {"max_tokens": 6}}
    recipe = write_recipe(tmp_path / "r.yaml", folder, **sections, trace={"layers": LAYERS, "max_length": 100})
    for name in ("transformers", "vllm", "vllm"):
        with pytest.raises(SystemExit) as stop:
            run(COMMAND, ["--config", str(recipe), "--name", name, "--trace.backend", name])
        assert stop.value.code == 0
        if name == "transformers":
            local = TraceReader(tmp_path / "runs" / name / "traces")
            engine([local[i] for i in range(len(local))])
        else:  # the second time nothing is left to do
            engine([], die=True)
    reader = TraceReader(tmp_path / "runs" / "vllm" / "traces")
    assert len(reader) == len(local) == 2
    for got, own in ((reader[i], local[i]) for i in range(2)):
        assert (got.id, got.ids.tolist(), got.tail) == (own.id, own.ids.tolist(), own.tail)
        torch.testing.assert_close(got.taps, own.taps, rtol=1e-4, atol=1e-4)
    with pytest.raises(SystemExit) as stop:
        run(COMMAND, ["--config", str(recipe), "--name", "vllm"])
    assert stop.value.code == 2


def test_settings_of_the_backend_decide_the_traces_and_its_python_does_not(target, tmp_path):
    """Traces made before there was a choice keep their name; the interpreter may move in mid-run (case 30)."""
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", Path(target.path)))
    before = describe(recipe, target)["trace"]
    assert not {"backend", "engine", "engine_python"} & set(before)
    recipe.trace.backend, recipe.trace.engine = "vllm", {"tensor_parallel_size": 2}
    other = describe(recipe, target)["trace"]
    recipe.trace.engine_python = "/elsewhere/python"
    assert describe(recipe, target)["trace"] == other == {**before, "backend": "vllm",
                                                          "engine": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize("section, message", [
    (Trace(backend="vllm", engine={"enable_prefix_caching": True}), r"trace\.engine: enable_prefix_caching is decided"),
    (Trace(backend="vllm", max_length=512), r"trace\.max_length = 512: .* at most 511"),
    (Trace(backend="vllm", max_length=64, engine_python="/no/python"), r"trace\.engine_python = /no/python: no such"),
    (Trace(engine={"x": 1}), r"trace\.engine and trace\.engine_python are for trace\.backend vllm"),
], ids=["prefix cache", "no room", "no python", "engine without vllm"])
def test_settings_that_cannot_work_are_refused(target, section, message):
    """Before the first answer is written, each names its field."""
    with pytest.raises(ConfigError, match=message):
        check_states(section, target)


def test_an_engine_that_cannot_be_had_is_a_message(target, engine, tmp_path, monkeypatch):
    """vLLM refuses an argument, or is not installed: a configuration error, and the state folder is gone (case 61)."""
    engine()
    with pytest.raises(ConfigError, match=r"vLLM cannot load the target: bogus = 1 is no choice \(see .*vllm\.log\)"):
        states(target, tmp_path, section=Trace(backend="vllm", max_length=100, engine={"bogus": 1}))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ConfigError, match=r"vLLM cannot be imported by .*; set trace\.engine_python"):
        states(target, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["vllm.log"]
