"""The training loop. It knows no algorithm: the drafter supplies loss and count, the plan supplies the rows.

The gradient is that of the mean over all supervised positions of the global batch, whatever the split into
ranks and micro-batches and whatever the padding.
"""

import signal
import sys
import time
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.parallel import DistributedDataParallel

from data.batching import Plan, collate, with_user_turns
from data.reader import RowReader, fetch, rounds
from drafters.base import Batch
from eval.metrics import Acceptance
from eval.replay import replay
from recipes.errors import TERMINATED
from recipes.schema import Train
from train import checkpoints, metrics, optim
from train.schedule import share_of_peak
from train.zero import as_launched, gathered, shapes_of


class Trainer:
    """One run on one process. `origin` is what drafter.json says of the target, `settings` what a resume compares."""

    def __init__(self, accelerator: Accelerator, drafter: Any, reader: RowReader, plan: Plan, section: Train,
                 folder, origin: dict[str, Any], settings: dict[str, Any]) -> None:
        self.accelerator, self.drafter, self.reader, self.plan, self.section = (
            accelerator, drafter, reader, plan, section)
        self.folder = folder
        self.dtype = getattr(torch, section.dtype)
        self.total = plan.total_steps(section.epochs)
        self.trained = [p for p in drafter.parameters() if p.requires_grad]
        shapes = shapes_of(drafter.to(accelerator.device).tensors())
        self.model, self.optimizer = accelerator.prepare(as_launched(accelerator, drafter),
                                                         optim.build(drafter, section))
        if isinstance(self.model, DistributedDataParallel):
            self.model.broadcast_buffers = False  # the target's tables: the same everywhere, not to be sent each step
        self.progress = checkpoints.Progress()
        self.meter, self.note = metrics.Meter(), ""
        split = checkpoints.Split(section.batch_rows, plan.ranks, section.accumulation)
        self.parts = checkpoints.Parts(drafter, self.optimizer.optimizer, origin, settings, split, shapes)
        self.steps, self.seconds, self.first = 0, 0.0, 0.0  # of this process; seconds of its first step
        self.signalled = self.stop = False  # here; agreed by all ranks, so that all save together

    def resume(self) -> bool:
        """Continues from the latest complete checkpoint; False where there is none. All ranks call it together."""
        if self.accelerator.is_main_process:
            checkpoints.sweep(self.folder)
        path = checkpoints.latest(self.accelerator, self.folder)
        if path is None:
            return False
        checkpoints.check_whole(self.accelerator, path)
        self.progress = checkpoints.read_progress(path, self.parts.settings, self.parts.split)
        if self.accelerator.is_main_process:
            checkpoints.point_best(self.folder, self.progress)
        if self.progress.step < self.total:
            checkpoints.load(path, self.parts)
            self.accelerator.print(f"goes on from {path}, step {self.progress.step} of {self.total}")
        return True

    def run(self) -> None:
        """Trains to the last step. SIGTERM saves at the next step and exits 143."""
        signal.signal(signal.SIGTERM, self.on_sigterm)
        self.model.train()
        if not self.reader.split("validation"):
            self.accelerator.print("no validation rows (prompts.validation = 0): acceptance is not measured, and the "
                                   "latest checkpoint counts as the best", file=sys.stderr)
        if self.parts.settings.get("init_from") and not self.progress.curve:  # what later validations are compared with
            self.validate()
            self.save()
        with self.display() as bar:
            task = bar.add_task("train", total=self.total, completed=self.progress.step, note="")
            while self.progress.step < self.total:
                note = self.step()
                bar.update(task, completed=self.progress.step, note=note)
                told = self.progress.step % (10 * self.section.log_every) == 0 or self.progress.step == self.total
                if told and not bar.console.is_terminal:
                    bar.console.print(f"step {self.progress.step}/{self.total} {note}", soft_wrap=True)
                due = self.progress.step % self.section.validate_every == 0 or self.progress.step == self.total
                if due:
                    self.validate()
                if due or self.progress.step % self.section.save_every == 0 or self.stop:
                    self.save()
                if self.stop and self.progress.step < self.total:
                    self.accelerator.print("stopped by SIGTERM, saved; run the same command to go on", file=sys.stderr)
                    sys.exit(TERMINATED)

    def step(self) -> str:
        """One optimizer step; returns a line of figures. A step without a supervised position changes nothing."""
        section, step, began = self.section, self.progress.step, time.perf_counter()
        set_seed(self.noise_seed(step, 0) % 2**32)  # so that random states need not be saved
        fetch(self.reader, lambda: [[i for part in self.plan.micro_batches(step, rank) for i in self.filled(part)]
                                    for rank in range(self.plan.ranks)])
        parts = self.plan.micro_batches(step, self.accelerator.process_index)
        micro = [self.load(rows) for rows in parts]
        local = torch.tensor([float(sum(self.drafter.count(b) for b in micro)), float(self.signalled),
                              float(sum(self.reader.tokens(i) for rows in parts for i in rows)),
                              float(sum(map(len, parts)))], dtype=torch.float64)
        supervised, stop, tokens, rows = self.accelerator.reduce(local.to(self.accelerator.device), "sum").tolist()
        self.stop = stop > 0
        share = share_of_peak(section.schedule, step, self.total, section.warmup_steps, section.min_lr_share,
                              section.decay_share)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        outputs, norm = [], None
        if supervised:
            # Ranks and micro-batches are averaged by the backends; the sum over positions is what is wanted.
            scale = self.accelerator.num_processes * section.accumulation / supervised
            for index, batch in enumerate(micro):
                with self.accelerator.accumulate(self.model):
                    out = self.model(batch, step / self.total, self.noise_seed(step, index))
                    self.accelerator.backward(out.loss_sum * scale)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.trained, section.clip)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                outputs.append(out)
        else:
            self.progress.skipped += 1
        self.progress.step += 1
        self.progress.tokens += int(tokens)
        self.progress.rows += int(rows)
        spent = time.perf_counter() - began
        self.meter.add(outputs, int(tokens), spent)
        self.steps, self.seconds, self.first = self.steps + 1, self.seconds + spent, self.first or spent
        return self.figures(norm)

    def load(self, rows: list[int]) -> Batch:
        """A micro-batch; an empty one becomes a row without loss, so that every rank takes part."""
        batch = collate([self.reader[i] for i in self.filled(rows)])
        if self.section.user_turns:
            batch.turns = with_user_turns(batch.turns)
        if not rows:
            batch.turns.zero_()
        return batch.to(self.accelerator.device, self.dtype)

    def filled(self, rows: list[int]) -> list[int]:
        """What stands for the rows of a micro-batch: some row where there are none."""
        return rows or list(self.plan.rows[:1])

    def noise_seed(self, step: int, index: int) -> int:
        ranks = self.accelerator.num_processes
        seed = ((self.section.seed * 1_000_003 + step) * 64 + index) * ranks + self.accelerator.process_index
        return seed % 2**63  # what a generator takes; below it for all but large seeds on many ranks

    def figures(self, norm: Any) -> str:
        """On logging steps: what was done since the last one, over all ranks, to the tracker. Returns the display line.

        norm: the global gradient norm before clipping, None where no step was taken.
        """
        progress, meter, plan = self.progress, self.meter, self.plan
        if meter.sums is None or (progress.step % self.section.log_every and progress.step != self.total):
            return self.note
        loss, hits, counts = self.accelerator.reduce(meter.sums, "sum").tolist()
        peak = torch.tensor(float(metrics.peak_memory(self.accelerator.device)), device=self.accelerator.device)
        values = metrics.depth_values(loss, hits, counts)
        progress.train_loss = values["loss/depth_0"]
        values |= {f"lr/{group['name']}": group["lr"] for group in self.optimizer.param_groups}
        values |= {"tokens": progress.tokens, "tokens_per_s": meter.tokens / meter.seconds,
                   "memory/peak_gb": float(self.accelerator.reduce(peak, "max")) / 1e9}
        values |= metrics.coverage(progress.rows, progress.tokens, len(plan.rows), sum(plan.lengths))
        if norm is not None:
            values["grad_norm"] = float(norm)
        if self.section.peak_tflops:
            values["mfu"] = metrics.utilisation(self.drafter.flops(meter.tokens, counts), meter.seconds,
                                                self.section.peak_tflops, self.accelerator.num_processes)
        self.accelerator.log(values, step=progress.step)
        meter.clear()
        best = f" best {progress.best_length:.2f}" if progress.best_step >= 0 else ""
        self.note = metrics.line(values) + best
        return self.note

    def validate(self) -> None:
        """Replayed acceptance over the validation rows, split over ranks; each row once, uneven ends allowed."""
        rows, K = self.reader.split("validation"), self.section.validation_draft_length
        with gathered(self.drafter), self.precision():
            counts = Acceptance(K)
            for own in rounds(self.reader, rows, self.accelerator.process_index, self.accelerator.num_processes):
                counts = counts + replay(self.drafter, self.reader, own, K, self.accelerator.device, self.dtype)
        local = torch.tensor([counts.drafts, *counts.accepted], device=self.accelerator.device)
        drafts, *accepted = self.accelerator.reduce(local, "sum").tolist()
        counts = Acceptance(K, drafts, accepted)
        progress = self.progress
        if not drafts or counts.mean_length > progress.best_length:  # unmeasured, the latest is the best guess
            progress.best_step, progress.best_length = progress.step, counts.mean_length
        row = {"step": progress.step, "tokens": progress.tokens, "train_loss": progress.train_loss,
               "mean_length": counts.mean_length, "per_position": counts.per_position, "drafts": drafts}
        progress.curve.append(row)
        self.accelerator.log({"validation/mean_length": counts.mean_length, **{
            f"validation/position_{i}": rate for i, rate in enumerate(counts.per_position)}}, step=progress.step)

    def precision(self) -> torch.autocast:
        """What the drafter computes in outside the training step, which accelerate wraps itself."""
        return torch.autocast(self.accelerator.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def save(self) -> None:
        checkpoints.save(self.accelerator, self.folder, self.progress, self.parts, self.section.keep)
        self.meter.clear()  # as a run that is resumed from here begins: the curve does not tell one from the other

    def on_sigterm(self, number: int, frame: Any) -> None:
        self.signalled = True

    def display(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                   TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        console = Console(stderr=True, quiet=not self.accelerator.is_main_process)
        return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)
