"""Two real processes: the norm that is clipped is the global one, Muon under DDP, float32 masters under ZeRO."""

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from test_train_distributed import DDP, ZERO2, launch, result
from tiny import call, conversations, write_recipe, write_target, write_traces

from train.run import COMMAND

RECORD = """
import json
from accelerate import Accelerator
from recipes.cli import run
from train import loop
from train.run import COMMAND
rows, log, clip, steps = [], Accelerator.log, Accelerator.clip_grad_norm_, loop.Trainer.run
def record_log(self, values, step=None, **rest):
    if "grad_norm" in values:
        rows.append({"grad_norm": values["grad_norm"], "lr": values["lr/adamw"], "clipped": self.clipped})
    return log(self, values, step=step, **rest)
def record_clip(self, parameters, bound):
    norm = clip(self, parameters, bound)
    gradients = [p.grad for p in parameters if p.grad is not None]
    self.clipped = float(sum(g.double().square().sum() for g in gradients) ** 0.5)
    return norm
def record_run(self):
    steps(self)
    dtypes = {str(v.dtype) for state in self.optimizer.state.values() for v in state.values() if hasattr(v, "dtype")}
    path = self.folder.parent / f"recorded-{self.accelerator.process_index}.json"
    path.write_text(json.dumps({"rows": rows, "dtypes": sorted(dtypes)}))
Accelerator.log, Accelerator.clip_grad_norm_, loop.Trainer.run = record_log, record_clip, record_run
run(COMMAND)
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, the traces of 12 training rows and 2 validation rows, a recipe, and a script that records."""
    folder = tmp_path_factory.mktemp("optim-distributed")
    write_traces(folder / "runs" / "tiny", write_target(folder / "model"), conversations(12, 2))
    write_recipe(folder / "r.yaml", folder / "model", train={"log_every": 1})
    (folder / "record.py").write_text(RECORD)
    return folder


def alone(folder: Path, name: str, *flags: str) -> dict[str, torch.Tensor]:
    """Weights after three steps of four rows on one process, this one."""
    shutil.copytree(folder / "runs" / "tiny" / "traces", folder / "runs" / name / "traces")
    handler = signal.getsignal(signal.SIGTERM)
    assert call(COMMAND, folder / "r.yaml", "--name", name, "--train.batch_rows", "4", *flags) == 0
    signal.signal(signal.SIGTERM, handler)
    AcceleratorState._reset_state(True)
    return result(folder, name)[0]


def trained(folder: Path, name: str, options: tuple[str, ...], *flags: str):
    """Weights after three steps of two processes, and what each of them recorded."""
    done = launch(folder, name, options, *flags, script=str(folder / "record.py"))
    assert done.returncode == 0, done.stderr
    found = [folder / "runs" / name / f"recorded-{rank}.json" for rank in range(2)]
    return result(folder, name)[0], [json.loads(path.read_text()) for path in found]


@pytest.fixture(scope="module")
def one(folder):
    """One process, clipped far below its gradient norms: its weights, and the norms and rates it logged."""
    rows = []

    def record(self, values, step=None):
        if "grad_norm" in values:
            rows.append((values["grad_norm"], values["lr/adamw"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "log", record)
        return alone(folder, "one", "--train.clip", "0.05"), *zip(*rows)


@pytest.mark.parametrize("options, rows, accumulation", [(DDP, 2, 1), (DDP, 1, 2), (ZERO2, 1, 2)],
                         ids=["ddp", "ddp-accumulated", "zero2-accumulated"])
def test_clips_by_the_global_norm(folder, one, options, rows, accumulation):
    """Two ranks, whole or accumulated, log the gradient norms of one process with all rows, unclipped, and its rates,
    and end with its weights; under DDP both ranks hold a gradient of exactly the bound (cases 38, 39)."""
    name = f"clip-{Path(options[1]).stem}-{accumulation}"
    weights, records = trained(folder, name, options, "--train.batch_rows", str(rows), "--train.clip", "0.05",
                               "--train.accumulation", str(accumulation))
    wanted, norms, rates = one
    found = [[row["grad_norm"] for row in record["rows"]] for record in records]
    assert min(norms) > 1 and found[0] == found[1] == pytest.approx(list(norms), rel=1e-3)
    assert [[row["lr"] for row in record["rows"]] for record in records] == [list(rates)] * 2
    if options == DDP:
        clipped = [[row["clipped"] for row in record["rows"]] for record in records]
        assert clipped[0] == clipped[1] == pytest.approx([0.05] * 3, rel=1e-3)
    for key in weights:
        torch.testing.assert_close(weights[key], wanted[key], rtol=1e-3, atol=2e-4)


def test_muon_under_ddp_equals_one_process(folder):
    """Two ranks with Muon move the hidden matrices as one process does, up to what rounding before the bfloat16
    iteration does to an update; a run on half of the rows moves them elsewhere."""
    muon = ("--train.optimizer", "muon")
    start = alone(folder, "muon-start", *muon, "--train.lr", "1e-12")
    whole = alone(folder, "muon-one", *muon)
    half = alone(folder, "muon-half", *muon, "--train.batch_rows", "2", "--train.epochs", "0.5")
    both, _ = trained(folder, "muon-two", DDP, *muon, "--train.batch_rows", "2")

    def apart(found: dict[str, torch.Tensor]) -> float:
        keys = [key for key in start if start[key].dim() == 2 and key != "lm_head.weight"]
        return math.sqrt(sum((found[k] - whole[k]).square().sum() for k in keys)
                         / sum((whole[k] - start[k]).square().sum() for k in keys))

    assert apart(both) < 0.05 < 0.2 < apart(half)


def test_float32_masters_under_zero(folder):
    """bfloat16 under ZeRO-2: the moments are float32, and the saved weights are no bfloat16 numbers."""
    weights, records = trained(folder, "masters", ZERO2, "--train.dtype", "bfloat16")
    assert [record["dtypes"] for record in records] == [["torch.float32"]] * 2
    for key in ("fc.weight", "lm_head.weight"):
        assert weights[key].dtype == torch.float32
        assert (weights[key] != weights[key].bfloat16()).float().mean() > 0.9
