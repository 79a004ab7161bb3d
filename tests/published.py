"""A tiny drafter as tools publish it: one set of random weights, written by hand in each layout, and its plain maths.

The target is tests/tiny.py's: V 64 tokens, H 32 hidden, 6 layers. D 12 draft tokens, heads of 8, I 48 intermediate.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from eagle3_reference import SlowEagle3
from safetensors.torch import save_file
from tiny import LAYERS, H, V
from torch import Tensor

I, HEADS, GROUPS, DIM, D = 48, 4, 2, 8, 12
IDS = [2, 3, 5, 9, 14, 20, 21, 30, 33, 40, 51, 63]
OFFSETS = [id - i for i, id in enumerate(IDS)]
NORMS = {"fc_norm.0.weight": (H,), "fc_norm.1.weight": (H,), "fc_norm.2.weight": (H,)}
SHAPES = {
    "fc.weight": (H, 3 * H), "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * H),
    "midlayer.self_attn.k_proj.weight": (GROUPS * DIM, 2 * H),
    "midlayer.self_attn.v_proj.weight": (GROUPS * DIM, 2 * H), "midlayer.self_attn.o_proj.weight": (H, HEADS * DIM),
    "midlayer.mlp.gate_proj.weight": (I, H), "midlayer.mlp.up_proj.weight": (I, H),
    "midlayer.mlp.down_proj.weight": (H, I), "midlayer.hidden_norm.weight": (H,),
    "midlayer.input_layernorm.weight": (H,), "midlayer.post_attention_layernorm.weight": (H,), "norm.weight": (H,),
    "lm_head.weight": (D, H),
}
SECOND = {
    "layers.1.self_attn.q_proj.weight": (HEADS * DIM, H), "layers.1.self_attn.k_proj.weight": (GROUPS * DIM, H),
    "layers.1.self_attn.v_proj.weight": (GROUPS * DIM, H), "layers.1.self_attn.o_proj.weight": (H, HEADS * DIM),
    "layers.1.mlp.gate_proj.weight": (I, H), "layers.1.mlp.up_proj.weight": (I, H),
    "layers.1.mlp.down_proj.weight": (H, I), "layers.1.input_layernorm.weight": (H,),
    "layers.1.post_attention_layernorm.weight": (H,),
}
PLAIN = {"tap_norms": False, "feedback": "pre_norm", "norm_before_residual": False, "num_layers": 1}


def weights(full: bool = False, tap_norms: bool = False, layers: int = 1) -> dict[str, Tensor]:
    """Random weights under their native names; `full`: a head over all of the target's tokens; `layers`: 1 or 2."""
    g = torch.Generator().manual_seed(5)
    shapes = SHAPES | (NORMS if tap_norms else {}) | (SECOND if layers == 2 else {})
    shapes |= {"lm_head.weight": (V, H)} if full else {}
    return {name: torch.randn(shape, generator=g) * (0.3 if len(shape) == 2 else 1.0) for name, shape in shapes.items()}


def maps() -> dict[str, Tensor]:
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[IDS] = True
    return {"d2t": torch.tensor(OFFSETS), "t2d": t2d}


def native(**changes) -> dict:
    """config.json as SpecForge or EAGLE write it; a change to None takes the key out."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": I,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": V, "draft_vocab_size": D, "rope_theta": 16.0,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": LAYERS, **changes}
    return {key: value for key, value in config.items() if value is not None}


def speculators(decoder: dict | None = None, **changes) -> dict:
    """config.json as the speculators package writes it: Llama's defaults left out of the inner config."""
    inner = {"model_type": "llama", "hidden_size": H, "intermediate_size": I, "num_hidden_layers": 1,
             "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM, "vocab_size": V,
             "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 16.0, "rope_type": "default"}, **(decoder or {})}
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": D, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "embed_requires_grad": False, "eagle_aux_hidden_state_layer_ids": LAYERS,
        "transformer_layer_config": inner, **changes}
    return {key: value for key, value in config.items() if value is not None}


def in_layers(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The layer's tensors as layers.0.*, everything behind `prefix`."""
    return {prefix + name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def write(folder: Path, config: dict, tensors: dict[str, Tensor], binary: bool = False) -> Path:
    """The folder as it lies on a Hub; `binary`: with pytorch_model.bin."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def plain(tensors: dict[str, Tensor], embedding: Tensor, **options) -> SlowEagle3:
    """The drafter's maths written out, over the weights as they were before they were put into any layout."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    shape = SimpleNamespace(rms_norm_eps=1e-5, rope_parameters={"rope_theta": 16.0}, num_key_value_heads=GROUPS,
                            num_attention_heads=HEADS, head_dim=DIM)
    return SlowEagle3(SimpleNamespace(get_parameter=wide.get, shape=shape, tapped=LAYERS, embedding=embedding.double(),
                                      options=SimpleNamespace(**{**PLAIN, **options})))
