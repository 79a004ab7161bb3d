"""The decoding loop with draft trees: the text of plain decoding, the drafts of a drafter that starts anew."""

import pytest
import torch
from fakes import RuleDrafter, RuleTarget, follows
from scipy.stats import chisquare
from test_decode import ENDS, LIMIT, PROMPTS
from tiny import LAYERS, load_target, plain_model, write_target

from data.sampling import Sampling
from drafters.propose import ChainSession
from drafters.registry import entry, options_of
from drafters.tree import DynamicTree, StaticTree, chain
from eval.decode import Decoder
from eval.metrics import Acceptance

STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)))
TREES = {"static": STATIC, "dynamic": DynamicTree(4, 3, 9), "narrow": DynamicTree(3, 1, 3),
         "wide": DynamicTree(2, 6, 40)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("target"))
    return load_target(folder, "float64", LAYERS), plain_model(folder)


def eagle3(target, **options):
    chosen = options_of("eagle3", {"draft_vocab_size": 40, **options})
    return entry("eagle3").code.build(chosen, target, {i: 1 for i in range(3, 60)}, seed=0).double().eval()


def by_transformers(model, prompt: list[int], **options) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False,
                         eos_token_id=ENDS, pad_token_id=0, **options)
    return out[0, len(prompt):].tolist()


@pytest.mark.parametrize("name,layers", [("static", 1), ("dynamic", 2), ("narrow", 1), ("wide", 1)])
def test_greedy_text_is_plain_text(world, name, layers):
    """Case 59: a real drafter's tree changes no token, in a ragged batch and alone, in equal drafts."""
    target, model = world
    drafter, decoder = eagle3(target, num_layers=layers), Decoder(target, LIMIT, end_ids=ENDS)
    batch = decoder.speculative(PROMPTS, drafter, TREES[name])
    assert [o.tokens for o in batch] == [by_transformers(model, p) for p in PROMPTS]
    alone = [decoder.speculative([p], drafter, TREES[name])[0] for p in PROMPTS]
    assert [(o.tokens, o.drafts, o.rejected) for o in batch] == [(o.tokens, o.drafts, o.rejected) for o in alone]
    assert sum(n for o in batch for _, n in o.drafts) > 0 or name == "narrow"


def test_a_chain_is_a_tree_of_width_one(world):
    """Through branches, tree mask and compaction a dynamic tree of width one drafts and accepts what a chain does."""
    target, _ = world
    drafter, decoder = eagle3(target), Decoder(target, LIMIT, end_ids=ENDS)
    straight, narrow = ([(o.tokens, o.drafts, o.acceptance) for o in decoder.speculative(PROMPTS, drafter, plan)]
                        for plan in (3, DynamicTree(3, 1, 3)))
    assert straight == narrow


@pytest.mark.parametrize("name,layers", [("static", 2), ("dynamic", 1)])
def test_drafts_in_the_loop_are_those_of_a_fresh_session(world, name, layers, monkeypatch):
    """What abandoned branches wrote, and what acceptance moved, leaves no trace in target's or drafter's cache."""
    target, _ = world
    drafter, plan = eagle3(target, num_layers=layers), TREES[name]
    made = []

    def watched(self, given, sample=None):
        draft = ChainSession.propose(self, given, sample)
        made.append(draft)
        return draft

    monkeypatch.setattr(drafter, "session", lambda rows, capacity: type("Watched", (ChainSession,), {
        "propose": watched})(drafter, rows, capacity, layers))
    out = Decoder(target, LIMIT, end_ids=[]).speculative([PROMPTS[0]], drafter, plan)[0]
    monkeypatch.undo()
    whole = torch.tensor([PROMPTS[0] + out.tokens])
    positions = torch.arange(whole.shape[1])[None]
    states = target.forward(whole, positions)
    place = len(PROMPTS[0]) - 1
    assert len(made) == len(out.drafts) > 1
    with torch.inference_mode():
        for draft, (context, accepted) in zip(made, out.drafts):
            assert context == place + 2
            session = drafter.session(1, 64)
            session.observe(states.taps[:, : place + 1], whole[:, 1 : place + 2], positions[:, : place + 1],
                            torch.tensor([place]))
            fresh = session.propose(plan)
            assert torch.equal(fresh.tokens, draft.tokens) and torch.equal(fresh.parents, draft.parents)
            place += accepted + 1


@torch.inference_mode()
def test_tree_nodes_have_the_chains_distributions(world):
    """Behind every node of a drawn tree the drafter's q is that of a chain forced along the node's path."""
    target, _ = world
    drafter = eagle3(target)
    ids = torch.tensor([[5, 9, 14, 20, 7, 33]])
    positions = torch.arange(6)[None]
    taps = target.forward(ids, positions).taps

    def session():
        opened = drafter.session(1, 64)
        opened.observe(taps, ids.roll(-1, 1), positions, torch.tensor([4]))
        return opened

    draft = session().propose(STATIC, lambda q: q.argmax(-1))
    paths = {0: []}
    for i, parent in enumerate(draft.parents[0].tolist()):
        paths[i + 1] = [*paths[parent], int(draft.tokens[0, i])]
    for place in set(draft.parents[0].tolist()):
        forced = iter([*paths[place], 3])
        depth = len(paths[place]) + 1
        chained = session().propose(depth, lambda q, forced=forced: torch.tensor([next(forced)]))
        torch.testing.assert_close(draft.q[0, place], chained.q[0, len(paths[place])])


def ranked(script: list[int], ranks: dict[int, int]) -> tuple[RuleTarget, RuleDrafter]:
    """A target that gives the script behind [1, 2], and a drafter that ranks its next token ranks[place in it]."""
    whole = torch.tensor([1, 2, *script, *[0] * 20])

    def rule(seen, positions):
        for b in range(len(seen)):
            on = torch.equal(seen[b, : int(positions[b, 0]) + 1], whole[: int(positions[b, 0]) + 1])
            assert on or positions.shape[1] == 1  # off the script only on a branch
        return torch.nn.functional.one_hot(whole[positions + 1], 10).double()

    def guess(row, last, step):
        place = last + 1 + step - 2
        order = [t for t in range(10) if t != whole[place + 2]]
        order.insert(ranks.get(place, 0), int(whole[place + 2]))
        q = torch.zeros(10)
        q[torch.tensor(order)] = torch.tensor([0.5**i for i in range(10)])
        return q

    return RuleTarget(rule, [9]), RuleDrafter(guess)


def test_paths_by_hand():
    """The right path goes through second and third guesses; counts are those of the accepted path."""
    script = [3, 4, 5, 6, 7, 8, 3, 4, 5, 9, 6]
    target, drafter = ranked(script, {1: 1, 2: 0, 3: 1, 4: 3, 5: 2})
    out = Decoder(target, 20).speculative([[1, 2]], drafter, STATIC)[0]
    # 3 | 4 second guess, 5 first, 6 second (1, 0, 1), +7 | place 5: 8 third guess, nothing behind it, +3
    # | 4 5 9 all first guesses, +6 is behind the end
    assert out.tokens == [3, 4, 5, 6, 7, 8, 3, 4, 5, 9] and out.finish == "stop"
    assert out.drafts == [(3, 3), (7, 1), (9, 3)] and out.passes == 3 and out.rejected == []
    assert out.acceptance == Acceptance(3, 3, [3, 2, 2], 27)
    assert out.acceptance.rate == 7 / 27 and out.acceptance.mean_length == 1 + 7 / 3
    # Case 54: the second draft ends at a leaf, so it is no evidence of a second level
    assert out.acceptance.refused == [0, 0, 0] and out.acceptance.conditional == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("end", [None, *range(7)])
@pytest.mark.parametrize("limit", range(1, 8))
def test_ends_inside_an_accepted_path(end, limit):
    """Case 22: wherever END and the limit fall in an accepted path of a tree, text and reason are plain decoding's."""
    script = [9 if i == end else 3 + i % 5 for i in range(12)]
    target, drafter = ranked(script, {i: i % 2 for i in range(12)})
    decoder = Decoder(target, limit)
    plain = decoder.plain([[1, 2]])[0]
    for plan in (STATIC, DynamicTree(3, 2, 8)):
        out = decoder.speculative([[1, 2]], drafter, plan)[0]
        assert (out.tokens, out.finish) == (plain.tokens, plain.finish)


P = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.55, 0.25, 0.1, 0.1], [0.05, 0.6, 0.05, 0.3], [0.25, 0.25, 0.4, 0.1]],
                 dtype=torch.float64)


@pytest.mark.parametrize("plan,drawn", [(StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0))), True),
                                        (StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0))), False),
                                        (DynamicTree(2, 3, 6), False)])
def test_sampled_text_follows_the_target(plan, drawn):
    """The joint of the first three tokens of 1500 answers passes chi-square against the exact one."""
    target = RuleTarget(lambda seen, positions: P.log()[seen.gather(1, positions)])
    drafter = RuleDrafter(lambda row, last, step: torch.tensor([0.4, 0.1, 0.1, 0.4]))
    out = Decoder(target, 3, Sampling(temperature=1.0), seed=7).speculative([[2]] * 1500, drafter, plan, drawn)
    exact = P[2][:, None, None] * P[:, :, None] * P[None]
    seen = torch.tensor([o.tokens for o in out]) @ torch.tensor([16, 4, 1])
    counts = torch.bincount(seen, minlength=64).double()
    assert chisquare(counts.numpy(), (exact.flatten() * 1500).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("penalty,plan", [(1.7, 3), (0.6, STATIC), (1.7, DynamicTree(3, 3, 8))])
def test_repetition_penalty_equals_transformers(world, penalty, plan):
    """The penalised greedy text is transformers' own, with every place of a block penalised for its own path."""
    target, model = world
    expected = [by_transformers(model, p, repetition_penalty=penalty) for p in PROMPTS]
    decoder = Decoder(target, LIMIT, Sampling(repetition_penalty=penalty), end_ids=ENDS)
    assert expected != [by_transformers(model, p) for p in PROMPTS]
    assert [o.tokens for o in decoder.plain(PROMPTS)] == expected
    assert [o.tokens for o in decoder.speculative(PROMPTS, eagle3(target), plan)] == expected


@pytest.mark.parametrize("prompts", [PROMPTS, [[3, 9, 14, 20]]])
def test_a_repetition_penalty_where_nothing_is_proposed(world, prompts):
    """Lookup finds nothing in a pass in which no last token of any row occurred before: the target's own token follows,
    penalised, as in plain decoding."""
    target, _ = world
    drafter = entry("lookup").code.build(options_of("lookup", {}), target, {}, 0)
    decoder = Decoder(target, LIMIT, Sampling(repetition_penalty=1.7), end_ids=ENDS)
    out = decoder.speculative(prompts, drafter, 3)
    assert [o.tokens for o in out] == [o.tokens for o in decoder.plain(prompts)]
    assert all(len(o.drafts) < o.passes for o in out)


def test_processed_samples_of_a_real_target(world):
    """At temperature with top-k, min-p and a repetition penalty the first three tokens of 400 answers are distributed
    as transformers' processors say, with a drawn chain and with a tree (each test at 1e-4)."""
    target, model = world
    settings = Sampling(1.3, 6, 1.0, 0.1, 1.4)
    prompt = PROMPTS[0]
    exact: dict[tuple[int, ...], float] = {}

    def spell(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) == 3:
            exact[prefix] = mass
            return
        ids = torch.tensor([prompt + list(prefix)])
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        chain_of = model._get_logits_processor(model._prepare_generation_config(
            None, do_sample=True, temperature=1.3, top_k=6, min_p=0.1, repetition_penalty=1.4)[0],
            input_ids_seq_length=ids.shape[1])
        for token, p in enumerate(chain_of(ids, logits)[0].softmax(-1).tolist()):
            if p > 0:
                spell((*prefix, token), mass * p)

    spell((), 1.0)
    assert sum(exact.values()) == pytest.approx(1) and 4 < len(exact) < 217
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1)))
    for plan, drawn in ((chain(2), True), (tree, True), (DynamicTree(2, 3, 6), False)):
        out = Decoder(target, 3, settings, end_ids=[], seed=5).speculative([prompt] * 400, eagle3(target), plan, drawn)
        assert follows([tuple(o.tokens) for o in out], exact) > 1e-4
