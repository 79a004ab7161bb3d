"""`make eval`: acceptance, lossless proof, speed, verdict and report of a trained drafter.

Run as `python -m eval.run --config RECIPE`. Writes runs/<name>/eval/report.json and report.html.
"""

import json
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.chat import prompt_ids
from data.prompts import Prompt, evaluation_prompts
from drafters import checkpoint, imported
from drafters.base import Drafter
from drafters.fast_cpu import use_skinny_linear
from drafters.placement import on_one_process
from drafters.target import Target, require_chat_template
from eval import timing
from eval.decode import Decoder, Output
from eval.lossless import compare_greedy, sampling_report
from eval.metrics import Acceptance, bootstrap, repeated_share
from eval.report import summary_lines, write_report
from eval.verdict import decide
from recipes.cli import Command, process, run_dir
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file, sha256_json
from recipes.provenance import git_revision, stamp
from recipes.schema import Recipe

BUCKETS = [0, 512, 2048, 8192, 32768, 131072]
REPETITIVE = 0.2  # share of an answer inside repeated 8-grams above which it counts as repetitive


def spread(prompts: list[Prompt], count: int) -> list[int]:
    """`count` indices spread evenly over the prompts, so that every kind is met."""
    count = min(count, len(prompts))
    return [i * len(prompts) // count for i in range(count)]


def statistics(outputs: list[Output], K: int, drafter: Drafter, seed: int) -> dict[str, Any]:
    """The report's block for a set of answers; definitions in docs/report.md."""
    total = sum((o.acceptance for o in outputs), Acceptance(K))
    accepted = np.array([sum(o.acceptance.accepted) for o in outputs], dtype=float)
    drafts = np.array([o.acceptance.drafts for o in outputs], dtype=float)
    ci95 = [1 + x for x in bootstrap(accepted, drafts, seed)] if len(outputs) > 1 else [1.0, float(K + 1)]
    rejected = [t for o in outputs for t in o.rejected]
    outside = sum(not bool(drafter.t2d[t]) for t in rejected)
    shares = [repeated_share(o.tokens) for o in outputs]
    tokens = sum(len(o.tokens) for o in outputs)
    fresh = [o for o, share in zip(outputs, shares) if share <= REPETITIVE]
    return {
        "prompts": len(outputs), "tokens": tokens, "drafts": total.drafts,
        "acceptance": {"rate": total.rate, "mean_length": total.mean_length, "per_position": total.per_position,
                       "by_context_bucket": by_context(outputs), "ci95": ci95},
        "tokens_per_target_pass": per_pass(outputs), "target_passes": sum(o.passes for o in outputs),
        "repetition": {"share": sum(s * len(o.tokens) for s, o in zip(shares, outputs)) / max(tokens, 1),
                       "tokens_per_target_pass_without": per_pass(fresh) if fresh else None},
        "vocabulary_misses": {"rejections": len(rejected), "outside_draft_vocabulary": outside,
                              "share": outside / len(rejected) if rejected else None},
    }


def per_pass(outputs: list[Output]) -> float:
    """Kept tokens over the target's decode passes; the first token of each answer comes from the prefill."""
    passes = sum(o.passes for o in outputs)
    return sum(len(o.tokens) - 1 for o in outputs) / passes if passes else 1.0


def by_context(outputs: list[Output]) -> list[dict[str, Any]]:
    """Mean acceptance length of the drafts that began within each context length."""
    found: dict[int, list[int]] = {}
    for context, accepted in (d for o in outputs for d in o.drafts):
        found.setdefault(max(b for b in BUCKETS if b <= context), []).append(accepted)
    ends = dict(zip(BUCKETS, [*BUCKETS[1:], 1 << 30]))
    return [{"from": b, "to": ends[b], "drafts": len(v), "mean_length": 1 + sum(v) / len(v)}
            for b, v in sorted(found.items())]


class Evaluation:
    """One evaluation of one drafter on one target."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.section = recipe, recipe.eval
        self.folder = run_dir(recipe)
        self.prompts, self.prompts_sha256 = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
        self.target = Target(on_one_process(recipe.target), recipe.trace.layers)
        require_chat_template(self.target)
        self.checkpoint = imported.chosen(recipe.drafter, self.folder, self.target)
        self.drafter = checkpoint.load(self.checkpoint, self.target)
        if self.target.grouped:
            use_skinny_linear(self.drafter)
        self.ids = [prompt_ids(self.target.tokenizer, p.messages, p.tools) for p in self.prompts]
        room = self.target.max_length - self.section.max_tokens - self.section.draft_length - 1
        for prompt, ids in zip(self.prompts, self.ids):
            if len(ids) > room:
                raise ConfigError(f"evaluation prompt {prompt.id}: {len(ids)} tokens, "
                                  f"the target's context leaves {room}")
        self.console = Console(stderr=True)
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                            console=self.console)

    def key(self) -> str:
        """Digest of all that decides the figures, times aside: what a finished evaluation is recognised by."""
        weights = sha256_file(self.checkpoint / checkpoint.WEIGHTS)
        return sha256_json([weights, asdict(self.section), self.prompts_sha256, self.target.fingerprint()])

    def finished(self) -> dict[str, Any] | None:
        """The report of the same evaluation, where it was made before."""
        try:
            report = json.loads((self.folder / "eval" / "report.json").read_text(encoding="utf-8"))
            return report if report["settings"]["key"] == self.key() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def run(self) -> dict[str, Any]:
        section, K = self.section, self.section.draft_length
        with self.bar:
            outputs = self.decode("accept  ", range(len(self.ids)), speculative=True)
            chosen = spread(self.prompts, section.lossless_prompts)
            plain = self.decode("lossless", chosen, speculative=False)
            greedy = compare_greedy(self.target, [self.ids[i] for i in chosen], plain,
                                    [outputs[i] for i in chosen], section.gap_tolerance)
            sampling = sampling_report(self.target, self.drafter,
                                       [self.ids[i] for i in spread(self.prompts, section.sampling_contexts)],
                                       section.sampling_draws, section.seed)
            speed, latency = self.speed()
        total = statistics(outputs, K, self.drafter, section.seed)
        total |= {"lossless": {"greedy": greedy, "sampling": sampling}, "speed": speed, "latency": latency,
                  "memory": {"peak_bytes": peak_bytes()}}
        kinds = dict.fromkeys(p.kind or "all" for p in self.prompts)
        sets = {kind: statistics([o for o, p in zip(outputs, self.prompts) if (p.kind or "all") == kind], K,
                                 self.drafter, section.seed) for kind in kinds}
        return self.head() | {"total": total, "sets": sets, "verdict": decide(total, sets)}

    def decode(self, name: str, chosen, speculative: bool) -> list[Output]:
        """Greedy answers to the chosen prompts, in batches of similar length; results in the order given."""
        section = self.section
        decoder = Decoder(self.target, section.max_tokens, seed=section.seed)
        order = sorted(chosen, key=lambda i: len(self.ids[i]))
        task = self.bar.add_task(name, total=len(order))
        found: dict[int, Output] = {}
        for start in range(0, len(order), section.batch_size):
            part = order[start : start + section.batch_size]
            rows = [self.ids[i] for i in part]
            done = (decoder.speculative(rows, self.drafter, section.draft_length) if speculative
                    else decoder.plain(rows))
            found |= dict(zip(part, done))
            self.bar.advance(task, len(part))
        return [found[i] for i in chosen]

    def speed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        section, K = self.section, self.section.draft_length
        rows = [self.ids[i] for i in spread(self.prompts, section.speed_prompts)]
        task = self.bar.add_task("speed   ", total=len(rows) + 1)
        timings = timing.interleaved(self.target, self.drafter, rows, K, section.speed_tokens,
                                     lambda: self.bar.advance(task))
        plain, fast, reference = (timings[n] for n in (timing.PLAIN, timing.SPECULATIVE, timing.TRANSFORMERS))
        engine = timing.PLAIN if plain.tok_s >= reference.tok_s else timing.TRANSFORMERS
        ratio, ci95 = timing.speedup(timings[engine], fast, section.seed)
        steps = timing.step_times(self.target, self.drafter, 200, K)
        timed = Decoder(self.target, section.speed_tokens).speculative(rows, self.drafter, K)
        batches = [timing.by_batch(self.target, self.drafter, rows, K, section.speed_tokens, size)
                   for size in section.batch_sizes if size <= len(rows)]
        single = {"batch": 1, "baseline_tok_s": timings[engine].tok_s, "speculative_tok_s": fast.tok_s,
                  "speedup": ratio}
        speed = {"baseline_tok_s": timings[engine].tok_s, "baseline_engine": engine, "speculative_tok_s": fast.tok_s,
                 "speedup": ratio, "ci95": ci95, "predicted_speedup": timing.predict(per_pass(timed), steps, K),
                 "prompts": len(rows), "by_batch": [single, *batches], **steps,
                 "engines": {timing.PLAIN: plain.tok_s, timing.TRANSFORMERS: reference.tok_s}}
        latency = {name: {"baseline": timing.percentiles(getattr(plain, name)),
                          "speculative": timing.percentiles(getattr(fast, name))} for name in ("ttft_ms", "itl_ms")}
        return speed, latency

    def head(self) -> dict[str, Any]:
        recipe, section, drafter = self.recipe, self.section, self.drafter
        origin = stamp(asdict(recipe))
        return {
            "schema": "drafthouse.report/1", "name": recipe.name,
            "target": {"model": recipe.target.model, "fingerprint": self.target.fingerprint(),
                       "layers": self.target.layers},
            "drafter": {"kind": drafter.kind, "checkpoint": self.checkpoint.name,
                        "parameters": sum(p.numel() for p in drafter.parameters()),
                        "draft_vocab_size": int(drafter.t2d.sum()), "options": drafter.meta()["options"]},
            "stack": {"versions": origin["versions"], "dtype": recipe.target.dtype, "device": str(self.target.device),
                      "threads": torch.get_num_threads(), "git": git_revision(), "time": origin["time"],
                      "OMP_WAIT_POLICY": origin["machine"]["OMP_WAIT_POLICY"],
                      "load_1m": origin["machine"]["load_1m"]},
            "settings": {"draft_length": section.draft_length, "temperature": 0.0, "max_tokens": section.max_tokens,
                         "batch_size": section.batch_size, "prompts": section.prompts,
                         "prompts_sha256": self.prompts_sha256, "prompt_ids_sha256": sha256_json(self.ids),
                         "seed": section.seed, "key": self.key()},
        }


def peak_bytes() -> int:
    """Peak memory: of the device where there is one, otherwise of the process (Linux counts in KiB)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Validations of the training run; empty for a drafter that was trained elsewhere."""
    path = folder / "checkpoints" / "curve.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def main(recipe: Recipe, switches: set[str]) -> None:
    evaluation = Evaluation(recipe)
    report = None if "again" in switches else evaluation.finished()
    if report is None:
        report = evaluation.run()
        write_report(report, read_curve(evaluation.folder), evaluation.folder / "eval")
    for line in summary_lines(report):
        print(line)
    print(f"report: {evaluation.folder / 'eval' / 'report.html'}")
    greedy = report["total"]["lossless"]["greedy"]
    if greedy["mismatches"] > 0 or greedy["near_ties"] > 0.01 * max(greedy["prompts"], 100):
        raise RunError(f"speculation changed {greedy['mismatches']} of {greedy['prompts']} greedy answers "
                       f"({greedy['near_ties']} near-ties): this drafter must not be served")


COMMAND = Command("make eval", "Evaluates a trained drafter: acceptance, lossless proof, speed, report.", main,
                  {"again": "evaluate although the same evaluation was finished before"})

if __name__ == "__main__":
    process(COMMAND)
