"""EAGLE-3 inside the decoding loop drafts what training and validation unroll, from any history of rejections."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_eagle3 import IDS, TURNS, Eagle3, V, batch_of, drafter_with

from data.sampling import draw
from drafters import propose
from drafters.base import Batch
from drafters.propose import UnrollMemory, unroll

K = 4
ROW = [0, 0, 0] + [1] * 20
VARIANTS = [{}, {"tap_norms": True, "feedback": "post_norm"}, {"norm_before_residual": True}, {"num_layers": 2},
            {"num_layers": 2, "feedback": "post_norm"}]


def chain_of(drafter: Eagle3, batch: Batch, start: int) -> tuple[list[int], torch.Tensor]:
    """Tokens [K] and distributions [K, V] of the greedy chain from `start` of a one-row batch, as validation has it."""
    memory = UnrollMemory(torch.tensor([[start]]), layers=drafter.options.num_layers)
    spread = torch.zeros(K, V, dtype=torch.float64)
    steps = unroll(drafter, drafter.fuse(batch.taps), batch.ids.roll(-1, 1), torch.arange(batch.ids.shape[1])[None],
                   memory, K, lambda k, output: IDS[drafter.logits(output).argmax(-1)], memory.at)
    for k, output in enumerate(steps):
        spread[k, IDS] = drafter.logits(output)[0, 0].softmax(-1)
    return spread.argmax(-1).tolist(), spread


@pytest.mark.parametrize("options", VARIANTS)
@torch.no_grad()
def test_propose_after_a_prefill_equals_chains(options):
    """Case 09: from every position at which a draft can start, session and `chains` give the same tokens."""
    drafter, batch = drafter_with(**options), batch_of(TURNS[:3])
    tokens, at, valid = drafter.chains(batch, K)
    S = batch.ids.shape[1]
    for column in range(at.shape[1]):
        session = drafter.session(3, S + K + 1)
        session.observe(batch.taps, batch.ids.roll(-1, 1), torch.arange(S).expand(3, S), at[:, column])
        proposed = session.propose(K)
        assert proposed.q is None
        rows = valid[:, column]
        assert torch.equal(proposed.tokens[rows], tokens[rows, column]) and rows.any()


@pytest.mark.parametrize("options", VARIANTS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
@torch.no_grad()
def test_propose_in_the_loop_equals_the_chain(options, seed):
    """Ragged rows, abandoned drafts, garbage behind the accepted prefix and a dropped row change no proposal."""
    g = torch.Generator().manual_seed(seed)
    drafter = drafter_with(**options)
    rows = [batch_of([ROW], seed + i) for i in range(3)]
    at = torch.tensor([2, 0, 1])  # the last observed position of each row
    session = drafter.session(3, len(ROW) + 2 * K)
    taps, ids = torch.cat([r.taps for r in rows]), torch.cat([r.ids for r in rows])
    session.observe(taps[:, :3], ids[:, 1:4], torch.arange(3).expand(3, 3).clone(), at)
    for turn in range(4):
        proposed = session.propose(K, lambda q: q.argmax(-1))
        for b, row in enumerate(rows):
            tokens, spread = chain_of(drafter, row, int(at[b]))
            assert proposed.tokens[b].tolist() == tokens
            torch.testing.assert_close(proposed.q[b].double(), spread, rtol=1e-6, atol=1e-6)  # q is float32
        accepted = torch.randint(0, K + 1, (len(rows),), generator=g)
        positions = at[:, None] + 1 + torch.arange(K + 1)
        inside = positions <= (at + 1 + accepted)[:, None]
        clamped = positions.clamp(max=len(ROW) - 2)
        picked = torch.arange(len(rows))[:, None]
        seen = torch.where(inside[..., None], taps[picked, clamped], 1e3)
        session.observe(seen, torch.where(inside, ids[picked, clamped + 1], 1), positions, accepted)
        at = (at + 1 + accepted).clamp(max=len(ROW) - 2)
        if turn == 0:
            session.keep(torch.tensor([2, 0]))
            rows, at, taps, ids = [rows[2], rows[0]], at[[2, 0]], taps[[2, 0]], ids[[2, 0]]
        if bool((at >= len(ROW) - K - 3).any()):
            break


@torch.no_grad()
def test_a_long_prompt_is_attended_in_parts(monkeypatch):
    """Queries of the first of two layers, two at a time: the proposals are those of all at once."""
    drafter, batch = drafter_with(num_layers=2), batch_of([ROW])
    positions = torch.arange(len(ROW))[None]

    def proposed() -> torch.Tensor:
        session = drafter.session(1, len(ROW) + K)
        session.observe(batch.taps, batch.ids.roll(-1, 1), positions, torch.tensor([len(ROW) - 2]))
        return session.propose(K, lambda q: q.argmax(-1)).q

    whole = proposed()
    monkeypatch.setattr(propose, "QUERIES", 2)
    torch.testing.assert_close(proposed(), whole)


@torch.no_grad()
def test_sampled_proposals_follow_their_own_distribution():
    """q of a sampled draft is the softmax of the step's logits, zero outside the draft vocabulary, and is what is
    drawn from: a lossless verification divides by it."""
    drafter, batch = drafter_with(), batch_of([ROW[:6]])
    wide = 3000
    session = drafter.session(wide, 20)
    uniforms = torch.Generator().manual_seed(1)
    given_q = []

    def sample(q: torch.Tensor) -> torch.Tensor:
        given_q.append(q)
        return draw(q, torch.rand(len(q), generator=uniforms, dtype=torch.float64))

    session.observe(batch.taps[:, :3].expand(wide, -1, -1), batch.ids[:, 1:4].expand(wide, -1),
                    torch.arange(3).expand(wide, 3).clone(), torch.full((wide,), 2))
    proposed = session.propose(2, sample)
    assert torch.equal(proposed.q, torch.stack(given_q, dim=1)) and proposed.q.shape == (wide, 2, V)
    torch.testing.assert_close(proposed.q.sum(-1), torch.ones(wide, 2), rtol=1e-5, atol=1e-5)
    assert bool((proposed.q[..., [v for v in range(V) if v not in IDS]] == 0).all())
    _, spread = chain_of(drafter, batch, 2)
    torch.testing.assert_close(proposed.q[0, 0].double(), spread[0], rtol=1e-6, atol=1e-6)
    share = torch.bincount(proposed.tokens[:, 0], minlength=V) / wide
    torch.testing.assert_close(share, proposed.q[0, 0], rtol=0, atol=0.04)
    # The second step was given the token that was drawn, not the likeliest one.
    assert len({tuple(q.tolist()) for q in proposed.q[:, 1]}) == len(proposed.tokens[:, 0].unique())
