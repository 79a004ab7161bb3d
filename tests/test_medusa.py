"""Medusa's loss, drafts and sessions against the definitions, in true float64, and what must not leak into them."""

from dataclasses import replace

import pytest
import torch
from eagle3_reference import step_loss
from tiny import load_target
from tiny_medusa import medusa_run

from data.batching import collate
from data.chat import loss_positions
from data.store import TraceReader
from drafters import unrolled
from drafters.base import Batch
from drafters.medusa import Medusa, Options, Shape
from drafters.registry import FINAL, entry, options_of
from drafters.tree import DynamicTree, StaticTree, chain
from eval.adapt import measured_choice, rank_accuracies
from eval.choice import search_tree
from eval.decode import Decoder
from eval.replay import replay
from recipes.errors import ConfigError
from recipes.schema import Eval, Tree

V, H, D, K = 40, 16, 12, 3
IDS = torch.tensor([2, 3, 5, 6, 9, 14, 15, 20, 21, 30, 33, 39])
HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TURNS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2],  # two turns, the second to the row's end
    [0, 1, 1, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0],  # a turn of one token carries nothing
    [0, 0, 1, 1, 1, 2, 2, 2, 0],  # turns that touch; shorter row
    [0, 0, 0, 0],  # nothing at all
]
SHARED = {"projection": "shared"}


@pytest.fixture(autouse=True)
def true_float64(monkeypatch):
    """Softmax is computed in float32 on purpose; here it keeps float64, so that equal means equal."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def drafter_with(**options) -> Medusa:
    torch.manual_seed(0)
    built = Medusa(Options(**{"draft_vocab_size": D, "heads": K, **options}), Shape(H, V, D, 6), IDS, HEAD).double()
    with torch.no_grad():
        for weight in built.parameters():
            weight.copy_(torch.randn_like(weight) * 0.4)
    return built


def batch_of(turns: list[list[int]], seed: int = 1) -> Batch:
    """Random rows, padded at the end; no taps, which are not read."""
    g = torch.Generator().manual_seed(seed)
    B, S = len(turns), max(map(len, turns))
    batch = Batch(torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, 0),
                  torch.zeros(B, S, H, dtype=torch.float64))
    for b, row in enumerate(turns):
        n = len(row)
        batch.ids[b, :n] = torch.randint(0, V, (n,), generator=g)
        batch.turns[b, :n] = torch.tensor(row)
        batch.final[b, :n] = torch.randn(n, H, generator=g, dtype=torch.float64)
    return batch


def slow_logits(drafter: Medusa, k: int, state: torch.Tensor) -> torch.Tensor:
    """Head k of one state [H], from the definition."""
    for j in range(drafter.options.num_layers):
        z = (drafter.get_parameter(f"blocks.{k}.layers.{j}.weight") @ state
             + drafter.get_parameter(f"blocks.{k}.layers.{j}.bias"))
        state = state + z / (1 + torch.exp(-z))
    shared = drafter.options.projection == "shared"
    return (HEAD[IDS] if shared else drafter.get_parameter(f"lm_heads.{k}.weight")) @ state


def slow_loss(drafter: Medusa, batch: Batch) -> tuple[torch.Tensor, list[float], list[int], list[int]]:
    """(weighted sum, then of each head: loss sum, hits, positions), position by position and head by head."""
    options, ids = drafter.options, IDS.tolist()
    total, losses, hits, counts = torch.zeros((), dtype=torch.float64), [0.0] * K, [0] * K, [0] * K
    for b, turns in enumerate(batch.turns.tolist()):
        for t in loss_positions(turns, 0):
            reached = 1.0
            for k in range(K):
                if t not in loss_positions(turns, k):
                    continue
                log_q = slow_logits(drafter, k, batch.final[b, t]).log_softmax(-1)
                label = int(batch.ids[b, t + 2 + k])
                loss, accepted = step_loss(options, log_q, HEAD, batch.final[b, t + 1 + k], ids, label)
                if options.outside_vocabulary == "drop" and label not in ids:
                    loss = loss * 0
                total = total + options.step_decay**k * (reached if options.step_weights == "prefix" else 1.0) * loss
                reached *= accepted
                losses[k] += loss.item()
                hits[k] += ids[int(log_q.argmax())] == label
                counts[k] += 1
    return total, losses, hits, counts


def same(ours, expected) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [1000, 5], ids=["one part", "parts of five"])
@pytest.mark.parametrize("options", [
    {}, SHARED, {"num_layers": 2}, SHARED | {"num_layers": 3, "labels": "token"}, {"labels": "token"},
    {"labels": "greedy", "outside_vocabulary": "drop"}, {"loss": "reverse_kl", "step_decay": 0.5}, {"loss": "tv"},
    {"loss": "lk", "lk_eta": 2.0, "labels": "token"}, SHARED | {"loss": "lk"}, {"step_weights": "prefix"}])
def test_loss_and_gradients_equal_the_definition(options, rows, monkeypatch):
    """Case 31: loss, hits and positions of each head and every gradient, whether all logits are held or a part."""
    monkeypatch.setattr(unrolled, "LOGITS", {"cpu": rows * 4 * D})
    drafter, batch = drafter_with(**options), batch_of(TURNS)
    total, losses, hits, counts = slow_loss(drafter, batch)
    expected = torch.autograd.grad(total, list(drafter.parameters()))
    out = drafter(batch)
    gradients = torch.autograd.grad(out.loss_sum, list(drafter.parameters()))
    same([out.loss_sum, *gradients], [total, *expected])
    same([out.depth_loss], [torch.tensor(losses, dtype=torch.float64)])
    assert out.depth_hits.tolist() == hits and out.depth_count.tolist() == counts
    assert counts == [14, 9, 4] and drafter.count(batch) == 14  # by hand
    if "labels" not in options:  # a head may have no label inside the vocabulary
        assert all(g.abs().sum() > 0 for g in gradients)


def test_a_head_learns_where_its_own_label_is_supervised():
    """Cases 09, 31: head k at t predicts x[t+2+k], and gets a gradient from t if and only if x[t+1] ... x[t+2+k] are of
    one turn: the last prompt position included, nothing across a turn's end."""
    drafter, batch = drafter_with(), batch_of([TURNS[0]])
    batch.ids = IDS[batch.ids % D]  # every label is inside the vocabulary
    batch.final.requires_grad_()
    for k in range(K):
        state = torch.autograd.grad(only_head(drafter, batch, k), batch.final)[0]
        reached = state[0].abs().sum(-1).nonzero()[:, 0].tolist()
        assert reached == ([2, 3, 4, 5, 9, 10, 11], [2, 3, 4, 9, 10], [2, 3, 9])[k]


def only_head(drafter: Medusa, batch: Batch, k: int) -> torch.Tensor:
    """The loss of one head, by labels, so that the teacher's states have no gradient."""
    one = drafter_with(labels="token", step_decay=1.0)
    one.load_state_dict(drafter.state_dict())
    for i, block in enumerate(one.blocks):
        if i != k:  # what another head reads is cut off
            block.register_forward_hook(lambda module, args, out: out.detach())
    return one(batch).loss_sum


def test_packed_conversations_are_learnt_as_apart():
    """Case 67: end to end in one row, with no label across a border, the sum is that of separate rows."""
    drafter = drafter_with()
    turns = [[1] * 6, [0, 2, 2, 2], [0, 0, 1, 1, 1, 1]]
    apart = [batch_of([row], seed) for seed, row in enumerate(turns)]
    begins = [0, 6, 10]
    packed = Batch(*(torch.cat([getattr(b, name) for b in apart], dim=1) for name in ("ids", "turns", "taps", "final")),
                   torch.tensor([[begin for begin, row in zip(begins, turns) for _ in row]]))
    for begin in begins:
        packed.turns[0, begin] = 0  # as collate does: only another conversation could predict it
    for one in apart:
        one.turns[0, 0] = 0
    outs = [drafter(b) for b in apart]
    found = drafter(packed)
    same([found.loss_sum], [sum(o.loss_sum for o in outs)])
    assert found.depth_count.tolist() == sum(o.depth_count for o in outs).tolist()
    assert drafter.count(packed) == sum(drafter.count(b) for b in apart)


def test_a_batch_without_labels_changes_nothing():
    """Case 41: zero loss and zero gradients for every parameter, no NaN."""
    drafter = drafter_with()
    out = drafter(batch_of([TURNS[3]]))
    assert out.loss_sum.item() == 0 and not out.depth_count.any()
    assert not any(g.any() for g in torch.autograd.grad(out.loss_sum, list(drafter.parameters())))


def test_garbage_where_nothing_is_learnt_does_not_leak():
    """Case 41: NaN in states that no position reads changes neither loss nor gradient."""
    drafter, batch = drafter_with(), batch_of(TURNS)
    read = torch.zeros_like(batch.turns, dtype=torch.bool)
    for b, turns in enumerate(batch.turns.tolist()):
        for t in loss_positions(turns, 0):
            read[b, t : t + 1 + K] = True  # its own state, and those that teach
    assert not read.all()
    fouled = replace(batch, final=torch.where(read[..., None], batch.final, torch.nan))
    (a, b), names = (drafter(x).loss_sum for x in (batch, fouled)), list(drafter.parameters())
    same([a, *torch.autograd.grad(a, names)], [b, *torch.autograd.grad(b, names)])


def test_fresh_heads_begin_as_the_targets(run):
    """Blocks begin as the identity: every head gives the target's own logits; frozen are the target's tables."""
    drafter = entry("medusa").code.build(options_of("medusa", {"heads": 3}), run.target, {}, 0)
    state = torch.randn(2, 3, 64, dtype=torch.float32)
    for logits in drafter.guesses(state):
        torch.testing.assert_close(logits, run.target.head(state))
    names = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert names == {f"blocks.{i}.layers.0.{part}" for i in range(3) for part in ("weight", "bias")} | {
        f"lm_heads.{i}.weight" for i in range(3)}  # case 62
    assert drafter.tensors().keys() == names | {"d2t", "t2d"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return medusa_run(tmp_path_factory.mktemp("medusa"))


PROMPT = [5, 9, 20]


def test_perfect_heads_are_perfect_in_training_and_in_the_loop(run, monkeypatch):
    """Case 09: heads that name the counting target's tokens hit every label inside the vocabulary in training, replay
    all of them in validation, and the loop accepts the same; heads off by one hit and accept nothing."""
    monkeypatch.undo()
    row = TraceReader(run.run / "traces")[0]
    for shift, right in ((0, True), (1, False)):
        drafter = replaced(run.drafter, shift)
        out = drafter(collate([row]))
        inside = drafter.t2d[row.ids]
        expected = [int(sum(inside[t + 2 + k] for t in loss_positions(row.turns.tolist(), k))) for k in range(3)]
        assert out.depth_hits.tolist() == (expected if right else [0, 0, 0])
        replayed = replay(drafter, TraceReader(run.run / "traces"), [0], 3, torch.device("cpu"), torch.float32)
        out = Decoder(run.target, len(row.ids) - 3).speculative([row.ids[:3].tolist()], drafter, 3)[0]
        assert replayed.accepted == out.acceptance.accepted and replayed.drafts == out.acceptance.drafts
        assert (out.acceptance.mean_length > 2) == right and (out.acceptance.rate > 0) == right


def replaced(drafter: Medusa, shift: int) -> Medusa:
    """The drafter with projections that name a token further on."""
    other = Medusa(drafter.options, drafter.shape, drafter.draft_ids, torch.eye(64))
    other.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        for k, head in enumerate(other.lm_heads):
            head.weight.copy_(torch.eye(64).roll(2 + k + shift, 0)[drafter.draft_ids])
    return other.eval()


def test_session_drafts_are_those_of_the_training_states(tmp_path):
    """Cases 12, 09: from every position, the chain that validation replays is the session's own draft; also in a ragged
    batch whose rows are dropped and joined."""
    torch.manual_seed(3)
    drafter, batch = drafter_with().eval(), batch_of([[0] + [1] * 9] * 3)
    tokens, at, valid = drafter.chains(batch, K)
    assert valid.all()
    session, other = drafter.session(2, 20), drafter.session(1, 20)
    for column, t in enumerate(at[0].tolist()):
        seen = (torch.full((2, 4), t), torch.arange(4).expand(2, 4))
        states = batch.final[:, : t + 2]  # what lies behind the last valid one is ignored
        session.observe(states[:2], *seen, torch.tensor([t, t]))
        other.observe(states[2:], seen[0][:1], seen[1][:1], torch.tensor([t]))
        session.join(other)
        draft = session.propose(K)
        assert draft.tokens.equal(tokens[:, column]) and draft.parents is None
        session.keep(torch.tensor([2, 0]))
        assert session.propose(K).tokens.equal(tokens[[2, 0], column])
        session.keep(torch.tensor([1, 0]))


def test_a_level_guesses_the_same_behind_every_node():
    """A static tree takes head k's best tokens at level k, whatever node they follow; a dynamic one ranks paths by
    their product."""
    drafter, batch = drafter_with().eval(), batch_of([[1] * 4])
    state = batch.final[:, 1]
    session = drafter.session(1, 20)
    session.observe(batch.final, batch.ids, batch.ids, torch.tensor([1]))
    first, second = (IDS[slow_logits(drafter, k, state[0]).topk(3).indices].tolist() for k in range(2))
    draft = session.propose(StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0))))
    assert draft.tokens[0].tolist() == [first[0], first[1], second[0], second[1], second[0]]
    chances = [slow_logits(drafter, k, state[0]).softmax(-1).topk(3).values for k in range(2)]
    paths = sorted([((i,), chances[0][i].item()) for i in range(3)]
                   + [((i, j), (chances[0][i] * chances[1][j]).item()) for i in range(3) for j in range(3)],
                   key=lambda pair: -pair[1])[:6]
    draft = session.propose(DynamicTree(2, 3, 6))
    expected = sorted(first[p[0]] if len(p) == 1 else second[p[1]] for p, _ in paths)
    assert sorted(draft.tokens[0].tolist()) == expected


def test_the_tree_of_measured_accuracies(run):
    """The tree that is searched for a budget from what the heads reached: text stays, and it never needs more passes
    than the chain of so many levels (Cai et al. 2024, appendix C)."""
    tree = search_tree([[0.9, 0.05, 0.02], [0.7, 0.2, 0.05], [0.5, 0.2, 0.1]], 8)
    assert tree.nodes == 8 and tree.depth == 3 and not tree.narrow
    decoder = Decoder(run.target, 12)
    plain, grown = decoder.plain([PROMPT, [7, 8]]), decoder.speculative([PROMPT, [7, 8]], run.drafter, tree)
    straight = decoder.speculative([PROMPT, [7, 8]], run.drafter, 3)
    assert [o.tokens for o in plain] == [o.tokens for o in grown] == [o.tokens for o in straight]
    assert all(a.passes <= b.passes < len(b.tokens) - 1 for a, b in zip(grown, straight))


def test_the_tree_is_searched_from_measured_ranks(run, monkeypatch):
    """What `eval.choose: tree` does: perfect heads are right with their first guess at every level, so that whatever is
    chosen for the budget begins with the chain; the chosen plan can be drafted."""
    monkeypatch.undo()
    plain = Decoder(run.target, 10).plain([PROMPT, [7, 8]])
    ranks = rank_accuracies(run.target, run.drafter, [PROMPT, [7, 8]], plain, 3, 2)
    assert ranks == [[1.0, 0.0]] * 3
    assert search_tree(ranks, 8) == chain(3)
    found = measured_choice(run.target, run.drafter, [PROMPT], Eval(draft_length=3, speed_tokens=8, choose="tree",
                                                                    tree=Tree(top_k=2, total=6)))
    assert found.plan is None or found.plan.depth <= 3
    assert found.expected == 1.0 or found.expected == 1 + found.plan.depth


def test_fewer_distinct_tokens_than_the_draft_vocabulary(run):
    """Case 57: five tokens seen, sixteen wanted: sixteen distinct ids, end and special ones among them, the same again,
    and a head for each."""
    made = [entry("medusa").code.build(options_of("medusa", {"draft_vocab_size": 16}), run.target,
                                       {30: 5, 31: 4, 32: 3, 33: 2, 34: 1}, seed) for seed in (0, 1)]
    ids = made[0].draft_ids.tolist()
    assert ids == sorted(set(ids)) == made[1].draft_ids.tolist() and len(ids) == 16
    assert {0, 1, 2, 30, 31, 32, 33, 34} <= set(ids) and made[0].lm_heads[3].weight.shape == (16, 64)


def test_what_heads_cannot_do_is_refused(run):
    with pytest.raises(ConfigError, match="drafter.options .medusa.*heads"):
        options_of("medusa", {"heads": 6})
    with pytest.raises(ConfigError, match="reverse_kl is infinite"):
        options_of("medusa", {"loss": "reverse_kl", "labels": "token"})
    with pytest.raises(ValueError, match="4 levels: the drafter has 3 heads"):
        Decoder(run.target, 4).speculative([PROMPT], run.drafter, 4)
    with pytest.raises(ValueError, match="4 tokens: the drafter has 3 heads"):
        run.drafter.chains(batch_of([TURNS[0]]), 4)
    with pytest.raises(ConfigError, match="draft_vocab_size = 65: must be within 1..64"):
        entry("medusa").code.build(options_of("medusa", {"draft_vocab_size": 65}), run.target, {}, 0)


def test_flops_by_hand():
    """Blocks of n squares (the first needs no gradient of its input), heads, the frozen head over each taught state."""
    worked = [10.0, 6.0, 3.0]
    own, shared = drafter_with(num_layers=2), drafter_with(**SHARED, labels="token")
    assert own.flops(99.0, worked) == 19 * (2 * H * H * 5 + 6 * H * D) + 2 * H * D * 10
    assert shared.flops(99.0, worked) == 19 * (2 * H * H * 2 + 4 * H * D)


def test_the_target_shows_its_final_state(run):
    """What the session observes is the state behind the final norm, once, and no layer is tapped."""
    target = load_target(run.model, "float32", FINAL)
    states = target.forward(torch.tensor([PROMPT]), torch.arange(3)[None])
    assert states.taps is states.final and target.layers == [] and not target.hooks
    target.tap([1, 2])
    states = target.forward(torch.tensor([PROMPT]), torch.arange(3)[None])
    assert states.taps.shape[-1] == 2 * states.final.shape[-1]
