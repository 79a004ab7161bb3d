"""Sizes from config.json against published counts, against transformers' own modules, and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from recipes.errors import ConfigError
from recipes.model_shape import quantised_bits, shape_of

LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                        "num_attention_heads": 64}
QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "tie_word_embeddings": False}
QWEN3_235B = {"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288,
              "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
              "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
              "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False}
MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
           "num_experts_per_tok": 2, "tie_word_embeddings": False}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
               "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
               "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512,
               "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
               "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
               "tie_word_embeddings": False}


@pytest.mark.parametrize("config, parameters, active", [
    (LLAMA_8B, 8.03e9, 8.03e9), (LLAMA_70B, 70.6e9, 70.6e9), (QWEN3_8B, 8.2e9, 8.2e9), (QWEN3_235B, 235e9, 22e9),
    (MIXTRAL, 46.7e9, 12.9e9), (DEEPSEEK_V3, 671e9, 37e9)],
    ids=["llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "qwen3-235b-a22b", "mixtral-8x7b", "deepseek-v3"])
def test_published_counts(config, parameters, active):
    """Parameters and active parameters as the model cards give them, to the digits that they give."""
    shape = shape_of(config)
    assert shape.parameters == pytest.approx(parameters, rel=0.002)
    assert shape.active == pytest.approx(active, rel=0.02)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
       "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
       "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
KINDS = {
    "llama": {"attention_bias": True, "mlp_bias": True}, "mistral": {}, "qwen2": {"head_dim": 8}, "qwen3": {},
    "phi3": {"head_dim": 8}, "gemma": {}, "gemma2": {}, "gemma3_text": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]},
    "deepseek_v3": MLA}


def tiny(kind: str, device: str = "meta", **more):
    """(config of a tiny model as a dict with the type's defaults, the model; on meta without memory)."""
    config = CONFIG_MAPPING[kind](**{**SMALL, **KINDS[kind], **more})
    with torch.device(device):
        return config.to_dict(), AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_real_module(kind, tied):
    """Every known type, tied and not: exactly the parameters that transformers allocates."""
    config, model = tiny(kind, tie_word_embeddings=tied)
    assert shape_of(config).parameters == sum(p.numel() for p in model.parameters())


def test_query_without_a_low_rank():
    """DeepSeek-V2-Lite's kind of query: one matrix."""
    config, model = tiny("deepseek_v3", q_lora_rank=None)
    assert shape_of(config).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "phi3"])
def test_operations_are_those_of_the_real_pass(kind):
    """FLOPs of a pass over 10 tokens as torch counts the products of the real model; attention computes all 10 x 10
    scores there, where ours counts those of earlier positions."""
    config, model = tiny(kind, "cpu")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 10, dtype=torch.long), use_cache=False)
    shape = shape_of(config)
    unmasked = 10 * shape.flops() + 10 * 10 * shape.layers * shape.attention.on_expanded
    assert counter.get_total_flops() == unmasked
    assert shape.prefill_flops(10, heads=10) == unmasked - 45 * shape.layers * shape.attention.on_expanded


def test_cache_by_hand():
    """Bytes of 16-bit keys and values a token: Llama-3.1-8B 2 x 32 layers x 8 heads x 128 x 2 = 128 KiB; DeepSeek-V3
    one latent of 512 and a rotary key of 64 in 61 layers, and 128 heads of 192 and 128 as transformers keeps it."""
    assert shape_of(LLAMA_8B).cache_bytes(1, 16) == 131072
    assert shape_of(LLAMA_8B).cache_bytes(1000, 8) == 65536000
    assert shape_of(DEEPSEEK_V3).cache_bytes(1, 16) == 61 * 576 * 2
    assert shape_of(DEEPSEEK_V3).cache_bytes(1, 16, expanded=True) == 61 * 128 * 320 * 2


def test_windows_bound_the_cache():
    """Layers with a window keep no more than it: all of Mistral's, every second of Gemma 2's, five of six of
    Gemma 3's, or those that layer_types names."""
    mistral = shape_of(LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096})
    assert mistral.attended(10000) == 32 * 4096 and mistral.attended(100) == 3200
    gemma = {**SMALL, "num_hidden_layers": 6, "sliding_window": 10}
    assert shape_of(gemma | {"model_type": "gemma2"}).attended(100) == 3 * 100 + 3 * 10
    assert shape_of(gemma | {"model_type": "gemma3_text"}).attended(100) == 100 + 5 * 10
    assert shape_of(gemma | {"model_type": "qwen3"}).attended(100) == 600, "a window that is not in use"
    named = gemma | {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 4}
    assert shape_of(named).attended(100) == 2 * 10 + 4 * 100


def test_weights_in_few_bits():
    """Quantised bits are those of layer matrices; embedding, head and norms stay at 16: an 8-bit Llama-3.1-8B."""
    shape = shape_of(LLAMA_8B)
    outside = 2 * 128256 * 4096 + 65 * 4096
    assert shape.weight_bytes(8, 16) == (shape.parameters - outside) + 2 * outside
    assert quantised_bits({}) == 0
    assert quantised_bits({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}) == (
        pytest.approx(8 + 32 / 128**2))
    assert quantised_bits({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}) == 4.15625
    assert quantised_bits({"text_config": {"quantization_config": {"quant_method": "awq", "bits": 4,
                                                                   "group_size": 64}}}) == 4.3125


@pytest.mark.parametrize("config, message", [
    ({"model_type": "mamba"}, "target.model: model_type 'mamba' is not known to the cost model; known: llama"),
    ({}, "model_type None"), ({**MIXTRAL, "model_type": "gpt_oss"}, "'gpt_oss'"),
    ({k: v for k, v in LLAMA_8B.items() if k != "hidden_size"}, "its config.json has no hidden_size"),
    ({k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}, "no num_local_experts")])
def test_what_is_not_known_is_refused_by_name(config, message):
    """No size is guessed."""
    with pytest.raises(ConfigError, match=message):
        shape_of(config)


def test_unknown_quantisation_is_refused():
    with pytest.raises(ConfigError, match="quantisation 'compressed-tensors' .*set plan.weight_bits"):
        quantised_bits({"quantization_config": {"quant_method": "compressed-tensors"}})


def test_heads_that_ranks_cannot_share():
    """A tensor-parallel size divides heads and key/value heads; engines may hold a key/value head several times; MLA
    has one latent for all."""
    shape = shape_of(QWEN3_235B)
    shape.check_split(8, "plan.tensor_parallel")
    for ranks, copies, said in ((6, True, "6: does not divide the target's 64 heads"),
                                (8, False, "8: does not divide the target's 4 key/value heads")):
        with pytest.raises(ConfigError, match=f"plan.tensor_parallel = {said}"):
            shape.check_split(ranks, "plan.tensor_parallel", copies)
    shape_of(DEEPSEEK_V3).check_split(16, "plan.tensor_parallel", copies=False)


def test_language_part_of_a_larger_config():
    """A multimodal config keeps the language model under text_config."""
    assert shape_of({"model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text"}}).layers == 3
