"""`make launch`: the files that trace and train a recipe on several nodes. Writes and checks them, starts nothing.

runs/<name>/launch/: recipe.yaml (resolved), {trace,train}.sh, which start a stage on one node, and for Slurm
{trace,train}.sbatch and submit.sh. See docs/training.md.
"""

import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accelerate.commands.launch import launch_command_parser
from pydantic import Field
from torch.distributed.run import get_args_parser as torchrun_parser

from drafters.registry import entry
from recipes.cli import Command, process, run_folder
from recipes.errors import ConfigError, RunError
from recipes.files import write_text
from recipes.loader import dump_recipe
from recipes.schema import NonNegativeInt, PositiveInt, Recipe, opt

CONFIGS = Path(__file__).resolve().parent.parent / "recipes" / "accelerate"
STAGES = ("trace", "train")
WORD = re.compile(r"[\w.:+,@%-]*")  # what Slurm's options and addresses are made of
SHUTDOWN = 600  # seconds that torchrun leaves its processes to save after SIGTERM


@dataclass
class Options:
    """What `make launch` is told besides the recipe."""

    scheduler: Literal["slurm", "torchrun", "accelerate"] = opt(
        "accelerate", "what starts the nodes: Slurm (accelerate on each), or you, with torchrun or accelerate")
    parallel: Literal["ddp", "zero1", "zero2", "zero3"] = opt("zero2", "plain data parallelism, or a DeepSpeed stage")
    stage: Literal["all", "trace", "train"] = opt("all", "the stages to write files for")
    nodes: PositiveInt = opt(1, "machines; they share the folder of this checkout and the runs")
    gpus: NonNegativeInt = opt(8, "GPUs of a node, one process each; 0 uses the CPU")
    processes: NonNegativeInt = opt(0, "processes of a node; 0 is one a GPU")
    port: Annotated[int, Field(gt=0, lt=2**16)] = opt(29500, "port of the first node where the processes meet")
    partition: str = opt("", "slurm: partition")
    account: str = opt("", "slurm: account")
    time: str = opt("", "slurm: time limit, as in 1-12:00:00")
    cpus: NonNegativeInt = opt(0, "slurm: cores of a node; 0 leaves it to Slurm")
    warning: PositiveInt = opt(120, "slurm: seconds before the time limit at which training is told to save and end")


class Variable(str):
    """A word that the shell is to expand; every other word is quoted."""


NODE, HEAD = Variable('"$1"'), Variable('"$2"')


def line(words: list[str]) -> str:
    """One shell command."""
    return " ".join(word if isinstance(word, Variable) else shlex.quote(word) for word in words)


def each_node(options: Options) -> int:
    """Processes of a node. ConfigError where there are none."""
    count = options.processes or options.gpus
    if not count:
        raise ConfigError("--gpus 0: say how many CPU processes a node has with --processes")
    if options.gpus and options.processes not in (0, options.gpus):
        raise ConfigError(f"--processes {options.processes} with --gpus {options.gpus}: it is one process a GPU")
    return count


def config_of(stage: str, options: Options) -> Path:
    """The launch config of a stage. Tracing has nothing to share out but rows."""
    plain = "ddp" if options.gpus else "ddp-cpu"
    return CONFIGS / f"{plain if stage == 'trace' else options.parallel.replace('ddp', plain)}.yaml"


def work_of(stage: str, recipe: Recipe, path: Path) -> list[str]:
    """What every process of a stage runs."""
    script = ["-m", "data.collect"] if stage == "trace" else [entry(recipe.drafter.kind).script]
    return [*script, "--config", str(path)]


def command(stage: str, recipe: Recipe, path: Path, options: Options) -> list[str]:
    """The command that starts a stage's processes on a node, whose number and the first node's address are the
    script's arguments."""
    each, work = each_node(options), work_of(stage, recipe, path)
    total = options.nodes * each
    if options.scheduler == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(options.nodes), "--nproc-per-node",
                str(each), "--node-rank", NODE, "--master-addr", HEAD, "--master-port", str(options.port),
                "--shutdown-timeout", str(SHUTDOWN), *work]
    start = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    if total == 1 and (stage == "trace" or options.parallel == "ddp"):
        return [*start, "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend",
                "no", *work]
    several = ["--deepspeed_multinode_launcher", "standard"] if options.nodes > 1 else []
    return [*start, "--config_file", str(config_of(stage, options)), "--num_machines", str(options.nodes),
            "--num_processes", str(total), "--machine_rank", NODE, "--main_process_ip", HEAD,
            "--main_process_port", str(options.port), *several, *work]


def check_command(words: list[str]) -> None:
    """ConfigError where the installed launcher does not know an option of the command."""
    parser: ArgumentParser = torchrun_parser() if words[2] == "torch.distributed.run" else launch_command_parser()
    plain = ["0" if word == NODE else "node0" if word == HEAD else word for word in words[3:]]
    try:
        parser.parse_args(plain)
    except SystemExit:
        raise RunError(f"the installed {words[2]} does not take this command: {line(words)}") from None


def node_script(stage: str, recipe: Recipe, path: Path, options: Options) -> str:
    """The script of one node."""
    words = command(stage, recipe, path, options)
    check_command(words)
    exports = []
    if options.scheduler == "torchrun" and stage == "train" and options.parallel != "ddp":
        # What accelerate's own launcher tells its processes.
        exports = ["export ACCELERATE_USE_DEEPSPEED=true",
                   f"export ACCELERATE_DEEPSPEED_ZERO_STAGE={options.parallel.removeprefix('zero')}"]
    usage = f'echo "usage: bash $0 NODE_NUMBER ADDRESS_OF_NODE_0, on each of {options.nodes} nodes" >&2; exit 2'
    return "\n".join(["#!/usr/bin/env bash", "set -euo pipefail", f'if [ "$#" -ne 2 ]; then {usage}; fi',
                      f"cd {shlex.quote(str(Path.cwd()))}", *exports, f"exec {line(words)}", ""])


def batch_script(stage: str, name: str, script: Path, options: Options) -> str:
    """The Slurm job of a stage: one task a node, which starts that node's processes. A pre-empted job is queued again
    and goes on from its last checkpoint."""
    asked = {"job-name": re.sub(r"[^\w.-]", "_", f"{stage}-{name}"), "nodes": options.nodes, "ntasks-per-node": 1,
             "gpus-per-node": options.gpus, "cpus-per-task": options.cpus, "time": options.time,
             "partition": options.partition, "account": options.account, "signal": f"TERM@{options.warning}",
             "output": "%x-%j.log", "open-mode": "append"}
    lines = [f"#SBATCH --{key}={value}" for key, value in asked.items() if value]
    task = "exec bash \"$0\" \"$SLURM_NODEID\" \"$HEAD\""
    return "\n".join(["#!/usr/bin/env bash", *lines, "#SBATCH --requeue", "set -euo pipefail",
                      'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)', "export HEAD",
                      f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(task)} {shlex.quote(str(script))}", ""])


def submit_script(folder: Path, stages: list[str]) -> str:
    """Hands the jobs to Slurm, each behind the one before."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", f"cd {shlex.quote(str(folder))}"]
    for before, stage in zip([None, *stages], stages):
        after = f' --dependency=afterok:"${{{before}%%;*}}"' if before else ""
        lines += [f"{stage}=$(sbatch --parsable{after} {stage}.sbatch)", f'echo "{stage}: job ${{{stage}%%;*}}"']
    return "\n".join([*lines, ""])


def check_words(options: Options) -> None:
    """ConfigError for a value that Slurm could read as something else."""
    for name in ("partition", "account", "time"):
        if not WORD.fullmatch(getattr(options, name)):
            raise ConfigError(f"--{name} {getattr(options, name)!r}: letters, digits and . : + , @ % - only")


def check_shell(path: Path) -> None:
    """RunError where bash cannot read a script."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{path}: {done.stderr.strip()}")


def main(recipe: Recipe, switches: set[str], options: Options) -> None:
    check_words(options)
    each = each_node(options)
    folder = (run_folder(recipe) / "launch").resolve()
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    write_text(path, dump_recipe(recipe))
    stages = [stage for stage in STAGES if options.stage in ("all", stage)]
    files = {f"{stage}.sh": node_script(stage, recipe, path, options) for stage in stages}
    if options.scheduler == "slurm":
        files |= {f"{s}.sbatch": batch_script(s, recipe.name, folder / f"{s}.sh", options) for s in stages}
        files["submit.sh"] = submit_script(folder, stages)
    for name, text in files.items():
        write_text(folder / name, text)
        check_shell(folder / name)
        print(f"# {folder / name}", text, sep="\n")
    rows = recipe.train.batch_rows * recipe.train.accumulation * options.nodes * each
    print(f"# {options.nodes} x {each} processes; a training step is {rows} rows: train.batch_rows "
          f"{recipe.train.batch_rows} x train.accumulation {recipe.train.accumulation} x {options.nodes * each}")
    print("# to start:")
    if options.scheduler == "slurm":
        print(line(["bash", str(folder / "submit.sh")]))
        return
    head = "127.0.0.1" if options.nodes == 1 else "ADDRESS"
    for stage in stages:
        for node in range(options.nodes):
            where = "" if options.nodes == 1 else f"  # on node {node}; ADDRESS is that of node 0"
            print(line(["bash", str(folder / f"{stage}.sh"), str(node), head]) + where)


COMMAND = Command("make launch", "Writes and checks the files that trace and train a recipe on several nodes.", main,
                  options=Options)

if __name__ == "__main__":
    process(COMMAND)
