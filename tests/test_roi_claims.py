"""`make roi ARGS="check CLAIM"`: physical bounds, consistency and refusals beyond the article's twelve claims."""

import pytest
from tiny import call

from eval import roi, roi_check
from eval.roi_claim import Claim, claims_of
from recipes.errors import ConfigError
from recipes.loader import parse_into

CALLED = {"price_per_gpu_hour": 2.0, "tok_s": 1000, "tok_s_after": 2000}
SCOUT = {"model": "llama-4-scout", "gpu": "H200 SXM", "tensor_parallel": 8, "batch": 8}


def findings(values: dict) -> dict[str, roi_check.Finding]:
    return {f.about: f for f in roi_check.check(parse_into(Claim, values, "test"))}


def verdicts(values: dict) -> dict[str, str]:
    return {about: f.verdict for about, f in findings(values).items()}


def test_products_bound_a_rate_by_hand():
    """Llama-3.1-8B multiplies 6.979e9 weights of its layers and 0.525e9 of its head a token, 15.01e9 operations: an
    H100's 989e12 give 65,890 tokens/s, where reading the weights of 1,024 rows would allow 228,500."""
    bound = findings({"model": "llama-3.1-8b", "gpu": "H100", "batch": 1024, "tok_s": 100_000})["tokens/s, plain"]
    assert bound.verdict == "impossible" and bound.value == pytest.approx(65_890, rel=1e-3)
    assert "products at 989 TFLOP/s" in bound.why
    drafted = findings({"model": "llama-3.1-8b", "gpu": "H100", "batch": 1024, "tok_s_after": 70_000,
                        "draft_length": 5})
    assert drafted["tokens/s, with the drafter"].verdict == "impossible", "kept tokens were multiplied too"
    assert verdicts({"model": "llama-3.1-8b", "gpu": "H100", "tok_s": 1e6}) == {"tokens/s, plain": "impossible"}
    eight = findings({"model": "llama-3.1-8b", "gpu": "A100 80G", "weight_bits": 8, "batch": 4096, "tok_s": 41_000})
    assert eight["tokens/s, plain"].value == pytest.approx(2 * 312e12 / 15.0096e9, rel=1e-3), "int8 is twice as fast"


def test_rows_may_choose_the_same_experts():
    """Llama-4-Scout, per layer 188.83e6 weights of all rows and 125.83e6 an expert, 48 layers, head 1.034e9. One
    expert: 32.28 GB a step, at most 9,518 tokens/s of 8 rows on 8 H200. Eight rows on their own need 6.452 of 16:
    3,130. Between the two nothing can be said without knowing what they choose."""
    found = findings(SCOUT | {"tok_s": 5000})["tokens/s, plain"]
    assert found.verdict == "cannot be said" and found.value == pytest.approx(9518, rel=1e-3)
    assert "on their own allow 3,130" in found.why
    assert verdicts(SCOUT | {"tok_s": 3100}) == {"tokens/s, plain": "possible"}
    assert verdicts(SCOUT | {"tok_s": 9600}) == {"tokens/s, plain": "impossible"}


def test_weights_and_cache_must_fit():
    """405B in bf16 is 811.7 GB: 202.9 on each of four H200 of 141 GiB; in fp8 101.5. 64 rows of 128,000 tokens of
    Llama-3-70B keep 160 KiB of 8-bit keys and values a token: 1.34 TB."""
    four = findings({"model": "llama-3.1-405b", "gpu": "H200", "tensor_parallel": 4, "tok_s": 10, "batch": 1})
    assert four["memory"].verdict == "impossible" and four["memory"].value == pytest.approx(202.9, rel=1e-3)
    assert "refused (11)" in four["memory"].why
    assert "memory" not in findings({"model": "llama-3.1-405b", "gpu": "H200", "tensor_parallel": 4, "weight_bits": 8})
    rows = findings({"model": "llama-3-70b", "gpu": "H200", "tensor_parallel": 8, "batch": 64, "context": 128_000})
    assert rows["memory"].value == pytest.approx((141.1 + 64 * 128_000 * 160 * 1024 / 1e9) / 8, rel=1e-3)


@pytest.mark.parametrize("claim, about, most", [
    ({"tok_s": 1400, "tok_s_after": 4800, "acceptance_length": 2.2}, "tokens/s after over before", 2.2),
    ({"decode_speedup": 4.12, "acceptance_length": 2.22}, "speedup of decoding", 2.22),
    ({"speedup_at_load": 3.0, "alpha": 0.5, "draft_length": 3}, "speedup at the load", 1.875),
    ({"speedup": 5.0, "draft_length": 3}, "speedup", 4.0),
    ({"acceptance_length": 7, "draft_length": 5}, "acceptance length", 6.0)])
def test_no_gain_above_the_acceptance_length(claim, about, most):
    """Whichever way the gain is said; without an acceptance length a draft of K keeps K + 1 at most. By hand: 1 + 0.5 +
    0.25 + 0.125."""
    found = findings(claim)[about]
    assert found.verdict == "impossible" and found.value == pytest.approx(most)


@pytest.mark.parametrize("claim, about, value", [
    ({"speedup": 3.0, "tok_s": 1000, "tok_s_after": 2000}, "speedup of the two rates", 2.0),
    ({"saved_share": 0.5, "dollars_per_million": 2.0, "dollars_per_million_after": 1.5},
     "share saved, by the two costs", 25.0),
    ({"saved_share": 0.5, "tok_s": 1000, "tok_s_after": 2000, "dollars_per_million": 2.0,
      "dollars_per_million_after": 1.5, "best_plain": True}, "share saved, by the two costs", 25.0),
    ({"saved_share": 0.6, "dollars_per_hour": 10, "dollars_per_hour_after": 5}, "share saved, by $ an hour", 50.0),
    ({"saved_share": 0.6, "gpus": 8, "gpus_after": 4}, "share saved, by GPUs", 50.0),
    ({"tok_s": 1000, "tok_s_after": 2000, "dollars_per_million": 3.0, "dollars_per_million_after": 1.0},
     "costs before over after", 2.0),
    ({"gpus": 8, "gpus_after": 8, "price_per_gpu_hour": 2.0, "saved_a_month": 5000}, "$ saved a month", 0.0),
    ({"gpu_hours": 1000, "price_per_gpu_hour": 2.0, "tok_s": 900, "tok_s_after": 900, "saved_a_month": 10},
     "$ saved a month", 0.0),
    ({"gpus": 8, "gpus_after": 4, "price_per_gpu_hour": 2.0, "saved_a_year": 1e6}, "$ saved a year", 4 * 2 * 8760),
    ({"tok_s": 1000, "tok_s_after": 1000, "saved_share": 0.3}, "share saved", 0.0),
    ({"demand_tok_s": 100_000, "tok_s": 1000, "gpus": 99, "headroom": 0.99}, "GPUs before", 102),
    ({"demand_tok_s": 100_000, "tok_s": 1000, "gpus": 101}, "GPUs before", 100)])
def test_figures_that_contradict_each_other(claim, about, value):
    """Each pair that is said twice; a share or a saving of nothing divides nothing; whole counts have no slack."""
    found = findings(claim)[about]
    assert found.verdict == "wrong" and found.value == pytest.approx(value)


def test_equal_figures_that_hold():
    """Nothing saved is nothing saved; the two costs are silent where the rates already say it."""
    nothing = {"gpus": 8, "gpus_after": 8, "price_per_gpu_hour": 2.0, "saved_a_month": 0}
    assert verdicts(nothing)["$ saved a month"] == "holds"
    both = {"saved_share": 0.5, "dollars_per_million": 2.0, "dollars_per_million_after": 1.0}
    assert set(verdicts(CALLED | both | {"best_plain": True})) == {
        "share saved", "$ per million, plain", "$ per million, with the drafter"}


@pytest.mark.parametrize("claim, about, number", [
    ({"batch": 8, "saved_share": 0.5, **CALLED}, "baseline", 9),
    ({"speedup_batch": 8, "saved_share": 0.5}, "baseline", 9),
    ({"batch": 8, "gpus": 8, "gpus_after": 4}, "baseline", 9), ({"slo_ms": 50, "slo_ms_after": 100}, "SLO", 9),
    ({"price_kind": "Spot", "days": 365}, "price", 12), ({"price_kind": "spot", "saved_a_year": 1}, "price", 12),
    ({"price_kind": "Preemptible", "days": 90}, "price", 12),
    ({"gpus": 8, "gpus_after": 4, "headroom": 1}, "headroom", 11),
    ({"demand_tok_s": 1e4, "tok_s": 1400, "tok_s_after": 3100, "gpus_after": 4, "headroom": 1}, "headroom", 11),
    ({"engine": "a", "engine_after": "a", "engine_version": "0.1", "engine_version_after": "0.2"}, "engines", 3),
    ({"flags": "-tp 4", "flags_after": "-tp 8"}, "engines", 3),
    ({"acceptance_temperature": 0, "traffic_temperature": 1}, "temperature", 1),
    ({"acceptance_context": 1024, "traffic_context": 8192}, "context", 1),
    ({"acceptance_context": [0, 2048], "traffic_context": [100, 3000]}, "context", 1),
    ({"acceptance_target": "llama-3-8b", "traffic_target": "mine"}, "target", 1),
    ({"acceptance_target": "llama-3-8b", "model": "llama-3-70b"}, "target", 1),
    ({"acceptance_bits": 16, "weight_bits": 8}, "weight bits", 1),
    ({"acceptance_bits": 16, "model": "kimi-k2"}, "weight bits", 1), ({"step_times": 0}, "step times", 2),
    ({"measured_tokens": 64, "batch": 32, "draft_length": 4}, "verified tokens", 5),
    ({"acceptance_mode": "Synthetic"}, "acceptance", 6), ({"acceptance_prompts": "random"}, "acceptance", 6),
    ({"p99_ms": 40, "requests": 999}, "p99", 7), ({"p99_ms": 40}, "p99", 7),
    ({"p99_ms": 40, "requests": 5000, "by_request": False}, "p99", 7)])
def test_every_refusal_can_be_met(claim, about, number):
    """Each of the rules, from what a claim can say of itself."""
    found = findings(claim)[about]
    assert found.verdict == "cannot be said" and found.number == number and f"refused ({number})" in found.why


@pytest.mark.parametrize("claim", [
    {"engine": "vllm"}, {"engine_after": "sglang"}, {"acceptance_context": [0, 4096], "traffic_context": [100, 3000]},
    {"acceptance_temperature": 1, "traffic_temperature": 1}, {"measured_tokens": 80, "batch": 32, "draft_length": 4},
    {"p99_ms": 40, "requests": 1000}, {"step_times": 3}, {"acceptance_mode": "measured"}, {"acceptance_domain": "chat"},
    {"price_kind": "spot", "days": 365, "spot_held": True}, {"price_kind": "reserved", "days": 365},
    {"acceptance_target": "Kimi-K2", "traffic_target": "Kimi-K2"}, {"acceptance_bits": 8, "model": "kimi-k2"}])
def test_what_may_be_said_is_not_refused(claim):
    """The same with fair grounds, or with one side of a comparison alone."""
    assert verdicts(claim) == {"the claim": "cannot be said"}


def test_a_gain_at_another_batch():
    """40 GPUs * 2.2 are 88 at batch 8; at batch 64, whose gain nobody says, that cannot be said."""
    match = {"gpus_after": 40, "gpus_matched": 88, "speedup": 2.2, "speedup_batch": 8}
    assert verdicts(match | {"batch": 64}) == {"GPUs matched": "holds",
                                               "GPUs matched at the load served": "cannot be said"}
    assert verdicts(match | {"batch": 8}) == verdicts(match) == {"GPUs matched": "holds"}


def test_parts_of_a_replica():
    """7.5 GPUs are no count; 12 are no replicas of 8."""
    half = findings({"gpus_after": 7.5})["GPUs after"]
    assert (half.verdict, half.value, half.claimed, half.number) == ("impossible", 8, "7.5", 8)
    twelve = findings({"gpus": 12, "tensor_parallel": 8})["GPUs before"]
    assert twelve.value == 16 and "1.50 replicas of 8 GPUs" in twelve.why


@pytest.mark.parametrize("claim, verdict, gigabytes", [
    ({"draft": "n-gram"}, "holds", 0.0), ({"draft": "none"}, "holds", 0.0),
    ({"draft": "EAGLE-3"}, "wrong", 2 * 1.4030), ({"draft": "Llama-3.2-1B"}, "wrong", 2 * 1.2358),
    ({"draft": "medusa", "draft_length": 2}, "wrong", 2 * 2 * 8192 * (8192 + 128256) / 1e9)])
def test_what_a_drafter_takes(claim, verdict, gigabytes):
    """'No VRAM': true of lookup alone."""
    found = findings({"model": "llama-3-70b", "drafter_gb": 0} | claim)["memory of the drafter"]
    assert found.verdict == verdict and found.value == pytest.approx(gigabytes, rel=2e-3)


@pytest.mark.parametrize("words, said", [
    (["tok_s=.nan"], "tok_s"), (["demand_tok_s=.inf"], "demand_tok_s"), (["tok_s=nan"], "tok_s"),
    (["headroom=0"], "headroom"), (["batch=8", "batch=9"], "batch: given twice"),
    (["acceptance_length=0.8"], "accept")])
def test_figures_that_are_none(words, said):
    """NaN and infinity pass no check, in YAML's spelling or Python's."""
    with pytest.raises(ConfigError, match=f"command line: {said}"):
        claims_of(words)


def test_an_unknown_name_hides_nothing():
    """The figures that do not need it are judged; it is named once."""
    found = findings(CALLED | {"dollars_per_million": 9.0, "model": "gpt-5", "gpu": "H100", "batch": 8})
    assert found["$ per million, plain"].verdict == "wrong"
    assert "model = gpt-5: unknown" in found["a name"].why and list(found) == ["$ per million, plain", "a name"]


def test_names_and_empty_files(tmp_path):
    """A name is what it is, whatever signs are in it; a file without a claim is an error."""
    assert claims_of(["name=a: b: c", "tok_s=5"])[0].name == "a: b: c" and claims_of(["engine=[", "tok_s=5"])
    for text in ("[]", "", "{}", "3"):
        (tmp_path / "claim.yaml").write_text(text)
        with pytest.raises(ConfigError, match="claim.yaml: holds no claim"):
            claims_of([str(tmp_path / "claim.yaml")])
    (tmp_path / "claim.yaml").write_text("[3]")
    with pytest.raises(ConfigError, match="claim 0: .* must be a mapping"):
        claims_of([str(tmp_path / "claim.yaml")])


@pytest.mark.parametrize("words, code, said", [
    (["acceptance_mode=synthetic"], 2, "1 of the claims rest on what is refused or unknown"),
    (["tok_s=1000", "tok_s_after=2000", "saved_share=0.9"], 1, "1 of the claims do not hold"),
    (["saved_share=0.9", "tok_s=1000", "tok_s_after=2000", "batch=8"], 1, "do not hold; 1 of the claims rest on"),
    (["speedup=2"], 0, ""), (["model=gpt-5", "gpu=H100", "tok_s=5"], 2, "rest on what is refused or unknown")])
def test_exit_codes_of_check(tmp_path, capsys, words, code, said):
    """1 where a figure is wrong, 2 where a claim must be refused, 0 where nothing is known against it."""
    (tmp_path / "r.yaml").write_text("name: w\n")
    assert call(roi.COMMAND, tmp_path / "r.yaml", "check", *words) == code
    assert said in capsys.readouterr().err
