"""The lossless checks must be able to say no: wrong text, near-ties, wrong samplers."""

import pytest
import torch
from fakes import RuleDrafter, RuleTarget
from scipy.stats import chisquare

from drafters.lookup import Lookup, Options
from eval import lossless
from eval.decode import Output
from eval.lossless import compare_greedy, first_difference, judge_context, sampling_report, siblings
from eval.verify import verify_sampled


def test_first_difference_by_hand():
    """Case 59: the index of the first token that differs, the end of the shorter one included."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


class Gaps:
    """A target whose two largest logits differ by gaps[number of tokens so far]."""

    device = torch.device("cpu")

    def __init__(self, gaps: dict[int, float]) -> None:
        self.gaps = gaps

    def forward(self, ids, positions):
        logits = torch.zeros(1, ids.shape[1], 4)
        logits[0, -1, :2] = torch.tensor([5.0, 5.0 - self.gaps[ids.shape[1]]])
        return type("States", (), {"logits": logits})


def test_differences_are_classified_by_the_gap():
    """Case 59: a first difference at a top-2 gap below the tolerance is a near-tie, at a larger one a mismatch."""
    target = Gaps({3: 1e-3, 4: 1e-6})
    plain = [Output([1, 2, 3]), Output([1, 2, 3]), Output([1, 2, 3])]
    spec = [Output([1, 2, 3]), Output([1, 0, 3]), Output([1, 2, 0])]
    found = compare_greedy(target, [[7, 7]] * 3, plain, spec, 1e-4)
    assert found == {"prompts": 3, "tokens": 9, "mismatches": 1, "near_ties": 1, "tie_gap": 1e-4}


P = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4], dtype=torch.float64)


def drafts(q: torch.Tensor | None) -> torch.Tensor:
    if q is None:
        return torch.ones(4000, 1, dtype=torch.long)
    return torch.multinomial(q, 4000, replacement=True, generator=torch.Generator().manual_seed(1))[:, None]


@pytest.mark.parametrize("q", [Q, None])
def test_right_sampler_passes(q):
    """The verification in use is judged lossless, with sampled and with deterministic drafts."""
    result = judge_context(P, drafts(q), q, 4000, seed=0)
    assert result.p_value > 1e-3 and result.tv < 0.03


@pytest.mark.parametrize("q", [Q, None])
@pytest.mark.parametrize("fault", ["always accepts", "draws from p after a rejection"])
def test_wrong_samplers_are_found(monkeypatch, q, fault):
    """The two classic mistakes do not pass: accepting regardless, and forgetting to subtract q."""
    def wrong(p, draft, generator):
        if fault == "always accepts":
            return type("Verdict", (), {"tokens": draft.tokens})
        with monkeypatch.context() as patch:
            patch.setattr("eval.verify.residual", lambda p, *rest: p)
            return verify_sampled(p, draft, generator)

    monkeypatch.setattr(lossless, "verify_sampled", wrong)
    assert judge_context(P, drafts(q), q, 4000, seed=0).p_value < 1e-6


def pairs(q: torch.Tensor | None) -> torch.Tensor:
    """[4000, 2] siblings of a tree."""
    if q is None:
        return torch.tensor([[1, 3]]).expand(4000, 2)
    return siblings(q, 4000, 2, torch.Generator().manual_seed(2))


def test_siblings_are_drawn_without_replacement():
    """Pairs occur as often as q(x) q(y) / (1 - q(x)) says."""
    drawn = pairs(Q)
    exact = Q[:, None] * Q / (1 - Q[:, None])
    exact.fill_diagonal_(0)
    possible = exact > 0
    counts = torch.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25).view(5, 5)
    assert not counts[~possible].any()
    assert chisquare(counts[possible].numpy(), (exact[possible] * 4000).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("q", [Q, None])
def test_two_siblings_pass_and_mistakes_with_them_do_not(q, monkeypatch):
    """A tree's first level is judged lossless, and the mistake of each rejection being the first one is found."""
    result = judge_context(P, pairs(q), q, 4000, seed=0)
    assert result.p_value > 1e-3 and result.tv < 0.03
    monkeypatch.setattr("eval.verify.residual", lambda p, *rest: p)
    assert judge_context(P, pairs(q), q, 4000, seed=0).p_value < 1e-6


def test_parts_of_a_large_vocabulary_are_judged_as_one(monkeypatch):
    """Draws that do not fit in memory at once are verified in parts, each with numbers of its own."""
    monkeypatch.setattr(lossless, "ELEMENTS", 500)
    result = judge_context(P, drafts(Q), Q, 4000, seed=0)
    assert result.p_value > 1e-3 and result.tv < 0.03


def test_a_drafter_that_proposes_nothing_is_not_tested():
    target = RuleTarget(lambda seen, positions: torch.zeros(*positions.shape, 4, dtype=torch.float64))
    drafter = Lookup(Options(), 4)
    found = sampling_report(target, drafter, [[1, 2], [1, 2, 0]], 100, seed=0)  # behind 2 0 nothing, behind 0 0 a guess
    assert found["tests"] == 1


def test_whole_check_on_a_rule():
    """Contexts with deterministic and sampled drafts in turn; none asked for is no test and no failure."""
    table = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.55, 0.25, 0.1, 0.1], [0.05, 0.6, 0.05, 0.3], [0.25, 0.25, 0.4, 0.1]])
    target = RuleTarget(lambda seen, positions: table.log()[seen.gather(1, positions)])
    drafter = RuleDrafter(lambda row, last, step: torch.tensor([0.4, 0.1, 0.1, 0.4]))
    report = sampling_report(target, drafter, [[0, 1], [2], [3, 3, 1]], 2000, seed=0)
    assert report["tests"] == 3 and report["p_value"] > 1e-3 and report["max_tv"] < 0.06
    trees = sampling_report(target, drafter, [[0, 1], [2], [3, 3, 1], [1]], 2000, seed=0, tree=True)
    assert trees["tests"] == 4 and trees["p_value"] > 1e-3 and trees["max_tv"] < 0.06
    assert sampling_report(target, drafter, [], 100, seed=0) == {"tests": 0, "max_tv": 0.0, "p_value": 1.0}
