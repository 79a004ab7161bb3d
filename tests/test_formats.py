"""One row of any format to one conversation: detected, normalised by fixed rules, or refused by name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.formats import FORMATS, ROLES, Unusable, parse
from data.prompts import content_id

ASK = [{"role": "user", "content": "what is new"}]
HUMAN, GPT = {"from": "human", "value": "what is new"}, {"from": "gpt", "value": "nothing"}
USER, ANSWER = ASK[0], {"role": "assistant", "content": "nothing"}
RESPONSE = {"choices": [{"message": ANSWER}]}
FORMS = {  # (row, format, whether it holds an answer)
    "messages": ({"messages": ASK}, "messages", False),
    "messages with an answer": ({"messages": [*ASK, ANSWER], "more": 1}, "messages", True),
    "messages as JSON text": ({"messages": json.dumps(ASK)}, "messages", False),
    "text parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "what "},
                                                             {"type": "text", "text": "is new"}]}]}, "messages", False),
    "null fields beside it": ({"messages": None, "prompt": "what is new"}, "prompt", False),
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, "ShareGPT", True),
    "Alpaca": ({"instruction": "what is new", "input": "", "output": "nothing"}, "Alpaca", True),
    "Alpaca without input": ({"instruction": "what is new"}, "Alpaca", False),
    "prompt": ({"prompt": "what is new"}, "prompt", False),
    "prompt as turns": ({"prompt": ASK}, "prompt", False),
    "request body": ({"model": "m", "messages": ASK, "response": RESPONSE}, "messages", True),
    "wrapped": ({"request": {"messages": ASK}, "response": RESPONSE}, "messages in a request", True),
    "wrapped as text": ({"request": json.dumps({"messages": ASK})}, "messages in a request", False),
    "HTTP record": ({"request": {"url": "/v1", "body": {"messages": ASK}},
                     "response": {"status_code": 200, "body": RESPONSE}}, "messages in a request", True),
    "batch file": ({"custom_id": "", "method": "POST", "body": {"messages": ASK}}, "messages in a request", False),
    "unreadable answer": ({"messages": [*ASK, {"role": "assistant", "content": 3}]}, "messages", False),
}
BAD = {
    "a list": ([1], "not an object"),
    "no known field": ({"text": "hi"}, "none of the fields messages"),
    "unknown role": ({"messages": [{"role": "robot", "content": "hi"}]}, "unknown role"),
    "role as number": ({"messages": [{"role": 1, "content": "hi"}]}, "unknown role"),
    "no role": ({"messages": [{"content": "hi"}]}, "unknown role"),
    "assistant first": ({"messages": [ANSWER, USER]}, "speaks before any user"),
    "assistant after the system": ({"conversations": [{"from": "system", "value": "s"}, GPT, HUMAN]}, "speaks before"),
    "only answers": ({"messages": [ANSWER]}, "no user turn"),
    "ends with system": ({"messages": [USER, {"role": "system", "content": "s"}]}, "ends with a system turn"),
    "empty user turn": ({"messages": [{"role": "user", "content": " \n"}]}, "empty turn"),
    "empty answer before": ({"messages": [USER, {"role": "assistant", "content": ""}, USER]}, "empty turn"),
    "content as number": ({"prompt": 3}, "no list of turns"),
    "content as object": ({"messages": [{"role": "user", "content": {"a": 1}}]}, "content is not text"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content is not text"),
    "Alpaca number": ({"instruction": 3}, "content is not text"),
    "a turn as text": ({"messages": ["hi"]}, "a turn is not an object"),
    "no turns": ({"messages": []}, "no list of turns"),
    "half a surrogate pair": (json.loads('{"prompt": "smile \\ud83d"}'), "invalid unicode"),
    "bytes that were no UTF-8": ({"prompt": b"caf\xe9".decode("utf-8", "surrogateescape")}, "invalid unicode"),
    "ids with text": ({"input_ids": [1, "2"]}, "ids are not a list of integers"),
    "ids with truth": ({"input_ids": [1, True]}, "ids are not a list of integers"),
    "no ids": ({"input_ids": []}, "ids are not a list of integers"),
    "arguments as a list": ({"messages": [USER, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[1]"}}]}, USER]}, "tool arguments are not an object"),
    "arguments cut off": ({"messages": [USER, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": '{"a": '}}]}, USER]}, "tool arguments are not an object"),
    "nameless call": ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}, USER]},
                      "a tool call without a name"),
    "tools as text": ({"messages": ASK, "tools": "none"}, "tools are not a list of objects"),
}


@pytest.mark.parametrize("row, name, answered", FORMS.values(), ids=FORMS)
def test_every_format_loads_to_the_same_prompt(row, name, answered):
    """The same question in any format is the same prompt with the same id; its answer is kept apart (cases 65, 16)."""
    found = parse(row)
    assert found.prompt.messages == ASK and found.format == name
    assert found.prompt.id == content_id(ASK) and found.prompt.ids is None
    assert found.prompt.given == ([ANSWER] if answered else [])


@pytest.mark.parametrize("row, reason", BAD.values(), ids=BAD)
def test_a_row_that_is_no_conversation_is_refused_by_name(row, reason):
    """Odd roles, mixed types, empty turns, broken text: each has a reason to be counted under (cases 64, 65)."""
    with pytest.raises(Unusable, match=reason):
        parse(row)


def test_a_log_takes_chat_requests_only():
    """A completions request is raw text for the server, so its `prompt` is no chat turn in a log."""
    with pytest.raises(Unusable, match="not a chat request"):
        parse({"request": {"prompt": "Once upon"}}, chat_only=True)
    assert parse({"request": {"messages": ASK}}, chat_only=True).prompt.messages == ASK


def test_alpaca_input_and_system_prompt_are_given():
    """Alpaca's input follows the instruction after a blank line; a row's `system` becomes the first turn."""
    row = {"instruction": "translate", "input": "good day", "system": "be brief"}
    assert parse(row).prompt.messages == [{"role": "system", "content": "be brief"},
                                          {"role": "user", "content": "translate\n\ngood day"}]
    told = {"messages": [{"role": "developer", "content": "own"}, USER], "system": "be brief"}
    assert parse(told).prompt.messages[0] == {"role": "system", "content": "own"}


def test_tool_arguments_as_text_as_object_and_absent_load_to_one_form():
    """Arguments are an object whatever the row held, as servers hand them to the template (case 65)."""
    for arguments, note in ((' {"city": "Rome"}', "tool arguments parsed from text"), ({"city": "Rome"}, None),
                            (None, "absent tool arguments made an empty object")):
        call = {"id": "c1", "function": {"name": "weather", "arguments": arguments}}
        calls = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sun"}]
        found = parse({"messages": calls})
        assert found.prompt.messages[1]["tool_calls"] == [{"id": "c1", "type": "function", "function": {
            "name": "weather", "arguments": {"city": "Rome"} if arguments else {}}}]
        assert found.notes == ([note] if note else [])


def test_tool_conversation_keeps_its_turns_and_call_ids():
    """System, user, call, result, answer, question: no turn, id, name, tool or reasoning is lost (cases 27, 25)."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "c7", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    talk = [{"role": "system", "content": "be brief"}, USER,
            {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c7", "name": "weather"},
            {"role": "assistant", "content": "sunny"}, {"role": "user", "content": "and now?"}]
    prompt = parse({"messages": talk, "tools": json.dumps(tools)}).prompt
    assert prompt.messages == talk and prompt.tools == tools
    legacy = parse({"messages": talk, "functions": [tools[0]["function"]]}).prompt
    assert legacy.tools == tools and legacy.id == prompt.id != parse({"messages": talk}).prompt.id


def test_ends_with_a_tool_result():
    """The answer to a tool result is the target's; a call after it is the source's own answer."""
    call = {"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": {}}}]}
    prompt = parse({"messages": [USER, call, {"role": "tool", "content": "1"}, call]}).prompt
    assert [m["role"] for m in prompt.messages] == ["user", "assistant", "tool"]
    assert prompt.given[0]["tool_calls"][0]["id"] == "1"


def test_sharegpt_call_and_observation_are_a_call_and_its_result():
    """ShareGPT's function_call and observation turns are a tool call and a tool turn (case 27)."""
    rows = [HUMAN, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"}]
    messages = parse({"conversations": rows}).prompt.messages
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert messages[2] == {"role": "tool", "content": "2"}


def test_empty_system_turn_is_left_out_and_noted():
    """An empty system turn says nothing: it goes, and is counted (case 64)."""
    found = parse({"messages": [{"role": "system", "content": ""}, USER]})
    assert found.prompt.messages == ASK and found.notes == ["empty system turn left out"]


def test_ids_are_kept_as_they_are():
    """A pre-tokenised prompt is its ids; text beside them is rendered anew instead."""
    found = parse({"input_ids": [5, 6, 7]})
    assert found.format == "ids" and found.prompt.ids == [5, 6, 7] and found.prompt.messages == []
    assert parse({"input_ids": [5], "prompt": "what is new"}).prompt.messages == ASK


@pytest.mark.parametrize("row, field, expected", [
    ({"id": "a"}, "id", "a"), ({"id": 0}, "id", "0"), ({"id": ""}, "id", None), ({"id": 1.5}, "id", None),
    ({"id": "a"}, "", None), ({"key": "k", "id": "a"}, "key", "k"), ({"custom_id": "c"}, "id", "c")])
def test_own_id_or_the_contents(row, field, expected):
    """A row's own id is its identity; without one the content is (case 16)."""
    assert parse(row | {"prompt": "what is new"}, id_field=field).prompt.id == (expected or content_id(ASK))


def test_turns_in_a_cell_under_a_named_field():
    """A table's cell holds messages as JSON text: they are turns, while a prompt that is a JSON list stays a prompt."""
    cell = '[{"role": "user", "content": "what is new"}]'
    assert parse({"chat": cell}, text_field="chat").prompt.messages == ASK
    for text in ("[3, 1, 2]", "[]", '[{"content": "x"}]', "[not json"):
        assert parse({"chat": text}, text_field="chat").prompt.messages == [{"role": "user", "content": text}]


def test_named_text_field():
    """`text_field` names the prompt; a row without it is refused by that name, whatever else it holds."""
    assert parse({"question": "what is new", "prompt": "other"}, text_field="question").prompt.messages == ASK
    with pytest.raises(Unusable, match="no field question"):
        parse({"prompt": "other"}, text_field="question")


KEYS = [key for keys in FORMATS.values() for key in keys] + ["role", "from", "content", "value", "tool_calls", "tools",
                                                            "function", "name", "arguments", "request", "response"]
JSON = st.recursive(st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", "hi", "[", "\ud800", *ROLES]),
                    lambda inner: (st.lists(inner, max_size=3)
                                   | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
                    max_leaves=16)
TURN = st.fixed_dictionaries({"role": st.sampled_from([*ROLES, "robot"]), "content": JSON}, optional={
    "tool_calls": JSON, "reasoning": JSON, "name": JSON})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5)
       | st.fixed_dictionaries({"messages": st.lists(TURN, max_size=4)}, optional={"tools": JSON}))
def test_any_row_is_a_prompt_or_refused_and_normal_form_is_final(row):
    """No JSON whatever breaks the reader, and what it normalised is normal: read again, it is the same (case 64)."""
    try:
        prompt = parse(row).prompt
    except Unusable as error:
        assert str(error)
        return
    if prompt.ids is None:
        assert prompt.messages[-1]["role"] in ("user", "tool")
        again = parse({"messages": prompt.messages, "tools": prompt.tools})
        assert (again.prompt.messages, again.prompt.tools, again.notes) == (prompt.messages, prompt.tools, [])


def test_deeply_nested_row_is_refused():
    """Nesting beyond the reader's depth is a reason, not a crash (case 64)."""
    value: dict = {"messages": ASK, "tools": []}
    for _ in range(5000):
        value = {"request": value}
    with pytest.raises(Unusable, match="nested too deeply"):
        parse(value)
