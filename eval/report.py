"""The evaluation's report: terminal summary, report.json and one self-contained HTML page.

It computes no measurement: every number comes from the report dictionary, whose form is
docs/report.schema.json and whose definitions are docs/report.md.
"""

import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.plots import draw
from eval.settings import measured_at
from eval.summary import markdown
from eval.verdict import kinds
from recipes.errors import RunError
from recipes.files import write_json, write_text


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The three headline numbers, each with interval and sample size, then the verdict and its reasons."""
    total = report["total"]
    acceptance, speed, greedy = total["acceptance"], total["speed"], total["lossless"]["greedy"]
    verdict = report["verdict"]
    lossy = report["settings"].get("lossy", False)
    return [
        *(["LOSSY                   typical acceptance: the answers are not the target's own; the proof below is of "
           "exact acceptance"] if lossy else []),
        f"Mean acceptance length  {acceptance['mean_length']:.2f} tokens per draft"
        f" (95 % CI {interval(acceptance['ci95'])}; n = {total['drafts']:,} drafts)",
        f"Speedup                 {speed['speedup']:.2f}x over {speed['baseline_engine']}"
        f" (95 % CI {interval(speed['ci95'])}; n = {speed['prompts']:,} prompts)",
        f"Lossless                {counted(greedy['mismatches'], 'mismatch', 'mismatches')}"
        f" in {counted(greedy['prompts'], 'prompt')}, {counted(greedy['tokens'], 'token')};"
        f" {counted(greedy['near_ties'], 'near-tie')}",
        f"Verdict                 {verdict['decision']}, at {measured_at(report['settings'])}",
        *(f"                        - {reason}" for reason in verdict["reasons"]),
    ]


def write_report(report: dict[str, Any], curve: list[dict[str, Any]], folder: Path) -> Path:
    """Writes report.json, report.html and report.md into `folder`, each whole or not at all; returns the page's path.

    Raises RunError where a number of the report is NaN or infinite: JSON has no such value.
    """
    check_finite(report, "report")
    html = render_html(report, curve)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    write_text(folder / "report.html", html)
    write_text(folder / "report.md", markdown(report))
    return folder / "report.html"


def check_finite(value: Any, where: str) -> None:
    """Raises RunError naming the first number under `value` that is NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RunError(f"{where} is {value}: nothing was measured there, so no report is written")
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_finite(item, f"{where}.{key}")


def render_html(report: dict[str, Any], curve: list[dict[str, Any]]) -> str:
    """The whole page as text: no script, and no resource outside it.

    `curve` holds the validations during training: step, tokens, train_loss (nats), mean_length
    (tokens per draft), per_position. It may be empty.
    """
    parts = kinds(report["sets"])
    return page("report.html.j2", report=report, curve=curve, plots=draw(report, parts, curve),
                tone=tone(report["verdict"]["decision"]), measured=measured_at(report["settings"]))


def page(template: str, **values: Any) -> str:
    """A page of this folder's template, everything escaped."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(fixed=fixed, percent=percent, interval=interval, counted=counted, plain=plain,
                               quoted=quoted, measured_at=measured_at)
    return environment.get_template(template).render(**values)


def tone(decision: str) -> str:
    """Style of the verdict: yes, limited or no. Raises ValueError for any other decision."""
    if decision.startswith("deploy within "):
        return "limited"
    if decision not in ("deploy", "do not deploy"):
        raise ValueError(f"verdict.decision {decision!r} is not deploy, deploy within <range>, do not deploy")
    return "yes" if decision == "deploy" else "no"


def fixed(value: float | None, digits: int = 2) -> str:
    """A number with a fixed count of decimals and thousands commas; n/a for null."""
    return "n/a" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of 1 as per cent; n/a for null."""
    return "n/a" if value is None else f"{100 * value:.{digits}f} %"


def interval(bounds: list[float], digits: int = 2) -> str:
    """'low to high'."""
    return f"{bounds[0]:.{digits}f} to {bounds[1]:.{digits}f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun: '1 prompt', '1,432 prompts'. `many` is the plural where it is not one + s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def plain(value: Any) -> str:
    """A value of the provenance tables as text; lists and mappings as compact JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def quoted(text: str) -> str:
    """A token's text in quotes, so that spaces and line breaks are seen."""
    return json.dumps(text, ensure_ascii=False)
