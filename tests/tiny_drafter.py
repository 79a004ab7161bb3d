"""A random EAGLE-3 drafter of a few kilobytes, as the trainer's checkpoint and as an exported folder.

H hidden size of drafter and target, I intermediate size, V vocabulary, D draft vocabulary, L target layers.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

H, I, HEADS, GROUPS, DIM, V, D, L = 32, 48, 4, 2, 8, 64, 12, 8
LAYERS = [2, 4, 5]
FINGERPRINT = {"weights": "w1", "config": "c1", "dtype": "float32", "tokenizer": "t1", "template": "p1"}
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_theta": 1e4, "rope_type": "default"},
    "base": {"rope_theta": 5e5, "rope_type": "default"},
    "linear": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "partial": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    "partial llama3": {**LLAMA3, "partial_rotary_factor": 0.5},
}


def make_meta(**options) -> dict:
    return {
        "format": "drafthouse.drafter/1", "kind": "eagle3", "layers": list(LAYERS),
        "options": {"tap_norms": False, "feedback": "pre_norm", "norm_before_residual": False, "steps": 3,
                    "num_layers": 1, **options},
        "shape": {"hidden_size": H, "target_hidden_size": H, "intermediate_size": I,
                  "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM,
                  "rms_norm_eps": 1e-6, "hidden_act": "silu", "vocab_size": V, "draft_vocab_size": D,
                  "max_position_embeddings": 256, "target_layers": L,
                  "rope_parameters": dict(ROPES["base"])},
        "target": {"model": "org/target", "fingerprint": dict(FINGERPRINT)},
    }


def make_state(meta: dict) -> dict[str, torch.Tensor]:
    """Random tensors of the documented shapes, written out here rather than taken from the export's table."""
    g = torch.Generator().manual_seed(3)
    shapes = {
        "fc.weight": (H, 3 * H), "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * H),
        "midlayer.self_attn.k_proj.weight": (GROUPS * DIM, 2 * H),
        "midlayer.self_attn.v_proj.weight": (GROUPS * DIM, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * DIM), "midlayer.mlp.gate_proj.weight": (I, H),
        "midlayer.mlp.up_proj.weight": (I, H), "midlayer.mlp.down_proj.weight": (H, I),
        "midlayer.hidden_norm.weight": (H,), "midlayer.input_layernorm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,), "norm.weight": (H,), "lm_head.weight": (D, H),
    }
    if meta["options"]["num_layers"] == 2:
        shapes |= {
            "layers.1.self_attn.q_proj.weight": (HEADS * DIM, H), "layers.1.self_attn.k_proj.weight": (GROUPS * DIM, H),
            "layers.1.self_attn.v_proj.weight": (GROUPS * DIM, H), "layers.1.self_attn.o_proj.weight": (H, HEADS * DIM),
            "layers.1.mlp.gate_proj.weight": (I, H), "layers.1.mlp.up_proj.weight": (I, H),
            "layers.1.mlp.down_proj.weight": (H, I), "layers.1.input_layernorm.weight": (H,),
            "layers.1.post_attention_layernorm.weight": (H,)}
    if meta["options"]["tap_norms"]:
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    state = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    target_ids = torch.randperm(V, generator=g)[:D].sort().values
    state["d2t"] = target_ids - torch.arange(D)
    state["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, target_ids, True)
    return state


def write_checkpoint(folder: Path, meta: dict, state: dict) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "drafter.safetensors")
    (folder / "drafter.json").write_text(json.dumps(meta))
    return folder


def write_native(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MASK = 5  # token of a parallel drafter's masks


def parallel_meta(**options) -> dict:
    """The same of a parallel drafter, whose masks are token 5."""
    meta = make_meta(mask_token=MASK, **options)
    del meta["options"]["feedback"]
    return meta | {"kind": "parallel"}


def parallel_state(meta: dict) -> dict[str, torch.Tensor]:
    """Random tensors, with the mask's state [1, 1, 3H] and embedding [H], and as many layers as the meta says."""
    layers = meta["options"]["num_layers"]
    state = make_state(meta | {"options": meta["options"] | {"num_layers": min(layers, 2)}})
    g = torch.Generator().manual_seed(4)
    further = [name for name in state if name.startswith("layers.1.")]
    for i in range(2, layers):
        state |= {name.replace("layers.1.", f"layers.{i}."): torch.randn(state[name].shape, generator=g)
                  for name in further}
    return state | {"mask_hidden": torch.randn(1, 1, 3 * H, generator=g), "mask_embedding": torch.randn(H, generator=g)}
