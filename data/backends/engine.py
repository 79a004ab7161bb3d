"""Answers by vLLM in this process (`generation.backend: vllm`); vLLM is installed by the user."""

import importlib.util
from types import ModuleType
from typing import Any

from data.backends.base import Fault, Losses, accept, check_ids
from data.backends.journal import Journal
from data.generate import Answer, Request
from data.recorder import Keeper
from data.sampling import Sampling, row_seed
from drafters.target import Target
from recipes.errors import ConfigError
from recipes.schema import Generation

FIXED = {"model", "tokenizer", "dtype", "seed"}  # decided by the recipe's other fields


class EngineBackend:
    """A unit is one `LLM.generate` call. `vllm`: the module, which tests replace."""

    def __init__(self, section: Generation, target: Target, vllm: ModuleType | None = None) -> None:
        taken = FIXED & set(section.engine)
        if taken:
            raise ConfigError(f"generation.engine: {sorted(taken)[0]} is decided by the recipe's other fields")
        if vllm is None and importlib.util.find_spec("vllm") is None:
            raise ConfigError("generation.backend = vllm: vLLM is not installed here; install it, or run it as a "
                              "server and use backend openai")
        self.section, self.target, self.vllm = section, target, vllm
        self.llm: Any = None

    def run(self, requests: list[Request], max_tokens: int, journal: Journal, losses: Losses,
            keeper: Keeper | None = None) -> list[Answer]:
        """See Backend.run. Overrun tokens are a second call, from prompt and answer, beyond end tokens."""
        if self.llm is None:
            self.llm = self.load()
        rows = [(r.prompt, self.params(r.id, r.sampling, max_tokens, beyond=False)) for r in requests]
        answers = []
        for request, (ids, finish) in zip(requests, self.generate(rows)):
            try:
                ids = check_ids(ids, self.target.vocab_size)
                answers.append((request, accept(request, ids, finish, max_tokens, self.target.end_ids)))
            except Fault as fault:
                losses.add(request.id, fault.reason)
        longer = [(r, a) for r, a in answers if r.overrun]
        rows = [(a.prompt + a.tokens, self.params(r.id, Sampling(), r.overrun, beyond=True)) for r, a in longer]
        for (request, answer), (ids, _) in zip(longer, self.generate(rows)):
            try:
                answer.overrun = check_ids(ids, self.target.vocab_size)
                if len(ids) != request.overrun:
                    raise Fault("overrun of another length than asked")
            except Fault as fault:
                losses.add(request.id, fault.reason)
        return [a for _, a in answers if a.id not in losses.rows]

    def load(self) -> Any:
        section = self.target.section
        try:
            self.vllm = self.vllm or importlib.import_module("vllm")
            return self.vllm.LLM(model=self.target.path, dtype=section.dtype, seed=self.section.seed,
                                 **self.section.engine)
        except (ImportError, ValueError, TypeError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"target.model = {section.model}: vLLM cannot load it: {first}") from None

    def params(self, row: str, sampling: Sampling, max_tokens: int, beyond: bool) -> Any:
        return self.vllm.SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=max_tokens,
            seed=None if sampling.greedy else row_seed(self.section.seed, row, 4), ignore_eos=beyond,
            stop_token_ids=None if beyond else list(self.target.end_ids), detokenize=False)

    def generate(self, rows: list[tuple[list[int], Any]]) -> list[tuple[list[int], str]]:
        """(ids, finish reason) of each (prompt ids, params), in order."""
        if not rows:
            return []
        prompts = [{"prompt_token_ids": ids} for ids, _ in rows]
        outputs = self.llm.generate(prompts, [params for _, params in rows], use_tqdm=False)
        found = []
        for (ids, _), output in zip(rows, outputs, strict=True):
            if list(output.prompt_token_ids) != ids:
                raise ConfigError("vLLM answered another prompt than asked: its prompt ids differ from ours")
            found.append((list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason)))
        return found
