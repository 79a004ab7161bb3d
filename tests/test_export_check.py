"""Damaged native EAGLE-3 folders are refused, and every damage is named."""

import pytest
import torch
from tiny_drafter import D, H, V, make_meta, make_state, write_native

from drafters.export.check import check_native, violations
from drafters.export.native import native_config, native_tensors
from drafters.export.tensor_check import TENSORS
from recipes.errors import RunError


@pytest.fixture
def good() -> tuple[dict, dict]:
    meta = make_meta()
    return native_config(meta, "float32"), native_tensors(make_state(meta), meta, "float32")


class TestDamage:
    """Cases 13, 18, 47, 56 and formats.md section 8: a damaged export is refused and the damage is named."""

    def refused(self, tmp_path, config, tensors, *named):
        folder = write_native(tmp_path / "native", config, tensors)
        with pytest.raises(RunError) as error:
            check_native(folder)
        for text in named:
            assert text in str(error.value), str(error.value)

    def test_undamaged_passes(self, tmp_path, good):
        check_native(write_native(tmp_path / "native", *good))

    @pytest.mark.parametrize("name", TENSORS)
    def test_each_tensor(self, tmp_path, good, name):
        config, tensors = good
        whole = tensors.pop(name)
        self.refused(tmp_path, config, tensors, f"{name}: missing")
        self.refused(tmp_path, config, {**tensors, "model." + name: whole}, f"{name}: missing",
                     f"model.{name}: unknown")
        self.refused(tmp_path, config, {**tensors, name: torch.cat([whole, whole[:1]])}, f"{name}: ")
        self.refused(tmp_path, config, {**tensors, name: whole[None].clone()}, f"{name}: shape [1, ")
        self.refused(tmp_path, config, {**tensors, name: whole[:0].clone()}, f"{name}: has no elements")
        self.refused(tmp_path, config, {**tensors, name: whole.double()}, f"{name}: is torch.float64")
        if whole.is_floating_point():
            broken = whole.clone()
            broken.view(-1)[-1] = float("nan")
            self.refused(tmp_path, config, {**tensors, name: broken}, f"{name}: holds NaN")

    @pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "input_norm.weight", "mask_hidden",
                                      "fc_norm.0.weight", "midlayer.self_attn.q_proj.bias"])
    def test_unknown_tensors(self, tmp_path, good, name):
        config, tensors = good
        self.refused(tmp_path, config, {**tensors, name: torch.zeros(H)}, f"{name}: unknown")

    @pytest.mark.parametrize("key,value,named", [
        ("vocab_size", D, "vocab_size is set to the DRAFT vocabulary"),
        ("draft_vocab_size", V + 1, "draft_vocab_size = 65 is above vocab_size"),
        ("tie_word_embeddings", True, "tie_word_embeddings = True"),
        ("tie_word_embeddings", 0, "tie_word_embeddings = 0"),
        ("architectures", ["LlamaForCausalLM"], "architectures = ['LlamaForCausalLM']"),
        ("num_hidden_layers", 3, "num_hidden_layers = 3"),
        ("num_hidden_layers", True, "num_hidden_layers = True"),
        ("num_hidden_layers", 2, "layers.1.mlp.up_proj.weight: missing"),
        ("eagle_aux_hidden_state_layer_ids", [1, 3, 4], "eagle_config"),
        ("eagle_aux_hidden_state_layer_ids", [4, 2, 5], "ascending"),
        ("eagle_aux_hidden_state_layer_ids", 3, "eagle_aux_hidden_state_layer_ids"),
        ("eagle_aux_hidden_state_layer_ids", [2, 4, 9], "the target has 8 layers"),
        ("eagle_config", {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
         "its ids count the OUTPUT"),
        ("eagle_config", {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [3, 5, 6]},
         "must be {'use_aux_hidden_state': True, 'eagle_aux_hidden_state_layer_ids': [1, 3, 4]}"),
        ("num_aux_hidden_states", 1, "fc.weight: shape [32, 96]"),
        ("target_hidden_size", 16, "embed_tokens.weight: missing"),
        ("target_hidden_size", None, "target_hidden_size = None"),
        ("head_dim", 7, "head_dim = 7"),
        ("head_dim", 16, "q_proj.weight: shape"),
        ("num_key_value_heads", 3, "no multiple of num_key_value_heads"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps"),
        ("torch_dtype", "bfloat16", "must be torch.bfloat16 (torch_dtype)"),
        ("fc_norm", True, "fc_norm.2.weight: missing"),
        ("norm_output", "no", "norm_output = 'no'"),
        ("norm_before_fc", True, "norm_before_fc = True"),
        ("rope_theta", 1e4, "says other than"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "not the older key type"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "low_freq_factor, high_freq_factor"),
        ("rope_scaling", {"rope_type": "spiral"}, "unknown rope_type"),
        ("partial_rotary_factor", 0.3, "says other than"),
        ("partial_rotary_factor", 1.5, "partial_rotary_factor = 1.5"),
    ])
    def test_config_values(self, tmp_path, good, key, value, named):
        """Cases 01, 04, 13, 32: a wrong value is named, layer ids off by one included."""
        config, tensors = good
        self.refused(tmp_path, {**config, key: value}, tensors, named)

    @pytest.mark.parametrize("key", sorted(native_config(make_meta(), "float32").keys()
                                           - {"target_hidden_size", "rope_parameters", "drafthouse"}))
    def test_missing_config_keys(self, tmp_path, good, key):
        """Case 04: engines guess what is missing, so everything is written out."""
        config, tensors = good
        del config[key]
        self.refused(tmp_path, config, tensors, key)

    def test_maps(self, tmp_path, good):
        """Case 56: absolute ids, ids out of range, repeated, unsorted, and a t2d that says other than d2t."""
        config, tensors = good
        d2t, t2d = tensors["d2t"], tensors["t2d"]

        def damaged(*named, d2t=d2t, t2d=t2d):
            self.refused(tmp_path, config, {**tensors, "d2t": d2t.contiguous(), "t2d": t2d}, *named)

        damaged("d2t holds ABSOLUTE ids", d2t=d2t + torch.arange(D))
        damaged("outside 0..63", d2t=d2t + V)
        damaged("already taken", d2t=d2t.index_fill(0, torch.tensor([3]), int(d2t[2]) - 1))
        damaged("not strictly ascending", d2t=(d2t + torch.arange(D)).flip(0) - torch.arange(D))
        damaged("than t2d marks", t2d=t2d.roll(1))
        damaged("t2d: marks 13 target ids", t2d=t2d.index_fill(0, (~t2d).nonzero()[0], True))
        damaged("d2t: is torch.int32", d2t=d2t.int())

    def test_every_violation_is_listed(self, tmp_path, good):
        config, tensors = good
        config["tie_word_embeddings"] = True
        del config["head_dim"], tensors["fc.weight"]
        tensors["norm.weight"] = tensors["norm.weight"] * float("inf")
        folder = write_native(tmp_path / "native", config, tensors)
        (folder / "pytorch_model.bin").write_bytes(b"")
        assert len(list(violations(folder))) == 5

    def test_unreadable_files(self, tmp_path, good):
        folder = write_native(tmp_path / "native", *good)
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000])
        with pytest.raises(RunError, match="model.safetensors: cannot be read"):
            check_native(folder)
        for content in ("{", "[]"):
            (folder / "config.json").write_text(content)
            with pytest.raises(RunError, match="config.json"):
                check_native(folder)

    def test_second_layer(self, tmp_path):
        """Case 13: a second layer has vLLM's names, reads the state alone, and has no norm that nobody reads."""
        meta = make_meta(num_layers=2)
        config, tensors = native_config(meta, "float32"), native_tensors(make_state(meta), meta, "float32")
        check_native(write_native(tmp_path / "native", config, tensors))
        wide = {"layers.1.self_attn.k_proj.weight": tensors["midlayer.self_attn.k_proj.weight"].clone()}
        self.refused(tmp_path, config, tensors | wide, "layers.1.self_attn.k_proj.weight: shape [16, 64]")
        stray = {"layers.1.hidden_norm.weight": torch.ones(H), "layers.2.input_layernorm.weight": torch.ones(H)}
        self.refused(tmp_path, config, tensors | stray, *(f"{name}: unknown" for name in stray))
        self.refused(tmp_path, config | {"num_hidden_layers": 1}, tensors, "layers.1.mlp.up_proj.weight: unknown")

    def test_own_embedding(self, tmp_path, good):
        """Case 47: allowed at the target's width, required at another one."""
        config, tensors = good
        owned = {"embed_tokens.weight": torch.ones(V, H)}
        check_native(write_native(tmp_path / "a", config, {**tensors, **owned}))
        config["target_hidden_size"] = 16
        tensors["fc.weight"] = tensors["fc.weight"][:, :48].contiguous()
        self.refused(tmp_path, config, tensors, "embed_tokens.weight: missing")
        check_native(write_native(tmp_path / "b", config, {**tensors, **owned}))
