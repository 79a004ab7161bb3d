"""`time_to_quality`: trainings as units that are run once, judged by our own replay; rows by hand."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import stage
from tiny import conversations, write_recipe, write_target, write_traces

from bench import run as bench_run
from bench import sides, time_to_quality
from bench.quality_rows import Outcome, Unit, quality_rows, units
from bench.time_to_quality import NormedTaps, Traces, Trainings, training_case
from data.store import TraceReader
from drafters.base import Batch
from drafters.layers import RMSNorm
from recipes.errors import RunError
from recipes.loader import load_recipe

PYTHON = ["--time_to_quality.specforge_python", sys.executable]
SMALL = ["--time_to_quality.depths", "[2]", "--time_to_quality.peer_lrs", "[0.01]", "--time_to_quality.judges", "3",
         "--time_to_quality.judge_every", "2", "--time_to_quality.length", "9"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A recipe and float32 traces of a tiny target."""
    folder = tmp_path_factory.mktemp("quality")
    write_target(folder / "model")
    write_traces(folder / "runs" / "tiny", folder / "model", conversations(12, 2))
    write_recipe(folder / "r.yaml", folder / "model", train={"batch_rows": 3, "epochs": 1.0})
    return folder


def bench(world: Path, capsys, *argv: str) -> tuple[int, str, list[dict]]:
    """Exit code, last line of stderr and rows."""
    code, err = stage(bench_run.COMMAND, capsys, "--config", str(world / "r.yaml"), "--only", "time_to_quality", *SMALL,
                      *argv)
    path = world / "runs" / "bench" / "time_to_quality.json"
    return code, err, json.loads(path.read_text()) if path.exists() else []


def test_units_are_run_once(world, capsys, monkeypatch):
    """Each run takes up the units that are left. Both sides train on the same batches and are judged at the same
    steps."""
    monkeypatch.setitem(sides.SCRIPTS, "specforge", Path(__file__).with_name("fake_side.py"))
    monkeypatch.setattr(time_to_quality, "units", lambda *given: units(*given)[1:])  # ours is slow to start, too
    folder = world / "runs" / "bench" / "time_to_quality"
    code, err, rows = bench(world, capsys, *PYTHON, "--time_to_quality.units", "1")
    assert code == 0, err
    done = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert list(done) == ["drafthouse_target_layer_k2_lr0.01.json"] and {row["variant"] for row in rows} == {"k2_warm"}
    notes = json.loads((world / "runs" / "bench" / "time_to_quality.env.json").read_text())["notes"]
    assert notes["left"] == ["specforge_own_k2_lr0.01"]
    code, err, rows = bench(world, capsys, *PYTHON)
    assert code == 0, err
    for name, when in done.items():
        assert (folder / name).stat().st_mtime_ns == when
    curves = {path.name: json.loads(path.read_text())["curve"] for path in folder.iterdir()}
    assert len(curves) == 2 and all([step for step, _, _ in curve] == [0, 2, 3] for curve in curves.values())
    assert all(curve[0][1] == 0 < curve[1][1] < curve[2][1] for curve in curves.values())
    values = {(row["variant"], row["metric"]): row for row in rows}
    assert values["k2_warm", "seconds"]["value"] is None  # nothing has this length
    assert values["k2_warm", "reference_lr_specforge"]["value"] == 0.01
    assert values["k2_warm", "reference_best_length_specforge"]["reference"].startswith("specforge 0.0.1")


@pytest.mark.parametrize("argv, message", [
    ([], "--time_to_quality.speculators_python or --time_to_quality.specforge_python is needed"),
    ([*PYTHON, "--generation.temperature", "1.0"], "a replay judges by the target's greedy answers"),
    ([*PYTHON, "--time_to_quality.judges", "100"], "training rows are too few for time_to_quality.judges = 100")])
def test_bad_usage(world, capsys, argv, message):
    """Nothing is trained where the traces or the options do not serve."""
    code, err, _ = bench(world, capsys, *argv)
    assert code in (1, 2) and message in err


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_a_peer_that_would_be_misjudged(world, tmp_path, off):
    """A peer's weights must give the loss in our drafter that they give in its own, or nothing is trained."""
    recipe, options = load_recipe(world / "r.yaml"), time_to_quality.Options()
    trainings = Trainings(recipe, options, Traces(recipe, replace(options, judges=3)), tmp_path)
    unit = Unit("specforge", 3, 0.01, "own")

    def ask(*wanted, do, case=None, path=None):
        drafter = trainings.drafters["random"]
        if do == "save":
            return save_file(drafter.state_dict(), path)
        one = load_file(case)
        out = drafter(Batch(**{name: one[name][None] for name in ("ids", "turns", "taps", "final", "starts")}))
        return [(out.depth_loss / out.depth_count + off).tolist()]

    side = SimpleNamespace(ask=ask, reference="specforge 0.0.1")
    with pytest.raises(RunError, match="specforge 0.0.1: its weights give") if off else nullcontext():
        trainings.check(unit, side, tmp_path)


def test_finished_units(tmp_path, capsys):
    """A result counts with exactly its settings; another one is named and the unit run again."""
    path = tmp_path / "u.json"
    assert time_to_quality.finished(path, {"train": {"lr": 1}}) is None
    path.write_text(json.dumps({"settings": {"train": {"lr": 1}}, "reference": "r", "curve": [[0, 0.0, 1.0]]}))
    assert time_to_quality.finished(path, {"train": {"lr": 1}}) == Outcome("r", [(0, 0.0, 1.0)])
    assert time_to_quality.finished(path, {"train": {"lr": 2}}) is None
    assert "u.json: train.lr was 1, now 2; this unit is run again" in capsys.readouterr().err.replace("\n", "")


def test_training_cases(world):
    """Conversations packed; the peers' masks count supervised tokens where a teacher is stored: speculators' names the
    state that teaches, specforge's the one before it. User turns carry loss where the recipe learns from them."""
    reader = TraceReader(world / "runs" / "tiny" / "traces")
    rows = [reader[i] for i in reader.split("train")[:2]]
    case = training_case(rows, user_turns=False)
    n = len(rows[0].ids)
    assert case["starts"].unique().tolist() == [0, n] and case["turns"].unique().tolist() == [0, 1]
    stored = (case["final"] != 0).any(-1)
    answer = case["turns"] > 0
    assert case["mask.speculators"].tolist() == (answer & stored).tolist()
    assert not case["mask.speculators"][n - 1] and case["mask.speculators"][n - 2]  # behind the end token: no state
    wanted = rows[0].turns.clone()
    wanted[-3:] = -1  # as a user turn is marked
    rows[0] = replace(rows[0], turns=wanted)
    assert training_case(rows, user_turns=True)["turns"].unique().tolist() == [0, 1, 2]
    assert training_case(rows, user_turns=False)["turns"][n - 4 : n].tolist() == [1, 0, 0, 0]
    assert case["mask.specforge"][n - 3] and not case["mask.specforge"][n - 2] and not case["mask.specforge"][n - 1]


def test_normed_taps(world):
    """The norm that speculators puts over all taps, before our drafter reads them."""
    reader = TraceReader(world / "runs" / "tiny" / "traces")
    plain = reader[0]
    weight = torch.linspace(0.5, 2, plain.taps.shape[1])
    norm = RMSNorm(len(weight), 1e-5).requires_grad_(False)
    norm.weight.copy_(weight)
    expected = plain.taps / (plain.taps.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(NormedTaps(reader, norm)[0].taps, expected)


def test_seconds_to_a_length():
    """By hand: half of the way from 1.2 to 1.8, which lie at 10 and 30 s; at once where it begins there."""
    outcome = Outcome("r", [(0, 0.0, 1.0), (5, 10.0, 1.2), (10, 30.0, 1.8)])
    assert outcome.reached(1.5) == pytest.approx(20) and outcome.reached(1.1) == pytest.approx(5)
    assert outcome.reached(1.9) is None and outcome.reached(1.0) == 0 and outcome.seconds == 30


def test_all_trainings():
    """Each depth: ours from random and from the target's last layer, then each peer, each with each of its rates."""
    found = units(["specforge"], [3, 7], [0.1, 0.3], [0.1, 0.2])
    assert [unit.name for unit in found[:6]] == [
        "drafthouse_random_k3_lr0.1", "drafthouse_random_k3_lr0.3", "drafthouse_target_layer_k3_lr0.1",
        "drafthouse_target_layer_k3_lr0.3", "specforge_own_k3_lr0.1", "specforge_own_k3_lr0.2"]
    assert len(found) == 12 and found[6].depth == 7


def line(seconds: float, reference: str = "drafthouse 1", longest: float = 100.0) -> Outcome:
    """Reaches 2.0 after `seconds` where that is before `longest`."""
    top = 2.0 if seconds < longest else 1.5
    return Outcome(reference, [(0, 0.0, 1.0), (1, min(seconds, longest), top)])


def test_rows_by_hand():
    """Each side at its best rate (ours 10 s, the peers 20 and 40), the ratio against the faster one, our warm start
    apart; a peer that never got there counts what it trained; a side counts once all its rates are done."""
    ours = {Unit("drafthouse", 3, lr, start): line(s) for lr, start, s in (
        (0.1, "random", 10.0), (0.2, "random", 30.0), (0.1, "target_layer", 500.0), (0.2, "target_layer", 5.0))}
    theirs = {Unit("speculators", 3, lr, "own"): line(s, "speculators 0.9.0") for lr, s in ((0.1, 40.0), (0.2, 60.0))}
    theirs |= {Unit("specforge", 3, lr, "own"): line(s, "specforge 0.2.0") for lr, s in ((0.1, 30.0), (0.2, 20.0))}
    values = {(row.variant, row.metric): row for row in quality_rows(ours | theirs, [3], 2, 2, 2.0)}
    assert values["k3", "lr"].value == 0.1 and values["k3_warm", "lr"].value == 0.2
    assert values["k3", "ratio"].value == 2 and values["k3", "ratio"].reference == "specforge 0.2.0"
    assert values["k3_warm", "ratio"].value == 4 and values["k3_warm", "seconds"].value == 5
    assert values["k3", "reference_seconds_speculators"].value == 40
    assert values["k3", "reference_lr_specforge"].value == 0.2
    never = {unit: line(500.0, outcome.reference) for unit, outcome in theirs.items()}
    values = {(row.variant, row.metric): row.value for row in quality_rows(ours | never, [3], 2, 2, 2.0)}
    assert values["k3", "ratio_at_least_specforge"] == 10 and ("k3", "ratio") not in values
    assert values["k3", "reference_seconds_specforge"] is None
    assert values["k3", "reference_best_length_specforge"] == 1.5
    few = quality_rows(ours | theirs, [3], 2, 3, 2.0)
    assert {row.metric for row in few} == {"seconds", "best_length", "lr"}
    assert not quality_rows(ours | theirs, [3], 3, 2, 2.0)
