"""One evaluation: acceptance, lossless proof, speed and verdict of a drafter on the recipe's own target.

Everything is measured at the recipe's sampling, stop strings and rule of acceptance (eval/settings.py), the baseline
too; greedy text is compared beside it.
"""

import json
import resource
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.evalsets import Questions, read_sets
from drafters import imported
from drafters.base import steady
from drafters.fast_cpu import use_skinny_linear
from drafters.placement import on_one_process
from drafters.registry import entry
from drafters.target import Target, require_chat_template
from drafters.tree import chain
from eval import breakdown, timing
from eval.adapt import measured_choice
from eval.decode import Decoder, Output
from eval.earlier import STACK, key_of, read_report, sets_sha256
from eval.figures import arrivals, by_set, per_pass, spread, statistics
from eval.lossless import FREE, compare_greedy, sampling_report
from eval.plans import check_longest, described, plan_of, room_of
from eval.rejections import entropy_figures, frequent
from eval.rows import Asking, Row
from eval.settings import greedy_of, how_of, measured_at, sampling_of, written
from eval.verdict import decide
from recipes.cli import run_folder
from recipes.errors import ConfigError
from recipes.files import sha256_json, write_text
from recipes.provenance import stamp
from recipes.schema import Recipe


class Evaluation:
    """One evaluation of one drafter on one target."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.section = recipe, recipe.eval
        self.how, self.lossy = how_of(recipe.eval), recipe.eval.acceptance != "exact"
        self.began = stamp(asdict(recipe))
        self.folder = run_folder(recipe)
        self.sets = read_sets(recipe.eval, self.folder / "eval" / "sets", recipe.prompts.max_bad_share)
        shown = entry(recipe.drafter.kind).shown(recipe.trace.layers)
        self.target = Target(on_one_process(recipe.target), shown)
        require_chat_template(self.target)
        self.plan, self.reason = plan_of(self.section, recipe.drafter.kind, recipe.drafter.options), ""
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
        if getattr(self.drafter, "unpriced", False):  # it stops where drafting does not pay
            self.drafter.price(timing.cycle_cost(*self.step_times()))
        K = self.plan.depth
        with self.bar:
            outputs = self.answers()
            greedy, sampling = self.greedy(outputs), self.sampled()
            rejections = self.rejections(outputs)
            speed, latency, timed = self.speed()
        total = statistics(self.rows, outputs, K, self.vocabulary, section.seed)
        total |= {"rejections": rejections, "lossless": {"greedy": greedy, "sampling": sampling}, "speed": speed,
                  "latency": latency, "memory": {"peak_bytes": peak_bytes()}}
        sets = by_set(self.rows, outputs, K, self.vocabulary, section.seed)
        for one in self.sets:
            sets[one.name] |= self.origin(one)
        self.write_sent()
        head = self.head()
        return head | {"total": total, "sets": sets, "prompts": self.records(outputs, timed),
                       "verdict": decide(total, sets, self.lossy, measured_at(head["settings"]))}

    def choose_plan(self) -> None:
        """The fastest draft by what is measured now; one token, where drafting does not pay at all."""
        drafter, _ = steady(self.drafter, self.plan)
        check_longest(self.section.draft_length, drafter, "eval.draft_length")
        chosen = measured_choice(self.target, drafter,
                                 [self.ids[i] for i in spread(self.rows, self.section.speed_prompts)], self.section)
        self.plan, self.reason = chosen.plan or chain(1), chosen.reason

    def answers(self) -> list[Output]:
        """Answers to all rows; the rows of further turns are added behind them."""
        outputs: list[Output] = []
        fresh = self.rows
        while fresh:
            done = self.decode("accept  ", fresh, True, self.how)
            outputs += done
            following = self.asking.following(fresh, done)
            fresh = following
            self.rows = [*self.rows, *following]
        return outputs

    def greedy(self, outputs: list[Output]) -> dict[str, Any]:
        """The proof on greedy text: exact acceptance against plain decoding. outputs: the answers that were counted,
        which are these texts where nothing was sampled."""
        section, how = self.section, greedy_of(self.section)
        chosen = spread(self.rows, section.lossless_prompts)
        asked = [self.rows[i] for i in chosen]
        plain = self.decode("lossless", asked, False, how)
        exact = ([outputs[i] for i in chosen] if how == self.how else self.decode("exact   ", asked, True, how))
        return compare_greedy(self.target, [row.ids for row in asked], plain, exact, section.gap_tolerance,
                              how["sampling"])

    def sampled(self) -> dict[str, Any]:
        """The proof on sampled tokens, at the recipe's sampling where it samples."""
        section = self.section
        own = sampling_of(section)
        settings = replace(FREE, repetition_penalty=own.repetition_penalty) if self.lossy or own.greedy else own
        prompts = [self.ids[i] for i in spread(self.rows, section.sampling_contexts)]
        return sampling_report(self.target, self.drafter, prompts, section.sampling_draws, section.seed,
                               not self.plan.narrow, settings) | {"settings": asdict(settings)}

    def rejections(self, outputs: list[Output]) -> dict[str, Any]:
        chosen = spread(self.rows, self.section.entropy_prompts)
        decode = self.target.tokenizer.decode if self.section.texts else None
        return {"entropy": entropy_figures(self.target, [self.rows[i] for i in chosen], [outputs[i] for i in chosen],
                                           self.how["sampling"]),
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

    def decode(self, name: str, rows: list[Row], speculative: bool, how: dict[str, Any]) -> list[Output]:
        """Answers to the rows in batches of similar length; results in the order given. how: of the Decoder."""
        section = self.section
        decoder = Decoder(self.target, section.max_tokens, **how)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        task = self.bar.add_task(name, total=len(order))
        found: dict[int, Output] = {}
        for start in range(0, len(order), section.batch_size):
            part = order[start : start + section.batch_size]
            ids, names = [rows[i].ids for i in part], [rows[i].name for i in part]
            done = (decoder.speculative(ids, self.drafter, self.plan, names=names) if speculative
                    else decoder.plain(ids, names))
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
        steps, levels = self.step_times()
        batches = [timing.by_batch(self.target, self.drafter, rows, plan, section.speed_tokens, size, **self.how)
                   for size in section.batch_sizes]
        single = {"batch": 1, "baseline_tok_s": timings[engine].tok_s, "speculative_tok_s": fast.tok_s,
                  "speedup": ratio, "engine": engine, "prompts": len(rows)}
        speed = {"baseline_tok_s": timings[engine].tok_s, "baseline_engine": engine, "speculative_tok_s": fast.tok_s,
                 "speedup": ratio, "ci95": ci95, "prompts": len(rows), "by_batch": [single, *batches], **steps,
                 "step_repeats": timing.REPEATS,
                 "predicted_speedup": timing.predict(per_pass(fast.outputs), steps, levels),
                 "cycle": breakdown.cycle(self.target, self.drafter, rows, plan, section.speed_tokens, **self.how),
                 "engines": {timing.PLAIN: plain.tok_s, timing.TRANSFORMERS: reference.tok_s}}
        latency = {name: {"baseline": plain.latency(name), "speculative": fast.latency(name)}
                   for name in ("ttft_ms", "itl_ms", "burst_ms")}
        return speed, latency, {i: one for i, one in zip(chosen, timing.each(timings[engine], fast))}

    def step_times(self) -> tuple[dict[str, float], int]:
        """Times of single steps, and how many of them a draft takes."""
        drafter, plan = steady(self.drafter, self.plan)
        return timing.step_times(self.target, drafter, 200, plan), plan.depth

    def stack(self) -> dict[str, Any]:
        """Software and machine as the evaluation found them when it began."""
        began, machine = self.began, self.began["machine"]
        return {"versions": began["versions"], "dtype": self.recipe.target.dtype, "device": str(self.target.device),
                "threads": torch.get_num_threads(), "git": began["git"], "time": began["time"],
                "OMP_WAIT_POLICY": machine["OMP_WAIT_POLICY"], "load_1m": machine["load_1m"]}

    def head(self) -> dict[str, Any]:
        recipe, drafter = self.recipe, self.drafter
        return {
            "schema": "drafthouse.report/1", "name": recipe.name,
            "target": {"model": recipe.target.model, "fingerprint": self.target.fingerprint(),
                       "layers": self.target.layers},
            "drafter": {"kind": drafter.kind, "checkpoint": self.opened.folder.name if self.opened.folder else "",
                        "parameters": sum(p.numel() for p in drafter.parameters()),
                        "draft_vocab_size": int(drafter.t2d.sum()), "options": drafter.meta()["options"]},
            "stack": self.stack(),
            "settings": self.settings(),
        }

    def settings(self) -> dict[str, Any]:
        """What the figures depend on beside target, drafter and stack."""
        section = self.section
        return {"draft_length": self.plan.depth, "plan": described(self.plan), "plan_reason": self.reason,
                **written(self.how["sampling"], section.stop),
                "acceptance": section.acceptance, "lossy": self.lossy,
                **({"typical": asdict(self.how["typical"])} if self.lossy else {}),
                "max_tokens": section.max_tokens, "batch_size": section.batch_size,
                "prompts": ", ".join(s.name for s in self.sets) if section.sets else section.prompts,
                "prompts_sha256": sets_sha256(self.sets), "prompt_ids_sha256": sha256_json(self.ids),
                "seed": section.seed, "turns": dict(Counter(str(row.round + 1) for row in self.rows)),
                "key": self.key(), "remarks": getattr(self.drafter, "remarks", list)()}


def peak_bytes() -> int:
    """Peak memory: of the device where there is one, otherwise of the process (Linux counts in KiB)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
