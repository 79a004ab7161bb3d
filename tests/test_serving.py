"""What serving adds to the loop: replaced rows, stop strings, tokens given out as they are decided."""

import pytest
import torch
from fakes import oracle
from test_tree_decode import STATIC, eagle3
from tiny import LAYERS, V, load_target, plain_model, write_target

from data.sampling import Sampling
from drafters.registry import entry, options_of
from drafters.tree import DynamicTree
from eval.decode import Decoder
from eval.metrics import Acceptance
from eval.stops import Stops

LIMIT, ENDS = 15, [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("target"))
    return load_target(folder, "float64", LAYERS), plain_model(folder)


def prompts_of(count: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(4)
    return [torch.randint(3, 40, (1 + (5 * i) % 7,), generator=g).tolist() for i in range(count)]


@pytest.mark.parametrize("slots,layers,plan", [(1, 1, 3), (2, 1, DynamicTree(3, 3, 8)), (3, 2, STATIC)])
def test_replaced_rows_decode_as_alone(world, slots, layers, plan):
    """Cases 59, 66: with fewer rows than prompts every prompt is answered once, in order, as it is alone."""
    target, _ = world
    prompts, drafter = prompts_of(6), eagle3(target, num_layers=layers)
    decoder = Decoder(target, LIMIT, end_ids=ENDS, slots=slots)
    together = decoder.speculative(prompts, drafter, plan)
    alone = [Decoder(target, LIMIT, end_ids=ENDS).speculative([p], drafter, plan)[0] for p in prompts]
    assert [(o.tokens, o.finish, o.drafts) for o in together] == [(o.tokens, o.finish, o.drafts) for o in alone]
    assert [o.tokens for o in decoder.plain(prompts)] == [o.tokens for o in alone]
    assert len({len(o.tokens) for o in alone}) > 2  # rows left at different times


@pytest.mark.parametrize("kind, plan", [("eagle3", 3), ("eagle3", STATIC), ("layer_cut", DynamicTree(3, 3, 8)),
                                        ("lookup", 3)])
def test_a_row_that_ends_with_its_first_token_is_replaced(world, kind, plan):
    """Cases 22, 66: before anything was drafted another row joins; texts and drafts are those of each prompt alone."""
    target, _ = world
    prompts = prompts_of(6)
    first = [o.tokens[0] for o in Decoder(target, 1, end_ids=[]).plain(prompts)]
    other = next(i for i, token in enumerate(first) if token != first[0])
    prompts[1], prompts[other], ends = prompts[other], prompts[1], [first[other], 40, 41, 42]
    drafter = eagle3(target) if kind == "eagle3" else entry(kind).code.build(options_of(kind, {}), target, {}, 0)
    together = Decoder(target, LIMIT, end_ids=ends, slots=2).speculative(prompts, drafter, plan)
    alone = [Decoder(target, LIMIT, end_ids=ends).speculative([p], drafter, plan)[0] for p in prompts]
    assert together[1].tokens == [first[other]] and not together[1].passes
    assert [(o.tokens, o.finish, o.drafts) for o in together] == [(o.tokens, o.finish, o.drafts) for o in alone]


def test_rows_are_never_more_than_slots(world, monkeypatch):
    """At most so many rows are decoded together, and a free one is filled while prompts wait."""
    target, _ = world
    widths = []
    step = Decoder.plain_step
    monkeypatch.setattr(Decoder, "plain_step", lambda self, rows, outputs: (widths.append(len(rows.index)),
                                                                          step(self, rows, outputs)))
    out = Decoder(target, LIMIT, end_ids=ENDS, slots=3).plain(prompts_of(9))
    total = sum(o.passes for o in out)
    assert max(widths) == 3 and sum(widths) == total == sum(len(o.tokens) - 1 for o in out)
    full = next(i for i, width in enumerate(widths) if width < 3)
    assert all(width < 3 for width in widths[full:])  # only once nothing waits


def test_sampled_rows_with_a_penalty_are_replaced_too(world):
    """What a row remembers of its own text moves with it."""
    target, _ = world
    settings = Sampling(repetition_penalty=1.5)
    prompts, drafter = prompts_of(7), eagle3(target)
    few, all_rows = (Decoder(target, LIMIT, settings, end_ids=ENDS, slots=slots).speculative(prompts, drafter, 3)
                     for slots in (2, 0))
    assert [o.tokens for o in few] == [o.tokens for o in all_rows]


def test_tokens_are_given_out_as_they_are_decided(world):
    """Streaming: each answer's tokens arrive in order, once, in bursts as long as the accepted paths, none after an
    end (case 22)."""
    target, _ = world
    got: dict[int, list[list[int]]] = {}
    decoder = Decoder(target, LIMIT, end_ids=ENDS, slots=2,
                      on_tokens=lambda number, tokens: got.setdefault(number, []).append(tokens))
    out = decoder.speculative(prompts_of(5), eagle3(target), 3)
    for number, o in enumerate(out):
        assert sum(got[number], []) == o.tokens and [len(burst) for burst in got[number]] == [n for _, n in o.times]


def test_stop_strings_equal_transformers(world):
    """The answer ends with the token that completes a stop string, as transformers' stop_strings."""
    target, model = world
    ended = 0
    for prompt in prompts_of(6):
        free = Decoder(target, LIMIT, end_ids=[2]).plain([prompt])[0].tokens
        text = target.tokenizer.decode(free, skip_special_tokens=True)
        stops = ["never!!", text[4:6]]
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False,
                                  eos_token_id=2, pad_token_id=0, stop_strings=stops,
                                  tokenizer=target.tokenizer)[0, len(prompt):].tolist()
        decoder = Decoder(target, LIMIT, end_ids=[2], stop=stops)
        for out in (decoder.plain([prompt])[0], decoder.speculative([prompt], eagle3(target), 3)[0],
                    decoder.speculative([prompt], oracle([prompt], [free], V), 4)[0]):
            assert out.tokens == expected
            assert out.finish == ("stop" if len(expected) < LIMIT or out.stopped_by else "length")
            ended += bool(out.stopped_by)
    assert ended > 6


def test_a_stop_string_inside_an_accepted_block(world):
    """Case 22: what follows a stop string in an accepted block never shows; the draft counts whole."""
    target, _ = world
    prompt = prompts_of(1)[0]
    free = Decoder(target, 12, end_ids=[]).plain([prompt])[0].tokens
    stop = target.tokenizer.decode(free[1:3])
    out = Decoder(target, 12, end_ids=[], stop=[stop]).speculative([prompt], oracle([prompt], [free], V), 5)[0]
    assert out.tokens == free[:3] and (out.finish, out.stopped_by) == ("stop", stop)
    assert out.acceptance == Acceptance(5, 1, [1] * 5)


def test_text_is_cut_at_the_first_stop_string(world):
    target, _ = world
    stops = Stops(target.tokenizer, ["lo", "rl"])
    tokens = target.tokenizer("hello world", add_special_tokens=False).input_ids
    assert stops.cut(tokens) == "hel" and stops.cut(tokens[:3]) == "hel"
    assert [stops.found(tokens[:n]) for n in (4, 5)] == ["", "lo"]
