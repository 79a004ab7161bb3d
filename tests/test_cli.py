"""Exit codes and messages: one line for what a user can cause, no traceback without --debug, nothing half-made."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tiny import LAYERS, conversations, write_prompts, write_recipe, write_target, write_traces
from tiny_drafter import make_meta, make_state, write_checkpoint

from data import collect
from eval import run as eval_run
from recipes import cli
from recipes import files as recipe_files
from recipes.errors import ConfigError
from recipes.loader import load_recipe
from recipes.schema import Recipe, opt
from train import run as train_run

ROOT = Path(__file__).resolve().parent.parent
LONGEST = max(len(row.ids) for row in conversations(4, 2))
STAGE = """
import os, signal, sys
from recipes.cli import Command, run
from recipes.errors import ConfigError, RunError
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
def main(recipe, switches):
    {body}
run(Command("make x", "About.", main))
"""


def process(body: str, *argv: str) -> subprocess.CompletedProcess:
    """A stage with this body as a process of its own, with a valid recipe."""
    argv = ["--config", str(ROOT / cli.DEFAULT_RECIPE), *argv]
    return subprocess.run([sys.executable, "-c", STAGE.format(body=body), *argv], cwd=ROOT, text=True,
                          capture_output=True)


@pytest.mark.parametrize("body, code, message", [
    ("pass", 0, ""), ("raise ConfigError('bad field')", 2, "make x: error: bad field"),
    ("raise RunError('gate broken')", 1, "make x: error: gate broken"),
    ("open('/nowhere/x')", 1, "make x: error: /nowhere/x: No such file or directory"),
    ("os.kill(os.getpid(), signal.SIGINT)", 130, "make x: error: interrupted; run the same command again to go on"),
    ("os.kill(os.getpid(), signal.SIGTERM)", 143,
     "make x: error: stopped by SIGTERM; run the same command again to go on"),
    ("sys.exit(143)", 143, "")])
def test_exit_codes(body, code, message):
    """0 done, 2 usage, 1 failed, 130 interrupted, 143 stopped, silently where the trainer has said so itself; with
    --debug the same code."""
    done = process(body)
    assert (done.returncode, done.stderr.strip()) == (code, message)
    if message:
        debug = process(body, "--debug")
        assert debug.returncode == code and "Traceback (most recent call last)" in debug.stderr
        assert debug.stderr.strip().endswith(message)


def test_a_fault_of_ours_is_not_hidden():
    """Only errors that a user can cause become one line; a bug shows its traceback."""
    done = process("1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("argv, message", [
    (["train.lr", "1"], "train.lr: not an option"), (["--train.lr"], "--train.lr: a value is missing"),
    (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot read this recipe"),
    (["--train.epoch=3"], "did you mean train.epochs?"), (["--train.lr", "x"], "train.lr = 'x'"),
    (["--previw"], "--previw: unknown option; did you mean preview?"),
    (["--previw", "--train.lr", "1"], "--previw: unknown option; did you mean preview?"),
    (["--preview=1"], "--preview: takes no value, got 1"), (["--debgu"], "did you mean debug?"),
    (["--verify_rows", "3"], "did you mean trace.verify_rows?"), (["--nme", "x"], "did you mean name?")])
def test_bad_usage(capsys, argv, message):
    """A wrong command line exits 2 with one line."""
    command = cli.Command("make x", "About.", lambda recipe, switches: None, {"preview": "p", "verify": "v"})
    code, err = stage(command, capsys, *argv)
    assert code == 2 and message in err and err.count("\n") == 1


def stage(command: cli.Command, capsys, *argv: str) -> tuple[int, str]:
    """Runs a real stage in this process: (exit code, the last line of stderr)."""
    capsys.readouterr()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        cli.run(command, list(argv))
    signal.signal(signal.SIGTERM, handler)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return left.value.code, err.splitlines(keepends=True)[-1] if err else ""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a target, one that cannot chat, a shallow one, another one, and traces under runs/tiny."""
    folder = tmp_path_factory.mktemp("world")
    write_target(folder / "model")
    write_target(folder / "mute", template=None)
    write_target(folder / "shallow", layers=4)
    write_target(folder / "other", seed=1)
    write_traces(folder / "runs" / "tiny", folder / "model", conversations(4, 2))
    write_prompts(folder / "prompts.jsonl", ["tell me a story", "what is the time", "who are you then"])
    (folder / "empty.jsonl").write_text("\n")
    return folder


def recipe_in(world: Path, tmp_path: Path, prompts: str = "prompts.jsonl", **sections) -> Path:
    source = {"kind": "jsonl", "path": str(world / prompts)}
    values = {"prompts": {"sources": [source], "validation": 1}, "generation": {"max_tokens": 8}, **sections}
    path = write_recipe(tmp_path / "r.yaml", world / "model", **values)
    return path


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("prompts, target, trace, message", [
    ("prompts.jsonl", {"model": "/nowhere/model"}, {}, "target.model = /nowhere/model: cannot be loaded"),
    ("prompts.jsonl", {"model": "mute"}, {}, "its tokenizer has no chat template"),
    ("prompts.jsonl", {"model": "shallow"}, {"layers": []}, "is not three distinct ascending layers"),
    ("prompts.jsonl", {}, {"layers": [1, 1, 2]}, "trace.layers = [1, 1, 2]: must be distinct"),
    ("prompts.jsonl", {}, {"layers": [1, 2]}, "trace.layers = [1, 2]: a drafter of kind eagle3 reads three layers"),
    ("prompts.jsonl", {"device": "gpu0"}, {}, "target.device = gpu0: not a device"),
    ("empty.jsonl", {}, {}, "empty.jsonl: holds no prompts"),
    ("missing.jsonl", {}, {}, "missing.jsonl: cannot read prompts"),
])
def test_trace_refuses(world, tmp_path, capsys, prompts, target, trace, message):
    """Bad input of `make trace`: exit 2, one message naming it, no trace written (case 63)."""
    if "/" not in target.get("model", "/"):
        target = {"model": str(world / target["model"])}
    path = recipe_in(world, tmp_path, prompts, target=target, trace=trace)
    code, err = stage(collect.COMMAND, capsys, "--config", str(path))
    assert code == 2 and message in err
    records = {"tiny/recipe.yaml", "tiny/.recipe.lock", "tiny/traces/settings.json", "tiny/traces/provenance.json"}
    assert files(tmp_path / "runs") in (set(), records)  # refused before the folder was taken, or behind it


def train_recipe(world: Path, tmp_path: Path, **sections) -> Path:
    """A recipe whose run folder is the world's, with the traces in it."""
    path = recipe_in(world, tmp_path, **sections)
    values = yaml.safe_load(path.read_text()) | {"runs_dir": str(world / "runs")}
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("sections, code, message", [
    ({"drafter": {"options": {"draft_vocab_size": 65}}}, 2, "draft_vocab_size = 65: must be within 1..64"),
    ({"drafter": {"options": {"draft_vocab_size": 1}}}, 2, "smaller than the"),
    ({"drafter": {"options": {"detph": 2}}}, 2, "unknown key detph; did you mean depth?"),
    ({"drafter": {"kind": "eagle4"}}, 2, "drafter.kind = 'eagle4': unknown; known kinds: eagle3"),
    ({"target": {"model": "other"}}, 2, "whose weights differs from this target's"),
    ({"trace": {"layers": [1, 2, 4]}}, 2, "traced layers [1, 2, 3], the recipe wants [1, 2, 4]"),
    ({"train": {"user_turns": True}}, 2, "marks no user turn"),
    ({"trace": {"max_length": LONGEST - 1}}, 2, f"holds a row of {LONGEST} tokens; set it to {LONGEST} or more"),
    ({"train": {"validation_draft_length": 7}}, 2, "was traced for 6; set it to 6 or less"),
    ({"train": {"tracker": "nothing"}}, 2, "train.tracker = nothing: not installed or not known"),
    ({"name": "untraced"}, 1, "manifest.json: missing or unreadable; run `make trace` first"),
])
def test_train_refuses(world, tmp_path, capsys, sections, code, message):
    """Bad input of `make train`: one message, no checkpoint (cases 36, 49, 57). The rows' tails are of six tokens."""
    name = sections.pop("name", "tiny")
    if sections.get("target"):
        sections = {"target": {"model": str(world / sections["target"]["model"])}}
    path = train_recipe(world, tmp_path, **sections)
    found, err = stage(train_run.COMMAND, capsys, "--config", str(path), "--name", name)
    assert found == code and message in err and not (world / "runs" / name / "checkpoints").exists()


def test_rows_and_drafts_at_the_limit_are_trained(world, tmp_path, capsys):
    """Rows of exactly trace.max_length tokens and tails of exactly the draft length are taken (case 49)."""
    path = train_recipe(world, tmp_path, trace={"max_length": LONGEST}, train={"validation_draft_length": 6})
    shutil.copytree(world / "runs" / "tiny" / "traces", tmp_path / "runs" / "limit" / "traces")
    flags = ("--runs_dir", str(tmp_path / "runs"), "--name", "limit")
    assert stage(train_run.COMMAND, capsys, "--config", str(path), *flags)[0] == 0


def test_eval_refuses_another_targets_checkpoint(world, tmp_path, capsys):
    """A drafter made for another target is refused before anything is decoded (case 36)."""
    meta = make_meta() | {"layers": LAYERS}
    folder = write_checkpoint(tmp_path / "drafter", meta, make_state(meta))
    path = train_recipe(world, tmp_path, drafter={"path": str(folder)}, eval={"prompts": str(world / "prompts.jsonl")})
    code, err = stage(eval_run.COMMAND, capsys, "--config", str(path))
    assert code == 2 and "made for org/target, whose weights differs" in err
    assert not (world / "runs" / "tiny" / "eval").exists()


def test_eval_without_a_trained_drafter(world, tmp_path, capsys):
    """Nothing trained yet: exit 2 and what to run."""
    path = train_recipe(world, tmp_path, eval={"prompts": str(world / "prompts.jsonl")})
    code, err = stage(eval_run.COMMAND, capsys, "--config", str(path))
    assert code == 2 and "run `make train` first" in err


@pytest.mark.parametrize("command", [collect.COMMAND, train_run.COMMAND, eval_run.COMMAND], ids=lambda c: c.name)
def test_run_folder_that_cannot_be_written(world, tmp_path, capsys, command):
    """A run folder below a plain file: exit 2, the folder is named."""
    (tmp_path / "file").write_text("x")
    path = recipe_in(world, tmp_path)
    code, err = stage(command, capsys, "--config", str(path), "--runs_dir", str(tmp_path / "file"))
    assert code == 2 and f"{tmp_path / 'file' / 'tiny'}: cannot write the run's folder: Not a directory" in err


@pytest.mark.parametrize("command, part", [(collect.COMMAND, "traces"), (train_run.COMMAND, "checkpoints")],
                         ids=lambda value: getattr(value, "name", value))
def test_a_run_on_a_read_only_file_system(world, tmp_path, capsys, monkeypatch, command, part):
    """The run's folders are there and nothing can be written: exit 2 and what to do, as where they are not there."""
    def read_only(path, mode="r", **rest):
        if mode == "wb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open(path, mode, **rest)

    folder = tmp_path / "runs" / "tiny" / part
    (folder / "kept").mkdir(parents=True)
    monkeypatch.setattr(recipe_files, "open", read_only, raising=False)
    code, err = stage(command, capsys, "--config", str(recipe_in(world, tmp_path)))
    assert (code, files(tmp_path / "runs")) == (2, set())
    assert err == (f"{command.name}: error: {folder}: cannot write the run's folder: Read-only file system; make it "
                   "writable, or name another place with runs_dir or name\n")


@pytest.mark.parametrize("renames, named", [
    (0, "settings.json"), (1, "tiny/recipe.yaml"), (2, "provenance.json"), (3, "0-00000.000.safetensors"),
    (4, "0-00000.000.safetensors"), (5, "answers/0-00000.json"), (6, "manifest.json"), (7, "shard-00000.safetensors"),
    (8, "shard-00000.safetensors")])
def test_full_disk_while_tracing(world, tmp_path, capsys, monkeypatch, renames, named):
    """No space left at a rename: one message with the path, no temporary file; then the same command finishes."""
    path = recipe_in(world, tmp_path)
    replace, left = os.replace, [renames]

    def full(a, b):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(a, b)

    monkeypatch.setattr(os, "replace", full)
    code, err = stage(collect.COMMAND, capsys, "--config", str(path))
    assert code == 1 and "make room" in err and err.startswith("make trace: error: ") and err.count("\n") == 1
    assert named in err and "No space left on device" in err
    assert not [f for f in files(tmp_path) if f.endswith(".tmp")]
    monkeypatch.setattr(os, "replace", replace)
    assert stage(collect.COMMAND, capsys, "--config", str(path))[0] == 0


def test_trace_then_train(world, tmp_path, capsys):
    """The two stages in a row on a fresh folder exit 0; a second training run does nothing more."""
    path = recipe_in(world, tmp_path)
    assert stage(collect.COMMAND, capsys, "--config", str(path))[0] == 0
    assert stage(train_run.COMMAND, capsys, "--config", str(path))[0] == 0
    before = files(tmp_path)
    assert stage(train_run.COMMAND, capsys, "--config", str(path))[0] == 0
    assert files(tmp_path) == before and "runs/tiny/checkpoints/best.json" in before


def test_stages_at_once_keep_each_others_sections(tmp_path, monkeypatch):
    """recipe.yaml is read, changed and written by one stage at a time."""
    recipe = load_recipe(str(write_recipe(tmp_path / "r.yaml", tmp_path)), {})
    folder, read, held = tmp_path / "runs" / recipe.name, cli.earlier_recipe, []

    def watched(path):
        with open(folder / ".recipe.lock", "wb") as f, pytest.raises(BlockingIOError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(path.name)
        return read(path)

    folder.mkdir(parents=True)
    monkeypatch.setattr(cli, "earlier_recipe", watched)
    cli.write_resolved(recipe)
    recipe.train.lr, recipe.eval.limit = 0.5, 7
    cli.write_resolved(recipe, ["eval"])
    stored = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert held == ["recipe.yaml"] and stored["eval"]["limit"] == 7 and stored["train"]["lr"] != 0.5
    with open(folder / ".recipe.lock", "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_make_demo_prints_its_stages():
    """`make -n demo` names trace, train, export and eval with the demo's recipe, in this order."""
    done = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    stages = ["data.collect", "train.script", "eval.ship", "eval.run"]
    places = [done.stdout.index(f"-m {name} --config recipes/smollm2-135m/eagle3-demo.yaml") for name in stages]
    assert places == sorted(places)


PYTHON = """#!{python}
import json, sys
if sys.argv[1:3] == ["-m", "train.script"]:
    print("train/eagle3.py")
with open({log!r}, "a") as f:
    f.write(json.dumps(sys.argv[2:]) + "\\n")
"""


def made(folder: Path, *variables: str) -> tuple[list[list[str]], str]:
    """The commands, as lists of words, that `make train` runs under a Python that only notes them; its output."""
    log = folder / "log"
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(PYTHON.format(python=sys.executable, log=str(log)))
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".ready").touch()
    done = subprocess.run(["make", "--no-print-directory", "train", f"VENV={folder}", *variables], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()], done.stdout


def test_make_train_passes_words_as_they_are(tmp_path):
    """A value with a space or a quote in it reaches the script as one word, and the command is printed as it was
    typed, so that it can be typed again."""
    args = """--name 'a b' --target.device_map "{model: 0}" --runs_dir "it's" --trace.layers [1,2]"""
    (script, launch), out = made(tmp_path, f"ARGS={args}", "LAUNCH=--config_file 'my file.yaml'", "RECIPE=r.yaml")
    words = ["--config", "r.yaml", "--name", "a b", "--target.device_map", "{model: 0}", "--runs_dir", "it's",
             "--trace.layers", "[1,2]"]
    assert script == ["train.script", *words]
    assert launch == ["accelerate.commands.launch", "--quiet", "--config_file", "my file.yaml", "train/eagle3.py",
                      *words]
    shown = subprocess.run(["sh", "-c", f"printf '%s\\n' {out}"], capture_output=True, text=True).stdout
    assert shown.splitlines()[1:] == ["-m", *launch]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_make_train_shows_its_help(tmp_path, flag):
    """The help is shown by the stage itself, and nothing is launched."""
    commands, _ = made(tmp_path, f"ARGS={flag}")
    assert commands == [["train.run", flag]]


@dataclass
class Listed:
    names: list[str] = opt([], "some names")
    one: str = opt("", "one name")


def test_plain_words_of_a_command(capsys):
    """Only a command with words takes them; a list among its options takes all the words behind it."""
    seen = []
    command = cli.Command("make x", "About.", lambda *given: seen.append(given[1:]), {"quick": "q"}, Listed, "what")
    assert stage(command, capsys, "go", "--quick", "--names", "a", "b", "--one", "c", "k=v", "--train.lr=1")[0] == 0
    assert seen == [({"quick"}, Listed(["a", "b"], "c"), ["go", "k=v"])]
    assert stage(command, capsys, "--one")[0] == 2 and "  WORDS  what" in cli.help_text(command)


def test_a_refused_command_leaves_no_empty_folder(tmp_path):
    """A folder that it made goes again, unless something lies in it; one that was there before stays."""
    recipe = Recipe(name="new", runs_dir=str(tmp_path))

    def refused(*files):
        with pytest.raises(ConfigError), cli.without_empty_folder(recipe):
            folder = cli.run_folder(recipe)
            for name in files:
                (folder / name).touch()
            raise ConfigError("x")

    refused()
    assert not list(tmp_path.iterdir())
    refused("kept")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept"]
    (tmp_path / "new" / "kept").unlink()
    refused()
    assert (tmp_path / "new").is_dir()
