"""A small language model as drafter: what it begins as, its loss against the plain formula, its drafts against reading
everything anew, text of its own, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny import LAYERS, L, V, chat_tokenizer, conversations, load_target, write_target
from transformers import LlamaConfig, LlamaForCausalLM

from data.batching import collate
from data.capture import Conversation, capture
from drafters import checkpoint
from drafters.base import Batch
from drafters.layer_cut import cut
from drafters.registry import entry, options_of
from drafters.small_lm_build import build, kept_layers, load
from drafters.unrolled import Chains
from eval.decode import Decoder
from eval.replay import walk
from recipes.errors import ConfigError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("small") / "target"), "float32", LAYERS)


@pytest.fixture(scope="module")
def rows(target):
    traced, bad = capture(target, conversations(4, 1), 256, torch.float32)
    assert not bad
    return traced


def made(target, **options):
    return build(options_of("small_lm", options), target, {}, 0)


def batch_of(rows, *numbers: int) -> Batch:
    return collate([rows[i] for i in numbers])


def test_which_layers_it_begins_as():
    """First and last among those that are spread; a third where none are named; never all."""
    def kept(depth, **options):
        return kept_layers(options_of("small_lm", options), depth)

    assert kept(30, layers=4) == [0, 10, 19, 29] and kept(30, layers=4, pick="first") == [0, 1, 2, 3]
    assert len(kept(30)) == 10 and kept(6, layers=1) == [0]
    with pytest.raises(ConfigError, match="layers = 6: must be fewer than the target's 6"):
        kept(6, layers=6)
    assert kept(6, keep=[0, 3, 5]) == [0, 3, 5]
    for wrong in ([0, 6], [0, 1, 2, 3, 4, 5]):
        with pytest.raises(ConfigError, match="must name fewer than all of the target.s layers 0 to 5"):
            kept(6, keep=wrong)


@pytest.mark.parametrize("options", [{"layers": 3}, {"layers": 2, "pick": "first"}, {"keep": [0, 3, 4]}])
def test_its_weights_are_the_targets_layers_and_its_own(target, options):
    """Layer i is the kept one, bit for bit; training it leaves the target as it was."""
    drafter, theirs = made(target, **options), target.model.state_dict()
    kept, ours = kept_layers(drafter.options, L), drafter.model.state_dict()
    for name, tensor in ours.items():
        number = name.split(".")[2] if ".layers." in name else ""
        other = name.replace(f"layers.{number}.", f"layers.{kept[int(number)]}.") if number else name
        assert torch.equal(tensor, theirs[other]), name
        assert tensor.data_ptr() != theirs[other].data_ptr()
    again = cut(target.model, L, list(range(L)))
    ids = torch.tensor([[3, 9, 14, 3]])
    assert torch.equal(again(ids).logits, target.model(ids).logits)
    assert set(drafter.vocabulary_modules) == {"model.model.embed_tokens", "model.lm_head"}
    assert not any(drafter.get_parameter(name).requires_grad for name in drafter.vocabulary())
    assert all(p.requires_grad for p in made(target, train_vocabulary=True).parameters())


def plain_loss(drafter, target, row, loss: str, labels: str) -> tuple[torch.Tensor, int]:
    """Position by position, from transformers' own logits: what follows two supervised tokens of one turn is taught by
    the target's logits there."""
    ids, turns, final = row.ids, row.turns, collate([row]).final[0]
    logits = drafter.model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    teacher = F.linear(final, target.head_weight).log_softmax(-1)
    total, n = torch.zeros(()), 0
    for t in range(1, len(ids) - 1):
        if not (turns[t] > 0 and turns[t] == turns[t + 1]):
            continue
        p, q = teacher[t].exp(), logits[t]
        token = int(ids[t + 1]) if labels == "token" else int(p.argmax())
        kl, accepted = -(p * q).sum(), torch.minimum(p, q.exp()).sum()
        share = (-drafter.options.lk_eta * accepted.detach()).exp()
        value = {"kl": kl, "reverse_kl": (q.exp() * (q - p.log())).sum(), "tv": 1 - accepted,
                 "lk": share * kl + (1 - share) * (1 - accepted)}[loss]
        total, n = total + (value if labels == "distribution" else -q[token]), n + 1
    return total, n


@pytest.mark.parametrize("loss, labels", [
    ("kl", "distribution"), ("reverse_kl", "distribution"), ("tv", "distribution"), ("lk", "distribution"),
    ("kl", "greedy"), ("kl", "token")])
def test_loss_and_gradient_are_the_plain_formula(target, rows, loss, labels):
    """Two rows of unlike length in a batch equal each alone; the head's gradient too, where it is trained."""
    drafter = made(target, layers=3, loss=loss, labels=labels, train_vocabulary=True)
    out = drafter(batch_of(rows, 0, 1))
    out.loss_sum.backward()
    found = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    sums, counts = zip(*(plain_loss(drafter, target, rows[i], loss, labels) for i in (0, 1)))
    sum(sums).backward()
    assert drafter.count(batch_of(rows, 0, 1)) == sum(counts) == int(out.depth_count.sum())
    torch.testing.assert_close(out.loss_sum, sum(sums), rtol=1e-4, atol=1e-4)
    for name, p in drafter.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-4)


def test_packed_conversations_do_not_see_one_another(target, rows):
    """Two rows end to end have the loss of two rows apart (case 43)."""
    drafter, (a, b) = made(target, layers=3), (batch_of(rows, i) for i in (0, 1))
    turns = [a.turns, torch.where(b.turns > 0, b.turns + 9, b.turns)]
    starts = torch.tensor([[0] * a.ids.shape[1] + [a.ids.shape[1]] * b.ids.shape[1]])
    joined = Batch(*(torch.cat(pair, dim=1) for pair in ((a.ids, b.ids), turns, (a.taps, b.taps), (a.final, b.final))),
                   starts)
    torch.testing.assert_close(drafter(joined).loss_sum, drafter(batch_of(rows, 0, 1)).loss_sum, rtol=1e-4, atol=1e-4)


def test_drafts_equal_reading_everything_anew(target, rows):
    """Each draft of `chains`, which run side by side, is what greedy reading on from its start gives; logits too."""
    drafter, row, K = made(target, layers=3).eval(), rows[0], 4
    batch = batch_of(rows, 0)
    tokens, at, valid = drafter.chains(batch, K)
    logits = list(drafter.chain_logits(batch, K))
    assert valid.all() and tokens.shape[-1] == K
    for p, start in enumerate(at[0].tolist()):
        text = row.ids[: start + 2].tolist()
        for k in range(K):
            now = drafter.model(torch.tensor([text]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[k][0, p], now, rtol=1e-4, atol=1e-4)
            assert int(now.argmax()) == int(tokens[0, p, k])
            text.append(int(tokens[0, p, k]))


def test_the_loop_drafts_what_validation_replays(target):
    """Case 12: on an answer of the target's own, the decoding loop's acceptance is the replay's."""
    drafter, prompt, K, size = made(target, layers=5).eval(), [3, 9, 14, 3], 3, 10
    target.tap(None)
    plain, = Decoder(target, size + K, end_ids=[]).plain([prompt])
    out, = Decoder(target, size, end_ids=[]).speculative([prompt], drafter, K)
    target.tap(LAYERS)
    answer, tail = plain.tokens[:size], plain.tokens[size:]
    assert out.tokens == answer
    row = Conversation("own", "validation", prompt + answer, [0] * 4 + [1] * size, tail, "length")
    traced, _ = capture(target, [row], 256, torch.float32)
    tokens, _, valid = drafter.chains(collate(traced), K)
    replayed = walk(tokens[0][valid[0]].tolist(), answer, tail, K)
    assert (replayed.drafts, list(replayed.accepted)) == (out.acceptance.drafts, list(out.acceptance.accepted))
    assert sum(replayed.accepted) > 0


def test_a_windowed_layer_sees_no_further_back(target):
    """beside(): text up to the start and the draft's own tokens, both within the window, by hand."""
    at = torch.tensor([[2, 4]])
    seen = made(target).beside(at, 5, 2, 0)[0].int().tolist()
    assert seen == [[1, 1, 1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 1, 0, 1]]
    near = made(target).beside(at, 5, 2, 2)[0].int().tolist()  # at place start + 2 two places are seen: 1 back, itself
    assert near == [[0, 0, 0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0, 1]]


def test_text_of_its_own_is_taught_by_the_target(target, rows):
    """on_policy: the text behind a supervised place is the drafter's, the same by the same seed; its states are the
    target's; its weight is that of the batch; without it nothing of the kind happens."""
    drafter = made(target, layers=3, on_policy=1.0, on_policy_tokens=5)
    batch = batch_of(rows, 0, 1)
    written = drafter.own_text(batch, torch.Generator().manual_seed(3))
    again = drafter.own_text(batch, torch.Generator().manual_seed(3))
    assert torch.equal(written.ids, again.ids)
    assert not torch.equal(written.ids, drafter.own_text(batch, torch.Generator().manual_seed(4)).ids)
    for r in (0, 1):
        own, alone = written.turns[r].nonzero()[:, 0], batch_of(rows, r)
        place = int(own[0])
        assert len(own) == 6 and torch.equal(written.ids[r, : place + 1], alone.ids[0, : place + 1])
        assert int(alone.turns[0, place]) > 0
        ids = written.ids[r, : place + 6]
        states = target.model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(written.final[r, : place + 6], states, rtol=1e-4, atol=1e-4)
    assert drafter.count(written) == 10
    with torch.autocast("cpu", torch.bfloat16):  # of a bfloat16 training: its target reads in its own precision
        cast = drafter.own_text(batch, torch.Generator().manual_seed(3))
    states = target.model.get_decoder()(cast.ids[:1], use_cache=False).last_hidden_state
    n = int(cast.turns[0].nonzero()[-1]) + 1
    torch.testing.assert_close(cast.final[0, :n], states[0, :n], rtol=1e-4, atol=1e-4)
    out = drafter(batch, seed=3)
    generator = torch.Generator().manual_seed(3)
    torch.rand((), generator=generator)
    own = drafter.loss(drafter.own_text(batch, generator)).loss_sum
    torch.testing.assert_close(out.loss_sum, own * drafter.count(batch) / 10)
    assert not torch.allclose(out.loss_sum, made(target, layers=3)(batch).loss_sum)


def test_a_drafter_is_drawn_from_at_temperature_one(target):
    """4,000 first tokens behind one place have the drafter's own distribution (total variation below 5 %)."""
    drafter = made(target, layers=3, on_policy=1.0, on_policy_tokens=1)
    ids = torch.tensor([[3, 9, 14, 0]]).repeat(4000, 1)
    drafter.eval()
    with torch.no_grad():
        drafter.write(ids, torch.full((4000,), 2), 1, torch.Generator().manual_seed(0))
        expected = drafter.model(ids[:1, :3], use_cache=False).logits[0, -1].softmax(-1)
    found = torch.bincount(ids[:, 3], minlength=V) / 4000
    assert float((found - expected).abs().sum() / 2) < 0.05


def test_saved_and_loaded_it_is_the_same(target, rows):
    """A vocabulary that is the target's own is in no checkpoint (case 46); tensors bit for bit."""
    for options in ({"layers": 2}, {"layers": 2, "train_vocabulary": True}):
        drafter = made(target, **options)
        with torch.no_grad():
            for p in drafter.parameters():
                if p.requires_grad:
                    p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        tensors = {name: t.detach().clone() for name, t in drafter.tensors().items()}
        assert bool({"model.lm_head.weight"} & tensors.keys()) == bool(options.get("train_vocabulary"))
        meta = drafter.meta()
        back = load(drafter.options, meta["shape"], [], tensors, target)
        assert all(torch.equal(p, back.get_parameter(name)) for name, p in drafter.named_parameters())
        assert torch.equal(back(batch_of(rows, 0)).loss_sum, drafter(batch_of(rows, 0)).loss_sum)


@pytest.mark.parametrize("change, said", [
    (lambda t, s: t.pop("model.model.norm.weight"), "do not fit the drafter"),
    (lambda t, s: t.update(x=torch.zeros(2)), "do not fit the drafter"),
    (lambda t, s: s["config"].update(hidden_size=2**40), "do not fit the drafter"),
    (lambda t, s: s["config"].update(num_hidden_layers=5), "do not fit the drafter"),
    (lambda t, s: s["config"].update(model_type="nobody"), "no language model that transformers knows"),
    (lambda t, s: s.pop("config"), "must be the config.json of a language model"),
    (lambda t, s: s.update(vocab_size=0), "vocab_size"),
    (lambda t, s: s.update(target_hidden_size=33), "this target has")])
def test_damaged_checkpoints_are_refused(target, change, said):
    drafter = made(target, layers=2)
    tensors, shape = dict(drafter.tensors()), copy.deepcopy(drafter.meta()["shape"])
    change(tensors, shape)
    with pytest.raises(ConfigError, match=said):
        load(drafter.options, shape, [], tensors, target)


def test_a_sibling_is_taken_as_it_is(target, tmp_path):
    """Also of another width; its own vocabulary is saved, though it is not trained. One of another tokenizer, another
    vocabulary, or that is none, is refused."""
    def written(name: str, size: int = V) -> str:
        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig(vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=1)).save_pretrained(tmp_path / name)
        chat_tokenizer().save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    drafter = made(target, sibling=written("good"))
    assert "model.lm_head.weight" in drafter.tensors()
    assert not drafter.get_parameter("model.lm_head.weight").requires_grad
    assert drafter.meta()["shape"]["config"]["hidden_size"] == 16
    assert load(drafter.options, drafter.meta()["shape"], [], drafter.tensors(), target)
    with pytest.raises(ConfigError, match="65 rows of vocabulary, the target 64"):
        made(target, sibling=written("wide", V + 1))
    other = written("other")
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match="its tokenizer gives other ids"):
        made(target, sibling=other)
    with pytest.raises(ConfigError, match="sibling = .*nowhere: cannot be loaded"):
        made(target, sibling=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("options, said", [
    ({"loss": "reverse_kl", "labels": "token"}, "reverse_kl is infinite"),
    ({"on_policy": 0.5, "labels": "token"}, "its own tokens would teach it"),
    ({"sibling": "x", "layers": 2}, "leave it 0 with a sibling"),
    ({"keep": [1], "layers": 2}, "names the layers itself"),
    ({"keep": [1], "sibling": "x"}, "names the layers itself"), ({"keep": [2, 1]}, "must rise"),
    ({"keep": [1, 1]}, "must rise"), ({"on_policy": 1.5}, "on_policy")])
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        options_of("small_lm", options)


def test_a_checkpoint_folder_of_it(target, tmp_path):
    """Through drafter.json and safetensors, as every stage opens it, and not by `drafter.init_from`."""
    drafter = made(target, layers=2)
    target.tap(None)
    checkpoint.save(tmp_path, drafter.tensors(), drafter.meta() | {
        "target": {"model": "tiny", "fingerprint": target.fingerprint()}})
    again = checkpoint.load(tmp_path, target)
    assert entry("small_lm").trained and again.kind == "small_lm"
    stored = load_file(tmp_path / checkpoint.WEIGHTS)
    assert stored.keys() == drafter.tensors().keys()
    save_file(stored | {"model.lm_head.weight": torch.zeros(V, V)}, tmp_path / checkpoint.WEIGHTS)
    with pytest.raises(ConfigError, match="do not fit the drafter"):
        checkpoint.load(tmp_path, target)
    target.tap(LAYERS)


def test_text_of_its_own_needs_a_target_of_its_own(target, monkeypatch):
    """Processes that share the target would wait for one another for ever; a sibling is refused as a cut is."""
    monkeypatch.setattr(target, "section", replace(target.section, tp_plan="auto"))
    with pytest.raises(ConfigError, match="on_policy = 0.5: every process reads text of its own"):
        made(target, sibling="x", on_policy=0.5)


def test_rows_without_a_place_to_begin_write_nothing(target, rows):
    drafter = made(target, layers=2, on_policy=1.0)
    batch = batch_of(rows, 0)
    batch.turns.zero_()
    assert drafter.own_text(batch, torch.Generator()) is None and float(drafter(batch).loss_sum) == 0.0


def test_starts_of_its_drafts_are_chains(target, rows):
    """Validation and training begin at the same places."""
    batch = batch_of(rows, 0)
    assert torch.equal(made(target, layers=2).chains(batch, 2)[1], Chains(batch, 1.0, 0).at)
