"""Names of GPUs, targets and drafters as people and tools spell them; the sizes behind them."""

import json
from pathlib import Path

import pytest

from eval.roi_names import draft_of, eagle_size, hardware_named, kind_of
from recipes.cost import Format
from recipes.errors import ConfigError
from recipes.hardware import known, spelt
from recipes.named_shapes import named, short_shape, table
from recipes.speculation import Constants, Draft, Place, Step, draft_memory, draft_seconds

DATA = Path(__file__).parent / "roi"
CUSTOM = {"My-GPU": {"memory_gb": 10, "bandwidth_tb_s": 1.0, "tflops": {"bfloat16": 1.0}}}
FREE = Constants(1.0, 1.0, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1.0, 1.0)


@pytest.mark.parametrize("name, key", [
    ("A100 80G", "a100-80"), ("H100 SXM", "h100-sxm"), ("H200 SXM", "h200"), ("B200", "b200"), ("GB200", "gb200"),
    ("MI300X", "mi300x"), ("L40S", "l40s"), ("H20", "h20"), ("RTX 3090", "rtx3090"),  # the specification's table
    ("A100", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("a100-80gb", "a100-80"), ("A100 80", "a100-80"),
    ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("H100-SXM5-80GB", "h100-sxm"), ("h100sxm", "h100-sxm"),
    ("H100", "h100-sxm"),
    ("NVIDIA H200", "h200"), ("H200 141 GB", "h200"), ("AMD Instinct MI300X", "mi300x"), ("B200 192GB", "b200"),
    ("GB200 NVL72", "gb200"), ("NVIDIA GeForce RTX 3090", "rtx3090"), ("3090", "rtx3090"), ("H20_96GB", "h20"),
    ("NVIDIA H100 PCIe", "h100-pcie"), ("MI325X 256GB", "mi325x"), ("NVIDIA L4", "l4"), ("RTX 4090", "rtx4090"),
    ("my gpu", "My-GPU")])
def test_gpus_in_every_spelling(name, key):
    """The specification's table, what nvidia-smi says, sellers' forms, a recipe's own."""
    assert spelt(name, CUSTOM)[0] == key and hardware_named(name, CUSTOM) == known(CUSTOM)[key]


@pytest.mark.parametrize("name", ["H20 141GB", "H100 NVL", "H200 NVL", "A100 PCIe 40GB", "H300", "", "-", "3090Ti"])
def test_other_boards_are_not_taken_for_known_ones(name):
    """Another bandwidth or memory under a similar name is another GPU."""
    with pytest.raises(ConfigError, match=r"hw = .*: unknown; known: a100-40, a100-80"):
        hardware_named(name)


@pytest.mark.parametrize("name, key, bits", [
    ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b", 16), ("llama-3.1-70b", "llama-3-70b", 16),
    ("Meta-Llama-3-8B-Instruct", "llama-3.1-8b", 16), ("llama3.1-8b", "llama-3.1-8b", 16),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b", 16), ("Qwen3-32B-FP8", "qwen3-32b", 8),
    ("Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b", 16), ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2", 8),
    ("deepseek-ai/DeepSeek-R1", "deepseek-v3", 8), ("Llama-4-Scout-17B-16E-Instruct", "llama-4-scout", 16),
    ("lmsys/vicuna-7b-v1.5", "llama-2-7b", 16)])
def test_targets_in_every_spelling(name, key, bits):
    """An owner, a tuning or a release date leaves the sizes; -FP8 says the bits."""
    found = named(name)
    assert found.get("bits", 16) == bits and {k: v for k, v in found.items() if k != "bits"} == {
        k: v for k, v in table()[key].items() if k != "bits"}
    assert named("Mine", {"mine": {"as": "qwen3-4b"}}) == table()["qwen3-4b"]


def test_every_target_of_the_specification_is_there():
    """shared/roi/models.json, and the aliases name entries with sizes."""
    for name in json.loads((DATA / "models.json").read_text()):
        assert named(name)["L"]
    assert all("L" in table()[entry["as"]] for entry in table().values() if "as" in entry)
    with pytest.raises(ConfigError, match="x: L = 1.5: must be a whole number"):
        short_shape({"L": 1.5}, "x")


@pytest.mark.parametrize("name, kind", [
    ("EAGLE-3", "eagle3"), ("Eagle3", "eagle3"), ("n-gram", "lookup"), ("ngram", "lookup"), ("Prompt Lookup", "lookup"),
    ("DFlash", "parallel"), ("PARD", "parallel"), ("P-EAGLE", "parallel"), ("NextN", "mtp"), ("MEDUSA", "medusa"),
    ("none", "none")])
def test_kinds_of_drafters_in_every_spelling(name, kind):
    shape = short_shape(named("llama-3.1-8b"), "8B")
    assert kind_of(name) == kind and draft_of(name, shape).kind == kind


def test_drafters_that_are_models():
    """A standalone model by any spelling; EAGLE of the first two papers scores the whole vocabulary; what is neither is
    named with the kinds."""
    shape = short_shape(named("llama-3.1-8b"), "8B")
    small = draft_of("meta-llama/Llama-3.2-3B-Instruct", shape)
    assert small.kind == "model" and small.model.parameters / 1e9 == pytest.approx(3.21, rel=0.01)
    assert draft_of("EAGLE-2", shape).size == eagle_size(shape, taps=1, draft_vocab=128256)
    with pytest.raises(ConfigError, match="draft = hydra: no kind of drafter .eagle3, .*model = hydra: unknown"):
        draft_of("hydra", shape)


def test_a_layer_cut_by_hand():
    """Two of four layers, 160 weights of a byte each, and float32 logits of 16 tokens, once a draft token; the weights
    are the target's, the cache of two layers is its own."""
    shape = short_shape({"L": 4, "d": 4, "heads": 1, "kv_heads": 1, "head_dim": 4, "ff": 8, "V": 16}, "tiny")
    place = Place(shape, Format(8, 0, 0), 1e3, 1e12, overlap=64)
    cut = draft_of("layer_cut", shape, layers=2)
    assert cut == Draft("layer_cut", layers=2) and draft_of("layer_cut", shape).layers == 1, "a third, at least one"
    once = (2 * 160 + 4 * 16) / 1e3
    assert draft_seconds(cut, place, FREE, Step(1, 3, 0)) == pytest.approx(3 * once, rel=1e-3)
    assert draft_memory(cut, shape, 3, Format(8, 16, 16), 5, 100) == 5 * 100 * 2 * (2 * 4) * 2
