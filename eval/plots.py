"""The report's plots as inline SVG: no script, text that stays text. They compute nothing but places on paper."""

import io
import re
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def draw(report: dict[str, Any], kinds: dict[str, Any], curve: list[dict[str, Any]]) -> dict[str, Markup | None]:
    """All plots of a report by name; None for one without data. `kinds`: blocks by prompt kind."""
    total = report["total"]
    entropy = total["rejections"]["entropy"]
    with matplotlib.rc_context(STYLE):
        return {
            "positions": plot_positions(total["acceptance"]["per_position"], min(_height(kinds), 3.4)),
            "sets": plot_sets(kinds, total),
            "speed": plot_speed(total["speed"]),
            "places": plot_places(total["acceptance"]),
            "cycle": plot_cycle(total["speed"]["cycle"]) if total["speed"]["cycle"]["cycles"] else None,
            "entropy": plot_entropy(entropy["by_entropy"]) if entropy else None,
            "curve": plot_curve(curve) if curve else None,
        }


def draw_comparison(runs: list[dict[str, Any]]) -> dict[str, Markup | None]:
    """Acceptance length and speedup of several runs with their intervals; `runs` as in compare.json."""
    with matplotlib.rc_context(STYLE):
        return {"length": plot_runs([(r["label"], r["mean_length"], r["ci95"]) for r in runs], "length",
                                    "Mean acceptance length (tokens per draft)"),
                "speedup": plot_runs([(r["label"], r["speedup"], r["speedup_ci95"]) for r in runs], "speedup",
                                     "Speedup (ratio)")}


def plot_runs(rows: list[tuple[str, float | None, list[float] | None]], name: str, label: str) -> Markup | None:
    """A value with its interval for each run that knows it; a dashed line at the first. None where no run does."""
    first, rows = rows[0], [row for row in rows if row[1] is not None]
    if not rows:
        return None
    rows = [(run, value, bounds or [value, value]) for run, value, bounds in rows]
    figure, axes = sized_figure(max(1.6, 0.36 * len(rows) + 0.8))
    for y, (run, value, bounds) in enumerate(rows):
        colour = GREY if run == first[0] else BLUE
        axes.hlines(y, *bounds, color=colour, linewidth=2.2)
        axes.plot(value, y, "o", color=colour, markersize=6)
        axes.annotate(f"{value:.2f}", (bounds[1], y), (6, 0), textcoords="offset points", va="center",
                      bbox=BEHIND_LABEL)
    if first[1] is not None:
        axes.axvline(first[1], color=GREY, **DASHED)
    low, high = min(b[0] for _, _, b in rows), max(b[1] for _, _, b in rows)
    room = 0.2 * (high - low) + 0.02
    axes.set(xlim=(min(low, 1) - room / 4, high + room), ylim=(len(rows) - 0.5, -0.5), xlabel=label)
    axes.set_yticks(range(len(rows)), [_shortened(row[0]) for row in rows])
    axes.grid(axis="x")
    return inline_svg(figure, name, f"{label}: " + ", ".join(f"{run} {value:.2f}" for run, value, _ in rows))


def plot_positions(per_position: list[float], height: float) -> Markup:
    """Bars of the cumulative acceptance at draft positions 1..K, per cent of drafts; `height` in inches."""
    figure, axes = sized_figure(height)
    positions = range(1, len(per_position) + 1)
    bars = axes.bar(positions, [100 * rate for rate in per_position], color=BLUE, width=0.62)
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set(ylim=(0, 109), yticks=range(0, 101, 25), xticks=positions,
             xlabel="Draft position", ylabel="Drafts accepted up to here (%)")
    axes.grid(axis="y")
    return inline_svg(figure, "positions", "Acceptance per draft position, per cent: " + _listed(per_position, 100))


def plot_sets(sets: dict[str, Any], total: dict[str, Any]) -> Markup:
    """Mean acceptance length and 95 % interval for each prompt kind and for all, in tokens per draft."""
    rows = [*sets.items(), ("all", total)]
    unknown = [1.0, len(total["acceptance"]["per_position"]) + 1.0]  # of a single conversation: no interval to draw
    figure, axes = sized_figure(_height(sets))
    furthest = 1.0
    for y, (_, numbers) in enumerate(rows):
        colour = ORANGE if y == len(rows) - 1 else BLUE
        length, bounds = numbers["acceptance"]["mean_length"], numbers["acceptance"]["ci95"]
        end = length if bounds == unknown else bounds[1]
        furthest = max(furthest, end)
        if bounds != unknown:
            axes.hlines(y, *bounds, color=colour, linewidth=2.2)
        axes.plot(length, y, "o", color=colour, markersize=6)
        axes.annotate(f"{length:.2f}", (end, y), (6, 0), textcoords="offset points", va="center", bbox=BEHIND_LABEL)
    axes.axvline(total["acceptance"]["mean_length"], color=ORANGE, **DASHED)
    axes.set(xlim=(1, furthest + 0.16 * (furthest - 1) + 0.05), ylim=(len(rows) - 0.5, -0.5),
             xlabel="Tokens per draft (1 is no gain)")
    axes.set_yticks(range(len(rows)), [_shortened(name) for name, _ in rows])
    axes.grid(axis="x")
    return inline_svg(figure, "sets", "Mean acceptance length by prompt kind, tokens per draft: " + ", ".join(
        f"{name} {numbers['acceptance']['mean_length']:.2f}" for name, numbers in rows))


def plot_speed(speed: dict[str, Any]) -> Markup:
    """Milliseconds per token of every plain engine measured and of the speculative loop.

    The whisker is the baseline's time over the interval of the speedup.
    """
    rows = [(engine, 1000 / rate, GREY) for engine, rate in speed["engines"].items()]
    rows.append(("with the drafter", 1000 / speed["speculative_tok_s"], BLUE))
    figure, axes = sized_figure(2.7)
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
    return inline_svg(figure, "speed", "Time per token, milliseconds: " + ", ".join(
        f"{name} {time:.1f}" for name, time in zip(names, times)))


def plot_places(acceptance: dict[str, Any]) -> Markup:
    """Mean acceptance length by context (left) and by place in the answer (right), in tokens per draft."""
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    parts = []
    for axes, key, label in zip(figure.subplots(1, 2, sharey=True), ("by_context_bucket", "by_answer_position"),
                                ("Context (tokens)", "Place in the answer (tokens)")):
        rows = acceptance[key]
        lengths = [row["mean_length"] for row in rows]
        axes.plot(range(len(rows)), lengths, "o-", color=BLUE, linewidth=1.6, markersize=5)
        for x, length in enumerate(lengths):
            falls = x > 0 and lengths[x - 1] > length  # the line comes from above: the label goes below
            axes.annotate(f"{length:.2f}", (x, length), (0, -7 if falls else 6), textcoords="offset points",
                          ha="center", va="top" if falls else "bottom")
        axes.axhline(acceptance["mean_length"], color=GREY, **DASHED)
        axes.set_xticks(range(len(rows)), [f"from\n{row['from']:,}" if len(rows) < 5 else f"{row['from']:,}"
                                           for row in rows])
        axes.set_xlabel(label)
        axes.margins(x=0.25, y=0.3)
        axes.grid(axis="y")
        parts.append(f"{label}: " + ", ".join(f"from {row['from']} {n:.2f}" for row, n in zip(rows, lengths)))
    figure.axes[0].set_ylabel("Mean accept. length (tokens)")
    return inline_svg(figure, "places", "Mean acceptance length. " + "; ".join(parts))


def plot_cycle(cycle: dict[str, Any]) -> Markup:
    """Milliseconds of a speculative cycle's parts."""
    rows = [("drafter", cycle["draft_ms"], BLUE), ("target's pass", cycle["verify_ms"], GREY),
            ("cache", cycle["cache_ms"], GREEN), ("accept, sample", cycle["sample_ms"], ORANGE),
            ("loop's Python", cycle["other_ms"], INK)]
    figure, axes = sized_figure(2.7)
    axes.barh(range(len(rows)), [max(time, 0.0) for _, time, _ in rows], color=[c for _, _, c in rows], height=0.55)
    for y, (_, time, _) in enumerate(rows):
        axes.annotate(f"{time:.2f} ({100 * time / cycle['cycle_ms']:.0f} %)", (max(time, 0.0), y), (5, 0),
                      textcoords="offset points", va="center")
    axes.set(xlim=(0, 1.35 * max(time for _, time, _ in rows)), ylim=(len(rows) - 0.5, -0.5),
             xlabel=f"ms of a cycle of {cycle['cycle_ms']:.1f} ms")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.grid(axis="x")
    said = ", ".join(f"{n} {t:.2f}" for n, t, _ in rows)
    return inline_svg(figure, "cycle", f"Time of a cycle, milliseconds: {said}")


def plot_entropy(buckets: list[dict[str, Any]]) -> Markup:
    """Share of drafted tokens that were rejected, by the target's entropy in nats at their place."""
    figure, axes = sized_figure(2.7)
    shares = [100 * b["rejected"] / (b["accepted"] + b["rejected"]) for b in buckets]
    names = [f"{b['from']:g} up" if b["to"] is None else f"{b['from']:g} to {b['to']:g}" for b in buckets]
    bars = axes.bar(range(len(buckets)), shares, color=ORANGE, width=0.62)
    axes.bar_label(bars, [f"{share:.0f}" for share in shares], padding=2)
    axes.set(ylim=(0, 109), yticks=range(0, 101, 25), xlabel="Entropy of the target (nats)",
             ylabel="Drafted tokens rejected (%)")
    axes.set_xticks(range(len(buckets)), [f"{n}\nn = {b['accepted'] + b['rejected']}" for n, b in zip(names, buckets)])
    axes.grid(axis="y")
    return inline_svg(figure, "entropy", "Drafted tokens rejected by entropy of the target, per cent: "
                + ", ".join(f"{name} nats {share:.0f}" for name, share in zip(names, shares)))


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
    return inline_svg(figure, "curve", "Training loss and replayed mean acceptance length over steps; last: "
                f"loss {curve[-1]['train_loss']:.2f}, length {curve[-1]['mean_length']:.2f}")


def sized_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _height(sets: dict[str, Any]) -> float:
    """Inches that hold a line for each prompt kind and one for all; the neighbouring plot takes the same."""
    return max(2.7, 0.31 * (len(sets) + 1) + 0.7)


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
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
