"""What no recipe can mean, in a file or a flag: exit 2 and one line that names the file, the field and the value."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drafters.registry import options_of
from recipes import cli
from recipes.errors import ConfigError
from recipes.loader import dump_recipe, load_recipe
from recipes.plain import DEEPEST, MOST, Refused, read
from recipes.schema import NonNegativeInt, PositiveInt, opt
from train.loop import Trainer
from train.nodes import COMMAND as LAUNCH

DIGITS = "9" * 5000


@dataclass
class Sizes:
    rows: PositiveInt = opt(1, "rows")
    spare: NonNegativeInt = opt(0, "spare")
    pairs: list[tuple[float, PositiveInt]] = opt([], "pairs")


PLAIN = cli.Command("make x", "About.", lambda recipe, switches: None)


def refusal(capsys, command: cli.Command, *argv: str) -> str:
    """The one line of a stage that is refused with code 2."""
    with pytest.raises(SystemExit) as left:
        cli.run(command, list(argv))
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1) and len(err) < 600, err
    return err


def in_file(tmp_path: Path, capsys, text: str) -> str:
    """The refusal of a recipe file, without the file's name, which it begins with."""
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    begin = f"make x: error: {path}: "
    err = refusal(capsys, PLAIN, "--config", str(path))
    assert err.startswith(begin)
    return err.removeprefix(begin)


@pytest.mark.parametrize("text", ["2026-02-30", "2026-11-30", "2026-13-01", "2026-11-30 25:61:00"])
def test_a_date_is_text(tmp_path, text):
    """A run may be named after a day, also one that no calendar has; the resolved recipe keeps it as text."""
    path = tmp_path / "r.yaml"
    path.write_text(f"name: {text}\neval: {{prompts: {text}}}\n")
    recipe = load_recipe(path, {"drafter.options.x": text, "runs_dir": text})
    assert recipe.name == recipe.eval.prompts == recipe.runs_dir == recipe.drafter.options["x"] == text
    assert load_recipe(path, {"name": text}).name == text
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


@pytest.mark.parametrize("text, message", [
    ("name: 0b_", "line 1, column 7: '0b_' cannot be read as a number or boolean; put a text in quotes"),
    (f"train: {{batch_rows: {DIGITS}}}", "line 1, column 21: '999"),
    (f"train:\n  lr: 0x{DIGITS}", "line 2, column 7: '0x999"),
    ("train: {seed: 18446744073709551616}", "'18446744073709551616' is too large"),
    ("name: !!bool maybe", "'maybe' cannot be read as a number or boolean"), ("name: !!int ''", "'' cannot be read"),
    ("name: !!float x", "'x' cannot be read"), ('name: "\\UFFFFFFFF"', "line 1, column "),
    ("name: !!timestamp 2026-02-30", "not valid YAML: line 1, column 7: could not determine a constructor"),
    ("name: !!binary aGk=", "not valid YAML: line 1, column 7: could not determine a constructor"),
    ("name: !!python/name:os.system x", "not valid YAML: line 1, column 7: could not determine a constructor"),
    ("drafter: {options: &o {x: *o}}", "line 1, column 27: alias *o stands within what it names"),
    ("drafter: &o [[*o]]", "alias *o stands within what it names"),
    ("name: " + "[" * 3000, f"line 1, column {6 + DEEPEST}: more than {DEEPEST} levels deep"),
    ("name: " + "{a: " * 3000, f"more than {DEEPEST} levels deep"),
    ("\n".join(" " * i + "a:" for i in range(3000)), f"more than {DEEPEST} levels deep"),
    ("- " * 3000 + "x", f"more than {DEEPEST} levels deep"),
    ("name: a\ntrain: {lr: 1.0}\nname: b", "line 3, column 1: key 'name' stands twice in one mapping"),
    ("train: {lr: 1.0, 'lr': 2.0}", "line 1, column 18: key 'lr' stands twice in one mapping"),
    ("drafter:\n  options: {depth: 1,\n    depth: 2}", "line 3, column 5: key 'depth' stands twice"),
    ("train: {<<: &a {lr: 1.0}, <<: *a}", "key '<<' stands twice"),
    ("a: [", "not valid YAML: line 1, column 5: while parsing a flow node: "),
    ("a: \0", "not valid YAML: unacceptable")])
def test_what_no_recipe_can_mean(tmp_path, capsys, text, message):
    """Numbers that are none, values within themselves, too deep ones, keys that stand twice: named with their line."""
    assert message in in_file(tmp_path, capsys, text)


def test_aliases_are_read_and_bounded():
    """A mapping may stand for several; what a few lines multiply to billions is refused at once."""
    assert read("a: &x {lr: 1, k: 2}\nb: {<<: *x, k: 3}\nc: *x") == {
        "a": {"lr": 1, "k": 2}, "b": {"lr": 1, "k": 3}, "c": {"lr": 1, "k": 2}}
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(Refused, match=f"more than {MOST:,} values"):
        read("\n".join(lines))
    chain = ["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, DEEPEST))]
    with pytest.raises(Refused, match="levels deep"):
        read("\n".join(chain))


@pytest.mark.parametrize("flag, text, message", [
    ("trace.layers", "[" * 3000, "command line: trace.layers = '[[["), ("name", "0b_" * 90, "cannot write"),
    ("train.batch_rows", DIGITS, "command line: train.batch_rows = '999"),
    ("train.seed", "0b_", "command line: train.seed = '0b_': '0b_' cannot be read"),
    ("train.seed", "99999999999999999999999", "train.seed = '99999999999999999999999': '99999999999999999999999' is"),
    ("drafter.options.x", "&o [*o]", "command line: drafter.options.x = '&o [*o]': alias *o"),
    ("drafter.options" + ".x" * 3000, "1", f"more than {DEEPEST} levels deep"),
    ("plan.custom", "{a: {memory_gb: 1}, a: {}}", "plan.custom = '{a: {memory_gb: 1}, a: {}}': key 'a' stands twice"),
    ("target.device_map", "{a: 0, a: 1}", "target.device_map = '{a: 0, a: 1}': key 'a' stands twice"),
    ("target.device", "a\udcff", "command line: target.device = 'a\\udcff': "),
    ("trace.layers", "2026-02-30", "command line: trace.layers = '2026-02-30': Input should be a valid list")])
def test_what_no_flag_can_mean(tmp_path, capsys, flag, text, message):
    (tmp_path / "r.yaml").write_text("name: x")
    command = cli.Command("make x", "About.", lambda recipe, switches: cli.run_folder(recipe))
    argv = ["--config", str(tmp_path / "r.yaml"), "--runs_dir", str(tmp_path), f"--{flag}", text]
    assert message in refusal(capsys, command, *argv)


@pytest.mark.parametrize("text, field", [
    (r'name: "a\0b"', r"name = 'a\x00b': holds a NUL"), (r'runs_dir: "a\0b"', r"runs_dir = 'a\x00b': holds a NUL"),
    (r'name: "\ud800"', r"name = "), (r'name: "a\nb"', r"name = 'a\nb': must be a plain folder name"),
    (r'prompts: {sources: [{path: "a\0"}]}', r"prompts.sources.0.path = 'a\x00': holds a NUL"),
    (r'eval: {server: {metrics_urls: ["a\0"]}}', r"eval.server.metrics_urls.0 = 'a\x00': holds a NUL"),
    (r'drafter: {options: {x: ["\ud83d\ude00"]}}', r"drafter.options.x.0 = '\ud83d\ude00': holds half a character"),
    (r'generation: {engine: {"a\0": 1}}', r"key 'generation.engine.a\x00': holds a NUL"),
    (r'"\ud800\n": 1', r"unknown key '\ud800\n'; ")])
def test_text_that_no_file_can_hold(tmp_path, capsys, text, field):
    """A NUL and half a character anywhere in a recipe are refused with the field's name."""
    assert field in in_file(tmp_path, capsys, text)


@pytest.mark.parametrize("text, message", [
    ("train: {batch_rows: true}", "train.batch_rows = True: must be a number, not true or false"),
    ("train: {lr: yes}", "train.lr = True: must be a number, not true or false"),
    ("trace: {layers: [1, 2, true]}", "trace.layers.2 = True: must be a number"),
    ("plan: {zero_stage: true}", "plan.zero_stage = True: "),
    ("target: {device_map: {a: true}}", "target.device_map.a = True: "),
    ("eval: {tree: {paths: [[false]]}}", "eval.tree.paths.0.0 = False: must be a number"),
    ("export: {check: 1}", "export.check = 1: must be true or false"),
    ("export: {check: 0.0}", "export.check = 0.0: must be true or false"),
    ("train: {lr: .nan}", "train.lr = nan: "),
    ("eval: {gap_tolerance: .inf}", "eval.gap_tolerance = inf: must be a fin")])
def test_a_boolean_is_no_number(tmp_path, capsys, text, message):
    assert message in in_file(tmp_path, capsys, text)


def test_a_boolean_is_no_number_in_other_options(capsys):
    """The same holds for a drafter's options and for a command's own, within tuples too."""
    with pytest.raises(ConfigError, match="depth = True: must be a number"):
        options_of("eagle3", {"depth": True})
    with pytest.raises(ConfigError, match=r"deepen.0.1 = True: must be a number"):
        options_of("eagle3", {"deepen": [[0.5, True]]})
    command = cli.Command("make x", "About.", lambda recipe, switches, options: None, options=Sizes)
    assert "command line: pairs.1.1 = True: must be a number" in refusal(
        capsys, command, "--pairs", "[[0.5, 1], [0.5, true]]")
    assert "command line: rows = 2147483648: " in refusal(capsys, command, "--rows", "2147483648")
    assert "command line: spare = -1: " in refusal(capsys, command, "--spare", "-1")
    assert "command line: port = 65536: " in refusal(capsys, LAUNCH, "--port", "65536")


@pytest.mark.parametrize("field, most", [
    *((field, 2**32 - 1) for field in ("train.seed", "eval.seed", "prompts.seed", "generation.seed",
                                       "trace.verify_seed")),
    *((field, 2**31 - 1) for field in ("generation.unit_rows", "train.validate_every", "trace.shard_mb",
                                       "train.warmup_steps", "eval.max_tokens", "roi.rounds")),
    *((field, 65536) for field in ("train.batch_rows", "train.accumulation", "generation.batch_size",
                                   "eval.batch_size", "generation.server.concurrency")),
    *((field, 128) for field in ("eval.draft_length", "train.validation_draft_length", "eval.tree.depth")),
    ("eval.tree.total", 4096), ("eval.tree.top_k", 4096), ("eval.sampling_draws", 10**7), ("target.threads", 4096),
    ("train.epochs", 10_000), ("generation.server.retries", 1000), ("eval.server.retries", 1000)])
def test_numbers_are_bounded(tmp_path, field, most):
    """No number overflows a library's integer, fills the memory or runs for ever: the largest is taken, one more is
    refused with the bound."""
    path = tmp_path / "r.yaml"
    path.write_text("name: x")
    recipe = load_recipe(path, {field: str(most)})
    for name in field.split("."):
        recipe = getattr(recipe, name)
    assert recipe == most
    for beyond in (most + 1, -1, 10**12):
        with pytest.raises(ConfigError, match=rf"^command line: {field} = {beyond}: Input should be (less|gr|a valid)"):
            load_recipe(path, {field: str(beyond)})


@pytest.mark.parametrize("flag, text", [
    ("eval.batch_sizes", "[65537]"), ("eval.tree.paths", f"[{[0] * 129}]"), ("roi.draft_lengths", "[129]"),
    ("roi.batches", "[65537]"), ("eval.server.concurrency", "[65537]"), ("train.epochs", "1e12")])
def test_numbers_in_lists_are_bounded(tmp_path, flag, text):
    path = tmp_path / "r.yaml"
    path.write_text("name: x")
    with pytest.raises(ConfigError, match=f"^command line: {flag}"):
        load_recipe(path, {flag: text})


def test_the_largest_seed_is_one_to_every_generator():
    """Mixed with step, micro-batch and rank too, on as many ranks as there are."""
    seed = 2**32 - 1
    np.random.seed(seed)
    np.random.default_rng(seed)
    accelerator = SimpleNamespace(num_processes=4096, process_index=4095)
    trainer = SimpleNamespace(section=SimpleNamespace(seed=seed), accelerator=accelerator)
    drawn = {Trainer.noise_seed(trainer, step, index) for step in (0, 1, 10**6) for index in (0, 65_535)}
    assert len(drawn) == 6
    for one in (*drawn, seed * 1_000_003 + 10_000, seed + 2**31):
        torch.Generator().manual_seed(one)
    two = SimpleNamespace(num_processes=2, process_index=1)
    small = SimpleNamespace(section=SimpleNamespace(seed=3), accelerator=two)
    assert Trainer.noise_seed(small, 5, 1) == ((3 * 1_000_003 + 5) * 64 + 1) * 2 + 1
