"""States that come with the answers against transformers' own, one finished row at a time, without a cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.generate import Generator, Request
from data.sampling import Sampling
from tests.tiny import LAYERS, H, L, load_target, plain_model, write_target

ENDS, LIMIT = list(range(40, 46)), 9
SAMPLINGS = [Sampling(), Sampling(1.3, 20, 0.9)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("target")), layers=LAYERS)


@pytest.fixture(scope="module")
def reference(target):
    return plain_model(target.path)


class Kept:
    """A keeper that remembers."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype, self.rows = dtype, {}

    def add(self, id, ids, turns, taps, final):
        assert id not in self.rows
        self.rows[id] = ids, turns, taps, final


def requests(count: int, seed: int, common: int, overrun: int) -> list[Request]:
    """Prompts of uneven length behind `common` tokens; greedy and sampled, every third with tokens beyond its end."""
    g = torch.Generator().manual_seed(seed)
    head = list(range(3, 3 + common))
    asked = []
    for i in range(count):
        prompt = head + [46 + i % 9] + torch.randint(3, 40, (int(torch.randint(0, 14, (1,), generator=g)),),
                                                     generator=g).tolist()
        asked.append(Request(f"r{i}", prompt, SAMPLINGS[i % 2], overrun if i % 3 == 0 else 0, [-1] * len(prompt)))
    return asked


@settings(max_examples=12, deadline=None)
@given(count=st.integers(1, 11), seed=st.integers(0, 99), batch=st.integers(1, 6), common=st.sampled_from([0, 5]),
       overrun=st.integers(0, 3))
def test_every_token_has_the_state_of_a_pass_over_the_whole_row(target, reference, count, seed, batch, common, overrun):
    """Prompt, answer and end token: states of the decoding equal those of transformers over the finished row, whatever
    stands beside it, is refilled, shared or runs on (case 01); the answers are those of a run that keeps nothing."""
    asked, kept = requests(count, seed, common, overrun), Kept()
    answers = Generator(target, LIMIT, batch, 3, ENDS).run(asked, keeper=kept)
    plain = [Request(r.id, r.prompt, r.sampling, r.overrun) for r in asked]
    assert answers == Generator(target, LIMIT, batch, 3, ENDS).run(plain, keeper=Kept())
    assert set(kept.rows) == {r.id for r in asked}
    for request, answer in zip(asked, answers):
        ids, turns, taps, final = kept.rows[answer.id]
        assert ids == request.prompt + answer.tokens
        assert turns == [-1] * len(request.prompt) + [1] * len(answer.tokens)
        with torch.inference_mode():
            hidden = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(taps, torch.cat([hidden[k][0] for k in LAYERS], -1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final, hidden[L][0], rtol=1e-4, atol=1e-4)


def test_rows_without_turns_are_not_kept(target):
    """Self-written prompts are no traces: neither a state nor a step is spent on them."""
    asked = [Request(f"r{i}", [5 + i, 6, 7], turns=[0, 0, 0] if i == 1 else []) for i in range(3)]
    kept = Kept(torch.float32)
    answers = Generator(target, LIMIT, 3, end_ids=ENDS).run(asked, keeper=kept)
    assert list(kept.rows) == ["r1"]
    ids, _, taps, final = kept.rows["r1"]
    assert ids == answers[1].prompt + answers[1].tokens
    assert taps.dtype == final.dtype == torch.float32
    assert taps.shape == (len(ids), 3 * H) and final.shape == (len(ids), H)


def test_kept_states_are_their_own(target):
    """A row's states stay as they were when its place has gone to another row."""
    kept = Kept()
    Generator(target, 4, 1, end_ids=[]).run([Request(f"r{i}", [9 + i] * 3, turns=[0] * 3) for i in range(3)],
                                            keeper=kept)
    firsts = [taps[0] for _, _, taps, _ in kept.rows.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])
