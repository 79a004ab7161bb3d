"""`make compare`: reports of several runs side by side, each against the first, with significance.

Run as `python -m eval.compare A/report.json B/report.json ...`, or with `--config RECIPE` whose `compare` names
drafters that are trained and evaluated first (eval/contest.py). Writes compare.json, compare.html and compare.md.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.contest import Contest, choices, table
from eval.earlier import check_origins, read_report
from eval.paired import ALPHA, DRAWS, METRICS, conclusion, conversations, holm, judge
from eval.plots import draw_comparison
from eval.report import check_finite, page
from eval.settings import measured_at, read
from eval.summary import escaped
from eval.verdict import kinds
from recipes.cli import Command, process
from recipes.errors import ConfigError
from recipes.files import one_at_a_time, sha256_file, write_json, write_text
from recipes.provenance import differences
from recipes.schema import Recipe, opt

SCHEMA = "drafthouse.compare/1"
NO_FIGURES = ("key", "prompt_ids_sha256")  # settings that follow from others
ACROSS = "across"
LOSSY, WHY = "LOSSY", "typical acceptance: its answers are not the target's own"


@dataclass
class Options:
    out: str = opt("", "folder of the comparison; empty is runs/compare, of a recipe's drafters runs/<name>/compare")


@dataclass
class Run:
    """One report, its label (letter and name; LOSSY between them where it is) and what differs from the first one."""

    label: str
    path: Path
    report: dict[str, Any]
    differs: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """What the comparison's file says of it."""
        drafter, stack, total = (self.report[key] for key in ("drafter", "stack", "total"))
        return {"label": self.label, "report": str(self.path), "sha256": sha256_file(self.path),
                "drafter": drafter["kind"], "checkpoint": drafter["checkpoint"], "parameters": drafter["parameters"],
                "target": self.report["target"]["model"], "time": stack["time"], "git": stack["git"],
                "lossy": lossy(self.report),
                "verdict": self.report["verdict"]["decision"], "differs": self.differs,
                "measured_at": measured_at(self.report["settings"]),
                "mean_length": total["acceptance"]["mean_length"], "ci95": total["acceptance"]["ci95"],
                "tokens_per_target_pass": total["tokens_per_target_pass"],
                "speedup": total["speed"]["speedup"], "speedup_ci95": total["speed"]["ci95"],
                "prompts": total["prompts"], "timed": total["speed"]["prompts"],
                "mismatches": total["lossless"]["greedy"]["mismatches"],
                "kinds": {kind: {"mean_length": block["acceptance"]["mean_length"], "prompts": block["prompts"]}
                          for kind, block in kinds(self.report["sets"]).items()}}


def read_runs(paths: list[str], allowed: bool) -> list[Run]:
    """The reports in the order given. Raises ConfigError for fewer than two, one twice, or other targets, stacks,
    sampling or stop strings than the first one's where those are not `allowed` (case 50)."""
    if len(paths) < 2:
        raise ConfigError(f"make compare: {len(paths)} reports named; name at least two: "
                          'make compare ARGS="A/report.json B/report.json", or a RECIPE with compare.drafters')
    if len({Path(p).resolve() for p in paths}) < len(paths):
        raise ConfigError("make compare: a report is named twice")
    runs = []
    for number, name in enumerate(paths):
        path = Path(name) / "report.json" if Path(name).is_dir() else Path(name)
        report = read_report(path)
        mark = f"{LOSSY} " if lossy(report) else ""  # in front: plots cut long labels at their end
        runs.append(Run(f"{letter(number)} {mark}{report['name']}", path, report))
    for run in runs[1:]:
        first = runs[0]
        run.differs = check_origins(first.report, run.report, (str(first.path), str(run.path)), f"give --{ACROSS}",
                                    allowed)
        places = [timed_at(one.report) for one in (first, run)]
        if places[0] != places[1] and not allowed:
            raise ConfigError(f"{run.path}: was timed at {places[1]}, {first.path} at {places[0]}; give --{ACROSS} to "
                              "put them side by side all the same")
        here, there = (r.report["settings"] for r in (run, first))
        if read(here) != read(there) and not allowed:
            raise ConfigError(f"{run.path}: was measured at {measured_at(here)}, {first.path} at {measured_at(there)} "
                              f"({'; '.join(differences(read(there), read(here)))}): acceptance depends on it; give "
                              f"--{ACROSS} to put them side by side all the same")
        run.differs += differences(*(read(settings) | {k: v for k, v in settings.items() if k not in NO_FIGURES}
                                     for settings in (there, here)))
    return runs


def lossy(report: dict[str, Any]) -> bool:
    """Whether the report is of a rule that changes the answers."""
    return bool(report["settings"].get("lossy"))


def letter(number: int) -> str:
    """A, B, ... Z, then numbers."""
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def compared(runs: list[Run], seed: int) -> dict[str, Any]:
    """The comparison's file: every metric of every run against the first."""
    sides = [conversations(run.report) for run in runs]
    metrics = []
    for metric in METRICS:
        found = [judge(metric, sides[0], side, seed) for side in sides[1:]]
        for one, adjusted, run in zip(found, holm([one["p_value"] for one in found]), runs[1:]):
            one |= {"run": run.label, "p_adjusted": adjusted}
            one["conclusion"] = conclusion(metric, one)
        label = f"{metric.label} at {timed_at(runs[0].report)}" if metric.timed else metric.label
        metrics.append({"metric": metric.name, "label": label, "unit": metric.unit,
                        "better": "higher" if metric.higher else "lower", "against_first": found})
    known = (n for n, metric in enumerate(metrics) if any(one["difference"] is not None
                                                          for one in metric["against_first"]))
    return {"schema": SCHEMA, "resamples": DRAWS, "seed": seed, "timed_at": timed_at(runs[0].report),
            "headline": next(known, 0), "runs": [run.summary() for run in runs],
            "metrics": metrics}


def timed_at(report: dict[str, Any]) -> str:
    """Where the figures of a report's timed prompts were taken."""
    return f"concurrency {report['settings']['batch_size']}" if "server" in report else "batch 1"


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Each metric of each run against the first, as the cells of a table."""
    found = []
    for metric in result["metrics"]:
        for one in metric["against_first"]:
            n = f"{one['n'][0]} pairs" if one["paired"] else f"unpaired, {one['n'][0]} and {one['n'][1]}"
            if one["difference"] is None:
                found.append([metric["label"], one["run"], "n/a", "n/a", one["reason"], n, one["conclusion"]])
                continue
            low, high = one["ci95"]
            found.append([metric["label"], one["run"], f"{one['a']:.3f}", f"{one['b']:.3f}",
                          f"{one['difference']:+.3f} ({low:+.3f} to {high:+.3f})", n,
                          f"{one['conclusion']} (p = {one['p_adjusted']:.2g})"])
    return found


HEADINGS = ["metric", "run", "first", "run's", "difference (95 % CI)", "n", "conclusion"]


def as_markdown(result: dict[str, Any]) -> str:
    """The same table for a pull request."""
    lines = [f"**Comparison with {escaped(result['runs'][0]['label'])}**", "", f"| {' | '.join(HEADINGS)} |",
             f"|{'---|' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(map(escaped, row))} |" for row in rows(result)]
    for run in result["runs"]:
        if run["lossy"]:
            lines += ["", f"{escaped(run['label'])}: {WHY}"]
    for run in result["runs"][1:]:
        if run["differs"]:
            lines += ["", f"{escaped(run['label'])} differs: {escaped('; '.join(run['differs']))}"]
    return "\n".join(lines) + "\n"


def side_by_side(recipe: Recipe, allowed: bool) -> tuple[list[Run], dict[str, Any]]:
    """The runs of the recipe's drafters, made now or found finished, and their comparison."""
    contest = Contest(recipe, f"recipe {recipe.name}")
    with one_at_a_time(contest.folder):
        found = contest.hold()
    runs = read_runs([str(one.report) for one in found], allowed)
    reports, sides = [run.report for run in runs], [conversations(run.report) for run in runs]
    speedup = next(metric for metric in METRICS if metric.name == "speedup")

    def differs(i: int, j: int) -> bool:
        p_value = judge(speedup, sides[i], sides[j], recipe.eval.seed)["p_value"]
        return p_value is not None and p_value < ALPHA

    rows = table(found, reports, recipe.roi.price_per_gpu_hour)
    drafters = {"minutes": recipe.compare.minutes, "rows": rows, "choices": choices(rows, differs)}
    return runs, compared(runs, recipe.eval.seed) | {"drafters": drafters}


def main(recipe: Recipe, switches: set[str], options: Options, words: list[str]) -> None:
    if recipe.compare.drafters and not words:
        runs, result = side_by_side(recipe, ACROSS in switches)
        usual = Path(recipe.runs_dir) / recipe.name / "compare"
    else:
        runs = read_runs(words, ACROSS in switches)
        result, usual = compared(runs, recipe.eval.seed), Path(recipe.runs_dir) / "compare"
    check_finite(result, "comparison")
    folder = Path(options.out or usual)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", result)
    write_text(folder / "compare.md", as_markdown(result))
    write_text(folder / "compare.html", page("compare.html.j2", result=result, plots=draw_comparison(result["runs"]),
                                             rows=rows(result), headings=HEADINGS, why_lossy=WHY))
    table = Table(*HEADINGS)
    for row in rows(result):
        table.add_row(*row)
    Console(width=150).print(table, markup=False)
    for one in result.get("drafters", {}).get("choices", []):
        print(f"batch {one['batch']}: {one['best']} ({one['speedup']:.2f}; {one['why']})")
    for run in runs:
        if lossy(run.report):
            print(f"{run.label}: {WHY}")
    for run in runs[1:]:
        for difference in run.differs:
            print(f"{run.label}: {difference}")
    print(f"comparison: {folder / 'compare.html'}")


COMMAND = Command("make compare", "Compares reports of several runs, each with the first, with significance.", main,
                  {ACROSS: "compare although targets, stacks or sampling differ"}, Options,
                  "the reports: A/report.json B/report.json ...; none with a recipe that has compare.drafters")

if __name__ == "__main__":
    process(COMMAND)
