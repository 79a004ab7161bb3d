"""What a plan says of several drafters: whose training is paid back, who is best where, what was not looked at."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import roi_world
import yaml
from roi_world import GRID, MODEL, acceptance, found, method, planned, planner, steps
from test_roi_accepted import report
from tiny import call

from eval import roi, roi_page
from eval.roi_accepted import read_acceptance
from eval.roi_files import calibrate, read_calibration
from eval.roi_loads import chosen, chosen_by_load
from eval.roi_plan import PLAIN
from eval.roi_refuse import Conditions, Refusal, moved_acceptance
from eval.roi_serving import hours_of, serving
from eval.roi_worth import worth
from recipes.errors import ConfigError
from recipes.loader import load_recipe

calibrated, world = roi_world.calibrated, roi_world.world

LOOKUP = {"name": "lookup", "kind": "lookup", "per_position": [0.5, 0.4, 0.3], "tokens_per_pass": 1.3}


def test_nobody_trains_a_lookup(world, capsys):
    """48 GPU hours of the recipe's drafter are paid back by it alone; with two trained ones each says its own."""
    (world / "lookup.json").write_text(json.dumps(acceptance(**LOOKUP)))
    assert planned(world, str(world / "lookup.json"), "--price", "0") == 0
    money = found(world)["money"]
    assert money["ours"]["training"] == {"gpu_hours": 48.0, "from": "as given"}
    assert "training" not in money["lookup"] and money["lookup"]["payback_days"] is None
    assert "Training lookup" not in capsys.readouterr().out
    (world / "theirs.json").write_text(json.dumps(acceptance(name="theirs", training_gpu_hours=9.0)))
    assert planned(world, str(world / "theirs.json"), "--price", "0") == 0
    money = found(world)["money"]
    assert "training" not in money["ours"] and money["theirs"]["training"]["gpu_hours"] == 9.0
    (world / "theirs.json").write_text(json.dumps(acceptance(name="theirs")))
    assert planned(world, str(world / "theirs.json"), "--price", "0") == 0
    assert any("roi.training_gpu_hours = 48 is of one drafter, and which" in n for n in found(world)["notes"])


def test_hours_are_those_of_the_reports_run(world):
    """A report's own run was stamped for two hours of traces and three of training; another file's is not."""
    run = world / "runs" / "other"
    for name, hours in (("traces/provenance.json", 0), ("traces/shards/shard-00000.json", 2), ("provenance.json", 0),
                        ("checkpoints/step-000001/trainer.json", 3), ("eval/report.json", 0)):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(json.dumps({"time": "2026-01-01T00:00:00+00:00"}))
        end = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + 3600 * hours
        os.utime(run / name, (end, end))
    recipe = load_recipe(world / "r.yaml", {"roi.training_gpu_hours": "0", "plan.gpus": "2"})
    ours, theirs = (method(planner(), name=name) for name in ("ours", "theirs"))
    assert hours_of(recipe, [str(run / "eval" / "report.json"), "theirs.json"], [ours, theirs])["ours"][0] == 10
    given = load_recipe(world / "r.yaml", {"name": "other"})
    both = hours_of(given, [str(run / "eval" / "report.json"), "theirs.json"], [ours, theirs])
    assert both == {"ours": (48.0, "as given")}, "the recipe's own drafter"


def test_the_best_of_each_batch_and_load_is_printed(world, capsys):
    """Every interval of the plan, in words; loads are judged by whole replicas."""
    assert planned(world, "--roi.slo_ms", "9", "--price", "0") == 0
    out, plan = capsys.readouterr().out, found(world)
    assert out.count("best at batch") == len(plan["choice"]) and "misses the SLO" in out
    assert out.count("best for ") == len(plan["choice_by_load"]) >= 2
    for row in plan["choice"]:
        own = [p for points in plan["points"].values() for p in points if row["from"] <= p["batch"] <= row["to"]]
        assert row["keeps_slo"] == any(p["ms"] <= 9 for p in own)
    for row in plan["choice_by_load"]:
        inside = [r for r in plan["loads"] if row["from"] <= r["tok_s"] <= row["to"]]
        assert inside and all(r["best"] == row["method"] for r in inside)
    assert chosen_by_load([]) == []


def test_a_method_that_keeps_a_tail_goes_before_a_faster_one():
    """p99: the drafter is faster in the mean, but its slowest requests miss what plain decoding keeps."""
    made = planner(slo_ms=0.0, slo_percentile="p99", pools="apart")
    slow = method(made, requests=1200, slowest=1.0)
    plain = made.point(PLAIN, 1, 0)
    made = replace(made, section=replace(made.section, slo_ms=1.01 * plain.ms))
    first = chosen(made, [slow])[0]
    assert made.point(slow, 1, 5).tok_s > plain.tok_s and (first["method"], first["keeps_slo"]) == ("none", True)


def test_what_keeps_no_slo_is_said_of_plain_decoding_too(world, capsys):
    """A limit that no side keeps: exit 0, an empty table, a note for each."""
    assert planned(world, "--roi.slo_ms", "0.001") == 0
    notes = found(world)["notes"]
    for name in ("no drafter", "ours"):
        assert f"{name}: no configuration within what was measured keeps the SLO of 0.001 ms a token" in notes
    assert found(world)["best"] == {} and "best for" not in capsys.readouterr().out


def test_names_with_brackets_are_printed_as_they_are(world, capsys):
    """A name that looks like markup of the terminal's table."""
    (world / "ours.json").write_text(json.dumps(acceptance(name="[/red]x[b]")))
    assert planned(world, "--price", "0") == 0 and "[/red]x[b]" in capsys.readouterr().out


def test_the_cache_holds_the_longest_request(world, capsys):
    """Shorter than a mean one is an error; a fleet's workload has its own; inputs that move take at least the mean."""
    assert planned(world, "--roi.longest_tokens", "700") == 2
    assert "roi.longest_tokens = 700: a mean request has 768 tokens" in capsys.readouterr().err
    made = planner(longest_tokens=800.0)
    moved = replace(made, section=replace(made.section, input_tokens=5000.0))
    assert moved.memory(PLAIN, 8) == planner(input_tokens=5000.0).memory(PLAIN, 8) > made.memory(PLAIN, 8)
    load = {"name": "chat", "demand_tok_s": 1e4, "input_tokens": 1500, "report": str(world / "ours.json")}
    (world / "fleet.yaml").write_text(yaml.safe_dump([load]))
    argv = ["plan", "--fleet", str(world / "fleet.yaml"), "--roi.longest_tokens", "1000"]
    assert call(roi.COMMAND, world / "r.yaml", *argv, "--reports", "x") == 2
    assert "--reports: a fleet's workloads name their own" in capsys.readouterr().err
    assert call(roi.COMMAND, world / "r.yaml", *argv) == 2
    (world / "fleet.yaml").write_text(yaml.safe_dump([load | {"longest_tokens": 2000}]))
    assert call(roi.COMMAND, world / "r.yaml", *argv) == 0


def test_a_cache_of_eight_bits_stays_one(world):
    """As the steps say, unless the recipe says otherwise, which the plan notes; of other weights likewise."""
    path = world / "runs" / "w" / "roi" / "calibration.json"
    values = json.loads(path.read_text())
    values["steps"]["target"]["cache_bits"] = 8.0
    path.write_text(json.dumps(values))
    calibration = read_calibration(path)

    def served(**section):
        flags = {f"roi.{name}": str(value) for name, value in section.items()}
        return serving(load_recipe(world / "r.yaml", flags), calibration)[0]

    assert served().place.keep.cache_bits == 8 and served(cache_bits=16).place.keep.cache_bits == 16
    assert served(cache_bits=16).place.keep.weight_bits == 16
    for made, said in ((served(cache_bits=16), "a cache of 8 bits, the plan of 16"),
                       (served(weight_bits=4), "weights of 16 bits, the plan of 4")):
        assert any(said in note for note in worth(made, [], MODEL)["notes"])
    assert not any("other formats" in note for note in worth(served(), [], MODEL)["notes"])


@pytest.mark.parametrize("bits, other, moved", [
    (8.0, 8 + 32 / 128**2, False), (4.0, 4.15625, False), (4.25, 4.0, False), (16.0, 8.0, True), (8.0, 4.25, True)])
def test_scales_make_no_other_target(bits, other, moved):
    """8 bits and the scales of their blocks are 8 bits; half the width is another target (1)."""
    if moved:
        with pytest.raises(Refusal, match=r"refused \(1\)"):
            moved_acceptance(Conditions(weight_bits=bits), Conditions(weight_bits=other, context=(0, 0)))
    else:
        moved_acceptance(Conditions(weight_bits=bits), Conditions(weight_bits=other, context=(0, 0)))


def test_other_parallelism_names_the_field(world, capsys):
    """The steps are of one GPU."""
    assert planned(world, "--roi.tensor_parallel", "2") == 2
    assert "refused (3): roi.tensor_parallel = 2, the steps were measured with 1" in capsys.readouterr().err
    assert planned(world, "--roi.hardware", "h200") == 2
    assert "refused (3): roi.hardware = h200, the steps were measured with h100-sxm" in capsys.readouterr().err


def test_loads_reach_the_demand(world, capsys):
    """However large it is, within reason."""
    assert planned(world, "--demand", "5e6", "--price", "0") == 0
    assert found(world)["loads"][-1]["tok_s"] == pytest.approx(7.5e6)
    for flag, value in (("--demand", "1e13"), ("--price", "1e7")):
        assert planned(world, flag, value) == 2 and "must be at most" in capsys.readouterr().err


def test_steps_that_cannot_be_are_refused():
    """8B in bf16 on an H100 reads 15.01 GB in 4.48 ms at least; a cycle is no shorter than the plain step beside it.
    What repeated runs differ by is allowed."""
    made = steps(*GRID)
    points = [p.ms for p in made.points]

    def changed(number: int, ms: float):
        return replace(made, points=[replace(p, ms=ms) if i == number else p for i, p in enumerate(made.points)])

    with pytest.raises(Refusal, match=r"refused \(4\): points\[0\] \(step, rows 8, K 0, 3 ms\): 2,667 tokens/s is"):
        calibrate(changed(0, 3.0))
    with pytest.raises(Refusal, match=r"refused \(4\): points\[1\] .*: a speedup of 1.25 is above the acceptance"):
        calibrate(changed(1, 0.8 * points[0]))
    with pytest.raises(Refusal, match=r"refused \(8\): tensor parallelism of 3 divides neither"):
        calibrate(replace(made, tensor_parallel=3))
    assert calibrate(changed(1, 0.95 * points[0])) and calibrate(changed(0, 4.3))


def test_a_report_that_was_cut_is_named(tmp_path):
    """Each key that a plan reads, in one line."""
    whole = report()
    for key in ("sets", "total", "drafter", "target", "stack", "settings", "name"):
        (tmp_path / "r.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(ConfigError, match=f"r.json: is no whole report .KeyError: '{key}'.; run"):
            read_acceptance(tmp_path / "r.json", "")
    (tmp_path / "r.json").write_text(json.dumps(whole | {"settings": [], "total": None}))
    with pytest.raises(ConfigError, match="is no whole report"):
        read_acceptance(tmp_path / "r.json", "")


def test_a_calibration_with_other_constants_is_not_read(world, capsys):
    """Figures of another version would be taken for others."""
    path = world / "runs" / "w" / "roi" / "calibration.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"log_sd": {"moved": 0.1}}))
    assert planned(world) == 2 and "has other constants than this version" in capsys.readouterr().err


def test_more_drafters_than_colours():
    """Each of nine has one, and long names are cut in a legend alone."""
    names = ["none", *(f"drafter {i}" for i in range(9))]
    colours = roi_page.colours_of(names)
    assert list(colours) == names and colours["drafter 0"] == colours["drafter 6"] != colours["none"]
    assert roi_page.legend("none") == "no drafter" and roi_page.legend("x" * 40) == "x" * 25 + "…"
