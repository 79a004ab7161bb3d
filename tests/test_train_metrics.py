"""What the trainer reports: each figure by hand or against an independent count."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_trainer import trainer_base, trainers
from torch.utils.flop_counter import FlopCounterMode

from data.batching import Plan, collate
from drafters.base import LossOutput
from recipes.draft_cost import chain_flops
from train import metrics


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target, the traces of 12 + 3 rows, and a recipe."""
    return trainer_base(tmp_path_factory.mktemp("metrics"))


@pytest.fixture
def build(base, tmp_path):
    """Makes a Trainer whose tracker is the list `logged`."""
    for make in trainers(base, tmp_path):
        logged = []

        def logging(make=make, logged=logged, **overrides):
            trainer = make(**overrides)
            trainer.accelerator.log = lambda values, step: logged.append({"step": step, **values})
            return trainer, logged

        yield logging


def test_simulated_length_by_hand():
    """Two steps that hit every second time: 1 + 1/2 + 1/4; nothing unrolled: 1; certain hits: K + 1."""
    assert metrics.simulated_length([0.5, 0.5]) == 1.75
    assert metrics.simulated_length([]) == 1.0
    assert metrics.simulated_length([1.0, 1.0, 1.0]) == 4.0
    assert metrics.simulated_length([0.0, 1.0]) == 1.0


def test_sums_between_log_lines():
    """Losses are means over the positions of all steps since the last line; a depth unrolled in one of two steps is the
    mean of that one, and a depth without positions is left out."""
    meter = metrics.Meter()
    meter.add([LossOutput(torch.zeros(()), torch.tensor([6.0]), torch.tensor([2]), torch.tensor([4]))], 10, 0.5)
    meter.add([LossOutput(torch.zeros(()), torch.tensor([2.0, 9.0, 0.0]), torch.tensor([1, 1, 0]),
                          torch.tensor([4, 2, 0]))], 30, 1.5)
    assert meter.tokens == 40 and meter.seconds == 2.0
    assert metrics.depth_values(*meter.sums.tolist()) == {
        "loss/depth_0": 1.0, "loss/depth_1": 4.5, "hit_rate/depth_0": 0.375, "hit_rate/depth_1": 0.5,
        "simulated_length/teacher_forced": 1 + 0.375 + 0.375 * 0.5}
    meter.clear()
    assert meter.sums is None and meter.tokens == 0


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), batch_rows=st.integers(1, 4),
       ranks=st.integers(1, 3), steps=st.integers(1, 30))
def test_coverage_against_the_rows_of_the_plan(lengths, batch_rows, ranks, steps):
    """Counted row by row over the plan's own batches, in any epoch: shares, distinct rows, and a full epoch at its
    last step."""
    plan = Plan(tuple(range(len(lengths))), tuple(lengths), batch_rows, ranks, 1, 0)
    batches = [[i for rank in range(ranks) for part in plan.micro_batches(step, rank) for i in part]
               for step in range(steps)]
    *_, rows = accumulate(map(len, batches))
    found = metrics.coverage(rows, sum(lengths[i] for batch in batches for i in batch), len(lengths), sum(lengths))
    epoch = (steps - 1) // plan.steps_per_epoch
    now = [i for batch in batches[epoch * plan.steps_per_epoch :] for i in batch]
    assert found["data/epoch_rows_share"] == pytest.approx(len(now) / len(lengths))
    assert found["data/epoch_tokens_share"] == pytest.approx(sum(lengths[i] for i in now) / sum(lengths))
    assert found["data/distinct_rows"] == len({i for batch in batches for i in batch})
    assert found["data/epoch"] == pytest.approx(epoch + len(now) / len(lengths))


def test_flops_by_hand():
    """Ten tokens, chains of 4 and 2 positions, every size another prime: each term once, written out."""
    sizes = {"fuse": 3, "every": 5, "step": 7, "head": 11, "teacher": 13}
    wanted = 4 * 3 * 10 + 6 * 5 * (10 + 2) + 6 * 7 * 6 + 6 * 11 * 6 + 2 * 13 * 4
    assert chain_flops(10, [4, 2], [4, 2], **sizes, train_head=True) == wanted
    assert chain_flops(10, [4, 2], [4, 2], **sizes, train_head=False) == wanted - 2 * 11 * 6
    assert chain_flops(0, [], [], **sizes, train_head=True) == 0


@pytest.mark.parametrize("head, layers", [(True, 1), (False, 1), (True, 2)])
def test_flops_against_torch_counting(build, base, head, layers):
    """One row, so no padding: torch's own counter of the matrix products that ran, forward and backward, without those
    of queries with keys, finds the model FLOPs within a tenth."""
    trainer, _ = build(drafter__options__depth=3, drafter__options__train_head=head,
                       drafter__options__num_layers=layers)
    row = max(range(12), key=base.reader.supervised)
    batch = collate([base.reader[row]])
    counter = FlopCounterMode(display=False)
    with counter:
        out = trainer.drafter(batch, 1.0, 0)
        out.loss_sum.backward()
    ran = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    model = trainer.drafter.flops(len(base.reader[row].ids), out.depth_count.tolist())
    assert model == pytest.approx(ran, rel=0.1)


def test_display_line_by_hand():
    """The line names what is no acceptance, and shows the utilisation only where it is known."""
    values = {"loss/depth_0": 1.5, "hit_rate/depth_0": 0.5, "hit_rate/depth_1": 0.25, "tokens_per_s": 1234.4,
              "simulated_length/teacher_forced": 1.625, "data/epoch": 0.5, "memory/peak_gb": 3.21}
    wanted = "loss 1.50 hits 0.50 0.25 forced length 1.62 1234 tok/s epoch 0.50 3.2 GB"
    assert metrics.line(values) == wanted and metrics.line({**values, "mfu": 0.314}) == f"{wanted} mfu 31%"


def test_utilisation_by_hand():
    """Two devices of 5 TFLOP/s that did 4e12 FLOPs in half a second used 80 %."""
    assert metrics.utilisation(4e12, 0.5, 5.0, 2) == pytest.approx(0.8)


def test_peak_memory_is_the_kernels():
    """On a CPU the figure is the kernel's own high-water mark of this process, and it never falls."""
    before = metrics.peak_memory(torch.device("cpu"))
    status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    assert before == pytest.approx(int(status["VmHWM"].split()[0]) * 1024, rel=0.02)
    assert metrics.peak_memory(torch.device("cpu")) >= before


@pytest.mark.parametrize("peak_tflops", [0, 0.5])
def test_what_a_run_logs(build, base, peak_tflops):
    """Every second step the tracker gets the figures of two steps; tokens, rows and rates are those of the plan, and
    utilisation is logged only where the peak is known."""
    trainer, logged = build(train__epochs=1, train__log_every=2, train__peak_tflops=peak_tflops,
                            train__validate_every=100, drafter__options__depth=2)
    trainer.run()
    rows = [values for values in logged if "tokens" in values]
    assert [values["step"] for values in rows] == [2, 4, 6]
    last = rows[-1]
    assert set(last) == {"step", "loss/depth_0", "loss/depth_1", "hit_rate/depth_0", "hit_rate/depth_1", "grad_norm",
                         "simulated_length/teacher_forced", "lr/adamw", "tokens", "tokens_per_s", "memory/peak_gb",
                         "data/epoch", "data/epoch_rows_share", "data/epoch_tokens_share", "data/distinct_rows"} | (
        {"mfu"} if peak_tflops else set())
    assert last["tokens"] == sum(map(base.reader.tokens, range(12))) and last["data/distinct_rows"] == 12
    assert last["data/epoch"] == last["data/epoch_rows_share"] == last["data/epoch_tokens_share"] == 1.0
    assert rows[0]["data/epoch_rows_share"] == pytest.approx(4 / 12)
    assert last["simulated_length/teacher_forced"] == pytest.approx(
        1 + last["hit_rate/depth_0"] * (1 + last["hit_rate/depth_1"]))
    assert 0 < last["memory/peak_gb"] < 64 and last["lr/adamw"] == pytest.approx(0.01 * 0.05)
    if peak_tflops:
        assert 0 < last["mfu"] < 1


def test_coverage_goes_on_after_a_resume(build, base):
    """Rows and tokens seen are part of a checkpoint: the step behind a resume reports all that was read before it."""
    first, logged = build(train__log_every=1)
    first.model.train()
    for _ in range(2):
        first.step()
    first.save()
    second, logged = build(train__log_every=1)
    second.resume()
    second.model.train()
    second.step()
    read = [i for step in range(3) for part in second.plan.micro_batches(step, 0) for i in part]
    assert logged[-1]["step"] == 3 and logged[-1]["data/distinct_rows"] == len(read) == 6
    assert logged[-1]["tokens"] == sum(map(base.reader.tokens, read))
