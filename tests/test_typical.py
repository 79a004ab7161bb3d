"""Typical acceptance: the rule by hand, the same as exact text where it must be, and marked lossy wherever it shows."""

import json
import math

import pytest
import torch
from test_report import SCHEMA, violations
from test_tree_decode import STATIC
from tiny import call
from tiny_medusa import medusa_run

from data.sampling import Sampling
from drafters.tree import Draft, Topology
from eval import breakdown, live_found, roi_accepted, serve_check, ship
from eval import run as eval_run
from eval.decode import Decoder
from eval.publish import gate
from eval.verdict import decide
from eval.verify import Typical, verify, verify_typical
from recipes.errors import ConfigError
from recipes.loader import load_recipe

RULE = Typical(0.09, 0.3)
P = [[0.5, 0.3, 0.1, 0.06, 0.04], [0.02, 0.02, 0.9, 0.03, 0.03], [0.2, 0.2, 0.2, 0.2, 0.2], [0.05, 0.05, 0.1, 0.4, 0.4],
     [0.96, 0.01, 0.01, 0.01, 0.01]]


def threshold(p: list[float], rule: Typical) -> float:
    return min(rule.epsilon, rule.delta * math.exp(sum(x * math.log(x) for x in p)))


def judged(tokens, parents, rule=RULE, real=None):
    p = torch.tensor([P[: len(tokens) + 1]], dtype=torch.float64)
    draft = Draft(torch.tensor([tokens]), None, None if parents is None else torch.tensor([parents]), real)
    found = verify_typical(p, draft, rule, torch.Generator().manual_seed(0), Topology.of(draft))
    n = int(found.accepted[0])
    return found.tokens[0, :n].tolist(), found


def test_thresholds_by_hand():
    """p(x) > min(epsilon, delta * exp(-H)): of the first place 0.5, 0.3 and 0.1 are typical, 0.06 and 0.04 are not;
    where the target is sure its choice alone is; where it is unsure, all of five equal tokens."""
    assert threshold(P[0], RULE) == pytest.approx(0.0872, abs=1e-4)
    for token, right in zip(range(5), (True, True, True, False, False)):
        assert bool(judged([token], None)[0]) == right
    assert judged([0, 2, 4], None)[0] == [0, 2, 4] and judged([0, 3, 4], None)[0] == [0]
    assert judged([0], None, Typical(0.55, 9.0))[0] == [] and judged([3], None, Typical(0.05, 9.0))[0] == [3]


def test_the_longest_path_wins_and_the_likeliest_of_equal_ones():
    """A tree: three children of the last token, of which two are typical; behind the second one more."""
    tokens, found = judged([0, 1, 3], [0, 0, 0])  # both 0 and 1 are typical: 0 is more probable
    assert tokens == [0] and found.path[0, :2].tolist() == [0, 1]
    tokens, found = judged([0, 1, 4], [0, 0, 2])  # behind 1, token 4 is typical too
    assert tokens == [1, 4] and found.path[0].tolist() == [0, 2, 3]
    assert judged([0, 1, 4], [0, 0, 2], real=torch.tensor([[True, True, False]]))[0] == [0]


def test_the_next_token_is_drawn_from_what_the_target_says():
    """Behind the path comes a token of p there, what was refused included."""
    draws = torch.tensor([P[:2]], dtype=torch.float64).expand(4000, -1, -1)
    draft = Draft(torch.full((4000, 1), 4))  # never typical
    found = verify_typical(draws, draft, RULE, torch.Generator().manual_seed(0), Topology.of(draft))
    assert not found.accepted.any() and found.rejected.all() and found.refused.eq(4).all()
    shares = torch.bincount(found.tokens[:, 0], minlength=5) / 4000
    torch.testing.assert_close(shares.double(), torch.tensor(P[0], dtype=torch.float64), atol=0.03, rtol=0)


def test_greedy_text_is_exact_whatever_the_rule():
    """At temperature 0 the rule is that of exact acceptance."""
    logits = torch.tensor([P[:3]]).log()
    draft = Draft(torch.tensor([[0, 1]]))
    a, b = (verify(logits, draft, Sampling(), typical=rule) for rule in (None, Typical(0.0, 0.0)))
    assert a.accepted.tolist() == b.accepted.tolist() == [1] and a.tokens.equal(b.tokens)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return medusa_run(tmp_path_factory.mktemp("typical"))


def test_more_is_accepted_than_exactly(base):
    """A generous rule accepts what the exact one may refuse, as a chain and as a tree; a strict one accepts nothing."""
    prompts = [[5, 9, 20]] * 40
    for plan in (3, STATIC):
        lengths = [Decoder(base.target, 8, Sampling(4.0), end_ids=[], seed=1, typical=rule).speculative(
            prompts, base.drafter, plan) for rule in (Typical(0.0, 0.0), None, Typical(1.0, 9.0))]
        generous, exact, strict = (sum(o.passes for o in outputs) for outputs in lengths)
        assert generous < exact < strict


def test_the_parts_of_a_cycle_are_timed_by_the_rule(base):
    """A rule that accepts everything needs fewer cycles for the same answers than one that accepts nothing."""
    prompts = [[5, 9, 20]] * 4
    cycles = [breakdown.cycle(base.target, base.drafter, prompts, 3, 13, sampling=Sampling(4.0), typical=rule)["cycles"]
              for rule in (Typical(0.0, 0.0), Typical(1.0, 9.0))]
    assert cycles[0] < cycles[1] == 4 * 12


def test_the_report_says_that_it_is_lossy(base, capsys, monkeypatch):
    """The verdict is no, by its name; the lossless proof is of exact acceptance; neither publishing nor the serving
    check takes such a report."""
    flags = ["--eval.acceptance", "typical", "--eval.typical.temperature", "2.0", "--eval.batch_sizes", "[2]"]
    cycle, told = breakdown.cycle, []
    monkeypatch.setattr(breakdown, "cycle", lambda *args, **how: told.append(how) or cycle(*args, **how))
    assert call(eval_run.COMMAND, base.recipe, *flags) == 0
    assert told == [{"seed": 0, "sampling": Sampling(2.0), "stop": (), "typical": Typical(0.09, 0.3)}]
    assert capsys.readouterr().out.startswith("LOSSY")
    folder = base.run / "eval"
    report = json.loads((folder / "report.json").read_text())
    assert violations(report, SCHEMA) == []
    assert report["settings"]["lossy"] is True and report["settings"]["acceptance"] == "typical"
    assert report["settings"]["temperature"] == 2.0
    assert report["settings"]["typical"] == {"epsilon": 0.09, "delta": 0.3}
    for wrong in ({"acceptance": "typicall"}, {"lossy": "no"}, {"typical": {"epsilon": 2.0, "delta": 0.3}}):
        assert len(violations(report | {"settings": report["settings"] | wrong}, SCHEMA)) == 1
    assert report["verdict"]["decision"] == "do not deploy" and "LOSSY" in report["verdict"]["reasons"][0]
    assert report["total"]["lossless"]["greedy"]["mismatches"] == 0
    assert "LOSSY: typical acceptance" in (folder / "report.html").read_text()
    assert "LOSSY" in (folder / "report.md").read_text()
    assert any("lossy" in reason for reason in gate(report, despite_verdict=True))
    assert call(ship.COMMAND, base.recipe) == 0
    capsys.readouterr()
    assert call(serve_check.COMMAND, base.recipe, "--python", "/bin/true") == 1
    assert "of typical acceptance" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="report.json: of typical acceptance"):
        roi_accepted.read_acceptance(folder / "report.json", "")
    sent = {key: report["settings"][key] for key in ("prompts_sha256", "max_tokens", "temperature")}
    assert live_found.offline_block(folder / "report.json", sent, {"per_position": [0.1, 0.1, 0.1]}) is None
    report["total"]["lossless"]["greedy"]["mismatches"] = 1
    assert "1 of 4 greedy answers differ" in decide(report["total"], report["sets"], lossy=True)["reasons"][1]


def test_a_server_accepts_by_its_own_rule(base, capsys):
    """`make eval` of a running server says nothing of typical acceptance, and sends nothing."""
    flags = ["--eval.acceptance", "typical", "--eval.server.base_url", "http://127.0.0.1:9"]
    assert call(eval_run.COMMAND, base.recipe, *flags) == 2
    assert "eval.acceptance = typical: is a rule of the loop here" in capsys.readouterr().err


def test_exact_is_the_default(base):
    assert load_recipe(base.recipe).eval.acceptance == "exact"
