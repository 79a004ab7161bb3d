"""`make eval`: acceptance, lossless proof, speed, verdict and report of a trained drafter.

Run as `python -m eval.run --config RECIPE`. Writes runs/<name>/eval/report.json and report.html. With
eval.server.base_url it measures a running server instead (eval/live_run.py).
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.curve import read_curve
from eval.earlier import read_report
from eval.evaluation import Evaluation
from eval.gate import Gate, Options, broken
from eval.gate import lines as gate_lines
from eval.live_page import markdown as live_markdown
from eval.live_page import summary_lines as live_summary_lines
from eval.live_run import evaluated_live, of_a_server, place_of
from eval.report import summary_lines, write_report
from eval.summary import markdown
from eval.track import log_figures
from eval.verdict import lossless_fault
from recipes.cli import Command, process, write_resolved
from recipes.errors import RunError
from recipes.files import one_at_a_time, write_json, write_text
from recipes.schema import Recipe


def evaluated(recipe: Recipe, again: bool) -> tuple[dict[str, Any], Path]:
    """The report of the recipe's evaluation, made now or found finished, and its folder."""
    if of_a_server(recipe):
        return evaluated_live(recipe)
    evaluation = Evaluation(recipe)
    write_resolved(recipe, ["eval"])
    folder = evaluation.folder / "eval"
    report = None if again else evaluation.finished()
    if report is not None:
        print(f"evaluation of {report['stack']['time']} found finished; --again measures anew")
    else:
        curve = read_curve(evaluation.folder) if evaluation.opened.folder else []  # before the work that it could cost
        report = evaluation.run()
        write_report(report, curve, folder)
        log_figures(recipe, report, evaluation.folder)
    return report, folder


def main(recipe: Recipe, switches: set[str], options: Options) -> None:
    gate = Gate.read(options)
    if options.report:
        conclude(gate, read_report(Path(options.report)), Path(options.report), None)
        return
    with one_at_a_time(place_of(recipe)):
        report, folder = evaluated(recipe, "again" in switches)
        conclude(gate, report, folder / "report.html", folder)


def conclude(gate: Gate | None, report: dict[str, Any], page: Path, folder: Path | None) -> None:
    """Prints what was found and judges it. folder: where the judgement is written; None for a report that was read.
    RunError where the gate is broken, or the drafter not lossless."""
    live = "server" in report  # of a running server; nothing was decoded here
    for line in live_summary_lines(report) if live else summary_lines(report):
        print(line)
    print(f"report: {page}")
    judged = gate.judge(report) if gate else []
    if gate:
        print("\n".join([f"gate: {gate.path}, reference {gate.reference_path or 'none'}", *gate_lines(judged)]))
    if gate and folder:
        write_json(folder / "gate.json", {"gate": str(gate.path), "reference": gate.reference_path,
                                          "bounds": [asdict(one) for one in judged]})
        summary = live_markdown if live else markdown
        write_text(folder / "report.md", summary(report, [asdict(one) for one in judged]))
    fault = "" if live else lossless_fault(report["total"])
    if fault:
        raise RunError(f"{fault}: this drafter must not be served")
    if broken(judged):
        raise RunError(f"gate {gate.path} is broken: {'; '.join(broken(judged))}")


COMMAND = Command("make eval", "Evaluates a trained drafter: acceptance, lossless proof, speed, report, gate.", main,
                  {"again": "evaluate although the same evaluation was finished before"}, Options)

if __name__ == "__main__":
    process(COMMAND)
