"""Text stays text: a special token that someone spells in a message never becomes a control token.

Before the template renders them, messages get the character GUARD behind the first character of every spelled special
token. What the template adds carries no guard, so both can be told apart in the rendered text. Guarded text is encoded
by a twin of the tokenizer that knows its special tokens by names nobody can type. Text without a guard goes through the
tokenizer itself: its ids are the serving path's.
"""

import json
import re
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from recipes.errors import ConfigError

GUARD, OPEN, CLOSE = "\U00100000", "\U00100001", "\U00100002"  # private use: no tokenizer or text gives them a meaning


class Unrenderable(ConfigError):
    """This one conversation cannot be rendered; others of the same target may well be."""


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Control tokens by their text, longest first."""
    found = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


@lru_cache(maxsize=8)
def _pattern(tokenizer: PreTrainedTokenizerBase, flags: int) -> re.Pattern:
    spelled = "|".join(re.escape(text) for text in special_tokens(tokenizer))
    return re.compile(f"(?:{spelled})(?!{GUARD})" if spelled else r"(?!)", flags)


def guard(tokenizer: PreTrainedTokenizerBase, value: Any, spared: tuple[str, ...] = ()) -> Any:
    """`value` (text, or lists and mappings of it) with every spelled special token guarded, but for those `spared`.

    Raises Unrenderable for text that cannot be encoded, or that holds a character this module reserves.
    """
    if isinstance(value, str):
        if {GUARD, OPEN, CLOSE} & set(value):
            raise Unrenderable("text holds a character of U+100000 to U+100002, which rendering reserves")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Unrenderable("text holds half of a surrogate pair") from None
        # in any case: a normaliser may fold it afterwards
        return _pattern(tokenizer, re.IGNORECASE).sub(
            lambda m: m[0] if m[0] in spared else m[0][0] + GUARD + m[0][1:], value)
    if isinstance(value, dict):
        return {guard(tokenizer, k, spared): guard(tokenizer, v, spared) for k, v in value.items()}
    if isinstance(value, list):
        return [guard(tokenizer, item, spared) for item in value]
    return value


def unguarded(text: str) -> str:
    return text.replace(GUARD, "")


@lru_cache(maxsize=2)
def _twin(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
    """(tokenizer with renamed special tokens, new name by old, original id by the twin's id of added tokens)."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(core, Tokenizer):
        raise Unrenderable("text spells a special token, and this tokenizer has no backend that can keep it as text")
    layout = json.loads(core.to_str())
    layout["post_processor"] = layout["truncation"] = layout["padding"] = None
    names, places = {}, {}
    for number, token in enumerate(layout["added_tokens"]):
        if token["special"]:
            names[token["content"]] = token["content"] = f"{OPEN}{number}{CLOSE}"
        places[token["content"]] = token["id"]
    twin = Tokenizer.from_str(json.dumps(layout))
    return twin, names, {twin.token_to_id(content): original for content, original in places.items()}


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of rendered text; none is added (no double BOS, case 45). Guarded text stays text.

    Raises Unrenderable where the tokenizer has no other way to write that text than its control token.
    """
    if GUARD not in text:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    twin, names, original = _twin(tokenizer)
    renamed = _pattern(tokenizer, 0).sub(lambda m: names[m[0]], text)
    ids = twin.encode(unguarded(renamed), add_special_tokens=False).ids
    control = set(special_tokens(tokenizer).values()) - {tokenizer.unk_token_id} - set(original)
    for i in ids:
        if i in control:
            raise Unrenderable(f"text spells {tokenizer.convert_ids_to_tokens(i)!r}, which this tokenizer can only "
                               "write as its control token")
    return [original.get(i, i) for i in ids]
