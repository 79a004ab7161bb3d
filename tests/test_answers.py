"""Rows from prompts: answers in rounds on the target's own history, tool calls kept as context, given answers kept."""

import json

import pytest

from data.answers import Answering, check_answers
from data.chat import prompt_ids
from data.collect import COMMAND
from data.generate import Answer
from data.prompts import Prompt, hold_out
from data.store import TraceReader
from recipes.cli import run
from recipes.errors import ConfigError, RunError
from recipes.schema import Generation, Prompts, PromptSource, Recipe, Train
from tests.chat_templates import DEEPSEEK, GEMMA, QWEN3, end_ids, family_tokenizer
from tests.test_chat_templates import CALLING, TOOLS
from tests.tiny import chat_tokenizer, write_recipe, write_target

USER, CALL, RESULT, GIVEN = CALLING
MORE = {"role": "user", "content": "and 2 and 2?"}


class Scripted:
    """A target whose answers are given: `replies` maps the last text of a prompt to what is said; end token last."""

    def __init__(self, template: str, replies: list[str]) -> None:
        self.tokenizer = family_tokenizer(template)
        self.end_ids, self.replies, self.asked = end_ids(self.tokenizer), list(replies), []

    def ask(self, number: int, requests: list) -> list[Answer]:
        answers = []
        for r in requests:
            self.asked.append((number, self.tokenizer.decode(r.prompt)))
            tokens = self.tokenizer(self.replies.pop(0), add_special_tokens=False)["input_ids"]
            finish = "stop" if tokens[-1] in self.end_ids else "length"
            answers.append(Answer(r.id, r.prompt, tokens, finish, [5] * r.overrun))
        return answers

    def answering(self, limit: int = 4000, validation: int = 0, **generation) -> Answering:
        recipe = Recipe(prompts=Prompts(validation=validation), generation=Generation(max_tokens=8, **generation))
        return Answering(recipe, self, limit, self.ask)


def test_tool_results_stand_in_the_prompt_and_calls_are_context():
    """The given call and its result are context, the target answers behind it, and its own reply, without reasoning
    as Qwen3 serves it, is the next turn's history; only its own tokens are supervised (cases 27, 25)."""
    target = Scripted(QWEN3, ["<think>\nI see\n</think>\n\nthree!<|im_end|>", "four<|im_end|>"])
    answering = target.answering()
    rows = answering.rows([Prompt("p", [USER, CALL, RESULT, GIVEN, MORE], tools=TOOLS)])
    own = {"role": "assistant", "content": "three!"}
    prompts = [prompt_ids(target.tokenizer, talk, TOOLS) for talk in
               ([USER, CALL, RESULT], [USER, CALL, RESULT, own, MORE])]
    assert [r.id for r in rows] == ["p", "p/1"]
    for row, prompt in zip(rows, prompts):
        assert row.ids[: len(prompt)] == prompt
        assert row.turns == [0] * len(prompt) + [1] * (len(row.ids) - len(prompt))
    said = target.tokenizer.decode(prompts[1])
    assert "I see" not in said and "three!<|im_end|>" in said and '{"sum": 3}' in said and "# Tools" in said
    assert answering.counts == {"given turns kept as context": 1}


def test_the_last_user_turn_of_each_round_is_marked_where_others_are_wanted():
    """trace.user_turns: all: each training row marks the one user text that it brings, with its end token; a held-out
    row, and a prompt that came as token ids, none."""
    target = Scripted(GEMMA, ["one<end_of_turn>"] * 5)
    answering = target.answering(validation=1)
    answering.recipe.trace.user_turns = "all"
    talks = [Prompt(f"p{i}", [USER, MORE]) for i in range(2)]
    [held] = hold_out(["p0", "p1", "tokens"], 1, 0)
    rows = answering.rows([*talks, Prompt("tokens", [USER], ids=prompt_ids(target.tokenizer, [USER]))])
    marked = {r.id: target.tokenizer.decode([i for i, turn in zip(r.ids, r.turns) if turn == -1]) for r in rows}
    texts = {"": USER["content"] + "<end_of_turn>", "/1": MORE["content"] + "<end_of_turn>"}
    assert marked == {f"p{i}{part}": "" if f"p{i}" == held else text for i in range(2) for part, text in texts.items()
                      } | {"tokens": ""} and held == "p0"


def test_what_cannot_go_on_is_counted():
    """An answer cut by length, a history beyond the limit, and a turn that the template refuses end a conversation;
    the turns that are lost are counted with their reason (cases 60, 64)."""
    talk = [USER, MORE, MORE]
    cut = Scripted(DEEPSEEK, ["no end"]).answering()
    assert len(cut.rows([Prompt("p", talk)])) == 1
    assert cut.counts == {"turns behind an answer cut by length": 2}
    target = Scripted(DEEPSEEK, ["y" * 60 + "</s>"])
    long = target.answering(limit=len(prompt_ids(target.tokenizer, [USER])) + 50)
    assert len(long.rows([Prompt("p", talk)])) == 1 and long.counts == {"turns beyond the length limit": 2}
    refused = Scripted(GEMMA, ["y<end_of_turn>"]).answering()
    broken = Prompt("q", [{"role": "assistant", "content": "x"}, USER])
    assert [r.id for r in refused.rows([broken, Prompt("p", [USER])])] == ["p"]
    assert refused.counts == {"given turns kept as context": 1, "the chat template refuses these messages: "
                              "Conversation roles must alternate user/assistant": 1}


def test_given_answers_are_kept_for_training_only():
    """keep: training rows are the given conversation with the mask of data.chat, marked off-policy; held-out rows are
    the target's greedy answers with their overrun, as serving gives them (case 36)."""
    prompts = [Prompt(f"p{i}", [USER], given=[{"role": "assistant", "content": f"given {i}"}]) for i in range(4)]
    target = Scripted(GEMMA, ["mine<end_of_turn>"])
    rows = {r.id: r for r in target.answering(validation=1, answers="keep", temperature=1.0).rows(prompts)}
    [held] = hold_out(list(rows), 1, 0)
    for name, row in rows.items():
        said = target.tokenizer.decode([i for i, turn in zip(row.ids, row.turns) if turn])
        assert said == ("mine" if name == held else f"given {name[1:]}") + "<end_of_turn>"
        assert row.off_policy == (name != held) and row.split == ("validation" if name == held else "train")
        assert row.tail == ([5] * 4 if name == held else []) and row.finish == "stop"


def test_kept_rows_are_cut_with_their_mask_and_marked():
    """A given answer beyond the limit keeps its first tokens supervised and is marked as ended by length; where none
    of it is left, the row is counted instead; a history-rewriting template makes several rows (cases 28, 60)."""
    prompt = Prompt("p", [USER], given=[{"role": "assistant", "content": "abcdef"}])
    target = Scripted(GEMMA, [])
    start = len(prompt_ids(target.tokenizer, [USER]))
    [row] = target.answering(limit=start + 3, answers="keep").rows([prompt])
    assert target.tokenizer.decode(row.ids[start:]) == "abc" and row.turns == [0] * start + [1] * 3
    assert row.finish == "length"
    empty = target.answering(limit=start, answers="keep")
    with pytest.raises(RunError, match="'given answer beyond the length limit': 1"):
        empty.rows([prompt])
    thinking = Prompt("t", [USER, GIVEN, MORE], given=[GIVEN])
    rows = Scripted(QWEN3, []).answering(answers="keep").rows([thinking])
    assert [r.id for r in rows] == ["t", "t/1"] and [set(r.turns) for r in rows] == [{0, 1}, {0, 2}]


def test_rows_that_cannot_be_kept_are_counted():
    """A prompt without a given answer, or one the target would not write, is left out and counted (cases 25, 64)."""
    answering = Scripted(DEEPSEEK, []).answering(answers="keep")
    good = Prompt("g", [USER], given=[GIVEN])
    thoughtless = Prompt("b", [USER], given=[{"role": "assistant", "content": "x"}])
    rows = answering.rows([good, Prompt("a", [USER]), thoughtless])
    assert [r.id for r in rows] == ["g"]
    assert answering.counts == {
        "no assistant turn follows a user turn": 1,
        "the generation prompt opens a think block, but the given answer has no reasoning": 1}


def test_keep_from_recipe_to_store(tmp_path, capsys):
    """`generation.answers: keep` through `make trace`: manifest and every row of the shard list say off_policy, the
    reader returns it, and ids and mask are those of the given conversation (cases 06, 36)."""
    model = write_target(tmp_path / "model")
    lines = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"tell me about number {i} or {i + 1}"},
                                          {"role": "assistant", "content": f"it is {i}."}]} for i in range(5)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = write_recipe(tmp_path / "r.yaml", model, generation={"answers": "keep", "max_tokens": 8},
                          prompts={"sources": [{"kind": "jsonl", "path": str(tmp_path / "p.jsonl")}], "validation": 1})
    with pytest.raises(SystemExit) as stop:
        run(COMMAND, ["--config", str(recipe)])
    assert stop.value.code == 0
    traces = tmp_path / "runs" / "tiny" / "traces"
    reader = TraceReader(traces)
    assert reader.manifest["off_policy"] is True and reader.manifest["off_policy_rows"] == 4
    listed = json.loads((traces / "shards" / "shard-00000.json").read_text())["rows"]
    assert [r["off_policy"] for r in listed] == [r["split"] == "train" for r in listed]
    tokenizer = chat_tokenizer()
    for row in (reader[i] for i in reader.split("train")):
        number = row.id[1:]
        assert row.off_policy and tokenizer.decode(row.ids[row.turns > 0]) == f"it is {number}.<|im_end|>"
        assert tokenizer.decode(row.ids[row.turns == 0]) == (
            f"<|im_start|>user\ntell me about number {number} or {int(number) + 1}<|im_end|>\n<|im_start|>assistant\n")


def test_given_answers_have_no_marked_user_turns():
    """keep with trace.user_turns: all is refused instead of marking nothing."""
    recipe = Recipe(prompts=Prompts(sources=[PromptSource(kind="jsonl")]), generation=Generation(answers="keep"))
    recipe.trace.user_turns = "all"
    with pytest.raises(ConfigError, match="trace.user_turns = all: user turns before given answers"):
        check_answers(recipe)


def test_synthesis_has_no_answers_to_keep(tmp_path, capsys):
    """keep with a synthesis source is a configuration error before any model is loaded."""
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "no model", generation={"answers": "keep"})
    with pytest.raises(SystemExit) as stop:
        run(COMMAND, ["--config", str(recipe)])
    assert stop.value.code == 2 and "a synthesis source has no given answers" in capsys.readouterr().err


@pytest.mark.parametrize("kinds, refused", [(["jsonl"], True), (["jsonl", "synthesis"], False), ([], False)])
def test_user_turns_need_a_source_that_the_target_writes(kinds, refused):
    """What training would refuse is refused before anything is traced; no source at all means synthesis."""
    recipe = Recipe(prompts=Prompts(sources=[PromptSource(kind=kind) for kind in kinds]), train=Train(user_turns=True))
    if refused:
        with pytest.raises(ConfigError, match="no prompt source is of kind synthesis"):
            check_answers(recipe)
        recipe.trace.user_turns = "all"  # marks those of other people too
    check_answers(recipe)
