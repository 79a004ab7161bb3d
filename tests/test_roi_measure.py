"""`make roi ARGS=measure` on a tiny target: what is timed, what the file holds, and that it calibrates and plans."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import call, write_prompts, write_recipe, write_target

from eval import roi, roi_measure
from eval.probe import Hardware
from eval.roi_files import Steps, read_steps
from recipes.errors import ConfigError
from recipes.loader import load_recipe
from recipes.speculation import Draft

MACHINE = Hardware(memory_gb=8, bandwidth_tb_s=0.02, tflops={"float32": 0.1}, measured=True, cpu=True, layer_us=50)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target with a fresh drafter, measured once."""
    folder = tmp_path_factory.mktemp("measured")
    model = write_target(folder / "model")
    write_prompts(folder / "prompts.jsonl", ["tell me a story about the sea", "what is the time in the town"])
    path = write_recipe(folder / "r.yaml", model, eval={"prompts": str(folder / "prompts.jsonl")}, roi={
        "batches": [1, 2], "draft_lengths": [1, 3], "held_out": [2], "contexts": [40], "rounds": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roi_measure, "probe", lambda device, dtypes: replace(MACHINE))
        assert call(roi.COMMAND, path, "measure") == 0
    return path


def folder_of(world: Path) -> Path:
    return world.parent / "runs" / "tiny" / "roi"


def test_everything_is_timed(world):
    """Plain steps and cycles at each batch, target passes and drafts at the ends; held-out lengths are marked; a fresh
    drafter's acceptance is called synthetic."""
    steps = read_steps(folder_of(world) / "steps.json")
    cycles = {(p.rows, p.K, p.held_out) for p in steps.points if p.what == "step"}
    assert cycles == {(b, K, K == 2) for b in (1, 2) for K in (0, 1, 2, 3)}
    assert {(p.rows, p.width) for p in steps.points if p.what == "target"} == {(1, 2), (1, 4), (2, 2), (2, 4)}
    assert {(p.rows, p.K) for p in steps.points if p.what == "draft"} == {(1, 1), (1, 3), (2, 1), (2, 3)}
    assert steps.acceptance == "synthetic" and steps.engine["name"] == "drafthouse loop"
    assert all(p.ms > 0 and 1 <= p.kept <= p.K + 1 + 1e-9 for p in steps.points if p.what == "step")
    assert steps.target["fingerprint"]["weights"] and steps.machine["machine"]["load_1m"] >= 0


def test_cycles_of_the_loop_are_counted(world, monkeypatch):
    """A run gives as many gaps as cycles, whatever is accepted, and no row ends early: the first gap is left out
    and the median of the rest is the time."""
    loop = roi_measure.open_loop(load_recipe(world))
    ticks = iter(range(1, 10_000))
    monkeypatch.setattr("eval.decode.time.perf_counter", lambda: float(next(ticks)))
    counted = []
    median = roi_measure.statistics.median
    monkeypatch.setattr(roi_measure.statistics, "median", lambda gaps: counted.append(len(gaps)) or median(gaps))
    for K in (3, 0):
        seconds, kept = loop.cycles([5] * 20, 2, K)
        assert seconds == 1.0 and 1.0 <= kept <= K + 1
    assert counted == [roi_measure.CYCLES - 1] * 2


def test_measured_steps_calibrate(world, capsys):
    """The file calibrates; errors of fitted, left-out and held-out steps and of the held-out speedups are reported."""
    assert call(roi.COMMAND, world, "calibrate") == 0
    out = capsys.readouterr().out
    for said in ("error of the steps fitted", "error left out in turn", "error held out", "speedups held out: median"):
        assert said in out
    found = json.loads((folder_of(world) / "calibration.json").read_text())
    assert found["profile"] == "loop" and len(found["errors"]) == 14 and len(found["held_out"]) == 2


def test_plan_on_this_machine_refuses_another_target_format(world, capsys):
    """What was measured here in float32 is not planned for eight bits' acceptance (refusal 1 through the report)."""
    accepted = {"schema": "drafthouse.acceptance/1", "name": "ours", "per_position": [0.5, 0.3, 0.2],
                "context": [0, 4096], "target": str(world.parent / "model"), "weight_bits": 32}
    (world.parent / "ours.json").write_text(json.dumps(accepted))
    assert call(roi.COMMAND, world, "calibrate") == 0
    assert call(roi.COMMAND, world, "plan", "--reports", str(world.parent / "ours.json")) == 0
    assert call(roi.COMMAND, world, "plan", "--roi.weight_bits", "8", "--reports", str(world.parent / "ours.json")) == 2
    assert "refused (1)" in capsys.readouterr().err


def test_a_context_that_does_not_fit_is_named(world, capsys):
    """The target's context leaves room for the timed cycles."""
    assert call(roi.COMMAND, world, "measure", "--roi.contexts", "[500]") == 2
    assert "roi.contexts = [500]: the target's context leaves" in capsys.readouterr().err


def test_drafters_whose_cost_follows_from_the_target(world):
    """Lookup and a layer_cut need no sizes, Medusa's heads say their draft vocabulary and blocks, of the drafter that
    is timed where there is one; a kind whose cost is not known is told before anything is timed."""
    def drafter(kind: str, **options) -> dict:
        recipe = load_recipe(world)
        return roi_measure.drafter_of(replace(recipe, drafter=replace(recipe.drafter, kind=kind, options=options)))

    assert drafter("lookup") == {"kind": "lookup", "bits": 32.0}
    assert drafter("layer_cut", layers=2) == {"kind": "layer_cut", "bits": 32.0, "layers": 2}
    steps = Steps(profile="loop", target=read_steps(folder_of(world) / "steps.json").target)
    assert replace(steps, drafter=drafter("layer_cut", layers=2)).draft().layers == 2
    assert replace(steps, drafter=drafter("lookup")).draft().kind == "lookup"
    heads = drafter("medusa", draft_vocab_size=32, num_layers=2)
    assert heads == {"kind": "medusa", "bits": 32.0, "vocab": 32, "blocks": 2}
    made = replace(read_steps(folder_of(world) / "steps.json"), drafter=heads)
    made.check("here")
    assert made.draft() == Draft("medusa", bits=32.0, vocab=32, blocks=2)
    assert drafter("medusa")["vocab"] == 0
    opened = SimpleNamespace(shape=SimpleNamespace(draft_vocab_size=16), options=SimpleNamespace(num_layers=3))
    recipe = load_recipe(world)
    recipe = replace(recipe, drafter=replace(recipe.drafter, kind="medusa", options={}))
    assert roi_measure.drafter_of(recipe, opened) == {"kind": "medusa", "bits": 32.0, "vocab": 16, "blocks": 3}


def test_medusas_heads_are_measured(world, monkeypatch):
    """Steps of fresh heads on the target's final states calibrate as heads of their size."""
    monkeypatch.setattr(roi_measure, "probe", lambda device, dtypes: replace(MACHINE))
    flags = ["--name", "heads", "--drafter.kind", "medusa", "--drafter.options", "{heads: 3, draft_vocab_size: 32}",
             "--roi.batches", "[1]"]
    assert call(roi.COMMAND, world, "measure", *flags) == 0
    steps = read_steps(world.parent / "runs" / "heads" / "roi" / "steps.json")
    assert steps.draft() == Draft("medusa", bits=32.0, vocab=32) and steps.acceptance == "synthetic"
    assert {p.K for p in steps.points if p.what == "draft"} == {1, 3}


def test_an_unknown_cost_is_told_first(world, monkeypatch):
    """Nothing is loaded or timed for a drafter that steps.json could not describe."""
    def unknown(*_args):
        raise ConfigError("drafter.kind: its cost is not known yet")

    monkeypatch.setattr(roi_measure, "draft_size", unknown)
    monkeypatch.setattr(roi_measure, "open_loop", lambda recipe: pytest.fail("the loop was opened"))
    with pytest.raises(ConfigError, match="cost is not known"):
        roi_measure.measure(load_recipe(world), print)
