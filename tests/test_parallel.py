"""The parallel drafter's loss against the slow reference in true float64, its mask by hand, its drop, packing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from eagle3_reference import SlowParallel, slow_loss
from test_eagle3 import HEAD, IDS, TURNS, D, H, V, batch_of, packed, run, same, tensors, true_float64  # noqa: F401
from tiny import chat_tokenizer

from data.chat import loss_positions
from drafters import unrolled
from drafters.base import Batch, loss_mask
from drafters.layers import Shape
from drafters.parallel import MaskMemory, Options, ParallelEagle, unused_token
from drafters.registry import options_of
from drafters.unrolled import Chains
from recipes.errors import ConfigError

K, MASK = 4, 7
WHOLE = {"depth_share": 1.0}  # every chain goes on as long as it carries loss
DEPTHS = pytest.mark.parametrize("layers", [1, 3])


def parallel_with(**options) -> ParallelEagle:
    """Random; rotary frequencies 1 and 1/4, exact in float32."""
    torch.manual_seed(0)
    shape = Shape(H, H, 24, 4, 2, 4, 1e-5, "silu", V, D, 64, {"rope_theta": 16.0, "rope_type": "default"}, 6)
    chosen = Options(**{"draft_vocab_size": D, "depth": K, "mask_token": MASK, **WHOLE, **options})
    built = ParallelEagle(chosen, shape, [1, 2, 3], IDS, torch.randn(V, H, dtype=torch.float64), HEAD).double()
    with torch.no_grad():
        for weight in built.parameters():
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() == 2 else 1.0))
    return built


@pytest.mark.parametrize("options", [
    {}, {"num_layers": 2}, {"num_layers": 4}, {"tap_norms": True, "step_decay": 0.5}, {"norm_before_residual": True},
    {"train_head": False, "num_layers": 2}, {"feature_loss": 0.3, "depth": 2}, {"loss": "lk", "lk_eta": 2.0},
    {"step_weights": "prefix", "num_layers": 2}, {"loss": "tv", "labels": "greedy", "outside_vocabulary": "drop"},
])
def test_loss_and_gradients_equal_the_slow_reference(options, monkeypatch):
    """Case 31: loss, hits and positions of each depth and every gradient, those of mask state and mask embedding too,
    equal those of chains that are built one vector at a time."""
    monkeypatch.setattr(unrolled, "LOGITS", {"cpu": 5 * 4 * D})  # parts of five steps
    drafter, batch = parallel_with(**options), batch_of(TURNS)
    total, losses, hits, counts = slow_loss(drafter, batch, HEAD, SlowParallel)
    expected = torch.autograd.grad(total, [p for p in drafter.parameters() if p.requires_grad])
    out, gradients = run(drafter, batch)
    same([out.loss_sum, *gradients], [total, *expected])
    same([out.depth_loss], [torch.tensor(losses, dtype=torch.float64)])
    assert out.depth_hits.tolist() == hits and out.depth_count.tolist() == counts
    assert counts[:2] == [14, 9] and drafter.count(batch) == 14  # by hand
    assert all(g.abs().sum() > 0 for g in gradients)


def visible(starts: list[list[int]], going: list[list[int]], S: int, begin: int) -> torch.Tensor:
    """The attention mask by hand, [queries, keys]: a query's chain starts at t; it sees real columns begin..t and the
    masks of its own chain up to its own depth. Queries: chains of depth 0, then masks; keys: S columns, then masks."""
    width = sum(map(len, starts[1:]))
    chains = [list(range(len(starts[0])))]  # of each depth: which chain of depth 0 each is
    for index in going:
        chains.append([chains[-1][i] for i in index])
    rows, behind = [], [(k, chain) for k, of in enumerate(chains) if k for chain in of]
    for k, of in enumerate(chains):
        for i, chain in enumerate(of):
            real = [begin <= column <= starts[k][i] for column in range(S)]
            rows.append(real + [chain == other and 1 <= depth <= k for depth, other in behind])
    assert len(behind) == width
    return torch.tensor(rows)


def test_the_mask_by_hand():
    """Case 67: what MaskMemory attends over is plain attention under a mask that is written out: real context up to the
    chain's start and from its conversation on, the chain's own masks, nobody else's."""
    g = torch.Generator().manual_seed(3)
    S, starts, going = 9, [[3, 4, 6, 7], [3, 6, 7], [6, 7], [7]], [[0, 2, 3], [1, 2], [1]]
    M = sum(map(len, starts[1:]))
    keys, values = (torch.randn(1, S + M, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    queries = torch.randn(1, 4 + M, 4, 4, generator=g, dtype=torch.float64)
    begins = torch.full((1, S), 2)
    memory = MaskMemory([torch.tensor([at]) for at in starts], [torch.tensor([i]) for i in going], begins, layers=1)
    memory.write(0, keys, values, torch.zeros(1, S + M))
    out = memory.attend(0, queries, torch.zeros(1, 4 + M))
    hidden = ~visible(starts, going, S, 2)
    for head in range(4):
        scores = queries[0, :, head] @ keys[0, :, head // 2].T / 2  # hd is 4
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[0, :, head // 2]
        torch.testing.assert_close(out[0, :, 4 * head : 4 * head + 4], expected, rtol=1e-10, atol=1e-10)


@DEPTHS
def test_what_each_depth_depends_on(layers):
    """Cases 09, 31: a prediction at start t changes with the states up to t and the tokens up to t + 1, at every depth,
    and with nothing behind them: not with the tokens that it predicts."""
    drafter, batch = parallel_with(num_layers=layers), batch_of([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    batch.ids.clamp_(min=MASK + 1)  # no token is the mask

    def predictions(of: Batch) -> torch.Tensor:  # [K, P, D]
        return torch.stack([logits[0] for logits in drafter.chain_logits(of, K)])

    plain, at = predictions(batch), loss_positions(batch.turns[0].tolist(), 0)
    for p in range(10):
        moved, told = replace(batch, taps=batch.taps.clone()), replace(batch, ids=batch.ids.clone())
        moved.taps[0, p] += 1
        told.ids[0, p] = batch.ids[0, p] % 30 + 9
        told.ids[0, p] += told.ids[0, p] == batch.ids[0, p]
        for k in range(K):
            changed = (predictions(moved)[k] != plain[k]).any(-1).tolist()
            assert changed == [p <= t for t in at], (p, k)
            changed = (predictions(told)[k] != plain[k]).any(-1).tolist()
            assert changed == [1 <= p <= t + 1 for t in at], (p, k)


@DEPTHS
def test_packed_conversations_are_those_apart(layers):
    """Case 67: rows packed end to end have the loss, gradients and drafts of rows apart: no attention crosses a border,
    and masks behind a conversation's end stay its own."""
    turns = [row for row in TURNS if any(row)] + [[0, 0, 1, 1, 1, 1, 1, 1]]
    drafter, apart = parallel_with(num_layers=layers), batch_of(turns)
    expected, gradients = run(drafter, apart)
    batch = packed(apart, turns)
    out, ours = run(drafter, batch)
    same([out.loss_sum, out.depth_loss, *ours], [expected.loss_sum, expected.depth_loss, *gradients])
    assert out.depth_count.tolist() == expected.depth_count.tolist()
    tokens, at, _ = drafter.chains(batch, K)
    found = {int(t): row.tolist() for t, row in zip(at[0], tokens[0])}
    tokens, at, valid = drafter.chains(apart, K)
    begins = [0, 14, 28, 37]
    assert valid.sum() == len(found) and found == {
        begins[b] + int(t): row.tolist() for b in range(4) for t, row in zip(at[b][valid[b]], tokens[b][valid[b]])}


@DEPTHS
def test_padding_and_garbage_change_nothing(layers):
    """Cases 38, 41: a batch's sums are those of its rows alone, whatever the padding; what no chain reads says
    nothing."""
    drafter, whole = parallel_with(num_layers=layers), batch_of(TURNS)
    out, gradients = run(drafter, whole)
    parts = [run(drafter, Batch(*(x[b : b + 1, : len(row)] for x in tensors(whole)))) for b, row in enumerate(TURNS)]
    same([out.loss_sum, *gradients], [sum(p.loss_sum for p, _ in parts), *map(sum, zip(*(g for _, g in parts)))])
    for b, last in enumerate([12, 3, 6, -1]):  # the last position whose state or following token any chain reads
        whole.taps[b, last + 1 :] = 1e4
        whole.ids[b, last + 3 :] = 7
    whole.final[~torch.cat([whole.turns[:, 1:] > 0, torch.zeros(4, 1, dtype=torch.bool)], dim=1)] = torch.nan
    again, other = run(drafter, whole)
    same([again.loss_sum, *other], [out.loss_sum, *gradients])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_batch_without_supervised_tokens_gives_zeros(share):
    """Case 41: loss and every gradient are there and zero, so that no rank waits for another one's; nothing is
    counted. A batch without a chain that goes on is likewise one of a single depth."""
    drafter = parallel_with(depth_share=share)
    out, gradients = run(drafter, batch_of([[0] * 5, [0, 0, 1]]))
    assert out.loss_sum.item() == 0 and out.depth_count.tolist() == [0] * K
    assert all(g.abs().sum() == 0 for g in gradients)
    out, gradients = run(drafter, batch_of([[0, 1, 1]]))  # the first answer token predicts the second: no further
    assert out.depth_count.tolist() == [1, 0, 0, 0] and all(g.isfinite().all() for g in gradients)


@DEPTHS
def test_dropped_chains_give_the_whole_loss_on_average(layers):
    """One chain of six goes on from depth 0, by the seed: six outcomes whose mean loss and mean gradient are exactly
    those of all chains."""
    batch = batch_of([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]])
    assert int(loss_mask(batch.turns, 1).sum()) == 6
    whole, gradients = run(parallel_with(num_layers=layers), batch)
    dropping, outcomes = parallel_with(depth_share=0.01, depth_floor=0.0, num_layers=layers), {}
    for seed in range(40):
        out = dropping(batch, 1.0, seed)
        found = torch.autograd.grad(out.loss_sum, [p for p in dropping.parameters() if p.requires_grad])
        assert out.depth_count.tolist()[:2] == [7, 1]
        outcomes[round(out.loss_sum.item(), 6)] = [out.loss_sum.detach(), *found]
    assert len(outcomes) == 6
    same([torch.stack(parts).mean(0) for parts in zip(*outcomes.values())], [whole.loss_sum.detach(), *gradients])


def test_share_falls_to_its_floor():
    """Depth k has r^k of the chains, never fewer than the floor: by hand for 101 answer tokens, of which 100 - k carry
    loss at depth k."""
    batch = batch_of([[0] + [1] * 101])
    drafter = parallel_with(depth=5, depth_share=0.5, depth_floor=0.3)
    chains = Chains(batch, 0.5, 0, 0.3)
    assert [chains.kept(k) for k in (1, 2, 3)] == pytest.approx([0.5, 0.6, 1.0])  # of all: 0.5, 0.3, 0.3
    counts = drafter(batch).depth_count.tolist()
    assert counts[0] == 100 and counts[1] == 50 and 28 <= counts[2] <= 30 and counts[3] <= counts[2]
    levels, going = drafter.dropped(batch, 0)
    for k, index in enumerate(going, start=1):
        assert torch.equal(levels[k].at, levels[k - 1].at.gather(1, index))  # nested
        assert float(levels[k].scale.sum()) == pytest.approx(100 - k, abs=8)  # as all of them weigh


def test_chains_equal_the_slow_reference():
    """Greedy drafts of validation are the reference's own, longer than what was trained too."""
    drafter, batch = parallel_with(num_layers=2), batch_of(TURNS)
    tokens, at, valid = drafter.chains(batch, K + 2)
    slow = SlowParallel(drafter)
    for b in range(len(TURNS)):
        ids = batch.ids[b].tolist()
        assert at[b][valid[b]].tolist() == loss_positions(batch.turns[b].tolist(), 0)
        for t, drafted in zip(at[b][valid[b]].tolist(), tokens[b].tolist()):
            outputs = slow.chain(ids, batch.taps[b], t, [ids[t + 1]] * (K + 2))
            assert drafted == [int(IDS[slow.logits(output).argmax()]) for output in outputs]


def test_one_forward_pass(monkeypatch):
    """Training, validation and a draft of any length are one pass through the layers each."""
    drafter, batch, passes = parallel_with(num_layers=2), batch_of(TURNS), []
    step = ParallelEagle.step
    monkeypatch.setattr(ParallelEagle, "step", lambda self, *args: passes.append(1) or step(self, *args))
    drafter(batch)
    drafter.chains(batch, 6)
    session = drafter.session(4, 32)
    session.observe(batch.taps, batch.ids.roll(-1, 1), torch.arange(14).expand(4, 14), torch.tensor([3, 4, 5, 6]))
    session.propose(6)
    assert len(passes) == 3


def test_noise_is_seeded_and_of_real_states_alone():
    """Hidden noise is a function of the seed, of training mode only, and leaves the mask state as it is."""
    drafter, batch = parallel_with(hidden_noise=0.2), batch_of(TURNS)
    one, again, other = (drafter(batch, seed=s).loss_sum.item() for s in (1, 1, 2))
    assert one == again != other
    quiet = parallel_with()(batch).loss_sum.item()
    assert drafter.eval()(batch, seed=1).loss_sum.item() == quiet != one


def tokenizer_and(vocab_size: int, counts: set[int] = frozenset()):
    target = SimpleNamespace(tokenizer=chat_tokenizer(), vocab_size=vocab_size, end_ids=[2])
    return target, dict.fromkeys(counts, 1)


def test_the_mask_token_is_one_that_no_text_has():
    """A row of the embedding behind the tokenizer's ids; else a special token that the chat template does not use; else
    one that the traces do not count; else an error that names the option."""
    size = len(chat_tokenizer())
    target, counts = tokenizer_and(size + 3)
    assert unused_token(target, counts) == size + 2
    target, counts = tokenizer_and(size)
    target.tokenizer.add_special_tokens({"pad_token": "<pad>"})
    target.tokenizer.add_tokens(["<spare>"], special_tokens=True)
    target.vocab_size = len(target.tokenizer)
    assert target.tokenizer.decode([unused_token(target, counts)]) == "<spare>"
    target, counts = tokenizer_and(size, set(range(size)) - {9, 20})
    assert unused_token(target, counts) == 20
    with pytest.raises(ConfigError, match="drafter.options.mask_token = -1: every token"):
        unused_token(*tokenizer_and(size, set(range(size))))


@pytest.mark.parametrize("options, message", [
    ({"depth": 1}, "depth"), ({"num_layers": 5}, "num_layers"), ({"mask_token": -2}, "mask_token"),
    ({"feedback": "post_norm"}, "unknown key feedback"), ({"first_depth": 2}, "unknown key first_depth"),
    ({"loss": "reverse_kl", "labels": "token"}, "reverse_kl is infinite")])
def test_options_that_make_no_sense(options, message):
    """What only a recursion has, and sizes that no engine loads, are refused by name."""
    with pytest.raises(ConfigError, match=message):
        options_of("parallel", options)


@pytest.mark.parametrize("token", [-1, V])
def test_a_mask_token_that_the_target_does_not_have(token):
    with pytest.raises(ConfigError, match=f"mask_token = {token}: must be a token of the target, 0..{V - 1}"):
        parallel_with(mask_token=token)
