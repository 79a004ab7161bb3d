"""The parallel drafter inside the decoding loop: what training computes, from any history; trees are products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_eagle3 import IDS, TURNS, V, batch_of
from test_parallel import MASK, parallel_with

from data.sampling import draw
from drafters.base import Batch
from drafters.parallel import ParallelEagle
from drafters.tree import DynamicTree, StaticTree, chain
from drafters.unrolled import Chains

K = 4
ROW = [0, 0, 0] + [1] * 20
VARIANTS = [{}, {"tap_norms": True}, {"norm_before_residual": True, "num_layers": 2}, {"num_layers": 4}]


def spread_of(drafter: ParallelEagle, batch: Batch, start: int, depth: int = K) -> torch.Tensor:
    """Distributions [depth, V] of the chain from `start` of a one-row batch, as validation's pass has them."""
    place = Chains(batch, 1.0, 0).at[0].tolist().index(start)
    spread = torch.zeros(depth, V, dtype=torch.float64)
    for k, logits in enumerate(drafter.chain_logits(batch, depth)):
        spread[k, IDS] = logits[0, place].softmax(-1)
    return spread


@pytest.mark.parametrize("options", VARIANTS)
@torch.no_grad()
def test_training_equals_decoding(options):
    """Case 09: the distributions that the loss is taken of, after conditional drop, are those of a session that has
    observed the same context and drafts from the same position: both are walked, every chain and every depth."""
    drafter, batch = parallel_with(depth_share=0.6, **options), batch_of(TURNS[:3])
    levels, going = drafter.dropped(batch, seed=5)
    outputs = drafter.all_depths(batch, drafter.fuse(batch.taps), [c.at for c in levels], going)
    S, walked = batch.ids.shape[1], [0] * K
    for b in range(3):
        row = Batch(batch.ids[b : b + 1], batch.turns[b : b + 1], batch.taps[b : b + 1], batch.final[b : b + 1])
        drafts = {}
        for k, (chains, output) in enumerate(zip(levels, outputs)):
            for i in chains.valid[b].nonzero()[:, 0].tolist():
                t = int(chains.at[b, i])
                if t not in drafts:
                    session = drafter.session(1, S + K + 1)
                    session.observe(row.taps[:, : t + 1], row.ids[:, 1 : t + 2], torch.arange(t + 1)[None],
                                    torch.tensor([t]))
                    drafts[t] = session.propose(K, lambda q: q.argmax(-1)).q[0]
                ours = drafter.logits(output[b, i]).softmax(-1)
                torch.testing.assert_close(drafts[t][k][IDS].double(), ours, rtol=1e-6, atol=1e-6)  # q is float32
                walked[k] += 1
    assert walked[0] == 14 and walked[1] >= 5 and walked[2] >= 2


@pytest.mark.parametrize("options", VARIANTS)
@torch.no_grad()
def test_propose_after_a_prefill_equals_chains(options):
    """Case 09: from every position at which a draft can start, in ragged rows, session and `chains` give the same
    tokens."""
    drafter, batch = parallel_with(**options), batch_of(TURNS[:3])
    tokens, at, valid = drafter.chains(batch, K)
    S = batch.ids.shape[1]
    for column in range(at.shape[1]):
        session = drafter.session(3, S + K + 1)
        session.observe(batch.taps, batch.ids.roll(-1, 1), torch.arange(S).expand(3, S), at[:, column])
        proposed, rows = session.propose(K), valid[:, column]
        assert proposed.q is None and rows.any()
        assert torch.equal(proposed.tokens[rows], tokens[rows, column])


@pytest.mark.parametrize("options", VARIANTS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
@torch.no_grad()
def test_propose_in_the_loop_equals_the_pass(options, seed):
    """Ragged rows, abandoned masks, garbage behind the accepted prefix, drafts of other lengths, a dropped row and a
    joining one change no proposal."""
    g = torch.Generator().manual_seed(seed)
    drafter = parallel_with(**options)
    rows = [batch_of([ROW], seed + i) for i in range(3)]
    capacity, at = len(ROW) + 2 * K, torch.tensor([2, 3])  # the last observed position of each row

    def opened(chosen: list[int], at: torch.Tensor):
        session = drafter.session(len(chosen), capacity)
        taps, ids = (torch.cat([getattr(rows[i], part) for i in chosen]) for part in ("taps", "ids"))
        session.observe(taps[:, :4], ids[:, 1:5], torch.arange(4).expand(len(chosen), 4).clone(), at)
        return session

    session, index = opened([0, 1], at), [0, 1]
    for turn in range(4):
        length = int(torch.randint(1, K + 1, (1,), generator=g))
        proposed = session.propose(length, lambda q: q.argmax(-1))
        for b, i in enumerate(index):
            spread = spread_of(drafter, rows[i], int(at[b]), length)
            assert proposed.tokens[b].tolist() == spread.argmax(-1).tolist()
            torch.testing.assert_close(proposed.q[b].double(), spread, rtol=1e-6, atol=1e-6)
        accepted = torch.randint(0, K + 1, (len(index),), generator=g)
        positions = at[:, None] + 1 + torch.arange(K + 1)
        inside = positions <= (at + 1 + accepted)[:, None]
        clamped = positions.clamp(max=len(ROW) - 2)
        taps, ids = (torch.cat([getattr(rows[i], part) for i in index]) for part in ("taps", "ids"))
        picked = torch.arange(len(index))[:, None]
        seen = torch.where(inside[..., None], taps[picked, clamped], 1e3)
        session.observe(seen, torch.where(inside, ids[picked, clamped + 1], 1), positions, accepted)
        at = (at + 1 + accepted).clamp(max=len(ROW) - 2)
        if turn == 0:
            session.keep(torch.tensor([1]))
            session.join(opened([2], torch.tensor([2])))
            index, at = [1, 2], torch.tensor([int(at[1]), 2])
        if bool((at >= len(ROW) - K - 3).any()):
            break
    assert turn > 0


@torch.no_grad()
def test_a_real_mask_token_reads_the_same_everywhere():
    """Where the text itself holds the mask's token, training and decoding embed it alike, as an engine does with one
    table: the pass with that token equals a session that observed it."""
    drafter, batch = parallel_with(num_layers=2), batch_of([ROW])
    batch.ids[0, 5] = batch.ids[0, 6] = MASK
    session = drafter.session(1, 40)
    session.observe(batch.taps[:, :8], batch.ids[:, 1:9], torch.arange(8)[None], torch.tensor([7]))
    q = session.propose(K, lambda q: q.argmax(-1)).q[0]
    torch.testing.assert_close(q.double(), spread_of(drafter, batch, 7), rtol=1e-6, atol=1e-6)
    drafter.mask_embedding.add_(1.0)
    assert not torch.allclose(q.double(), spread_of(drafter, batch, 7), atol=1e-3)


@torch.no_grad()
def prefilled(drafter: ParallelEagle, rows: int = 1):
    batch = batch_of([ROW[:6]])
    session = drafter.session(rows, 40)
    session.observe(batch.taps[:, :4].expand(rows, -1, -1), batch.ids[:, 1:5].expand(rows, -1),
                    torch.arange(4).expand(rows, 4).clone(), torch.full((rows,), 3))
    return session, spread_of(drafter, batch, 3)


@torch.no_grad()
def test_trees_are_products():
    """A static tree's node of rank r at depth k is the r-th guess of depth k, whatever is before it; a dynamic tree has
    the paths with the largest products, enumerated by hand."""
    drafter = parallel_with()
    session, spread = prefilled(drafter)
    ranked = spread.argsort(dim=-1, descending=True)
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1)))
    drafted = session.propose(tree)
    assert drafted.tokens[0].tolist() == [int(ranked[len(path) - 1, path[-1]]) for path in tree.paths]
    assert drafted.parents[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 6, 6]
    drafted = session.propose(DynamicTree(3, 2, 7))
    paths = {0: ()}
    for i, (token, parent) in enumerate(zip(drafted.tokens[0].tolist(), drafted.parents[0].tolist())):
        paths[i + 1] = (*paths[parent], token)
    level, every = [()], {}
    for k in range(3):  # the two most probable paths of each level are grown by their two best tokens
        grown = {(*path, int(token)): every.get(path, 0.0) + float(spread[k, token].log())
                 for path in level for token in ranked[k, :2]}
        every |= grown
        level = sorted(grown, key=grown.get, reverse=True)[:2]
    assert set(paths.values()) - {()} == set(sorted(every, key=every.get, reverse=True)[:7])


@torch.no_grad()
def test_sampled_proposals_follow_their_own_distribution():
    """q of a sampled draft is what is drawn from, the same at a depth whatever was drawn before; a verification divides
    by it."""
    drafter, wide = parallel_with(), 3000
    session, spread = prefilled(drafter, wide)
    uniforms, given_q = torch.Generator().manual_seed(1), []

    def sample(q: torch.Tensor) -> torch.Tensor:
        given_q.append(q)
        return draw(q, torch.rand(len(q), generator=uniforms, dtype=torch.float64))

    proposed = session.propose(2, sample)
    assert torch.equal(proposed.q, torch.stack(given_q, dim=1)) and proposed.q.shape == (wide, 2, V)
    for k in range(2):
        torch.testing.assert_close(proposed.q[:, k].double(), spread[k].expand(wide, V), rtol=1e-6, atol=1e-6)
        share = torch.bincount(proposed.tokens[:, k], minlength=V) / wide
        torch.testing.assert_close(share, proposed.q[0, k], rtol=0, atol=0.04, check_dtype=False)
    assert len(proposed.tokens[:, 0].unique()) > 3


@torch.no_grad()
def test_a_chain_stops_where_it_is_unsure():
    """eval.confidence: the chain ends behind the first token that is less probable than asked for."""
    drafter = parallel_with()
    session, spread = prefilled(drafter)
    best = spread.amax(-1).tolist()
    limit = sum(sorted(best)[1:3]) / 2  # two of the four depths are less sure
    drafted = session.propose(chain(K, limit))
    first = next(k for k, p in enumerate(best) if p < limit)
    assert drafted.counts() == [first + 1]
