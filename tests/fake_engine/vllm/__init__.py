"""vLLM as far as eval/serve_worker.py and eval/engine_run.py use it. The model's folder says what it answers
(engine.json): `answers` by prompt, `drafts`, `accepted`, by layout of the drafter what goes wrong (`faults`), what it
must be told of drafting (`told`), and how long an engine works for an answer (`slow`, seconds), which leaves its
process id in `pid`."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.32.0"


def load(model: str, drafter: str | None) -> tuple[dict, dict]:
    """(what the engine answers, what goes wrong with this drafter)."""
    found = json.loads((Path(model) / "engine.json").read_text())
    fault = found["faults"].get(Path(drafter).name, {}) if drafter else {}
    if found.get("slow"):
        (Path(model) / "pid").write_text(str(os.getpid()))
    if fault.get("refuses"):
        raise ValueError("unexpected tensor layers.0.x\nmore")
    return found | fault, fault


def check_told(found: dict, speculation: dict) -> None:
    """It drafts as engine.json wants it to (`told`), where that says anything."""
    wanted = found.get("told", {"method": "eagle3"}) | {"num_speculative_tokens": 3}
    assert wanted.items() <= speculation.items(), f"{speculation} is not {wanted}"


def SamplingParams(temperature, max_tokens, stop_token_ids, detokenize) -> SimpleNamespace:
    assert temperature == 0.0 and detokenize is False and stop_token_ids == [2]
    return SimpleNamespace(max_tokens=max_tokens)


class LLM:
    def __init__(self, model, dtype, seed, disable_log_stats, enforce_eager, max_model_len,
                 speculative_config=None) -> None:
        assert dtype == "float32" and enforce_eager is True and disable_log_stats is False and max_model_len == 512
        self.found, _ = load(model, (speculative_config or {}).get("model"))
        if speculative_config:
            check_told(self.found, speculative_config)
        if self.found.get("dies"):
            raise SystemExit(3)

    def generate(self, prompts, params, use_tqdm):
        time.sleep(self.found.get("slow", 0))
        tokens = [self.found["answers"][str(prompt["prompt_token_ids"])] for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids[: params.max_tokens])]) for ids in tokens]

    def get_tokenizer(self):
        """What it makes of a chat comes from engine.json too."""
        known = self.found.get("rendered")
        return SimpleNamespace(apply_chat_template=lambda messages, **how: known[messages[-1]["content"]])

    def get_metrics(self):
        """Two replicas' counters (case 55)."""
        half, rest = self.found["drafts"] // 2, self.found["drafts"] - self.found["drafts"] // 2
        return [SimpleNamespace(name="vllm:other", value=9),
                *(SimpleNamespace(name="vllm:spec_decode_num_drafts", value=n) for n in (half, rest)),
                SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=self.found["accepted"])]
