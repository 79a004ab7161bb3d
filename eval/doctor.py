"""`make doctor`: where training, our loop, the second reader and a real engine part, stage by stage.

Run as `python -m eval.doctor --config RECIPE`. Every stage is compared between all that know it, in the order in which
numbers are made; the first that departs is named. Writes runs/<name>/doctor/report.json (docs/doctor.md).
"""

import gc
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from data.reader import open_rows, with_states
from drafters import checkpoint, imported
from drafters.export.engines import method_of
from drafters.export.serving import speculation
from drafters.placement import on_one_process
from drafters.registry import entry
from drafters.target import Target
from eval.departures import Finding, alone, compare_all, precision
from eval.engine_run import Job, job_for, offline
from eval.figures import spread
from eval.plans import check_longest
from eval.ship import check_formats, exports_here, loaded_by_vllm
from eval.witnesses import Evidence, engine, loop, second_reader, training
from recipes.cli import Command, process, run_folder
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, write_json
from recipes.schema import PositiveInt, Recipe, opt

SCHEMA = "drafthouse.doctor/1"


@dataclass
class Options:
    """What `make doctor` is told besides the recipe."""

    rows: PositiveInt = opt(3, "validation rows of the traces that are compared")
    prompts: PositiveInt = opt(4, "evaluation prompts that loop, reader and engine answer")
    starts: PositiveInt = opt(3, "positions of a row from which drafts are compared, step by step")
    python: str = opt("", "an interpreter with vLLM, e.g. .venv-vllm/bin/python; empty leaves the engine out")


def examine(recipe: Recipe, options: Options, folder: Path) -> list[Evidence]:
    """Every witness that this run has."""
    check_formats(recipe)
    engines = loaded_by_vllm(recipe.export.formats) if options.python else []
    evidence, job, exports = examine_here(recipe, options, folder)
    gc.collect()  # the target, whose hooks refer to it: an engine needs the memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    place, threads = folder / "doctor", recipe.target.threads or 2
    place.mkdir(exist_ok=True)
    names = list(next(one for one in evidence if one.name == "loop").counted["prompts"])
    for layout in (one for one in engines if one in exports):
        told = speculation(str(exports[layout].resolve()), job.drafted, method_of(layout),
                           recipe.drafter.kind == "parallel")
        answers = offline(options.python, replace(job, speculation=told), threads, place / f"{layout}.log")
        evidence.append(engine(answers, f"vLLM with {layout}", names))
    if len(evidence) == 1:
        raise ConfigError(f"{folder}: neither traces nor an export to compare with; run `make export` first")
    return evidence


def examine_here(recipe: Recipe, options: Options, folder: Path) -> tuple[list[Evidence], Job, dict[str, Path]]:
    """The witnesses of this process, what an engine is to do, and the exports that it is to do it with."""
    target = Target(on_one_process(recipe.target), entry(recipe.drafter.kind).shown(recipe.trace.layers))
    source = imported.chosen(recipe.drafter, folder, target)
    drafter = checkpoint.load(source, target)
    K, max_tokens = recipe.eval.draft_length, recipe.export.check_tokens
    check_longest(K, drafter, "eval.draft_length")
    prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
    chosen = [prompts[i] for i in spread(prompts, options.prompts)]
    ids = {f"prompt {p.id}": prompt_ids(target.tokenizer, p.messages, p.tools) for p in chosen}
    evidence, rows = [], []
    if not recipe.drafter.path:
        reader = with_states(open_rows(recipe.trace, folder), recipe.trace, folder, target)
        rows = [reader[i] for i in reader.split("validation")[: options.rows]]
        evidence.append(training(drafter, reader, rows, K, options.starts, target))
    evidence.append(loop(drafter, target, rows, ids, K, options.starts, max_tokens))
    for one in evidence:
        one.checkpoint = sha256_file(source / checkpoint.WEIGHTS)
    exports = exports_here(recipe, folder)
    for layout, out in exports.items():
        evidence.append(second_reader(out, layout, target, rows, ids, K, options.starts, max_tokens))
    job = job_for(target, list(ids.values()), max_tokens, K, {"enforce_eager": True}, [p.messages for p in chosen])
    return evidence, job, exports


def main(recipe: Recipe, switches: set[str], options: Options) -> None:
    if options.python and not shutil.which(options.python):
        raise ConfigError(f"--python {options.python}: no such program")
    folder = run_folder(recipe)
    evidence = examine(recipe, options, folder)
    findings = compare_all(evidence, recipe.eval.gap_tolerance)
    first, unseen = next((finding for finding in findings if finding.departs), None), alone(findings)
    show(findings)
    write_json(folder / "doctor" / "report.json", {
        "schema": SCHEMA, "witnesses": [one.name for one in evidence], "dtype": precision(*evidence),
        "first": None if first is None else readable(first), "findings": [readable(f) for f in findings],
        "not_compared": unseen})
    if unseen:
        print(f"no second witness at: {', '.join(unseen)}")
    if first is not None:
        raise RunError(f"{first.stage}: {first.between} depart: {first.text or f'{first.difference:.3g}'} (difference "
                       f"{first.difference:.3g}, {first.allowed:.3g} allowed); later stages follow from it")
    print(f"{', '.join(one.name for one in evidence)} agree at every stage"
          f"{' that two of them know' if unseen else ''}")


def readable(finding: Finding) -> dict[str, Any]:
    """A finding for JSON, which has no infinity."""
    return asdict(finding) | {"departs": finding.departs,
                              "difference": min(finding.difference, 1e30) if finding.difference == finding.difference
                              else 1e30}


def show(findings: list[Finding]) -> None:
    table = Table("stage", "between", "difference", "allowed", "")
    for f in findings:
        table.add_row(f.stage, Text(f.between), f"{f.difference:.3g}", f"{f.allowed:.3g}",
                      Text("DEPARTS " + f.text if f.departs else "same", style="bold" if f.departs else ""))
    Console().print(table)


COMMAND = Command("make doctor", "Compares training, loop, second reader and engine stage by stage.", main,
                  options=Options)

if __name__ == "__main__":
    process(COMMAND)
