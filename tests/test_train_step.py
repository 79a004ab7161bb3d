"""`train_step`: the data that all sides get, the work that is compared, the rows; with peers that the tests run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import stage
from tiny import write_recipe, write_target

from bench import run as bench_run
from bench import sides, step_cases, train_step
from bench.train_step import LR, VARIANTS, Options, Peak, Work
from drafters.base import loss_mask

TINY = {"sequence": 64, "depth": 3, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 24,
        "vocabulary": 60, "draft_vocabulary": 20, "lengths": [32, 64], "length_repeats": 1}
PYTHON = ["--train_step.specforge_python", sys.executable]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    return write_recipe(folder / "r.yaml", write_target(folder / "model"))


def bench(recipe: Path, capsys, *argv: str) -> tuple[int, str, list[dict]]:
    """Exit code, last line of stderr and rows."""
    tiny = [text for name, value in TINY.items() for text in (f"--train_step.{name}", json.dumps(value))]
    code, err = stage(bench_run.COMMAND, capsys, "--config", str(recipe), "--only", "train_step", "--repeats", "2",
                      *tiny, *argv)
    path = recipe.parent / "runs" / "bench" / "train_step.json"
    return code, err, json.loads(path.read_text()) if path.exists() else []


def test_a_real_measurement(recipe, capsys, monkeypatch):
    """Our process and a peer that is our own core under another name: equal losses, all variants and lengths; the
    memory of both; nothing stays in the folder."""
    monkeypatch.setitem(sides.SCRIPTS, "specforge", Path(__file__).with_name("fake_side.py"))
    code, err, found = bench(recipe, capsys, *PYTHON)
    assert code == 0, err
    values = {(row["variant"], row["metric"]): row for row in found}
    assert len(values) == len(found)
    for variant in ("dense", "half", "half_r07"):
        assert values[variant, "ratio"]["value"] > 0 and values[variant, "ratio_memory"]["value"] > 0
        assert values[variant, "ratio"]["reference"].startswith("specforge 0.0.1, torch ")
        assert values[variant, "step_s"]["value"] > values[variant, "forward_backward_s"]["value"]
    assert ("frozen_head", "ratio") not in values  # nothing here freezes its head
    assert {v for v, m in values if m == "ms_per_token"} == {"length_32", "length_64", "packed_64"}
    notes = json.loads((recipe.parent / "runs" / "bench" / "train_step.env.json").read_text())["notes"]
    assert notes["left_out"] == ["speculators"] and len(notes["losses"]["drafthouse"]) == TINY["depth"]
    assert notes["losses"]["specforge"] == notes["losses"]["drafthouse"]
    assert notes["trained_parameters"]["specforge"] == notes["trained_parameters"]["drafthouse"]
    assert not [p for p in (recipe.parent / "runs" / "bench").iterdir() if p.is_dir()]


@pytest.mark.parametrize("argv, message", [
    ([], "--train_step.speculators_python or --train_step.specforge_python is needed"),
    (["--train_step.specforge_python", "/nowhere/python"], "--train_step.specforge_python /nowhere/python: no such"),
    ([*PYTHON, "--train_step.sequence", "32"], "train_step.sequence = 32: eight spans of it must be longer than")])
def test_bad_usage(recipe, capsys, argv, message):
    """Exit 2 with what to do."""
    code, err, _ = bench(recipe, capsys, *argv)
    assert code == 2 and message in err


def test_a_peer_that_cannot_start(recipe, capsys, monkeypatch, tmp_path):
    """Exit 1 with the peer's name and its last words."""
    (tmp_path / "peer.py").write_text("import a_package_that_is_not_here")
    monkeypatch.setitem(sides.SCRIPTS, "specforge", tmp_path / "peer.py")
    code, err, _ = bench(recipe, capsys, *PYTHON)
    assert code == 1 and "specforge: the process ended with status 1; last line of its stderr: ModuleNotFound" in err


def test_turns():
    """dense: every token; half: four answers behind four prompts, all of one length, half of the tokens."""
    assert step_cases.dense(3).tolist() == [1, 1, 1]
    assert step_cases.half(16).tolist() == [0, 0, 1, 1, 0, 0, 2, 2, 0, 0, 3, 3, 0, 0, 4, 4]
    assert step_cases.half(18).tolist()[-4:] == [4, 4, 0, 0]


def test_packed_cases():
    """Conversations of one length end to end: each has its start, whose token is not supervised."""
    shape = step_cases.shape_of(SimpleNamespace(**TINY))
    case = step_cases.case(step_cases.dense(5), shape, 0, conversation=2)
    assert case["starts"].tolist() == [0, 0, 2, 2, 4] and case["turns"].tolist() == [0, 1, 0, 1, 0]
    assert case["taps"].shape == (5, 48) and case["final"].shape == (5, 16)


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(6, 20), depth=st.integers(1, 4))
def test_all_sides_compare_the_same_positions(tokens, depth):
    """The masks make the positions that each peer counts, by its own rule, those that ours counts. The rules: at step
    k of S tokens speculators counts the starts t < S - 1 - k with mask[t+1+k], specforge those with mask[t+k], whose
    last position its data loader leaves out."""
    shape = step_cases.shape_of(SimpleNamespace(**TINY))
    case = step_cases.compared(step_cases.case(step_cases.dense(tokens), shape, 0))
    theirs = {name: case[f"mask.{name}"].tolist() for name in ("speculators", "specforge")}
    theirs["specforge"][-1] = False
    for k in range(depth):
        ours = loss_mask(case["turns"][None], k)[0].nonzero()[:, 0].tolist()
        assert [t for t in range(tokens - 1 - k) if theirs["speculators"][t + 1 + k]] == ours
        assert [t for t in range(tokens - k) if theirs["specforge"][t + k]] == ours


def test_teachers_favourites_are_inside(recipe):
    """The teacher's first choice is in the draft vocabulary everywhere, so specforge leaves nothing out."""
    shape = step_cases.shape_of(SimpleNamespace(**TINY))
    tables = step_cases.Tables.random(shape, 0)
    final = step_cases.case(step_cases.dense(64), shape, 0)["final"]
    assert set((final @ tables.head.T).argmax(-1).tolist()) <= set(tables.ids.tolist())
    tables = replace(tables, head=torch.randn(60, 16, generator=torch.Generator().manual_seed(1)))  # no favourites
    final = step_cases.favourites(tables, 50)
    assert set((final @ tables.head.T).argmax(-1).tolist()) <= set(tables.ids.tolist()) and len(final) == 50


def test_entropy_of_the_teacher():
    """By hand: two equally likely tokens have log 2, a certain one 0; step k counts the states 1+k .. S-2."""
    tables = step_cases.Tables(torch.zeros(2, 1), torch.tensor([[0.0], [100.0]]), torch.tensor([0, 1]))
    case = {"final": torch.tensor([[0.0], [0.0], [1.0], [1.0], [0.0]]), "turns": torch.ones(5, dtype=torch.long)}
    log2 = torch.tensor(2.0).log().item()
    assert step_cases.entropies(case, tables, 3) == pytest.approx([log2 / 3, 0, 0])


def test_differing_losses():
    """A divergence plus the teacher's entropy is a cross-entropy; the first step that differs is named."""
    assert step_cases.differing("speculators", [1.0, 2.0], [1.5, 2.25], [0.5, 0.25], 1e-4) == []
    assert step_cases.differing("specforge", [1.0], [1.0, 2.0], [0.0, 0.0], 1e-4) == ["1 steps, ours 2"]
    assert step_cases.differing("specforge", [1.0, 2.5], [1.0, 2.0], [9.0, 9.0], 1e-4) == [
        "step 1: 2.500000, ours 2.000000"]


def test_another_loss_is_a_fault():
    """A peer whose loss is another one from the same weights did other work: its speed says nothing."""
    answers = {"drafthouse": [3.0, 2.0], "speculators": [2.0, 1.5], "specforge": [3.0, 2.1]}
    stand_ins = {name: SimpleNamespace(ask=lambda *wanted, found=found, **asked: [found], reference=f"{name} 1.0.0")
                 for name, found in answers.items()}
    work = SimpleNamespace(folder=Path("x"), entropy=[1.0, 0.5], options=Options(tolerance=1e-3))
    losses, faults = Work.same_losses(work, stand_ins)
    assert losses == answers
    assert faults == ["specforge 1.0.0: another loss than ours from the same weights (step 1: 2.100000, ours "
                      "2.000000); speeds of different work say nothing"]


def test_what_is_timed():
    """Peers step each case once a turn, ours every variant; the smallest steps come first."""
    assert train_step.pairs({"drafthouse": None, "specforge": None}) == [
        ("drafthouse", "half_r07"), ("drafthouse", "half"), ("specforge", "half"), ("drafthouse", "frozen_head"),
        ("drafthouse", "dense"), ("specforge", "dense")]
    work = SimpleNamespace(cases={"half": "h"})
    assert Work.message(work, "half_r07") == {"case": "h", "lr": LR, "options": {"depth_share": 0.7}}
    assert VARIANTS["half"][1] == {"depth_share": 1.0}  # options stay with a side until they are set again


def test_rows_by_hand():
    """Two turns of 100 tokens: forward and backward 1 and 2 s against 2 and 6 s of the faster peer."""
    peers = {"speculators": "speculators 0.9.0", "specforge": "specforge 0.2.0"}
    times = {("drafthouse", "half"): [[1.0, 1.0], [2.0, 1.0]], ("speculators", "half"): [[2.0, 1.0], [6.0, 1.0]],
             ("specforge", "half"): [[8.0, 0.5], [8.0, 0.5]]}
    memory = {("drafthouse", "half"): Peak(100, 50), ("speculators", "half"): Peak(300, 10),
              ("specforge", "half"): Peak(210, 110)}
    found = train_step.variant_rows("half", peers, times, memory, 100)
    values = {(row.metric, row.reference): row.value for row in found}
    assert len(values) == len(found)
    first, second = peers.values()
    assert (values["ratio", first], values["ratio_min", first], values["ratio_max", first]) == (2.5, 2.0, 3.0)
    assert values["ratio_speculators", first] == 2.5 and values["ratio_specforge", second] == 6.0
    assert values["ratio_step", first] == pytest.approx((3 / 2 + 7 / 3) / 2)
    assert values["tokens_per_s", None] == pytest.approx(100 / 1.5)
    assert values["reference_tokens_per_s", first] == 25 and values["reference_step_s", second] == 8.5
    assert values["ratio_memory", second] == 2.0 and values["work_bytes", None] == 50
    rows = train_step.variant_rows("half", peers, times, dict.fromkeys(memory, Peak(None, None)), 100)
    assert "ratio_memory" not in [row.metric for row in rows]
    assert [row.value for row in rows if row.metric == "peak_bytes"] == [None]


def test_cost_by_hand():
    """8 tokens in 4 s; 24 bytes more than the modules take."""
    found = {row.metric: row.value for row in train_step.cost_rows("length_8", 8, [4.0, 9.0, 3.0], Peak(124, 100))}
    assert found == {"ms_per_token": 500, "peak_bytes": 124, "work_bytes": 24}
