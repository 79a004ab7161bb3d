"""Sources to prompts: mixed by weight, filtered alike, split by id, the same on every run."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data import collect
from data.collect import COMMAND
from data.generate import Answer, Generator
from data.intake import EVALUATION, PromptStage, evaluation_sets, parts, wave
from data.prompts import Intake, read_jsonl
from data.store import TraceReader
from recipes.cli import run
from recipes.errors import ConfigError
from recipes.loader import load_recipe
from recipes.schema import Eval, PromptFilters, Prompts, PromptSource, Recipe
from tests.tiny import CHATML, V, chat_tokenizer, write_recipe, write_target

DOCS = Path(__file__).resolve().parent.parent / "docs" / "prompts.md"
WORDS = "river stone cloud apple north paper train glass honey metal night ocean plant queen robot sugar".split()
LOOP = "{% for m in messages %}"
STRICT = CHATML.replace(LOOP, LOOP + "{% if m['role'] not in ['user', 'assistant'] %}"
                        "{{ raise_exception('only user and assistant') }}{% endif %}")


def asks(count: int, seed: int = 0) -> list[dict]:
    """Rows with unlike prompts of eight random words."""
    draw = random.Random(seed)
    return [{"prompt": " ".join(draw.choices(WORDS, k=8))} for _ in range(count)]


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stage(folder: Path, sources: list[PromptSource], template: str = CHATML, eval_prompts: str = "builtin",
          ask=None, **fields) -> Intake:
    """The prompts that a run in `folder` gets from these sources."""
    section = Prompts(sources=sources, **({"validation": 0} | fields))
    recipe = Recipe(name="tiny", runs_dir=str(folder), prompts=section, eval=Eval(prompts=eval_prompts))
    target = SimpleNamespace(tokenizer=chat_tokenizer(template), vocab_size=V)
    traces = folder / "tiny" / "traces"
    (traces / "prompts").mkdir(parents=True, exist_ok=True)
    return PromptStage(recipe, target, 400, traces, ask).run()


def ids(intake: Intake) -> list[str]:
    return [p.id for p in intake.prompts]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_parts_follow_the_weights(total, weights):
    """Parts add up to the total, each within one of its exact share, and a heavier source never gets less."""
    found = parts(total, weights)
    assert sum(found) == total
    for part, weight in zip(found, weights):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-9
    for a, b in zip(sorted(zip(weights, found)), sorted(zip(weights, found))[1:]):
        assert a[1] <= b[1] or a[0] == b[0]


def test_sources_are_mixed_by_weight(tmp_path):
    """A total of ten over weights 1 and 4 is two and eight, whatever the files hold beyond that."""
    sources = [PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", asks(20, 1)), weight=1),
               PromptSource(kind="jsonl", path=jsonl(tmp_path / "b", asks(30, 2)), weight=4)]
    intake = stage(tmp_path, sources, total=10)
    first = {row["prompt"] for row in asks(20, 1)}
    assert sum(p.messages[0]["content"] in first for p in intake.prompts) == 2 and len(intake.prompts) == 10


def test_synthesis_and_files_share_one_total(tmp_path):
    """The target writes its part: the mix counts what is kept, from whichever kind of source."""
    draw = random.Random(5)

    def ask(part, units, max_tokens):
        tokenizer = chat_tokenizer()
        return [[Answer(r.id, r.prompt, tokenizer(" ".join(draw.choices(WORDS, k=8)))["input_ids"] + [2], "stop")
                 for r in requests] for requests in units.values()]

    sources = [PromptSource(), PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", asks(20)), weight=2)]
    intake = stage(tmp_path, sources, total=9, ask=ask)
    assert [p.own for p in intake.prompts] == [True] * 3 + [False] * 6


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6), st.floats(0.2, 1))
def test_units_asked_together_are_those_of_one_after_the_other(count, unit_rows, together, seed, usable):
    """However many units are asked at a time, their sizes are those that each has when it waits for the one before:
    names and contents of units do not depend on the number of ranks (case 16)."""
    draw = random.Random(seed)
    kept = [draw.random() < usable for _ in range(5000)]

    def sizes(next_units) -> list[int]:
        missing, tried, found = count, 0, []
        while missing > 0:
            for rows in next_units(missing):
                assert missing > 0
                missing -= min(missing, sum(kept[tried : tried + rows]))
                found, tried = [*found, rows], tried + rows
        return found

    assert sizes(lambda missing: wave(missing, unit_rows)[:together]) == sizes(
        lambda missing: [min(unit_rows, 16 + missing * 4 // 3)])


@pytest.mark.parametrize("fields, values, message", [
    ({"count": 3}, {"total": 5}, "count = 3 and prompts.total = 5 both say how many"),
    ({"weight": 2.0}, {}, "weight = 2.0: weights divide prompts.total, which is not set"),
    ({"kind": "synthesis"}, {}, "synthesis needs `count`"),
    ({}, {"total": 50}, "20 usable prompts, but its part of prompts.total = 50 by weight is 50"),
    ({}, {"evaluation": 21}, "prompts.evaluation = 21: only 20 plain prompts"),
    ({"path": "nothing.jsonl"}, {}, "nothing.jsonl: cannot read prompts: No such file"),
])
def test_recipe_that_says_too_much_or_too_little(tmp_path, fields, values, message):
    """Counts said twice or never, and parts that a source cannot give, are errors that name the field."""
    source = {"kind": "jsonl", "path": jsonl(tmp_path / "a", asks(20))} | fields
    with pytest.raises(ConfigError, match=message):
        stage(tmp_path, [PromptSource(**source)], **values)


@pytest.mark.parametrize("fields, values", [({}, {}), ({"count": 7}, {}), ({}, {"total": 7}), ({}, {"evaluation": 5})])
def test_the_same_prompts_whatever_the_order_of_the_rows(tmp_path, fields, values):
    """A count takes a sample by id: the order of the file changes neither it nor the splits (case 16)."""
    rows = asks(20)
    found = []
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        source = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", rows), **fields)
        found.append(set(ids(stage(tmp_path, [source], **values))))
    assert found[0] == found[1] == found[2] and len(found[0]) == {5: 15}.get(values.get("evaluation"), len(found[0]))
    smaller = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", rows), count=4)
    if fields or "total" in values:
        assert set(ids(stage(tmp_path, [smaller]))) < found[0], "a smaller sample is part of the larger"


def test_second_run_gives_the_same_prompts(tmp_path):
    """Content and recipe decide: run again, the prompts come in the same order with the same ids (case 16)."""
    sources = [PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", asks(20, 1)), weight=1),
               PromptSource(kind="text", path=str(tmp_path / "t"), weight=2)]
    (tmp_path / "t").write_text("\n".join(row["prompt"] for row in asks(30, 2)))
    first, second = (stage(tmp_path, sources, total=12, evaluation=3) for _ in range(2))
    assert first.prompts == second.prompts and first.dropped == second.dropped and len(first.prompts) == 9


POOR = ["what", "ha " * 12, "caf\ufffd\ufffd au lait", "1 2 3 + 4 5 6 = ? # $", "word " * 300,
        "river stone cloud apple"]
REASONS = {"too short": 1, "repeated word runs": 1, "broken unicode": 1, "few letters": 1, "too long": 1,
           "duplicate": 1}


@pytest.mark.parametrize("form", ["prompt", "messages", "ids", "text", "synthesis"])
def test_every_entry_path_passes_the_same_filters(tmp_path, form):
    """The same texts as prompt, turns, token ids, text file or written by the target are dropped alike (case 60)."""
    tokenizer = chat_tokenizer()
    texts = ["river stone cloud apple", *POOR[:3], POOR[3], *POOR[4:], "paper train glass honey"]
    if form == "ids":
        keep = [t for t in texts if "\ufffd" not in t and "$" not in t]  # signs outside the tiny vocabulary
        expected = {k: n for k, n in REASONS.items() if k not in ("broken unicode", "few letters")}
        rows = [{"input_ids": tokenizer(t, add_special_tokens=False)["input_ids"]} for t in keep]
        source = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", rows))
    else:
        expected = REASONS
        rows = {"prompt": [{"prompt": t} for t in texts],
                "messages": [{"messages": [{"role": "user", "content": t}]} for t in texts]}.get(form, [])
        source = PromptSource(kind="text" if form == "text" else "jsonl", path=jsonl(tmp_path / "a", rows))
        if form == "text":
            (tmp_path / "a").write_text("\n".join(texts), encoding="utf-8")
    if form == "synthesis":
        expected = {k: n for k, n in REASONS.items() if k not in ("broken unicode", "few letters")}
        written = iter([t for t in texts if "\ufffd" not in t and "$" not in t])

        def ask(part, units, max_tokens):
            return [[Answer(r.id, r.prompt, tokenizer(t, add_special_tokens=False)["input_ids"] + [2], "stop")
                     for r, t in zip(requests, written)] for requests in units.values()]

        intake = stage(tmp_path, [PromptSource(count=2)], ask=ask)
    else:
        intake = stage(tmp_path, [source])
    assert [p.messages[0]["content"] for p in intake.prompts] == [texts[0], texts[-1]]
    assert intake.dropped == expected


def test_ids_are_sent_as_they_are_and_checked(tmp_path):
    """Pre-tokenised prompts keep their ids; one outside the vocabulary is dropped and counted (cases 60, 64)."""
    good = chat_tokenizer()("river stone cloud", add_special_tokens=False)["input_ids"]
    rows = [{"prompt_ids": good}, {"prompt_ids": [*good, V]}, {"prompt_ids": [-1, *good]}, *asks(3)]
    source = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", rows))
    intake = stage(tmp_path, [source], max_bad_share=0.5)
    assert intake.prompts[0].ids == good and intake.dropped == {"ids outside the vocabulary": 2}
    exact = stage(tmp_path, [source], max_bad_share=0.5, max_tokens=len(good))
    assert [p.ids for p in exact.prompts] == [good], "the length is that of the ids, not of a rendering"
    with pytest.raises(ConfigError, match=r"ids outside the vocabulary 2 \(first: id \w+: the target has 64 tokens\)"):
        stage(tmp_path, [source])


def test_turns_that_the_template_refuses_are_dropped_up_to_the_share(tmp_path):
    """A template without system turns refuses those rows by name, not the run (case 64)."""
    refused = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who is it"}]
    rows = [*asks(9), {"messages": refused}]
    source = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", rows))
    assert stage(tmp_path, [source], STRICT, max_bad_share=0.1).dropped == {"refused by the chat template": 1}
    with pytest.raises(ConfigError, match=r"refused by the chat template 1 \(first: id \w+: .*only user and assistant"):
        stage(tmp_path, [source], STRICT, max_bad_share=0.05)


def test_megabyte_of_text_is_never_tokenised(tmp_path, monkeypatch):
    """A row beyond max_chars is too long before it costs anything (case 64)."""
    rows = [*asks(2), {"prompt": "river stone " * 90_000}]
    seen = []
    tokenize = PromptStage.admit.__globals__["prompt_ids"]
    monkeypatch.setitem(PromptStage.admit.__globals__, "prompt_ids", lambda tokenizer, messages, tools: (
        seen.append(len(messages[0]["content"])), tokenize(tokenizer, messages, tools))[1])
    intake = stage(tmp_path, [PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", rows))])
    assert intake.dropped == {"too long": 1} and len(seen) == 2 and max(seen) < 100


def test_prompts_of_the_recipes_own_evaluation_set_never_train(tmp_path):
    """eval.prompts is held out like the built-in set, and its checksum is a setting of the traces (case 30)."""
    rows = asks(6)
    source = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", rows))
    judged = jsonl(tmp_path / "judged.jsonl", rows[:2])
    intake = stage(tmp_path, [source], eval_prompts=judged)
    assert len(intake.prompts) == 4 and intake.dropped == {"overlaps the evaluation prompts": 2}
    recipe = Recipe(eval=Eval(prompts=judged))
    before = evaluation_sets(recipe)
    jsonl(tmp_path / "judged.jsonl", rows[:3])
    assert before.keys() == {"builtin", judged} and evaluation_sets(recipe) != before


def test_evaluation_split_is_written_and_kept_out(tmp_path):
    """The split is a judged file by itself; naming it in eval.prompts changes no prompt (case 16)."""
    source = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", asks(12)))
    every = {p.id: p.messages for p in stage(tmp_path, [source]).prompts}
    intake = stage(tmp_path, [source], evaluation=4)
    path = tmp_path / "tiny" / EVALUATION
    held = {p.id: p.messages for p in read_jsonl(path)}
    assert len(held) == 4 and held.keys() | set(ids(intake)) == every.keys() and not held.keys() & set(ids(intake))
    assert all(every[i] == messages for i, messages in held.items())
    assert ids(stage(tmp_path, [source], evaluation=4, eval_prompts=str(path))) == ids(intake)
    assert ids(stage(tmp_path, [source], evaluation=4, seed=1)) != ids(intake)


def test_training_prompts_that_overlap_the_evaluation_split_are_dropped(tmp_path):
    """A prompt that repeats most of a chosen one may not train, even where it is no near duplicate (case 60)."""
    long = " ".join(random.Random(3).choices(WORDS, k=20))
    rows = [{"prompt": long + f" {a} {b}"} for a in WORDS for b in WORDS[:2]]
    source = PromptSource(kind="jsonl", path=jsonl(tmp_path / "a", [*rows, *asks(30)]))
    filters = PromptFilters(near_duplicate=0)
    intake = stage(tmp_path, [source], evaluation=20, filters=filters)
    held = [p.messages[0]["content"] for p in read_jsonl(tmp_path / "tiny" / EVALUATION)]
    assert any(t.startswith(long) for t in held), "the split must hold one for this test to mean anything"
    assert not any(p.messages[0]["content"].startswith(long) for p in intake.prompts)
    left = sum(t.startswith(long) for t in held)
    assert intake.dropped == {"overlaps the evaluation prompts": len(rows) - left}


def test_examples_of_the_documentation_work(tmp_path, monkeypatch):
    """The recipes of docs/prompts.md are valid, and the one of local files gives the mix that it states."""
    blocks = [part.split("```")[0] for part in DOCS.read_text().split("```yaml\n")[1:]]
    recipes = []
    for block in blocks:
        (tmp_path / "r.yaml").write_text(block)
        recipes.append(load_recipe(tmp_path / "r.yaml"))
    assert [s.kind for r in recipes for s in r.prompts.sources] == ["log", "parquet", "text", "hub", "synthesis"]
    monkeypatch.chdir(tmp_path)
    for folder in ("logs", "data", "runs/mine/traces"):
        Path(folder).mkdir(parents=True)
    jsonl(Path("logs/a.jsonl"), [{"messages": [{"role": "user", "content": r["prompt"]}]} for r in asks(9, 1)])
    parquet.write_table(pa.table({"question": [r["prompt"] for r in asks(9, 2)]}), "data/questions.parquet")
    Path("data/paragraphs.txt").write_text("\n\n".join(r["prompt"] for r in asks(9, 3)))
    target = SimpleNamespace(tokenizer=chat_tokenizer(), vocab_size=V)
    intake = PromptStage(recipes[0], target, 400, Path("runs/mine/traces"), None).run()
    kept = [*intake.prompts, *read_jsonl(Path("runs/mine") / EVALUATION)]
    origin = [next(n for n in (1, 2, 3) if {"prompt": p.messages[0]["content"]} in asks(9, n)) for p in kept]
    assert [origin.count(n) for n in (1, 2, 3)] == [4, 2, 3]


def test_mixed_recipe_traces_and_a_second_run_does_no_work(tmp_path, monkeypatch):
    """Log, mixed formats, ids and tool results go through `make trace`; again, nothing is redone (cases 16, 27)."""
    function = {"name": "f", "arguments": "{}"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
    ids_row = chat_tokenizer()("<|im_start|>user\nnight ocean<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    log = [{"request": {"messages": [{"role": "user", "content": row["prompt"]}]}} for row in asks(4, 1)]
    mixed = [{"id": "tool", "messages": [{"role": "user", "content": "queen robot sugar"}, call,
                                         {"role": "tool", "content": "metal night"}]},
             {"id": "raw", "input_ids": ids_row}, *asks(4, 2)]
    values = {"prompts": {"sources": [{"kind": "log", "path": jsonl(tmp_path / "log", log)},
                                      {"kind": "jsonl", "path": jsonl(tmp_path / "mixed", mixed)}], "validation": 2},
              "generation": {"max_tokens": 6, "batch_size": 5}, "trace": {"layers": [1, 2, 3]}}
    calling = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
                             "{{ c['function']['name'] }}{% endfor %}")
    recipe = write_recipe(tmp_path / "r.yaml", write_target(tmp_path / "model", template=calling), **values)

    def trace() -> int:
        with pytest.raises(SystemExit) as stop:
            run(COMMAND, ["--config", str(recipe)])
        return stop.value.code

    assert trace() == 0
    reader = TraceReader(tmp_path / "runs" / "tiny" / "traces")
    rows = {reader[i].id: reader[i] for i in range(len(reader))}
    assert len(rows) == 10 and rows["raw"].ids[: len(ids_row)].tolist() == ids_row
    talk = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (
        ("user", "queen robot sugar"), ("assistant", "f"), ("tool", "metal night"))) + "<|im_start|>assistant\n"
    given = chat_tokenizer()(talk, add_special_tokens=False)["input_ids"]
    assert rows["tool"].ids[: len(given)].tolist() == given and not any(rows["tool"].turns[: len(given)])
    assert reader.manifest["normalised"] == {"tool arguments parsed from text": 1}
    monkeypatch.setattr(Generator, "run", None)
    monkeypatch.setattr(collect, "capture", None)
    assert trace() == 0
    (tmp_path / "log").write_text(json.dumps(log[0]))
    assert trace() == 2
