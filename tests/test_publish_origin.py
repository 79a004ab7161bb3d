"""`make publish` of what is not wholly this run's own: another's drafter, one that began as such, paths as names."""

import json
from pathlib import Path

import pytest
import yaml
from evaluated import write_jsonl
from huggingface_hub import constants
from tiny import call
from tiny_run import tiny_run

from eval import publish, ship
from eval import run as eval_run
from eval.licences import PRIVATE, Start, TargetTerms, hub_licence, notices, problems, start_terms
from eval.public import is_path, public_name, set_names
from eval.publish import unproven
from recipes.errors import ConfigError
from recipes.schema import Drafter, Eval, EvalSet, Recipe

TERMS = ["--base_model", "org/target", "--target_licence", "apache-2.0"]
PUBLISH = ["--repo", "org/drafter", *TERMS, "--despite-verdict", "--dry-run"]
BUILT = TargetTerms("o/t", "apache-2.0")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with an export, from which others start."""
    made = tiny_run(tmp_path_factory.mktemp("origin"))
    assert call(ship.COMMAND, made.recipe) == 0
    return made


def files(run: Path) -> dict[str, str]:
    folder = run / "publish" / "drafter"
    return {p.name: p.read_text() for p in folder.iterdir() if p.suffix != ".safetensors"}


@pytest.fixture(scope="module")
def theirs(base):
    """The same drafter as somebody else's, evaluated and exported by path; flags that say so."""
    flags = ["--name", "theirs", "--drafter.path", str(base.run / "export" / "native")]
    assert call(ship.COMMAND, base.recipe, *flags) == 0 == call(eval_run.COMMAND, base.recipe, *flags)
    return flags


def test_a_drafter_of_somebody_else(base, theirs, capsys):
    """What drafter.path names is not published as one's own: its licence is asked for, kept and shown, and no training
    data of the recipe is claimed."""
    assert call(publish.COMMAND, base.recipe, *theirs, *PUBLISH) == 2
    assert "--start_licence: the licence of drafter.path" in capsys.readouterr().err
    assert call(publish.COMMAND, base.recipe, *theirs, *PUBLISH, "--start_licence", "mit", "--licence",
                "apache-2.0") == 1
    assert "which is under mit; use --licence mit" in capsys.readouterr().err
    assert call(publish.COMMAND, base.recipe, *theirs, *PUBLISH, "--start_licence", "mit") == 0
    found = files(base.run.parent / "theirs")
    assert "license: mit" in found["README.md"] and "Not trained by the recipe" in found["README.md"]
    assert "this is a drafter in a local folder: mit" in found["README.md"]
    assert "Training data" not in found["README.md"] and "prompts written by the target" not in found["README.md"]
    assert yaml.safe_load(found["recipe.yaml"])["drafter"]["path"] == "native"
    assert not any(str(base.run) in text for text in found.values())


def test_the_card_of_the_start_states_its_licence(tmp_path):
    """A folder's card, or the Hub's, says it; neither is overruled, and a Hub id is what the card here names."""
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    found = start_terms(Drafter(init_from=str(tmp_path)), "", "", None)
    assert found == Start("a drafter in a local folder", "cc-by-4.0", False)
    with pytest.raises(ConfigError, match="--start_licence mit: the card of drafter.init_from .* says cc-by-4.0"):
        start_terms(Drafter(init_from=str(tmp_path)), "mit", "", None)
    assert start_terms(Drafter(path="o/d"), "mit", "http://127.0.0.1:9", None) == Start("the drafter o/d", "mit", True)
    assert start_terms(Drafter(), "", "", None) is None


def test_terms_of_the_start_hold_for_what_is_made_of_it():
    """Binding, non-commercial and unknown terms of the start are those of the drafter; attribution is shown."""
    gemma, free = Start("the drafter o/g", "gemma", False), Start("the drafter o/f", PRIVATE, True)
    assert "stays under it; use --licence gemma" in next(problems("o/d", "apache-2.0", BUILT, [], gemma))
    assert not list(problems("o/d", "apache-2.0", BUILT, [], free))
    odd = Start("the drafter o/u", "homemade", False)
    assert "drafter licence homemade: its terms are not in" in next(problems("o/d", "mit", BUILT, [], odd))
    data = [("started from the drafter o/n", "cc-by-nc-4.0")]
    assert any("allows no commercial use" in p for p in problems("o/d", "apache-2.0", BUILT, data))
    assert "attribution" in notices(BUILT, data)[0]


def test_a_start_that_the_recipe_forgot(base, capsys):
    """A checkpoint that was trained on from another drafter is not published without naming that one."""
    path = base.checkpoint / "trainer.json"
    path.write_text(json.dumps({"settings": {"init_from": {"sha256": "x"}}}))
    assert call(eval_run.COMMAND, base.recipe) == 0
    try:
        assert call(publish.COMMAND, base.recipe, *PUBLISH) == 1
        assert "trainer.json: this drafter was started from another one" in capsys.readouterr().err
        flags = ["--drafter.init_from", str(base.run / "export" / "native"), "--start_licence", "mit"]
        assert call(publish.COMMAND, base.recipe, *PUBLISH, *flags) == 0
        found = files(base.run)
        assert "started from a drafter in a local folder: mit" in found["README.md"]
        assert yaml.safe_load(found["recipe.yaml"])["drafter"]["init_from"] == "native"
    finally:
        path.unlink()


def test_without_a_network(monkeypatch):
    """A Hub that cannot be reached is a licence that is not known, not a traceback."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub_licence("o/d", "http://127.0.0.1:9", None) == ""


def test_sets_that_are_named_by_paths(base, theirs):
    """A local data set folder, and a set that the recipe calls by a path, leave their folders here: in the report's
    keys, sentences and prompts, in the recipe and on the card; two that would share a name are refused."""
    folder = base.recipe.parent / "customer" / "mine"
    folder.mkdir(parents=True)
    rows = [{"id": str(i), "prompt": f"say {i}"} for i in range(4)]
    sets = [{"name": str(folder), "path": str(write_jsonl(folder / "a.jsonl", rows))},
            {"name": "plain, with a comma", "path": str(write_jsonl(folder / "b.jsonl", rows))}]
    flags = [*theirs, "--eval.sets", json.dumps(sets)]
    assert call(eval_run.COMMAND, base.recipe, *flags) == 0
    assert call(publish.COMMAND, base.recipe, *flags, *PUBLISH, "--start_licence", "mit") == 0
    found = files(base.run.parent / "theirs")
    assert not any("customer" in text for text in found.values())
    report = json.loads(found["evaluation.json"])
    assert list(report["sets"]) == ["mine", "plain, with a comma"]
    assert report["settings"]["prompts"] == "mine, plain, with a comma"
    assert {row["set"] for row in report["prompts"]} == set(report["sets"])
    two = Recipe(eval=Eval(sets=[EvalSet(name=str(folder)), EvalSet(name="mine")]))
    with pytest.raises(ConfigError, match="would be published as .mine., as another set is"):
        set_names(two)


def test_a_path_of_the_recipe_in_a_file(base, theirs, capsys):
    """Whatever path the recipe holds is looked for in every file: where a text repeats it, nothing is published."""
    assert call(eval_run.COMMAND, base.recipe, *theirs) == 0
    flags = ["--trace.url", "/mnt/secret-customer/traces", "--prompts.sources",
             "[{kind: synthesis, starts: [see /mnt/secret-customer/traces please]}]", "--with-prompts"]
    assert call(publish.COMMAND, base.recipe, *theirs, *PUBLISH, "--start_licence", "mit", *flags) == 1
    assert "holds the name of a folder of this machine, /mnt/secret-customer/traces" in capsys.readouterr().err


def test_public_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sets/mine").mkdir(parents=True)
    assert [public_name(n) for n in ("org/data", "sets/mine", "/a/b.jsonl", "builtin", "")] == [
        "org/data", "mine", "b.jsonl", "builtin", ""]
    assert [is_path(n) for n in ("sets/mine", "c/c++ code", "./x", "/x", "maths")] == [True, False, True, True, False]


@pytest.mark.parametrize("change, message", [
    ({}, ""), ({"drafts": 0}, "no draft was compared"),
    ({"loop": [0.9, 0.5]}, "loop and second reader are 0.100 apart"),
    ({"validation": None}, "which compared no validation"),
    ({"validation": {"drafts": 40, "replay": [0.9, 0.1], "reader": [0.8, 0.1]}}, "replay and second reader are 0.100"),
    ({"validation": {"drafts": 0, "replay": [0.0], "reader": [0.0]}}, "no draft was compared")])
def test_a_proof_that_proves_nothing(change, message):
    """Case 12: a proof without drafts, or one whose tolerance let everything pass, does not publish."""
    stored = {"drafts": 40, "loop": [0.8, 0.5], "reader": [0.8, 0.5],
              "validation": {"drafts": 40, "replay": [0.8, 0.3], "reader": [0.8, 0.1]}} | change
    stored = {key: value for key, value in stored.items() if value is not None}
    found = unproven(Path("native-check.json"), stored, trained=True)
    assert message in found[0] if message else found == []
