"""Stop strings: an answer ends with the token that completes one of them."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

SLACK = 8  # tokens decoded before those that can hold a stop string: some tokenizers treat the first one apart


class Stops:
    """Looks for strings at the end of an answer's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        self.tail = max(len(s.encode()) for s in strings) + SLACK  # a token of text has one byte at least

    def found(self, tokens: list[int]) -> str:
        """The stop string that the last of these tokens completes; empty where there is none."""
        text = self.tokenizer.decode(tokens[-self.tail :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return next((string for string in self.strings if string in text), "")

    def cut(self, tokens: list[int]) -> str:
        """The answer's text up to the first stop string."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text[: min([text.find(s) for s in self.strings if s in text] or [len(text)])]
