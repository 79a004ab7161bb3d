"""vLLM's connector for hidden states on a CPU, loaded by vLLM: the original copies through CUDA streams."""

import os

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Done:
    """Stands for a CUDA event: a copy on a CPU has ended when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class SynchronousHiddenStates(ExampleHiddenStatesConnector):
    """Writes a finished request's states before the step ends; files, locks and names are the original's."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks, offsets = torch.tensor(pending.block_ids), torch.arange(self._block_size)
        slots = (blocks[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        self._write_tensors(tensors, Done(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = Done()
