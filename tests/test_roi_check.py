"""`make roi ARGS="check CLAIM"`: the twelve claims of the specification, the gates' arithmetic, words and files."""

import json
from pathlib import Path

import pytest
import yaml

from eval import roi_check
from eval.roi_claim import Claim, claims_of
from recipes import money
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.loader import parse_into
from recipes.speculation import kept_if_independent

DATA = Path(__file__).parent / "roi"
AUDITED = yaml.safe_load((DATA / "claims.yaml").read_text())
GATES = json.loads((DATA / "gates.json").read_text())


def findings(values: dict) -> dict[str, roi_check.Finding]:
    return {f.about: f for f in roi_check.check(parse_into(Claim, values, "test"))}


@pytest.mark.parametrize("audited", AUDITED, ids=lambda a: a["claim"]["name"])
def test_claims_of_the_article(audited):
    """Each figure gets the judgement and the corrected value of the specification's table; none other is made up."""
    found = findings(audited["claim"])
    assert {about: f.verdict for about, f in found.items()} == {k: v[0] for k, v in audited["truth"].items()}
    for about, (_, value) in audited["truth"].items():
        assert value is None or found[about].value == pytest.approx(value, rel=2e-3), about
    text = "\n".join(roi_check.lines(parse_into(Claim, audited["claim"], "test"), list(found.values())))
    for part in audited.get("says", []):
        assert part in text


def test_drafter_memory_by_hand():
    """The 70B target's EAGLE-3 drafter in bf16: fuse, query, keys and values of 2H, output, MLP, head of 32,000."""
    H, ff = 8192, 28672
    weights = 3 * H * H + 2 * H * (8192 + 2048) + H * 8192 + 3 * H * ff + H * 32000
    found = findings({"model": "llama-3-70b", "drafter_gb": 0})["memory of the drafter"]
    assert found.value == pytest.approx(2 * weights / 1e9, rel=1e-3)
    size = DraftSize(H, H, 3, 64, 8, 128, ff, 32000, 128256)
    assert found.value == 2 * size.parameters / 1e9 and found.value > 2.8


@pytest.mark.parametrize("gate", GATES["arithmetic"], ids=lambda g: g["id"])
def test_arithmetic_of_the_gates(gate):
    """A1 to A6, each as the specification counts it."""
    value = {
        "usd_per_M": lambda g: money.dollars_per_million(g["usd_h"], g["tok_s"]),
        "gpus": lambda g: money.gpus_of_hours(g["hours"], g["month_h"]),
        "replica_gpus": lambda g: money.gpus(g["demand"], g["tps_gpu"] * g["tp"], g["tp"]),
        "amdahl": lambda g: money.amdahl(g["share"], g["s"]),
        "AL_iid": lambda g: kept_if_independent(g["alpha"], g["K"]),
    }[gate["f"]](gate)
    assert value == pytest.approx(gate["expected"], abs=0.51 * 10 ** -len(str(gate["expected"]).partition(".")[2]))


@pytest.mark.parametrize("claim, about, verdict", [
    ({"speedup": 4.12, "acceptance_length": 2.22}, "speedup", "impossible"),
    ({"engine": "vllm", "engine_after": "sglang"}, "engines", "cannot be said"),
    ({"acceptance_mode": "synthetic"}, "acceptance", "cannot be said"),
    ({"acceptance_domain": "gsm8k", "traffic_domain": "financeqa"}, "domain", "cannot be said"),
    ({"best_plain": False}, "baseline", "cannot be said"), ({"crossover_billions": 30}, "crossover", "cannot be said"),
    ({"price_kind": "spot", "days": 365}, "price", "cannot be said"), ({"speedup": 2.0}, "the claim", "cannot be said"),
    ({"model": "llama-3-70b", "gpu": "H200", "batch": 8, "tok_s_after": 900}, "tokens/s, with the drafter",
     "cannot be said")])
def test_what_a_claim_may_not_rest_on(claim, about, verdict):
    """Grounds that the planner refuses are refused in a claim too; a claim that cannot be judged is never passed."""
    assert {a: f.verdict for a, f in findings(claim).items()} == {about: verdict}


def test_claims_that_hold():
    """Right figures are said to hold; the same with the opposite of the audited faults."""
    assert findings({"price_per_gpu_hour": 2.02, "tok_s": 1400, "dollars_per_million": 0.40})[
        "$ per million, plain"].verdict == "holds"
    whole = findings({"speedup": 1.62, "decode_speedup": 2.2, "decode_share": 0.7})
    assert whole["speedup end to end"].verdict == "holds"
    assert findings({"model": "llama-3-70b", "drafter_gb": 3.4})["memory of the drafter"].verdict == "holds"
    tight = findings({"demand_tok_s": 10000, "tok_s": 1400, "tok_s_after": 3100, "gpus": 11, "gpus_after": 5,
                      "headroom": 0.7})
    assert {f.verdict for f in tight.values()} == {"holds"}


def test_words_and_files(tmp_path):
    """key=value words and YAML give the same claim; what is neither, or no key of a claim, is named."""
    path = tmp_path / "claim.yaml"
    path.write_text("{price_per_gpu_hour: 2.02, tok_s: 1400, dollars_per_million: 1.44}")
    words = ["price_per_gpu_hour=2.02", "tok_s=1400", "dollars_per_million=1.44"]
    assert claims_of([str(path)]) == claims_of(words)
    for bad, said in (([], "needs a YAML file"), (["toks=3"], "did you mean tok_s?"), (["batch=x"], "batch = 'x'"),
                      ([str(tmp_path / "none.yaml")], "cannot read this claim")):
        with pytest.raises(ConfigError, match=said):
            claims_of(bad)
