"""The ROI plan as one self-contained HTML page, with the plots. It computes nothing: every number is the plan's."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from eval.plots import BLUE, GREEN, GREY, INK, ORANGE, STYLE, inline_svg, sized_figure
from eval.report import page

COLOURS = [BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9"]
HEIGHT = 2.9
STRIP = 0.035  # of the plot's height: batches where a drafter wins, a strip for each
LEGEND = {"fontsize": 8, "facecolor": "white", "edgecolor": "none", "framealpha": 0.85}
LONGEST = 26  # letters of a name in a legend; the table carries the whole one


def render(plan: dict[str, Any]) -> str:
    """The page as text: no script, no resource outside it; everything that a file named is escaped."""
    colours = colours_of(plan["points"])
    with matplotlib.rc_context(STYLE):
        plots = {"speedup": plot_speedup(plan, colours), "frontier": plot_frontier(plan, colours)}
        if plan["loads"]:
            plots["gpus"] = plot_gpus(plan, colours)
            if plan["traffic"]["price_per_gpu_hour"]:
                plots["dollars"] = plot_dollars(plan, colours)
        plots |= {f"sensitivity {name}": plot_sensitivity(name, rows, number)
                  for number, (name, rows) in enumerate(plan["sensitivity"].items()) if drawn(rows)}
    return page("roi.html.j2", plan=plan, plots=plots, rows=table_rows(plan))


def drawn(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Inputs whose effect could be computed on both sides."""
    return [r for r in rows if None not in (r["low"], r["base"], r["high"])]


def table_rows(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a method: its best configuration and its money."""
    return [{"name": name, **point, "full_load": plan["sides"][name]["full_load"],
             "demand": plan["sides"][name]["at_demand"]} for name, point in plan["best"].items()]


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Grey for plain decoding; from the seventh drafter on colours come again."""
    return {"none": GREY} | dict(zip((name for name in names if name != "none"), cycle(COLOURS)))


def legend(name: str) -> str:
    return "no drafter" if name == "none" else name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _plain_log(axes: Axes, axis: str) -> None:
    """A logarithmic axis with plain numbers."""
    getattr(axes, f"set_{axis}scale")("log")
    own = getattr(axes, f"{axis}axis")
    own.set_major_locator(LogLocator(subs=(1, 2, 5)))
    own.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"))
    own.set_minor_locator(NullLocator())


def plot_speedup(plan: dict[str, Any], colours: dict[str, str]) -> Markup:
    """Speedup over batch with its 90 % interval; batches where a drafter wins beyond doubt are shaded at the foot."""
    figure, axes = sized_figure(HEIGHT)
    batches: list[int] = []
    for number, (name, curve) in enumerate((n, c) for n, c in plan["curves"].items() if c):
        x = [row["batch"] for row in curve]
        batches = sorted({*batches, *x})
        axes.fill_between(x, [r["low"] for r in curve], [r["high"] for r in curve], color=colours[name], alpha=0.22,
                          linewidth=0)
        axes.plot(x, [r["speedup"] for r in curve], "o-", color=colours[name], markersize=3.5, linewidth=1.5,
                  label=legend(name))
        for low, high in plan["wins"][name]["sure"]:
            axes.axvspan(low / 1.06, high * 1.06, number * STRIP, (number + 0.8) * STRIP, color=colours[name],
                         linewidth=0)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    _plain_log(axes, "x")
    axes.set_xticks(batches, [str(b) for b in batches] if len(batches) < 12 else
                    [str(b) if i % 2 == 0 else "" for i, b in enumerate(batches)])
    axes.set(xlabel="Batch of a replica", ylabel="Speedup over plain decoding")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    if len(plan["curves"]) > 1:
        axes.legend(loc="upper right", **LEGEND)
    said = "; ".join(f"{name}: " + ", ".join(f"batch {r['batch']} {r['speedup']:.2f}" for r in curve)
                     for name, curve in plan["curves"].items())
    return inline_svg(figure, "speedup", f"Speedup over batch, 90 % interval shaded. {said}")


def plot_frontier(plan: dict[str, Any], colours: dict[str, str]) -> Markup:
    """Tokens a second and GPU against milliseconds a token: what no other configuration beats on both."""
    figure, axes = sized_figure(HEIGHT)
    ranks = plan["tensor_parallel"]
    for name, points in plan["points"].items():
        front, most = [], 0.0
        for p in sorted(points, key=lambda p: (p["ms"], -p["tok_s"])):
            if p["tok_s"] > most:
                front.append(p)
                most = p["tok_s"]
        axes.plot([p["ms"] for p in front], [p["tok_s"] / ranks for p in front], "o-", color=colours[name],
                  markersize=3.5, linewidth=1.5, label=legend(name))
    if plan["traffic"]["slo_ms"]:
        axes.axvline(plan["traffic"]["slo_ms"], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate("SLO", (plan["traffic"]["slo_ms"], 0.02), (3, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=8)
    axes.set(xlabel="Time per token (ms, median; lower is better)", ylabel="Tokens/s a GPU")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid()
    axes.legend(**LEGEND)
    return inline_svg(figure, "frontier", "Tokens per second and GPU against milliseconds per token, with and without")


def _loads(plan: dict[str, Any], colours: dict[str, str], key: str, label: str, name: str) -> Markup:
    figure, axes = sized_figure(HEIGHT)
    x = [row["tok_s"] for row in plan["loads"]]
    for method in plan["best"]:
        axes.step(x, [row[key][method] for row in plan["loads"]], where="mid", color=colours[method], linewidth=1.6,
                  label=legend(method))
    if plan["traffic"]["demand_tok_s"]:
        axes.axvline(plan["traffic"]["demand_tok_s"], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    _plain_log(axes, "x")
    _plain_log(axes, "y")
    axes.set(xlabel="Demand (tokens/s)", ylabel=label)
    axes.grid()
    axes.legend(**LEGEND)
    return inline_svg(figure, name, f"{label} over demand for " + ", ".join(plan["best"]))


def plot_gpus(plan: dict[str, Any], colours: dict[str, str]) -> Markup:
    """Whole replicas for each demand, headroom included."""
    return _loads(plan, colours, "gpus", "GPUs", "gpus")


def plot_dollars(plan: dict[str, Any], colours: dict[str, str]) -> Markup:
    """$ per million tokens at each demand, idle parts of replicas paid for."""
    return _loads(plan, colours, "dollars", "$ per million tokens", "dollars")


def plot_sensitivity(name: str, rows: list[dict[str, Any]], number: int) -> Markup:
    """What is saved on a million tokens at full load when one input moves."""
    figure, axes = sized_figure(0.42 * len(drawn(rows)) + 1.0)
    for y, row in enumerate(drawn(rows)):
        for end, colour in (("low", ORANGE), ("high", BLUE)):
            axes.barh(y, row[end] - row["base"], left=row["base"], color=colour, height=0.5)
    axes.axvline(drawn(rows)[0]["base"], color=INK, linewidth=0.8)
    axes.set_yticks(range(len(drawn(rows))), [r["input"] for r in drawn(rows)])
    axes.invert_yaxis()
    axes.set_xlabel("Saved, $ per million")
    axes.grid(axis="x")
    said = ", ".join(f"{r['input']}: {r['low']:.3f} to {r['high']:.3f}" for r in drawn(rows))
    return inline_svg(figure, f"sensitivity{number}", f"Saving of {name}, $ per million tokens: {said}")
