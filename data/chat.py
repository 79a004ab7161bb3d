"""Chat messages to token ids and loss mask, with the ids that the serving path yields.

The mask holds, for each token, the number of the assistant turn that generated it (1, 2, ...) or 0: only
tokens the target itself would generate are supervised, its end token included, and nothing else.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from recipes.errors import ConfigError

Message = dict[str, str]


@dataclass
class Rendered:
    """Token ids of a conversation and, for each, the assistant turn that generated it (0: none)."""

    ids: list[int]
    turns: list[int]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """What a server sends to the model for these messages: rendered with the generation prompt, tokenised once.

    The template renders its own special tokens, so none is added again (no double BOS, case 45).
    """
    return _render(tokenizer, messages, generation=True)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], generation: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], end_ids: list[int]) -> Rendered:
    """Ids and mask of a conversation whose answers are given.

    Each assistant turn starts where the generation prompt ends and stops at the first end token after it.
    Works with and without generation markers in the template, since it compares renderings only.
    Raises ConfigError where a longer rendering does not begin with the shorter one (a template that
    rewrites history), where an assistant turn has no end token, or where it comes first: a wrong mask would be
    silent (case 06).
    """
    ids = _render(tokenizer, messages, generation=False)
    turns = [0] * len(ids)
    number = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise ConfigError("the conversation begins with an assistant turn: nothing renders before it, so where "
                              "its own tokens begin is unknown")
        number += 1
        start = _prefix(tokenizer, messages[:i], ids, generation=True)
        stop = _prefix(tokenizer, messages[: i + 1], ids, generation=False)
        end = next((p for p in range(start, stop) if ids[p] in end_ids), None)
        if end is None:
            raise ConfigError("the chat template closes an assistant turn without an end token of the target; "
                              f"end ids {end_ids}, turn {number}")
        turns[start : end + 1] = [number] * (end + 1 - start)
    return Rendered(ids, turns)


def _prefix(tokenizer: PreTrainedTokenizerBase, messages: list[Message], ids: list[int], generation: bool) -> int:
    shorter = _render(tokenizer, messages, generation)
    if ids[: len(shorter)] != shorter:
        raise ConfigError(f"the chat template does not append: rendering {len(messages)} messages is not a prefix of "
                          "the whole conversation, so a loss mask would be wrong; use single-turn prompts")
    return len(shorter)


def by_user_turn(messages: list[Message]) -> list[list[Message]]:
    """What is given before each answer: messages cut after every user turn, given answers left out."""
    parts: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            parts[-1].append(message)
        if message["role"] == "user":
            parts.append([])
    return [part for part in parts if part]


def user_header_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Everything the template renders before the first user text: where a target writes its own prompts
    (Xu et al. 2024, Magpie). ConfigError where the template does not render user text verbatim."""
    marker = "drafthouse-user-text"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    head, found, _ = text.partition(marker)
    if not found:
        raise ConfigError("the chat template does not render user text verbatim; prompts cannot be synthesised")
    return tokenizer(head, add_special_tokens=False)["input_ids"]


def loss_positions(turns: list[int], depth: int) -> list[int]:
    """Positions that carry loss at unroll depth k = `depth` (shared definition, eagle3 step 3).

    Position t sees the state at t and the embedding of x[t+1] and predicts x[t+2+k]; it carries loss if and
    only if x[t+1] ... x[t+2+k] are all supervised tokens of one turn. The last prompt position is included.
    """
    last = depth + 2
    return [t for t in range(len(turns) - last)
            if turns[t + 1] > 0 and all(turns[t + 1 + j] == turns[t + 1] for j in range(depth + 2))]
