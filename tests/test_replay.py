"""Validation acceptance is the decoding loop's own: the walk by hand, and the same counts on real rows."""

import pytest
import torch
from fakes import counting_drafter, counting_target
from tiny import LAYERS, V, load_target, write_target

from data.batching import collate
from data.capture import Conversation, capture
from data.generate import Generator, Request
from drafters import checkpoint
from drafters.export.write import export_native
from drafters.registry import entry, options_of
from eval.decode import Decoder, Output
from eval.metrics import Acceptance
from eval.reader import read_acceptance
from eval.replay import replay, walk

K, LIMIT = 4, 14
ENDS = [40, 41, 42, 43]


def test_walk_by_hand():
    """Case 54: eight answer tokens; a draft starts after each rejection, and no other position is counted."""
    answer, tail = [1, 2, 3, 4, 5, 6, 7, 8], [9, 9]
    drafts = [[2, 3],  # at 1: both right, the loop goes on at 4
              [0, 0], [0, 0],  # never started from
              [5, 0],  # at 4: one right, goes on at 6
              [0, 0],
              [0, 8],  # at 6: wrong at once, goes on at 7; a right token behind a wrong one does not count
              [8, 9]]  # at 7: both right, the second against the tail
    counts = walk(drafts, answer, tail, 2)
    assert counts == Acceptance(2, 4, [3, 2])
    assert counts.per_position == [3 / 4, 2 / 4] and counts.conditional == [3 / 4, 2 / 3]
    assert counts.mean_length == 1 + 5 / 4


def test_walk_at_the_ends():
    """An answer of one token has no draft; the last draft may reach beyond the end and is compared with the tail."""
    assert walk([], [7], [1, 2, 3], 3) == Acceptance(3, 0, [0, 0, 0])
    assert walk([[8, 1, 2]], [7, 8], [1, 2, 3], 3) == Acceptance(3, 1, [1, 1, 1])
    assert walk([[8, 1, 0]], [7, 8], [1, 2, 3], 3) == Acceptance(3, 1, [1, 1, 0])
    assert walk([[0, 0, 0]], [7, 8], [1, 2, 3], 3) == Acceptance(3, 1, [0, 0, 0])


def traced(target, prompts: list[list[int]], ends: list[int], dtype: torch.dtype) -> list:
    """Validation rows as `make trace` makes them: greedy answers, overrun tails, captured states."""
    requests = [Request(f"r{i}", p, overrun=K) for i, p in enumerate(prompts)]
    answers = Generator(target, LIMIT, 4, end_ids=ends).run(requests)
    rows = [Conversation(a.id, "validation", a.prompt + a.tokens, [0] * len(a.prompt) + [1] * len(a.tokens),
                         a.overrun, a.finish) for a in answers]
    return capture(target, rows, 64, dtype)[0]


def per_position(outputs: list[Output]) -> Acceptance:
    return sum((o.acceptance for o in outputs), Acceptance(K))


@pytest.fixture(scope="module", params=[1, 2], ids=["one layer", "two layers"])
def trained(request, tmp_path_factory):
    """A float64 target, twelve traced rows, and a drafter that learned half of them by heart."""
    target = load_target(write_target(tmp_path_factory.mktemp("target")), "float64", LAYERS)
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 40, (1 + i % 5,), generator=g).tolist() for i in range(12)]
    rows = traced(target, prompts, ENDS, torch.float64)
    options = options_of("eagle3", {"draft_vocab_size": 48, "depth": 3, "deepen_at": 0.0, "num_layers": request.param})
    drafter = entry("eagle3").code.build(options, target, {i: 1 for i in range(3, 64)}, seed=0).double()
    batch = collate(rows[:6]).to(target.device, torch.float64)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        drafter(batch).loss_sum.backward()
        optimizer.step()
    return target, prompts, rows, drafter.eval()


def test_replay_equals_the_decoding_loop(trained):
    """Cases 12, 54: drafts and accepted tokens of each position, exactly, over answers that stop and that are cut."""
    target, prompts, rows, drafter = trained
    outputs = Decoder(target, LIMIT, end_ids=ENDS).speculative(prompts, drafter, K)
    assert {o.finish for o in outputs} == {"stop", "length"}
    assert [o.tokens for o in outputs] == [row.ids[row.turns > 0].tolist() for row in rows]
    for index, out in enumerate(outputs):
        assert replay(drafter, rows, [index], K, target.device, torch.float64) == out.acceptance
    total = replay(drafter, rows, list(range(12)), K, target.device, torch.float64)
    assert total == per_position(outputs)
    assert total.drafts > total.accepted[0] > total.accepted[1] > total.accepted[2] > total.accepted[3] > 0


def test_the_independent_reader_of_the_export_accepts_the_same(trained, tmp_path):
    """Case 12: exported and decoded by code that shares nothing with the loop, the drafter has the loop's drafts and
    accepted tokens of each position."""
    target, prompts, _, drafter = trained
    (tmp_path / "checkpoint").mkdir()
    fingerprint = target.fingerprint()
    checkpoint.save(tmp_path / "checkpoint", drafter.tensors(),
                    drafter.meta() | {"target": {"model": "org/target", "fingerprint": fingerprint}})
    folder = export_native(tmp_path / "checkpoint", tmp_path / "out", "float32", LAYERS, fingerprint)
    reading = read_acceptance(folder, target.model, prompts, K, LIMIT, ENDS)
    ours = per_position(Decoder(target, LIMIT, end_ids=ENDS).speculative(prompts, drafter, K))
    assert Acceptance(K, reading.drafts, reading.accepted_per_position) == ours and ours.accepted[-1] > 0


def test_accuracy_over_all_positions_is_another_number(trained):
    """Case 12: the share of positions whose first draft token is right is not the acceptance of the loop."""
    target, _, rows, drafter = trained
    total = replay(drafter, rows, list(range(12)), K, target.device, torch.float64)
    with torch.no_grad():
        out = drafter(collate(rows).to(target.device, torch.float64))
    accuracy = float(out.depth_hits[0] / out.depth_count[0])
    assert int(out.depth_count[0]) == sum(len(r.final) - 1 for r in rows)
    assert abs(accuracy - total.per_position[0]) > 0.01


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(trained, training):
    """Case 51: replay runs in evaluation mode and leaves the module in the mode it found."""
    target, _, rows, drafter = trained
    seen = []
    handle = drafter.fc.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    drafter.train(training)
    replay(drafter, rows, [0, 1], K, target.device, torch.float64)
    assert drafter.training == training and seen == [False, False]
    drafter.eval()
    handle.remove()


@pytest.mark.parametrize("ahead,hits,length", [(2, 1.0, K + 1), (3, 0.0, 1)])
def test_training_metric_replay_and_loop_agree_on_a_rule(tmp_path, ahead, hits, length):
    """Cases 09, 12: next = current + 1 mod V. Perfect weights score 1 everywhere, weights one off score 0, in fp32."""
    target = counting_target(tmp_path, V)
    prompts = [[5, 6], [60], [20, 21, 22]]
    rows = traced(target, prompts, [0], torch.float32)
    drafter = counting_drafter(target, list(range(V)), ahead)
    out = drafter(collate(rows))
    assert (out.depth_hits / out.depth_count).tolist() == [hits] * 3
    total = replay(drafter, rows, [0, 1, 2], K, target.device, torch.float32)
    outputs = Decoder(target, LIMIT, end_ids=[0]).speculative(prompts, drafter, K)
    assert total.mean_length == length and total == per_position(outputs)
