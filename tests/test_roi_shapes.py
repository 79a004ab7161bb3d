"""Sizes of the named targets against their sources (tests/roi/configs.json, parameters.json): the config.json of each,
or the total that somebody's tool counted in its weights."""

import json
from pathlib import Path

import pytest

from recipes.cost import Format, cache_per_gpu
from recipes.hardware import known
from recipes.model_shape import READERS, shape_of
from recipes.named_shapes import MLA_HEAD, named, short_shape, table

DATA = Path(__file__).parent / "roi"
CONFIGS, TOTALS = (json.loads((DATA / name).read_text())["models"] for name in ("configs.json", "parameters.json"))
UNSOURCED = {"hy3-295b-a21b"}  # derived, as its note says


def short_of(c: dict) -> dict:
    """A config.json in the short form of recipes/shapes.json."""
    L, heads = c["num_hidden_layers"], c["num_attention_heads"]
    found = {"L": L, "d": c["hidden_size"], "heads": heads, "V": c["vocab_size"]}
    if "kv_lora_rank" in c:
        assert c["qk_nope_head_dim"] == c["v_head_dim"] == MLA_HEAD
        found["attention"] = (f"MLA (q_lora {c['q_lora_rank']}, kv_lora {c['kv_lora_rank']}, "
                              f"rope {c['qk_rope_head_dim']})")
    else:
        found |= {"kv_heads": c["num_key_value_heads"], "head_dim": c.get("head_dim") or c["hidden_size"] // heads}
    experts = c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts")
    width = c["intermediate_size"]
    found |= {"experts": experts, "top_k": c["num_experts_per_tok"],
              "expert_ff": c.get("moe_intermediate_size") or width} if experts else {"ff": width}
    dense = c.get("first_k_dense_replace") or L - L // c.get("interleave_moe_layer_step", 1)
    found |= {"dense_layers": dense, "dense_ff": c.get("intermediate_size_mlp") or width} if experts and dense else {}
    llama4 = c["model_type"].startswith("llama4")  # a shared expert in each layer; every fourth sees the whole context
    shared = c.get("n_shared_experts") or int(llama4)
    windows = (3 * L // 4, c.get("attention_chunk_size")) if llama4 else (L // 2, c.get("sliding_window"))
    found |= {"shared_experts": shared} if shared else {}
    found |= {"windowed": windows[0], "window": windows[1]} if windows[1] else {}
    return found | ({"tied": True} if c.get("tie_word_embeddings") else {})


@pytest.mark.parametrize("entry", CONFIGS, ids=lambda e: e["model"])
def test_sizes_are_those_of_the_checkpoints_config(entry):
    """Every field, and the total through the reader of such configs where there is one, biases and norms included."""
    sizes = {k: v for k, v in named(entry["model"]).items() if k not in ("bits", "note")}
    assert sizes == short_of(entry["config"]) and entry["source"]
    if entry["config"]["model_type"] in READERS:
        whole = shape_of(entry["config"]).parameters
        assert short_shape(sizes, "").parameters == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("entry", TOTALS, ids=lambda e: e["model"])
def test_totals_are_those_that_were_counted(entry):
    """Within 1 %; GLM's count has its MTP layer: one more with experts, a projection, an embedding and a head."""
    sizes = named(entry["model"])
    found = short_shape(sizes, "").parameters
    if entry.get("mtp"):
        d, V = sizes["d"], sizes["V"]
        found = short_shape(sizes | {"L": sizes["L"] + 1}, "").parameters + 2 * d * d + 2 * V * d
        assert found == pytest.approx(entry["parameters"], rel=1e-4)
    assert found == pytest.approx(entry["parameters"], rel=0.01) and entry["source"]


def test_every_target_has_a_source():
    """A config or a total, but for those named here."""
    sourced = {e["model"] for e in (*CONFIGS, *TOTALS)}
    assert {name for name, entry in table().items() if "as" not in entry} == sourced | UNSOURCED
    assert not sourced & UNSOURCED


def test_llama_4_attends_within_chunks():
    """12 of 48 layers keep all of 100,000 tokens, 36 keep 8,192; 2 x 8 x 128 numbers of two bytes each."""
    shape = short_shape(named("llama-4-scout"), "")
    kept = 2 * 8 * 128 * 2 * (12 * 100_000 + 36 * 8_192)
    assert cache_per_gpu(shape, 1, 100_000, Format()) == kept == pytest.approx(6.123e9, rel=1e-3)


def test_links_of_one_bus_are_alike():
    """PCIe 4.0 x16 gives 32 GB/s one way, whichever GPU hangs on it."""
    four = {name: gpu.link_gb_s for name, gpu in known({}).items() if "PCIe 4.0" in gpu.note}
    assert set(four) >= {"l40s", "l4", "rtx3090", "rtx4090"} and set(four.values()) == {32}
