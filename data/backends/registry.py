"""The table of answer backends, and which of their settings decide what the answers are."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.backends.base import Backend
from data.backends.engine import EngineBackend
from data.backends.local import LocalBackend
from data.backends.logged import LogBackend
from data.backends.server import ServerBackend
from drafters.target import Target
from recipes.files import sha256_file
from recipes.schema import Generation

BACKENDS: dict[str, Callable[[Generation, Target], Backend]] = {
    "transformers": LocalBackend,
    "openai": ServerBackend,
    "vllm": EngineBackend,
    "logs": LogBackend,
}


def open_backend(section: Generation, target: Target) -> Backend:
    """The backend that the recipe names. Raises ConfigError for settings it cannot work with."""
    return BACKENDS[section.backend](section, target)


def content_settings(section: Generation) -> dict[str, Any]:
    """The settings that decide the answers: another value is another trace set (case 30).

    Where a server stands and how hard it is driven may change between two runs of one job.
    """
    values = asdict(section)
    server, engine, log = (values.pop(name) for name in ("server", "engine", "log"))
    backend = values.pop("backend")
    values.pop("max_lost_share")
    own: dict[str, dict[str, Any]] = {
        "transformers": {},
        "openai": {"model": server["model"], "kind": server["kind"]},
        "vllm": {"engine": engine},
        "logs": {"log": log, "sha256": sha256_file(Path(log)) if Path(log).is_file() else ""},
    }
    return values | ({"backend": backend, **own[backend]} if own[backend] else {})
