"""Where prompts come from, which are dropped and why, and the split."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prompts
from data.filters import Filter
from data.prompts import BUILTIN, Prompt, evaluation_prompts, hold_out, normalise, read_jsonl
from recipes.errors import ConfigError, RunError
from tests.tiny import write_prompts

GOOD = '{"prompt": "what is new"}'
BAD_LINES = {
    "not JSON": ('{"prompt": ', "not JSON"),
    "a list": ('["hi"]', "each line is an object"),
    "no prompt": ('{"text": "hi"}', "each line is an object with `messages` or `prompt`"),
    "empty messages": ('{"messages": []}', "must be a list of turns"),
    "messages as text": ('{"messages": "hi"}', "must be a list of turns"),
    "unknown role": ('{"messages": [{"role": "robot", "content": "hi"}]}', "needs `role`"),
    "content as object": ('{"messages": [{"role": "user", "content": {"a": 1}}]}', "needs `role`"),
    "turn as text": ('{"messages": ["hi"]}', "needs `role`"),
    "only an answer": ('{"messages": [{"role": "assistant", "content": "hi"}]}', "must be a user turn"),
    "ends with system": ('{"messages": [{"role": "system", "content": "hi"}]}', "must be a user turn"),
    "blank user text": ('{"prompt": "  "}', "must be a user turn with text"),
    "half a surrogate pair": ('{"prompt": "smile \\ud83d"}', "invalid unicode"),
    "a number beyond reading": ("1" * 5000, "not JSON"),
    "nested too deeply": ("[" * 100_000, "not JSON"),
    "prompt as number": ('{"prompt": 3}', "needs `role`"),
}
LONG = "please tell me how the old lighthouse keeper cooked his evening soup on the stormy island"


def ask(text: str) -> Prompt:
    messages = [{"role": "user", "content": text}]
    return Prompt(prompts.content_id(messages), messages)


@pytest.mark.parametrize("line, message", BAD_LINES.values(), ids=BAD_LINES)
def test_malformed_line_is_named_by_file_and_number(tmp_path, line, message):
    """Every malformed line is an error with file:line, blank lines counted (cases 64, 65)."""
    path = tmp_path / "p.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ConfigError) as error:
        read_jsonl(path)
    assert str(error.value).startswith(f"{path}:3: ") and message in str(error.value)


@pytest.mark.parametrize("content, message", [(b"\n \n", "holds no prompts"), (b"\xff\xfe\x00", "cannot read prompts"),
                                              (None, "No such file")], ids=["empty", "binary", "missing"])
def test_unusable_file_is_named(tmp_path, content, message):
    """An empty, binary or missing prompt file is an error that names the file (case 64)."""
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_jsonl(path)
    assert str(error.value).startswith(f"{path}: ")


def test_both_forms_load_to_one_and_trailing_answers_are_dropped(tmp_path):
    """`prompt` and `messages` give the same messages and id; extra keys and trailing answers go (cases 65, 36)."""
    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "what is new", "name": "x"}, {"role": "assistant", "content": "old answer"}]
    path.write_text("\n".join([GOOD, json.dumps({"messages": turns, "kind": "chat", "more": 1}),
                               json.dumps({"id": 7, "messages": turns[:1]})]))
    plain, full, named = read_jsonl(path)
    assert plain.messages == full.messages == named.messages == [{"role": "user", "content": "what is new"}]
    assert plain.id == full.id and named.id == "7" and full.kind == "chat"


@pytest.mark.parametrize("break_", ["\u2028", "\u0085", "\x0b", "\x1c"], ids=["U+2028", "U+0085", "VT", "FS"])
def test_only_a_newline_ends_a_line(tmp_path, break_):
    """Text may hold the separators that str.splitlines cuts at: a JSON line ends at a newline only (case 65)."""
    path = tmp_path / "p.jsonl"
    escaped = json.dumps(break_, ensure_ascii=break_ < " ")[1:-1]
    path.write_text(f'{{"prompt": "one{escaped}two"}}\r\n{GOOD}\r\n', encoding="utf-8", newline="")
    assert [p.messages[0]["content"] for p in read_jsonl(path)] == [f"one{break_}two", "what is new"]


def test_filter_drops_duplicates_by_meaning_of_the_text():
    """Case, width, spacing and punctuation do not make another prompt (case 60)."""
    keep = Filter([])
    assert normalise("  What, is\tNEW?! ") == "what is new"
    assert keep.reason(ask("What is new?"), 9, 4, 20) is None
    assert keep.reason(ask("what  is NEW"), 9, 4, 20) == "duplicate"
    assert keep.reason(ask("what is newer"), 9, 4, 20) is None


@pytest.mark.parametrize("text, tokens, reason", [
    ("what is new", 4, None), ("what is new", 20, None), ("what is new", 3, "too short"),
    ("what is new", 21, "too long"), ("what?", 9, "too short"), ("...", 9, "too short")])
def test_filter_keeps_the_stated_lengths_bounds_included(text, tokens, reason):
    """Both bounds belong to the kept lengths; a single word is no prompt (case 60)."""
    assert Filter([]).reason(ask(text), tokens, 4, 20) == reason


def test_filter_drops_what_the_evaluation_judges_by():
    """An evaluation prompt, reworded at its edge or embedded, never trains; half an overlap does."""
    keep = Filter([ask(LONG), ask("short one here")])
    words = LONG.split()  # 16 words: nine 8-word runs
    overlap = "overlaps the evaluation prompts"
    assert keep.reason(ask(LONG.upper() + "!!"), 9, 1, 99) == overlap
    assert keep.reason(ask("Short one, here."), 9, 1, 99) == overlap
    assert keep.reason(ask(" ".join(["now", *words[1:]])), 9, 1, 99) == overlap  # 8 of 9 runs shared
    assert keep.overlap(ask(" ".join(words[:9] + ["a", "b"]))) == 2 / 4
    assert keep.reason(ask(" ".join(words[:9] + ["a", "b"])), 9, 1, 99) is None
    assert keep.reason(ask("something else that nobody has asked so far today"), 9, 1, 99) is None


def test_dropped_prompt_leaves_no_trace_in_the_filter():
    """A prompt dropped for its length does not make a later, fitting one a duplicate (case 60)."""
    keep = Filter([])
    assert keep.reason(ask("what is new"), 99, 4, 20) == "too long"
    assert keep.reason(ask("what is new"), 9, 4, 20) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=12, unique=True), st.integers(0, 12),
       st.integers(0, 3))
def test_split_depends_on_ids_and_seed_only(ids, count, seed):
    """Order does not matter, and a prompt that is removed moves no other one out of the split (case 16)."""
    held = hold_out(ids, count, seed)
    assert hold_out(ids[::-1], count, seed) == hold_out(sorted(ids), count, seed) == held
    assert len(held) == min(count, len(ids))
    assert held - {ids[0]} <= hold_out(ids[1:], count, seed)


def test_split_changes_with_the_seed():
    """Another seed is another split (case 16)."""
    ids = [f"p{i}" for i in range(20)]
    assert len({frozenset(hold_out(ids, 5, seed)) for seed in range(4)}) == 4


def test_builtin_evaluation_prompts_are_the_committed_ones(tmp_path, monkeypatch):
    """At least 64 distinct prompts over six kinds with the committed checksum; an edited file is refused."""
    found, checksum = evaluation_prompts("builtin")
    assert checksum == hashlib.sha256(BUILTIN.read_bytes()).hexdigest() == prompts.BUILTIN_SHA256
    assert checksum == "9ec28d482072c3782f2155844823d6c16516518b6095f58111550829ed7f23cd"
    assert len(found) >= 64 and len({p.kind for p in found}) == 6 and "" not in {p.kind for p in found}
    assert len({p.id for p in found}) == len(found) == len({normalise(p.messages[-1]["content"]) for p in found})
    edited = tmp_path / "edited.jsonl"
    edited.write_bytes(BUILTIN.read_bytes() + b"\n")
    monkeypatch.setattr(prompts, "BUILTIN", edited)
    with pytest.raises(RunError, match="is not the committed"):
        evaluation_prompts("builtin")


def test_evaluation_limit_keeps_the_first_of_every_kind(tmp_path):
    """`eval.limit` keeps the first N prompts of each kind, in order; a user's own file states its checksum."""
    every, _ = evaluation_prompts("builtin")
    few, _ = evaluation_prompts("builtin", 2)
    kinds = list(dict.fromkeys(p.kind for p in every))
    assert [p.id for p in few] == [p.id for k in kinds for p in [q for q in every if q.kind == k][:2]]
    path = write_prompts(tmp_path / "own.jsonl", ["how are you", "who are you"])
    own, checksum = evaluation_prompts(str(path))
    assert [p.id for p in own] == ["p0", "p1"] and checksum == hashlib.sha256(path.read_bytes()).hexdigest()


def test_training_prompts_that_come_with_the_recipes_are_none_of_the_evaluation():
    """Every one passes the filters, so none overlaps or repeats another, and the built-in set has no 8-word run of
    them: the demo is judged by what it was not trained on."""
    judged = evaluation_prompts("builtin")[0]
    keep = Filter(judged)
    folder = BUILTIN.parent.parent / "recipes"
    names = ("prompts.jsonl", "more_prompts.jsonl", "code_prompts.jsonl")
    found = [p for name in names for p in read_jsonl(folder / name)]
    assert len(found) == len({p.id for p in found}) == 2676 + 193
    assert {keep.reason(p, 20, 4, 512) for p in found} == {None}
    assert max(keep.overlap(p) for p in found) == 0
