"""Where answers come from: one contract (base.py), one table (registry.py), one file a backend.

vllm_worker.py and vllm_connector.py run in vLLM's own environment, for data/states.py.
"""
