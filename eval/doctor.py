"""`make doctor`: where training, our loop, the second reader and a real engine part, stage by stage.

Run as `python -m eval.doctor --config RECIPE`. Every stage is compared between all that know it, in the order in which
numbers are made; the first that departs is named. Writes runs/<name>/doctor/report.json (docs/doctor.md).
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.chat import prompt_ids
from data.compare import NOISE
from data.prompts import evaluation_prompts
from data.reader import open_rows, with_states
from drafters import checkpoint, imported
from drafters.placement import on_one_process
from drafters.target import Target
from eval.engine_run import Job, offline
from eval.run import spread
from eval.ship import exports_here
from eval.witnesses import Evidence, engine, loop, second_reader, training
from recipes.cli import Command, process, run_dir
from recipes.errors import ConfigError, RunError
from recipes.files import write_json
from recipes.schema import Recipe, opt

# Largest difference of a draft's probability by the coarsest precision at work.
DRAFT_NOISE = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
ORDER = ("float64", "float32", "float16", "bfloat16")
TOLERANCE = 0.02  # of an acceptance per position, as make serve-check
SCHEMA = "drafthouse.doctor/1"


@dataclass
class Options:
    """What `make doctor` is told besides the recipe."""

    rows: PositiveInt = opt(3, "validation rows of the traces that are compared")
    prompts: PositiveInt = opt(4, "evaluation prompts that loop, reader and engine answer")
    starts: PositiveInt = opt(3, "positions of a row from which drafts are compared, step by step")
    python: str = opt("", "an interpreter with vLLM, e.g. .venv-vllm/bin/python; empty leaves the engine out")


@dataclass
class Finding:
    """One comparison. `difference` and `allowed` are in the unit of the stage; text says where the largest one is."""

    stage: str
    between: str
    difference: float
    allowed: float
    text: str = ""

    @property
    def departs(self) -> bool:
        return not self.difference <= self.allowed


def compare_all(evidence: list[Evidence], dtype: str, tie_gap: float) -> list[Finding]:
    """Every stage between each neighbouring pair of witnesses that know it, in the order of the pipeline.

    dtype: the coarsest precision at work.
    """
    found: list[Finding] = []
    for stage, field, compare in (
            ("dtype", "dtypes", same_dtypes), ("vocabulary", "vocabulary", same_list), ("layers", "layers", same_list),
            ("positions", "frequencies", close_frequencies), ("token ids", "ids", same_rows),
            ("layer states", "states", close_states), ("teacher", "teacher", same_teacher),
            ("drafter logits", "drafts", close_drafts), ("acceptance", "acceptance", close_acceptance)):
        knowing = [one for one in evidence if getattr(one, field) not in (None, {})
                   and (not isinstance(getattr(one, field), list) or getattr(one, field))]
        if field == "dtypes":
            found += compare(knowing)
            continue
        pairs = pairwise(knowing) if field not in ("ids", "teacher", "acceptance") else (
            (a, b) for i, a in enumerate(knowing) for b in knowing[i + 1 :]
            if getattr(a, field).keys() & getattr(b, field).keys())
        for a, b in pairs:
            for part in compare(getattr(a, field), getattr(b, field), a, b, dtype, tie_gap):
                found.append(Finding(stage + part.stage, f"{a.name} and {b.name}", part.difference, part.allowed,
                                     part.text))
    return found


def same_dtypes(knowing: list[Evidence]) -> Iterator[Finding]:
    """Traces and target in one precision (case 48); an export in a lower one is a choice, and said."""
    said = [(one.name, what, dtype) for one in knowing for what, dtype in one.dtypes.items()]
    for (a, what_a, x), (b, what_b, y) in pairwise(said):
        chosen = "export" in (what_a, what_b)
        yield Finding("dtype", f"{a} and {b}", float(x != y), float(chosen), f"{what_a}: {x}, {what_b}: {y}")


def same_list(a: list, b: list, *_) -> Iterator[Finding]:
    places = [i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]]
    text = f"first at {places[0]}: {a[places[0] : places[0] + 1]} and {b[places[0] : places[0] + 1]}" if places else ""
    yield Finding("", "", float(len(places)), 0.0, text)


def close_frequencies(a: torch.Tensor, b: torch.Tensor, *_) -> Iterator[Finding]:
    """Rotary inverse frequencies, as a share (case 32)."""
    if a.shape != b.shape:
        yield Finding("", "", float("inf"), 1e-5, f"{len(a)} and {len(b)} rotated pairs")
        return
    yield Finding("", "", float(((a - b).abs() / a.abs().clamp_min(1e-12)).max()), 1e-5)


def same_rows(a: dict[str, list[int]], b: dict[str, list[int]], *_) -> Iterator[Finding]:
    """Token ids of the rows or prompts that both know (case 45)."""
    for name in (name for name in a if name in b):
        part = next(same_list(a[name], b[name]))
        if part.difference:
            yield Finding("", "", part.difference, 0.0, f"row {name}: {part.text}")
            return
    yield Finding("", "", 0.0, 0.0)


def close_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], first: Evidence, second: Evidence, dtype: str,
                 gap: float) -> Iterator[Finding]:
    """States entering the tapped layers, each relative to its layer's largest number in the row (cases 01, 08)."""
    allowed = NOISE.get(getattr(torch, dtype), 1e-6)
    n = len(first.layers or second.layers)
    worst, text = 0.0, ""
    for name in (name for name in a if name in b):
        if a[name].shape != b[name].shape:
            yield Finding("", "", float("inf"), allowed, f"row {name}: {[*a[name].shape]} and {[*b[name].shape]}")
            return
        ours, theirs = (x.unflatten(1, (n, -1)) for x in (a[name], b[name]))  # [T, n, H]
        share = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1).clamp_min(1e-12)  # [T, n]
        if not float(share.max()) <= worst:
            worst = float(share.max())
            token, tap = divmod(int(share.argmax()), n)
            text = f"row {name}, token {token}, tap {tap} (layer {(first.layers or second.layers)[tap]})"
    yield Finding("", "", worst, allowed, text)


def same_teacher(a: dict[str, list[int]], b: dict[str, list[int]], first: Evidence, second: Evidence, dtype: str,
                 gap: float) -> Iterator[Finding]:
    """Greedy tokens; a first difference where the target's top two are closer than `gap` is a near-tie (case 59)."""
    for name in (name for name in a if name in b):
        at = next((i for i, pair in enumerate(zip(a[name], b[name])) if pair[0] != pair[1]), None)
        if at is None and len(a[name]) == len(b[name]):
            continue
        gaps = first.gaps.get(name) or second.gaps.get(name) or []
        if at is not None and at < len(gaps) and gaps[at] < gap:
            continue
        at = min(len(a[name]), len(b[name])) if at is None else at
        yield Finding("", "", 1.0, 0.0, f"row {name}, answer token {at}: {a[name][at : at + 1]} and "
                                        f"{b[name][at : at + 1]}")
        return
    yield Finding("", "", 0.0, 0.0)


def close_drafts(a: dict, b: dict, first: Evidence, second: Evidence, dtype: str, gap: float) -> Iterator[Finding]:
    """Probabilities of each step; a step is compared where all earlier ones drafted alike."""
    K = len(next(iter(a.values())))
    for k in range(K):
        worst, text = 0.0, ""
        for key in (key for key in a if key in b):
            one, two = a[key], b[key]
            if one.shape != two.shape:
                text = f"{one.shape[1]} and {two.shape[1]} draft ids"
                yield Finding(f" at step {k + 1}", "", float("inf"), 0.0, text)
                return
            if k and not torch.equal(one[:k].argmax(-1), two[:k].argmax(-1)):
                continue
            difference = float((one[k].exp() - two[k].exp()).abs().max())
            if not difference <= worst:
                worst, text = difference, f"row {key[0]}, position {key[1]}"
        yield Finding(f" at step {k + 1}", "", worst, DRAFT_NOISE[dtype], text)


def close_acceptance(a: dict, b: dict, *_) -> Iterator[Finding]:
    """Acceptance per position on the rows or prompts that both decoded (case 12)."""
    for what in (what for what in a if what in b):
        one, two = a[what], b[what]
        text = f"on {what}: {[round(x, 3) for x in one.per_position]} and {[round(x, 3) for x in two.per_position]}"
        same_length = len(one.accepted) == len(two.accepted)
        worst = max((abs(x - y) for x, y in zip(one.per_position, two.per_position)), default=0.0)
        yield Finding("", "", worst if same_length else float("inf"), TOLERANCE, text)


def examine(recipe: Recipe, options: Options, folder) -> tuple[list[Evidence], str]:
    """Every witness that this run has, and the coarsest precision at work."""
    target = Target(on_one_process(recipe.target), recipe.trace.layers)
    source = imported.chosen(recipe.drafter, folder, target)
    drafter = checkpoint.load(source, target)
    K, max_tokens = recipe.eval.draft_length, recipe.export.check_tokens
    prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
    chosen = [prompts[i] for i in spread(prompts, options.prompts)]
    ids = {f"prompt {p.id}": prompt_ids(target.tokenizer, p.messages, p.tools) for p in chosen}
    evidence, rows = [], []
    if not recipe.drafter.path:
        reader = with_states(open_rows(recipe.trace, folder), recipe.trace, folder, target)
        rows = [reader[i] for i in reader.split("validation")[: options.rows]]
        evidence.append(training(drafter, reader, rows, K, options.starts, target, not recipe.generation.temperature))
    evidence.append(loop(drafter, target, rows, ids, K, options.starts, max_tokens))
    dtypes = [recipe.target.dtype, recipe.export.dtype]
    for layout, out in exports_here(recipe, folder).items():
        evidence.append(second_reader(out, layout, target, rows, ids, K, options.starts, max_tokens))
        if options.python:
            job = Job(target.path, str(out.resolve()), K, list(ids.values()), max_tokens, target.end_ids,
                      recipe.target.dtype, {"enforce_eager": True, "max_model_len": min(target.max_length, 2048)},
                      [p.messages for p in chosen], recipe.drafter.kind == "parallel")
            (folder / "doctor").mkdir(exist_ok=True)
            log = folder / "doctor" / f"{layout}.log"
            threads = recipe.target.threads or 2
            evidence.append(engine(lambda job=job, log=log, threads=threads: offline(options.python, job, threads, log),
                                   f"vLLM with {layout}", ids))
    if len(evidence) == 1:
        raise ConfigError(f"{folder}: neither traces nor an export to compare with; run `make export` first")
    return evidence, max(dtypes, key=ORDER.index)


def main(recipe: Recipe, switches: set[str], options: Options) -> None:
    if options.python and not shutil.which(options.python):
        raise ConfigError(f"--python {options.python}: no such program")
    folder = run_dir(recipe)
    evidence, dtype = examine(recipe, options, folder)
    findings = compare_all(evidence, dtype, recipe.eval.gap_tolerance)
    first = next((finding for finding in findings if finding.departs), None)
    show(findings)
    (folder / "doctor").mkdir(exist_ok=True)
    write_json(folder / "doctor" / "report.json", {
        "schema": SCHEMA, "witnesses": [one.name for one in evidence], "dtype": dtype,
        "first": None if first is None else readable(first), "findings": [readable(f) for f in findings]})
    if first is not None:
        raise RunError(f"{first.stage}: {first.between} depart: {first.text or f'{first.difference:.3g}'} (difference "
                       f"{first.difference:.3g}, {first.allowed:.3g} allowed); later stages follow from it")
    print(f"{', '.join(one.name for one in evidence)} agree at every stage")


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
