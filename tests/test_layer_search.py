"""The search for taps: what it tries, that it trains and judges as `make train` does, and that it goes on."""

import json
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import LAYERS, call, conversations, load_target, write_recipe, write_target, write_traces

from data.capture import capture
from eval.metrics import bootstrap_difference
from train import layer_search
from train.layer_search import COMMAND, Columns, Judged, search, spread
from train.run import COMMAND as TRAIN

ROWS = conversations(12, 3)


@pytest.fixture
def base(tmp_path):
    """A recipe whose run has traces of 12 + 3 rows, and its target."""
    model = write_target(tmp_path / "model")
    write_traces(tmp_path / "runs" / "tiny", model, ROWS)
    return write_recipe(tmp_path / "r.yaml", model), model


def test_one_tap_moves_at_a_time_and_no_set_is_judged_twice():
    """Scores by hand: the sum over taps of 10 - |k - wanted|. From [1, 2, 3] the last tap must move first for the
    others to have room; the second sweep finds the best set, the third moves nothing."""
    asked = []

    def judge(layers):
        asked.append(layers)
        return Judged(list(layers), [sum(10 - abs(k - w) for k, w in zip(layers, (2, 5, 8)))], [1], 0.0)

    kept = {}
    found = search((1, 2, 3), range(1, 10), lambda layers: kept.setdefault(layers, None) or judge(layers), 5)
    assert found.layers == [2, 5, 8]
    assert all(list(s) == sorted(set(s)) and len(s) == 3 for s in asked)


def test_every_tap_of_a_sweep_has_its_turn():
    """Tap 1 jumps over the others to 4; the next to move is tap 2 and not what now stands in its place."""
    score = {(1, 2, 3): 1, (2, 3, 4): 2, (3, 4, 9): 5, (2, 4, 9): 3}
    found = search((1, 2, 3), [1, 2, 3, 4, 9], lambda s: Judged(list(s), [score.get(s, 0)], [1], 0.0), 1)
    assert found.layers == [3, 4, 9]


@given(depth=st.integers(5, 130))
@settings(max_examples=60, deadline=None)
def test_candidates_are_spread_over_the_target(depth):
    ids = spread(depth)
    assert ids == sorted(set(ids)) and ids[0] == 1 and ids[-1] == depth - 1 and len(ids) == min(10, depth - 1)
    assert max(np.diff(ids)) - min(np.diff(ids)) <= 1


@given(wanted=st.lists(st.sampled_from([0, 1, 3, 4, 6]), min_size=1, max_size=4, unique=True).map(sorted))
@settings(max_examples=8, deadline=None)
def test_columns_are_the_states_of_their_layers(tmp_path_factory, wanted):
    """States taken from a capture of more layers are those of a target that is tapped at these alone."""
    folder = tmp_path_factory.mktemp("target")
    target, held = load_target(write_target(folder), "float32", LAYERS), [0, 1, 3, 4, 6]
    target.tap(held)
    rows, _ = capture(target, ROWS, 10_000)
    target.tap(wanted)
    alone, _ = capture(target, ROWS, 10_000)
    source = type("Source", (), {"folder": folder, "manifest": {}})
    reader = Columns(rows, held, wanted, source)
    assert reader.split("validation") == [12, 13, 14] and reader.tokens(3) == len(ROWS[3].ids)
    for i, row in enumerate(alone):
        assert torch.equal(reader[i].taps, row.taps) and torch.equal(reader[i].final, row.final)


def test_interval_of_a_difference_resamples_prompts_together():
    """Against a slow loop over the same draws; the same counts twice differ by nothing."""
    a, wa, b, wb = (np.array(x) for x in ([3, 0, 5, 2], [4, 2, 6, 3], [2, 1, 1, 2], [5, 2, 7, 3]))
    picks = np.random.default_rng(7).integers(0, 4, size=(50, 4))
    slow = [sum(a[p]) / sum(wa[p]) - sum(b[p]) / sum(wb[p]) for p in picks]
    assert bootstrap_difference(a, wa, b, wb, 7, draws=50) == pytest.approx(list(np.percentile(slow, [2.5, 97.5])))
    assert bootstrap_difference(a, wa, a, wa, 7) == [0.0, 0.0]


def judged(base) -> dict:
    return json.loads((base[0].parent / "runs" / "tiny" / "layers.json").read_text())


FLAGS = ("--search.candidates", "[0, 4]", "--search.steps", "12", "--search.rows", "12", "--train.batch_rows", "1",
         "--train.warmup_steps", "2")
SHORT = ("--search.candidates", "[4]", "--search.steps", "2", "--train.batch_rows", "1")


@pytest.mark.parametrize("stored, dtype", [("float32", "float32"), ("int8", "float32"), ("float32", "bfloat16")])
def test_a_set_is_trained_and_judged_as_make_train_does(base, capsys, stored, dtype):
    """The recipe's own taps get the counts that `make train` replays at its end, of the same rows and steps, of states
    that went through the same storage."""
    path = base[0].parent / "runs" / "tiny" / "traces" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": stored, "mode": "online"}))
    flags = ("--train.batch_rows", "1", "--train.warmup_steps", "2", "--train.dtype", dtype, "--trace.mode", "online",
             "--trace.dtype", stored)
    assert call(COMMAND, base[0], *FLAGS, *flags) == 0
    out, found = capsys.readouterr(), judged(base)
    tried = [row["layers"] for row in found["sets"]]
    assert tried[0] == LAYERS and len(tried) == len(set(map(tuple, tried)))
    assert {k for layers in tried for k in layers} == {0, 1, 2, 3, 4}
    assert call(TRAIN, base[0], *flags) == 0
    curve = json.loads((base[0].parent / "runs" / "tiny" / "checkpoints" / "curve.json").read_text())
    first = found["result"][0]
    assert curve[-1]["step"] == 12 and curve[-1]["drafts"] == first["drafts"]
    assert curve[-1]["mean_length"] == pytest.approx(first["mean_length"])
    assert "keep trace.layers: [1, 2, 3]; 3 validation rows" in out.out, "three rows show nothing"
    best = max(found["result"], key=lambda row: row["mean_length"])
    assert found["best"] == best["layers"] or best["mean_length"] == pytest.approx(next(
        row["mean_length"] for row in found["result"] if row["layers"] == found["best"]))


def test_a_search_goes_on_where_it_was(base, monkeypatch, capsys):
    """Killed in its third training, it trains that one and the rest; finished, none; other settings, all again."""
    train, calls = layer_search.Judge.train, []

    def counting(self, layers):
        calls.append(layers)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(self, layers)

    monkeypatch.setattr(layer_search.Judge, "train", counting)
    assert call(COMMAND, base[0], *SHORT) == 130
    assert [tuple(row["layers"]) for row in judged(base)["sets"]] == calls[:2]
    assert call(COMMAND, base[0], *SHORT) == 0
    assert calls[3] == calls[2] and len(set(calls)) == len(calls) - 1
    count = len(calls)
    assert call(COMMAND, base[0], *SHORT, "--train.keep", "7") == 0 and len(calls) == count
    assert call(COMMAND, base[0], *SHORT, "--train.lr", "0.02") == 0 and len(calls) > count
    aside = list((base[0].parent / "runs" / "tiny").glob("layers-*.json"))
    assert len(aside) == 1 and len(json.loads(aside[0].read_text())["sets"]) == count - 1
    capsys.readouterr()


def row(layers, length, interval):
    return {"layers": layers, "mean_length": length, "difference": length - 1.5, "interval": interval}


def test_advice_needs_rows_and_an_interval_above_nothing():
    """The longest may be chance; of those that are shown to be better the longest is named."""
    rows = [row([1, 2, 3], 1.5, [0.0, 0.0]), row([1, 2, 4], 1.9, [-0.1, 0.9]), row([1, 3, 4], 1.7, [0.1, 0.3]),
            row([2, 3, 4], 1.6, [0.05, 0.2])]
    assert layer_search.advice(rows, [1, 2, 3], 16).startswith("set trace.layers: [1, 3, 4] and run `make trace` under")
    assert "keep trace.layers: [1, 2, 3]; 7 validation rows" in layer_search.advice(rows, [1, 2, 3], 7)
    assert "no other set is shown" in layer_search.advice(rows[:2], [1, 2, 3], 16)


def test_a_training_is_gone_before_the_next(base, monkeypatch, capsys):
    """Under bfloat16 accelerate's wrapping holds a drafter in a cycle: it is collected before the next one is made."""
    made, begin = [], layer_search.begin

    def watching(*args):
        assert not [ref for ref in made if ref() is not None]
        begun = begin(*args)
        made.append(weakref.ref(begun.drafter))
        return begun

    monkeypatch.setattr(layer_search, "begin", watching)
    assert call(COMMAND, base[0], *SHORT, "--train.dtype", "bfloat16") == 0 and len(made) > 2
    capsys.readouterr()


@pytest.mark.parametrize("flags, message", [
    (["--search.candidates", "[99]"], "search.candidates = [99]: layer ids are 0..6"),
    (["--search.stesp", "1"], "did you mean search.steps?"), (["--search.rows", "0"], "search.rows = 0"),
    (["--drafter.init_from", "x"], "drafter.init_from: an existing drafter has its layers")])
def test_what_cannot_be_searched(base, capsys, flags, message):
    assert call(COMMAND, base[0], *flags) == 2
    assert message in capsys.readouterr().err and not (base[0].parent / "runs" / "tiny" / "layers.json").exists()


def test_traces_without_validation_rows_or_of_another_target(base, tmp_path, capsys):
    """A search without a judge, or on states that are another target's, ends before anything is trained (case 36)."""
    other = write_target(tmp_path / "other", seed=1)
    assert call(COMMAND, base[0], "--target.model", str(other)) == 2
    assert "weights differs from this target's" in capsys.readouterr().err
    write_traces(tmp_path / "runs" / "bare", base[1], conversations(5, 0))
    assert call(COMMAND, base[0], "--name", "bare") == 2
    assert "holds no validation rows, by which a search is judged" in capsys.readouterr().err
