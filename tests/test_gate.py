"""The gate: strict files, each bound's edge, references, and the exit codes of `make eval --gate`."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from evaluated import evaluate, world
from test_report import SCHEMA, sample_report
from tiny import call, write_recipe

from eval.gate import BROKEN, HELD, SKIPPED, Gate, Options, broken, lines, number_at
from eval.run import COMMAND
from recipes.errors import ConfigError
from recipes.gates import read_gates

SHIPPED = Path(__file__).resolve().parent.parent / "recipes" / "gates.yaml"
LENGTH = "total.acceptance.mean_length"
P99 = "total.latency.ttft_ms.baseline.p99"  # null in the sample


def write(folder: Path, name: str = "gates.yaml", **values) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(values))
    return str(path)


def write_report(folder: Path, name: str, changes: dict) -> str:
    """The sample with numbers at dotted paths changed."""
    report = copy.deepcopy(sample_report())
    for path, value in changes.items():
        place = report
        *parents, last = path.split(".")
        for part in parents:
            place = place[part]
        place[last] = value
    (folder / name).write_text(json.dumps(report))
    return str(folder / name)


def states(folder: Path, bounds: list[dict], report: dict | None = None, reference: str = "", **more) -> list[str]:
    gate = Gate.read(Options(gate=write(folder, bounds=bounds, **more), reference=reference))
    return [one.state for one in gate.judge(report or sample_report())]


@pytest.mark.parametrize("values, message", [
    ({}, "bounds is empty"), ({"bounds": []}, "bounds is empty"),
    ({"bounds": [{"metric": LENGTH}]}, "bounds[0]: total.acceptance.mean_length has no bound"),
    ({"bounds": [{"max": 1}]}, "bounds[0].metric = ''"),
    ({"bounds": [{"metric": LENGTH, "maximum": 1}]}, "unknown key bounds[0].maximum; did you mean bounds[0].max"),
    ({"bounds": [{"metric": LENGTH, "max": "much"}]}, "bounds.0.max = 'much'"),
    ({"bounds": [{"metric": LENGTH, "max_drop": -0.1}]}, "bounds[0].max_drop = -0.1: must be 0 or more"),
    ({"bonds": []}, "unknown key bonds; did you mean bounds?"),
])
def test_strict_files(tmp_path, values, message):
    """Each is one message with file and field; an empty gate, which would hold for anything, is none."""
    with pytest.raises(ConfigError) as error:
        read_gates(Path(write(tmp_path, **values)))
    assert message in str(error.value) and "gates.yaml" in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot read this gate file"):
        Gate.read(Options(gate="nowhere.yaml"))


@pytest.mark.parametrize("bound, state", [
    ({"min": 2.14}, HELD), ({"min": 2.15}, BROKEN), ({"max": 2.14}, HELD), ({"max": 2.13}, BROKEN)])
def test_absolute_bounds(tmp_path, bound, state):
    """The bound itself is held."""
    assert states(tmp_path, [{"metric": LENGTH, **bound}]) == [state]


@pytest.mark.parametrize("bound, before, state", [
    ({"max_drop": 0.05}, 2.19, HELD), ({"max_drop": 0.05}, 2.20, BROKEN), ({"max_drop": 0.0}, 2.0, HELD),
    ({"max_rise": 0.1}, 2.04, HELD), ({"max_rise": 0.1}, 2.03, BROKEN),
    ({"max_drop_share": 0.1}, 2.37, HELD), ({"max_drop_share": 0.1}, 2.38, BROKEN),
    ({"max_rise_share": 0.07}, 2.0, HELD), ({"max_rise_share": 0.06}, 2.0, BROKEN)])
def test_relative_bounds(tmp_path, bound, before, state):
    """Against the reference's 2.19 a value of 2.14 lies 0.05 below: held; against 2.20 it is broken."""
    reference = write_report(tmp_path, "before.json", {LENGTH: before})
    assert states(tmp_path, [{"metric": LENGTH, **bound}], reference=reference) == [state]


def test_null_fails_unless_it_may_be_skipped(tmp_path):
    """A percentile of too few samples is no proof that it holds; `missing: skip` says so loudly."""
    assert states(tmp_path, [{"metric": P99, "max": 9}, {"metric": P99, "max": 9, "missing": "skip"}]) == [
        BROKEN, SKIPPED]


def test_without_a_reference_relative_bounds_are_not_judged(tmp_path):
    """They are said to be so, or an error with require_reference."""
    bounds = [{"metric": LENGTH, "max_drop": 0.1, "min": 1.0}]
    assert states(tmp_path, bounds) == [HELD, SKIPPED]
    with pytest.raises(ConfigError, match="require_reference is set"):
        states(tmp_path, bounds, require_reference=True)


def test_references_must_fit(tmp_path):
    """Case 50: another stack, and other prompts, are refused by name unless the file allows it. Prompts are told apart
    by the ids sent: a file of which only a part was asked has the same checksum."""
    bounds = [{"metric": LENGTH, "max_drop": 1.0}]
    first, = sample_report()["prompts"]
    more = [first, first | {"id": "chat-02", "ids_sha256": "cd" * 8}]
    for change, message in (({"stack.dtype": "bfloat16"}, "stack.dtype was 'bfloat16', now 'float32'"),
                            ({"settings.max_tokens": 9}, "max_tokens was 9, now 64"),
                            ({"settings.acceptance": "typical"}, "acceptance was 'typical', now 'exact'"),
                            ({"settings.typical": {"epsilon": 0.1, "delta": 0.3}}, "typical was {'epsilon': 0.1, "),
                            ({"prompts": more},
                             "2 questions were asked, now 1, 1 of them the same (not builtin chat-02)"),
                            ({"prompts": [first | {"ids_sha256": "ee" * 8}]},
                             "1 questions were asked, now 1, 0 of them the same (not builtin chat-01)")):
        reference = write_report(tmp_path, "before.json", change)
        with pytest.raises(ConfigError) as error:
            states(tmp_path, bounds, reference=reference)
        assert message in str(error.value) and "across: true" in str(error.value)
        assert states(tmp_path, bounds, reference=reference, across=True) == [HELD]
    later = {"prompts": [first, first | {"round": 1, "ids_sha256": "cd" * 8}], "settings.prompts_sha256": "x"}
    assert states(tmp_path, bounds, reference=write_report(tmp_path, "before.json", later)) == [HELD]


def test_a_lossy_report_breaks_every_gate(tmp_path, capsys):
    """Figures of another rule than the target's own are no figures of the drafter: exit code 1 though every bound of
    the file is held; two lossy reports by other thresholds do not fit each other."""
    gate = write(tmp_path, bounds=[{"metric": LENGTH, "min": 1.0}])
    sound = {"total.lossless.greedy.near_ties": 0}
    rule = sound | {"settings.acceptance": "typical", "settings.lossy": True,
                    "settings.typical": {"epsilon": 0.1, "delta": 0.3}}
    lossy = write_report(tmp_path, "lossy.json", rule)
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "model")
    assert call(COMMAND, recipe, "--gate", gate, "--report", lossy) == 1
    out, err = capsys.readouterr()
    assert "is broken: settings.lossy = 1 (max 0: typical acceptance" in err and "held" in out
    exact = write_report(tmp_path, "exact.json", sound | {"settings.acceptance": "exact", "settings.lossy": False})
    assert call(COMMAND, recipe, "--gate", gate, "--report", exact) == 0
    other = write_report(tmp_path, "other.json", rule | {"settings.typical": {"epsilon": 0.2, "delta": 0.3}})
    capsys.readouterr()
    assert call(COMMAND, recipe, "--gate", gate, "--report", lossy, "--reference", other) == 2
    assert "typical.epsilon was 0.2, now 0.1" in capsys.readouterr().err


def test_unknown_metric_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean total.acceptance.mean_length?"):
        number_at(sample_report(), "total.acceptance.mean_lenght", "gates.yaml")
    assert number_at(sample_report(), "total.speed.by_batch.1.speedup", "") == 0.91
    assert number_at(sample_report(), "sets.builtin.categories.code.acceptance.mean_length", "") == 2.61


def test_the_shipped_file():
    """It reads, judges the sample, and breaks on one mismatch; what needs a reference is listed as not judged."""
    gate = Gate.read(Options(gate=str(SHIPPED)))
    judged = gate.judge(sample_report())
    assert broken(judged) == [] and [one.state for one in judged].count(SKIPPED) == 4
    report = sample_report()
    report["total"]["lossless"]["greedy"]["mismatches"] = 1
    assert broken(gate.judge(report)) == ["total.lossless.greedy.mismatches = 1 (max 0)"]
    assert lines(judged)[0].split() == ["held", "total.lossless.greedy.mismatches", "0", "max", "0"]
    same = Gate.read(Options(gate=str(SHIPPED), reference=""))
    same.reference, same.reference_path = sample_report(), "before.json"
    assert {one.state for one in same.judge(sample_report())} == {HELD}


@pytest.mark.parametrize("options", [Options(report="x.json"), Options(reference="x.json")])
def test_options_that_need_a_gate(options):
    with pytest.raises(ConfigError, match="needs --gate FILE"):
        Gate.read(options)


def test_exit_codes(tmp_path, capsys):
    """0 held, 1 broken, 2 unusable, before anything is evaluated; a finished report is judged without evaluating."""
    recipe = world(tmp_path)
    report = tmp_path / "runs" / "tiny" / "eval" / "report.json"
    held = write(tmp_path, "held.yaml", bounds=[{"metric": LENGTH, "min": 1.0}])
    wrong = write(tmp_path, "wrong.yaml", bounds=[{"metric": LENGTH, "min": 3.9}])
    assert evaluate(recipe, "--gate", str(tmp_path / "none.yaml"))[0] == 2 and not report.exists()
    assert evaluate(recipe, "--gate", held)[0] == 0
    assert json.loads((report.parent / "gate.json").read_text())["bounds"][0]["state"] == HELD
    assert "| total.acceptance.mean\\_length |" in (report.parent / "report.md").read_text()
    before = report.stat().st_mtime_ns
    capsys.readouterr()
    assert evaluate(recipe, "--gate", wrong)[0] == 1
    captured = capsys.readouterr()
    assert "broken" in captured.out and "mean_length" in captured.err and captured.err.count("\n") == 1
    for gate, code in ((held, 0), (wrong, 1)):
        assert evaluate(recipe, "--gate", gate, "--report", str(report), "--drafter.path", "/nowhere")[0] == code
    assert evaluate(recipe, "--gate", held, "--reference", str(report))[0] == 0
    assert report.stat().st_mtime_ns == before


@pytest.mark.parametrize("part", [key for key in SCHEMA["required"] if key != "schema"])
def test_a_report_without_a_part_is_refused(tmp_path, capsys, part):
    """Each part that the schema requires is named where it is missing; none ends in a traceback."""
    report = sample_report()
    gate = write(tmp_path, bounds=[{"metric": LENGTH, "min": 1.0}])
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "model")
    for value in (None, 3):
        report[part] = value
        (tmp_path / "part.json").write_text(json.dumps({k: v for k, v in report.items() if v is not None}))
        assert call(COMMAND, recipe, "--gate", gate, "--report", str(tmp_path / "part.json")) == 2
        assert f"part.json: {part} missing or not of its form: made by an earlier" in capsys.readouterr().err


@pytest.mark.parametrize("part, value", [("greedy.mismatches", 1), ("greedy.near_ties", 2), ("sampling.p_value", 1e-9)])
def test_the_exit_code_follows_the_losslessness_of_the_verdict(tmp_path, capsys, part, value):
    """Case 59: whatever the gate says, a report that shows changed text or sampling ends with 1 and the reason."""
    gate = write(tmp_path, bounds=[{"metric": LENGTH, "min": 1.0}])
    fault = write_report(tmp_path, "fault.json", {f"total.lossless.{part}": value})
    sound = write_report(tmp_path, "sound.json", {"total.lossless.greedy.near_ties": 0})
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "model")
    assert call(COMMAND, recipe, "--gate", gate, "--report", sound) == 0
    capsys.readouterr()
    assert call(COMMAND, recipe, "--gate", gate, "--report", fault) == 1
    assert capsys.readouterr().err.strip().endswith(": this drafter must not be served")
