"""The evaluation's report: terminal summary, report.json and one self-contained HTML page.

It computes no measurement: every number comes from the report dictionary, whose form is
docs/report.schema.json and whose definitions are docs/report.md.
"""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.errors import RunError
from recipes.files import write_json, write_text

# Okabe and Ito's colours stay apart under every common colour blindness.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A94A0"
INK, LINE = "#1F2933", "#D5DAE0"

STYLE = {
    "svg.fonttype": "none",  # text stays text: selectable, and set in the page's own font
    "svg.hashsalt": "drafthouse",  # the same report gives the same bytes
    "text.parse_math": False,  # a name with two dollar signs is a name, not a formula
    "font.size": 9.0, "axes.labelsize": 9.0, "axes.edgecolor": LINE, "axes.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "xtick.major.size": 0, "ytick.major.size": 0,
    "grid.color": LINE, "grid.linewidth": 0.6,
}
WIDTH = 4.6  # inches, that is 331 points: one point is about one pixel on a phone
DASHED = {"linewidth": 0.8, "linestyle": (0, (4, 3)), "zorder": 0}
BEHIND_LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The three headline numbers, each with interval and sample size, then the verdict and its reasons."""
    total = report["total"]
    acceptance, speed, greedy = total["acceptance"], total["speed"], total["lossless"]["greedy"]
    verdict = report["verdict"]
    return [
        f"Mean acceptance length  {acceptance['mean_length']:.2f} tokens per draft"
        f" (95 % CI {interval(acceptance['ci95'])}; n = {total['drafts']:,} drafts)",
        f"Speedup                 {speed['speedup']:.2f}x over {speed['baseline_engine']}"
        f" (95 % CI {interval(speed['ci95'])}; n = {speed['prompts']:,} prompts)",
        f"Lossless                {counted(greedy['mismatches'], 'mismatch', 'mismatches')}"
        f" in {counted(greedy['prompts'], 'prompt')}, {counted(greedy['tokens'], 'token')};"
        f" {counted(greedy['near_ties'], 'near-tie')}",
        f"Verdict                 {verdict['decision']}",
        *(f"                        - {reason}" for reason in verdict["reasons"]),
    ]


def write_report(report: dict[str, Any], curve: list[dict[str, Any]], folder: Path) -> Path:
    """Writes report.json and report.html into `folder`, each whole or not at all; returns the page's path.

    Raises RunError where a number of the report is NaN or infinite: JSON has no such value.
    """
    check_finite(report, "report")
    page = render_html(report, curve)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    write_text(folder / "report.html", page)
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
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(fixed=fixed, percent=percent, interval=interval, counted=counted, plain=plain)
    total, sets = report["total"], report["sets"]
    with matplotlib.rc_context(STYLE):
        plots = {
            "positions": plot_positions(total["acceptance"]["per_position"], _height(sets)),
            "sets": plot_sets(sets, total),
            "speed": plot_speed(total["speed"]),
            "curve": plot_curve(curve) if curve else None,
        }
    return environment.get_template("report.html.j2").render(report=report, curve=curve, plots=plots,
                                                             tone=tone(report["verdict"]["decision"]))


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


def plot_positions(per_position: list[float], height: float) -> Markup:
    """Bars of the cumulative acceptance at draft positions 1..K, per cent of drafts; `height` in inches."""
    figure, axes = _figure(height)
    positions = range(1, len(per_position) + 1)
    bars = axes.bar(positions, [100 * rate for rate in per_position], color=BLUE, width=0.62)
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set(ylim=(0, 109), yticks=range(0, 101, 25), xticks=positions,
             xlabel="Draft position", ylabel="Drafts accepted up to here (%)")
    axes.grid(axis="y")
    return _svg(figure, "positions", "Acceptance per draft position, per cent: " + _listed(per_position, 100))


def plot_sets(sets: dict[str, Any], total: dict[str, Any]) -> Markup:
    """Mean acceptance length and 95 % interval for each prompt kind and for all, in tokens per draft."""
    rows = [*sets.items(), ("all", total)]
    figure, axes = _figure(_height(sets))
    for y, (_, numbers) in enumerate(rows):
        colour = ORANGE if y == len(rows) - 1 else BLUE
        acceptance = numbers["acceptance"]
        axes.hlines(y, *acceptance["ci95"], color=colour, linewidth=2.2)
        axes.plot(acceptance["mean_length"], y, "o", color=colour, markersize=6)
        axes.annotate(f"{acceptance['mean_length']:.2f}", (acceptance["ci95"][1], y), (6, 0),
                      textcoords="offset points", va="center", bbox=BEHIND_LABEL)
    axes.axvline(total["acceptance"]["mean_length"], color=ORANGE, **DASHED)
    furthest = max(numbers["acceptance"]["ci95"][1] for _, numbers in rows)
    axes.set(xlim=(1, furthest + 0.16 * (furthest - 1) + 0.05), ylim=(len(rows) - 0.5, -0.5),
             xlabel="Mean acceptance length (tokens per draft; 1 is no gain)")
    axes.set_yticks(range(len(rows)), [_shortened(name) for name, _ in rows])
    axes.grid(axis="x")
    return _svg(figure, "sets", "Mean acceptance length by prompt kind, tokens per draft: " + ", ".join(
        f"{name} {numbers['acceptance']['mean_length']:.2f}" for name, numbers in rows))


def plot_speed(speed: dict[str, Any]) -> Markup:
    """Milliseconds per token of every plain engine measured and of the speculative loop.

    The whisker is the baseline's time over the interval of the speedup.
    """
    rows = [(engine, 1000 / rate, GREY) for engine, rate in speed["engines"].items()]
    rows.append(("with the drafter", 1000 / speed["speculative_tok_s"], BLUE))
    figure, axes = _figure(2.7)
    names, times, colours = zip(*rows)
    axes.barh(range(len(rows)), times, color=colours, height=0.5)
    baseline = 1000 / speed["baseline_tok_s"]
    whisker = sorted(baseline / bound for bound in speed["ci95"])
    last = len(rows) - 1
    axes.hlines(last, whisker[0], whisker[-1], color=INK, linewidth=1.4)
    for y, time in enumerate(times):
        end = max(time, whisker[-1]) if y == last else time
        axes.annotate(f"{time:.1f}", (end, y), (5, 0), textcoords="offset points", va="center")
    axes.axvline(baseline, color=GREY, **DASHED)
    axes.set(xlim=(0, 1.15 * max(whisker[-1], *times)), ylim=(len(rows) - 0.4, -0.6),
             xlabel="Time per token (ms; lower is better)")
    axes.set_yticks(range(len(rows)), [_wrapped(name) for name in names])
    axes.grid(axis="x")
    return _svg(figure, "speed", "Time per token, milliseconds: " + ", ".join(
        f"{name} {time:.1f}" for name, time in zip(names, times)))


def plot_curve(curve: list[dict[str, Any]]) -> Markup:
    """Training loss above, replayed mean acceptance length below, over the same steps."""
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [point["step"] for point in curve]
    for axes, key, colour, label in ((above, "train_loss", GREEN, "Training\nloss (nats)"),
                                     (below, "mean_length", BLUE, "Mean accept.\nlength (tokens)")):
        values = [point[key] for point in curve]
        axes.plot(steps, values, "o-", color=colour, linewidth=1.6, markersize=3.5)
        axes.annotate(f"{values[-1]:.2f}", (steps[-1], values[-1]), (6, 0),
                      textcoords="offset points", va="center")
        axes.set_ylabel(label)
        axes.margins(x=0.09, y=0.18)
        axes.grid(axis="y")
    below.set_xlabel("Training step")
    figure.align_ylabels()
    return _svg(figure, "curve", "Training loss and replayed mean acceptance length over steps; last: "
                f"loss {curve[-1]['train_loss']:.2f}, length {curve[-1]['mean_length']:.2f}")


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _height(sets: dict[str, Any]) -> float:
    """Inches that hold a line for each prompt kind and one for all; the neighbouring plot takes the same."""
    return max(2.7, 0.31 * (len(sets) + 1) + 0.7)


def _svg(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an inline SVG element. `name` keeps its ids apart from the other plots'."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    text = buffer.getvalue()
    text = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])
    return Markup('<svg role="img" aria-label="{}"').format(label) + Markup(text.removeprefix("<svg"))


def _listed(values: list[float], scale: float) -> str:
    return ", ".join(f"{scale * value:.1f}" for value in values)


def _shortened(name: str, longest: int = 18) -> str:
    """A label that leaves room for the plot; the table carries the whole name."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _wrapped(name: str) -> str:
    """An engine's name on two lines, so that the bars keep the width of a phone."""
    return name.replace(" ", "\n", 1)
