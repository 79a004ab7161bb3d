"""The native EAGLE-3 export: mappings, layer ids, rotary settings, and the atomic writer."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafter import (
    DIM,
    FINGERPRINT,
    GROUPS,
    HEADS,
    LAYERS,
    ROPES,
    D,
    H,
    I,
    L,
    V,
    make_meta,
    make_state,
    write_checkpoint,
    write_native,
)
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.export.check import check_native
from drafters.export.layouts import LAYOUTS
from drafters.export.native import (
    canonical_rope,
    engine_layer_ids,
    legacy_rope,
    meta_from_config,
    native_config,
    native_tensors,
    state_from_native,
)
from drafters.export.write import export_native
from eval.reader import inverse_frequencies, read_target
from recipes.errors import ConfigError, RunError


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    meta = make_meta()
    return write_checkpoint(tmp_path / "checkpoint", meta, make_state(meta))


VARIANTS = [{}, {"tap_norms": True}, {"feedback": "post_norm"}, {"norm_before_residual": True},
            {"tap_norms": True, "feedback": "post_norm", "norm_before_residual": True}, {"num_layers": 2}]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_round_trip_is_bit_equal(tmp_path, options):
    meta = make_meta(**options)
    state = make_state(meta)
    folder = write_checkpoint(tmp_path / "checkpoint", meta, state)
    out = export_native(folder, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    back = state_from_native(load_file(out / "model.safetensors"))
    config = json.loads((out / "config.json").read_text())
    assert back.keys() == state.keys()
    assert all(back[n].dtype == state[n].dtype and torch.equal(back[n], state[n]) for n in state)
    assert meta_from_config(config) == meta
    flags = {"tap_norms": "fc_norm", "feedback": "norm_output"}
    flags["norm_before_residual"] = "norm_before_residual"
    assert config.keys() & set(flags.values()) == {flags[option] for option in options if option in flags}
    assert config["num_hidden_layers"] == options.get("num_layers", 1)
    text = (out / "SERVE.md").read_text()
    assert "vllm serve org/target" in text and '"method": "eagle3"' in text
    portable = not {"norm_before_residual", "num_layers"} & options.keys()
    assert ("--speculative-algorithm EAGLE3" in text) is portable is ("trtllm-serve" in text)
    assert (out / "tensorrt-llm.yaml").exists() is portable
    assert ("two layers serve another drafter" in text) is ("num_layers" in options)
    assert ("pull request 14988" in text) is ("tap_norms" in options or "feedback" in options) & portable


def test_config_is_the_documented_one():
    """Case 47: the keys of formats.md section 1, with the values engines rely on."""
    config = native_config(make_meta(), "float32")
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["num_aux_hidden_states"] == 3
    assert config["eagle_config"] == {"use_aux_hidden_state": True,
                                      "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"], config["head_dim"]) == (V, D, DIM)
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "float32"
    assert config["drafthouse"]["target"]["fingerprint"] == FINGERPRINT
    assert config["drafthouse"]["owned"] == {"embed_tokens": "target", "lm_head": "drafter"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precision(tmp_path, checkpoint, dtype):
    """Case 03: in lower precision too, every byte is the trained tensor's, rounded once."""
    out = export_native(checkpoint, tmp_path / "out", dtype, LAYERS, FINGERPRINT)
    trained, written = load_file(checkpoint / "drafter.safetensors"), load_file(out / "model.safetensors")
    for name, tensor in trained.items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert written[name].dtype == expected.dtype and torch.equal(written[name], expected)
    with pytest.raises(ConfigError, match="export.dtype = int8"):
        export_native(checkpoint, tmp_path / "out", "int8", LAYERS, FINGERPRINT)


def constant_model() -> LlamaForCausalLM:
    """A Llama whose block i adds the constant i + 1 to every state, starting from zero embeddings."""
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=I, num_hidden_layers=L, mlp_bias=True,
                         num_attention_heads=HEADS, num_key_value_heads=GROUPS)
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.data.zero_()
    for i, block in enumerate(model.model.layers):
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
        block.mlp.down_proj.bias.data.fill_(i + 1)
    return model


@pytest.mark.parametrize("layers", [[1, 4, 7], [0, 1, 8]], ids=["first, middle, last block", "both ends"])
def test_layer_ids_name_the_same_activations(layers):
    """Case 01: `entering` read as vLLM does, `output_of` as SGLang does, and the reader's taps, all agree."""
    model = constant_model()
    ids = engine_layer_ids(layers)
    outputs = {}
    hooks = [model.model.embed_tokens.register_forward_hook(lambda m, a, out: outputs.update({-1: out}))]
    entering = {}
    for i, block in enumerate(model.model.layers):
        hooks.append(block.register_forward_hook(lambda m, a, out, i=i: outputs.update({i: out})))
        hooks.append(block.register_forward_pre_hook(lambda m, a, i=i: entering.update({i: a[0]})))
    hooks.append(model.model.norm.register_forward_pre_hook(lambda m, a: entering.update({L: a[0]})))
    with torch.no_grad():
        _, taps = read_target(model, [3, 1, 4], layers)
    for hook in hooks:
        hook.remove()
    for k, before, after, tap in zip(layers, ids["entering"], ids["output_of"], taps, strict=True):
        known = torch.full((3, H), float(k * (k + 1) // 2))  # 1 + 2 + ... + k
        assert torch.equal(tap, known)
        assert torch.equal(entering[before][0], known) and torch.equal(outputs[after][0], known)


@pytest.mark.parametrize("layers", [[], [4, 2], [2, 2, 5], [-1, 2], [1.0, 2], [True, 2]], ids=str)
def test_unusable_layer_ids(layers):
    """Cases 04 and 63: no export without distinct, ascending, whole layer ids."""
    with pytest.raises(ConfigError, match="layers = "):
        engine_layer_ids(layers)


def test_layers_must_be_those_of_the_traces(tmp_path, checkpoint):
    """Case 04: missing ids and ids other than the training manifest's are refused."""
    for expected in ([1, 3, 4], [2, 4], [2, 4, 6]):
        with pytest.raises(RunError, match=r"layers = \[2, 4, 5\], but the traces hold"):
            export_native(checkpoint, tmp_path / "out", "float32", expected, FINGERPRINT)
    meta = make_meta()
    del meta["layers"]
    write_checkpoint(checkpoint, meta, make_state(make_meta()))
    with pytest.raises(ConfigError, match="layers missing"):
        export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", FINGERPRINT)
def test_another_target_is_refused(tmp_path, checkpoint, key):
    """Case 36: the fingerprint's part that differs is named; an empty one is no agreement."""
    with pytest.raises(RunError, match=f"differs from the target's in {key} .*served"):
        export_native(checkpoint, tmp_path / "out", "float32", LAYERS, {**FINGERPRINT, key: "other"})
    with pytest.raises(RunError, match="both are needed"):
        export_native(checkpoint, tmp_path / "out", "float32", LAYERS, {})


def test_tensors_of_other_origin_are_refused(tmp_path, checkpoint, monkeypatch):
    """Case 03: what the export adds or changes on its way is found by comparing bytes; nothing is left."""
    def fresh_embedding(state, meta, dtype, served):
        return {**native_tensors(state, meta, dtype), "embed_tokens.weight": torch.randn(V, H)}

    def replaced(state, meta, dtype, served):
        tensors = native_tensors(state, meta, dtype)
        return {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1e-6}

    for broken, named in ((fresh_embedding, "embed_tokens.weight is in only one"),
                          (replaced, "lm_head.weight differs")):
        monkeypatch.setitem(LAYOUTS, "native", replace(LAYOUTS["native"], tensors=broken))
        with pytest.raises(RunError, match=named):
            export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_failure_keeps_the_earlier_export(tmp_path, checkpoint):
    """Cases 13 and 18: a checkpoint that fails the check replaces nothing."""
    out = export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    state = make_state(make_meta())
    state["fc.weight"] = state["fc.weight"][:0].clone()
    write_checkpoint(checkpoint, make_meta(), state)
    with pytest.raises(RunError, match="fc.weight: has no elements"):
        export_native(checkpoint, out, "float32", LAYERS, FINGERPRINT)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_a_killed_export_is_repeated(tmp_path, checkpoint):
    """What a kill can leave, a partial folder or an earlier export moved away, is cleared by the next run."""
    out = export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    out.rename(tmp_path / ".out.earlier")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"torn")
    state = make_state(make_meta())
    write_checkpoint(checkpoint, make_meta(), {n: t for n, t in state.items() if n != "fc.weight"})
    with pytest.raises(RunError, match="fc.weight: missing"):
        export_native(checkpoint, out, "bfloat16", LAYERS, FINGERPRINT)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    write_checkpoint(checkpoint, make_meta(), state)
    export_native(checkpoint, out, "bfloat16", LAYERS, FINGERPRINT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "out"]
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_replacing_that_fails_puts_the_earlier_export_back(tmp_path, checkpoint, monkeypatch):
    """Where the new folder does not get its name, the message names the export and the earlier one is there, whole."""
    out = export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    before, rename = {p.name: p.read_bytes() for p in out.iterdir()}, os.replace

    def refused(source, destination):
        if (Path(source).name, Path(destination)) == (".out.partial", out):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        rename(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.raises(OSError) as raised:
            export_native(checkpoint, out, "bfloat16", LAYERS, FINGERPRINT)
    assert raised.value.errno == errno.EIO and raised.value.filename == str(out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_an_earlier_export_outlives_a_foreign_folder_of_its_name(tmp_path, checkpoint):
    """What a kill left moved away is not deleted while something else has its name."""
    out = export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    out.rename(tmp_path / ".out.earlier")
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no earlier export"):
        export_native(checkpoint, out, "float32", LAYERS, FINGERPRINT)
    assert (tmp_path / ".out.earlier" / "model.safetensors").is_file()


def test_a_full_vocabulary_has_no_maps(tmp_path):
    """vLLM (0.32) makes room for d2t only where the vocabularies differ, and refuses the folder for it otherwise."""
    meta = make_meta()
    meta["shape"]["draft_vocab_size"] = V
    state = make_state(meta) | {"lm_head.weight": torch.ones(V, H), "d2t": torch.zeros(V, dtype=torch.long),
                                "t2d": torch.ones(V, dtype=torch.bool)}
    folder = write_checkpoint(tmp_path / "checkpoint", meta, state)
    out = export_native(folder, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == state.keys() - {"d2t", "t2d"}
    for name in ("d2t", "t2d"):
        save_file(tensors | {name: state[name]}, out / "model.safetensors", {"format": "pt"})
        with pytest.raises(RunError, match=f"{name}: unknown tensor: the draft vocabulary is the target's"):
            check_native(out)


def test_a_foreign_folder_is_never_replaced(tmp_path, checkpoint):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no earlier export"):
        export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_unusable_checkpoints(tmp_path, checkpoint):
    """Case 32 among them: without a rotary base an engine would silently take 10000."""
    for field, broken in (("format", "other"), ("kind", "medusa"), ("options", {}), ("shape", {})):
        write_checkpoint(checkpoint, {**make_meta(), field: broken}, make_state(make_meta()))
        with pytest.raises(ConfigError, match=field):
            export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)
    for layers in (0, 3, "two"):
        with pytest.raises(ConfigError, match=f"options.num_layers = {layers!r}, must be 1 to 2"):
            native_config(make_meta(num_layers=layers), "float32")
    meta = make_meta()
    del meta["shape"]["rope_parameters"]["rope_theta"]
    with pytest.raises(ConfigError, match="rope_theta"):
        native_config(meta, "float32")
    meta["shape"]["rope_parameters"] = {"full_attention": {"rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="differ between layer types"):
        native_config(meta, "float32")
    (checkpoint / "drafter.json").unlink()
    with pytest.raises(ConfigError, match="drafter.json: no drafter checkpoint here"):
        export_native(checkpoint, tmp_path / "out", "float32", LAYERS, FINGERPRINT)


def inverse_by_hand(rope: dict) -> torch.Tensor:
    """Frequencies over the rotated dimensions only, the scaling being transformers'."""
    dims = int(DIM * rope.get("partial_rotary_factor", 1.0))
    config = LlamaConfig(hidden_size=dims * HEADS, num_attention_heads=HEADS, head_dim=dims,
                         rope_parameters={k: v for k, v in rope.items() if k != "partial_rotary_factor"})
    return LlamaRotaryEmbedding(config).inv_freq


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotary_settings_survive(tmp_path, rope):
    """Case 32: old and new layout give equal inverse frequencies in training, export and reload."""
    meta = make_meta()
    meta["shape"]["rope_parameters"] = rope
    config = native_config(meta, "float32")
    check_native(write_native(tmp_path / "new", config, native_tensors(make_state(meta), meta, "float32")))
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    assert canonical_rope(old) == canonical_rope(config) == rope
    assert meta_from_config(old) == meta_from_config(config) == meta
    expected = inverse_by_hand(rope)
    torch.testing.assert_close(inverse_frequencies(old), expected, rtol=1e-6, atol=0)
    if "partial_rotary_factor" not in rope:  # transformers' Llama itself has no partial rotation
        for layout in (old, config):
            (tmp_path / "config.json").write_text(json.dumps(layout))
            reloaded = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
            assert torch.equal(reloaded.inv_freq, expected)


def test_legacy_type_key_is_renamed():
    """Case 32: older configs call rope_type `type`, which some engines no longer read."""
    rope = canonical_rope({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert rope == ROPES["linear"]
    assert legacy_rope(rope) == {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
