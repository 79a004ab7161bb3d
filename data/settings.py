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
from recipes.files import write_json
from recipes.provenance import difference
from recipes.schema import Recipe

HARMLESS = ("verify_rows", "verify_seed", "engine_python")  # fields of `trace` that change no content


def describe(recipe: Recipe, target: Target) -> dict[str, Any]:
    """Everything that decides the traces' content: another value is another trace set (case 30)."""
    trace = {k: v for k, v in asdict(recipe.trace).items() if k not in HARMLESS}
    if recipe.trace.backend == "transformers":  # as in traces made before there was another
        del trace["backend"], trace["engine"]
    return {
        "target": target.fingerprint(),
        "sources": [describe_source(s, f"prompts.sources[{i}]") for i, s in enumerate(sources_of(recipe.prompts))],
        "evaluation": evaluation_sets(recipe),
        "prompts": {k: v for k, v in asdict(recipe.prompts).items() if k != "sources"},
        "generation": content_settings(recipe.generation), "trace": trace | {"layers": target.layers},
        "validation_draft_length": recipe.train.validation_draft_length,
    }


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Takes the folder for these settings, or says which setting an earlier run had otherwise."""
    path = folder / "settings.json"
    try:
        for part in ("prompts", "answers", "shards"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        if not {".json", ".jsonl"} & {p.suffix for p in folder.glob("*/*")}:  # nothing was collected yet
            write_json(path, settings)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error.strerror}") from None
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError(f"{path}: missing or unreadable; delete {folder} to start over") from None
    changed = difference(earlier, settings)
    if changed:
        raise ConfigError(f"{folder}: traced earlier with other settings: {changed}; "
                          "use another `name` or delete that folder")
