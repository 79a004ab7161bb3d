"""A tensor-parallel trace run on two real gloo processes against one process with the whole target."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny import chat_tokenizer, llama, load_target, write_prompts, write_recipe

from data.collect import COMMAND
from data.compare import NOISE, compare
from data.store import TraceReader
from drafters.tensor_parallel import ShardedTarget, lead
from recipes.cli import DEFAULT_RECIPE, Command, run
from recipes.errors import ConfigError
from recipes.schema import Target as TargetSection

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [f"tell me how one forecasts {thing}" for thing in ("rain", "snow", "wind", "fog", "hail")]
SECTIONS = {"prompts": {"validation": 2}, "trace": {"layers": [0, 2, 6]},
            "generation": {"max_tokens": 6, "batch_size": 3, "unit_rows": 3}}


def launch(*command: str) -> subprocess.CompletedProcess:
    """A finished torchrun of two ranks with one thread each."""
    drop = ("ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(drop)} | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           "2", *command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder of the runs, what each rank noted, traces of the two ranks, traces of one process). The target's head is
    its embedding, the harder case: one tensor is shared out for two uses."""
    folder = tmp_path_factory.mktemp("ranks")
    model = llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder / "model")
    chat_tokenizer().save_pretrained(folder / "model")
    prompts = write_prompts(folder / "prompts.jsonl", TEXTS)
    sections = {**SECTIONS, "prompts": {**SECTIONS["prompts"], "sources": [{"kind": "jsonl", "path": str(prompts)}]}}
    one, two = (write_recipe(folder / kind / "r.yaml", folder / "model", **sections, **({
        "target": {"tp_plan": "auto"}} if kind == "two" else {})) for kind in ("one", "two")
        if (folder / kind).mkdir() is None)
    done = launch(str(ROOT / "tests" / "tensor_parallel_ranks.py"), str(two), str(folder))
    assert done.returncode == 0, done.stderr
    with pytest.raises(SystemExit) as stop:
        run(COMMAND, ["--config", str(one)])
    assert stop.value.code == 0
    return (folder, *(TraceReader(folder / kind / "runs" / "tiny" / "traces") for kind in ("two", "one")))


def test_traces_of_two_ranks_are_those_of_one_process(world):
    """Answers are equal and states agree within float32; so do the fingerprint and all that names the traces (cases
    01, 36): the same folder may be gone on with by one process."""
    _, two, one = world
    assert len(two) == len(one) == len(TEXTS)
    for i in range(len(one)):
        ours, theirs = two[i], one[i]
        assert (ours.id, ours.ids.tolist(), ours.tail) == (theirs.id, theirs.ids.tolist(), theirs.tail)
        assert compare(ours, theirs, torch.float32, NOISE[torch.float32])[1] == ""
    assert two.manifest["target"] == one.manifest["target"] and two.manifest["key"] == one.manifest["key"]


def test_both_ranks_compute_the_same_states_and_only_rank_0_writes(world):
    """Every pass of rank 0 is one of rank 1, with the same result; rank 1 opens no file for writing (case 66: nothing
    is done twice). Head and embedding are whole."""
    folder, *_ = world
    first, second = (load_file(folder / f"rank{rank}.safetensors") for rank in (0, 1))
    head, embedding = first.pop("head"), first.pop("embedding")
    assert first.keys() == second.keys() and len(first) > 20
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-5)
    whole = load_target(folder / "model", "float32")
    assert torch.equal(head, whole.head_weight) and torch.equal(embedding, whole.embedding)
    written = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert written[0] and not written[1]


def test_heads_that_cannot_be_dealt_out_are_a_message(monkeypatch):
    """Two key/value heads on three ranks: refused before a weight is read."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match="4 attention heads with 2 key/value heads cannot be shared among 3 proc"):
        ShardedTarget.placement(SimpleNamespace(config=llama(layers=1).config))


@pytest.mark.parametrize("end, codes, message", [
    (ConfigError("generation.max_tokens = 9000: no room"), [2, 0], ""),
    (OSError(errno.ENOSPC, "No space left on device", "traces"), [1, 0], ""),
    (None, [-signal.SIGKILL, 1], "the first process of this launch has ended")])
def test_what_ends_rank_0_is_no_traceback_elsewhere(tmp_path, end, codes, message):
    """A user's mistake and a full disk are told by rank 0 alone; where that is killed, the other one says so."""
    def fail():
        if end is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise end

    def work(rank: int) -> None:
        signal.alarm(120)  # rather dead than waiting for one that never comes
        os.environ["TORCHELASTIC_RUN_ID"] = "launched"
        command = Command("make x", "About.", lambda recipe, switches: lead(recipe.target, fail))
        run(command, ["--config", str(ROOT / DEFAULT_RECIPE), "--target.tp_plan", "auto"])

    first, second = forked.together(2, work, tmp_path)
    assert [first.code, second.code] == codes, first.err + second.err
    assert message in second.err and second.err.count("\n") == bool(message)
    assert end is None or str(end.args[-1]) in first.err and first.err.count("\n") == 1


def test_one_process_is_no_launch(monkeypatch):
    """Without torchrun a tensor-parallel recipe is a message before anything is loaded."""
    for launched in (False, True):  # by torchrun with one process
        monkeypatch.setattr(dist, "is_torchelastic_launched", lambda launched=launched: launched)
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(ConfigError, match="launch this stage on several processes, as in `torchrun"):
            lead(TargetSection(tp_plan="auto"), lambda: pytest.fail("was run"))
