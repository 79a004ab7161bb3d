"""Each branch of the verdict, from reports written by hand."""

import pytest

from eval.verdict import cliff, decide, decide_server, kinds, lossless_fault


def total(mismatches: int = 0, near_ties: int = 0, p_value: float = 0.5, tests: int = 4, ci95: tuple = (1.3, 1.9),
          speedup: float = 1.6, by_batch: tuple = ((1, 1.6), (4, 1.3), (8, 1.1)), per_pass: float = 3.0) -> dict:
    return {
        "tokens_per_target_pass": per_pass, "acceptance": {"mean_length": per_pass},
        "lossless": {"greedy": {"mismatches": mismatches, "near_ties": near_ties, "prompts": 200},
                     "sampling": {"tests": tests, "p_value": p_value}},
        "speed": {"speedup": speedup, "ci95": list(ci95), "prompts": 9, "baseline_engine": "plain loop",
                  "by_batch": [{"batch": b, "speedup": s} for b, s in by_batch]},
    }


EVEN = {"chat": {"tokens_per_target_pass": 2.8}, "code": {"tokens_per_target_pass": 3.2}}


def reasons(result: dict) -> str:
    return "; ".join(result["reasons"])


def test_deploy():
    """Faster at every measured batch, lossless, even over kinds: deploy, with the figures as the reason."""
    result = decide(total(), EVEN)
    assert (result["decision"], result["range"]) == ("deploy", None)
    assert "1.60 (95 % interval 1.30 to 1.90, 9 prompts)" in reasons(result)


def test_changed_text_is_never_deployed():
    """One greedy answer that differs outweighs any speed; so do samples that do not follow the target."""
    result = decide(total(mismatches=1), EVEN)
    assert result["decision"] == "do not deploy" and "1 of 200 greedy answers differ" in reasons(result)
    result = decide(total(p_value=1e-4), EVEN)
    assert result["decision"] == "do not deploy" and "distribution" in reasons(result)
    assert decide(total(p_value=0.002), EVEN)["decision"] == "deploy"
    assert decide(total(p_value=1e-4, tests=0), EVEN)["decision"] == "deploy"  # nothing was tested


@pytest.mark.parametrize("near_ties, prompts, fault", [
    (0, 24, ""), (1, 24, "1 near-tie in 24 greedy answers, more than 1 %"), (2, 200, ""),
    (3, 200, "3 near-ties in 200 greedy answers, more than 1 %"), (1, 100, ""), (0, 0, "")])
def test_one_per_cent_of_near_ties(near_ties, prompts, fault):
    """DESIGN, lossless: more than one per cent of the prompts fails, of few prompts too; the verdict says the same."""
    whole = total(near_ties=near_ties)
    whole["lossless"]["greedy"]["prompts"] = prompts
    assert lossless_fault(whole) == fault
    assert (decide(whole, EVEN)["decision"] == "do not deploy") == bool(fault)


def test_every_fault_is_named():
    both = lossless_fault(total(mismatches=2, p_value=1e-9))
    assert both == ("2 of 200 greedy answers differ from plain decoding; sampled tokens do not follow the target's "
                    "distribution (p = 1e-09)")


@pytest.mark.parametrize("ci95", [(0.8, 1.9), (1.0, 1.9), (0.5, 0.7)])
def test_speed_that_is_not_shown(ci95):
    """Case 23: an interval that reaches 1 is no proof, however long the acceptance and however fast the mean."""
    result = decide(total(ci95=ci95, per_pass=6.0), EVEN)
    assert result["decision"] == "do not deploy" and "not shown to be faster than plain loop" in reasons(result)


def test_slower_batches_limit_the_range():
    """Case 23: one slower batch size limits the range to what lies below it, even where a larger one wins again."""
    result = decide(total(by_batch=((1, 1.6), (4, 1.3), (8, 0.97), (16, 1.2))), EVEN)
    assert (result["decision"], result["range"]) == ("deploy within batch 1 to 4", "batch 1 to 4")
    assert "slower than plain decoding at batch 8" in reasons(result)
    result = decide(total(by_batch=((4, 0.9), (1, 1.6))), EVEN)
    assert (result["decision"], result["range"]) == ("deploy within batch 1", "batch 1")


def test_what_was_not_measured_is_not_promised():
    """Case 23: with batch 1 alone the range is batch 1."""
    result = decide(total(by_batch=((1, 1.6),)), EVEN)
    assert result["decision"] == "deploy within batch 1" and "not measured" in reasons(result)


def test_slow_at_batch_one_too():
    """Case 23: slower at batch 1 leaves no range at all, whatever the interval says."""
    assert decide(total(by_batch=((1, 0.9), (4, 1.5))), EVEN)["decision"] == "do not deploy"


def test_a_batch_of_repeated_prompts_is_named():
    """Case 23: what filled batch 16 is said, since rows of one prompt are no traffic."""
    whole = total(by_batch=((1, 1.6), (4, 1.3), (16, 1.1)))
    for row in whole["speed"]["by_batch"]:
        row["prompts"] = 9
    result = decide(whole, EVEN)
    assert result["decision"] == "deploy" and "batch 16 was timed with 9 prompts repeated" in reasons(result)
    assert "repeated" not in reasons(decide(total(), EVEN))


def test_weak_kinds_are_named():
    """A kind that is clearly below the whole is named, although the mean is fine."""
    result = decide(total(), EVEN | {"maths": {"tokens_per_target_pass": 2.5}})
    assert "clearly weaker on maths" in reasons(result)
    assert "weaker" not in reasons(decide(total(), EVEN | {"maths": {"tokens_per_target_pass": 2.56}}))


def test_kinds_are_categories_or_sets():
    """A set of several categories counts by them, named by the set where there are others."""
    block = {"tokens_per_target_pass": 3.0}
    several = block | {"categories": {"x": block, "y": block}}
    assert list(kinds({"a": several})) == ["x", "y"]
    assert list(kinds({"a": several, "b": block | {"categories": {"all": block}}})) == ["a: x", "a: y", "b"]
    result = decide(total(), {"a": several | {"categories": {"x": block, "y": {"tokens_per_target_pass": 1.0}}}})
    assert "clearly weaker on y" in reasons(result)


def bucket(start: int, drafts: int, mean_length: float) -> dict:
    return {"from": start, "to": 4 * start, "drafts": drafts, "mean_length": mean_length}


def test_a_cliff_in_the_context_limits_the_range():
    """Case 33: acceptance that breaks down beyond 2,048 tokens is named, and longer contexts are not deployed."""
    buckets = [bucket(0, 100, 2.4), bucket(512, 100, 2.2), bucket(2048, 40, 1.2)]
    assert cliff(buckets) == (2048, pytest.approx(2.3), 1.2)
    whole = total()
    whole["acceptance"]["by_context_bucket"] = buckets
    result = decide(whole, EVEN)
    assert result["range"] == "batch 1 to 8 and contexts below 2,048 tokens"
    assert "falls from 2.30 to 1.20 beyond 2,048 tokens of context" in reasons(result)


@pytest.mark.parametrize("buckets", [
    [bucket(0, 100, 2.4), bucket(512, 100, 1.8)],  # a slope
    [bucket(0, 100, 2.4), bucket(512, 29, 1.0)],  # too few drafts
    [bucket(0, 100, 1.4), bucket(512, 100, 2.4)], [bucket(0, 100, 2.4)], []])
def test_no_cliff(buckets):
    assert cliff(buckets) is None


def test_untemplated_prompts_are_no_release():
    """Case 53: whatever the speed."""
    result = decide(total(), EVEN | {"raw": {"tokens_per_target_pass": 3.0, "untemplated": 2}})
    assert result["decision"] == "do not deploy" and "2 prompts are token ids" in reasons(result)


def served(*speedups: float, **server) -> tuple[dict, dict, dict]:
    """A server measured at concurrency 1, 4, 16, ...: speedups with intervals of 0.1 to each side."""
    levels = {str(4**i): {"concurrency": 4**i, "speedup": s, "ci95": [s - 0.1, s + 0.1], "prompts": 20, "foreign": []}
              for i, s in enumerate(speedups)}
    total = {"lossless": {"greedy": {"mismatches": 0, "prompts": 20, "tie_gap": 1e-4}},
             "acceptance": {"mean_length": 2.0}}
    kind = {"acceptance": {"mean_length": 1.6}, "categories": {}}
    return total, {"maths": kind}, {"levels": levels, "baseline": {"from": "server", "reason": None}, "drafting": True,
                                    "restless": False, "counters": None, "greedy": {"gap_unknown": 0}, **server}


@pytest.mark.parametrize("speedups, decision", [
    ((1.5, 1.3, 1.2), "deploy"), ((1.5, 1.3, 1.05), "deploy within concurrency 1 to 4"),
    ((1.5, 0.9, 1.4), "deploy within concurrency 1"), ((1.5,), "deploy within concurrency 1"),
    ((1.05, 1.5), "do not deploy")])
def test_a_server_is_judged_at_every_concurrency(speedups, decision):
    """Case 23: the first concurrency whose whole interval is not above 1 ends the range, whatever comes behind it."""
    found = decide_server(*served(*speedups))
    assert found["decision"] == decision and found["range"] == (decision.removeprefix("deploy within ") if "within"
                                                                in decision else None)
    assert len([r for r in found["reasons"] if r.startswith("measured speedup")]) == len(speedups)
    assert ("clearly weaker on maths" in found["reasons"]) is (decision != "do not deploy")


@pytest.mark.parametrize("change, reason", [
    ({"baseline": {"from": None, "reason": "no baseline"}}, "no baseline"), ({"drafting": False}, "without a drafter"),
    ({"restless": True}, "other clients"), ({"levels": {}}, "fewer than 5 conversations")])
def test_what_decides_nothing_of_a_server(change, reason):
    found = decide_server(*served(1.5, 1.4, **change))
    assert found["decision"] == "do not deploy" and reason in found["reasons"][0]
