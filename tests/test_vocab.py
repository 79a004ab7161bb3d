"""The draft vocabulary and its maps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import vocab
from recipes.errors import ConfigError


def test_map_by_hand():
    """Case 56: d2t is an offset (target id minus draft index), t2d marks the ids."""
    d2t, t2d = vocab.maps(torch.tensor([0, 3, 4, 9]), 10)
    assert d2t.tolist() == [0, 2, 2, 6]
    assert t2d.nonzero()[:, 0].tolist() == [0, 3, 4, 9] and t2d.dtype == torch.bool and len(t2d) == 10
    assert vocab.ids_of(d2t).tolist() == [0, 3, 4, 9]


@settings(max_examples=50, deadline=None)
@given(ids=st.sets(st.integers(0, 63), min_size=1, max_size=64))
def test_writer_and_reader_agree(ids):
    """Case 56: any ascending map comes back as it was, and is valid."""
    written = torch.tensor(sorted(ids))
    d2t, t2d = vocab.maps(written, 64)
    vocab.check(d2t, t2d)
    assert torch.equal(vocab.ids_of(d2t), written) and int(t2d.sum()) == len(ids)


def broken() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    d2t, t2d = vocab.maps(torch.tensor([1, 3, 4, 9]), 10)
    other = t2d.clone()
    other[[4, 5]] = torch.tensor([False, True])
    fewer = t2d.clone()
    fewer[9] = False
    return {
        "absolute ids read as offsets": (torch.tensor([1, 3, 4, 9]), t2d),
        "absolute ids beyond the vocabulary": (torch.tensor([1, 3, 4, 7]), t2d),
        "a duplicate": (torch.tensor([1, 0, 2, 6]), t2d),
        "a negative id": (torch.tensor([-1, 2, 2, 6]), t2d),
        "a mask of other ids": (d2t, other),
        "a mask of fewer ids": (d2t, fewer),
        "a mask of every id": (d2t, torch.ones_like(t2d)),
        "a shorter vocabulary": (d2t, t2d[:9]),
    }


@pytest.mark.parametrize("name", broken())
def test_wrong_maps_are_refused(name):
    """Case 56: ids outside the target's vocabulary, duplicates, and a mask that says otherwise."""
    with pytest.raises(ConfigError, match="not an offset map"):
        vocab.check(*broken()[name])


def test_fewer_distinct_tokens_than_the_draft_vocabulary():
    """Case 57: five distinct tokens fill a draft vocabulary of 16 with valid ids, the same on every run."""
    counts = {40: 3, 7: 9, 33: 1, 8: 3, 20: 2}
    ids = vocab.build(counts, 16, 64, always=[2, 63])
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 20, 33, 40, 63]
    assert torch.equal(ids, vocab.build(dict(reversed(counts.items())), 16, 64, always=[63, 2]))


def test_the_most_frequent_win_and_ties_go_to_the_smaller_id():
    """Case 57: end and special tokens first whatever their count, then by count, then by id."""
    counts = {50: 10, 9: 4, 30: 4, 12: 4, 60: 1}
    assert vocab.build(counts, 4, 64, always=[2]).tolist() == [2, 9, 12, 50]
    assert vocab.build(counts, 5, 64, always=[2, 60]).tolist() == [2, 9, 12, 50, 60]
    assert vocab.build(counts, 64, 64, always=[2]).tolist() == list(range(64))
    assert vocab.build({}, 3, 64, always=[63]).tolist() == [0, 1, 63]


@pytest.mark.parametrize("size,named", [(0, "draft_vocab_size = 0"), (65, "draft_vocab_size = 65"),
                                        (1, "2 end and special tokens")])
def test_sizes_that_do_not_fit_are_refused(size, named):
    """An impossible size names the option."""
    with pytest.raises(ConfigError, match=named):
        vocab.build({5: 1}, size, 64, always=[2, 3])


def test_counts_of_another_tokenizer_are_refused():
    """Case 30: a counted id outside the target's vocabulary means the counts are of another model."""
    with pytest.raises(ConfigError, match="token id 64"):
        vocab.build({64: 5, 1: 1}, 4, 64, always=[2])
