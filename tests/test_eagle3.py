"""EAGLE-3's loss and its chains against the slow reference, in true float64, and what must not leak into them."""

import pytest
import torch
from eagle3_reference import SlowEagle3, slow_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat import loss_positions
from drafters import unrolled
from drafters.base import Batch, LossOutput, draw, loss_mask, pack
from drafters.eagle3 import Eagle3, Options, Shape
from drafters.propose import UnrollMemory, unroll
from recipes.errors import ConfigError

V, H, D, K = 40, 16, 12, 4
IDS = torch.tensor([2, 3, 5, 6, 9, 14, 15, 20, 21, 30, 33, 39])
HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TWO = {"num_layers": 2}
BOTH = pytest.mark.parametrize("layers", [1, 2])
TURNS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2],  # two turns, the second to the row's end
    [0, 1, 1, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0],  # a turn of one token carries nothing
    [0, 0, 1, 1, 1, 2, 2, 2, 0],  # turns that touch; shorter row
    [0, 0, 0, 0],  # nothing at all
]


@pytest.fixture(autouse=True)
def true_float64(monkeypatch):
    """Norms and softmax are computed in float32 on purpose; here they keep float64, so that equal means equal."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def drafter_with(**options) -> Eagle3:
    """Random; rotary frequencies 1 and 1/4, exact in float32."""
    torch.manual_seed(0)
    shape = Shape(H, H, 24, 4, 2, 4, 1e-5, "silu", V, D, 64, {"rope_theta": 16.0, "rope_type": "default"}, 6)
    built = Eagle3(Options(**{"draft_vocab_size": D, "depth": K, "deepen_at": 0.0, **options}), shape, [1, 2, 3], IDS,
                   torch.randn(V, H, dtype=torch.float64), HEAD).double()
    with torch.no_grad():
        for weight in built.parameters():
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() == 2 else 1.0))
    return built


def batch_of(turns: list[list[int]], seed: int = 1) -> Batch:
    """Random rows, padded at the end as data.batching.collate does."""
    g = torch.Generator().manual_seed(seed)
    B, S = len(turns), max(map(len, turns))
    batch = Batch(torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, dtype=torch.long),
                  torch.zeros(B, S, 3 * H, dtype=torch.float64), torch.zeros(B, S, H, dtype=torch.float64))
    for b, row in enumerate(turns):
        n = len(row)
        batch.ids[b, :n] = torch.randint(0, V, (n,), generator=g)
        batch.turns[b, :n] = torch.tensor(row)
        batch.taps[b, :n] = torch.randn(n, 3 * H, generator=g, dtype=torch.float64)
        batch.final[b, :n] = torch.randn(n, H, generator=g, dtype=torch.float64)
    return batch


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.ids, batch.turns, batch.taps, batch.final]


def run(drafter: Eagle3, batch: Batch) -> tuple[LossOutput, list[torch.Tensor]]:
    out = drafter(batch)
    return out, torch.autograd.grad(out.loss_sum, [p for p in drafter.parameters() if p.requires_grad])


def same(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [
    {}, {"outside_vocabulary": "drop"}, {"tap_norms": True}, {"feedback": "post_norm"}, {"norm_before_residual": True},
    {"train_head": False, "step_decay": 0.5}, {"feature_loss": 0.3}, {"depth": 1},
    {"loss": "reverse_kl"}, {"loss": "tv"}, {"loss": "lk", "lk_eta": 2.0}, {"labels": "greedy"}, {"labels": "token"},
    {"loss": "tv", "labels": "greedy"}, {"loss": "lk", "labels": "token", "outside_vocabulary": "drop"},
    {"step_weights": "prefix"}, {"step_weights": "prefix", "labels": "token", "feature_loss": 0.3},
    TWO, TWO | {"norm_before_residual": True, "step_weights": "prefix"},
    TWO | {"feedback": "post_norm", "tap_norms": True}, TWO | {"loss": "lk", "labels": "token"},
    TWO | {"depth": 1, "train_head": False},
])
def test_loss_and_gradients_equal_the_slow_reference(options, monkeypatch):
    """Case 31: loss, hits and positions of each depth and every gradient equal those of separately built chains."""
    monkeypatch.setattr(unrolled, "LOGITS", {"cpu": 5 * 4 * D})  # parts of five steps
    drafter, batch = drafter_with(**options), batch_of(TURNS)
    total, losses, hits, counts = slow_loss(drafter, batch, HEAD)
    expected = torch.autograd.grad(total, [p for p in drafter.parameters() if p.requires_grad])
    out, gradients = run(drafter, batch)
    same([out.loss_sum, *gradients], [total, *expected])
    same([out.depth_loss], [torch.tensor(losses, dtype=torch.float64)])
    assert out.depth_hits.tolist() == hits and out.depth_count.tolist() == counts
    assert counts[:2] == [14, 9][: len(counts)] and drafter.count(batch) == 14  # by hand
    assert all(g.abs().sum() > 0 for g in gradients)


@BOTH
@pytest.mark.parametrize("turns", [[[1] * 14, [2] * 9], [[0] * 7 + [1] * 7, [1, 1, 0, 0] * 3]], ids=["dense", "half"])
def test_dense_and_half_supervised_rows_equal_the_slow_reference(layers, turns):
    """Cases 31, 49: the loss and every gradient, wherever in the rows the supervised positions are."""
    drafter, batch = drafter_with(num_layers=layers), batch_of(turns)
    total, *_ = slow_loss(drafter, batch, HEAD)
    expected = torch.autograd.grad(total, [p for p in drafter.parameters() if p.requires_grad])
    out, gradients = run(drafter, batch)
    same([out.loss_sum, *gradients], [total, *expected])


turn_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=6).map(
    lambda runs: [turn for turn, length in runs for _ in range(length)])


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(turn_rows, min_size=1, max_size=3), depth=st.integers(0, 5))
def test_loss_mask_equals_the_definition(rows, depth):
    """Case 31: the vectorised mask of padded rows is data.chat.loss_positions of each row; pack lists it."""
    S = max(map(len, rows))
    mask = loss_mask(torch.tensor([row + [0] * (S - len(row)) for row in rows]), depth)
    at, valid = pack(mask)
    for b, row in enumerate(rows):
        assert mask[b].nonzero()[:, 0].tolist() == loss_positions(row, depth) == at[b][valid[b]].tolist()


TWELVE = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]  # prompt 0..4, answer 5..9 with its end token, template's rest 10, 11


@pytest.mark.parametrize("depth,positions", [(0, [4, 5, 6, 7]), (1, [4, 5, 6]), (2, [4, 5]), (3, [4]), (4, [])])
def test_twelve_tokens_by_hand(depth, positions):
    """Case 31: 4, the last prompt position, predicts 6, the second answer token; 7 predicts 9, the end token."""
    assert loss_positions(TWELVE, depth) == positions
    assert loss_mask(torch.tensor([TWELVE]), depth)[0].nonzero()[:, 0].tolist() == positions


def gradient_maps(drafter: Eagle3) -> tuple[list[int], list[int]]:
    """Positions of the 12-token sample whose taps, and tokens whose embeddings, get a gradient."""
    batch = batch_of([TWELVE])
    batch.ids = torch.arange(20, 32)[None]  # every token is met once
    batch.taps.requires_grad_(True)
    drafter.embedding.requires_grad_(True)
    taps, table = torch.autograd.grad(drafter(batch).loss_sum, [batch.taps, drafter.embedding], allow_unused=True)
    return taps[0].abs().sum(-1).nonzero()[:, 0].tolist(), (table.abs().sum(-1).nonzero()[:, 0] - 20).tolist()


def test_gradient_map():
    """Case 31: prediction happens at 4..7 and nowhere else; context lends keys, and nothing after 7 or 8 counts."""
    drafter = drafter_with()
    # Attention reads the states at 0..7 and the tokens that follow them, 1..8: never token 9, the last label.
    assert gradient_maps(drafter) == ([0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8])
    drafter.midlayer.self_attn.o_proj.weight.data.zero_()  # without attention only predicting positions are left
    assert gradient_maps(drafter) == ([4, 5, 6, 7], [])
    for shallow in (drafter_with(depth=1), drafter_with(depth=1, num_layers=2), drafter_with(num_layers=2)):
        assert gradient_maps(shallow) == ([0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8])


@BOTH
def test_padding_and_batch_composition_change_nothing(layers):
    """Case 38: a batch's sums are the sums of its rows alone, whatever the padding, in any order."""
    drafter = drafter_with(num_layers=layers)
    out, gradients = run(drafter, batch_of(TURNS))
    whole = batch_of(TURNS)
    parts = []
    for b, row in enumerate(TURNS):
        n = len(row)
        parts.append(run(drafter, Batch(*(x[b : b + 1, :n] for x in tensors(whole)))))
    same([out.loss_sum, *gradients], [sum(p.loss_sum for p, _ in parts), *map(sum, zip(*(g for _, g in parts)))])
    same([out.depth_loss], [sum(p.depth_loss for p, _ in parts)])
    order = torch.tensor([2, 0, 3, 1])
    again, shuffled = run(drafter, Batch(*(x[order] for x in tensors(whole))))
    same([again.loss_sum, *shuffled], [out.loss_sum, *gradients])


def packed(batch: Batch, turns: list[list[int]]) -> Batch:
    """The rows of batch_of(turns) end to end."""
    parts = [[x[b, : len(row)] for b, row in enumerate(turns)] for x in tensors(batch)]
    starts = [torch.full((len(row),), sum(map(len, turns[:b]))) for b, row in enumerate(turns)]
    return Batch(*(torch.cat(part)[None] for part in [*parts, starts]))


@BOTH
def test_packed_conversations_are_those_apart(layers):
    """Case 67: rows packed end to end have the loss, gradients and drafts of rows apart; every position that carries
    loss there carries it here."""
    turns = [row for row in TURNS if any(row)] + [[0, 0, 1, 1, 1, 1, 1, 1]]
    drafter, apart = drafter_with(num_layers=layers), batch_of(turns)
    expected, gradients = run(drafter, apart)
    batch = packed(apart, turns)
    out, ours = run(drafter, batch)
    same([out.loss_sum, out.depth_loss, *ours], [expected.loss_sum, expected.depth_loss, *gradients])
    assert out.depth_count.tolist() == expected.depth_count.tolist()
    tokens, at, valid = drafter.chains(batch, K)
    begins = torch.tensor([0, 14, 28, 37])
    found = {int(t): row.tolist() for t, row in zip(at[0], tokens[0])}
    tokens, at, valid = drafter.chains(apart, K)
    assert valid.sum() == len(found) and found == {
        int(begins[b] + t): row.tolist() for b in range(4) for t, row in zip(at[b][valid[b]], tokens[b][valid[b]])}


@BOTH
def test_garbage_behind_the_loss_cannot_leak(layers):
    """Case 41: padding, what follows a row's last supervised token, and final states without a label say nothing."""
    drafter, batch = drafter_with(num_layers=layers), batch_of(TURNS)
    out, gradients = run(drafter, batch)
    last_read = [12, 3, 6, -1]  # the last position whose state or following token any chain reads
    for b, last in enumerate(last_read):
        batch.taps[b, last + 1 :] = 1e4
        batch.ids[b, last + 3 :] = 7
    labelled = torch.cat([batch.turns[:, 1:] > 0, torch.zeros(4, 1, dtype=torch.bool)], dim=1)
    batch.final[~labelled] = torch.nan
    again, other = run(drafter, batch)
    same([again.loss_sum, *other], [out.loss_sum, *gradients])


@BOTH
def test_batch_without_supervised_tokens_gives_zeros(layers):
    """Case 41: loss and gradients are zero, not NaN, and no position is counted."""
    drafter = drafter_with(num_layers=layers)
    out, gradients = run(drafter, batch_of([[0] * 5, [0, 0, 1]]))
    assert out.loss_sum.item() == 0 and out.depth_count.tolist() == [0] * K
    assert all(g.abs().sum() == 0 for g in gradients)


def test_labels_outside_the_draft_vocabulary():
    """Eagle3.md step 6: such a token is a miss that counts; its loss is kept by default and dropped on request."""
    batch = batch_of([[0, 0, 1, 1, 1]])
    batch.ids[0] = torch.tensor([1, 3, 3, 5, 4])  # position 1 predicts 5, inside; position 2 predicts 4, outside
    loss = {}
    for policy in ("keep", "drop"):
        out = drafter_with(outside_vocabulary=policy, depth=1)(batch)
        loss[policy] = out.depth_loss[0].item()
        assert out.depth_count.tolist() == [2] and out.depth_hits[0] <= 1
    batch.turns[0, 4] = 0  # only position 1 is left
    alone = drafter_with(depth=1)(batch).depth_loss[0].item()
    assert loss["drop"] == pytest.approx(alone, rel=1e-9) and loss["keep"] > alone + 1e-3


@BOTH
def test_a_chain_never_sees_another_ones_later_steps(layers):
    """Another token fed to one chain at step 1 changes that chain's later steps and no other's."""
    drafter, batch = drafter_with(num_layers=layers), batch_of([TWELVE])
    at = torch.tensor([[4, 5, 6, 7]])
    first = drafter.fuse(batch.taps)
    positions = torch.arange(12)[None]

    def outputs(fed: torch.Tensor) -> torch.Tensor:  # [step, chain, D]
        memory = UnrollMemory(at, layers=layers)
        steps = unroll(drafter, first, batch.ids.roll(-1, 1), positions, memory, 3, lambda k, _: fed, at)
        return torch.stack([drafter.logits(output)[0] for output in steps])

    one, other = outputs(torch.tensor([[8, 8, 8, 8]])), outputs(torch.tensor([[8, 9, 8, 8]]))
    changed = (one != other).any(-1)
    assert changed.tolist() == [[False] * 4, [False, True, False, False], [False, True, False, False]]


@BOTH
def test_chains_that_go_on_compute_what_they_do_among_all(layers):
    """Chains left out after each step take their own keys of every layer with them, and no other chain's."""
    drafter, batch = drafter_with(num_layers=layers), batch_of([TWELVE])
    at, fed, left = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[8, 9, 10, 11]]), {1: [0, 2, 3], 2: [1, 2], 3: [1]}

    def outputs(thinned: bool) -> list[torch.Tensor]:
        kept = [torch.arange(4)[None]]

        def thin(k: int) -> torch.Tensor:
            index = torch.tensor([left[k]])
            kept.append(kept[-1].gather(1, index))
            return index

        memory = UnrollMemory(at, layers=layers)
        steps = unroll(drafter, drafter.fuse(batch.taps), batch.ids.roll(-1, 1), torch.arange(12)[None], memory, 4,
                       lambda k, _: fed.gather(1, kept[-1]), at, thin if thinned else None)
        return [output[0] for output in steps]

    whole = outputs(thinned=False)
    same(outputs(thinned=True), [whole[0], whole[1][[0, 2, 3]], whole[2][[2, 3]], whole[3][[3]]])


@BOTH
def test_chains_equal_the_slow_reference(layers):
    """Greedy drafts of validation are the reference's own, each chain fed its own tokens."""
    drafter, batch = drafter_with(num_layers=layers), batch_of(TURNS)
    tokens, at, valid = drafter.chains(batch, K)
    slow = SlowEagle3(drafter)
    for b in range(len(TURNS)):
        ids = batch.ids[b].tolist()
        assert at[b][valid[b]].tolist() == loss_positions(batch.turns[b].tolist(), 0)
        for t, drafted in zip(at[b][valid[b]].tolist(), tokens[b].tolist()):
            expected: list[int] = []
            while len(expected) < K:
                output = slow.chain(ids, batch.taps[b], t, [ids[t + 1], *expected])[-1]
                expected.append(int(IDS[slow.logits(output).argmax()]))
            assert drafted == expected


def test_depth_grows_with_the_run():
    """first_depth steps until deepen_at of the run, `depth` afterwards, more where `deepen` says so."""
    drafter = drafter_with(depth=3, first_depth=2, deepen_at=0.5)
    assert [drafter.depth_at(x) for x in (0.0, 0.49, 0.5, 1.0)] == [2, 2, 3, 3]
    assert drafter_with(depth=1, first_depth=2, deepen_at=0.5).depth_at(0.0) == 1
    assert len(drafter(batch_of(TURNS), progress=0.1).depth_loss) == 2
    later = drafter_with(depth=3, deepen_at=0.2, deepen=[(0.6, 5), (0.8, 7)])
    assert [later.depth_at(x) for x in (0.0, 0.2, 0.59, 0.6, 0.8, 1.0)] == [1, 3, 3, 5, 7, 7]
    with pytest.raises(ValueError, match="must rise"):
        Options(deepen_at=0.5, deepen=[(0.4, 5)])


@BOTH
def test_thinned_chains_give_the_whole_loss_on_average(layers):
    """One chain of six goes on from depth 0, by the seed: six outcomes whose mean loss and mean gradient are exactly
    those of all chains, later depths with their own keys included."""
    batch = batch_of([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]])
    assert int(loss_mask(batch.turns, 1).sum()) == 6
    whole, gradients = run(drafter_with(num_layers=layers), batch)
    thinned, outcomes = drafter_with(depth_share=0.01, num_layers=layers), {}
    for seed in range(80):
        out = thinned(batch, 1.0, seed)
        found = torch.autograd.grad(out.loss_sum, [p for p in thinned.parameters() if p.requires_grad])
        assert out.depth_count.tolist()[:2] == [7, 1]
        outcomes[round(out.loss_sum.item(), 6)] = [out.loss_sum.detach(), *found]
    assert len(outcomes) == 6
    same([torch.stack(parts).mean(0) for parts in zip(*outcomes.values())], [whole.loss_sum.detach(), *gradients])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.floats(0.05, 1.0),
       st.integers(0, 9))
def test_drawn_positions_carry_and_weigh_as_all(rows, share, seed):
    """A row keeps ceil(share * n) of its n carrying positions, each once, and their weights add up to n."""
    carries = torch.tensor(rows)
    index, weight = draw(carries, share, torch.Generator().manual_seed(seed))
    for row, at, w in zip(carries, index, weight):
        kept = at[w > 0].tolist()
        n = int(row.sum())
        assert len(kept) == len(set(kept)) and row[kept].all()
        assert share * n - 1e-6 < len(kept) < share * n + 1 or n == len(kept) == 0
        assert float(w.sum()) == pytest.approx(n)


def test_noise_is_seeded_and_off_in_evaluation():
    """Hidden noise is a function of the seed, of training mode only."""
    drafter, batch = drafter_with(hidden_noise=0.2), batch_of(TURNS)
    one, same_seed, other = (drafter(batch, seed=s).loss_sum.item() for s in (1, 1, 2))
    assert one == same_seed != other
    quiet = drafter_with()(batch).loss_sum.item()
    assert drafter.eval()(batch, seed=1).loss_sum.item() == quiet != one


def test_another_hidden_size_than_the_embedding_is_refused():
    """A drafter narrower than the target's embedding would read it wrong."""
    shape = Shape(H, H, 24, 4, 2, 4, 1e-5, "silu", V, D, 64, {"rope_theta": 16.0, "rope_type": "default"}, 6)
    with pytest.raises(ConfigError, match="embedding width 8"):
        Eagle3(Options(), shape, [1, 2, 3], IDS, torch.zeros(V, 8), torch.zeros(V, 8))
