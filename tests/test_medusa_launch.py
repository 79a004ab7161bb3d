"""Medusa through `accelerate launch train/medusa.py` itself, on two real gloo processes: slow, as every launch is."""

import pytest
from launched import assert_close, counts
from test_train_distributed import DDP, PLAIN, ZERO3, launch, result
from tiny import conversations, write_recipe, write_target, write_traces

pytestmark = pytest.mark.slow
SCRIPT = "train/medusa.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("medusa")
    write_traces(folder / "runs" / "tiny", write_target(folder / "model"), conversations(12, 5))
    write_recipe(folder / "r.yaml", folder / "model", train={"validate_every": 2, "save_every": 2, "keep": 9},
                 drafter={"kind": "medusa", "options": {"draft_vocab_size": 32, "heads": 3}})
    return folder


@pytest.fixture(scope="module")
def alone(base):
    done = launch(base, "alone", PLAIN, "--train.batch_rows", "4", script=SCRIPT)
    assert done.returncode == 0, done.stderr
    return result(base, "alone")


@pytest.mark.parametrize("options, rows, accumulation", [(DDP, 2, 1), (ZERO3, 1, 2)], ids=["ddp", "zero3-accumulated"])
def test_two_processes_equal_one(base, alone, options, rows, accumulation):
    """2 ranks end with the weights and the validation counts of one process with as many rows a step (cases 38, 42,
    66)."""
    name = f"two-{options[1].split('/')[-1]}"
    done = launch(base, name, options, "--train.batch_rows", str(rows), "--train.accumulation", str(accumulation),
                  script=SCRIPT)
    assert done.returncode == 0, done.stderr
    tensors, curve, trainer = result(base, name)
    assert trainer["split"] == {"rows": rows, "ranks": 2, "accumulation": accumulation}
    assert_close(tensors, alone[0])
    assert counts(curve) == counts(alone[1])
