"""`make eval` at sampling settings and stop strings, end to end on a tiny target."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from evaluated import evaluate, world
from test_compare import written
from test_report import SCHEMA, Page, sample_report, violations
from tiny import call, load_target
from tiny_drafter import LAYERS
from tiny_run import tiny_run

from eval import breakdown, serve_check, ship, timing, verify
from eval.card import limits, measured
from eval.compare import read_runs
from eval.decode import Output
from eval.earlier import key_of
from eval.evaluation import Evaluation
from eval.gate import Gate, Options
from eval.plan import judging
from eval.report import summary_lines
from eval.roi_accepted import read_acceptance
from recipes.errors import ConfigError, RunError
from recipes.loader import load_recipe

FLAGS = ["--eval.sampling.temperature", "1.2", "--eval.sampling.top_p", "0.9", "--eval.sampling.repetition_penalty",
         "1.2", "--eval.stop", "['8', 'x', 'qq']"]
WORDS = "temperature 1.2, top-p 0.9, repetition penalty 1.2, 3 stop strings"
AT = {"temperature": 1.2, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.2, "stop": ["8", "x", "qq"]}


def noting(work, told: dict):
    """The function, which notes the settings that it is called with."""
    def noted(*args, **how):
        told[work.__name__] = how
        return work(*args, **how)
    return noted


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The recipe, the report of FLAGS, what was printed to its page and Markdown, and how parts of it were decoded."""
    recipe, told = world(tmp_path_factory.mktemp("sampled")), {}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((timing, "interleaved"), (timing, "by_batch"), (breakdown, "cycle")):
            patch.setattr(module, name, noting(getattr(module, name), told))
        code, report = evaluate(recipe, *FLAGS, "--eval.texts", "true", "--eval.batch_sizes", "[2]")
    folder = recipe.parent / "runs" / "tiny" / "eval"
    assert code == 0
    return SimpleNamespace(recipe=recipe, report=report, told=told, html=(folder / "report.html").read_text(),
                           markdown=(folder / "report.md").read_text())


def test_the_report_says_what_it_was_measured_at(made):
    """JSON, page, Markdown and verdict; every part was decoded at these settings, the baseline too."""
    report = made.report
    assert violations(report, SCHEMA) == []
    assert {name: report["settings"][name] for name in AT} == AT
    assert report["verdict"]["reasons"][-1] == f"measured at {WORDS}; requests at other settings accept otherwise"
    page = Page(made.html)
    assert f"· {WORDS} ·" in page.text and f"Verdict, at {WORDS}" in page.text and '"qq"' in page.text
    assert "At temperature 1.2, top-p 0.9, repetition penalty 1.2 p-value" in page.text
    assert made.markdown.splitlines()[0].endswith(f", at {WORDS}") and f"Draft length 3, {WORDS}," in made.markdown
    assert {name: how["sampling"].temperature for name, how in made.told.items()} == {
        "interleaved": 1.2, "by_batch": 1.2, "cycle": 1.2}
    assert all(how["stop"] == ("8", "x", "qq") for how in made.told.values())
    sampled = report["total"]["lossless"]["sampling"]["settings"]
    assert sampled == {name: value for name, value in AT.items() if name != "stop"}


def test_answers_end_at_stop_strings_and_turns_go_on_without_them(made):
    """Every answer ends with an end token, at the limit, or with a stop string, whose text is not in the next turn."""
    stopped = 0
    prompts = {(one["id"], one["round"]): one for one in made.report["prompts"]}
    for (name, number), one in prompts.items():
        text = one["answer"]
        stopped += text.endswith(("8", "x", "qq"))
        assert text.endswith(("8", "x", "qq", "<|im_end|>")) or one["tokens"] == 12
        assert not {"8", "x"} & set(re.sub(r"<[|a-z_]+>", "", text)[:-1])
        following = prompts.get((name, number + 1))
        if following and text.endswith(("8", "x")):
            said = re.sub(r"<unk>|<\|im_start\|>", "", text[:-1])  # servers drop control tokens
            assert f"assistant\n{said}<|im_end|>" in following["prompt"]
    assert stopped > 2
    assert made.report["sets"]["bench"]["turns_after_cut_answers"] < 2


def begun(made, *flags: str) -> tuple[Evaluation, list[Output]]:
    """An evaluation of these flags that has answered every prompt."""
    names = [flag.removeprefix("--") for flag in flags[::2]]
    one = Evaluation(load_recipe(made.recipe, dict(zip(names, flags[1::2]))))
    with one.bar:
        return one, one.answers()


def test_the_same_seed_gives_the_same_answers_in_any_batch(made):
    """Sampled answers and drafts are the recipe's seed's, whatever is decoded together: those of the report, prompt by
    prompt; another seed gives others."""
    one, outputs = begun(made, *FLAGS)
    found = [(len(o.tokens), o.passes, o.acceptance.drafts, sum(o.acceptance.accepted)) for o in outputs]
    assert found == [tuple(record[key] for key in ("tokens", "passes", "drafts", "accepted"))
                     for record in made.report["prompts"]]
    assert [one.target.tokenizer.decode(o.tokens) for o in outputs] == [r["answer"] for r in made.report["prompts"]]

    def repeated(size: int, seed: int) -> list[tuple]:
        one.section, one.how = replace(one.section, batch_size=size), one.how | {"seed": seed}
        one.rows = one.asking.first()
        return [(o.tokens, o.drafts, o.refused) for o in one.answers()]

    before = [(o.tokens, o.drafts, o.refused) for o in outputs]
    assert repeated(1, 0) == repeated(3, 0) == before != repeated(4, 1)


def test_greedy_text_is_proved_beside_sampled_answers(made, monkeypatch):
    """Case 59: a verification that changes greedy text alone is found though the answers are sampled."""
    assert made.report["total"]["lossless"]["greedy"]["mismatches"] == 0
    one, outputs = begun(made, *FLAGS)
    greedy = verify.verify_greedy

    def wrong(*args):
        found = greedy(*args)
        found.tokens[:, 0] = 7
        return found

    monkeypatch.setattr(verify, "verify_greedy", wrong)
    found = one.greedy(outputs)
    assert found["prompts"] == 4 and found["mismatches"] > 0
    assert f"Verdict                 do not deploy, at {WORDS}" in summary_lines(made.report)


def test_greedy_answers_are_decoded_once(made, monkeypatch):
    """Nothing is decoded twice for the proof where the answers are greedy, behind a penalty and stop strings too; the
    sampling test is made at temperature 1 then."""
    names, decode = [], Evaluation.decode
    monkeypatch.setattr(Evaluation, "decode", lambda self, name, rows, *rest: names.append(name.strip())
                        or decode(self, name, rows, *rest))
    one, outputs = begun(made, "--eval.sampling.repetition_penalty", "1.2", "--eval.stop", "['8']")
    assert one.greedy(outputs)["mismatches"] == 0 and names == ["accept", "accept", "lossless"]
    assert one.sampled()["settings"] == {"temperature": 1.0, "top_k": 0, "top_p": 0.95, "min_p": 0.0,
                                         "repetition_penalty": 1.2}
    assert one.settings()["repetition_penalty"] == 1.2 and one.settings()["stop"] == ["8"]


@pytest.mark.parametrize("change, said", [
    ({"temperature": 0.7}, "temperature was 0.0, now 0.7"), ({"top_p": 0.9}, "top_p was 1.0, now 0.9"),
    ({"stop": ["x"]}, r"stop was \[\], now \['x'\]"), ({"repetition_penalty": 1.1}, "repetition_penalty was 1.0")])
def test_other_settings_are_not_compared_unasked(tmp_path, change, said):
    """Case 50: refused by name, listed with --across; a report of before there were settings is of their defaults. The
    gate refuses such a reference too."""
    settings = sample_report()["settings"] | change
    one, two = written(tmp_path, "one"), written(tmp_path, "two", settings=settings)
    with pytest.raises(ConfigError, match=f"was measured at .*{said}.*give --across"):
        read_runs([one, two], allowed=False)
    assert len(read_runs([one, two], allowed=True)[1].differs) == 1
    assert read_runs([two, written(tmp_path, "three", settings=settings)], allowed=False)[1].differs == []
    off = sample_report()["settings"] | {"top_k": 0, "stop": []}
    assert read_runs([one, written(tmp_path, "four", settings=off)], allowed=False)[1].differs == []
    (tmp_path / "g.yaml").write_text("bounds: [{metric: total.acceptance.mean_length, max_drop: 9}]")
    gate = Gate.read(Options(gate=str(tmp_path / "g.yaml"), reference=one))
    report = json.loads(Path(one).read_text())
    with pytest.raises(ConfigError, match=said):
        gate.judge(report | {"settings": settings})
    assert gate.judge(report | {"settings": off})


def test_what_stays_greedy(made):
    """An engine's check, which is greedy, refuses figures of sampled or stopped answers by name; `make roi` takes
    acceptance with its temperature."""
    recipe = load_recipe(made.recipe)
    target, run = load_target(recipe.target.model, "float32", LAYERS), made.recipe.parent / "runs" / "tiny"
    with pytest.raises(RunError, match=f"was measured at {WORDS}; engines are asked greedily"):
        serve_check.expected(recipe, run, target)
    assert read_acceptance(run / "eval" / "report.json", "").temperature == 1.2


@pytest.mark.slow
def test_exports_check_is_greedy_whatever_is_sampled(tmp_path):
    """`make export` proves the same text and acceptance."""
    made = tiny_run(tmp_path)
    assert call(ship.COMMAND, made.recipe) == 0
    proof = made.run / "export" / "native-check.json"
    before = json.loads(proof.read_text())
    assert call(ship.COMMAND, made.recipe, "--eval.sampling.temperature", "1.5", "--check") == 0
    assert json.loads(proof.read_text()) == before


def test_a_card_names_the_settings():
    """The published acceptance is of what it was measured at."""
    report = sample_report()
    report["settings"] |= {"plan": {"kind": "chain", "depth": 4, "confidence": 0.0}}
    assert "chains of 4, greedy. " in "".join(measured(report))
    assert "Measured at temperature 0 (greedy); requests at other settings accept otherwise." in limits(report)
    report["settings"] |= AT
    assert f"chains of 4, {WORDS}. " in "".join(measured(report))
    assert f"Measured at {WORDS}; requests at other settings accept otherwise." in limits(report)


def test_the_plan_counts_the_greedy_proof(made):
    """Where answers are sampled, greedy text is decoded once more with drafts."""
    recipe = load_recipe(made.recipe)
    assert not judging(recipe, None).apart
    sampled = replace(recipe, eval=replace(recipe.eval, sampling=replace(recipe.eval.sampling, temperature=0.6)))
    assert judging(sampled, None).apart
    assert key_of("d", recipe.eval, [], {}) != key_of("d", sampled.eval, [], {})
