"""What decides the content of a trace folder, and the claim that ties a folder to it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.backends.registry import content_settings
from data.intake import evaluation_sets, sources_of
from data.rows import describe_source
from drafters.target import Target
from recipes.errors import ConfigError, RunError
from recipes.files import write_json, written
from recipes.provenance import difference
from recipes.schema import Recipe, Trace

# Fields of `trace` that change no content, see `describe`
NO_CONTENT = ("mode", "url", "cache_dir", "cache_gb", "verify_rows", "verify_seed", "engine_python")


def stores_states(section: Trace) -> bool:
    """True where the trace folder holds hidden states, False where training computes them."""
    return section.mode == "store"


def folder_mode(section: Trace) -> str:
    """What the folder is: `store` or `online`. A cache is beside it and decides nothing of it."""
    return "store" if stores_states(section) else "online"


def trace_settings(section: Trace, layers: list[int]) -> dict[str, Any]:
    """The trace section's part of `describe`, with the layers that the target is tapped at."""
    trace = {k: v for k, v in asdict(section).items() if k not in NO_CONTENT}
    if not stores_states(section):
        trace["mode"] = folder_mode(section)
    if section.backend == "transformers":
        del trace["backend"], trace["engine"]
    if section.user_turns == "own":
        del trace["user_turns"]
    return trace | {"layers": layers}


def describe(recipe: Recipe, target: Target) -> dict[str, Any]:
    """Everything that decides the traces' content: another value is another trace set (case 30). What is not named is
    mode `store`, backend `transformers` and user turns `own`, so that folders from before there were others keep their
    key."""
    return {
        "target": target.fingerprint(),
        "sources": [describe_source(s, f"prompts.sources[{i}]") for i, s in enumerate(sources_of(recipe.prompts))],
        "evaluation": evaluation_sets(recipe),
        "prompts": {k: v for k, v in asdict(recipe.prompts).items() if k != "sources"},
        "generation": content_settings(recipe.generation), "trace": trace_settings(recipe.trace, target.layers),
        "validation_draft_length": recipe.train.validation_draft_length,
    }


def explicit(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a mode that is not named written out, for messages."""
    return settings | {"trace": {"mode": "store"} | (settings.get("trace") or {})}


def make_folders(folder: Path) -> None:
    """The trace folder and its parts. ConfigError where it cannot be written."""
    with written(folder):
        for part in ("prompts", "answers", "shards"):
            (folder / part).mkdir(parents=True, exist_ok=True)


def check_recipe(folder: Path, recipe: Recipe, layers: list[int]) -> None:
    """ConfigError where the finished traces of `folder` were collected with another trace or generation section than
    the recipe's, which would stand in the run's record as theirs (case 30). A folder without settings passes; the log
    that answers came from need not be there any more."""
    path = folder / "settings.json"
    if not path.exists():
        return
    earlier = read_settings(path, folder)
    now = {"generation": content_settings(recipe.generation), "trace": trace_settings(recipe.trace, layers)}
    for section in (now["generation"], earlier.get("generation") or {}):
        section.pop("sha256", None)
    changed = difference(explicit({name: earlier.get(name) for name in now}), explicit(now))
    if changed:
        raise ConfigError(f"{folder}: traced with other settings: {changed}; train with those, or run `make trace` "
                          "under another name")


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where the file is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_settings(path: Path, folder: Path) -> dict[str, Any]:
    """The settings of a trace folder. RunError where they cannot be read."""
    stored = read_object(path)
    if stored is None:
        raise RunError(f"{path}: missing or unreadable; delete {folder} to start over")
    return stored


def claim(folder: Path, settings: dict[str, Any]) -> bool:
    """Takes the folder for these settings, or says which setting an earlier run had otherwise. True where nothing was
    collected there yet. To be called by one run at a time, before it changes anything else there."""
    path = folder / "settings.json"
    empty = not {".json", ".jsonl"} & {p.suffix for p in folder.glob("*/*")}
    if empty:
        with written(folder):
            write_json(path, settings)
    earlier = read_settings(path, folder)
    changed = difference(explicit(earlier), explicit(settings))
    if changed:
        raise ConfigError(f"{folder}: traced earlier with other settings: {changed}; "
                          "use another `name` or delete that folder")
    return empty
