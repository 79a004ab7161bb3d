"""`make roi`: from measured steps and acceptance to the plan, its refusals, the choice of a drafter and the fleet."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime

import pytest
import roi_world
import yaml
from roi_world import GRID, MODEL, RATES, TRUE, acceptance, found, planned, steps
from tiny import call

from eval import roi
from eval.roi_accepted import Acceptance
from eval.roi_files import calibrate
from eval.roi_loads import winning
from eval.roi_plan import PLAIN, Method, Planner
from eval.roi_serving import training_hours
from recipes.loader import load_recipe
from recipes.schema import Roi
from recipes.speculation import Draft, Step, kept_of, step_seconds

calibrated, world = roi_world.calibrated, roi_world.world


def test_plan_and_its_page(world, capsys):
    """Table, JSON and page: both sides under the same SLO and memory, whole replicas, the arithmetic of each figure."""
    assert planned(world) == 0
    out, plan = capsys.readouterr().out, found(world)
    plain, ours = plan["best"]["none"], plan["best"]["ours"]
    assert plain["ms"] <= 30 and ours["ms"] <= 30 and ours["kept"] == pytest.approx(kept_of(RATES, ours["K"]))
    money = plan["money"]["ours"]
    for side, point in (("plain", plain), ("speculative", ours)):
        assert money["full_load"][side] == pytest.approx(2.0 / (point["tok_s"] * 0.0036))
        gpus = money["at_demand"][side]["gpus"]
        assert (gpus - 1) * 0.7 * point["tok_s"] < 30000 <= gpus * 0.7 * point["tok_s"]
    assert money["saving"]["share"] == pytest.approx(1 - plain["tok_s"] / ours["tok_s"])
    assert money["saving"]["interval"][0] < money["saving"]["share"] < money["saving"]["interval"][1]
    assert money["payback_days"] == pytest.approx(48 / (24 * money["gpus_saved"]))
    assert money["saved_in_days"]["dollars"] == 24 * 30 * 2.0 * money["gpus_saved"]
    assert ours["ms_p99"] is None and any("no p99" in n for n in plan["notes"])
    assert "90 % interval" in out and "GPUs without a drafter" in out and "paid back in" in out
    page = (world / "runs" / "w" / "roi" / "roi.html").read_text()
    assert page.count("<svg") == 5 and "<script" not in page and "http" not in page.replace("http://www.w3.org", "")


def test_best_configurations_by_brute_force(world):
    """The best of a side is the fastest of all its points that keep the SLO, and lies within memory and twice the
    largest measured step."""
    assert planned(world, "--roi.slo_ms", "9") == 0
    plan = found(world)
    for name in ("none", "ours"):
        points = plan["points"][name]
        assert plan["best"][name]["tok_s"] == max(p["tok_s"] for p in points if p["ms"] <= 9)
        assert all(p["batch"] * (p["K"] + 1) <= 2 * 64 * 6 and p["memory"] <= 0.9 * 80e9 for p in points)
        assert any(p["ms"] > 9 for p in points)


def test_calibrated_curve_is_the_engines(world):
    """Speedups at batches and draft lengths that were not measured are those of the engine's true constants within
    5 %, and within the interval."""
    assert planned(world, "--roi.pools", "apart", "--roi.input_tokens", "512", "--roi.output_tokens", "256") == 0
    engine = steps()
    place, draft = engine.place(), engine.draft()
    for row in found(world)["curves"]["ours"]:
        step = Step(row["batch"], row["K"], 640.0, kept=kept_of(RATES, row["K"]))
        true = step.kept * step_seconds(draft, place, TRUE, step.plain) / step_seconds(draft, place, TRUE, step)
        assert row["speedup"] == pytest.approx(true, rel=0.05) and row["low"] < true < row["high"]


def test_loss_under_load_is_found(world):
    """A weak drafter wins at small batches and loses at large ones: the plan gives intervals, not one figure, and names
    plain decoding where it is best (case 23)."""
    (world / "weak.json").write_text(json.dumps(acceptance(name="weak", per_position=[0.45, 0.2, 0.1])))
    assert planned(world, name="weak.json") == 0
    plan = found(world)
    curve = {row["batch"]: row["speedup"] for row in plan["curves"]["weak"]}
    assert curve[1] > 1 and min(curve.values()) < 1
    (low, high), = plan["wins"]["weak"]["likely"]
    assert low == 1 and high < max(curve) and plan["choice"][-1]["method"] == "none"
    assert plan["choice"][0]["method"] == "weak"


def test_a_tree_verifies_its_nodes():
    """A tree costs topk branches a level and its nodes in verification, at its own shape only."""
    made = steps(*GRID)
    planner = Planner(Roi(model=MODEL), calibrate(made), made.place(), 80e9)
    tree = Method("t", made.draft(), Acceptance(per_position=[0.6, 0.4], tokens_per_pass=2.4, topk=4, verified=30))
    assert list(tree.lengths()) == [2] and max(planner.batches(tree, 2)) * 30 <= 2 * 64 * 6
    step = planner.step(tree, 8, 2, 2.4)
    assert (step.topk, step.width, step.kept) == (4, 30, 2.4)
    chain = Method("c", made.draft(), Acceptance(per_position=[0.6, 0.4], tokens_per_pass=2.4))
    assert planner.point(tree, 8, 2).gap_ms > planner.point(chain, 8, 2).gap_ms


def test_training_hours_come_from_the_run(world):
    """From the stamps of tracing and training to their last files, times plan.gpus; None where a stamp is missing."""
    recipe = load_recipe(world / "r.yaml", {"roi.training_gpu_hours": "0", "plan.gpus": "4"})
    assert training_hours(recipe) == (None, "")
    run = world / "runs" / "w"
    for stamped, last, hours in (("traces/provenance.json", "traces/shards/shard-00000.json", 2.0),
                                 ("provenance.json", "checkpoints/step-000001/trainer.json", 3.0)):
        for name in (stamped, last):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(json.dumps({"time": "2026-01-01T00:00:00+00:00"}))
        end = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + 3600 * hours
        os.utime(run / last, (end, end))
    assert training_hours(recipe)[0] == pytest.approx(4 * (2 + 3))
    assert training_hours(load_recipe(world / "r.yaml")) == (48.0, "as given")


def test_winning_intervals_need_not_be_one():
    """A curve that crosses 1 three times has two intervals (one break-even number would be wrong)."""
    curve = [{"batch": b, "speedup": s} for b, s in ((1, 1.2), (2, 1.1), (4, 0.9), (8, 1.3), (16, 1.1), (32, 0.8))]
    assert winning(curve) == [[1, 2], [8, 16]] and winning([]) == []
    assert winning(curve[2:3]) == []


def test_choice_between_reports(world):
    """Several drafters and none: the fastest at each batch, by brute force."""
    (world / "lookup.json").write_text(json.dumps(acceptance(
        name="lookup", kind="lookup", per_position=[0.5, 0.4, 0.3], tokens_per_pass=1.3)))
    assert planned(world, str(world / "lookup.json")) == 0
    plan = found(world)
    fastest = {}
    for name, points in plan["points"].items():
        for p in points:
            if p["tok_s"] > fastest.get(p["batch"], ("", 0))[1]:
                fastest[p["batch"]] = (name, p["tok_s"])
    for row in plan["choice"]:
        for batch, (name, _) in fastest.items():
            assert not row["from"] <= batch <= row["to"] or name == row["method"]
    assert {p["K"] for p in plan["points"]["lookup"]} == {3}, "a lookup's acceptance is known at its own length only"
    assert plan["points"]["lookup"][0]["kept"] == 1.3
    for row in plan["choice"]:
        can = {name for name, points in plan["points"].items() if any(p["batch"] == row["from"] for p in points)}
        assert set(row["left_out"]) == {"ours", "lookup"} - can
    assert any("before it is turned down" in line for line in plan["prose"]) == any(
        "is the largest within what was measured" in note and "no drafter" not in note for note in plan["notes"])
    assert any(row["left_out"] for row in plan["choice"]), "plain decoding goes further than what drafters measured"
    assert all(min(r["gpus"].values()) == r["gpus"][r["best"]] for r in plan["loads"])


@pytest.mark.parametrize("changes, argv, said", [
    ({"temperature": 1.0}, [], "refused (1): acceptance was measured with temperature 1.0"),
    ({"domain": "gsm8k"}, ["--roi.domain", "financeqa"], "refused (1)"), ({"target": "mine"}, [], "refused (1)"),
    ({"weight_bits": 8.0}, [], "refused (1)"), ({}, ["--roi.weight_bits", "8"], "refused (1)"),
    ({"context": [0.0, 700.0]}, [], "refused (1): acceptance was measured at contexts of 0 to 700 tokens"),
    ({}, ["--calibration", "none.json"], "refused (2)"), ({"engine": {"name": "other"}}, [], "refused (3)"),
    ({}, ["--roi.hardware", "b200"], "refused (3)"), ({"mode": "synthetic"}, [], "refused (6)"),
    ({"prompts": "random"}, [], "refused (6)"), ({}, ["--roi.slo_percentile", "p99"], "refused (7): p99 needs"),
    ({"requests": 900, "slowest": 1.4}, ["--roi.slo_percentile", "p99"], "refused (7): p99 of 900 requests"),
    ({}, ["--roi.headroom", "1"], "refused (11)"), ({}, ["--roi.headroom", "0", "--demand", "0"], "refused (11)"),
    ({}, ["--roi.memory_share", "0.1"], "refused (11)"),
    ({}, ["--roi.price_kind", "spot", "--roi.days", "365"], "refused (12)")])
def test_plan_refuses(world, capsys, changes, argv, said):
    """Each refusal that a plan can meet exits 2 with its number and writes no plan."""
    (world / "ours.json").write_text(json.dumps(acceptance(**changes)))
    assert planned(world, *argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (world / "runs" / "w" / "roi" / "roi.json").exists()


def test_a_tail_of_enough_requests_is_said(world):
    """1,200 requests with their own acceptance: p99 from that of the slowest, which limits the SLO."""
    (world / "ours.json").write_text(json.dumps(acceptance(requests=1200, slowest=1.2)))
    assert planned(world, "--roi.slo_percentile", "p99", "--roi.slo_ms", "14") == 0
    for p in found(world)["points"]["ours"]:
        assert p["ms_p99"] > p["ms"]
    best = found(world)["best"]
    assert best["ours"]["ms_p99"] <= 14 and best["ours"]["gap_ms"] > best["ours"]["ms"]


def test_saving_without_a_plain_side_is_not_said(world):
    """An SLO that only speculation keeps: GPUs and dollars, but no saving (refusal 9)."""
    fastest = min(p["ms"] for p in (planned(world), found(world))[1]["points"]["none"])
    assert planned(world, "--roi.slo_ms", str(0.8 * fastest)) == 0
    money = found(world)["money"]["ours"]
    assert money["saving"] is None and "cannot be said" in money["no_saving"]


def test_pools_apart_add_prompt_gpus_to_both_sides(world):
    """Disaggregated: the prompts' GPUs are counted on both sides and decoding carries no prefill."""
    assert planned(world, "--roi.pools", "apart") == 0
    at = found(world)["money"]["ours"]["at_demand"]
    assert at["plain"]["prefill_gpus"] == at["speculative"]["prefill_gpus"] > 0
    assert planned(world) == 0
    assert found(world)["money"]["ours"]["at_demand"]["plain"]["prefill_gpus"] == 0


def test_drafter_and_caches_take_memory():
    """Bytes by hand: weights, both caches at the longest request, drafter."""
    made = steps(*GRID)
    planner = Planner(Roi(model=MODEL, longest_tokens=2000.0), calibrate(made), made.place(), 80e9)
    draft = made.draft()
    ours = Method("ours", draft, Acceptance(per_position=RATES))
    plain = planner.memory(PLAIN, 4)
    assert plain == pytest.approx(made.place().shape.parameters * 2 + 4 * 2000 * 131072)
    assert planner.memory(ours, 4) - plain == pytest.approx(draft.size.parameters * 2 + 4 * 2000 * 4096)
    assert planner.memory(Method("l", Draft("lookup"), Acceptance()), 4) == plain
    heads = planner.memory(Method("m", Draft("medusa"), Acceptance(per_position=RATES)), 4) - plain
    assert heads == pytest.approx(5 * 4096 * (4096 + 128256) * 2)
    small = Draft("medusa", vocab=8192, blocks=2)
    heads = planner.memory(Method("m", small, Acceptance(per_position=RATES)), 4) - plain
    assert heads == pytest.approx(5 * 4096 * (2 * 4096 + 8192) * 2)
    layer = planner.memory(Method("t", Draft("mtp"), Acceptance(per_position=RATES)), 4) - plain
    weights = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096 * 128256
    assert layer == pytest.approx(2 * weights + 4 * 2000 * 4096, rel=1e-3)


def test_fleet_totals(world, capsys):
    """Two workloads: one where the drafter wins, one whose replicas run a batch at which it loses against plain
    decoding at its best; totals, and what dropping it there moves."""
    (world / "weak.json").write_text(json.dumps(acceptance(name="weak", per_position=[0.2, 0.05, 0.01])))
    loads = [{"name": "chat", "demand_tok_s": 20000, "report": str(world / "ours.json")},
             {"name": "batch jobs", "demand_tok_s": 600000, "report": str(world / "weak.json"), "batch": 96,
              "slo_ms": 0}]
    (world / "fleet.yaml").write_text(yaml.safe_dump(loads))
    assert call(roi.COMMAND, world / "r.yaml", "plan", "--fleet", str(world / "fleet.yaml")) == 0
    out = capsys.readouterr().out
    fleet = json.loads((world / "runs" / "w" / "roi" / "fleet.json").read_text())
    chat, jobs = fleet["workloads"]
    assert chat["keeps_drafter"] and chat["speculative"] < chat["plain"]
    assert not jobs["keeps_drafter"] and jobs["speculative"] > jobs["plain"] == jobs["best"]
    assert fleet["gpus"]["best"] == chat["speculative"] + jobs["plain"] < min(
        fleet["gpus"]["plain"], fleet["gpus"]["speculative"])
    assert fleet["moved_by_dropping"] == jobs["speculative"] - jobs["plain"]
    assert fleet["dollars_a_day"]["best"] == 48 * fleet["gpus"]["best"]
    assert "dropping the drafter on batch jobs frees" in out


@pytest.mark.parametrize("fleet, said", [("{}", "must be a list"), ("[{name: a}]", "demand_tok_s is missing"),
                                         ("[{nam: a}]", "did you mean")])
def test_bad_fleet_is_named(world, capsys, fleet, said):
    (world / "fleet.yaml").write_text(fleet)
    assert call(roi.COMMAND, world / "r.yaml", "plan", "--fleet", str(world / "fleet.yaml")) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("grid, said", [
    ((), "refused (2)"), (((8, 0), (8, 2)), "needs plain decoding and two draft lengths at one batch"),
    (((8, 0), (4, 2), (8, 5)), "needs plain decoding")])
def test_too_few_steps_are_refused(world, capsys, grid, said):
    """The minimum of a calibration: plain and two draft lengths at one batch."""
    (world / "few.json").write_text(json.dumps(asdict(steps(*grid))))
    assert call(roi.COMMAND, world / "r.yaml", "calibrate", "--steps", str(world / "few.json")) == 2
    assert said in capsys.readouterr().err


def test_synthetic_steps_serve_for_times(world):
    """Step times with synthetic acceptance calibrate, and the plan says so; measured acceptance comes beside them."""
    (world / "s.json").write_text(json.dumps(asdict(steps(*GRID, acceptance="synthetic"))))
    assert call(roi.COMMAND, world / "r.yaml", "calibrate", "--steps", str(world / "s.json")) == 0
    assert planned(world) == 0 and any("synthetic acceptance" in n for n in found(world)["notes"])


@pytest.mark.parametrize("words, said", [
    ([], "no sub-command: say one of measure, calibrate, plan, check, validate"), (["plam"], "plam: say one of"),
    (["plan", "x"], "plan: takes no further words, got x"), (["validate"], "validate: needs one file"),
    (["check"], "check: needs a YAML file")])
def test_words(world, capsys, words, said):
    """Sub-commands are words; what is wrong with them is said in one line."""
    assert call(roi.COMMAND, world / "r.yaml", *words) == 2
    assert said in capsys.readouterr().err


def test_check_exits_1_where_a_claim_is_wrong(world, capsys):
    """The exit code tells whether all figures hold."""
    figures = ["price_per_gpu_hour=2.02", "tok_s=1400"]
    assert call(roi.COMMAND, world / "r.yaml", "check", *figures, "dollars_per_million=0.40") == 0
    assert call(roi.COMMAND, world / "r.yaml", "check", *figures, "dollars_per_million=1.44") == 1
    assert "$0.401" in capsys.readouterr().out


def test_names_on_the_page_are_text(world):
    """A drafter's name with markup is shown, not run."""
    (world / "ours.json").write_text(json.dumps(acceptance(name="<b>x</b>$&")))
    assert planned(world) == 0
    page = (world / "runs" / "w" / "roi" / "roi.html").read_text()
    assert "<b>x" not in page and "&lt;b&gt;x" in page
