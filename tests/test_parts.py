"""Drafters that hold drafters as a recipe names them: opened with their checkpoints, evaluated, reported.

Who drafts when: tests/test_hybrid.py.
"""

import json
import sys

import pytest
from evaluated import evaluate, world
from tiny import load_target

from drafters.imported import open_drafter
from eval.decode import Decoder, Output
from eval.figures import by_drafter
from recipes.errors import ConfigError
from recipes.schema import Drafter as Section


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe with a trained EAGLE-3 drafter in `drafter`."""
    return world(tmp_path_factory.mktemp("world"))


def flags_of(recipe, kind: str, options: dict) -> list[str]:
    return ["--drafter.kind", kind, "--drafter.path", "", "--drafter.options", json.dumps(options)]


def test_a_hybrid_is_opened_with_its_checkpoint(recipe, tmp_path):
    """The target is tapped where the trained part reads, the text stays, and another option is another evaluation."""
    target = load_target(recipe.parent / "model", "float32")
    target.tap(None)
    options = {"first": {"kind": "lookup"}, "then": {"kind": "eagle3", "path": str(recipe.parent / "drafter")}}
    found, other = (open_drafter(Section(kind="hybrid", options={**options, "match": n}), target, tmp_path)
                    for n in (2, 3))
    assert target.layers == [2, 4, 5] and found.folder.name == "drafter" and found.digest != other.digest
    prompts = [[5, 6, 7, 5, 6], [9, 8]]
    out, plain = Decoder(target, 6, end_ids=[]).speculative(prompts, found.drafter, 3), Decoder(target, 6, end_ids=[])
    assert [o.tokens for o in out] == [o.tokens for o in plain.plain(prompts)]


def test_who_drafted_is_counted_by_hand():
    outputs = [Output(drafted_by=[("a", 3, 2), ("b", 0, 0)]), Output(drafted_by=[("a", 2, 1), ("b", 4, 0)])]
    assert by_drafter(outputs)["by_drafter"] == {
        "a": {"passes": 2, "drafts": 2, "drafted": 5, "accepted": 3, "mean_length": 2.5, "rate": 0.6},
        "b": {"passes": 2, "drafts": 1, "drafted": 4, "accepted": 0, "mean_length": 1.0, "rate": 0.0}}
    assert by_drafter([Output()]) == {}


@pytest.mark.slow
def test_a_hybrid_of_a_trained_drafter_is_evaluated(recipe):
    """Case 59: a whole report, lossless; it says who drafted, and what that depends on."""
    pytest.importorskip("numba")
    code, report = evaluate(recipe, *flags_of(recipe, "hybrid", {
        "match": 2, "length": 2, "first": {"kind": "suffix"},
        "then": {"kind": "eagle3", "path": str(recipe.parent / "drafter")}}))
    total = report["total"]
    assert code == 0 and total["lossless"]["greedy"]["mismatches"] == 0
    assert report["drafter"]["kind"] == "hybrid" and report["drafter"]["checkpoint"] == "drafter"
    assert report["target"]["layers"] == [2, 4, 5] and report["drafter"]["parameters"] > 0
    by = total["by_drafter"]
    assert sum(one["passes"] for one in by.values()) == total["target_passes"]
    assert sum(one["drafts"] for one in by.values()) == total["drafts"] and by["eagle3"]["passes"]
    assert any("grew by each finished answer" in line for line in report["settings"]["remarks"])
    page = (recipe.parent / "runs" / "tiny" / "eval" / "report.html").read_text()
    assert "Who drafted" in page and "grew by each finished answer" in page


@pytest.mark.slow
def test_a_fallback_is_priced_by_what_it_costs_here(recipe):
    """A random drafter pays nowhere: requests stop drafting, by the break-even that was measured before."""
    code, report = evaluate(recipe, *flags_of(recipe, "fallback", {
        "window": 1, "drafter": {"kind": "eagle3", "path": str(recipe.parent / "drafter")}}), "--again")
    assert code == 0 and report["total"]["lossless"]["greedy"]["mismatches"] == 0
    by = report["total"]["by_drafter"]
    assert set(by) == {"eagle3", "paused"} and by["paused"]["drafts"] == 0 and by["paused"]["mean_length"] is None
    assert "(measured here)" in report["settings"]["remarks"][0]


@pytest.mark.parametrize("options,message", [
    ({"then": {"kind": "eagle3"}}, "drafter.options.then.path: name the trained drafter of kind eagle3"),
    ({"then": {"kind": "eagle3", "path": "runs/nowhere"}}, "drafter.options.then.path"),
    ({"then": {"kind": "medusa", "path": "DRAFTER"}}, "a drafter of kind eagle3, but"),
])
def test_parts_that_cannot_be_opened_are_named(recipe, capsys, options, message):
    options = {"first": {"kind": "lookup"}, **json.loads(json.dumps(options).replace(
        "DRAFTER", str(recipe.parent / "drafter")))}
    code, _ = evaluate(recipe, *flags_of(recipe, "hybrid", options))
    assert code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("kind,options,field", [
    ("suffix", {}, "drafter.kind"),
    ("fallback", {"drafter": {"kind": "suffix"}}, "drafter.options.drafter.kind"),
    ("hybrid", {"first": {"kind": "suffix"}, "then": {"kind": "layer_cut"}}, "drafter.options.first.kind"),
    ("fallback", {"drafter": {"kind": "hybrid", "options": {"then": {"kind": "layer_cut"}}}},
     "drafter.options.drafter.options.first.kind"),
])
def test_without_numba_suffix_decoding_says_what_to_install(recipe, tmp_path, monkeypatch, kind, options, field):
    """One line with the field that asked for it, wherever that stands; every other drafter does without."""
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "drafters.automaton_code", raising=False)
    target = load_target(recipe.parent / "model", "float32")
    with pytest.raises(ConfigError) as error:
        open_drafter(Section(kind=kind, options=options), target, tmp_path)
    message = str(error.value)
    assert message.startswith(f"{field} = suffix: the package numba is not installed") and "\n" not in message
    assert 'pip install "drafthouse[suffix]"' in message
    open_drafter(Section(kind="hybrid", options={"first": {"kind": "lookup"}, "then": {"kind": "layer_cut"}}), target,
                 tmp_path)


def test_a_held_drafters_options_are_named(recipe, tmp_path):
    """An error of a part names its field by where it stands in the recipe."""
    pytest.importorskip("numba")
    options = {"first": {"kind": "suffix", "options": {"outputs": "nowhere"}}, "then": {"kind": "layer_cut"}}
    with pytest.raises(ConfigError, match="^drafter.options.first.options.outputs = nowhere: no trace folder"):
        open_drafter(Section(kind="hybrid", options=options), load_target(recipe.parent / "model", "float32"), tmp_path)
