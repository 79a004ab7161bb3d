"""Two DeepSpeed processes that start from a drafter measure and save it before their first step."""

import json

import pytest
import torch
from launched import counts
from published import maps, native, weights, write
from safetensors.torch import load_file
from test_train_distributed import ZERO2, launch, result
from tiny import conversations, write_recipe, write_target, write_traces

from drafters import checkpoint
from train import checkpoints


@pytest.mark.slow
def test_two_processes_start_from_a_drafter_and_resume_at_step_0(tmp_path):
    """ZeRO-2 on two ranks: step 0 holds the source's weights, whole (case 18); with only step 0 left, the same command
    ends with the weights and the curve of the undisturbed run (case 19)."""
    source = write(tmp_path / "source", native(), weights() | maps())
    write_traces(tmp_path / "runs" / "tiny", write_target(tmp_path / "model"), conversations(12, 5))
    write_recipe(tmp_path / "r.yaml", tmp_path / "model", train={"validate_every": 2, "save_every": 2, "keep": 9},
                 drafter={"init_from": str(source), "options": {"depth": 2, "deepen_at": 0.0}})
    done = launch(tmp_path, "whole", ZERO2)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "whole" / "checkpoints"
    first = load_file(checkpoint.path_of(folder, 0) / checkpoint.WEIGHTS)
    assert all(torch.equal(first[name], tensor) for name, tensor in (weights() | maps()).items())
    wanted, curve, _ = result(tmp_path, "whole")
    assert [row["step"] for row in curve] == [0, 2, 3] and json.loads((folder / "best.json").read_text())
    for step in checkpoints.steps_in(folder)[1:]:
        checkpoint.path_of(folder, step).rename(tmp_path / str(step))
    again = launch(tmp_path, "whole", ZERO2)
    assert again.returncode == 0, again.stderr
    found, resumed, _ = result(tmp_path, "whole")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) and counts(resumed) == counts(curve)
