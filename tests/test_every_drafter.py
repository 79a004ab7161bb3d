"""The lossless suite: every registered drafter, as a chain and as trees, changes neither greedy nor sampled text."""

from functools import cache

import pytest
import torch
from fakes import follows
from tiny import LAYERS, load_target, write_target

from data.sampling import Sampling, probabilities
from drafters.registry import REGISTRY, entry, options_of
from drafters.tree import DynamicTree, StaticTree, chain
from eval.decode import Decoder

# Those that a tiny target needs
OPTIONS = {"eagle3": {"draft_vocab_size": 40}, "parallel": {"draft_vocab_size": 40, "num_layers": 2},
           "medusa": {"draft_vocab_size": 40}, "layer_cut": {"layers": 5}, "small_lm": {"layers": 5}}
HELD = {"kind": "eagle3", "options": OPTIONS["eagle3"]}
OPTIONS |= {"hybrid": {"match": 2, "then": HELD},
            "fallback": {"drafter": HELD, "break_even": 2.0, "window": 1, "pause": 2}}
NEEDS = {"suffix": "numba", "hybrid": "numba"}  # packages that are optional
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
PLANS = {"chains": chain(3), "static trees": TREE, "dynamic trees": DynamicTree(3, 3, 8)}
PAIRS = [(kind, plan) for kind in REGISTRY for plan in PLANS if plan in entry(kind).drafts]
PROMPTS = [[3, 9, 14, 3, 9], [7, 7], [30, 31, 32, 33, 30, 31]]
LIMIT, ENDS = 12, [40, 41, 42]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("target")), "float64", LAYERS)


def opened(kind: str, target):
    """The drafter, its target showing the states that it reads."""
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    target.tap(entry("eagle3" if entry(kind).holds else kind).shown(LAYERS))
    return built(kind, target)


@cache
def built(kind: str, target):
    counts = {i: 1 for i in range(3, 60)}
    drafter = entry(kind).code.build(options_of(kind, OPTIONS.get(kind, {})), target, counts, 0).double().eval()
    if kind == "medusa":  # fresh heads all guess what the target has just said
        with torch.no_grad():
            g = torch.Generator().manual_seed(0)
            for weight in drafter.blocks.parameters():
                weight.copy_(torch.randn(weight.shape, generator=g))
    return drafter


@cache
def plainly(target, limit: int) -> list[list[int]]:
    return [o.tokens for o in Decoder(target, limit, end_ids=ENDS).plain(PROMPTS)]


@pytest.mark.parametrize("kind,plan", PAIRS)
def test_greedy_text_stays(target, kind, plan):
    """Case 59: in float64 the text is plain decoding's, in a ragged batch and with rows that are replaced."""
    for slots in (0, 2):
        out = Decoder(target, LIMIT, end_ids=ENDS, slots=slots).speculative(PROMPTS, opened(kind, target), PLANS[plan])
        assert [o.tokens for o in out] == plainly(target, LIMIT)


@pytest.mark.parametrize("kind", REGISTRY)
def test_a_row_that_ends_with_its_first_token_is_replaced(target, kind):
    """Case 22: the next prompt takes its place before the others have drafted anything."""
    prompts, ends = [*PROMPTS, [5, 6]], [plainly(target, LIMIT)[0][0]]
    plain = Decoder(target, LIMIT, end_ids=ends).plain(prompts)
    out = Decoder(target, LIMIT, end_ids=ends, slots=2).speculative(prompts, opened(kind, target), 3)
    assert len(plain[0].tokens) == 1 and [o.tokens for o in out] == [o.tokens for o in plain]


@pytest.mark.parametrize("kind,plan,drawn", [(kind, plan, drawn) for kind, plan in PAIRS for drawn in (False, True)
                                             if plan != "dynamic trees" or not drawn])
def test_sampled_text_follows_the_target(target, kind, plan, drawn):
    """Two tokens of 500 answers, jointly: no distribution but the target's own, with top-k 3 (each test at 1e-4)."""
    settings, prompt = Sampling(1.0, 3), PROMPTS[0]
    exact = {}
    for a, p in following(target, prompt, settings).items():
        exact |= {(a, b): p * q for b, q in following(target, [*prompt, a], settings).items()}
    out = Decoder(target, 2, settings, end_ids=[], seed=3).speculative([prompt] * 500, opened(kind, target),
                                                                       PLANS[plan], drawn)
    assert follows([tuple(o.tokens) for o in out], exact) > 1e-4


def following(target, ids: list[int], settings: Sampling) -> dict[int, float]:
    """Possible next tokens and their probabilities."""
    states = target.forward(torch.tensor([ids]), torch.arange(len(ids))[None])
    p = probabilities(states.logits[0, -1], settings)
    return {int(token): float(p[token]) for token in p.nonzero()[:, 0]}
