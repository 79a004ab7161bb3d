"""Chat messages to token ids and loss mask, with the ids that the serving path yields. See docs/chat.md.

The mask holds, for each token, the number of the assistant turn that generated it (1, 2, ...) or 0: only
tokens the target itself would generate are supervised, its end token included, and nothing else.
"""

import json
import re
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.literal import Unrenderable, encode, guard, special_tokens, unguarded
from recipes.errors import ConfigError

Message = dict[str, Any]  # role, content; tool_calls, tool_call_id, name and reasoning_content where there are any
Tools = list | None
MARKER = "drafthouse-user-text"  # stands for a user's text, to find where the template puts it
THINK, THOUGHT = "<think>", "</think>"
OPENING = re.compile(rf"{THINK}\s*({THOUGHT}\s*)?$")  # a generation prompt that opens (and closes) a think block


@dataclass
class Rendered:
    """Token ids of a conversation and, for each, the assistant turn that generated it (0: none)."""

    ids: list[int]
    turns: list[int]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools = None) -> list[int]:
    """What a server sends to the model for these messages: rendered with the generation prompt, tokenised once.

    The template renders its own special tokens, so none is added again (no double BOS, case 45). Special tokens
    that a message spells stay text. Raises Unrenderable where the template refuses the messages.
    """
    return encode(tokenizer, _text(tokenizer, messages, tools, generation=True))


def _served(message: Message) -> Message:
    """A message as vLLM and SGLang hand it to the template: arguments as a mapping, no absent content."""
    message = dict(message, content=message.get("content") or "")
    if not message.get("tool_calls"):
        return {k: v for k, v in message.items() if k != "tool_calls"}
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"]) if "function" in call else dict(call)
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise Unrenderable(f"tool call {function.get('name')!r}: its arguments are not JSON") from None
        calls.append({**call, "function": function} if "function" in call else function)
    return message | {"tool_calls": calls}


def _guarded(tokenizer: PreTrainedTokenizerBase, message: Message) -> Message:
    spared = (THINK, THOUGHT) if message["role"] == "assistant" else ()  # there they are the target's own markers
    return guard(tokenizer, _served(message), spared)


def _text(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, generation: bool) -> str:
    """The rendered conversation; spelled special tokens carry their guard (data/literal.py)."""
    served = [_served(m) for m in messages]
    guarded, kept = [_guarded(tokenizer, m) for m in messages], guard(tokenizer, tools)
    plain = _apply(tokenizer, served, tools, generation)
    for call in (call for message in served for call in message.get("tool_calls", [])):
        name = call.get("function", call)["name"]
        if name not in plain:
            raise Unrenderable(f"the chat template does not render tool calls: {name!r} is missing")
    if (guarded, kept) == (served, tools):
        return plain
    text = _apply(tokenizer, guarded, kept, generation)
    if unguarded(text) != plain:
        raise Unrenderable("the chat template does not render a text verbatim that spells a special token")
    return text


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, generation: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation)
    except (TemplateError, TypeError) as error:  # a TypeError is the template's: it adds text to what is none
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unrenderable(f"the chat template refuses these messages: {reason}") from None


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], end_ids: list[int],
           tools: Tools = None) -> list[Rendered]:
    """Rows and masks of a conversation whose answers are given (`generation.answers: keep`).

    Each answered turn is the serving path's prompt up to it, followed by what the target would write: the answer as
    the template renders it when it comes last, up to its end token. A row that the next one begins with is merged into
    it, so an append-only template gives one row, and one that rewrites history a row for each rewriting.
    Assistant turns before the first user or tool turn are context: nobody asked for them.
    Raises ConfigError naming what differs where the template cannot be handled: a wrong mask would be silent (case
    06); Unrenderable where only this conversation cannot.
    """
    rows: list[Rendered] = []
    first = next((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), len(messages))
    answered = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not answered:
        raise Unrenderable("no assistant turn follows a user turn")
    for number, i in enumerate(answered, 1):
        prompt, reply = _turn(tokenizer, messages[: i + 1], end_ids, tools)
        turns = [0] * len(prompt)
        if rows and prompt[: len(rows[-1].ids)] == rows[-1].ids:
            earlier = rows.pop().turns
            turns[: len(earlier)] = earlier
        rows.append(Rendered(prompt + reply, turns + [number] * len(reply)))
    return rows


def truncate(row: Rendered, length: int, side: str = "right") -> Rendered:
    """At most `length` tokens, cut from one `side`, the mask with its ids (case 28)."""
    kept = slice(max(0, len(row.ids) - length), None) if side == "left" else slice(length)
    return Rendered(row.ids[kept], row.turns[kept])


def reasoning_of(message: Message) -> tuple[str, str]:
    """(reasoning, answer) of an assistant message, from its field or from the markers in its text."""
    content = message.get("content") or ""
    if message.get("reasoning_content"):
        return message["reasoning_content"], content
    before, found, after = content.rpartition(THOUGHT)
    return (before.removeprefix(THINK), after) if found else ("", content)


def reply_message(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> Message:
    """The target's finished reply (its end token left out) as a client sends it back in the next request.

    Control tokens are dropped, as servers do. Reasoning goes to its own field where the template reads one, otherwise
    the raw text is the content and the template parses it or not.
    """
    return said_message(tokenizer, tokenizer.decode(tokens, skip_special_tokens=True))


def said_message(tokenizer: PreTrainedTokenizerBase, text: str) -> Message:
    """The same of a reply's text."""
    if THOUGHT in text and "reasoning_content" in str(tokenizer.chat_template):
        reasoning, answer = reasoning_of({"content": text.lstrip()})
        return {"role": "assistant", "content": answer.lstrip("\n"), "reasoning_content": reasoning.strip("\n")}
    return {"role": "assistant", "content": text}


def _turn(tokenizer: PreTrainedTokenizerBase, messages: list[Message], end_ids: list[int],
          tools: Tools) -> tuple[list[int], list[int]]:
    """(prompt ids, reply ids) of the last message, an assistant's."""
    before = _text(tokenizer, messages[:-1], tools, generation=True)
    after = _text(tokenizer, messages, tools, generation=False)
    prompt, closed = encode(tokenizer, before), encode(tokenizer, after)
    given = _guarded(tokenizer, messages[-1])
    reasoning, answer = reasoning_of(given)
    asked = _asked(_guarded(tokenizer, messages[-2]), before)
    text = after[len(before):]
    if after.startswith(before) and reasoning.strip() in text:
        reply = closed[len(prompt):] if closed[: len(prompt)] == prompt else _continuation(tokenizer, text, end_ids)
    else:
        if reasoning and "think" not in str(tokenizer.chat_template):
            raise Unrenderable("the answer has reasoning, but the chat template knows none")
        text = _spoken(before, after, given, asked)
        reply = _continuation(tokenizer, text, end_ids)
    _must_hold(text, answer, "assistant text")
    end = next((p for p, i in enumerate(reply) if i in end_ids), None)
    if end is None:
        raise ConfigError("the chat template closes an assistant turn without an end token of the target; "
                          f"end ids {end_ids}, the turn is rendered as {unguarded(text)[-40:]!r}")
    return prompt, reply[: end + 1]


def _asked(message: Message, before: str) -> str:
    """The text that was answered, as `before` holds it; ConfigError where it does not (case 29)."""
    text = message["content"].strip()
    if message["role"] == "assistant":
        return ""  # an earlier answer: a template may shorten it
    if message["role"] == "tool" and text not in before:
        text = json.dumps(text, ensure_ascii=False)[1:-1]  # some templates quote tool results
    _must_hold(before, text, f"{message['role']} text")
    return text


def _must_hold(text: str, part: str, what: str) -> None:
    if part.strip() not in text:
        raise ConfigError(f"the chat template does not render {what} verbatim: {unguarded(part.strip())[:60]!r} is "
                          f"missing from {unguarded(text)[-120:]!r}; a loss mask would be a guess")


def _spoken(before: str, after: str, given: Message, asked: str) -> str:
    """What the target says behind `before`, where the finished conversation `after` does not begin with it or hides
    the reasoning: the reply's text as the template renders it, its reasoning put back."""
    opening = OPENING.search(before)
    rest = _behind(before[: opening.start()] if opening else before, after, asked)
    reasoning, answer = reasoning_of(given)
    if not reasoning and opening and not opening[1]:
        raise Unrenderable("the generation prompt opens a think block, but the given answer has no reasoning")
    if not reasoning:
        return rest
    _must_hold(rest, answer, "assistant text")
    tail = rest[rest.rfind(THOUGHT) + len(THOUGHT) if THOUGHT in rest else 0 :].partition(answer.strip())[2]
    if opening and opening[1]:  # asked not to think: the target would write the answer only
        return answer.strip() + tail
    said = given["content"].rstrip()
    if given.get("reasoning_content"):
        said = f"{THINK}\n{reasoning.strip()}\n{THOUGHT}\n\n{answer.strip()}"
    if opening:  # the prompt has it already
        said = said.removeprefix(opening[0]) if said.startswith(opening[0]) else said.removeprefix(THINK)
    return said + tail


def _behind(before: str, after: str, asked: str) -> str:
    """What `after` holds behind `before`; where a template words earlier messages otherwise once they are answered,
    behind the last question and what closes it. ConfigError naming the difference where neither is found."""
    if after.startswith(before):
        return after[len(before):]
    bridge = before[before.rindex(asked):] if asked else before
    parts = after.split(bridge, before.count(bridge))
    if len(parts) == before.count(bridge) + 1:
        return parts[-1]
    place = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    raise ConfigError("the chat template renders a finished turn unlike the prompt of that turn: the prompt has "
                      f"{unguarded(before[max(0, place - 20) : place + 40])!r} where the finished turn has "
                      f"{unguarded(after[max(0, place - 20) : place + 40])!r}; a loss mask would be a guess")


def _continuation(tokenizer: PreTrainedTokenizerBase, text: str, end_ids: list[int]) -> list[int]:
    """Ids of text that follows a prompt: behind a control token, so that no tokenizer puts a space before it."""
    anchors = [t for t, i in special_tokens(tokenizer).items()
               if i in end_ids and not tokenizer.added_tokens_decoder[i].rstrip]
    return encode(tokenizer, anchors[0] + text)[1:] if anchors else encode(tokenizer, text)


def answer_points(messages: list[Message]) -> tuple[list[list[Message]], int]:
    """(what is given before each answer of the target, number of given assistant turns among it).

    The target answers behind every user turn and behind the last of several tool results. Given answers are left
    out, but for a tool call with its result, which belongs to that call, and for what stands before the first user
    turn: both are context, never supervised.
    """
    parts: list[list[Message]] = [[]]
    given, asked = 0, False
    for i, message in enumerate(messages):
        following = messages[i + 1 : i + 3]
        roles = [m["role"] for m in following]
        called = message["role"] == "assistant" and roles[:1] == ["tool"]
        if message["role"] != "assistant" or called or not asked:
            parts[-1].append(message)
            given += message["role"] == "assistant"
        asked = asked or message["role"] in ("user", "tool")
        if message["role"] in ("user", "tool") and roles[:1] != ["tool"] and roles != ["assistant", "tool"]:
            parts.append([])
    return parts[:-1], given


def user_header_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Everything the template renders before the first user text: where a target writes its own prompts
    (Xu et al. 2024, Magpie). ConfigError where the template does not render user text verbatim."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARKER}], tokenize=False)
    head, found, _ = text.partition(MARKER)
    if not found:
        raise ConfigError("the chat template does not render user text verbatim; prompts cannot be synthesised")
    return tokenizer(head, add_special_tokens=False)["input_ids"]


def user_span(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools = None) -> tuple[int, int]:
    """Where the text of the last message, which must be the user's, stands in `prompt_ids`: its first token and the one
    behind its last. An empty span where the template does not render it verbatim, or the message is another's.
    Raises Unrenderable as `prompt_ids` does.
    """
    last = messages[-1]
    if last["role"] != "user" or not isinstance(last["content"], str) or not last["content"].strip():
        return 0, 0
    other = [*messages[:-1], last | {"content": MARKER}]
    before, _, after = _text(tokenizer, other, tools, generation=True).rpartition(MARKER)
    whole = _text(tokenizer, messages, tools, generation=True)
    inner = whole[len(before) : len(whole) - len(after)]
    if before + inner + after != whole or inner.strip() != _guarded(tokenizer, last)["content"].strip():
        return 0, 0
    ids = encode(tokenizer, whole)
    # What is encoded alone may end otherwise than within the whole, where a token may reach over the border.
    start, stop = (len(commonprefix([ids, encode(tokenizer, part)])) for part in (before, before + inner))
    return start, stop


def loss_positions(turns: list[int], depth: int) -> list[int]:
    """Positions that carry loss at unroll depth k = `depth` (shared definition, eagle3 step 3).

    Position t sees the state at t and the embedding of x[t+1] and predicts x[t+2+k]; it carries loss if and
    only if x[t+1] ... x[t+2+k] are all supervised tokens of one turn. The last prompt position is included.
    """
    last = depth + 2
    return [t for t in range(len(turns) - last)
            if turns[t + 1] > 0 and all(turns[t + 1 + j] == turns[t + 1] for j in range(depth + 2))]
