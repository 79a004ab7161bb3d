"""One vLLM engine that answers a job's prompts greedily, as a process of the environment that has vLLM.

`python -P eval/serve_worker.py JOB RESULT`: JOB holds {model, speculation (speculative_config or null), prompts (token
ids), max_tokens, stop, dtype, engine, chats (messages)}; RESULT is {tokens, drafts, accepted (by position), version,
torch, device, seconds, rendered (ids of the chats)}, or {error}. Imports nothing of the project, whose packages are not
installed there.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def counters(metrics: list[Any]) -> tuple[int, list[int]]:
    """(drafts, accepted tokens by position), summed over the engine's replicas (case 55)."""
    drafts, accepted = 0, []
    for metric in metrics:
        if metric.name == DRAFTS:
            drafts += metric.value
        elif metric.name == ACCEPTED:
            longest = max(len(accepted), len(metric.values))
            pair = ((rows + [0] * (longest - len(rows))) for rows in (accepted, list(metric.values)))
            accepted = [a + b for a, b in zip(*pair)]
    return int(drafts), [int(n) for n in accepted]


def rendered(tokenizer: Any, messages: list[Any]) -> list[int]:
    """Ids of a chat by the engine's own tokenizer and template."""
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(found)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    import vllm  # noqa: PLC0415  # its absence is an answer
    from vllm.platforms import current_platform  # noqa: PLC0415

    more = {} if job["speculation"] is None else {"speculative_config": job["speculation"]}
    llm = vllm.LLM(model=job["model"], dtype=job["dtype"], seed=0, disable_log_stats=False, **more, **job["engine"])
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], stop_token_ids=job["stop"],
                                 detokenize=False)
    started = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    seconds = time.monotonic() - started
    drafts, accepted = counters(llm.get_metrics()) if more else (0, [])
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "drafts": drafts,
            "accepted": accepted, "version": vllm.__version__, "torch": importlib.metadata.version("torch"),
            "device": current_platform.device_type, "seconds": seconds,
            "rendered": [rendered(llm.get_tokenizer(), chat) for chat in job["chats"]]}


def main() -> None:
    job, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        found = answer(json.loads(job.read_text(encoding="utf-8")))
    except (ImportError, ValueError, TypeError, RuntimeError, KeyError, OSError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        found = {"error": f"{type(error).__name__}: {first}"}
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
