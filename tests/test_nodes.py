"""`make launch`: the files for several nodes are what a shell, a launcher and Slurm take, whatever is in a name."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import yaml
from tiny import call, conversations, write_prompts, write_recipe, write_target, write_traces

from recipes.errors import RunError
from train import nodes
from train.nodes import COMMAND, check_command

ROOT = Path(__file__).resolve().parent.parent
EVIL = "it's $(touch pwned) \"x\"; `touch pwned` & a"


def written(tmp_path: Path, *flags: str, name: str = "tiny", code: int = 0) -> Path:
    """The launch folder of a run."""
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "model")
    assert call(COMMAND, recipe, "--name", name, *flags) == code
    return tmp_path / "runs" / name / "launch"


def program(path: Path, text: str) -> None:
    """An executable shell script."""
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A Python whose path needs quotes; it prints its arguments, one a line."""
    path = tmp_path / "my python's"
    program(path, 'printf "%s\\n" "$@"\n')
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(nodes, "check_command", lambda words: None)
    return path


def test_commands_of_two_nodes(tmp_path, python):
    """What node 1 of 2 with 8 GPUs runs, word for word, under accelerate."""
    folder = written(tmp_path, "--nodes", "2", "--parallel", "zero3", "--train.lr", "0.5")
    run = subprocess.run(["bash", folder / "train.sh", "1", "10.0.0.1"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "-m", "accelerate.commands.launch", "--quiet", "--config_file",
        str(ROOT / "recipes" / "accelerate" / "zero3.yaml"), "--num_machines", "2", "--num_processes", "16",
        "--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29500",
        "--deepspeed_multinode_launcher", "standard", "train/eagle3.py", "--config", str(folder / "recipe.yaml")]
    run = subprocess.run(["bash", folder / "trace.sh", "0", "10.0.0.1"], capture_output=True, text=True, check=True)
    assert "ddp.yaml" in run.stdout and run.stdout.splitlines()[-4:] == [
        "-m", "data.collect", "--config", str(folder / "recipe.yaml")]
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["train"]["lr"] == 0.5


def test_torchrun(tmp_path, python):
    """torchrun's own options, and what tells the processes to use DeepSpeed."""
    folder = written(tmp_path, "--nodes", "3", "--gpus", "4", "--scheduler", "torchrun", "--parallel", "zero1")
    program(python, 'echo "$ACCELERATE_USE_DEEPSPEED $ACCELERATE_DEEPSPEED_ZERO_STAGE"; printf "%s\\n" "$@"\n')
    run = subprocess.run(["bash", folder / "train.sh", "2", "h"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[:11] == ["true 1", "-m", "torch.distributed.run", "--nnodes", "3",
                                            "--nproc-per-node", "4", "--node-rank", "2", "--master-addr", "h"]
    assert "ACCELERATE" not in (folder / "trace.sh").read_text()


@pytest.mark.parametrize("scheduler", ["slurm", "torchrun", "accelerate"])
def test_nothing_in_a_name_reaches_the_shell(tmp_path, python, monkeypatch, scheduler):
    """A run whose name is full of shell: every word arrives as it is, no command in it runs."""
    monkeypatch.chdir(tmp_path)
    folder = written(tmp_path, "--scheduler", scheduler, "--nodes", "2", name=EVIL)
    run = subprocess.run(["bash", folder / "train.sh", "0", EVIL], capture_output=True, text=True, check=True)
    assert str(folder / "recipe.yaml") in run.stdout.splitlines() and EVIL in run.stdout.splitlines()
    assert not list(tmp_path.rglob("pwned"))


def test_slurm_runs_the_stages_in_order(tmp_path, python, monkeypatch):
    """submit.sh against stand-ins for Slurm's programs: the trace job, then the train job behind it; the job starts one
    task a node, each with its number and the first node's name. The stand-ins are no Slurm: its reading of the
    #SBATCH lines is not proven here."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    program(tools / "sbatch", f'echo "sbatch $*" >> {log}; echo "7;cluster"\n')
    program(tools / "scontrol", "printf 'gpu01\\ngpu02\\n'\n")
    program(tools / "srun", 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done\n')
    folder = written(tmp_path, "--scheduler", "slurm", "--nodes", "2", "--partition", "gpu", "--time", "1-00:00:00",
                     "--cpus", "32", name=EVIL)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    subprocess.run(["bash", folder / "submit.sh"], env=env, check=True, capture_output=True)
    assert log.read_text().splitlines() == ["sbatch --parsable trace.sbatch",
                                            "sbatch --parsable --dependency=afterok:7 train.sbatch"]
    job = (folder / "train.sbatch").read_text()
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu", "--time=1-00:00:00",
                 "--cpus-per-task=32", "--signal=TERM@120", "--requeue",
                 "--job-name=train-it_s___touch_pwned___x____touch_pwned____a"):
        assert f"#SBATCH {line}\n" in job
    run = subprocess.run(["bash", folder / "train.sbatch"], env=env, check=True, capture_output=True, text=True)
    words = run.stdout.splitlines()
    assert [words[i + 1] for i, word in enumerate(words) if word == "--machine_rank"] == ["0", "1"]
    assert [words[i + 1] for i, word in enumerate(words) if word == "--main_process_ip"] == ["gpu01", "gpu01"]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("flags, message", [
    (("--gpus", "0"), "--gpus 0: say how many CPU processes a node has with --processes"),
    (("--gpus", "8", "--processes", "4"), "it is one process a GPU"),
    (("--partition", "a b"), "--partition 'a b': letters, digits"),
    (("--time", "1:00\n#SBATCH --wrap=x"), "letters, digits"),
    (("--scheduler", "pbs"), "scheduler = 'pbs'"),
    (("--node", "2"), "--node: unknown option; did you mean nodes?")])
def test_bad_options(tmp_path, capsys, flags, message):
    """Exit code 2 and a message that names the option."""
    written(tmp_path, *flags, code=2)
    assert message in capsys.readouterr().err


def test_options_are_those_of_the_installed_launchers():
    """Each kind of command goes through the parser of the launcher that will get it; an option that it does not know
    is an error."""
    recipe = nodes.Recipe()
    for scheduler in ("slurm", "torchrun", "accelerate"):
        for parallel in ("ddp", "zero2"):
            for gpus, processes, count in ((0, 1, 1), (0, 2, 1), (8, 0, 4)):
                options = nodes.Options(scheduler, parallel, nodes=count, gpus=gpus, processes=processes)
                for stage in nodes.STAGES:
                    check_command(nodes.command(stage, recipe, Path("r.yaml"), options))
    with pytest.raises(RunError, match="does not take this command: .* --no_such_option 1"):
        check_command([sys.executable, "-m", "accelerate.commands.launch", "--no_such_option", "1", "x.py"])


def test_broken_scripts_are_found(tmp_path):
    """bash -n reads every file before it is offered."""
    path = tmp_path / "x.sh"
    path.write_text("if true; then\n")
    with pytest.raises(RunError, match="x.sh: .*syntax error"):
        nodes.check_shell(path)


def start(printed: str) -> list[str]:
    """The commands that `make launch` printed."""
    lines = printed.splitlines()
    return lines[lines.index("# to start:") + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler, parallel", [("accelerate", "zero3"), ("torchrun", "zero2")])
def test_printed_commands_run(tmp_path, capsys, monkeypatch, scheduler, parallel):
    """One node of two CPU processes: the printed commands trace and train for real."""
    monkeypatch.chdir(ROOT)
    model = write_target(tmp_path / "model")
    prompts = write_prompts(tmp_path / "p.jsonl", [f"how does one forecast {x}?" for x in ("rain", "snow", "wind",
                                                                                           "fog", "hail", "ice")])
    recipe = write_recipe(tmp_path / "r.yaml", model, generation={"max_tokens": 6}, prompts={
        "sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 2}, train={"batch_rows": 1})
    assert call(COMMAND, recipe, "--gpus", "0", "--processes", "2", "--scheduler", scheduler, "--parallel", parallel,
                "--port", str(forked.free_port()), "--name", "it's") == 0
    for command in start(capsys.readouterr().out):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("trained: 2 steps")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_two_nodes(tmp_path, capsys, monkeypatch, parallel):
    """Two launchers of one process each, as on two machines, train one run together."""
    monkeypatch.chdir(ROOT)
    write_traces(tmp_path / "runs" / "tiny", write_target(tmp_path / "model"), conversations(8, 3))
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "model")
    assert call(COMMAND, recipe, "--nodes", "2", "--gpus", "0", "--processes", "1", "--stage", "train", "--parallel",
                parallel, "--port", str(forked.free_port())) == 0
    started = [subprocess.Popen(["bash", "-c", command.replace("ADDRESS", "127.0.0.1")], env=environment(),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for command in start(capsys.readouterr().out)]
    said = [launcher.communicate() for launcher in started]
    assert [launcher.returncode for launcher in started] == [0, 0], "\n".join(err for _, err in said)
    assert sum("trained: 2 steps" in out for out, _ in said) == 1


def environment() -> dict[str, str]:
    """This process's environment without a launcher's variables."""
    drop = ("ACCELERATE_", "WANDB_", "DS_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    return {k: v for k, v in os.environ.items() if not k.startswith(drop)} | {
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
