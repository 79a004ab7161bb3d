"""What is sent to and read from `/v1/completions`: pure functions, and the table of what each server understands.

Prompts are sent as token ids, so what the server continues is exactly what will be trained on. Every sampling
field is sent, off values too: a server would otherwise fill in its own (a repetition penalty out of the model's
generation_config, say) and the answers would silently be another distribution's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.backends.base import Fault, check_ids, restore_end
from data.sampling import Sampling
from recipes.errors import ConfigError, RunError


@dataclass(frozen=True)
class Dialect:
    """A server's fields beyond OpenAI's. `top_k_off` None: it knows neither top_k nor stop ids nor ignore_eos."""

    top_k_off: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


OFF = {"repetition_penalty": 1.0, "min_p": 0.0}
NEUTRAL = {**OFF, "skip_special_tokens": False}
DIALECTS: dict[str, Dialect] = {
    "vllm": Dialect(0, {**NEUTRAL, "return_token_ids": True, "include_stop_str_in_output": True}),
    "sglang": Dialect(-1, {**NEUTRAL, "return_token_ids": True, "no_stop_trim": True}),
    "tensorrt-llm": Dialect(0, {**NEUTRAL, "detokenize": False, "include_stop_str_in_output": True}),
    "dynamo": Dialect(-1, {**NEUTRAL, "logprobs": 0, "return_tokens_as_token_ids": True,
                           "include_stop_str_in_output": True}),
    "plain": Dialect(),
}
AS_ID = "token_id:"  # how `return_tokens_as_token_ids` writes a token


@dataclass
class Completion:
    """What a response says. `ids` None: it holds text only. `trimmed`: one token more was generated than is here."""

    ids: list[int] | None
    text: str
    finish: str
    named: int | None
    generated: int | None

    def trimmed(self, ids: list[int]) -> bool:
        return self.generated == len(ids) + 1


def completion_body(kind: str, model: str, prompt: list[int], sampling: Sampling, max_tokens: int,
                    end_ids: Sequence[int] | None, seed: int, user: str) -> dict[str, Any]:
    """The request. `end_ids` None: go on beyond end tokens, greedily where `sampling` is greedy.

    `min_tokens` would forbid the end token instead of passing it, which changes the greedy path.
    """
    dialect = DIALECTS[kind]
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "stream": False,
            "user": user, **dialect.fields}
    if not sampling.greedy:
        body["seed"] = seed
    if dialect.top_k_off is None:
        if sampling.top_k:
            raise ConfigError(f"top_k = {sampling.top_k}: a server of generation.server.kind = {kind} knows no top_k; "
                              "set it to 0")
        return body
    body["top_k"] = sampling.top_k or dialect.top_k_off
    return body | ({"ignore_eos": True} if end_ids is None else {"stop_token_ids": list(end_ids)})


def read_completion(body: Any, model: str, prompt: list[int]) -> Completion:
    """What a decoded response says. Raises Fault where it is no completion of this prompt, RunError where another
    model answered (case 36)."""
    if not isinstance(body, dict):
        raise Fault("not a completion")
    if isinstance(body.get("model"), str) and body["model"] != model:
        raise RunError(f"generation.server.model = {model}: the server answered with {body['model']!r}")
    choices = body.get("choices")
    if body.get("model") is None or not isinstance(choices, list):
        raise Fault("not a completion")
    if not choices or not isinstance(choices[0], dict):
        raise Fault("empty choices")
    choice = choices[0]
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    echoed = prompt_ids_of(body)
    if (echoed is not None and echoed != prompt) or usage.get("prompt_tokens") not in (None, len(prompt)):
        raise Fault("the server changed the prompt's ids")
    stop = choice.get("stop_reason", choice.get("matched_stop"))
    generated = usage.get("completion_tokens")
    text = choice.get("text")
    return Completion(token_ids_of(choice), text if isinstance(text, str) else "", str(choice.get("finish_reason")),
                      stop if type(stop) is int else None, generated if type(generated) is int else None)


def prompt_ids_of(body: dict[str, Any]) -> list[int] | None:
    """The prompt's ids as the server saw them, where it says so: in the choice, or in a list for all choices."""
    ids = body["choices"][0].get("prompt_token_ids") or body.get("prompt_token_ids")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        ids = ids[0]
    return ids if isinstance(ids, list) else None


def token_ids_of(choice: dict[str, Any]) -> list[int] | None:
    """The answer's ids: given as such, or as tokens named `token_id:N`; None where there is only text."""
    if isinstance(choice.get("token_ids"), list):
        return choice["token_ids"]
    logprobs = choice.get("logprobs")
    tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(t, str) and t.startswith(AS_ID) for t in tokens):
        return None
    try:
        return [int(t.removeprefix(AS_ID)) for t in tokens]
    except ValueError:
        raise Fault("ids outside the vocabulary") from None


def retokenise(tokenizer: Any, text: str) -> list[int]:
    """Ids of an answer that came as text. Raises Fault where decoding them does not give the text back."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        raise Fault("text that the tokenizer does not give back")
    return ids


def answer_ids(found: Completion, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> list[int]:
    """The answer's ids, its end token included. Raises Fault where they are not known for certain."""
    ids = retokenise(tokenizer, found.text) if found.ids is None else found.ids
    whole = restore_end(check_ids(ids, vocab_size), found.finish, found.named, found.trimmed(ids), end_ids)
    if found.generated is not None and found.generated not in (len(ids), len(whole)):
        raise Fault("usage contradicts the ids")
    return whole
