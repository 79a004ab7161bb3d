"""The twelve things that the planner refuses to say, one test each, and the gates of the specification."""

import json
from pathlib import Path

import pytest

from eval import roi_refuse as refuse
from eval.roi_refuse import Conditions, Refusal
from recipes.named_shapes import named, short_shape

GATES = {g["id"]: g for g in json.loads((Path(__file__).parent / "roi" / "gates.json").read_text())["must_refuse"]}
MEASURED = Conditions("chat", 0.0, (100, 2000), "llama", 16.0)


def refused(number: int, rule, *args, **named) -> str:
    """Why the rule refuses; it must be the one of this number, and exit 2."""
    with pytest.raises(Refusal) as found:
        rule(*args, **named)
    assert found.value.number == number and found.value.exit_code == 2
    return str(found.value)


@pytest.mark.parametrize("other, named_by", [
    (Conditions("code", 0.0, (100, 2000), "llama", 16.0), "domain 'chat'"),
    (Conditions("chat", 1.0, (100, 2000), "llama", 16.0), "temperature 0.0"),
    (Conditions("chat", 0.0, (100, 8000), "llama", 16.0), "contexts of 100 to 2,000"),
    (Conditions("chat", 0.0, (10, 2000), "llama", 16.0), "contexts of 100 to 2,000"),
    (Conditions("chat", 0.0, (100, 2000), "llama tuned", 16.0), "target 'llama'"),
    (Conditions("chat", 0.0, (100, 2000), "llama", 8.0), "weight_bits 16.0 bits")])
def test_1_acceptance_moved(other, named_by):
    """Another domain, temperature, context, fine-tuned or quantised target (gate R5); the same ones pass."""
    assert named_by in refused(1, refuse.moved_acceptance, MEASURED, other)
    refuse.moved_acceptance(MEASURED, Conditions("chat", 0.0, (200, 1900), "llama", 16.0))
    gate = GATES["R5"]
    refused(1, refuse.moved_acceptance, Conditions(gate["AL_domain"]), Conditions(gate["traffic_domain"]))


def test_2_dollars_without_a_step_time():
    """Gate R6; one step time passes."""
    refused(2, refuse.unmeasured_steps, GATES["R6"]["n_step_times"])
    refuse.unmeasured_steps(1)


def test_3_speedup_across_engines():
    """Gate R3, another version, another flag; the same run passes."""
    gate = GATES["R3"]
    refused(3, refuse.other_engine, {"engine": gate["baseline_engine"]}, {"engine": gate["spec_engine"]})
    own = {"engine": "vllm", "version": "0.11", "flags": "-tp 4"}
    for change in ({"version": "0.12"}, {"flags": ""}):
        refused(3, refuse.other_engine, own, own | change)
    refuse.other_engine(own, dict(own))


def test_4_above_the_bounds():
    """Gates R1 and R2; what reaches a bound passes."""
    refused(4, refuse.beyond_bounds, speedup=GATES["R1"]["S_measured"], kept=GATES["R1"]["AL"])
    refused(4, refuse.beyond_bounds, tok_s=GATES["R2"]["tps_claim"], bound=GATES["R2"]["tps_roofline"])
    refuse.beyond_bounds(2.22, 2.22, 553, 553)


def test_5_beyond_what_was_measured():
    """More than twice the largest measured step's tokens."""
    refused(5, refuse.beyond_measured, 65, 32)
    refuse.beyond_measured(64, 32)


def test_6_synthetic_acceptance():
    """Gate R4, and acceptance of random or untemplated prompts (case 53)."""
    refused(6, refuse.made_up_acceptance, GATES["R4"]["accept_mode"])
    assert "chat template" in refused(6, refuse.made_up_acceptance, "measured", "random")
    refuse.made_up_acceptance("measured")


def test_7_tail_of_few_requests():
    """999 requests, or no request's own acceptance; 1,000 with theirs pass."""
    assert "999 requests" in refused(7, refuse.thin_tail, 999, True)
    assert "each request" in refused(7, refuse.thin_tail, 5000, False)
    refuse.thin_tail(1000, True)


def test_8_parts_of_a_replica():
    """Half a replica; 6 GPUs for 128 heads and 8 key/value heads; 8 GPUs pass, and 16, which hold each key/value head
    twice."""
    shape = short_shape(named("llama-3.1-405b"), "405B")
    refused(8, refuse.split_replica, 1.5, 8, shape)
    assert "128 heads nor its 8" in refused(8, refuse.split_replica, 1, 6, shape)
    for ranks in (1, 8, 16):
        refuse.split_replica(2, ranks, shape)


def test_9_saving_without_a_fair_baseline():
    """No best plain configuration, or another SLO on that side."""
    refused(9, refuse.unfair_saving, None, 50.0, 50.0)
    refused(9, refuse.unfair_saving, 1000.0, 100.0, 50.0)
    refuse.unfair_saving(1000.0, 50.0, 50.0)


def test_10_crossover_by_size():
    """'Not below 30B'."""
    assert "1.7B and 32B" in refused(10, refuse.size_crossover, True)
    refuse.size_crossover(False)


def test_11_fewer_gpus_without_room():
    """Cache and weights that do not fit, or no headroom."""
    refused(11, refuse.no_room, 81e9, 80e9, 1, 0.7)
    refused(11, refuse.no_room, 79e9, 80e9, 1, 1.0)
    refuse.no_room(79e9, 80e9, 1, 0.7)


def test_12_spot_price_for_a_year():
    """Held constant for a year without saying so; a month, a said one and a contract's price pass."""
    refused(12, refuse.constant_spot, "spot", 365, False)
    for kind, days, said in (("spot", 30, False), ("spot", 365, True), ("on-demand", 365, False)):
        refuse.constant_spot(kind, days, said)
