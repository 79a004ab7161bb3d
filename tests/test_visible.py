"""Sliding windows and mixed layers: our cached passes against transformers' own generation beyond the window."""

from types import SimpleNamespace

import pytest
import torch
from tiny import chat_tokenizer, load_target
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from drafters.registry import entry, options_of
from drafters.tree import DynamicTree
from drafters.visible import windows_of
from eval.decode import Decoder
from recipes.errors import ConfigError

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, bos_token_id=None, pad_token_id=None,
             initializer_range=0.3)
WINDOW = 6
TARGETS = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=WINDOW, **SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3,
                                                  **SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(sliding_window=WINDOW, layer_types=[
        "sliding_attention", "full_attention"] * 3, head_dim=8, **SIZES)),
}
PROMPTS = [[(7 * i) % 40 + 3 for i in range(13)], [5, 9], [(5 * i) % 31 + 3 for i in range(9)]]
LIMIT = 14


@pytest.fixture(scope="module", params=TARGETS)
def world(request, tmp_path_factory):
    """(target in float64, transformers' own answers, its answers without a window)"""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    TARGETS[request.param]().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()

    def answers(prompts):
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False,
                                 eos_token_id=2, pad_token_id=0)
            yield out[0, len(prompt):].tolist()

    return load_target(folder, "float64", [1, 2, 3]), list(answers(PROMPTS))


def test_windows_are_served(world, monkeypatch):
    """Case 33: beyond the window plain decoding, chains and trees give transformers' text; as full attention the text
    would be another one."""
    target, answers = world
    assert max(target.windows.values()) == WINDOW
    decoder = Decoder(target, LIMIT, end_ids=[2])
    assert [o.tokens for o in decoder.plain(PROMPTS)] == answers
    options = options_of("eagle3", {"draft_vocab_size": 40, "start": "random"})
    drafter = entry("eagle3").code.build(options, target, {i: 1 for i in range(3, 60)}, seed=0).double().eval()
    for plan in (3, DynamicTree(3, 3, 8)):
        assert [o.tokens for o in decoder.speculative(PROMPTS, drafter, plan)] == answers
    monkeypatch.setattr(target, "windows", {"full_attention": 0})
    assert [o.tokens for o in decoder.plain(PROMPTS)] != answers


def test_a_state_that_cannot_be_taken_back_is_refused():
    """Recurrent, chunked and hybrid layers are refused by name, whatever else the target has."""
    class Net(nn.Module):
        pass

    for kind in ("linear_attention", "chunked_attention"):
        with pytest.raises(ConfigError, match=f"target.model = some/model: Net has {kind} layers"):
            windows_of(Net(), SimpleNamespace(layer_types=["full_attention", kind], sliding_window=4), "some/model",
                       torch.device("cpu"))
    Net._is_stateful = True
    with pytest.raises(ConfigError, match="Net has recurrent layers"):
        windows_of(Net(), SimpleNamespace(), "some/model", torch.device("cpu"))


def test_kinds_of_layers_by_hand():
    for config, expected in (({}, {"full_attention": 0}), ({"sliding_window": None}, {"full_attention": 0}),
                             ({"sliding_window": 4}, {"sliding_attention": 4}),
                             ({"sliding_window": 4, "use_sliding_window": False}, {"full_attention": 0}),
                             ({"sliding_window": 4, "layer_types": ["full_attention"] * 2}, {"full_attention": 0})):
        assert windows_of(nn.Linear(1, 1), SimpleNamespace(**config), "x", torch.device("cpu")) == expected
