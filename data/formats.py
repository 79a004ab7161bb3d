"""One row of any known format to one Prompt: detected on every row, normalised by fixed rules, or refused by name.

What is normalised and what is refused is listed in docs/prompts.md; both are counted by the caller.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from data.prompts import Prompt, content_id
from recipes.files import sha256_json

Turn = dict[str, Any]
# In this order: a row that carries text and ids is rendered anew, since the ids may be another tokenizer's.
FORMATS = {"messages": ("messages",), "ShareGPT": ("conversations", "conversation"), "Alpaca": ("instruction",),
           "prompt": ("prompt",), "turns": ("turns",), "ids": ("prompt_ids", "input_ids")}
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "model": "assistant", "bot": "assistant", "function_call": "assistant", "tool": "tool",
         "function": "tool", "observation": "tool"}
REASONING = ("reasoning_content", "reasoning", "thinking")


class Unusable(Exception):
    """The row is no conversation; the message is the reason it is counted under."""


@dataclass
class Parsed:
    """A prompt, the format it came in, and the normalisations that the row needed."""

    prompt: Prompt
    format: str
    notes: list[str] = field(default_factory=list)


def parse(row: Any, text_field: str = "", id_field: str = "id", chat_only: bool = False) -> Parsed:
    """The prompt of one row. `chat_only`: requests to a completions endpoint, whose `prompt` is no chat, are refused.

    Trailing assistant turns and a log's response become `given`: the target answers itself. Raises Unusable.
    """
    if not isinstance(row, dict):
        raise Unusable("not an object")
    try:
        return _parse({key: value for key, value in row.items() if value is not None}, text_field, id_field, chat_only)
    except UnicodeEncodeError:  # lone surrogates: bytes that were no UTF-8, or half of an escaped pair
        raise Unusable("invalid unicode") from None
    except RecursionError:
        raise Unusable("nested too deeply") from None


def _parse(row: dict[str, Any], text_field: str, id_field: str, chat_only: bool) -> Parsed:
    body = unwrap(row)
    name, value = detect(body, text_field)
    if chat_only and name not in ("messages", "ShareGPT"):
        raise Unusable("not a chat request")
    notes: list[str] = []
    prompt = _from_ids(value) if name == "ids" else _from_turns(name, value, body, row, notes)
    own = body.get(id_field, row.get(id_field, row.get("custom_id"))) if id_field else None
    if own is None and id_field and name == "turns":
        own = row.get("question_id")
    kind = row.get("kind", row.get("category"))
    prompt.kind = kind if isinstance(kind, str) else ""
    prompt.id = _own_id(own) or prompt_id(prompt)
    json.dumps([prompt.id, prompt.kind, prompt.messages, prompt.tools, prompt.given], ensure_ascii=False).encode()
    return Parsed(prompt, name if body is row else f"{name} in a request", sorted(set(notes)))


def unwrap(row: dict[str, Any]) -> dict[str, Any]:
    """The request's body where a log wraps it: {"request": {...}}, {"custom_id", "body"}, either as JSON text."""
    for key in () if "messages" in row else ("request", "body"):
        inner = decoded(row.get(key))
        if isinstance(inner, dict):
            return unwrap({k: v for k, v in inner.items() if v is not None})
    return row


def detect(row: dict[str, Any], text_field: str = "") -> tuple[str, Any]:
    """(format, the value that holds the conversation) of one row; absent and null fields do not count."""
    keys = {"prompt": (text_field,)} if text_field else FORMATS
    found = next(((name, row[key]) for name, names in keys.items() for key in names if row.get(key) is not None), None)
    if found is None:
        wanted = text_field or ", ".join(key for names in FORMATS.values() for key in names)
        raise Unusable(f"none of the fields {wanted}" if not text_field else f"no field {wanted}")
    return found


def prompt_id(prompt: Prompt) -> str:
    """Identity by content, where the row has no id of its own: it survives reordering, a limit and a filter."""
    if prompt.ids is not None:
        return sha256_json(prompt.ids)[:16]
    return sha256_json([prompt.messages, prompt.tools])[:16] if prompt.tools else content_id(prompt.messages)


def _own_id(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _from_ids(value: Any) -> Prompt:
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise Unusable("ids are not a list of integers")
    return Prompt("", [], ids=value)


def _from_turns(name: str, value: Any, body: dict, row: dict, notes: list[str]) -> Prompt:
    turns, given = decoded(value) if name in ("messages", "ShareGPT") else value, []
    if name == "Alpaca":
        turns, given = _alpaca(body)
    elif name == "prompt" and is_turns(decoded(turns)):
        turns = decoded(turns)
    elif name == "turns":
        turns = _questions(turns)
    elif isinstance(turns, str) and name == "prompt":
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not turns:
        raise Unusable("no list of turns")
    turns = [(_role(turn), turn) for turn in turns]
    if isinstance(body.get("system"), str) and body["system"].strip() and turns[0][0] != "system":
        turns.insert(0, ("system", {"content": body["system"]}))
    cut = len(turns)
    while cut and turns[cut - 1][0] == "assistant":
        cut -= 1
    answer = [*turns[cut:], *given, *_response(row)]
    messages = [m for m in (normalise_turn(role, turn, notes) for role, turn in turns[:cut]) if m]
    check_order([m["role"] for m in messages])
    return Prompt("", messages, tools=_tools(body), given=_given(answer, notes))


def _alpaca(body: dict[str, Any]) -> tuple[list[Turn], list[tuple[str, Turn]]]:
    text, extra = body["instruction"], body.get("input", "")
    if not isinstance(text, str) or not isinstance(extra, str):
        raise Unusable("content is not text")
    answer = body.get("output")
    given = [("assistant", {"content": answer})] if isinstance(answer, str) and answer.strip() else []
    return [{"role": "user", "content": f"{text}\n\n{extra}" if extra.strip() else text}], given


def _questions(value: Any) -> list[Turn]:
    """User turns of one conversation, as MT-bench and Spec-Bench list them; each is answered before the next."""
    texts = decoded(value)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise Unusable("turns are not a list of texts")
    return [{"role": "user", "content": text} for text in texts]


def _role(turn: Any) -> str:
    if not isinstance(turn, dict):
        raise Unusable("a turn is not an object")
    role = turn.get("role") if turn.get("role") is not None else turn.get("from")
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise Unusable("unknown role")
    return ROLES[role.strip().lower()]


def check_order(roles: list[str]) -> None:
    """Raises Unusable where nothing is left to answer, or the assistant speaks before any user."""
    if "user" not in roles:
        raise Unusable("no user turn")
    if "assistant" in roles[: roles.index("user")] or "tool" in roles[: roles.index("user")]:
        raise Unusable("the assistant or a tool speaks before any user")
    if roles[-1] not in ("user", "tool"):
        raise Unusable("ends with a system turn")


def normalise_turn(role: str, turn: Turn, notes: list[str]) -> Turn | None:
    """One turn with the keys that templates know; None for an empty system turn, which is left out.

    Keys: role, content (text), and where present reasoning_content, tool_calls, tool_call_id, name.
    """
    text = turn.get("content") if turn.get("content") is not None else turn.get("value", turn.get("text"))
    calls = _calls(turn, notes)
    if turn.get("from") == "function_call":
        text, calls = "", [_call(text, notes)]
    message: Turn = {"role": role, "content": _content(text, notes)}
    reasoning = next((turn[key] for key in REASONING if turn.get(key) not in (None, "")), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise Unusable("reasoning is not text")
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if isinstance(turn.get(key), (str, int)) and turn[key] != "":
            message[key] = str(turn[key])
    if message["content"].strip() or calls or reasoning or role == "tool":  # a tool may return nothing
        return message
    if role == "system":
        notes.append("empty system turn left out")
        return None
    raise Unusable("empty turn")


def _content(value: Any, notes: list[str]) -> str:
    """Text of a turn; a list of text parts, as multimodal APIs take it, is joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Unusable("content is not text")
    texts = [part.get("text") if isinstance(part, dict) else part for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise Unusable("content is not text")
    notes.append("text parts joined")
    return "".join(texts)


def _calls(turn: Turn, notes: list[str]) -> list[Turn]:
    calls = decoded(turn.get("tool_calls") or [])
    if isinstance(turn.get("function_call"), dict):
        calls = [turn["function_call"]]
    if not isinstance(calls, list):
        raise Unusable("tool calls are not a list")
    return [_call(call, notes) for call in calls]


def _call(call: Any, notes: list[str]) -> Turn:
    """{"id", "type": "function", "function": {"name", "arguments": object}}: arguments as servers render them."""
    call = decoded(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Unusable("a tool call without a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        notes.append("absent tool arguments made an empty object")
        arguments = {}
    elif isinstance(arguments, str):
        notes.append("tool arguments parsed from text")
        arguments = decoded(arguments)
    if not isinstance(arguments, dict):
        raise Unusable("tool arguments are not an object")
    own = {"id": str(call["id"])} if isinstance(call.get("id"), (str, int)) else {}
    return {**own, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(body: dict[str, Any]) -> list[Turn] | None:
    """The row's tool definitions in OpenAI's form; None where it has none."""
    tools = decoded(body.get("tools") or [])
    if not tools and isinstance(body.get("functions"), list):
        tools = body["functions"]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("tools are not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


def _response(row: dict[str, Any]) -> list[tuple[str, Turn]]:
    """The answer that a log's row recorded; none where there is none that can be read."""
    response = decoded(row.get("response"))
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    choices = response.get("choices") if isinstance(response, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return [("assistant", message)] if isinstance(message, dict) else []


def _given(turns: list[tuple[str, Turn]], notes: list[str]) -> list[Turn]:
    try:
        return [m for m in (normalise_turn(role, turn, []) for role, turn in turns) if m]
    except Unusable:  # the target answers itself, so a bad answer costs nothing
        notes.append("unreadable answer left out")
        return []


def is_turns(value: Any) -> bool:
    """True for a list of messages, which a table's cell holds as JSON text; a prompt may be a JSON list too."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)


def decoded(value: Any) -> Any:
    """JSON text of a list or object as the value it holds; everything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
