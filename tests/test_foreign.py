"""EAGLE-3 checkpoints of other tools, mapped to this project's names: what is read, and what is refused by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import IDS, OFFSETS, D, H, I, in_layers, maps, native, speculators, weights
from tiny import LAYERS, V
from tiny_drafter import ROPES, make_meta, make_state
from tiny_drafter import H as OWN_H
from tiny_drafter import V as OWN_V
from transformers import LlamaConfig

from drafters import vocab
from drafters.export.foreign import STRUCTURE, draft_ids, from_native
from drafters.export.native import native_config, native_tensors
from drafters.export.speculators import from_speculators, speculators_config, speculators_tensors
from recipes.errors import ConfigError

VARIANTS = [{}, {"tap_norms": True, "feedback": "post_norm"}, {"norm_before_residual": True}, {"num_layers": 2}]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def states(found, meta) -> tuple:
    """What an import says, to be compared with the meta it was made from."""
    return found.layers, {k: found.options[k] for k in STRUCTURE if k in meta["options"]}, found.shape


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_round_trip_is_bit_equal(layout, options):
    """Cases 03, 46: a checkpoint written in a layout and read back is the same, tensors bit for bit, layers, options,
    sizes and vocabulary; written again it gives the same bytes."""
    meta = make_meta(**options)
    state, embedding = make_state(meta), torch.randn(OWN_V, OWN_H)
    if layout == "native":
        config, tensors = native_config(meta, "float32"), native_tensors(state, meta, "float32")
        found = from_native(config, tensors)
        assert found.target == meta["target"]
    else:
        config = speculators_config(meta, "float32", ["LlamaForCausalLM"], 3)
        tensors = speculators_tensors(state, meta, "float32", embedding)
        found = from_speculators(config, tensors)
        assert torch.equal(found.embedding, embedding)
        found.shape["target_layers"] = meta["shape"]["target_layers"]  # the layout does not say
    ids = vocab.ids_of(state["d2t"])
    assert states(found, meta) == (meta["layers"], {k: meta["options"][k] for k in STRUCTURE if k in meta["options"]},
                                   meta["shape"])
    assert not found.unsaid and torch.equal(found.ids, ids)
    d2t, t2d = vocab.maps(found.ids, OWN_V)
    back = found.tensors | {"d2t": d2t, "t2d": t2d}
    assert same_bits(back, state)
    again = (native_tensors(back, meta, "float32") if layout == "native"
             else speculators_tensors(back, meta, "float32", found.embedding))
    assert same_bits(again, tensors)


def test_speculators_config_is_the_documented_one():
    """Case 47: the keys of formats.md section 2; every flag is written, since engines' defaults differ; the layer is
    layers.0, the embedding is there, and the maps only where the vocabulary is reduced."""
    meta = make_meta(norm_before_residual=True)
    config = speculators_config(meta, "bfloat16", ["Qwen3ForCausalLM"], 5)
    assert [config[k] for k in ("norm_before_residual", "fc_norm", "norm_output", "norm_before_fc")] == [
        True, False, False, False]
    assert config["speculators_config"]["verifier"] == {"name_or_path": "org/target",
                                                        "architectures": ["Qwen3ForCausalLM"]}
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["transformer_layer_config"]["vocab_size"] == OWN_V and config["draft_vocab_size"] == 12
    tensors = speculators_tensors(make_state(meta), meta, "bfloat16", torch.zeros(OWN_V, OWN_H))
    assert tensors["layers.0.hidden_norm.weight"].dtype == tensors["embed_tokens.weight"].dtype == torch.bfloat16
    assert {"d2t", "t2d", "lm_head.weight"} < tensors.keys() and not any(n.startswith("midlayer") for n in tensors)
    meta["shape"]["draft_vocab_size"] = OWN_V
    state = make_state(meta) | {"d2t": torch.zeros(OWN_V, dtype=torch.long), "t2d": torch.ones(OWN_V).bool()}
    full = speculators_tensors(state, meta, "float32", torch.zeros(OWN_V, OWN_H))
    assert not {"d2t", "t2d"} & full.keys()
    with pytest.raises(ConfigError, match=r"embedding \[12, 32\]"):
        speculators_tensors(state, meta, "float32", torch.zeros(12, OWN_H))
    with pytest.raises(ConfigError, match="export.dtype = int4"):
        speculators_config(meta, "int4", [], 3)


@pytest.mark.parametrize("top, inner, entering", [
    ([1, 2, 3], None, [1, 2, 3]), (None, [0, 1, 2], [1, 2, 3]), ([1, 2, 3], [0, 1, 2], [1, 2, 3]),
    ([0, 3, 6], [-1, 2, 5], [0, 3, 6]), (None, None, None)])
def test_layer_ids_of_both_conventions(top, inner, entering):
    """Case 01: the top-level ids count the state that enters a layer, those of eagle_config a layer's output."""
    eagle = None if inner is None else {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": inner}
    config = native(eagle_aux_hidden_state_layer_ids=top, eagle_config=eagle)
    assert from_native(config, weights() | maps()).layers == entering


@pytest.mark.parametrize("top, inner, message", [
    ([1, 2, 3], [1, 2, 3], "must be one less each"), ([3, 2, 1], None, "eagle_aux_hidden_state_layer_ids = \\[3, 2, 1"),
    ("1,2,3", None, "distinct ascending"), (None, ["a"], "eagle_config.eagle_aux"), (None, 5, "distinct ascending")])
def test_layer_ids_that_contradict_or_make_no_sense(top, inner, message):
    """Case 01: lists that name different layers, and ids that are no list of layers, are refused by key and value."""
    eagle = None if inner is None else {"eagle_aux_hidden_state_layer_ids": inner}
    with pytest.raises(ConfigError, match=message):
        from_native(native(eagle_aux_hidden_state_layer_ids=top, eagle_config=eagle), weights() | maps())


SPELLINGS = {
    "native": lambda t: t,
    "layers.0": in_layers,
    "model.": lambda t: {("" if n in ("d2t", "t2d", "lm_head.weight") else "model.") + n: v for n, v in t.items()},
    "model.layers.0": lambda t: in_layers(t, "model."),
    "draft_model.": lambda t: {f"draft_model.{n}": v for n, v in t.items()},
    "module.draft_model.": lambda t: {f"module.draft_model.{n}": v for n, v in t.items()},
    "buffers and copies": lambda t: t | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4),
                                         "verifier_norm.weight": torch.ones(H),
                                         "verifier_lm_head.weight": torch.ones(D, H)},
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_names_that_are_met_in_published_folders(spell):
    """Case 13: every spelling gives the same tensors; two spellings of one tensor are an error, not a choice."""
    found = from_native(native(), spell(weights() | maps()))
    assert same_bits(found.tensors, weights()) and found.ids.tolist() == IDS and found.head == "own"
    with pytest.raises(ConfigError, match="both are norm.weight"):
        from_native(native(), spell(weights() | maps()) | {"norm.weight": torch.ones(H),
                                                           "model.norm.weight": torch.ones(H)})


@pytest.mark.parametrize("d2t, t2d", [
    (OFFSETS, True), (OFFSETS, False), (IDS, True), (IDS, False)],
    ids=["offsets, t2d", "offsets alone", "absolute, t2d", "absolute alone"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_both_kinds_of_map(d2t, t2d, dtype):
    """Case 56: offsets and absolute ids, 64 bits and TensorRT-LLM's 32, decode to the same non-contiguous ids."""
    tensors = {"d2t": torch.tensor(d2t, dtype=dtype)} | ({"t2d": maps()["t2d"].to(torch.uint8)} if t2d else {})
    assert draft_ids(tensors, {"vocab_size": V, "draft_vocab_size": D}).tolist() == IDS and not tensors


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_a_map_never_decodes_to_other_ids(ids, absolute, marked):
    """Case 56: whatever the ids and the kind of map, they come back, or the map is refused as ambiguous; with t2d
    they always come back."""
    wanted = torch.tensor(sorted(ids))
    d2t, t2d = vocab.maps(wanted, 41)
    tensors = {"d2t": wanted if absolute else d2t} | ({"t2d": t2d} if marked else {})
    try:
        found = draft_ids(tensors, {"vocab_size": 41, "draft_vocab_size": len(ids)})
    except ConfigError as error:
        assert not marked and "add t2d" in str(error)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tensors, message", [
    ({}, "d2t is missing: draft_vocab_size = 12 of vocab_size = 64"),
    ({"d2t": [0] * 11}, r"d2t \[11\].* imply whole numbers \[12\]"),
    ({"d2t": [0] * 12, "t2d": [True] * 12}, r"t2d \[12\]"),
    ({"d2t": [60] * 12}, "neither as offsets nor as ids"),
    ({"d2t": [-1] * 12}, "neither as offsets nor as ids"),
    ({"d2t": OFFSETS, "t2d": [True] * 12 + [False] * 52}, "that t2d marks"),
    ({"d2t": [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]}, "no t2d tells which")])
def test_maps_that_decode_to_nothing(tensors, message):
    """Case 56: no map, a short one, ids outside the target, repeated ids, other ids than t2d's: each is named."""
    with pytest.raises(ConfigError, match=message):
        draft_ids({n: torch.tensor(t) for n, t in tensors.items()}, {"vocab_size": V, "draft_vocab_size": D})


def test_full_vocabulary_needs_no_map():
    """Without a reduced vocabulary draft ids are target ids; a missing head is the target's, or the embedding where
    the two are tied; of a reduced vocabulary it is an error (case 58)."""
    for size in (None, V):
        found = from_native(native(draft_vocab_size=size), weights(full=True))
        assert found.ids.tolist() == list(range(V)) and found.shape["draft_vocab_size"] == V
    headless = {n: t for n, t in weights(full=True).items() if n != "lm_head.weight"}
    assert from_native(native(draft_vocab_size=None), headless).head == "head"
    assert from_native(native(draft_vocab_size=None, tie_word_embeddings=True), headless).head == "embedding"
    assert from_native(native(tie_word_embeddings=True), weights() | maps()).head == "own"
    with pytest.raises(ConfigError, match="lm_head.weight is missing: draft_vocab_size = 12"):
        from_native(native(), headless | maps())


SECOND = {n: t for n, t in weights(layers=2).items() if n.startswith("layers.1.")}
REFUSED = {
    "three layers, native": (native(num_hidden_layers=3), {}, "num_hidden_layers = 3: the drafter here has 1 to 2"),
    "no second layer": (native(num_hidden_layers=2), {}, "layers.1.input_layernorm.weight is missing"),
    "second layer, unsaid": (native(), {"layers.1.mlp.up_proj.weight": torch.ones(I, H)},
                             "more layers than num_hidden_layers says"),
    "second layer, SGLang": (native(num_hidden_layers=2), {"additional_layers.0.x": torch.ones(1)},
                             "leave out a residual"),
    "second layer, wide": (native(num_hidden_layers=2),
                           SECOND | {"layers.1.self_attn.q_proj.weight": torch.ones(H, 2 * H)},
                           r"layers.1.self_attn.q_proj.weight \[32, 64\], the config implies \[32, 32\]"),
    "numbered layers": (native(), {"midlayer.0.x": torch.ones(1)}, "TensorRT-LLM's numbered layers"),
    "query norm": (native(), {"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "norms queries"),
    "bias": (native(), {"fc.bias": torch.ones(H)}, "fc.bias: it has biases"),
    "parallel": (native(), {"mask_hidden": torch.ones(1)}, "P-EAGLE"),
    "one norm for all taps": (native(), {"input_norm.weight": torch.ones(3 * H)}, "norm_before_fc"),
    "unknown": (native(), {"gate.weight": torch.ones(1)}, "gate.weight: no drafter here has it"),
    "flag without its norms": (native(fc_norm=True), {}, "fc_norm.0.weight is missing"),
    "norms without their flag": (native(), {"fc_norm.0.weight": torch.ones(H)}, "fc_norm.0.weight"),
    "reshaped": (native(), {"norm.weight": torch.ones(2)}, r"norm.weight \[2\], the config implies \[32\]"),
    "empty": (native(), {"norm.weight": torch.ones(0)}, r"norm.weight \[0\]"),
    "not finite": (native(), {"norm.weight": torch.full((H,), torch.nan)}, "norm.weight .*NaN"),
    "two taps fused": (native(eagle_aux_hidden_state_layer_ids=[1, 2]), {}, "fuses 3 states of 32, but"),
    "wrong width": (native(hidden_size=16), {}, r"fc.weight \[32, 96\] fuses 6"),
    "biased attention": (native(attention_bias=True), {}, "attention_bias = True"),
    "other activation": (native(hidden_act="gelu"), {}, "hidden_act = 'gelu': the drafter here has 'silu'"),
    "quantised": (native(quantization_config={"bits": 4}), {}, "quantization_config"),
    "partial rotation": (native(partial_rotary_factor=0.5), {}, "partial_rotary_factor = 0.5"),
    "partial, nested": (native(rope_theta=None, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), {},
                        "partial_rotary_factor = 0.5"),
    "unknown rotation": (native(rope_scaling={"type": "mrope"}), {}, "rope_type = 'mrope'"),
    "scaling without factor": (native(rope_scaling={"rope_type": "linear"}), {}, "factor is missing"),
    "window": (native(layer_types=["sliding_attention"]), {}, "attends fully"),
    "no last norm": (native(eagle_config={"use_last_layernorm": False}), {}, "eagle_config.use_last_layernorm"),
    "EAGLE-1": (native(eagle_config={"use_aux_hidden_state": False}), {}, "use_aux_hidden_state = False"),
    "flag as text": (native(fc_norm="no"), {}, "fc_norm = 'no': must be true or false"),
    "size as text": (native(hidden_size="32"), {}, "hidden_size = '32': must be a whole number"),
    "epsilon": (native(rms_norm_eps=2), {}, "rms_norm_eps = 2"),
    "head of another vocabulary": (native(), {"lm_head.weight": torch.ones(V, H)}, r"lm_head.weight \[64, 32\]"),
    "embedding of another one": (native(), {"embed_tokens.weight": torch.ones(D, H)}, r"embed_tokens.weight \[12"),
    "speculators, three layers": (speculators({"num_hidden_layers": 3}), {}, "layer_config.num_hidden_layers = 3"),
    "speculators, Qwen3": (speculators({"model_type": "qwen3"}), {}, "model_type = 'qwen3'.*Llama"),
    "speculators, no inner": (speculators(transformer_layer_config=7), {}, "transformer_layer_config.model_type = 7"),
    "speculators, other kind": (speculators(speculators_model_type="dflash"), {}, "'dflash': only eagle3"),
    "speculators, norm before": (speculators(norm_before_fc=True), {}, "norm_before_fc = True"),
    "drafthouse as text": (native(drafthouse="x"), {}, "drafthouse = 'x': must be a mapping"),
    "its target as text": (native(drafthouse={"target": "x"}), {}, "drafthouse.target = 'x': must be a mapping"),
    "its fingerprint": (native(drafthouse={"target": {"fingerprint": {"weights": 1}}}), {}, "must hold digests"),
    "eagle_config as list": (native(eagle_config=[1]), {}, r"eagle_config = \[1\]: must be a mapping"),
    "rotation as text": (native(rope_scaling="x"), {}, "rope_scaling = 'x': must be a mapping"),
    "rotation as list": (native(rope_parameters=[1]), {}, "rope_parameters = .*must be a mapping"),
    "kind of rotation": (native(rope_scaling={"rope_type": ["linear"]}), {}, "rope_type = "),
    "factor as text": (native(rope_scaling={"rope_type": "linear", "factor": "2"}), {}, "factor = '2': must be a num"),
    "further setting": (native(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}), {}, "beta_fast"),
    "base as text": (native(rope_theta="1e4"), {}, "rope_theta = '1e4': must be a number above 0"),
    "base of 0": (native(rope_theta=0), {}, "rope_theta = 0: must be a number above 0"),
    "negative base": (native(rope_theta=-1.0), {}, "rope_theta = -1.0"),
    "no base": (native(rope_theta=float("nan")), {}, "rope_theta = nan"),
    "endless base": (native(rope_theta=float("inf")), {}, "rope_theta = inf"),
    "kinds of layers": (native(layer_types=5), {}, "layer_types = 5: the drafter here attends fully"),
    "kind of a layer": (native(layer_types=[["full_attention"]]), {}, "layer_types = "),
    "speculators, layer ids": (speculators(eagle_aux_hidden_state_layer_ids=[3, 1]), {}, "distinct ascending"),
}


@pytest.mark.parametrize("config, change, message", REFUSED.values(), ids=REFUSED)
def test_what_the_drafter_here_cannot_compute_is_refused(config, change, message):
    """Cases 13, 18, 32, 47, 56: never loaded with another meaning; the key or tensor is named with its value."""
    read = from_speculators if "speculators_model_type" in config else from_native
    with pytest.raises(ConfigError, match=message):
        read(config, weights() | maps() | change)


def test_settings_that_engines_read_differently_stay_open():
    """norm_output of a native folder means feedback to vLLM and the head's norm to SpecForge; norm_before_residual
    of a speculators folder is true to vLLM and false to the package where it is absent (case 47)."""
    for value in (True, False):
        found = from_native(native(norm_output=value), weights() | maps())
        assert "feedback" not in found.options and "SpecForge" in found.unsaid["feedback"]
    assert from_native(native(), weights() | maps()).options["feedback"] == "pre_norm"
    found = from_speculators(speculators(norm_before_residual=None), weights() | maps())
    assert list(found.unsaid) == ["norm_before_residual"] and "norm_before_residual" not in found.options
    found = from_speculators(speculators(norm_output=True), weights() | maps())
    assert not found.unsaid and found.options["feedback"] == "post_norm"


def test_absent_keys_have_the_defaults_of_engines():
    """Case 32: an old folder without rotary settings, head_dim and precision of the norms is read as Llama's config
    reads it, and says so; a folder without layer ids leaves them to the target."""
    old = native(rope_theta=None, head_dim=None, rms_norm_eps=None, num_key_value_heads=None, num_hidden_layers=None,
                 max_position_embeddings=None, eagle_aux_hidden_state_layer_ids=None, hidden_act=None)
    tensors = {n: t.repeat(2, 1) if "k_proj" in n or "v_proj" in n else t for n, t in (weights() | maps()).items()}
    found, default = from_native(old, tensors), LlamaConfig(hidden_size=H, num_attention_heads=4)
    assert found.shape["rope_parameters"] == default.rope_parameters == {"rope_theta": 1e4, "rope_type": "default"}
    assert found.shape["rms_norm_eps"] == default.rms_norm_eps and found.shape["head_dim"] == default.head_dim == 8
    assert found.shape["num_key_value_heads"] == default.num_key_value_heads == 4
    assert found.shape["max_position_embeddings"] == default.max_position_embeddings
    assert found.layers is None and found.notes == ["rope_theta is not stated: 10000, as engines take it"]
    with pytest.raises(ConfigError, match="num_hidden_layers = 32"):
        inner = speculators()["transformer_layer_config"]
        from_speculators(speculators(transformer_layer_config={k: v for k, v in inner.items() if "layers" not in k}),
                         weights() | maps())


@pytest.mark.parametrize("rope", [ROPES[n] for n in ("default", "base", "linear", "llama3")])
@pytest.mark.parametrize("form", ["nested", "top", "older"])
def test_rotary_settings_of_every_form(rope, form):
    """Case 32: nested, top-level and the older key `type` are one setting."""
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    if form == "nested":
        keys = {"rope_theta": None, "rope_parameters": rope}
    else:
        kind = {"type" if form == "older" else "rope_type": scaling.pop("rope_type")}
        keys = {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default"
                else kind | scaling}
    for found in (from_native(native(**keys), weights() | maps()),
                  from_speculators(speculators({"rope_parameters": None, **keys}), weights() | maps())):
        assert found.shape["rope_parameters"] == rope and not found.notes
        assert found.layers == LAYERS
