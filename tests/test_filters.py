"""Measures of a text, near duplicates against all pairs, and the one filter that every prompt passes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.filters import Filter, broken, control, letters, quality, repeated_lines, repeated_ngrams, runs
from data.near import PERMUTATIONS, RECALL, NearDuplicates, bands
from data.prompts import Prompt
from recipes.schema import PromptFilters

OFF = PromptFilters(min_letters=0, max_repeated_lines=1, max_repeated_ngrams=1, max_control=1, max_broken=1,
                    near_duplicate=0)
FOX = "the quick brown fox jumps over the lazy dog while the old farmer sleeps under a tall green tree near the barn"


def ask(text: str, system: str = "") -> Prompt:
    turns = [{"role": "system", "content": system}] if system else []
    return Prompt(text, [*turns, {"role": "user", "content": text}])


@pytest.mark.parametrize("measure, text, share", [
    (letters, "ab 12", 2 / 4), (letters, "привет 你好", 1.0), (letters, "हिन्दी", 1.0), (letters, "  ", 0.0),
    (letters, "....", 0.0), (letters, "", 0.0),
    (repeated_lines, "one\ntwo\nthree", 0.0), (repeated_lines, "ab\n ab \n\ncd", 2 / 6), (repeated_lines, "", 0.0),
    (repeated_ngrams, "a b c d e", 0.0), (repeated_ngrams, "a b c d e a b c d e", 1 / 6), (repeated_ngrams, "", 0.0),
    (repeated_ngrams, "a " * 9, 4 / 5), (repeated_ngrams, "你好你好你好你", 1 / 3),
    (control, "a\tb\r\nc", 0.0), (control, "a\x00\x1bb", 2 / 4), (control, "\x85", 1.0), (control, "", 0.0),
    (broken, "caf\ufffd", 1 / 4), (broken, "\ud800\uffff\ufdd0\U0001fffe", 1.0), (broken, "😀é", 0.0),
    (broken, "", 0.0),
])
def test_measure_of_a_hand_written_text(measure, text, share):
    """Each measure by hand, in several scripts: none knows a language (case 60)."""
    assert measure(text) == pytest.approx(share)


@pytest.mark.parametrize("name, text, bound, reason", [
    ("min_letters", "ab 12", 0.5, "few letters"), ("max_repeated_lines", "ab\nab", 0.5, "repeated lines"),
    ("max_repeated_ngrams", "a " * 6, 0.5, "repeated word runs"), ("max_control", "ab\x00\x00", 0.5,
                                                                  "control characters"),
    ("max_broken", "ab\ufffd\ufffd", 0.5, "broken unicode")])
def test_bound_is_a_field_of_the_recipe_and_belongs_to_the_kept(name, text, bound, reason):
    """At the bound a text is kept, beyond it the reason names the measure, and switched off nothing is dropped."""
    beyond = bound + 0.01 if name.startswith("min") else bound - 0.01
    assert quality(text, PromptFilters(**(vars(OFF) | {name: bound}))) is None
    assert quality(text, PromptFilters(**(vars(OFF) | {name: beyond}))) == reason
    assert quality(text, OFF) is None


@pytest.mark.parametrize("text", [
    "What is 1234567 * 7654321?", "今天天气怎么样？", "Как приготовить борщ?", "สวัสดีครับ ช่วยเขียนโค้ดให้หน่อย",
    "مرحبا كيف حالك",
    "def f(x):\n    if x:\n        return 1\n    return 2\n\nWhy is f(0) 2?", "Fix: for(i=0;i<9;i++){a[i]=b[i]*2;}"])
def test_usual_prompts_pass_the_defaults(text):
    """Sums, code and scripts written without spaces are prompts: the defaults keep them (case 60)."""
    assert Filter([]).reason(ask(text), 9, 4, 20) is None


@pytest.mark.parametrize("text, reason", [
    ("ha ha ha ha ha ha ha ha ha ha ha ha", "repeated word runs"), ("a long line\n" * 3 + "end", "repeated lines"),
    ("caf\ufffd\ufffd au lait", "broken unicode"), ("1 2 3 + 4 5 6 = ? # $", "few letters"),
    ("what\x00 is new", "control characters"), ("好", "too short")])
def test_defaults_drop_by_reason(text, reason):
    """Each default drops what it is for, under its own reason (case 60)."""
    assert Filter([]).reason(ask(text), 9, 4, 20) == reason


def test_too_many_characters_are_too_long_before_any_token_is_counted():
    """A megabyte of text is known to be too long by its characters alone (case 64)."""
    keep = Filter([], PromptFilters(max_chars=20))
    assert not keep.too_large(ask("x" * 15, "five.")) and keep.too_large(ask("x" * 16, "five."))
    assert keep.reason(ask("x y " * 10), 1, 0, 99) == "too long"


@pytest.mark.parametrize("changed, similar", [("tall", True), ("tall green", False)])
def test_near_duplicate_differs_in_few_words(changed, similar):
    """One word of 22 changed leaves 17 of 23 three-word runs; the threshold decides, and it is kept otherwise."""
    other = ask(FOX.replace(changed, "dark blue" if " " in changed else "dark"))
    keep = Filter([], PromptFilters(near_duplicate=17 / 23))
    assert keep.reason(ask(FOX), 9, 1, 99) is None
    assert keep.reason(other, 9, 1, 99) == ("near duplicate" if similar else None)
    assert Filter([], OFF).reason(ask(FOX), 9, 1, 99) is None


def test_a_shared_system_prompt_makes_no_near_duplicate():
    """A log whose requests share a long system prompt is not one prompt."""
    keep, shared = Filter([]), f"{FOX} {FOX[::-1]}"  # forty runs, beside which those of a question are few
    assert keep.reason(ask("what is new", shared), 9, 1, 99) is None
    assert keep.reason(ask("who is there", shared), 9, 1, 99) is None
    assert keep.reason(ask("Who is there?", shared), 9, 1, 99) == "duplicate"


def test_near_duplicates_of_a_tool_log_differ_in_their_results():
    """Two requests of one agent run share the question; another tool result makes another prompt."""
    keep = Filter([])
    call = [{"role": "user", "content": "what is new"}, {"role": "assistant", "content": "call"}]
    for text, reason in ((FOX, None), (FOX[::-1], None), (FOX + "!", "duplicate")):
        assert keep.reason(Prompt(text, [*call, {"role": "tool", "content": text}]), 9, 1, 99) == reason


def all_pairs(texts: list[list[str]], threshold: float) -> list[bool]:
    """Slow reference: a text is taken where no taken one has that Jaccard similarity of runs."""
    taken: list[set[str]] = []
    for text in map(set, texts):
        if all(len(text & other) / len(text | other) < threshold for other in taken):
            taken.append(text)
            yield True
        else:
            yield False


WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=12), st.sampled_from([0.3, 0.5, 0.8, 1.0]))
def test_index_finds_what_all_pairs_find(texts, threshold):
    """The MinHash index with exact verification takes the same texts as comparing every pair."""
    found = [runs(text, 3) for text in texts]
    index = NearDuplicates(threshold)
    assert [index.take(one) for one in found] == list(all_pairs(found, threshold))


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.8, 0.95, 1.0])
def test_bands_keep_the_stated_recall(threshold):
    """A pair at the threshold shares a band with the stated probability; the next narrower index would miss more."""
    count, rows = bands(threshold)
    assert count * rows <= PERMUTATIONS and count >= 2
    assert 1 - (1 - threshold**rows) ** count >= RECALL
    if rows < PERMUTATIONS // 2:
        assert 1 - (1 - threshold ** (rows + 1)) ** (PERMUTATIONS // (rows + 1)) < RECALL


def test_words_of_scripts_without_spaces_are_single_characters():
    """Runs of Chinese or Thai are runs of characters, so overlap and repetition are seen there too."""
    assert runs("今天天气", 3) == ["今 天 天", "天 天 气"]
    judged = "请用简单的话解释一下为什么天空是蓝色的"
    assert Filter([ask(judged)]).reason(ask(judged + "？"), 9, 1, 99) == "overlaps the evaluation prompts"
    assert Filter([ask(judged)]).reason(ask("好的，" + judged), 9, 1, 99) == "overlaps the evaluation prompts"
