"""The recipe loader is strict, every field is documented, and the command line changes only on purpose."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drafters.registry import REGISTRY, options_of
from eval.gate import Options
from recipes.cli import Command, help_text
from recipes.errors import ConfigError
from recipes.gates import Bound, Gates
from recipes.loader import dump_recipe, flags, load_recipe
from recipes.schema import EvalSet, PromptSource, Recipe

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = [p for folder in ("recipes", "bench") for p in sorted((ROOT / folder).rglob("*.yaml"))
           if p.parent.name != "accelerate" and p.name != "gates.yaml"]
SNAPSHOT = Path(__file__).with_name("cli_options.txt")


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text)
    return path


def command_line() -> list[str]:
    """Every option name: recipe fields, those of a prompt source and an evaluation set, each drafter's options."""
    names = [f"--{name}" for name, _, _ in flags(Recipe)]
    names += [f"--prompts.sources[].{f.name}" for f in dataclasses.fields(PromptSource)]
    names += [f"--eval.sets[].{f.name}" for f in dataclasses.fields(EvalSet)]
    for kind, known in REGISTRY.items():
        names += [f"--drafter.options.{f.name} ({kind})" for f in dataclasses.fields(known.code.Options)]
    return names


@pytest.mark.parametrize("text, key, near", [
    ("train: {epoch: 2}", "train.epoch", "train.epochs"),
    ("trian: {epochs: 2}", "trian", "train"),
    ("generation: {max_token: 2}", "generation.max_token", "generation.max_tokens"),
    ("train: {max_tokens: 2}", "train.max_tokens", "prompts.max_tokens"),
    ("prompts: {sources: [{kind: jsonl, pth: x}]}", "prompts.sources[0].pth", "prompts.sources[0].path"),
])
def test_unknown_key_in_a_file_names_the_nearest(tmp_path, text, key, near):
    """A misspelt key is an error that names the key, the file and the nearest valid key."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    message = str(error.value)
    assert str(path) in message and f"unknown key {key};" in message and near in message.split("did you mean")[1]


@pytest.mark.parametrize("flag, near", [
    ("train.epoch", "train.epochs"), ("lr", "train.lr"), ("trian.lr", "train.lr"), ("train", "train."),
    ("eval.draft_lenght", "eval.draft_length")])
def test_unknown_flag_names_the_nearest(tmp_path, flag, near):
    """The same holds for a flag."""
    with pytest.raises(ConfigError) as error:
        load_recipe(write(tmp_path, "name: x"), {flag: "1"})
    assert f"--{flag}: unknown option" in str(error.value) and near in str(error.value).split(";")[1]


def test_unknown_drafter_option_names_the_nearest():
    """`drafter.options` is checked by the drafter's own dataclass."""
    with pytest.raises(ConfigError, match=r"drafter.options \(eagle3\): unknown key depht; did you mean depth"):
        options_of("eagle3", {"depht": 3})


@pytest.mark.parametrize("text, field, value", [
    ("train: {lr: fast}", "train.lr", "'fast'"), ("train: {batch_rows: 1.5}", "train.batch_rows", "1.5"),
    ("target: {dtype: fp8}", "target.dtype", "'fp8'"), ("train: {accumulation: 0}", "train.accumulation", "0"),
    ("train: {validate_every: 0}", "train.validate_every", "0"), ("train: {lr: -1.0}", "train.lr", "-1.0"),
    ("trace: {layers: 3}", "trace.layers", "3"), ("generation: {batch_size: 0}", "generation.batch_size", "0"),
    ("prompts: {sources: [{count: -1}]}", "prompts.sources.0.count", "-1"),
    ("train: {beta1: 1}", "train.beta1", "1"), ("train: {beta2: -0.1}", "train.beta2", "-0.1"),
    ("train: {epochs: .inf}", "train.epochs", "inf"), ("train: {lr: .inf}", "train.lr", "inf"),
    ("trace: {cache_gb: .inf}", "trace.cache_gb", "inf"), ("trace: {max_bad_share: 50}", "trace.max_bad_share", "50"),
    ("generation: {max_lost_share: 50}", "generation.max_lost_share", "50"),
    ("generation: {server: {timeout_s: .inf}}", "generation.server.timeout_s", "inf"),
    ("eval: {batch_sizes: [4, 1]}", "eval.batch_sizes.1", "1"), ("eval: {batch_sizes: [0]}", "eval.batch_sizes.0", "0"),
    ("eval: {batch_sizes: [-1]}", "eval.batch_sizes.0", "-1")])
def test_wrong_value_names_file_field_and_value(tmp_path, text, field, value):
    """A value of the wrong type or range is refused where it is read, not where it would divide by zero."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"{path}: {field} = {value}: ")


@pytest.mark.parametrize("flag, text, message", [
    ("train.lr", "fast", "command line: train.lr = 'fast': "),
    ("prompts.sources", "[{knd: jsonl}]", "command line: unknown key prompts.sources[0].knd"),
    ("prompts.sources", "[{count: -1}]", "command line: prompts.sources.0.count = -1: "),
    ("name", "a/b", "command line: name = 'a/b'"), ("trace.url", "s3://a:b@c", "command line: trace.url: holds"),
    ("train.lr_", "1", "--train.lr_: unknown option"), ("train.seed", "1", "FILE: train.epochs = 'x': ")])
def test_a_value_of_the_command_line_is_not_laid_on_the_file(tmp_path, flag, text, message):
    path = write(tmp_path, "train: {epochs: x}" if flag == "train.seed" else "train: {lr: 0.5}")
    with pytest.raises(ConfigError) as error:
        load_recipe(path, {flag: text})
    assert str(error.value).startswith(message.replace("FILE", str(path)))


@pytest.mark.parametrize("text, where", [
    ("eval: {sets: [{kind: builtin}, {path: 'https://me:hush@host/x.jsonl'}]}", "eval.sets[1].path"),
    ("eval: {sets: [{path: 'https://hush@host/x.jsonl'}]}", "eval.sets[0].path"),
    ("eval: {sets: [{path: 'http://host/x.jsonl?token=hush'}]}", "eval.sets[0].path"),
    ("generation: {server: {base_url: 'http://hush@host'}}", "generation.server.base_url"),
    ("trace: {url: 'https://hush@host/x'}", "trace.url")])
def test_no_recipe_with_a_secret_in_an_address_is_loaded(tmp_path, text, where):
    """What is loaded is written into the run: a password, a token and a query are refused before, and not shown."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"{path}: {where}: holds a password or a query, or a token")
    assert "hush" not in str(error.value)


def test_an_address_may_name_a_place_before_the_at_sign(tmp_path):
    """Azure's container and an account of ssh are no secrets; a pattern of local files is no address."""
    sets = "eval: {sets: [{kind: log, path: 'logs/2?.jsonl'}, {path: 'https://host/x.jsonl'}]}"
    path = write(tmp_path, "trace: {url: 'abfs://traces@account.dfs.core.windows.net/x'}\n" + sets)
    assert load_recipe(path).trace.url.startswith("abfs://traces@account")


@pytest.mark.parametrize("text", ["", "- a\n- b", "train: 3", "a: [", "name: a/b", "name: .hidden", "name: ''",
                                  "train:"])
def test_not_a_recipe(tmp_path, text):
    """Empty, a list, a section that is no mapping, broken YAML, a name that is a path: one error naming the file."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="r.yaml: "):
        load_recipe(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_unreadable_file(tmp_path, content):
    """A missing or binary file is named."""
    path = tmp_path / "r.yaml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read this recipe"):
        load_recipe(path)


def test_overrides(tmp_path):
    """Flags win over the file and typed: 1e-4 is a number, a name of digits text, lists and drafter options work."""
    path = write(tmp_path, "train: {lr: 0.5, epochs: 2}\ndrafter: {options: {depth: 2}}")
    recipe = load_recipe(path, {"train.lr": "1e-4", "trace.layers": "[1, 2, 3]", "drafter.options.depth": "4",
                                "drafter.options.step_decay": "1e-1", "target.skinny_linear": "false", "name": "123"})
    assert recipe.name == "123"  # text stays text
    assert recipe.train.lr == 1e-4 and recipe.train.epochs == 2 and recipe.trace.layers == [1, 2, 3]
    assert recipe.target.skinny_linear is False
    options = options_of("eagle3", recipe.drafter.options)
    assert options.depth == 4 and options.step_decay == 0.1


@pytest.mark.parametrize("text, value", [
    ("{model: 1, lm_head: cpu}", {"model": 1, "lm_head": "cpu"}), ("auto", "auto"), ("", ""), ("[cpu]", "[cpu]"),
    ("{model", "{model")])
def test_text_that_may_be_a_mapping(tmp_path, text, value):
    """A mapping on the command line is one where the field takes mappings, and text in every other field of text."""
    recipe = load_recipe(write(tmp_path, "name: x"), {"target.device_map": text, "target.cache_dir": text})
    assert recipe.target.device_map == value and recipe.target.cache_dir == text


@pytest.mark.parametrize("text", ["drafter: {options: }", "drafter: {options: 3}"])
def test_override_into_something_that_is_no_mapping(tmp_path, text):
    """A flag below a field that the file has emptied is an error, not a crash."""
    with pytest.raises(ConfigError, match="options"):
        load_recipe(write(tmp_path, text), {"drafter.options.depth": "2"})


def test_every_field_has_help_and_is_listed():
    """`--help` shows each field with a line of help and its default."""
    text = help_text(Command("make x", "About.", lambda recipe, switches: None, {"quick": "faster"}))
    for name, default, about in flags(Recipe):
        assert about and "\n" not in about and f"  --{name} {default!r}: {about}\n" in text
    assert "--quick  faster" in text and "143 stopped by SIGTERM" in text
    for known in REGISTRY.values():
        assert all(f.metadata["help"] for f in dataclasses.fields(known.code.Options))
    for item in (PromptSource, EvalSet, Gates, Bound, Options):
        assert all(f.metadata["help"] for f in dataclasses.fields(item))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_recipes_load(path):
    """Every recipe in the repository is valid, drafter options included, and its name is its own."""
    recipe = load_recipe(path)
    options_of(recipe.drafter.kind, recipe.drafter.options)
    assert [load_recipe(p).name for p in SHIPPED].count(recipe.name) == 1


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_resolved_recipe_round_trips(tmp_path, path):
    """runs/<name>/recipe.yaml is a recipe and gives the same run."""
    recipe = load_recipe(path, {"train.lr": "1e-5", "drafter.options.depth": "2"})
    written = write(tmp_path, dump_recipe(recipe))
    assert load_recipe(written) == recipe
    assert set(yaml.safe_load(written.read_text())) == {f.name for f in dataclasses.fields(Recipe)}


def test_command_line_is_frozen():
    """A new, renamed or dropped option is a decision: change tests/cli_options.txt with it."""
    assert command_line() == SNAPSHOT.read_text().splitlines()


def test_script_of_a_recipe_is_found_without_torch():
    """`make train` asks for the script first: that must not take the seconds that loading torch takes."""
    code = ("import sys; sys.argv = ['x', '--config', 'recipes/smollm2-135m/eagle3-demo.yaml']\n"
            "import runpy\ntry: runpy.run_module('train.script', run_name='__main__')\n"
            "except SystemExit as stop: assert not stop.code\nassert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "train/eagle3.py\n"), done.stderr
