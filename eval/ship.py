"""`make export`: writes the trained drafter in the layouts engines load, and proves that what was written serves.

Run as `python -m eval.ship --config RECIPE`. The proof: an independent reader that shares no code with the
trainer decodes held-out prompts from the written files, and must reproduce tokens and acceptance of our loop.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from data.reader import open_manifest
from drafters import checkpoint
from drafters.export.write import export_native
from drafters.placement import on_one_process
from drafters.registry import require_training
from drafters.target import Target
from eval.decode import Decoder
from eval.metrics import Acceptance
from eval.reader import read_acceptance
from eval.run import spread
from recipes.cli import Command, process, run_dir
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sha256_json, write_json
from recipes.schema import Recipe

WRITERS: dict[str, Callable[[Path, Path, str, list[int], dict[str, Any]], Path]] = {"native": export_native}
CHECK = "check.json"


def compare(recipe: Recipe, target: Target, source: Path, exported: Path) -> dict[str, Any]:
    """Acceptance per position of our loop and of the reader, on the same held-out prompts, greedy.

    RunError where they differ by more than export.tolerance: the files would not serve what was trained (case 12).
    """
    section, K = recipe.export, recipe.eval.draft_length
    prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
    chosen = [prompts[i] for i in spread(prompts, section.check_prompts)]
    ids = [prompt_ids(target.tokenizer, p.messages, p.tools) for p in chosen]
    drafter = checkpoint.load(source, target)
    outputs = Decoder(target, section.check_tokens).speculative(ids, drafter, K)
    ours = sum((o.acceptance for o in outputs), Acceptance(K))
    reading = read_acceptance(exported, target.model, ids, K, section.check_tokens, target.end_ids)
    theirs = Acceptance(K, reading.drafts, list(reading.accepted_per_position))
    same = sum(a.tokens == b for a, b in zip(outputs, reading.tokens))
    worst = max(abs(a - b) for a, b in zip(ours.per_position, theirs.per_position))
    if worst > section.tolerance:
        raise RunError(f"{exported}: an independent reader accepts {rounded(theirs)} per position where our loop "
                       f"accepts {rounded(ours)} (export.tolerance = {section.tolerance}); the export does not serve "
                       "what was trained")
    return {"prompts": len(ids), "drafts": ours.drafts, "loop": ours.per_position, "reader": theirs.per_position,
            "mean_length": {"loop": ours.mean_length, "reader": theirs.mean_length}, "same_text": same}


def rounded(counts: Acceptance) -> list[float]:
    return [round(x, 3) for x in counts.per_position]


def export(recipe: Recipe, folder: Path, layout: str, target: Target, layers: list[int]) -> Path:
    """Writes and proves one layout; does nothing where the same checkpoint was exported and proven before."""
    if layout not in WRITERS:
        raise ConfigError(f"export.formats: {layout!r}: unknown; known layouts: {', '.join(WRITERS)}")
    require_training(recipe.drafter.kind)
    source = checkpoint.chosen(recipe.drafter.path, folder)
    weights = source / checkpoint.WEIGHTS
    if not weights.is_file():
        raise ConfigError(f"{weights}: no such checkpoint")
    out, proof = folder / "export" / layout, folder / "export" / f"{layout}-{CHECK}"
    key = sha256_json([sha256_file(weights), asdict(recipe.export), recipe.eval.prompts, recipe.eval.draft_length])
    if (out / "model.safetensors").is_file() and proven(proof, key, sha256_file(out / "model.safetensors")):
        print(f"exported before: {out}")
        return out
    WRITERS[layout](source, out, recipe.export.dtype, layers, target.fingerprint())
    result = compare(recipe, target, source, out) if recipe.export.check else {}
    write_json(proof, {"key": key, "sha256": sha256_file(out / "model.safetensors"), **result})
    print(f"exported: {out}")
    if result:
        print(f"independent reader: mean acceptance length {result['mean_length']['reader']:.3f}, our loop "
              f"{result['mean_length']['loop']:.3f}, same text on {result['same_text']} of {result['prompts']} prompts")
    return out


def proven(proof: Path, key: str, sha256: str) -> bool:
    try:
        stored = json.loads(proof.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stored.get("key") == key and stored.get("sha256") == sha256


def main(recipe: Recipe, switches: set[str]) -> None:
    folder = run_dir(recipe)
    target = Target(on_one_process(recipe.target), recipe.trace.layers)
    layers = target.layers
    if not recipe.drafter.path:
        layers = open_manifest(recipe.trace, folder)["layers"]
    for layout in recipe.export.formats:
        export(recipe, folder, layout, target, layers)


COMMAND = Command("make export", "Writes a trained drafter in the layouts that engines load.", main)

if __name__ == "__main__":
    process(COMMAND)
