"""`make serve-check`: a real vLLM serves the exported drafter, and its acceptance is the report's.

Run as `python -m eval.serve_check --config RECIPE`. Every layout of export.formats that vLLM loads is served in a
process and over HTTP, on the prompts of eval/report.json; a drafter that needs no training is served by vLLM's own
method for it. Writes runs/<name>/serve/report.json (docs/serve-check.md).
"""

import gc
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from drafters import imported
from drafters.export.check import read_config
from drafters.export.engines import method_of
from drafters.export.serving import speculation
from drafters.export.write import ORIGIN
from drafters.placement import on_the_cpu
from drafters.registry import entry, require_serving
from drafters.target import Target
from eval.engine_run import Answers, Job, job_for, offline, over_http
from eval.plans import in_words
from eval.settings import beyond_greedy
from eval.ship import CHECK, check_formats, digests, evaluated, evaluated_as, loaded_by_vllm, proven
from recipes.cli import Command, process, run_folder
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sha256_json, write_json
from recipes.schema import Recipe, opt

SCHEMA = "drafthouse.serve/1"
TOLERANCE = 0.02  # of an acceptance per position, and of the number of drafts, relative to the report's
# In a drafter's path vLLM (0.32) takes the first of these for its method, whatever it is told; but for EAGLE-3.
TAKEN = ("eagle-", "eagle3", "dflash", "dspark")


@dataclass
class Options:
    """What `make serve-check` is told besides the recipe."""

    python: str = opt(".venv-vllm/bin/python", "the interpreter that has vLLM; make builds this one for a CPU")
    http: bool = opt(True, "serve over HTTP too")
    engine: dict[str, Any] = opt({"enforce_eager": True}, "arguments of vllm.LLM, e.g. {gpu_memory_utilization: 0.5}")


@dataclass
class Expected:
    """What the evaluation found, on which prompts; `names` and `ids` belong together."""

    report: dict[str, Any]
    per_position: list[float]
    drafts: int
    drafted: int
    max_tokens: int
    names: list[str]
    ids: list[list[int]]
    sha256: str


@dataclass(frozen=True)
class Served:
    """A drafter as an engine is told of it; `folder`: what it loads, if anything."""

    name: str  # an export's layout, else vLLM's method
    speculation: dict[str, Any]  # vLLM's speculative_config
    dtype: str
    folder: Path | None = None

    def check_path(self) -> None:
        """ConfigError where vLLM would draft by another method, for the drafter's path."""
        word = next((word for word in TAKEN if self.folder and word in str(self.folder.resolve()).lower()), "")
        if word and self.speculation["method"] != "eagle3":
            raise ConfigError(f"{self.folder}: vLLM takes {word!r} in a drafter's path for its method, and would not "
                              f"draft by {self.speculation['method']}; choose another `name` or `runs_dir`")


def expected(recipe: Recipe, folder: Path, target: Target) -> Expected:
    """The report's numbers with its prompts' ids (cases 45, 53).

    Raises ConfigError where there is no report, or one of drafts that no engine makes here; RunError where it is of
    another target or other prompts.
    """
    path = folder / "eval" / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        total, settings, plan = report["total"], report["settings"], report["settings"]["plan"]
        if plan["kind"] != "chain" or plan["confidence"]:
            raise ConfigError(f"{path}: was made with {in_words(plan)}; engines draft plain chains: run `make eval` "
                              "with eval.choose: given, eval.tree.depth: 0, eval.tree.paths: [], eval.confidence: 0")
        if report["target"]["fingerprint"] != target.fingerprint():
            raise RunError(f"{path}: was made with another target; run `make eval`")
        if settings.get("lossy"):
            raise RunError(f"{path}: of typical acceptance, which engines do not have; run `make eval` with "
                           "eval.acceptance: exact")
        if beyond_greedy(settings):
            raise RunError(f"{path}: was measured at {beyond_greedy(settings)}; engines are asked greedily here: run "
                           "`make eval` with eval.sampling and eval.stop at their defaults")
        names, ids = asked(recipe, folder, target)
        if settings["prompt_ids_sha256"] != sha256_json(ids):
            raise RunError(f"{path}: eval.prompts, eval.sets, eval.limit or the chat template give other ids than were "
                           "evaluated; run `make eval`")
        return Expected(report, total["acceptance"]["per_position"], total["drafts"], settings["draft_length"],
                        settings["max_tokens"], names, ids, sha256_file(path))
    except (OSError, ValueError):
        raise ConfigError(f"{path}: no evaluation here; run `make eval` first") from None
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: {error!r} missing; run `make eval` again") from None


def asked(recipe: Recipe, folder: Path, target: Target) -> tuple[list[str], list[list[int]]]:
    """Names and ids of what was evaluated. Those of eval.prompts are made again; of eval.sets, whose later turns hold
    answers that only the evaluation knows, they are what it wrote down."""
    if not recipe.eval.sets:
        prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
        return [p.id for p in prompts], [prompt_ids(target.tokenizer, p.messages, p.tools) for p in prompts]
    rows = [json.loads(line) for line in (folder / "eval" / "sent.jsonl").read_text(encoding="utf-8").splitlines()]
    turns = [f", turn {row['round'] + 1}" if row["round"] else "" for row in rows]
    return [f"{row['set']}: {row['id']}{turn}" for row, turn in zip(rows, turns)], [row["ids"] for row in rows]


def exports(recipe: Recipe, folder: Path, wanted: Expected, fingerprint: dict[str, str]) -> list[Served]:
    """The proven exports of the recipe's formats, those that vLLM does not load left out. ConfigError where one is
    missing or changed, and where vLLM loads none; RunError where one is of another checkpoint than the evaluation."""
    check_formats(recipe)
    found = []
    for layout in loaded_by_vllm(recipe.export.formats):
        out = folder / "export" / layout
        if not proven(folder / "export" / f"{layout}-{CHECK}", None, digests(out)):
            raise ConfigError(f"{out}: not what `make export` checked last; run it first")
        origin = read_config(out / ORIGIN)
        if not evaluated_as(origin, wanted.report, recipe, folder, fingerprint):
            raise RunError(f"{out}: exported from another checkpoint than eval/report.json is of, or evaluated with "
                           "other settings; export and evaluate again")
        told = speculation(str(out.resolve()), wanted.drafted, method_of(layout), recipe.drafter.kind == "parallel")
        found.append(Served(layout, told, origin["dtype"], out))
    return found


def without_export(recipe: Recipe, folder: Path, wanted: Expected, target: Target) -> list[Served]:
    """A drafter that needs no training, by vLLM's own method. What the engine has to load is written beside the report.

    ConfigError where vLLM would draft otherwise; RunError where the report is of another drafter.
    """
    opened, place = imported.open_drafter(recipe.drafter, target, folder), folder / "serve" / "drafter"
    if not evaluated(opened.digest, wanted.report, recipe, folder, target.fingerprint()):
        raise RunError(f"{folder / 'eval' / 'report.json'}: of another drafter than the recipe's, or evaluated with "
                       "other settings; run `make eval`")
    told = entry(recipe.drafter.kind).code.speculation(opened.drafter, wanted.drafted, place)
    return [Served(told["method"], told, recipe.target.dtype, place if "model" in told else None)]


def first_difference(ids: list[str], ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any] | None:
    """The first prompt whose answers differ, and the token's place."""
    for name, a, b in zip(ids, ours, theirs, strict=True):
        if a != b:
            at = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))
            return {"prompt": name, "token": at, "without": a[at : at + 1], "with": b[at : at + 1]}
    return None


def judge(name: str, plain: Answers, found: Answers, wanted: Expected) -> dict[str, Any]:
    """One engine run against the engine without a drafter and the report. `problems`: why it fails, a sentence each."""
    differs = first_difference(wanted.names, plain.tokens, found.tokens)
    problems = []
    if differs:
        same = sum(a == b for a, b in zip(plain.tokens, found.tokens))
        problems.append(f"{name}: greedy ids differ on {len(plain.tokens) - same} of {len(plain.tokens)} prompts, "
                        f"first on {differs['prompt']} at token {differs['token']}")
    rates, K = found.per_position, wanted.drafted
    if not found.drafts or len(rates) != K:
        problems.append(f"{name}: the engine counted {found.drafts} drafts of {len(rates)} positions, not of {K}")
        worst = None
    else:
        worst = max(abs(a - b) for a, b in zip(rates, wanted.per_position))
        if abs(found.drafts - wanted.drafts) > TOLERANCE * wanted.drafts:
            problems.append(f"{name}: the engine drafted {found.drafts} times, our loop {wanted.drafts} times")
        if worst > TOLERANCE:
            problems.append(f"{name}: the engine accepts {rounded(rates)} by position, the report says "
                            f"{rounded(wanted.per_position)}: {worst:.3f} apart, {TOLERANCE} are allowed; make doctor "
                            "names the stage")
    return {"name": name, "greedy_equal": differs is None, "first_difference": differs, "drafts": found.drafts,
            "drafts_report": wanted.drafts, "per_position": rates, "largest_difference": worst,
            "seconds": found.seconds, "problems": problems}


def rounded(rates: list[float]) -> list[float]:
    return [round(rate, 3) for rate in rates]


def prepared(recipe: Recipe, options: Options, folder: Path) -> tuple[Job, Expected, list[Served]]:
    """The job without a drafter, what is expected of it and what is served. The target is loaded on the CPU, and gone
    when this returns: an engine needs the memory."""
    target = Target(on_the_cpu(recipe.target), None)
    wanted = expected(recipe, folder, target)
    if entry(recipe.drafter.kind).trained:
        found = exports(recipe, folder, wanted, target.fingerprint())
    else:
        found = without_export(recipe, folder, wanted, target)
    for one in found:
        one.check_path()
    job = job_for(target, wanted.ids, wanted.max_tokens, wanted.drafted, options.engine)
    del target
    gc.collect()  # its hooks refer to it
    return job, wanted, found


def check(recipe: Recipe, options: Options, folder: Path, say=print) -> dict[str, Any]:
    """The report of runs/<name>/serve/report.json. Raises RunError where an engine does not run at all, ConfigError
    where none drafts as the recipe does."""
    require_serving(recipe.drafter.kind)
    python = shutil.which(options.python)
    if not python:
        raise ConfigError(f"--python {options.python}: no such program; `make serve-check` builds .venv-vllm")
    job, wanted, found = prepared(recipe, options, folder)
    place = folder / "serve"
    place.mkdir(exist_ok=True)
    threads = recipe.target.threads or 2
    say(f"vLLM without a drafter, {len(wanted.ids)} prompts")
    plain = offline(python, job, threads, place / "plain.log")
    rows, engine = [], plain.engine
    for one in found:
        ways = {"offline": offline, "http": over_http} if options.http else {"offline": offline}
        for way, run in ways.items():
            name = f"{one.name}, {way}"
            answers = run(python, replace(job, speculation=one.speculation), threads, place / f"{one.name}-{way}.log")
            rows.append({"layout": one.name, "way": way, "dtype": one.dtype} | judge(name, plain, answers, wanted))
            say(f"{name}: {'same ids' if rows[-1]['greedy_equal'] else 'OTHER IDS'}, {answers.drafts} drafts, "
                f"acceptance {rounded(answers.per_position)}; the report {rounded(wanted.per_position)}")
    return {
        "schema": SCHEMA, "passed": not any(row["problems"] for row in rows),
        "greedy_equal": all(row["greedy_equal"] for row in rows),
        "per_position_report": wanted.per_position, "per_position_engine": rows[0]["per_position"],
        "tolerance": TOLERANCE, "engine": engine | {"dtype": recipe.target.dtype, "arguments": job.engine},
        "report_sha256": wanted.sha256, "prompt_ids": wanted.names,
        "prompt_ids_sha256": sha256_json(wanted.ids), "draft_length": wanted.drafted, "max_tokens": wanted.max_tokens,
        "exports": {one.name: digests(one.folder) if one.folder else {} for one in found},
        "plain_seconds": plain.seconds,
        "checks": rows}


def main(recipe: Recipe, switches: set[str], options: Options) -> None:
    folder = run_folder(recipe)
    report = check(recipe, options, folder)
    path = folder / "serve" / "report.json"
    write_json(path, report)
    print(f"report: {path}")
    if not report["passed"]:
        raise RunError("; ".join(problem for row in report["checks"] for problem in row["problems"]))
    print(f"vLLM {report['engine']['version']} serves the drafter: same greedy ids, acceptance within {TOLERANCE} of "
          "the report's at every position")


COMMAND = Command("make serve-check", "Serves the exported drafter with a real vLLM and compares ids and acceptance.",
                  main, options=Options)

if __name__ == "__main__":
    process(COMMAND)
