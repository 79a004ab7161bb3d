"""What the measurements work on: real prompts, rows as answering leaves them, and transformers as the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.rows import TRANSFORMERS
from data.capture import Conversation
from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from data.sampling import Sampling
from data.store import TraceReader
from drafters.target import Target, require_chat_template
from eval.figures import spread
from recipes.errors import ConfigError, RunError
from recipes.schema import Recipe

GREEDY = Sampling()


def open_target(recipe: Recipe, layers: list[int] | None = None) -> Target:
    """The recipe's target, which must be able to chat."""
    target = Target(recipe.target, layers)
    require_chat_template(target)
    return target


def evaluation_ids(recipe: Recipe, target: Target, count: int, room: int) -> list[list[int]]:
    """Token ids of `count` evaluation prompts, evenly spaced over them, or of all where there are fewer.

    room: tokens that must be left behind each. Raises ConfigError where the target's context leaves none."""
    prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
    found = [prompt_ids(target.tokenizer, prompts[i].messages, prompts[i].tools) for i in spread(prompts, count)]
    check_room(target, found, room)
    return found


def traced_ids(recipe: Recipe, target: Target, count: int, room: int) -> list[list[int]]:
    """The first `count` prompts of the run's traces. Raises RunError where it has none, ConfigError as above."""
    reader = TraceReader(Path(recipe.runs_dir) / recipe.name / "traces")
    found = []
    for index in range(min(count, len(reader))):
        row = reader[index]
        found.append(row.ids[: int((row.turns > 0).int().argmax())].tolist())
    check_room(target, found, room)
    return found


def float32_traces(recipe: Recipe) -> TraceReader:
    """The run's traces, which must be in full precision: RunError where they are not, or where there are none."""
    reader = TraceReader(Path(recipe.runs_dir) / recipe.name / "traces")
    if reader.manifest["dtype"] != "float32":
        raise RunError(f"{reader.folder}: stored as {reader.manifest['dtype']}; the comparison needs float32 traces")
    return reader


def check_room(target: Target, prompts: list[list[int]], room: int) -> None:
    longest = max(map(len, prompts))
    if longest + room > target.max_length:
        raise ConfigError(f"a prompt of {longest} tokens and {room} more: beyond the target's context of "
                          f"{target.max_length}; ask for shorter answers or give shorter prompts")


def conversations(prompts: list[list[int]], rows: int, answer_tokens: int, vocab_size: int, seed: int,
                  ) -> list[Conversation]:
    """Rows to capture: the prompts in rotation, each with an answer of random ids, half to one and a half times
    `answer_tokens` long. What a pass costs does not depend on which ids it reads."""
    generator = torch.Generator().manual_seed(seed)
    low, high = max(1, answer_tokens // 2), answer_tokens * 3 // 2 + 1
    found = []
    for number in range(rows):
        prompt = prompts[number % len(prompts)]
        length = int(torch.randint(low, high, (1,), generator=generator))
        answer = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        turns = [0] * len(prompt) + [1] * length
        found.append(Conversation(f"row-{number:06d}", "train", prompt + answer, turns, [], "length"))
    return found


def apart(rows: list[Conversation], vocab_size: int) -> list[Conversation]:
    """The same rows without a common beginning: each starts with another token."""
    return [replace(row, ids=[number % vocab_size, *row.ids[1:]]) for number, row in enumerate(rows)]


class Stock:
    """The target as transformers alone runs it: its own linear layers and SDPA attention."""

    name = f"{TRANSFORMERS} generate"

    def __init__(self, target: Target) -> None:
        self.end_ids, self.device = target.end_ids, target.device
        model = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=target.dtype, attn_implementation="sdpa", use_safetensors=True,
            trust_remote_code=target.section.trust_remote_code)
        self.model = model.to(target.device).eval().requires_grad_(False)

    def answers(self, prompts: list[list[int]], batch_size: int, max_tokens: int, sampling: Sampling = GREEDY,
                seed: int = 0, lookup: int | None = None, assistant: Any = None) -> list[list[int]]:
        """Answers by `generate`, end token included, in the order of the prompts.

        Prompts of like length are run together, padded at the front. lookup: tokens that prompt lookup drafts;
        assistant: the model that drafts.
        """
        choice = {"do_sample": False} if sampling.greedy else {
            "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        torch.manual_seed(seed)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, list[int]] = {}
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            ids, mask = pad_front([prompts[i] for i in part], self.end_ids[0])
            out = self.model.generate(
                ids.to(self.device), attention_mask=mask.to(self.device), max_new_tokens=max_tokens,
                eos_token_id=self.end_ids, pad_token_id=self.end_ids[0], prompt_lookup_num_tokens=lookup,
                assistant_model=assistant, **choice)
            found |= {i: self.kept(row) for i, row in zip(part, out[:, ids.shape[1]:].tolist())}
        return [found[i] for i in range(len(prompts))]

    def kept(self, tokens: list[int]) -> list[int]:
        """Tokens up to the first end token, which is kept; behind it is padding."""
        ends = [i for i, token in enumerate(tokens) if token in self.end_ids]
        return tokens[: ends[0] + 1] if ends else tokens


def pad_front(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as (ids [B, S], mask [B, S]), the shorter ones padded in front."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
