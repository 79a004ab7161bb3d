"""`make eval` with trees and with drafters that need no training, on a tiny target: reports, and what is refused."""

import json

import pytest
from tiny import call, write_prompts, write_recipe, write_target

from eval import run as eval_run
from eval.plans import described, plan_of
from recipes.errors import ConfigError
from recipes.schema import Eval, Tree
from train import script

TEXTS = ["abc abc abc ab", "one two one two one", "x", "hello hello hello", "why? why?", "a b a b a b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


def report_of(tmp_path, model, kind: str, *flags: str) -> dict:
    recipe = write_recipe(tmp_path / "r.yaml", model, drafter={"kind": kind, "options": {}}, eval={
        "prompts": str(write_prompts(tmp_path / "p.jsonl", TEXTS)), "max_tokens": 12, "speed_prompts": 2,
        "speed_tokens": 6, "batch_sizes": [2], "sampling_contexts": 4, "sampling_draws": 300, "lossless_prompts": 6})
    assert call(eval_run.COMMAND, recipe, *flags) == 0
    return json.loads((tmp_path / "runs" / "tiny" / "eval" / "report.json").read_text())


@pytest.mark.parametrize("kind,flags,plan", [
    pytest.param("lookup", (), {"kind": "chain", "depth": 4, "nodes": 4, "confidence": 0.0}, marks=pytest.mark.slow),
    pytest.param("layer_cut", ("--drafter.options.layers", "5", "--eval.confidence", "0.3"),
                 {"kind": "chain", "depth": 4, "nodes": 4, "confidence": 0.3}, marks=pytest.mark.slow),
    ("layer_cut", ("--drafter.options.layers", "5", "--eval.tree.depth", "3", "--eval.tree.total", "9"),
     {"kind": "dynamic tree", "depth": 3, "top_k": 4, "nodes": 9}),
    pytest.param("layer_cut", ("--drafter.options.layers", "5", "--eval.tree.paths", "[[0],[1],[0,0]]"),
                 {"kind": "static tree", "depth": 2, "nodes": 3, "paths": [[0], [1], [0, 0]]}, marks=pytest.mark.slow),
])
def test_drafters_without_training_are_evaluated(tmp_path, model, kind, flags, plan):
    """Case 59: a whole report, lossless, in the plan that the recipe asks for."""
    report = report_of(tmp_path, model, kind, *flags)
    assert report["settings"]["plan"] == plan and report["settings"]["draft_length"] == plan["depth"]
    assert report["drafter"]["kind"] == kind and report["drafter"]["checkpoint"] == ""
    lossless = report["total"]["lossless"]
    assert lossless["greedy"]["mismatches"] == 0 and lossless["greedy"]["prompts"] == 6
    if lossless["sampling"]["tests"]:
        assert lossless["sampling"]["p_value"] > 1e-4
    assert len(report["total"]["acceptance"]["per_position"]) == plan["depth"]
    assert report["total"]["drafts"] <= report["total"]["target_passes"]


@pytest.mark.parametrize("kind,choose", [("lookup", "chain"),
                                         pytest.param("layer_cut", "tree", marks=pytest.mark.slow)])
def test_a_measured_plan_is_reported_with_its_reason(tmp_path, model, kind, choose):
    """The setting is what was fastest here, and the report says by what."""
    report = report_of(tmp_path, model, kind, "--eval.choose", choose, "--eval.tree.total", "6",
                       "--eval.draft_length", "3")
    settings = report["settings"]
    assert 1 <= settings["plan"]["nodes"] <= 6 and "of a cycle at batch 1" in settings["plan_reason"]
    assert report["total"]["lossless"]["greedy"]["mismatches"] == 0
    assert "of a cycle at batch 1" in (tmp_path / "runs" / "tiny" / "eval" / "report.html").read_text()


@pytest.mark.parametrize("section,kind,message", [
    (Eval(choose="tree", tree=Tree(depth=2)), "eagle3", "eval.choose = tree: leave eval.tree.depth"),
    (Eval(tree=Tree(depth=2, paths=[[0]])), "eagle3", "eval.tree: depth is for a dynamic tree"),
    (Eval(tree=Tree(depth=2), confidence=0.5), "eagle3", "eval.confidence = 0.5: only a chain"),
    (Eval(tree=Tree(depth=2)), "lookup", "drafter.kind = lookup drafts chains only: leave eval.tree.depth"),
    (Eval(confidence=0.2), "lookup", "drafter.kind = lookup drafts chains only: leave eval.confidence"),
    (Eval(tree=Tree(paths=[[1]])), "eagle3", r"eval.tree.paths: path \[1\]: its parent and its smaller siblings"),
])
def test_plans_that_are_none_are_refused(section, kind, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(section, kind)


@pytest.mark.parametrize("kind,options", [
    ("fallback", {"drafter": {"kind": "suffix"}}),
    ("fallback", {"drafter": {"kind": "fallback", "options": {"drafter": {"kind": "suffix"}}}})])
def test_a_held_drafter_decides_what_can_be_planned(kind, options):
    with pytest.raises(ConfigError, match="drafts chains and dynamic trees only: leave eval.tree.paths unset"):
        plan_of(Eval(tree=Tree(paths=[[0], [1]])), kind, options)
    assert plan_of(Eval(tree=Tree(paths=[[0], [1]])), "hybrid", {"first": {"kind": "suffix"}}).nodes == 2

def test_plan_by_default_is_a_chain():
    assert described(plan_of(Eval(), "eagle3")) == {"kind": "chain", "depth": 4, "nodes": 4, "confidence": 0.0}


def test_nothing_to_train_is_said(tmp_path, model, capsys):
    """`make train` with such a drafter names it and what to do."""
    recipe = write_recipe(tmp_path / "r.yaml", model, drafter={"kind": "lookup", "options": {}})
    assert call(script.COMMAND, recipe) == 2
    assert "drafter.kind = lookup: there is nothing to train or export; run make eval" in capsys.readouterr().err
