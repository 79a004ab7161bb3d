"""`make eval`: acceptance, lossless proof, speed, verdict and report of a trained drafter.

Run as `python -m eval.run --config RECIPE`. Writes runs/<name>/eval/report.json and report.html. With
eval.server.base_url it measures a running server instead (eval/live_run.py).
"""

import json
import resource
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.evalsets import Questions, read_sets
from drafters import imported
from drafters.fast_cpu import use_skinny_linear
from drafters.placement import on_one_process
from drafters.registry import entry
from drafters.target import Target, require_chat_template
from drafters.tree import chain
from eval import breakdown, timing
from eval.adapt import measured_choice
from eval.curve import read_curve
from eval.decode import Decoder, Output
from eval.earlier import STACK, key_of, read_report, sets_sha256
from eval.figures import arrivals, by_set, per_pass, spread, statistics
from eval.gate import Gate, Options, broken
from eval.gate import lines as gate_lines
from eval.live_page import markdown as live_markdown
from eval.live_page import summary_lines as live_summary_lines
from eval.live_run import evaluated_live, of_a_server, place_of
from eval.lossless import compare_greedy, sampling_report
from eval.plans import check_longest, described, plan_of, room_of, rule_of
from eval.rejections import entropy_figures, frequent
from eval.report import summary_lines, write_report
from eval.rows import Asking, Row
from eval.summary import markdown
from eval.track import log_figures
from eval.verdict import decide, lossless_fault
from recipes.cli import Command, process, run_folder, write_resolved
from recipes.errors import ConfigError, RunError
from recipes.files import one_at_a_time, sha256_json, write_json, write_text
from recipes.provenance import stamp
from recipes.schema import Recipe


class Evaluation:
    """One evaluation of one drafter on one target."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.section = recipe, recipe.eval
        self.began = stamp(asdict(recipe))
        self.folder = run_folder(recipe)
        self.sets = read_sets(recipe.eval, self.folder / "eval" / "sets", recipe.prompts.max_bad_share)
        shown = entry(recipe.drafter.kind).shown(recipe.trace.layers)
        self.target = Target(on_one_process(recipe.target), shown)
        require_chat_template(self.target)
        self.plan, self.reason = plan_of(self.section, recipe.drafter.kind), ""
        self.how = rule_of(self.section)
        self.opened = imported.open_drafter(recipe.drafter, self.target, self.folder)
        self.drafter = self.opened.drafter
        check_longest(self.plan.depth, self.drafter, "eval.draft_length" if self.plan.narrow else "eval.tree: levels")
        if self.target.grouped:
            use_skinny_linear(self.drafter)
        most = getattr(getattr(self.drafter, "shape", None), "max_position_embeddings", self.target.max_length)
        longest = max(self.section.max_tokens, self.section.speed_tokens)
        room = min(self.target.max_length, most) - longest - room_of(self.section, self.plan) - 1
        self.asking = Asking(self.target, self.sets, room, strict=not recipe.eval.sets)
        self.rows = self.asking.first()
        self.console = Console(stderr=True)
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                            console=self.console)

    @property
    def ids(self) -> list[list[int]]:
        return [row.ids for row in self.rows]

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """[V] bool: tokens that the drafter can propose; None is all of them."""
        return getattr(self.drafter, "t2d", None)

    def key(self) -> str:
        """See key_of."""
        return key_of(self.opened.digest, self.section, self.sets, self.target.fingerprint())

    def finished(self) -> dict[str, Any] | None:
        """The report of the same evaluation on the same stack, where it was made before; times are of the stack."""
        try:
            report = read_report(self.folder / "eval" / "report.json")
        except ConfigError:  # there is none, or none that is whole: it is made now
            return None
        now = self.stack()
        same = all(report["stack"].get(name) == now[name] for name in STACK)
        return report if same and report["settings"].get("key") == self.key() else None

    def run(self) -> dict[str, Any]:
        section = self.section
        if section.choose != "given":
            self.choose_plan()
        K = self.plan.depth
        with self.bar:
            outputs = self.answers()
            chosen = spread(self.rows, section.lossless_prompts)
            asked = [self.rows[i] for i in chosen]
            plain = self.decode("lossless", asked, speculative=False)
            exact = self.decode("exact   ", asked, speculative=True) if self.how else [outputs[i] for i in chosen]
            greedy = compare_greedy(self.target, [self.ids[i] for i in chosen], plain, exact, section.gap_tolerance)
            sampling = sampling_report(self.target, self.drafter,
                                       [self.ids[i] for i in spread(self.rows, section.sampling_contexts)],
                                       section.sampling_draws, section.seed, tree=not self.plan.narrow)
            rejections = self.rejections(outputs)
            speed, latency, timed = self.speed()
        total = statistics(self.rows, outputs, K, self.vocabulary, section.seed)
        total |= {"rejections": rejections, "lossless": {"greedy": greedy, "sampling": sampling}, "speed": speed,
                  "latency": latency, "memory": {"peak_bytes": peak_bytes()}}
        sets = by_set(self.rows, outputs, K, self.vocabulary, section.seed)
        for one in self.sets:
            sets[one.name] |= self.origin(one)
        self.write_sent()
        return self.head() | {"total": total, "sets": sets, "prompts": self.records(outputs, timed),
                              "verdict": decide(total, sets, lossy=bool(self.how))}

    def choose_plan(self) -> None:
        """The fastest draft by what is measured now; one token, where drafting does not pay at all."""
        chosen = measured_choice(self.target, self.drafter,
                                 [self.ids[i] for i in spread(self.rows, self.section.speed_prompts)], self.section)
        self.plan, self.reason = chosen.plan or chain(1), chosen.reason

    def answers(self) -> list[Output]:
        """Answers to all rows; the rows of further turns are added behind them."""
        outputs: list[Output] = []
        fresh = self.rows
        while fresh:
            done = self.decode("accept  ", fresh, speculative=True, **self.how)
            outputs += done
            following = self.asking.following(fresh, done)
            fresh = following
            self.rows = [*self.rows, *following]
        return outputs

    def rejections(self, outputs: list[Output]) -> dict[str, Any]:
        chosen = spread(self.rows, self.section.entropy_prompts)
        decode = self.target.tokenizer.decode if self.section.texts else None
        return {"entropy": entropy_figures(self.target, [self.rows[i] for i in chosen], [outputs[i] for i in chosen]),
                "frequent": frequent(self.rows, outputs, decode)}

    def origin(self, one: Questions) -> dict[str, Any]:
        """What the set was made of, and what of it was not asked."""
        rows = [row for row in self.rows if row.set == one.name]
        found = {"origin": one.origin, "sha256": one.sha256, "questions": len({row.key for row in rows}),
                 "dropped": dict(self.asking.dropped[one.name]),
                 "turns_after_cut_answers": self.asking.cut[one.name],
                 "untemplated": sum(not row.templated for row in rows)}
        came = arrivals([row.question.arrival for row in rows if row.round == 0])
        return found | ({"arrivals": came} if came else {})

    def records(self, outputs: list[Output], timed: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
        """Counts of every answer, so that two reports can be compared prompt by prompt; texts only where asked for."""
        found = []
        for number, (row, output) in enumerate(zip(self.rows, outputs)):
            record = {"set": row.set, "id": row.question.id, "category": row.question.category, "round": row.round,
                      "ids_sha256": sha256_json(row.ids)[:16], "prompt_tokens": len(row.ids),
                      "tokens": len(output.tokens), "passes": output.passes, "drafts": output.acceptance.drafts,
                      "accepted": sum(output.acceptance.accepted)}
            if self.section.texts:
                record["prompt"] = self.target.tokenizer.decode(row.ids)
                record["answer"] = self.target.tokenizer.decode(output.tokens)
            found.append(record | timed.get(number, {}))
        return found

    def write_sent(self) -> None:
        """eval/sent.jsonl: the exact ids sent, with the arrival times of a log (case 53)."""
        lines = [json.dumps({"set": row.set, "id": row.question.id, "round": row.round,
                             "arrival": row.question.arrival, "ids": row.ids}) for row in self.rows]
        (self.folder / "eval").mkdir(exist_ok=True)
        write_text(self.folder / "eval" / "sent.jsonl", "\n".join(lines) + "\n")

    def decode(self, name: str, rows: list[Row], speculative: bool, **how: Any) -> list[Output]:
        """Answers to the rows, greedy unless `how` says otherwise, in batches of similar length; results in the order
        given."""
        section = self.section
        decoder = Decoder(self.target, section.max_tokens, seed=section.seed, **how)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        task = self.bar.add_task(name, total=len(order))
        found: dict[int, Output] = {}
        for start in range(0, len(order), section.batch_size):
            part = order[start : start + section.batch_size]
            ids = [rows[i].ids for i in part]
            done = (decoder.speculative(ids, self.drafter, self.plan) if speculative
                    else decoder.plain(ids))
            found |= dict(zip(part, done))
            self.bar.advance(task, len(part))
        return [found[i] for i in range(len(rows))]

    def speed(self) -> tuple[dict[str, Any], dict[str, Any], dict[int, dict[str, float]]]:
        """Speed, latency, and what was timed of each of these rows."""
        section, plan = self.section, self.plan
        chosen = spread(self.rows, section.speed_prompts)
        rows = [self.ids[i] for i in chosen]
        task = self.bar.add_task("speed   ", total=len(rows) + 1)
        timings = timing.interleaved(self.target, self.drafter, rows, plan, section.speed_tokens,
                                     lambda: self.bar.advance(task), **self.how)
        plain, fast, reference = (timings[n] for n in (timing.PLAIN, timing.SPECULATIVE, timing.TRANSFORMERS))
        engine = timing.PLAIN if plain.tok_s >= reference.tok_s else timing.TRANSFORMERS
        ratio, ci95 = timing.speedup(timings[engine], fast, section.seed)
        steps = timing.step_times(self.target, self.drafter, 200, plan)
        batches = [timing.by_batch(self.target, self.drafter, rows, plan, section.speed_tokens, size, **self.how)
                   for size in section.batch_sizes]
        single = {"batch": 1, "baseline_tok_s": timings[engine].tok_s, "speculative_tok_s": fast.tok_s,
                  "speedup": ratio, "engine": engine, "prompts": len(rows)}
        speed = {"baseline_tok_s": timings[engine].tok_s, "baseline_engine": engine, "speculative_tok_s": fast.tok_s,
                 "speedup": ratio, "ci95": ci95, "prompts": len(rows), "by_batch": [single, *batches], **steps,
                 "step_repeats": timing.REPEATS,
                 "predicted_speedup": timing.predict(per_pass(fast.outputs), steps, plan.depth),
                 "cycle": breakdown.cycle(self.target, self.drafter, rows, plan, section.speed_tokens, **self.how),
                 "engines": {timing.PLAIN: plain.tok_s, timing.TRANSFORMERS: reference.tok_s}}
        latency = {name: {"baseline": plain.latency(name), "speculative": fast.latency(name)}
                   for name in ("ttft_ms", "itl_ms", "burst_ms")}
        return speed, latency, {i: one for i, one in zip(chosen, timing.each(timings[engine], fast))}

    def stack(self) -> dict[str, Any]:
        """Software and machine as the evaluation found them when it began."""
        began, machine = self.began, self.began["machine"]
        return {"versions": began["versions"], "dtype": self.recipe.target.dtype, "device": str(self.target.device),
                "threads": torch.get_num_threads(), "git": began["git"], "time": began["time"],
                "OMP_WAIT_POLICY": machine["OMP_WAIT_POLICY"], "load_1m": machine["load_1m"]}

    def head(self) -> dict[str, Any]:
        recipe, section, drafter = self.recipe, self.section, self.drafter
        return {
            "schema": "drafthouse.report/1", "name": recipe.name,
            "target": {"model": recipe.target.model, "fingerprint": self.target.fingerprint(),
                       "layers": self.target.layers},
            "drafter": {"kind": drafter.kind, "checkpoint": self.opened.folder.name if self.opened.folder else "",
                        "parameters": sum(p.numel() for p in drafter.parameters()),
                        "draft_vocab_size": int(drafter.t2d.sum()), "options": drafter.meta()["options"]},
            "stack": self.stack(),
            "settings": {"draft_length": self.plan.depth, "plan": described(self.plan), "plan_reason": self.reason,
                         "temperature": section.typical.temperature if self.how else 0.0,
                         "acceptance": section.acceptance, "lossy": bool(self.how),
                         **({"typical": asdict(self.how["typical"])} if self.how else {}),
                         "max_tokens": section.max_tokens, "batch_size": section.batch_size,
                         "prompts": ", ".join(s.name for s in self.sets) if section.sets else section.prompts,
                         "prompts_sha256": sets_sha256(self.sets), "prompt_ids_sha256": sha256_json(self.ids),
                         "seed": section.seed, "turns": dict(Counter(str(row.round + 1) for row in self.rows)),
                         "key": self.key()},
        }


def peak_bytes() -> int:
    """Peak memory: of the device where there is one, otherwise of the process (Linux counts in KiB)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
