"""A vLLM engine that computes hidden states, as a process of its own in the environment that has vLLM.

One JSON line in, one out: first {folder, layers, arguments}, answered by {prefix_caching, version}; then {rows}: token
ids of each row, answered by {states}: the file of each row's states. {error} says why there is none. It ends when its
input does. Imports nothing of the project, whose packages are not installed there.
"""

import json
import os
import sys
import time
from types import ModuleType
from typing import Any

PATIENCE = 300.0  # seconds for the states of finished rows to be written


def load(vllm: ModuleType, cpu: bool, settings: dict[str, Any]) -> Any:
    """The engine. The prefix cache is off: it would hand out states of what it computes anew only."""
    connector: dict[str, Any] = {"kv_connector": "ExampleHiddenStatesConnector"}
    if cpu:  # vLLM's own writes through CUDA streams
        connector = {"kv_connector": "SynchronousHiddenStates",
                     "kv_connector_module_path": "data.backends.vllm_connector"}
    connector |= {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": settings["folder"]}}
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": settings["layers"]}}
    return vllm.LLM(
        **settings["arguments"], enable_prefix_caching=False, kv_transfer_config=connector, speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers})


def compute(vllm: ModuleType, llm: Any, rows: list[list[int]]) -> dict[str, Any]:
    """Files with the states of these rows, in order. Every row is a prompt; the one token answered is of no use."""
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in rows], params, use_tqdm=False)
    paths = [(output.kv_transfer_params or {}).get("hidden_states_path") for output in outputs]
    if not all(paths):
        return {"error": "no file of hidden states was named; is this a vLLM with extract_hidden_states (0.32)?"}
    end = time.monotonic() + PATIENCE
    while absent := [path for path in paths if not os.path.exists(path)]:
        if time.monotonic() > end:
            return {"error": f"the states of {len(absent)} rows were not written in {PATIENCE:.0f} seconds"}
        llm.llm_engine.step()  # the states of a finished row are written by later steps, which nothing else asks for
        time.sleep(0.001)
    return {"states": paths}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints goes where its log goes

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    try:
        import vllm  # noqa: PLC0415  # its absence is an answer
        from vllm.platforms import current_platform  # noqa: PLC0415

        llm = load(vllm, current_platform.is_cpu(), settings)
    except ImportError as error:
        answer({"error": f"vLLM cannot be imported by {sys.executable} ({error}); set trace.engine_python"})
        return
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        answer({"error": f"vLLM cannot load the target: {(str(error).strip().splitlines() or [repr(error)])[0]}"})
        return
    cache = llm.llm_engine.vllm_config.cache_config
    answer({"prefix_caching": bool(cache.enable_prefix_caching), "version": vllm.__version__})
    for line in sys.stdin:
        answer(compute(vllm, llm, json.loads(line)["rows"]))


if __name__ == "__main__":
    main()
