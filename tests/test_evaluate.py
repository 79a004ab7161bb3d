"""`make eval` on several sets, end to end on a tiny target: what is asked, counted and written."""

import json
from pathlib import Path

import pytest
from evaluated import LOG, TURNS, evaluate, world
from test_report import SCHEMA, violations
from tiny import chat_tokenizer, load_target
from tiny_drafter import LAYERS

from data.chat import prompt_ids
from data.evalsets import Question, Questions
from eval import evaluation as eval_evaluation
from eval import run as eval_run
from eval.rows import Asking
from recipes.errors import ConfigError
from recipes.files import write_json
from recipes.loader import load_recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    recipe = world(tmp_path_factory.mktemp("eval"))
    code, report = evaluate(recipe)
    assert code == 0
    return recipe, report


@pytest.fixture(scope="module")
def told(made):
    """The same evaluation with eval.texts."""
    code, report = evaluate(made[0], "--eval.texts", "true")
    assert code == 0
    return report


def sent(recipe) -> list[dict]:
    lines = (recipe.parent / "runs" / "tiny" / "eval" / "sent.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_real_report_follows_the_schema(made):
    """docs/report.schema.json describes what is written, not only the sample of test_report."""
    assert violations(made[1], SCHEMA) == []


def test_every_question_counts_once(made):
    """Case 66: each turn of each set is asked once; sets and categories add up to the total."""
    _, report = made
    assert {name: s["prompts"] for name, s in report["sets"].items()} == {"bench": 5, "log": 4}
    assert report["sets"]["bench"]["questions"] == 3 and report["settings"]["turns"] == {"1": 7, "2": 2}
    assert {c: s["prompts"] for c, s in report["sets"]["bench"]["categories"].items()} == {"writing": 2, "maths": 3}
    for key in ("prompts", "tokens", "drafts", "target_passes"):
        by_set = [s[key] for s in report["sets"].values()]
        assert sum(by_set) == report["total"][key] == sum(
            c[key] for s in report["sets"].values() for c in s["categories"].values())
    assert len(report["prompts"]) == report["total"]["prompts"] == 9
    assert sum(p["drafts"] for p in report["prompts"]) == report["total"]["drafts"]
    accepted = sum(p["accepted"] for p in report["prompts"])
    assert 1 + accepted / report["total"]["drafts"] == pytest.approx(report["total"]["acceptance"]["mean_length"])


def test_second_turn_follows_the_targets_own_answer(made, told):
    """MT-bench: the second prompt is the first, the target's answer, the second question, rendered as one chat; the
    exact ids are stored (case 53)."""
    rows = {(r["id"], r["round"]): r["ids"] for r in sent(made[0])}
    answers = {(p["id"], p["round"]): p["answer"].removesuffix("<|im_end|>") for p in told["prompts"]}
    for question in (TURNS[0], TURNS[2]):
        name, (first, second) = str(question["question_id"]), question["turns"]
        asked = [{"role": "user", "content": first}]
        assert rows[name, 0] == prompt_ids(chat_tokenizer(), asked)
        asked += [{"role": "assistant", "content": answers[name, 0]}, {"role": "user", "content": second}]
        assert rows[name, 1] == prompt_ids(chat_tokenizer(), asked)
    assert made[1]["sets"]["bench"]["turns_after_cut_answers"] <= 2


def test_arrival_times_of_a_log_are_kept(made):
    """Four requests, one every two seconds."""
    recipe, report = made
    assert report["sets"]["log"]["arrivals"] == {"requests": 4, "span_s": 6.0, "per_s": 0.5, "most_in_1_s": 1}
    assert [r["arrival"] for r in sent(recipe) if r["set"] == "log"] == [float(row["timestamp"]) for row in LOG]


def test_rejections_are_counted_without_texts(made):
    """By default neither tokens' texts nor prompts are in the report."""
    _, report = made
    total, frequent = report["total"], report["total"]["rejections"]["frequent"]
    assert frequent and all(entry.keys() == {"drafted", "wanted", "count", "share"} for entry in frequent)
    assert sum(e["count"] for e in frequent) <= total["vocabulary_misses"]["rejections"]
    assert all(e["drafted"] != e["wanted"] for e in frequent)
    assert "prompt" not in report["prompts"][0] and "bob" not in json.dumps(report)
    entropy = total["rejections"]["entropy"]
    for side in ("accepted", "rejected"):
        assert sum(row[side] for row in entropy["by_entropy"]) == entropy[side]["n"]


def test_texts_only_when_asked_for(told):
    """eval.texts brings prompts, answers, and examples of rejected tokens."""
    assert violations(told, SCHEMA) == []
    assert any("secret name bob" in p["prompt"] for p in told["prompts"])
    example = told["total"]["rejections"]["frequent"][0]
    assert example["examples"] and isinstance(example["wanted_text"], str)


def test_cycle_adds_up(made):
    """The parts of a cycle and the rest are the whole; at batch 1 every part takes time."""
    cycle = made[1]["total"]["speed"]["cycle"]
    parts = [cycle[f"{name}_ms"] for name in ("draft", "verify", "sample", "cache", "other")]
    assert sum(parts) == pytest.approx(cycle["cycle_ms"]) and all(part > 0 for part in parts)
    assert cycle["cycles"] > 5


def test_a_finished_evaluation_is_said_to_be_one_and_is_of_its_stack(made, capsys, monkeypatch):
    """Case 50: the report of another stack (threads, precision, device, versions) is not given out as this one's; one
    that is found is named with its time."""
    recipe, report = made
    path = recipe.parent / "runs" / "tiny" / "eval" / "report.json"
    write_json(path, report)  # other tests evaluate there too
    monkeypatch.setattr(eval_run.Evaluation, "run", lambda self: pytest.fail("evaluated again"))
    capsys.readouterr()
    assert evaluate(recipe)[0] == 0
    assert f"evaluation of {report['stack']['time']} found finished; --again measures anew" in capsys.readouterr().out
    again = eval_run.Evaluation(load_recipe(recipe))
    for name, other in (("threads", 64), ("device", "cuda:0"), ("dtype", "bfloat16"), ("versions", {"torch": "1.0"})):
        write_json(path, report | {"stack": report["stack"] | {name: other}})
        assert again.finished() is None, name
    path.write_text(json.dumps(report)[:1000])
    assert again.finished() is None
    write_json(path, report)
    assert again.finished() == report


def test_the_same_weights_read_otherwise_are_another_drafter(made):
    """An imported folder whose option or rotary base was set right afterwards has the same weights and drafts others:
    its finished evaluation is not this one's."""
    recipe = load_recipe(made[0])
    path = Path(recipe.drafter.path) / "drafter.json"
    whole, keys = path.read_text(), []
    write_json(made[0].parent / "runs" / "tiny" / "eval" / "report.json", made[1])
    before = eval_run.Evaluation(recipe)
    assert before.finished() == made[1]
    for part, name, value in (("options", "feedback", "post_norm"), ("shape", "rms_norm_eps", 1e-4)):
        meta = json.loads(whole)
        meta[part][name] = value
        path.write_text(json.dumps(meta))
        try:
            changed = eval_run.Evaluation(recipe)
        finally:
            path.write_text(whole)
        assert changed.finished() is None
        keys.append(changed.key())
    assert len({before.key(), *keys}) == 3


def test_the_stack_is_as_it_was_at_the_start(made, monkeypatch):
    """Time and load are taken before anything is loaded or decoded: what is measured itself is a load."""
    machine = {"OMP_WAIT_POLICY": "unset", "load_1m": 0.1}
    began = iter([{"versions": {}, "git": "g", "time": "then", "machine": machine}])
    with monkeypatch.context() as patch:
        patch.setattr(eval_evaluation, "stamp", lambda recipe: next(began))
        patch.setattr(eval_evaluation, "read_sets", lambda *args: pytest.fail("read first") if list(began) else [])
        patch.setattr(eval_evaluation.Asking, "first", lambda self: [])
        stack = eval_run.Evaluation(load_recipe(made[0])).head()["stack"]
    assert (stack["time"], stack["load_1m"], stack["git"]) == ("then", 0.1, "g")


def test_a_timed_answer_fits_the_context(made, monkeypatch):
    """eval.speed_tokens may be more than eval.max_tokens: the longer of both leaves the room of a prompt, within the
    fewest positions that target (512) and drafter (256) have (case 33)."""
    rooms = []
    monkeypatch.setattr(eval_evaluation, "Asking", lambda target, sets, room, strict: rooms.append(room) or Asking(
        target, sets, room, strict))
    for tokens in ("6", "12", "40"):
        eval_run.Evaluation(load_recipe(made[0], {"eval.speed_tokens": tokens}))
    assert rooms == [256 - 12 - 3 - 1] * 2 + [256 - 40 - 3 - 1]


def asking(recipe, questions: list[Question], strict: bool = False, room: int = 60) -> Asking:
    target = load_target(recipe.parent / "model", "float32", LAYERS)
    return Asking(target, [Questions("raw", "raw.jsonl", "", questions)], room, strict)


def test_untemplated_prompts_are_known(made):
    """Case 53: token ids count as a chat request only where they end as the template does before an answer."""
    chat = prompt_ids(chat_tokenizer(), [{"role": "user", "content": "hello you"}])
    rows = asking(made[0], [Question("a", [[]], ids=[5, 6, 7]), Question("b", [[]], ids=chat)]).first()
    assert [row.templated for row in rows] == [False, True] and rows[1].ids == chat


def test_what_the_target_cannot_take_is_counted_or_refused(made):
    """Ids outside the vocabulary and prompts beyond the context: dropped by reason, or an error where strict; a set of
    which nothing is left is an error (case 66: nothing vanishes unseen)."""
    questions = [Question("big", [[]], ids=[5, 64]), Question("long", [[]], ids=[5] * 61),
                 Question("fine", [[{"role": "user", "content": "hi"}]])]
    loose = asking(made[0], questions)
    assert [row.question.id for row in loose.first()] == ["fine"]
    assert loose.dropped["raw"] == {"ids outside the vocabulary": 1, "prompt beyond the context": 1}
    with pytest.raises(ConfigError, match="evaluation prompt long: 61 tokens, the context leaves 60"):
        asking(made[0], questions[1:], strict=True).first()
    with pytest.raises(ConfigError, match="evaluation set raw: no question is left"):
        asking(made[0], questions[:2]).first()
