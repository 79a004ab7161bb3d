"""`make export`: writes the trained drafter in the layouts engines load, and proves that what was written serves.

Run as `python -m eval.ship --config RECIPE`. The proof: an independent reader that shares no code with the
trainer decodes held-out prompts from the written files, and must reproduce tokens and acceptance of our loop.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.batching import collate
from data.chat import prompt_ids
from data.evalsets import read_sets
from data.prompts import evaluation_prompts
from data.reader import open_manifest, open_rows, with_states
from drafters import checkpoint, imported
from drafters.export.check import read_config
from drafters.export.engines import ENGINES, serving
from drafters.export.layouts import LAYOUTS, Served, layouts_of
from drafters.export.untrained import METHODS, serving_files
from drafters.export.write import CONFIG, ORIGIN, check_folder, export_layout, same_drafter
from drafters.placement import on_one_process
from drafters.registry import entry, require_training
from drafters.target import Target
from eval.decode import Decoder
from eval.earlier import key_of
from eval.figures import spread
from eval.metrics import Acceptance
from eval.plans import check_longest, plan_of
from eval.reader import read_acceptance
from eval.replay import walk
from eval.witnesses import answer_of, row_prompt, walked
from recipes.cli import Command, process, run_folder, write_resolved
from recipes.errors import ConfigError, RunError
from recipes.files import one_at_a_time, sha256_file, sha256_json, write_json, write_text
from recipes.schema import Recipe

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
    check_longest(K, drafter, "eval.draft_length")
    outputs = Decoder(target, section.check_tokens).speculative(ids, drafter, K)
    ours = sum((o.acceptance for o in outputs), Acceptance(K))
    reading = read_acceptance(exported, target.model, ids, K, section.check_tokens, target.end_ids)
    theirs = Acceptance(K, reading.drafts, list(reading.accepted_per_position))
    same = sum(a.tokens == b for a, b in zip(outputs, reading.tokens))
    worst = max(abs(a - b) for a, b in zip(ours.per_position, theirs.per_position))
    if not ours.drafts or not theirs.drafts:
        raise RunError(f"{exported}: {ours.drafts} drafts by our loop and {theirs.drafts} by the independent reader: "
                       "nothing was compared; set export.check_tokens to 2 or more, or choose other eval.prompts")
    if not worst <= section.tolerance:
        raise RunError(f"{exported}: an independent reader accepts {rounded(theirs)} per position where our loop "
                       f"accepts {rounded(ours)} (export.tolerance = {section.tolerance}); the export does not serve "
                       "what was trained")
    return {"prompts": len(ids), "drafts": ours.drafts, "loop": ours.per_position, "reader": theirs.per_position,
            "mean_length": {"loop": ours.mean_length, "reader": theirs.mean_length}, "same_text": same}


def compare_validation(recipe: Recipe, folder: Path, target: Target, source: Path, exported: Path) -> dict[str, Any]:
    """Acceptance by validation's replay over stored rows, and by the reader that answers their prompts itself.

    RunError where they are apart at position 1: what training reported would not be served (case 12). One draft more
    than export.tolerance may fall the other way, at a near-tie; a row that the reader answers otherwise is left out.
    """
    section, K = recipe.export, min(recipe.eval.draft_length, recipe.train.validation_draft_length)
    reader = with_states(open_rows(recipe.trace, folder), recipe.trace, folder, target)
    rows = [row for row in map(reader.__getitem__, reader.split("validation")) if walked(row, K)]
    drafter, ours, theirs, parted = checkpoint.load(source, target), Acceptance(K), Acceptance(K), 0
    for row in (rows[i] for i in spread(rows, section.check_prompts)):
        answer = answer_of(row)
        asked, later = answer[: section.check_tokens], answer[section.check_tokens :]
        reading = read_acceptance(exported, target.model, [row_prompt(row)], K, len(asked), target.end_ids)
        if reading.tokens != [asked]:
            parted += 1
            continue
        with torch.no_grad():
            tokens, _, valid = drafter.chains(collate([row]).to(target.device, target.dtype), K)
        ours = ours + walk(tokens[0][valid[0]].tolist(), asked, later + row.tail, K)
        theirs = theirs + Acceptance(K, reading.drafts, list(reading.accepted_per_position))
    if not ours.drafts:
        raise RunError(f"{exported}: no validation row could be compared ({parted} of {len(rows)} are answered "
                       "otherwise now): `make doctor` names the stage")
    apart = abs(ours.per_position[0] - theirs.per_position[0])
    if not apart <= section.tolerance + 1 / ours.drafts:
        raise RunError(f"{exported}: at position 1 validation accepts {ours.per_position[0]:.3f} and an independent "
                       f"reader {theirs.per_position[0]:.3f} of the same rows (allowed: export.tolerance = "
                       f"{section.tolerance} and one draft): what training reported would not be served; "
                       "`make doctor` names the stage")
    return {"drafts": ours.drafts, "replay": ours.per_position, "reader": theirs.per_position, "parted": parted}


def rounded(counts: Acceptance) -> list[float]:
    return [round(x, 3) for x in counts.per_position]


def check_engines(recipe: Recipe, layout: str, keys: dict[str, Any], target_layers: int) -> dict[str, list[str]]:
    """Each engine's reasons not to serve the drafter in this layout, empty for those that do.

    RunError where an engine of export.engines would serve another drafter in every layout that is written (case 47).
    """
    reasons = serving(layout, keys, target_layers)
    for engine in recipe.export.engines:
        others = [name for name in recipe.export.formats if name in ENGINES[engine].layouts]
        if reasons[engine] and layout in (others or [layout]):
            raise RunError(f"export.engines: {engine}: {'; '.join(reasons[engine])}; take it out of export.engines, or "
                           "train without it")
    return reasons


def served(recipe: Recipe, target: Target, layers: list[int]) -> Served:
    """What the layouts state of this target."""
    return Served(layers, target.fingerprint(), target.embedding.cpu(), list(target.model.config.architectures or []),
                  recipe.eval.draft_length, target.head_weight.cpu())


def export(recipe: Recipe, folder: Path, layout: str, target: Target, layers: list[int], again: bool = False) -> Path:
    """Writes and proves one layout; does nothing where the same checkpoint was exported and proven before, which
    `again` proves once more."""
    require_training(recipe.drafter.kind)
    source = imported.chosen(recipe.drafter, folder, target)
    weights = source / checkpoint.WEIGHTS
    if not weights.is_file():
        raise ConfigError(f"{weights}: no such checkpoint")
    out, proof = folder / "export" / layout, folder / "export" / f"{layout}-{CHECK}"
    settings = asdict(recipe.export) | {"formats": [], "draft_length": recipe.eval.draft_length,
                                        "validation": recipe.train.validation_draft_length}
    digest = checkpoint.digest_of(sha256_file(weights), checkpoint.read_meta(source))
    key = sha256_json([digest, settings, recipe.eval.prompts, target.fingerprint()])
    if proven(proof, key, digests(out)) and not again:
        print(f"exported before: {out}")
        return out
    if not again:
        export_layout(layout, source, out, recipe.export.dtype, served(recipe, target, layers))
    check_folder(out, layout)
    same_drafter(out, LAYOUTS[layout], checkpoint.read_meta(source), checkpoint.read_tensors(source),
                 recipe.export.dtype, served(recipe, target, layers))
    if read_config(out / ORIGIN)["checkpoint_sha256"] != sha256_file(weights):
        raise RunError(f"{out}: was exported from another checkpoint than {source}; run `make export` without --check")
    keys, meta = LAYOUTS[layout].flat(read_config(out / CONFIG)), checkpoint.read_meta(source)
    engines = check_engines(recipe, layout, keys, meta["shape"]["target_layers"])
    result = compare(recipe, target, source, out) if recipe.export.check else {}
    if result and not recipe.drafter.path:
        result["validation"] = compare_validation(recipe, folder, target, source, out)
    write_json(proof, {"key": key, "files": digests(out), "engines": engines, **result})
    print(f"{'checked' if again else 'exported'}: {out}")
    for engine, reasons in engines.items():
        print(f"  {ENGINES[engine].title}: {'serves it' if not reasons else 'does not: ' + '; '.join(reasons)}")
    if result:
        print(f"independent reader: mean acceptance length {result['mean_length']['reader']:.3f}, our loop "
              f"{result['mean_length']['loop']:.3f}, same text on {result['same_text']} of {result['prompts']} prompts")
    return out


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of an export; empty where there is none."""
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def exports_here(recipe: Recipe, folder: Path) -> dict[str, Path]:
    """The folders of export.formats that were written."""
    found = {layout: folder / "export" / layout for layout in recipe.export.formats}
    return {layout: out for layout, out in found.items() if (out / LAYOUTS[layout].weights).is_file()}


def proven(proof: Path, key: str | None, files: dict[str, str]) -> bool:
    """Whether exactly these files were checked, with the settings of `key` (None: whichever)."""
    try:
        stored = json.loads(proof.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    written = any(name.endswith(".safetensors") for name in files)
    return written and key in (None, stored.get("key")) and stored.get("files") == files


def evaluated_as(origin: dict[str, Any], report: dict[str, Any], recipe: Recipe, run: Path,
                 fingerprint: dict[str, str]) -> bool:
    """Whether a report is of the checkpoint that an export (`origin`: its provenance.json) was made from, with the
    recipe's evaluation prompts and settings and this target (cases 36, 50)."""
    return evaluated(checkpoint.digest_of(origin["checkpoint_sha256"], origin), report, recipe, run, fingerprint)


def evaluated(digest: str, report: dict[str, Any], recipe: Recipe, run: Path, fingerprint: dict[str, str]) -> bool:
    """Whether a report is of the drafter with this digest (imported.Opened), as the recipe evaluates it."""
    sets = read_sets(recipe.eval, run / "eval" / "sets", recipe.prompts.max_bad_share)
    return report["settings"].get("key") == key_of(digest, recipe.eval, sets, fingerprint)


def check_formats(recipe: Recipe) -> None:
    """ConfigError, with its value, where export.formats names what is no layout, or none of the recipe's kind."""
    formats, kind = recipe.export.formats, recipe.drafter.kind
    if set(formats) - LAYOUTS.keys():
        raise ConfigError(f"export.formats = {formats}: known layouts: {', '.join(LAYOUTS)}")
    own = layouts_of(kind)
    if entry(kind).trained and set(formats) - set(own):
        raise ConfigError(f"export.formats = {formats}: a drafter of kind {kind} has the layouts {', '.join(own)}")


def loaded_by_vllm(formats: list[str]) -> list[str]:
    """Those of these layouts that vLLM loads; the others are named in a line. ConfigError where none is left."""
    loads = ENGINES["vllm"].layouts
    left, others = ([one for one in formats if (one in loads) == loaded] for loaded in (True, False))
    if not left:
        raise ConfigError(f"export.formats = {formats}: vLLM loads none of these; it loads {', '.join(loads)}")
    if others:
        print(f"vLLM does not load {', '.join(others)}: left out")
    return left


def main(recipe: Recipe, switches: set[str]) -> None:
    check_formats(recipe)
    if not recipe.export.formats:
        raise ConfigError(f"export.formats = []: known layouts: {', '.join(LAYOUTS)}")
    folder = run_folder(recipe)
    with one_at_a_time(folder / "export"):
        if recipe.drafter.kind in METHODS:
            export_config(recipe, folder / "export" / "vllm")
        else:
            export_all(recipe, folder, again="check" in switches)


def export_config(recipe: Recipe, out: Path) -> None:
    """What serves a drafter without training: its config alone."""
    plan = plan_of(recipe.eval, recipe.drafter.kind, recipe.drafter.options)
    if not plan.narrow or recipe.eval.choose != "given":
        raise ConfigError("eval.tree, eval.choose: vLLM serves chains of this drafter, of a length that is known; set "
                          "eval.draft_length, and the others to their defaults")
    files = serving_files(recipe.drafter.kind, recipe.drafter.options, plan.depth, recipe.target.model)
    out.mkdir(parents=True, exist_ok=True)
    write_resolved(recipe, ["export"])
    for name, text in files.items():
        write_text(out / name, text)
    print(f"exported: {out}: there is nothing to load, vLLM drafts by this config")


def export_all(recipe: Recipe, folder: Path, again: bool) -> None:
    """Every layout of export.formats, in a run's folder whose exports are this process's alone."""
    require_training(recipe.drafter.kind)
    read = entry(recipe.drafter.kind)
    target = Target(on_one_process(recipe.target), read.shown(recipe.trace.layers))
    imported.chosen(recipe.drafter, folder, target)  # taps the target where the drafter says it is to be tapped
    layers = target.layers
    if not recipe.drafter.path and read.reads == "taps":
        layers = open_manifest(recipe.trace, folder)["layers"]
    write_resolved(recipe, ["export"])
    for layout in recipe.export.formats:
        export(recipe, folder, layout, target, layers, again)


COMMAND = Command("make export", "Writes a trained drafter in the layouts that engines load.", main,
                  {"check": "write nothing: check what was exported before once more"})

if __name__ == "__main__":
    process(COMMAND)
