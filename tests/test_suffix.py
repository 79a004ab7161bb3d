"""Suffix decoding in the loop: what it drafts from, what stays out of it, and where earlier outputs come from."""

import json

import numpy as np
import pytest
import torch
from fakes import RuleTarget
from tiny import conversations, load_target, write_target, write_traces

from drafters.automaton import Automaton
from drafters.outputs import Output, digest_of, earlier_outputs
from drafters.registry import options_of
from drafters.suffix import Corpus, Suffix, build
from drafters.tree import DynamicTree, StaticTree, chain
from eval.decode import Decoder
from recipes.errors import ConfigError

pytest.importorskip("numba")

V, LIMIT = 40, 16


def singing() -> RuleTarget:
    """x is followed by x + 7 mod V: no answer of these lengths repeats, and prompts that end alike go on alike."""
    def rule(seen, positions):
        return torch.nn.functional.one_hot((seen.gather(1, positions) + 7) % V, V).double() * 50

    return RuleTarget(rule)


def drafter_of(*outputs: list[int], end_ids: tuple[int, ...] = (), **options) -> Suffix:
    held = [Output(np.array(tokens, np.int32)) for tokens in outputs]
    return Suffix(options_of("suffix", options), V, list(end_ids), held)


def passes(drafter: Suffix, *prompts: list[int], plan=8, slots: int = 0, limit: int = LIMIT) -> list[int]:
    """Target passes of each answer, which are plain decoding's."""
    decoder = Decoder(singing(), limit, end_ids=[], slots=slots)
    plain = Decoder(singing(), limit, end_ids=[]).plain(list(prompts))
    found = decoder.speculative(list(prompts), drafter, plan)
    assert [o.tokens for o in found] == [o.tokens for o in plain]
    return [o.passes for o in found]


def test_an_answer_helps_the_next_one():
    """The second prompt leads to the same song: the corpus has it, so far fewer passes are needed. Fixed, it has
    not."""
    first, second = [7, 1], [9, 3, 1]
    drafter = drafter_of()
    assert passes(drafter, first) == [LIMIT - 1]
    assert passes(drafter, second)[0] <= 5
    fixed = drafter_of(grow=False)
    assert passes(fixed, first) + passes(fixed, second) == [LIMIT - 1] * 2
    assert not fixed.corpus.held and len(drafter.corpus.held) == 2


def test_a_seeded_corpus_helps_the_first_one():
    song = Decoder(singing(), LIMIT, end_ids=[]).plain([[7, 1]])[0].tokens
    assert passes(drafter_of(song, grow=False), [7, 1])[0] <= 5
    assert passes(drafter_of(song, grow=False, corpus_tokens=0), [7, 1]) == [LIMIT - 1]
    assert passes(drafter_of(song, grow=False, factor=0.05), [7, 1]) == [LIMIT - 1]  # a run of 20 would draft


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_no_prompt_meets_its_own_earlier_answer(slots):
    """A measurement decodes a prompt again, also beside itself: its own answer is not in the corpus then, unless asked
    for, and the others' stay."""
    prompt = [7, 1]
    drafter = drafter_of()
    once = passes(drafter, prompt)
    assert passes(drafter, prompt, prompt, prompt, slots=slots) == once * 3
    assert passes(drafter, prompt) == once and len(drafter.corpus.held) == 1
    known = drafter_of(repeats=True)
    assert passes(known, prompt) == once and passes(known, prompt)[0] <= 5
    assert len(known.corpus.held) == 2


def test_order_decides_what_is_known():
    """Case 59: texts do not depend on the order of prompts, passes do; with a fixed corpus neither does."""
    prompts = [[7, 1], [9, 3, 1], [4, 5], [8, 1]]
    forwards, backwards = (passes(drafter_of(), *order, slots=1) for order in (prompts, prompts[::-1]))
    assert forwards[0] > backwards[::-1][0] and forwards[3] < backwards[::-1][3]
    fixed = [passes(drafter_of(grow=False), *order, slots=1) for order in (prompts, prompts[::-1])]
    assert fixed[0] == fixed[1][::-1]
    assert passes(drafter_of(), *prompts, slots=1) == forwards, "the same run twice is the same"


def test_an_answer_ends_where_it_ended():
    """Case 22: what was accepted behind an end token is no part of the answer that is remembered."""
    song = Decoder(singing(), LIMIT, end_ids=[]).plain([[7, 1]])[0].tokens
    end = song[4]
    drafter = drafter_of(song, end_ids=(end,))
    out = Decoder(singing(), LIMIT, end_ids=[end]).speculative([[9, 3, 1]], drafter, 8)[0]
    assert out.tokens == song[:5] and drafter.corpus.held[-1].tokens.tolist() == song[:5]


def test_the_oldest_outputs_are_dropped():
    """Never more tokens than the recipe says, and the index is that of what is left, its memory bounded too."""
    g = np.random.default_rng(1)
    corpus, biggest = Corpus(12, 60), 0
    for _ in range(200):
        corpus.add(Output(g.integers(0, 5, int(g.integers(1, 25))).astype(np.int32)))
        assert corpus.tokens == sum(len(output.tokens) for output in corpus.held) <= 60
        biggest = max(biggest, corpus.index.nbytes)
    fresh = Automaton(12)
    for output in corpus.held:
        fresh.begin()
        fresh.extend(output.tokens)
    for run in g.integers(0, 5, (40, 3)).astype(np.int32):
        asked = run, 1, 2.0, 6, 2, 4, 0.05
        assert corpus.index.guess(*asked).score == pytest.approx(fresh.guess(*asked).score)
    assert biggest < 60_000 and corpus.index.read <= 121
    large = Corpus(48, 4000)
    for _ in range(1000):
        large.add(Output(g.integers(0, 50, 20).astype(np.int32)))
        assert large.index.nbytes <= 350 * 4000
    corpus.add(Output(np.arange(100, dtype=np.int32)))
    assert [output.tokens.tolist() for output in corpus.held] == [list(range(60))]


def test_a_request_is_its_own_corpus():
    """A prompt that holds the answer drafts it, by itself."""
    song = Decoder(singing(), LIMIT, end_ids=[]).plain([[7, 1]])[0].tokens
    assert passes(drafter_of(corpus_tokens=0), [*song, 7, 1])[0] <= 6


def test_trees_hold_what_chains_miss():
    """Two songs go on differently behind the same tokens: a tree has both, in one pass."""
    song = Decoder(singing(), LIMIT, end_ids=[]).plain([[7, 1]])[0].tokens
    other = [1, *song[:3], *[30 + i % 3 for i in range(8)]]
    drafter = drafter_of([1, *song], other, other, grow=False, factor=8.0, min_probability=0.05)
    straight, branched = (passes(drafter, [7, 1], plan=plan, limit=15)[0] for plan in (6, DynamicTree(6, 2, 12)))
    assert branched < straight


def test_plans_that_it_cannot_follow_are_refused():
    for plan in (StaticTree(((0,), (1,))), chain(3, 0.5)):
        with pytest.raises(ValueError, match="suffix decoding proposes chains without a confidence, and dynamic trees"):
            passes(drafter_of(), [7, 1], plan=plan)
    with pytest.raises(ConfigError, match="shortest = 9 is more than longest = 8"):
        options_of("suffix", {"shortest": 9, "longest": 8})


def test_the_report_is_told_what_acceptance_depends_on():
    assert "began with 1 earlier outputs (3 tokens) and grew" in drafter_of([1, 2, 3]).remarks()[0]
    assert drafter_of([1, 2, 3], grow=False).remarks() == ["suffix: the corpus is fixed: 1 earlier outputs (3 tokens)"]
    assert drafter_of(corpus_tokens=0).remarks() == ["suffix: drafts from each request alone"]
    assert drafter_of([1, 2]).meta() != drafter_of([1, 3]).meta(), "an evaluation is not taken for another's"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("target")), "float32")


def test_outputs_of_traces(tmp_path, target):
    """The answers of a trace folder, each with the digest of its prompt; rows that were given are none of them."""
    rows = conversations(5, 1)
    rows[1].off_policy = True
    write_traces(tmp_path, target.section.model, rows)
    for place in (tmp_path, tmp_path / "traces"):
        found = earlier_outputs(str(place), target, "drafter.options.outputs")
        asked = [(row.ids[: row.turns.index(1)], row.ids[row.turns.index(1) :]) for row in rows if not row.off_policy]
        assert [(o.prompt, o.tokens.tolist()) for o in found] == [(digest_of(a), b) for a, b in asked]
    drafter = build(options_of("suffix", {"outputs": str(tmp_path)}), target, {}, 0)
    assert drafter.begun["outputs"] == 5 and drafter.begun["tokens"] == sum(len(b) for _, b in asked)


@pytest.mark.parametrize("damage,message", [
    (lambda t: (t / "manifest.json").write_text("{"), "manifest.json: cannot be read"),
    (lambda t: rewrite(t / "manifest.json", format="other"), "no finished trace folder of format"),
    (lambda t: rewrite(t / "manifest.json", target={"tokenizer": "x"}), "traced with another tokenizer"),
    (lambda t: (t / "shards" / "shard-00000.safetensors").write_bytes(b"x"), "cannot be read as a shard"),
    (lambda t: rewrite(t / "shards" / "shard-00000.json", bytes=1), "not as its list says"),
    (lambda t: (t / "shards" / "shard-00000.json").unlink(), "shard-00000.json: cannot be read"),
])
def test_damaged_traces_are_refused(tmp_path, target, damage, message):
    """Case 35: no short, torn or foreign folder is taken for earlier outputs."""
    traces = write_traces(tmp_path, target.section.model, conversations(2, 1))
    damage(traces)
    with pytest.raises(ConfigError, match=f"^drafter.options.outputs.*{message}"):
        earlier_outputs(str(tmp_path), target, "drafter.options.outputs")


def rewrite(path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_outputs_of_lines(tmp_path, target):
    path = tmp_path / "earlier.jsonl"
    path.write_text('{"ids": [5, 6, 7]}\n\n{"answer": "abc", "id": "x"}\n{"text": "<|im_end|>"}\n')
    found = earlier_outputs(str(path), target, "drafter.options.outputs")
    assert [o.tokens.tolist() for o in found] == [[5, 6, 7], [3, 4, 5], [2]] and {o.prompt for o in found} == {b""}


@pytest.mark.parametrize("line,message", [
    ("[", "line 2: not JSON"), ("[1]", "line 2: must be an object"), ('{"ids": "5"}', "line 2: needs ids"),
    ('{"ids": [1.5]}', "line 2: needs ids"), ('{"prompt": "x"}', "line 2: needs ids"),
    ('{"ids": [99]}', "line 2: ids outside 0 to 63"), ('{"ids": [-1]}', "line 2: ids outside 0 to 63"),
    ('{"ids": [99999999999999999999999]}', "line 2: needs ids"),
])
def test_lines_that_are_no_outputs_are_named(tmp_path, target, line, message):
    path = tmp_path / "earlier.jsonl"
    path.write_text('{"ids": [5]}\n' + line)
    with pytest.raises(ConfigError, match=f"earlier.jsonl: {message}"):
        earlier_outputs(str(path), target, "drafter.options.outputs")


def test_a_place_without_outputs_is_named(tmp_path, target):
    with pytest.raises(ConfigError, match="drafter.options.outputs = .*nowhere: no trace folder"):
        build(options_of("suffix", {"outputs": str(tmp_path / "nowhere")}), target, {}, 0)
