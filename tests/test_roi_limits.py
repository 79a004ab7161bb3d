"""What a plan keeps to: the batches that were measured, steps of its own drafter, whole costs, figures that can be."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import roi_world
import yaml
from roi_world import GRID, MODEL, RATES, found, method, planned, planner, steps
from tiny import call

from eval import roi, roi_page, roi_plan, roi_worth
from eval.roi_accepted import Acceptance
from eval.roi_calibrate import Fit
from eval.roi_files import Steps, bits_in, calibrate, gpu_of, read_calibration, read_steps
from eval.roi_fleet import Workload, fleet, one
from eval.roi_plan import PLAIN, Method, Planner
from eval.roi_refuse import Refusal
from eval.roi_serving import serving
from eval.roi_worth import worth
from recipes.errors import ConfigError
from recipes.loader import load_recipe, parse_into
from recipes.schema import Roi
from recipes.speculation import prompt_seconds

calibrated, world = roi_world.calibrated, roi_world.world

QUANTISED = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """Intervals of fewer draws than a plan takes."""
    for module in (roi_plan, roi_worth):
        monkeypatch.setattr(module, "DRAWS", 20)


def test_steps_of_one_batch_plan_that_batch_alone():
    """Nothing measured says what another batch takes: both sides stay at it, the plan says so, and since plain decoding
    may be better at another one, nothing is saved (9). With a second batch the usual ones are planned."""
    made = planner((8, 0), (8, 2), (8, 5), price_per_gpu_hour=2.0, demand_tok_s=1e4)
    plan = worth(made, [method(made)], MODEL, None)
    assert {p["batch"] for points in plan["points"].values() for p in points} == {8}
    assert [row["batch"] for row in plan["curves"]["ours"]] == [8] and len(plan["choice"]) == 1
    assert any("all steps were measured at batch 8: nothing is planned at another one" in n for n in plan["notes"])
    assert any("batch 8 alone was looked at" in line for line in plan["prose"])
    assert plan["money"]["ours"]["saving"] is None and not plan["loads"] and not plan["sensitivity"]
    assert any("ours: what is saved cannot be said (9): all steps are of one batch" in line for line in plan["prose"])
    assert planner((8, 0), (8, 2), (8, 5), (10, 5)).batches(PLAIN, 0)[:8] == [1, 2, 3, 4, 6, 8, 10, 12]


def test_notes_say_what_the_steps_are_of():
    """Steps of another target, and traffic with more than twice the context of the steps (640)."""
    made = planner(input_tokens=1200.0, output_tokens=200.0)
    told = worth(made, [], "another", None)["notes"]
    assert any("the steps are of llama-3.1-8b: an engine's constants carry over" in n for n in told)
    assert any("mean context of 1,300 tokens is far from the 640 to 640 of the steps" in n for n in told)
    spelt = worth(made, [], "meta-llama/Llama-3.1-8B-Instruct", None)["notes"]
    assert not any("carry over" in n for n in spelt), "a tuning has the same sizes, so the same steps"
    near = worth(planner(input_tokens=1100.0, output_tokens=200.0), [], MODEL, None)["notes"]
    assert not any("carry over" in n or "far from" in n for n in near)


def test_a_drafter_that_was_never_timed_is_refused():
    """Plain steps alone calibrate plain decoding; what a drafter is worth needs one step of it (2)."""
    made = planner(measured=steps((8, 0), (64, 0), drafter={}))
    assert worth(made, [], MODEL, None)["best"]["none"]
    with pytest.raises(Refusal, match=r"refused \(2\).*measured step time of a cycle with ours"):
        worth(made, [method(planner())], MODEL, None)


def test_tail_at_every_draft_length():
    """p99 of a K of 1 uses a fifth of what the slowest request keeps of five drafted tokens: by hand 1 + 1.0 / 5."""
    made = planner(pools="apart")
    ours = method(made, requests=1200, slowest=2.0)
    for K, kept in ((1, 1.2), (5, 2.0)):
        point = made.point(ours, 8, K)
        assert point.ms_p99 == pytest.approx(point.gap_ms / kept)


def test_pools_apart_pay_for_their_prompts():
    """A token costs 1 / rate and its part of the prompt, twice the model's where the fitted factor is 2: on both sides,
    in dollars, share and the pool's GPUs."""
    made = planner(pools="apart", price_per_gpu_hour=3.0, demand_tok_s=1e5, slo_ms=30.0)
    fit = made.calibration.fit
    logs = np.array(replace(fit.constants, rest=2.0).logs())
    made = replace(made, calibration=replace(made.calibration, fit=Fit(logs, fit.covariance, "engine", 5)))
    part = 2.0 * prompt_seconds(made.place, made.constants, 512) / 256
    plan = worth(made, [method(made)], MODEL, None)
    money, plain, ours = plan["money"]["ours"], plan["best"]["none"], plan["best"]["ours"]
    costs = [1 / p["tok_s"] + part for p in (plain, ours)]
    assert list(money["full_load"].values()) == pytest.approx([3.0 * cost / 0.0036 for cost in costs])
    assert money["saving"]["share"] == pytest.approx(1 - costs[1] / costs[0])
    assert money["saving"]["share"] < 1 - plain["tok_s"] / ours["tok_s"]
    low, high = money["saving"]["interval"]
    assert low < money["saving"]["share"] < high
    pool = money["at_demand"]["plain"]["prefill_gpus"]
    assert (pool - 1) * 0.7 < 1e5 * part <= pool * 0.7


def test_days_to_pay_back_need_both_prices_or_none():
    """48 GPU hours at $4 against serving at $2: 2 times 48 hours. A training price alone has nothing beside it:
    GPU hours for GPU hours, and the plan says so."""
    days = {}
    for name, prices in (("both", (2.0, 4.0)), ("none", (0.0, 0.0)), ("training", (0.0, 4.0))):
        made = planner(demand_tok_s=30000.0, slo_ms=30.0, price_per_gpu_hour=prices[0],
                       training_price_per_gpu_hour=prices[1])
        plan = worth(made, [method(made)], MODEL, {"ours": (48.0, "as given")})
        days[name] = plan["money"]["ours"]["payback_days"] * 24 * plan["money"]["ours"]["gpus_saved"]
        assert any("counted in GPU hours" in n for n in plan["notes"]) == (name == "training")
    assert days == pytest.approx({"both": 96, "none": 48, "training": 48})


@pytest.mark.parametrize("argv, said", [
    (["--slo", "-5"], "slo = -5"), (["--price", "-3"], "price = -3"), (["--demand", "-5"], "demand = -5"),
    (["--price", ".nan"], "price"), (["--roi.price_per_gpu_hour", "-1"], "roi.price_per_gpu_hour = -1"),
    (["--roi.days", ".inf"], "roi.days = inf: must be a finite number")])
def test_flags_that_are_no_figures(world, capsys, argv, said):
    """The short flags and the fields alike."""
    assert planned(world, *argv) == 2
    assert said in capsys.readouterr().err


def test_a_short_flag_of_zero_is_meant(world):
    """--slo 0 takes the recipe's limit away, --demand 0 its demand."""
    assert planned(world, "--slo", "0", "--demand", "0") == 0
    plan = found(world)
    assert plan["traffic"]["slo_ms"] == 0 and plan["sides"]["none"]["at_demand"] is None


def test_plain_keeps_its_figures_where_no_drafter_keeps_the_slo():
    """The table's row of plain decoding has dollars and GPUs although there is no drafter beside it."""
    fastest = min(p.ms for p in planner().points(PLAIN))
    made = planner(price_per_gpu_hour=2.0, demand_tok_s=1e4, slo_ms=1.02 * fastest)
    weak = method(made, per_position=[0.01])
    plan = worth(made, [weak], MODEL, None)
    assert list(plan["best"]) == ["none"] and not plan["money"]
    (row,) = roi_page.table_rows(plan)
    assert row["full_load"] == pytest.approx(2.0 / (plan["best"]["none"]["tok_s"] * 0.0036))
    assert row["demand"]["gpus"] == -(-1e4 // (0.7 * plan["best"]["none"]["tok_s"]))


def test_the_worked_example_of_the_docs():
    """Its steps, its recipe and its acceptance give the rows of its table."""
    text = (Path(__file__).parents[1] / "docs" / "roi.md").read_text()
    made = parse_into(Steps, json.loads(re.search(r"```json\n(.*?)```", text, re.S)[1]), "docs")
    section = Roi(model="llama-3-70b", tensor_parallel=4, slo_ms=25.0, price_per_gpu_hour=3.0, demand_tok_s=2e4)
    plan = Planner(section, calibrate(made), made.place(), 141e9)
    ours = Method("EAGLE-3", made.draft(), Acceptance(per_position=RATES))
    for way, said in ((PLAIN, "no drafter | {batch} | |"), (ours, "EAGLE-3 | {batch} | {K} | {kept:.2f}")):
        best = plan.best(plan.points(way))
        row = (f"| {said.format(**asdict(best))} | {best.tok_s:,.0f} | {best.ms:.1f} | {best.memory / 1e9:.1f} | "
               f"{plan.dollars_at_full_load(best):.3f} | {plan.gpus(best, 2e4)} |")
        assert row in text


def load(**changes) -> Workload:
    return Workload(**{"name": "jobs", "demand_tok_s": 1e5, "report": "x"} | changes)


def test_a_fleets_own_batch():
    """A batch that is none of the usual ones is planned; the plain side is at its best all the same (9); beyond twice
    the largest measured step it is refused (5), and with steps of one batch no saving is said (9)."""
    made = planner()
    ours = method(made)
    row = one(made, load(batch=10), ours, MODEL)
    top = max((made.point(ours, 10, K) for K in ours.lengths()), key=lambda p: p.tok_s)
    assert row["speculative"] == made.gpus(top, 1e5) and row["K"] == top.K
    assert row["plain"] == made.gpus(made.best(made.points(PLAIN)), 1e5)
    with pytest.raises(Refusal, match=r"refused \(5\): a step of 800 verified tokens"):  # of K 1; 2 * 64 * 6 is 768
        fleet(made, [(load(batch=400), ours)], MODEL)
    alone = planner((8, 0), (8, 2), (8, 5))
    with pytest.raises(Refusal, match=r"refused \(9\)"):
        one(alone, load(batch=8), method(alone), MODEL)


@pytest.mark.parametrize("target, bits", [
    ({"model": "deepseek-v3"}, 8), ({"model": MODEL}, 16), ({"model": MODEL, "weight_bits": 4.25}, 4.25),
    ({"model": "here", "config": QUANTISED}, 8 + 32 / 128**2), ({"config": {"model_type": "llama"}}, 16)])
def test_bits_are_the_targets_own(target, bits):
    """As said, else of its checkpoint, else of the named shape."""
    assert bits_in(target) == bits


@pytest.mark.parametrize("change, said", [
    ({"target": {"model": MODEL, "bits": 8}}, "target: unknown key bits"),
    ({"drafter": {"kin": "x"}}, "did you mean kind"),
    ({"drafter": {"kind": "eagle3", "size": {"hidden": 3}}}, "drafter.size"),
    ({"hardware": {"memory_gb": 80, "tflops": {"bfloat16": 900}}}, "steps: hardware: bandwidth_tb_s is missing"),
    ({"hardware": {"name": "H300"}}, "hw = H300: unknown"), ({"points": [{"K": -1}]}, "points.0.K = -1"),
    ({"points": [{"rows": 8, "ms": float("nan")}]}, "ms"),
    ({"points": [{"rows": 8, "kept": 2.0}]}, "points[0]: kept = 2"),
    ({"points": [{"rows": 8, "K": 2, "kept": 0.5}]}, "kept"), ({"points": [{"what": "target"}]}, "width is missing"),
    ({"points": [{"what": "draft"}]}, "K is missing")])
def test_steps_that_no_run_gives(tmp_path, change, said):
    """An unknown key, hardware without its peak, a time or an acceptance length that cannot be."""
    (tmp_path / "steps.json").write_text(json.dumps(asdict(steps(*GRID)) | change))
    with pytest.raises(ConfigError) as error:
        read_steps(tmp_path / "steps.json")
    assert said in str(error.value)


def test_hardware_by_any_spelling(world):
    """The steps' GPU, spelt otherwise, is no other GPU; a recipe's own entry is found, another GPU refused (3)."""
    own = {"plan": {"custom": {"mine": asdict(gpu_of({"name": "H100"}))}}}
    (world / "r.yaml").write_text(yaml.safe_dump(yaml.safe_load((world / "r.yaml").read_text()) | own))
    calibration = read_calibration(world / "runs" / "w" / "roi" / "calibration.json")

    def place(name: str):
        return serving(load_recipe(world / "r.yaml", {"roi.hardware": name}), calibration)[0].place

    assert place("H100 SXM") == place("NVIDIA H100 80GB HBM3") == place("mine") == place("")
    with pytest.raises(Refusal, match=r"refused \(3\)"):
        place("H200")
    with pytest.raises(ConfigError, match="roi.hardware = H300: unknown"):
        place("H300")


def test_a_calibration_that_was_cut_off(world, capsys):
    path = world / "runs" / "w" / "roi" / "calibration.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in whole.items() if k != "logs"}))
    assert planned(world) == 2 and "logs is missing" in capsys.readouterr().err


def test_a_fleet_of_one_refused_workload(world, capsys):
    """The command says the same as the functions."""
    (world / "fleet.yaml").write_text(yaml.safe_dump([{"name": "jobs", "demand_tok_s": 1e5, "batch": 500,
                                                       "report": str(world / "ours.json")}]))
    assert call(roi.COMMAND, world / "r.yaml", "plan", "--fleet", str(world / "fleet.yaml")) == 2
    assert "refused (5)" in capsys.readouterr().err
