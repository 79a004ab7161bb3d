"""The platform of the fake engine."""

from types import SimpleNamespace

current_platform = SimpleNamespace(device_type="cpu")
