"""Training through `accelerate launch` itself on two real gloo processes; wandb stays offline.

Every launch costs most of a minute: what does not need the launcher is in test_train_ranks.py, in forks.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import ROOT, assert_close, counts
from safetensors.torch import load_file
from tiny import conversations, write_recipe, write_target, write_traces

from train import checkpoints

DDP, ZERO1, ZERO2, ZERO3 = (("--config_file", f"recipes/accelerate/{name}.yaml")
                            for name in ("ddp-cpu", "zero1", "zero2", "zero3"))
PLAIN = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
DIE = """
import os, signal, sys
from recipes.cli import run
from train import checkpoints
from train.run import COMMAND
save = checkpoints.save
def save_and_die(accelerator, folder, progress, *rest):
    save(accelerator, folder, progress, *rest)
    if progress.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints.save = save_and_die
run(COMMAND)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target, the traces of 12 training rows and 5 validation rows (3 on one rank, 2 on the other), a recipe."""
    folder = tmp_path_factory.mktemp("distributed")
    write_traces(folder / "runs" / "tiny", write_target(folder / "model"), conversations(12, 5))
    write_recipe(folder / "r.yaml", folder / "model", train={"validate_every": 2, "save_every": 2, "keep": 9})
    return folder


def environment() -> dict[str, str]:
    """This process's environment as a user would have it: no launcher's, tracker's or DeepSpeed's variables."""
    drop = ("ACCELERATE_", "WANDB_", "DS_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    return {k: v for k, v in os.environ.items() if not k.startswith(drop)} | {
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def launch(base: Path, name: str, options: tuple[str, ...], *flags: str, script: str = "train/eagle3.py"):
    """Trains the run `name` on a copy of the traces; returns the finished launcher."""
    folder = base / "runs" / name
    if not folder.exists():
        shutil.copytree(base / "runs" / "tiny" / "traces", folder / "traces")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *options, script,
               "--config", str(base / "r.yaml"), "--name", name, *flags]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)


def result(base: Path, name: str, step: int = 3) -> tuple[dict[str, torch.Tensor], list[dict], dict]:
    """Weights, validation curve and trainer.json of a run."""
    folder = base / "runs" / name / "checkpoints"
    path = folder / f"step-{step:06d}"
    return (load_file(path / "drafter.safetensors"), json.loads((folder / "curve.json").read_text()),
            json.loads((path / "trainer.json").read_text()))


@pytest.fixture(scope="module")
def alone(base):
    """One process, four rows a step, launched as the Makefile does."""
    done = launch(base, "alone", PLAIN, "--train.batch_rows", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("trained: 3 steps")
    return result(base, "alone")


def test_one_process_as_the_makefile_launches_it(alone):
    """`make train` on one process finishes with three steps, two validations over all five rows."""
    tensors, curve, trainer = alone
    assert trainer["split"] == {"rows": 4, "ranks": 1, "accumulation": 1}
    assert [row["step"] for row in curve] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("options, rows, accumulation", [(DDP, 2, 1), (ZERO1, 2, 1), (ZERO2, 1, 2), (ZERO3, 1, 2)],
                         ids=["ddp", "zero1", "zero2-accumulated", "zero3-accumulated"])
def test_two_processes_equal_one(base, alone, options, rows, accumulation):
    """2 ranks x 2 rows, or x 1 row accumulated twice, end with the weights of 1 rank x 4 rows; 3 and 2 validation
    rows on the ranks give the single process's counts and do not hang (cases 38, 42, 66)."""
    name = f"two-{options[1].split('/')[-1]}-{accumulation}"
    done = launch(base, name, options, "--train.batch_rows", str(rows), "--train.accumulation", str(accumulation))
    assert done.returncode == 0, done.stderr
    tensors, curve, trainer = result(base, name)
    assert trainer["split"] == {"rows": rows, "ranks": 2, "accumulation": accumulation}
    assert_close(tensors, alone[0])
    assert counts(curve) == counts(alone[1])
    assert "built successfully" not in done.stdout  # DeepSpeed compiled nothing


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "cache"])
def test_two_processes_compute_the_states(base, alone, mode):
    """Without stored states two ranks end with the weights and counts of one process that read them; with a cache they
    fill one folder together, each row once, and leave nothing half-written (cases 35, 66)."""
    run = base / "runs" / mode
    write_traces(run, base / "model", conversations(12, 5), "online")
    done = launch(base, mode, DDP, "--trace.mode", mode)
    assert done.returncode == 0, done.stderr
    tensors, curve, _ = result(base, mode)
    assert_close(tensors, alone[0])
    assert counts(curve) == counts(alone[1])
    kept = sorted(path.name for path in (run / "cache").rglob("row-*"))
    wanted = [f"row-{i:08d}.{kind}" for i in range(17) for kind in ("json", "safetensors")]
    assert kept == (wanted if mode == "cache" else [])
    assert not list((run / "cache").rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [ZERO3], ids=["zero3"])
def test_kill_and_resume_on_two_processes(base, tmp_path, options):
    """kill -9 of all ranks behind a checkpoint, then the same command: the weights of an uninterrupted run (19)."""
    name = f"killed-{options[1].split('/')[-1]}"
    script = tmp_path / "die.py"
    script.write_text(DIE)
    whole = launch(base, f"whole-{name}", options)
    killed = launch(base, name, options, script=str(script))
    assert whole.returncode == 0 and killed.returncode != 0, killed.stderr
    assert not (base / "runs" / name / "checkpoints" / "step-000003").exists()
    again = launch(base, name, options)
    assert again.returncode == 0, again.stderr
    found, wanted = result(base, name), result(base, f"whole-{name}")
    assert all(torch.equal(found[0][key], wanted[0][key]) for key in wanted[0])
    assert counts(found[1]) == counts(wanted[1])


@pytest.mark.slow
def test_bfloat16(base):
    """Reduced precision trains, validates and saves; the launch may name it too."""
    done = launch(base, "half", (*ZERO3, "--mixed_precision", "bf16"), "--train.dtype", "bfloat16")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_one_process_where_two_were_asked_for_fails(base, tmp_path):
    """accelerate's MULTI_CPU starts one process only, silently; here that is an error with exit code 1."""
    config = tmp_path / "multi-cpu.yaml"
    config.write_text((ROOT / DDP[1]).read_text().replace("distributed_type: MULTI_GPU", "distributed_type: MULTI_CPU"))
    done = launch(base, "silent", ("--config_file", str(config)))
    assert done.returncode != 0 and "asked for several processes but started one" in done.stderr
    assert not (base / "runs" / "silent" / "checkpoints").exists()


@pytest.mark.slow
def test_deepspeed_config_that_contradicts_the_recipe(base, tmp_path):
    """A value in the launch config that differs from the recipe stops the run and is named, an explicit 1 too."""
    config = tmp_path / "zero.yaml"
    config.write_text((ROOT / ZERO2[1]).read_text().replace("steps: auto", "steps: 1"))
    done = launch(base, "contradicts", ("--config_file", str(config)), "--train.accumulation", "2")
    assert done.returncode and "sets gradient_accumulation_steps = 1, the recipe 2; use auto" in done.stderr
    assert f'File "{ROOT / "train"}' not in done.stderr  # torch's launcher has a traceback of its own


def test_wandb_stays_offline_and_goes_on(base, tmp_path):
    """The default tracker writes under the run's folder and needs neither key nor network (WANDB_MODE unset). The id
    of its run is drawn, and a resumed run takes the same; a new run of that name takes another one. Training that is
    finished begins no further run."""
    launched = environment()
    assert not [k for k in launched if k.startswith("WANDB")]
    blocked = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "HOME": str(base)}
    shutil.copytree(base / "runs" / "tiny" / "traces", base / "runs" / "tracked" / "traces")
    (tmp_path / "stop.py").write_text(DIE.replace("SIGKILL", "SIGTERM"))
    for script, code in ((tmp_path / "stop.py", 143), ("train/eagle3.py", 0), ("train/eagle3.py", 0)):
        done = subprocess.run([sys.executable, str(script), "--config", str(base / "r.yaml"), "--name", "tracked",
                               "--train.tracker", "wandb"], cwd=ROOT, env=launched | blocked,
                              capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    runs = list((base / "runs" / "tracked" / "wandb").glob("offline-run-*"))
    _, _, trainer = result(base, "tracked", 6)
    number = trainer["progress"]["tracker_id"]
    assert len(runs) == 2 and len(number) == 8 and {run.name.rpartition("-")[2] for run in runs} == {number}
    assert all(list(run.glob("*.wandb")) for run in runs)


@pytest.mark.slow
def test_sigterm_to_a_process(base, tmp_path):
    """SIGTERM to the training process in mid-run: exit code 143, and the step behind the signal is saved."""
    script = tmp_path / "stop.py"
    script.write_text(DIE.replace("SIGKILL", "SIGTERM"))
    shutil.copytree(base / "runs" / "tiny" / "traces", base / "runs" / "stopped" / "traces")
    done = subprocess.run([sys.executable, str(script), "--config", str(base / "r.yaml"), "--name", "stopped"],
                          cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 143 and "stopped by SIGTERM, saved; run the same command to go on" in done.stderr
    assert (base / "runs" / "stopped" / "checkpoints" / "step-000003").is_dir()


@pytest.mark.slow
def test_sigterm_to_the_launcher(base):
    """SIGTERM to `accelerate launch`, which passes none on: the training saves and ends as well."""
    shutil.copytree(base / "runs" / "tiny" / "traces", base / "runs" / "left" / "traces")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *PLAIN, "train/eagle3.py", "--config",
               str(base / "r.yaml"), "--name", "left", "--train.epochs", "2000", "--train.log_every", "1"]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)
    next(line for line in launcher.stderr if line.startswith("step 10/"))
    launcher.terminate()
    assert "stopped by SIGTERM, saved" in launcher.stderr.read()  # to its end: nobody holds the pipe any more
    launcher.wait()
    assert (base / "runs" / "left" / "checkpoints" / "best.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("options", [DDP, ZERO3], ids=["ddp", "zero3"])
def test_sigterm_to_the_launcher_of_two(base, options):
    """SIGTERM to the launcher of two ranks, as Slurm or Kubernetes sends it: both save the same step and end; no
    process and nothing half-written is left (case 42)."""
    name = f"ended-{options[1].split('/')[-1]}"
    shutil.copytree(base / "runs" / "tiny" / "traces", base / "runs" / name / "traces")
    flags = ("--config", str(base / "r.yaml"), "--name", name, "--train.epochs", "2000", "--train.log_every", "1")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *options, "train/eagle3.py", *flags]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)
    next(line for line in launcher.stderr if line.startswith("step 10/"))
    launcher.terminate()
    said = launcher.stderr.read()  # to its end: nobody holds the pipe any more
    assert launcher.wait() and said.count("stopped by SIGTERM, saved") == 1
    folder = base / "runs" / name / "checkpoints"
    assert checkpoints.steps_in(folder)[-1] >= 10 and not list(folder.glob(".*.tmp"))
