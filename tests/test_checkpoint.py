"""A drafter on disk: what is saved comes back bit for bit, and what does not fit is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LAYERS, llama, load_target, write_target

from drafters import checkpoint, vocab
from drafters.eagle3_build import copy_last_layers
from drafters.propose import RowMemory
from drafters.registry import entry, options_of
from recipes.errors import ConfigError, RunError

COUNTS = {i: 50 - i for i in range(3, 40, 2)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target folder, the target, a drafter for it with random weights."""
    folder = write_target(tmp_path_factory.mktemp("target"))
    target = load_target(folder, "float32", LAYERS)
    drafter = fresh(target)
    return folder, target, drafter


def fresh(target, **options):
    options = options_of("eagle3", {"draft_vocab_size": 16, "tap_norms": True, **options})
    return entry("eagle3").code.build(options, target, COUNTS, seed=3)


def meta_of(drafter, target) -> dict:
    return {**drafter.meta(), "target": {"model": "org/target", "fingerprint": target.fingerprint()}}


@pytest.fixture
def saved(base, tmp_path) -> Path:
    _, target, drafter = base
    checkpoint.save(tmp_path, drafter.tensors(), meta_of(drafter, target))
    return tmp_path


def test_round_trip_is_bit_equal(base, saved):
    """Case 18: every trained parameter and both maps, nothing else, and the same loss path afterwards."""
    _, target, drafter = base
    again = checkpoint.load(saved, target)
    ours, theirs = drafter.tensors(), again.tensors()
    assert list(ours) == list(theirs) and set(ours) == set(load_file(saved / checkpoint.WEIGHTS))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert again.meta() == drafter.meta() and not again.training
    assert torch.equal(again.draft_ids, drafter.draft_ids)
    assert not {"embedding", "teacher_head"} & set(ours)  # the target's own, case 62


def test_two_layers_round_trip_and_other_counts_are_refused(base, saved, tmp_path_factory):
    """Cases 13, 18: both layers come back bit for bit; a drafter.json that says another number of layers, or none that
    exists, is an error that says so; one that says nothing is of one layer."""
    _, target, drafter = base
    folder, two = tmp_path_factory.mktemp("two"), fresh(target, num_layers=2)
    checkpoint.save(folder, two.tensors(), meta_of(two, target))
    again = checkpoint.load(folder, target)
    ours, theirs = two.tensors(), again.tensors()
    assert list(ours) == list(theirs) and len(ours) == len(drafter.tensors()) + 9
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    wrong = (folder, 1, "of 2 .*num_layers = 1"), (saved, 2, "of 1 .*num_layers = 2"), (saved, 3, "num_layers")
    for place, layers, named in wrong:
        meta = checkpoint.read_meta(place)
        meta["options"]["num_layers"] = layers
        (place / checkpoint.META).write_text(json.dumps(meta))
        with pytest.raises(ConfigError, match=named):
            checkpoint.load(place, target)
    del meta["options"]["num_layers"]
    (saved / checkpoint.META).write_text(json.dumps(meta))
    assert checkpoint.load(saved, target).options.num_layers == 1


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_warm_start_is_the_end_of_the_target(base, layers):
    """Given the states that enter the target's last layers, and nothing of the embedding, a fresh drafter computes the
    target's final states: the layers are in the target's order, the last one last."""
    _, target, _ = base
    drafter, ids = fresh(target, num_layers=layers), torch.arange(5, 17)[None]
    states = target.model(ids, output_hidden_states=True).hidden_states
    for name in "qkv":
        getattr(drafter.midlayer.self_attn, f"{name}_proj").weight[:, : target.hidden] = 0
    positions, memory = torch.arange(ids.shape[1])[None], RowMemory(1, ids.shape[1], layers)
    output = drafter.step(states[-1 - layers], drafter.embed(ids), positions, memory, None)
    torch.testing.assert_close(drafter.norm(output), states[-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(drafter.fc.weight[:, -target.hidden :].diagonal() > 0.5, torch.ones(target.hidden).bool())


def test_warm_start_needs_as_many_layers(base):
    """A target of one layer cannot start a drafter of two."""
    shallow = SimpleNamespace(model=SimpleNamespace(get_decoder=lambda: SimpleNamespace(layers=[None])))
    with pytest.raises(ConfigError, match="num_layers = 2, but the target has 1 layers; use start: random"):
        copy_last_layers(fresh(base[1], num_layers=2, start="random"), shallow)


def test_tied_target(tmp_path):
    """Case 58: the reduced head of a drafter on a tied target is saved and loaded as trained, never tied over."""
    model = llama()
    model.config.tie_word_embeddings = True
    type(model)(model.config).save_pretrained(tmp_path / "target")
    write_target(tmp_path / "other")
    for path in (tmp_path / "other").glob("tokenizer*"):
        path.rename(tmp_path / "target" / path.name)
    (tmp_path / "other" / "chat_template.jinja").rename(tmp_path / "target" / "chat_template.jinja")
    target = load_target(tmp_path / "target", "float32", LAYERS)
    drafter = fresh(target)
    with torch.no_grad():
        drafter.lm_head.weight.add_(1.0)
    (tmp_path / "drafter").mkdir()
    checkpoint.save(tmp_path / "drafter", drafter.tensors(), meta_of(drafter, target))
    again = checkpoint.load(tmp_path / "drafter", target)
    assert torch.equal(again.lm_head.weight, drafter.lm_head.weight)
    assert torch.equal(again.teacher_head, target.embedding[again.draft_ids])


@pytest.mark.parametrize("part", ["weights", "config", "dtype", "tokenizer", "template"])
def test_another_target_is_refused(base, saved, part):
    """Case 36: a drafter of another target, in any part of its fingerprint, is refused with the part's name."""
    _, target, _ = base
    meta = checkpoint.read_meta(saved)
    meta["target"]["fingerprint"][part] = "another"
    (saved / checkpoint.META).write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=f"org/target, whose {part} differs"):
        checkpoint.load(saved, target)


def test_a_fine_tuned_target_is_refused(base, saved, tmp_path_factory):
    """Case 36: the same architecture with other weights is another target."""
    tuned = load_target(write_target(tmp_path_factory.mktemp("tuned"), seed=1), "float32", LAYERS)
    with pytest.raises(ConfigError, match="weights differs"):
        checkpoint.load(saved, tuned)


def test_other_layers_are_refused(base, saved):
    """Case 04: a drafter trained on some layers never runs on others."""
    other = load_target(base[0], "float32", [1, 2, 4])
    with pytest.raises(ConfigError, match=r"trained on layers \[1, 2, 3\], but the target is tapped at \[1, 2, 4\]"):
        checkpoint.load(saved, other)


def change(tensors: dict, how: str) -> None:
    if how == "missing":
        del tensors["norm.weight"]
    elif how == "extra":
        tensors["norm.bias"] = torch.zeros(32)
    elif how == "reshaped":
        tensors["fc.weight"] = tensors["fc.weight"].t().contiguous()
    elif how == "zero-size":
        tensors["fc.weight"] = torch.zeros(0)
    elif how == "no d2t":
        del tensors["d2t"]
    elif how == "absolute d2t":
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize("how,named", [("missing", "norm.weight"), ("extra", "norm.bias"), ("reshaped", "fc.weight"),
                                       ("zero-size", "fc.weight"), ("no d2t", "d2t"), ("absolute d2t", "offset map")])
def test_tensors_that_do_not_fit_are_refused(base, saved, how, named):
    """Cases 13, 18, 56: missing, unexpected, reshaped and empty tensors and absolute maps are errors on load."""
    tensors = load_file(saved / checkpoint.WEIGHTS)
    change(tensors, how)
    save_file(tensors, saved / checkpoint.WEIGHTS)
    with pytest.raises(ConfigError, match=named):
        checkpoint.load(saved, base[1])


@pytest.mark.parametrize("value,named", [(torch.zeros(0), "no elements"), (torch.tensor([1.0, torch.nan]), "NaN"),
                                         (torch.tensor([torch.inf]), "NaN or Inf")])
def test_bad_tensors_are_never_saved(base, tmp_path, value, named):
    """Case 18: an empty tensor (a partition that was not gathered) or NaN aborts the save and writes nothing."""
    _, target, drafter = base
    with pytest.raises(RunError, match=f"tensor norm.weight .*{named}"):
        checkpoint.save(tmp_path, {**drafter.tensors(), "norm.weight": value}, meta_of(drafter, target))
    assert not list(tmp_path.iterdir())


def test_damaged_folders_are_config_errors(base, saved):
    """No checkpoint, another format, torn weights: each names its file."""
    weights = saved / checkpoint.WEIGHTS
    whole, meta = weights.read_bytes(), (saved / checkpoint.META).read_text()
    for content in (None, b"", whole[: len(whole) // 2]):
        weights.unlink() if content is None else weights.write_bytes(content)
        with pytest.raises(ConfigError, match="drafter.safetensors"):
            checkpoint.load(saved, base[1])
    weights.write_bytes(whole)
    for content in ("{", "[]", meta.replace(checkpoint.FORMAT, "drafthouse.drafter/0")):
        (saved / checkpoint.META).write_text(content)
        with pytest.raises(ConfigError, match="drafter.json"):
            checkpoint.load(saved, base[1])
    with pytest.raises(ConfigError, match="train first"):
        checkpoint.load(saved / "nowhere", base[1])


@pytest.mark.parametrize("path, value, named", [
    (("shape", "intermediate_size"), 10**10, "config implies"), (("shape", "head_dim"), 10**10, "config implies"),
    (("shape", "num_attention_heads"), 0, "shape.num_attention_heads = 0"), (("shape", "head_dim"), True, "= True"),
    (("shape", "hidden_size"), "32", "shape.hidden_size = '32'"), (("shape", "rms_norm_eps"), 2, "rms_norm_eps = 2"),
    (("shape", "draft_vocab_size"), 10**10, "d2t"), (("shape", "wings"), 2, "shape.wings is missing or unknown"),
    (("shape", "rope_parameters"), "x", "rope_parameters must be a mapping"),
    (("shape", "rope_parameters"), {"rope_theta": "x"}, "rope_theta = 'x'"),
    (("shape", "rope_parameters"), {"rope_type": "default"}, "rope_theta = 0.0"),
    (("shape",), [1], "shape = "), (("options",), None, "options = None: must be a dict"),
    (("layers",), ["a"], "layers = "),
    (("kind",), 5, "kind = 5"), (("target",), "x", "target = .x."), (("target",), {}, "target.fingerprint = None")])
def test_what_drafter_json_says_is_held_against_the_tensors(base, saved, path, value, named):
    """Cases 13, 32: a drafter.json of other sizes or forms is refused by field, before anything of its sizes is
    allocated."""
    meta = checkpoint.read_meta(saved)
    node = meta
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (saved / checkpoint.META).write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=named):
        checkpoint.load(saved, base[1])


def test_a_drafter_json_that_would_fill_memory(base, saved):
    """A description is kilobytes: a larger or deeper one is refused before it is parsed into memory."""
    for content, named in (('{"a": "' + "x" * 4_000_000 + '"}', "larger than 4000000 bytes"),
                           ("[" * 100_000, "cannot be read")):
        (saved / checkpoint.META).write_text(content)
        with pytest.raises(ConfigError, match=f"drafter.json: {named}"):
            checkpoint.load(saved, base[1])


@pytest.mark.parametrize("d2t, t2d", [(torch.zeros(16), None), (torch.zeros(4, 4).long(), None),
                                      (None, torch.ones(8, 8).bool())])
def test_maps_of_another_form(base, saved, d2t, t2d):
    """Case 56: maps that are no lists of whole numbers are refused, not indexed with."""
    tensors = load_file(saved / checkpoint.WEIGHTS)
    given = {name: t for name, t in (("d2t", d2t), ("t2d", t2d)) if t is not None}
    save_file(tensors | given, saved / checkpoint.WEIGHTS)
    with pytest.raises(ConfigError, match="d2t"):
        checkpoint.load(saved, base[1])
    with pytest.raises(ConfigError, match="d2t"):
        vocab.check(given.get("d2t", tensors["d2t"]), given.get("t2d", tensors["t2d"]))


def test_a_target_whose_rotation_no_export_can_state(base, monkeypatch):
    """Cases 32, 33: refused before anything is trained for it."""
    _, target, _ = base
    monkeypatch.setitem(target.config.rope_parameters, "rope_type", "longrope")
    with pytest.raises(ConfigError, match="rope_type = 'longrope': engines load drafters with default, linear"):
        fresh(target)


def test_unknown_kind_and_option_name_the_known_ones(base, saved):
    """A kind or option that this version does not know is an error, not a default."""
    with pytest.raises(ConfigError, match="known kinds: eagle3"):
        entry("eagle9")
    meta = checkpoint.read_meta(saved)
    meta["options"]["step_decai"] = 0.5
    (saved / checkpoint.META).write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="step_decay"):
        checkpoint.load(saved, base[1])
