"""The two drafters that need no training: what they propose, and the loop against transformers' own at equal drafts."""

import pytest
import torch
from test_tree_decode import STATIC
from tiny import LAYERS, load_target, plain_model, write_target

from drafters.layer_cut import cut
from drafters.lookup import Options, Text
from drafters.registry import entry, options_of
from drafters.tree import DynamicTree, chain
from eval.decode import Decoder
from recipes.errors import ConfigError

LIMIT, ENDS = 18, [2]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("target"))
    return load_target(folder, "float64", LAYERS), plain_model(folder)


def opened(kind: str, target, **options):
    return entry(kind).code.build(options_of(kind, options), target, {}, 0)


def prompts_of(count: int) -> list[list[int]]:
    """Prompts that repeat themselves, as those do that lookup is for."""
    g = torch.Generator().manual_seed(2)
    parts = [torch.randint(3, 40, (6,), generator=g).tolist() for _ in range(count)]
    return [part + part[: i % 5] + part[:3] for i, part in enumerate(parts)]


def passes_of(model, prompt: list[int], first: int, **options) -> tuple[list[int], int]:
    """transformers' greedy answer behind prompt and first token, and how often the target ran."""
    ids, ran = torch.tensor([prompt + [first]]), []
    handle = model.register_forward_hook(lambda *_: ran.append(1))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT - 1, do_sample=False,
                         eos_token_id=ENDS, pad_token_id=0, **options)
    handle.remove()
    return [first, *out[0, len(prompt) + 1 :].tolist()], len(ran)


def test_continuations_by_hand():
    """The longest run wins over a shorter one; the latest occurrence over an earlier one; a text's end cuts it off."""
    def text(options: Options, tokens: list[int]) -> Text:
        found = Text(options, tokens[0])
        found.add(tokens[1:])
        return found

    song = [1, 2, 3, 4, 9, 2, 3, 5, 9, 7, 2, 3]
    assert text(Options(), song).continuation(3) == [5, 9, 7]  # behind the latest 2 3
    assert text(Options(match="first"), song).continuation(3) == [4, 9, 2]
    assert text(Options(longest=1), song).continuation(9) == [5, 9, 7, 2, 3]  # partial
    assert text(Options(), [1, 2, 8, 2, 7, 1, 2]).continuation(2) == [8, 2]  # 1 2 before the later 2 alone
    assert text(Options(shortest=2), [1, 2, 8, 2]).continuation(2) == []
    assert text(Options(), [1, 2, 3]).continuation(4) == []
    assert text(Options(), [5, 5]).continuation(4) == [5]
    assert text(Options(), [4]).continuation(4) == []


def test_lookup_options_are_checked():
    with pytest.raises(ConfigError, match="shortest = 3 is more than longest = 2"):
        options_of("lookup", {"shortest": 3, "longest": 2})


@pytest.mark.parametrize("K,n", [(1, 2), (3, 2), (6, 1)])
def test_lookup_needs_as_many_passes_as_transformers(world, K, n):
    """At equal drafts (the first occurrence) the loop and transformers' prompt lookup run the target equally often."""
    target, model = world
    drafter, decoder = opened("lookup", target, longest=n, match="first"), Decoder(target, LIMIT, end_ids=ENDS)
    prompts = prompts_of(5)
    outputs = decoder.speculative(prompts, drafter, K)
    for prompt, out in zip(prompts, outputs):
        expected = passes_of(model, prompt, out.tokens[0], prompt_lookup_num_tokens=K, max_matching_ngram_size=n)
        assert (out.tokens, out.passes) == expected
    assert sum(o.passes for o in outputs) < sum(len(o.tokens) - 1 for o in outputs)
    assert any(len(o.drafts) < o.passes for o in outputs) or n == 1  # passes without a draft are no drafts


@pytest.mark.parametrize("layers", [2, 5])
def test_layer_cut_needs_as_many_passes_as_assisted_generation(world, layers):
    """At equal drafts the loop and transformers' assisted generation run the target equally often."""
    target, model = world
    drafter, assistant = opened("layer_cut", target, layers=layers), cut(model, 6, list(range(layers)))
    for name, value in (("num_assistant_tokens", 4), ("num_assistant_tokens_schedule", "constant"),
                        ("assistant_confidence_threshold", 0.0)):
        setattr(assistant.generation_config, name, value)
    prompts = prompts_of(4)
    outputs = Decoder(target, LIMIT, end_ids=ENDS).speculative(prompts, drafter, 4)
    for prompt, out in zip(prompts, outputs):
        assert (out.tokens, out.passes) == passes_of(model, prompt, out.tokens[0], assistant_model=assistant)
    if layers == 5:
        assert sum(n for o in outputs for _, n in o.drafts) > 0


def test_a_confidence_stops_chains_as_transformers_does(world):
    """With a threshold the chains are as short as assisted generation's: equal passes, fewer drafted tokens."""
    target, model = world
    drafter, assistant = opened("layer_cut", target, layers=5), cut(model, 6, list(range(5)))
    for name, value in (("num_assistant_tokens", 5), ("num_assistant_tokens_schedule", "constant"),
                        ("assistant_confidence_threshold", 0.6)):
        setattr(assistant.generation_config, name, value)
    prompts, decoder = prompts_of(4), Decoder(target, LIMIT, end_ids=ENDS)
    outputs = decoder.speculative(prompts, drafter, chain(5, 0.6))
    for prompt, out in zip(prompts, outputs):
        assert (out.tokens, out.passes) == passes_of(model, prompt, out.tokens[0], assistant_model=assistant)
    full = decoder.speculative(prompts, drafter, 5)
    assert [o.tokens for o in full] == [o.tokens for o in outputs]
    assert sum(o.acceptance.drafted for o in outputs) < sum(o.acceptance.drafted for o in full)
    assert sum(o.acceptance.rate for o in outputs) > sum(o.acceptance.rate for o in full)


def test_the_cut_model_is_the_targets_first_layers(world):
    """Its final state is the target's norm over the state that enters the layer at which it was cut."""
    target, model = world
    small = cut(target.model, 6, [0, 1, 2])
    ids = torch.tensor([[5, 9, 14, 20]])
    taps = target.forward(ids, torch.arange(4)[None]).taps[..., -32:]  # entering layer 3
    with torch.inference_mode():
        expected = target.head(target.model.get_decoder().norm(taps))
        torch.testing.assert_close(small(ids).logits, expected, rtol=1e-5, atol=1e-6)
    assert small.model.embed_tokens.weight.data_ptr() == target.embedding.data_ptr()  # no copy


@pytest.mark.parametrize("slots,plan", [(0, STATIC), (2, DynamicTree(4, 3, 10))])
def test_a_standalone_model_drafts_trees(world, slots, plan):
    """Case 59: trees of a standalone model, rows replaced or not, leave the text; they accept more than its chain."""
    target, _ = world
    drafter, prompts = opened("layer_cut", target, layers=5), prompts_of(5)
    plain = Decoder(target, LIMIT, end_ids=ENDS).plain(prompts)
    out = Decoder(target, LIMIT, end_ids=ENDS, slots=slots).speculative(prompts, drafter, plan)
    assert [o.tokens for o in out] == [o.tokens for o in plain]
    straight = Decoder(target, LIMIT, end_ids=ENDS).speculative(prompts, drafter, plan.depth)
    assert sum(o.passes for o in out) < sum(o.passes for o in straight)
    narrow = Decoder(target, LIMIT, end_ids=ENDS, slots=slots).speculative(prompts, drafter, DynamicTree(4, 1, 4))
    same = Decoder(target, LIMIT, end_ids=ENDS).speculative(prompts, drafter, 4)
    assert [(o.tokens, o.drafts) for o in narrow] == [(o.tokens, o.drafts) for o in same]


def test_lookup_rows_are_replaced(world):
    target, _ = world
    drafter, prompts = opened("lookup", target), prompts_of(6)
    few, alone = (Decoder(target, LIMIT, end_ids=ENDS, slots=n).speculative(prompts, drafter, 3) for n in (2, 1))
    assert [(o.tokens, o.drafts, o.passes) for o in few] == [(o.tokens, o.drafts, o.passes) for o in alone]


def test_what_they_cannot_do_is_refused(world):
    target, _ = world
    decoder = Decoder(target, 4, end_ids=ENDS)
    with pytest.raises(ValueError, match="lookup proposes one continuation"):
        decoder.speculative([[5, 6, 5]], opened("lookup", target), STATIC)
    with pytest.raises(ConfigError, match="drafter.options.layers = 6: must be fewer than the target's 6"):
        opened("layer_cut", target, layers=6)
