"""How a running server's report is shown: terminal, page, Markdown. It computes no measurement."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup

from eval.plots import (
    BEHIND_LABEL,
    BLUE,
    DASHED,
    GREY,
    STYLE,
    inline_svg,
    plot_positions,
    sized_figure,
)
from eval.report import check_finite, counted, interval, page, tone
from eval.settings import measured_at
from eval.summary import escaped, table
from eval.verdict import kinds
from recipes.files import write_json, write_text

SIDES = (("baseline", "without"), ("speculative", "with the drafter"))


def length_line(report: dict[str, Any]) -> str:
    """The mean acceptance length with what it is of, or why it is not known."""
    total, server = report["total"], report["server"]
    acceptance = total["acceptance"]
    if acceptance["mean_length"] is None:
        return f"not known: {server['counters'] or 'the server counts no drafts'}"
    spread = f"95 % CI {interval(acceptance['ci95'])}" if acceptance["ci95"] else "no interval"
    n = "" if total["drafts"] is None else f"; n = {counted(total['drafts'], 'draft')}"
    return f"{acceptance['mean_length']:.2f} tokens per draft ({spread}{n})"


def speedup_line(level: dict[str, Any]) -> str:
    """Tokens a second and speedup of a concurrency."""
    rate = level["speculative"]["steady_tok_s"]
    text = f"{rate:,.1f} tokens/s" if rate is not None else "nothing answered"
    if level["speedup"] is None:
        return f"{text}; no speedup: no baseline"
    return (f"{text}; {level['speedup']:.2f}x (95 % CI {interval(level['ci95'])}; "
            f"n = {counted(level['prompts'], 'conversation')})")


def greedy_line(report: dict[str, Any]) -> str:
    """How many texts of the two servers are equal, and where the first differs."""
    greedy, total = report["server"]["greedy"], report["total"]["lossless"]["greedy"]
    if total["mismatches"] is None:
        return "not compared: no baseline"
    text = f"{greedy['equal']:,} of {counted(greedy['prompts'], 'greedy text')} equal"
    first = greedy["first_difference"]
    if first:
        place = f" at {first['unit']} {first['place']}" if first["place"] is not None else ""
        near, far = counted(greedy["near_ties"], "near-tie"), counted(total["mismatches"], "mismatch", "mismatches")
        text += f"; {near}, {far}; first on {first['set']} {first['id']}{place}"
    return text


def warnings(report: dict[str, Any]) -> list[str]:
    """What a reader must know before a number."""
    server, found = report["server"], []
    for level in server["levels"].values():
        where = f"concurrency {level['concurrency']}"
        found += [f"{where}: another client's requests: {sign}" for sign in level["foreign"]]
        for name, label in SIDES:
            side = level[name]
            if side is None:
                continue
            if side["faults"]:
                reasons = ", ".join(f"{reason}: {n}" for reason, n in side["faults"].items())
                failed = counted(sum(side["faults"].values()), "attempt")
                found.append(f"{where}, {label}: {failed} failed ({reasons}); "
                             f"{side['retries']} tried again, {side['timeouts']} timed out, {side['lost']} lost")
            if side["client_busy"] > 0.8:
                found.append(f"{where}, {label}: this client computed {100 * side['client_busy']:.0f} % of the time; "
                             "the figures may be its own")
    if server["restless"]:
        found.append("the server's counters moved while this client had no request in flight")
    if server["drafting"] is False:
        found.append("the server's counters show no draft: it runs without a drafter")
    if server["counters"]:
        found.append(f"no counters, so no acceptance: {server['counters']}")
    return found


def summary_lines(report: dict[str, Any]) -> list[str]:
    """Acceptance, every concurrency, texts, warnings, then the verdict and its reasons."""
    rows = [("Mean acceptance length", length_line(report))]
    rows += [(f"Concurrency {name}", speedup_line(level)) for name, level in report["server"]["levels"].items()]
    rows += [("Greedy texts", greedy_line(report))]
    rows += [("Note", text) for text in warnings(report)]
    rows += [("Verdict", f"{report['verdict']['decision']}, at {measured_at(report['settings'])}")]
    rows += [("", f"- {reason}") for reason in report["verdict"]["reasons"]]
    return [f"{label:24}{text}" for label, text in rows]


def figure(value: float | None, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def level_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each concurrency and server: rates, latencies, tokens a piece."""
    rows = []
    for name, level in report["server"]["levels"].items():
        for key, label in SIDES:
            side = level[key]
            if side is None:
                continue
            speed = (f"{level['speedup']:.2f}x ({interval(level['ci95'])})"
                     if key == "speculative" and level["speedup"] is not None else "")
            rows.append([name, label, f"{side['requests']:,}", figure(side["tok_s"]),
                         figure(side["steady_tok_s"]), speed,
                         *(" / ".join(figure(side[measure][p]) for p in ("p50", "p95", "p99"))
                           for measure in ("ttft_ms", "itl_ms", "request_ms")),
                         figure(side["tokens_per_piece"], 2)])
    return rows


HEADINGS = ["concurrency", "drafter", "requests", "tokens/s", "steady tokens/s", "speedup (95 % CI)",
            "TTFT ms, p50 / p95 / p99", "ITL ms", "request ms", "tokens/piece"]


def acceptance_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each concurrency: what the server counted."""
    rows = []
    for name, level in report["server"]["levels"].items():
        own = level["acceptance"]
        rates = " / ".join(f"{100 * rate:.1f}" for rate in own["per_position"]) if own["per_position"] else "n/a"
        rows.append([name, figure(own["drafts"], 0), figure(own["mean_length"], 2),
                     "n/a" if own["rate"] is None else f"{100 * own['rate']:.1f} %", rates,
                     own["source"] or "not known"])
    return rows


ACCEPTANCE_HEADINGS = ["concurrency", "drafts", "mean length", "rate", "accepted at position 1, 2, ... (%)", "from"]


def kind_rows(report: dict[str, Any]) -> list[list[str]]:
    """Acceptance by kind of prompt, where requests were counted one by one."""
    rows = []
    for kind, block in kinds(report["sets"]).items():
        own = block["acceptance"]
        rows.append([kind, figure(own["mean_length"], 2), interval(own["ci95"]) if own["ci95"] else "n/a",
                     figure(block["drafts"], 0), f"{block['prompts']:,}"])
    return rows


KIND_HEADINGS = ["prompt kind", "mean length", "95 % interval", "drafts", "prompts"]


def markdown(report: dict[str, Any], judged: list[dict[str, Any]] | None = None) -> str:
    """The summary for a pull request. `judged`: the gate's bounds, where one was judged (eval/gate.py)."""
    verdict, server = report["verdict"], report["server"]

    def rows(found: list[list[str]]) -> list[list[str]]:
        return [[escaped(cell) for cell in row] for row in found]

    at = escaped(measured_at(report["settings"]))
    lines = [f"### Server of {escaped(report['target']['model'])}: {escaped(verdict['decision'])}, at {at}", "",
             *(f"- {escaped(reason)}" for reason in verdict["reasons"]),
             f"- mean acceptance length: {escaped(length_line(report))}", f"- {escaped(greedy_line(report))}",
             *(f"- note: {escaped(text)}" for text in warnings(report)), ""]
    lines += table(HEADINGS, rows(level_rows(report)))
    lines += ["", *table(ACCEPTANCE_HEADINGS, rows(acceptance_rows(report)))]
    lines += ["", *table(KIND_HEADINGS, rows(kind_rows(report)))]
    if judged:
        lines += ["", *table(["gate", "value", "bound", ""], [
            [escaped(one["metric"]), "null" if one["value"] is None else f"{one['value']:.4g}", escaped(one["bound"]),
             one["state"]] for one in judged])]
    lines += ["", f"Closed loop, {at}, answers up to {report['settings']['max_tokens']} tokens; "
                  f"{escaped(server['engine'] or server['kind'])} {escaped(server['version'])}; "
                  f"{escaped(report['stack']['time'])}."]
    return "\n".join(lines) + "\n"


def plot_lines(levels: list[dict[str, Any]], pick: Callable[[dict[str, Any]], float | None], name: str,
               label: str) -> Markup | None:
    """A number of both servers over the concurrency, as `pick` takes it from each one's block; None without any."""
    drawn, axes = sized_figure(2.7)
    names, said = [str(level["concurrency"]) for level in levels], []
    for (key, side), colour in zip(SIDES, (GREY, BLUE)):
        values = [pick(level[key]) if level[key] else None for level in levels]
        known = [(x, value) for x, value in enumerate(values) if value is not None]
        if not known:
            continue
        axes.plot(*zip(*known), "o-", color=colour, linewidth=1.6, markersize=5, label=side)
        for x, value in known:
            axes.annotate(f"{value:,.0f}" if value >= 100 else f"{value:.1f}", (x, value), (0, 6),
                          textcoords="offset points", ha="center", color=colour)
        said.append(f"{side} " + ", ".join(f"{names[x]}: {value:.1f}" for x, value in known))
    if not said:
        return None
    axes.set_xticks(range(len(names)), names)
    axes.set(ylim=(0, None), xlabel="Requests in flight", ylabel=label)
    axes.margins(x=0.12, y=0.2)
    axes.grid(axis="y")
    axes.legend(frameon=False)
    return inline_svg(drawn, name, f"{label} by concurrency: " + "; ".join(said))


def plot_speedups(levels: list[dict[str, Any]]) -> Markup | None:
    """Speedup of each concurrency with its interval; None where there is none."""
    known = [level for level in levels if level["speedup"] is not None]
    if not known:
        return None
    drawn, axes = sized_figure(2.7)
    for x, level in enumerate(known):
        axes.vlines(x, *level["ci95"], color=BLUE, linewidth=2.2)
        axes.plot(x, level["speedup"], "o", color=BLUE, markersize=6)
        axes.annotate(f"{level['speedup']:.2f}", (x, level["speedup"]), (8, 0), textcoords="offset points", va="center",
                      bbox=BEHIND_LABEL)
    axes.axhline(1.0, color=GREY, **DASHED)
    axes.set_xticks(range(len(known)), [str(level["concurrency"]) for level in known])
    axes.set(xlabel="Requests in flight", ylabel="Speedup (1 is no gain)")
    axes.margins(x=0.2, y=0.15)
    axes.grid(axis="y")
    return inline_svg(drawn, "speedups", "Speedup by concurrency: " + ", ".join(
        f"{level['concurrency']}: {level['speedup']:.2f}" for level in known))


def render_html(report: dict[str, Any]) -> str:
    """The whole page as text: no script, and no resource outside it."""
    levels, rates = list(report["server"]["levels"].values()), report["total"]["acceptance"]["per_position"]
    with matplotlib.rc_context(STYLE):
        plots = {"rates": plot_lines(levels, lambda side: side["steady_tok_s"], "rates", "Tokens a second"),
                 "gaps": plot_lines(levels, lambda side: side["itl_ms"]["p50"], "gaps", "ITL p50 (ms)"),
                 "speedups": plot_speedups(levels),
                 "positions": plot_positions(rates, 2.7) if rates else None}
    tables = {"levels": (HEADINGS, level_rows(report)), "acceptance": (ACCEPTANCE_HEADINGS, acceptance_rows(report)),
              "kinds": (KIND_HEADINGS, kind_rows(report))}
    return page("live.html.j2", report=report, plots=plots, tables=tables, tone=tone(report["verdict"]["decision"]),
                measured=measured_at(report["settings"]), length=length_line(report), greedy_text=greedy_line(report),
                warnings=warnings(report), first=levels[0])


def write_live(report: dict[str, Any], folder: Path) -> None:
    """Writes report.json, report.html and report.md, each whole or not at all. RunError for a number that is none."""
    check_finite(report, "report")
    html = render_html(report)
    write_json(folder / "report.json", report)
    write_text(folder / "report.html", html)
    write_text(folder / "report.md", markdown(report))
