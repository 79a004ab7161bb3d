"""The report in Markdown, short enough for a pull request: verdict, three numbers, prompt kinds, gate."""

from typing import Any

from eval.settings import measured_at
from eval.verdict import kinds


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, inside a table cell too."""
    for sign in "\\`*_{}[]<>|#":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}", *(f"| {' | '.join(row)} |" for row in rows)]


def span(bounds: list[float]) -> str:
    return f"{bounds[0]:.2f} to {bounds[1]:.2f}"


def latency(report: dict[str, Any]) -> list[list[str]]:
    """Percentiles without and with the drafter; n/a where n is too small."""
    rows = []
    for key, label in (("ttft_ms", "time to first token"), ("itl_ms", "inter-token latency")):
        for side in ("baseline", "speculative"):
            one = report["total"]["latency"][key][side]
            rows.append([f"{label}, {side} (ms)", *("n/a" if one[p] is None else f"{one[p]:.1f}"
                                                   for p in ("p50", "p95", "p99")), f"{one['n']:,}"])
    return rows


def markdown(report: dict[str, Any], judged: list[dict[str, Any]] | None = None) -> str:
    """The summary. `judged`: the gate's bounds, where one was judged (eval/gate.py)."""
    total, verdict = report["total"], report["verdict"]
    acceptance, speed, greedy = total["acceptance"], total["speed"], total["lossless"]["greedy"]
    lines = [f"### {escaped(report['drafter']['kind'])} drafter for {escaped(report['target']['model'])}: "
             f"{escaped(verdict['decision'])}, at {escaped(measured_at(report['settings']))}", "",
             *(f"- {escaped(reason)}" for reason in verdict["reasons"]), ""]
    lines += table(["number", "value", "95 % interval", "n"], [
        ["mean acceptance length (tokens per draft)", f"{acceptance['mean_length']:.2f}", span(acceptance["ci95"]),
         f"{total['drafts']:,} drafts, {total['prompts']:,} prompts"],
        [f"speedup over {escaped(speed['baseline_engine'])}, batch 1", f"{speed['speedup']:.2f}x", span(speed["ci95"]),
         f"{speed['prompts']:,} prompts"],
        ["greedy answers that differ", f"{greedy['mismatches']:,}", "", f"{greedy['prompts']:,} prompts"],
        ["tokens per target pass", f"{total['tokens_per_target_pass']:.2f}", "", f"{total['target_passes']:,} passes"]])
    lines += ["", *table(["prompt kind", "mean length", "95 % interval", "tokens per pass", "prompts"], [
        [escaped(kind), f"{block['acceptance']['mean_length']:.2f}", span(block["acceptance"]["ci95"]),
         f"{block['tokens_per_target_pass']:.2f}", f"{block['prompts']:,}"]
        for kind, block in kinds(report["sets"]).items()])]
    lines += ["", *table(["latency", "p50", "p95", "p99", "n"], latency(report))]
    if judged:
        lines += ["", *table(["gate", "value", "bound", ""], [
            [escaped(one["metric"]), "null" if one["value"] is None else f"{one['value']:.4g}", escaped(one["bound"]),
             one["state"]] for one in judged])]
    stack, settings = report["stack"], report["settings"]
    lines += ["", f"Draft length {settings['draft_length']}, {escaped(measured_at(settings))}, answers up to "
              f"{settings['max_tokens']} tokens; {escaped(stack['dtype'])} on {escaped(stack['device'])}, torch "
              f"{escaped(stack['versions'].get('torch', 'unknown'))}; {escaped(report['drafter']['checkpoint'])} at "
              f"{escaped(stack['git'][:12])}, {escaped(stack['time'])}."]
    lines += [f"\n{escaped(remark)}" for remark in settings.get("remarks", [])]
    return "\n".join(lines) + "\n"
