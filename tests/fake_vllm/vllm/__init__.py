"""vLLM 0.32 as far as data/backends/vllm_worker.py uses it: `LLM.generate` names a file for each row's states, which
the following engine steps write under a lock. The model's folder holds the states of every layer id, [T, L + 1, H] by
token ids (fake.npz), and what goes wrong (fake.json).
"""

import fcntl
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import save_file

__version__ = "0.32.0"


def SamplingParams(**values) -> SimpleNamespace:
    assert values == {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    return SimpleNamespace(**values)


class LLM:
    def __init__(self, model, dtype, max_model_len, enable_prefix_caching, kv_transfer_config, speculative_config,
                 bogus=None) -> None:
        print("loading", model)  # vLLM prints to standard output too
        if bogus:
            raise ValueError(f"bogus = {bogus} is no choice\nsecond line")
        assert dtype == "float32" and enable_prefix_caching is False
        assert speculative_config["method"] == "extract_hidden_states"
        assert kv_transfer_config["kv_connector_module_path"] == "data.backends.vllm_connector"  # on a CPU
        self.fault = json.loads((Path(model) / "fake.json").read_text())
        self.known = np.load(Path(model) / "fake.npz")
        self.layers = speculative_config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        self.folder = Path(kv_transfer_config["kv_connector_extra_config"]["shared_storage_path"])
        self.limit, self.waiting, self.count = max_model_len, [], 0
        cache = SimpleNamespace(enable_prefix_caching=self.fault.get("prefix_caching", False))
        self.llm_engine = SimpleNamespace(step=self.step, vllm_config=SimpleNamespace(cache_config=cache))

    def generate(self, prompts, params, use_tqdm):
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            assert len(ids) + params.max_tokens <= self.limit
            if self.fault.get("die"):
                raise SystemExit("engine: out of memory")
            path = self.folder / f"{self.count}.safetensors"
            path.with_name(path.name + ".lock").write_text("")
            self.count += 1
            self.waiting.append((path, ids))
            outputs.append(SimpleNamespace(kv_transfer_params={"hidden_states_path": str(path)}))
        return outputs

    def step(self) -> None:
        """Writes the states of one finished row."""
        path, ids = self.waiting.pop(0)
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            named = np.array([7, *ids[1:]] if self.fault.get("other_tokens") else ids)
            save_file({"hidden_states": self.states(ids), "token_ids": named}, path)

    def states(self, ids: list[int]) -> np.ndarray:
        """[T, ids, H]"""
        known = self.known["-".join(map(str, ids))]
        later = 1 if self.fault.get("shift") else 0  # ids that mean the output of a layer
        states = known[:, [min(k + later, known.shape[1] - 1) for k in self.layers]]
        if self.fault.get("nan_at") in ids:
            states[1] = np.nan
        return np.ascontiguousarray(states[self.fault.get("cached", 0) :])
