"""Every drafter this version knows. A new one is a file and a line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drafters import eagle3
from recipes.errors import ConfigError
from recipes.loader import parse_into


@dataclass(frozen=True)
class Entry:
    """options: dataclass of `drafter.options`; build: fresh drafter; load: drafter from a checkpoint's parts."""

    options: type
    build: Callable[..., Any]
    load: Callable[..., Any]
    script: str


REGISTRY: dict[str, Entry] = {
    "eagle3": Entry(eagle3.Options, eagle3.build, eagle3.load, "train/eagle3.py"),
}


def entry(kind: str) -> Entry:
    """The registered drafter. ConfigError names the known ones."""
    if kind not in REGISTRY:
        raise ConfigError(f"drafter.kind = {kind!r}: unknown; known kinds: {', '.join(REGISTRY)}")
    return REGISTRY[kind]


def options_of(kind: str, values: dict[str, Any]) -> Any:
    """`drafter.options` as the drafter's own dataclass, strictly."""
    return parse_into(entry(kind).options, values, f"drafter.options ({kind})")
