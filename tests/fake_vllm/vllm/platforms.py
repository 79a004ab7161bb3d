"""The machine as vLLM sees it."""

from types import SimpleNamespace

current_platform = SimpleNamespace(is_cpu=lambda: True)
