"""Odd points of `make roi ARGS="validate FILE"`: each is judged, or missed with its reason, and none ends the file."""

import json
from pathlib import Path

import pytest

from eval import roi_calibrate
from eval.roi_points import read_point
from eval.roi_validate import judge, lines, validate
from recipes.errors import ConfigError
from recipes.speculation import Constants

DATA = Path(__file__).parent / "roi"
POINTS = {p["id"][:2]: p for p in json.loads((DATA / "fixtures.json").read_text())}
VLLM, PLAIN, BY_SPEEDUP = POINTS["08"], POINTS["09"], POINTS["13"]
STEP = VLLM["calibrate"][1]


def without(point: dict, *names: str) -> dict:
    return {k: v for k, v in point.items() if k not in names}


@pytest.mark.parametrize("point, why", [
    (without(VLLM, "hw"), "hw is missing"), (VLLM | {"hw": None}, "hw is missing"), (VLLM | {"hw": 3}, "hw = 3"),
    (without(VLLM, "K"), "K is missing"), (VLLM | {"K": -1}, "K = -1: must be at least 0"),
    (VLLM | {"K": 2.5}, "K = 2.5: must be a whole number"), (VLLM | {"K": "4"}, "K = '4': must be a finite number"),
    (VLLM | {"K": 0}, "K = 0: a speedup needs a draft"), (without(VLLM, "AL"), "AL is missing"),
    (VLLM | {"AL": 9}, "AL = 9: must be at least 1, at most 5"), (VLLM | {"AL": 0.8}, "AL = 0.8"),
    (VLLM | {"AL": float("nan")}, "AL = nan"), (VLLM | {"B": 0}, "B = 0: must be above 0"),
    (without(VLLM, "B"), "B is"),
    (VLLM | {"B": True}, "B = True"), (VLLM | {"tp": 0}, "tp = 0: must be at least 1"),
    (VLLM | {"ctx": -5}, "ctx = -5"),
    (VLLM | {"kind": "latency"}, "kind = latency: unknown"), (without(VLLM, "kind"), "kind is missing"),
    (VLLM | {"draft": "hydra"}, "draft = hydra: no kind of drafter"), (VLLM | {"calibrate": 3}, "calibrate must be"),
    (VLLM | {"calibrate": [7]}, "calibrate[0]: 7: must be a step"),
    *((VLLM | {"calibrate": [STEP | {"ms": ms}]}, f"calibrate[0]: ms = {ms}") for ms in (0, -1, float("nan"))),
    (VLLM | {"calibrate": [without(STEP, "ms")]}, "calibrate[0]: ms is missing"),
    (VLLM | {"calibrate": [STEP | {"B": 0}]}, "calibrate[0]: B = 0"),
    (VLLM | {"calibrate": [STEP | {"AL": 3.5}]}, "calibrate[0]: AL = 3.5: must be at least 1, at most 3"),
    (VLLM | {"calibrate": [STEP | {"hw": "H300"}]}, "calibrate[0]: hw = H300: unknown"),
    (BY_SPEEDUP | {"calibrate_S": {"two": 1.8}}, "calibrate_S: 'two' is no batch"),
    (BY_SPEEDUP | {"calibrate_S": {"2": 0}}, "2 = 0: must be above 0"),
    (BY_SPEEDUP | {"anchor_tok_s": -1}, "anchor_tok_s = -1"), (PLAIN | {"model": "gpt-5"}, "model = gpt-5: unknown")])
def test_an_odd_point_is_missed_with_its_reason(tmp_path, point, why):
    """Nothing is predicted from it, the next point is judged all the same, and the count comes last."""
    (tmp_path / "points.json").write_text(json.dumps([point | {"id": "odd"}, PLAIN]))
    odd, fine = validate(tmp_path / "points.json")
    assert odd.name == "odd" and not odd.within and why in odd.unjudged and "\n" not in odd.unjudged
    assert fine.within and lines([odd, fine])[-1] == "1 of 2 within tolerance"


@pytest.mark.parametrize("change, why", [
    ({"id": None}, "id is missing"), ({"expected": None}, "expected is missing"), ({"expected": 0}, "expected = 0"),
    ({"expected": float("inf")}, "expected = inf"),
    ({"tol_rel": None}, "tol_rel is missing"), ({"tol_rel": 0}, "tol_rel")])
def test_what_cannot_be_counted_ends_the_file(tmp_path, change, why):
    """No name, no measured figure, no tolerance: an error that names the place."""
    (tmp_path / "points.json").write_text(json.dumps([PLAIN, PLAIN | change]))
    with pytest.raises(ConfigError, match=f"points.json: point 1: {why}"):
        validate(tmp_path / "points.json")
    with pytest.raises(ConfigError, match="x: must be a mapping"):
        judge([], {}, "x")


def test_null_is_as_if_left_out():
    """tp, calibrate, draft, topk and nver of null are their defaults."""
    nothing = dict.fromkeys(("tp", "calibrate", "calibrate_S", "anchor_tok_s", "draft", "topk", "nver", "bits", "ctx"))
    bare = without(VLLM, *nothing)
    assert read_point(bare | nothing, {}) == read_point(bare, {}) and not read_point(bare, {}).observations


def test_a_plain_rate_is_plain():
    """kind abs_AR: no drafter is looked up, and K and AL that stand beside it change nothing."""
    odd = PLAIN | {"K": 5, "AL": 3.0, "draft": "hydra", "topk": 4, "nver": 8}
    assert judge(odd, {}, "").predicted == judge(without(PLAIN, "K", "AL"), {}, "").predicted
    assert read_point(without(PLAIN, "K", "AL"), {}).step.K == 0


def test_a_calibration_step_may_be_of_another_machine():
    """A step's own hardware, model, drafter and parallelism are its own; what it leaves open is its point's, but the
    bits of another model are that model's."""
    steps = [{"B": 1, "K": 0, "ms": 5.0, "hw": "H200", "tp": 2}, {"K": 2, "ms": 9.0, "model": "deepseek-v3", "AL": 2.0,
                                                                  "draft": "mtp"}]
    point = read_point(VLLM | {"calibrate": steps, "bits": 16}, {})
    first, second = point.observations
    assert first.place.bandwidth == 4.8e12 and first.place.keep.ranks == 2 and point.place.bandwidth == 3.35e12
    assert second.step.rows == 1 and second.step.context == 300 and second.draft.kind == "mtp"
    assert second.place.keep.weight_bits == 8 and first.place.keep.weight_bits == 16


def test_steps_without_an_acceptance_length_carry_no_prefill():
    """Of the point's own draft its length is the point's; of another it is a cycle's own time."""
    same, other = read_point(VLLM | {"calibrate": [{"K": 4, "ms": 12.0}, {"K": 6, "ms": 14.0}]}, {}).observations
    assert same.step.kept == VLLM["AL"] and same.step.prompt == 0.75 * 300
    assert (other.step.kept, other.step.prompt, other.step.answer) == (1.0, 0.0, 0.0)


def test_points_of_more_targets():
    """Ten further points of SpecForge's file, other targets and spellings, trees: at least eight within tolerance."""
    judged = validate(DATA / "more_points.json")
    assert len(judged) == 10 and not any(j.unjudged for j in judged)
    assert sum(j.within for j in judged) >= 8, "\n".join(lines(judged))


def test_the_prior_of_the_bandwidth_is_from_other_figures():
    """Bytes of a pass at batch 1 over its time without 15 us a layer and the peak, 16-bit weights on one GPU, as the
    READMEs of gpt-fast (258ae2e) and torchao (03d01ad) publish them; no figure of a fixture is among them."""
    shares = []
    for weights, tok_s, peak in ((6.607e9, 104.9, 2.039e12), (7.505e9, 93.89, 2.039e12), (6.607e9, 76.33, 1.638e12),
                                 (6.607e9, 107.38, 2.039e12), (7.505e9, 95.64, 2.039e12)):  # 7B, 8B, half an MI250X
        shares.append(2 * weights / (1 / tok_s - 32 * 15e-6) / peak)
    mean = 1.0
    for share in shares:
        mean *= share ** (1 / len(shares))
    assert mean == pytest.approx(0.709, abs=0.001) and Constants().moved == pytest.approx(mean, rel=0.02)
    why = roi_calibrate.PRIORS["engine"].why
    assert "74 %" not in why and "TensorRT" not in why
