"""The independent reader: against transformers' own modules, against `generate`, and counted by hand."""

import json

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
    H,
    I,
    L,
    V,
    make_meta,
    make_state,
    write_checkpoint,
    write_native,
)
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from drafters.export.native import native_config
from drafters.export.write import export_native
from drafters.fast_cpu import GROUPED
from eval.reader import ReadDrafter, Reading, read_acceptance, read_target
from recipes.errors import RunError

VARIANTS = [{}, {"tap_norms": True}, {"feedback": "post_norm"}, {"norm_before_residual": True},
            {"num_layers": 2}, {"num_layers": 2, "feedback": "post_norm", "norm_before_residual": True}]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices of 32 columns only lose by threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_target(seed: int = 0) -> LlamaForCausalLM:
    """Weights large enough for varied greedy text; float64 leaves no near-ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=I, num_hidden_layers=L,
                         num_attention_heads=HEADS, num_key_value_heads=GROUPS, max_position_embeddings=256,
                         initializer_range=0.3)
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return random_target()


def export(tmp_path, rope: dict | None = None, **options):
    meta = make_meta(**options)
    if rope is not None:
        meta["shape"]["rope_parameters"] = rope
    folder = write_checkpoint(tmp_path / "checkpoint", meta, make_state(meta))
    return export_native(folder, tmp_path / "out", "float32", LAYERS, FINGERPRINT)


def generated(model: LlamaForCausalLM, prompt: list[int], max_tokens: int, end_ids: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
                         eos_token_id=end_ids, pad_token_id=0)
    return out[0, len(prompt):].tolist()


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_tokens_equal_generate(tmp_path, target, options):
    """Case 59: with any drafter, the text is the target's own greedy text, end tokens included."""
    folder = export(tmp_path, **options)
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6]]
    for max_tokens, end_ids in ((20, []), (20, generated(target, prompts[0], 8, [])[5:6]), (1, []), (2, [])):
        reading = read_acceptance(folder, target, prompts, 3, max_tokens, end_ids)
        assert reading.tokens == [generated(target, p, max_tokens, end_ids) for p in prompts]
        passes = reading.drafts + sum(reading.accepted_per_position) + len(prompts)
        assert passes >= sum(map(len, reading.tokens)), "tokens nobody produced"


def test_target_with_other_attention(target):
    """The greedy tokens and taps do not depend on the attention that the target was loaded with."""
    expected, states = read_target(target, [3, 1, 4, 1, 5], LAYERS)
    other = random_target()
    other.set_attn_implementation(GROUPED)
    tokens, taps = read_target(other, [3, 1, 4, 1, 5], LAYERS)
    assert tokens == expected
    torch.testing.assert_close(taps, states)


class CachedDrafter(nn.Module):
    """The drafter from transformers' Llama parts with a growing cache: another path to the same drafts."""

    def __init__(self, folder, embedding: nn.Embedding) -> None:
        super().__init__()
        self.flags = json.loads((folder / "config.json").read_text())
        keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_parameters")
        config = LlamaConfig(**{k: self.flags[k] for k in keys}, attn_implementation="eager")
        self.midlayer = nn.Module()
        self.midlayer.self_attn = LlamaAttention(config, 0)
        for p, rows in (("q", HEADS * DIM), ("k", GROUPS * DIM), ("v", GROUPS * DIM)):
            setattr(self.midlayer.self_attn, f"{p}_proj", nn.Linear(2 * H, rows, bias=False))
        self.midlayer.mlp = LlamaMLP(config)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self.midlayer, name, LlamaRMSNorm(H, config.rms_norm_eps))
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer(config, i)
                                     for i in range(1, self.flags["num_hidden_layers"])})
        self.norm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.fc = nn.Linear(len(LAYERS) * H, H, bias=False)
        if self.flags.get("fc_norm"):
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(H, config.rms_norm_eps) for _ in LAYERS)
        tensors = load_file(folder / "model.safetensors")
        self.d2t, _ = tensors.pop("d2t"), tensors.pop("t2d")
        self.lm_head = nn.Linear(H, len(self.d2t), bias=False)
        self.load_state_dict(tensors)
        self.double()
        self.embedding, self.rotary = [embedding], LlamaRotaryEmbedding(config)  # a list: not a submodule

    def step(self, state, tokens, positions, cache):
        """state [1, q, H], tokens and positions [1, q] -> (state to feed back, draft logits [1, q, D])."""
        m = self.midlayer
        normed = m.hidden_norm(state)
        x = torch.cat([m.input_layernorm(self.embedding[0](tokens)), normed], -1)
        q = state.shape[1]
        mask = torch.full((q, q), float("-inf"), dtype=torch.double).triu(1)[None, None] if q > 1 else None
        turned = self.rotary(x, positions)
        attended, _ = m.self_attn(x, turned, mask, cache=cache)
        h = attended + (normed if self.flags.get("norm_before_residual") else state)
        h = h + m.mlp(m.post_attention_layernorm(h))
        for layer in self.layers.values():
            h = layer(h, attention_mask=mask, cache=cache, position_embeddings=turned)
        output = self.norm(h)
        return output if self.flags.get("norm_output") else h, self.lm_head(output)

    @torch.no_grad()
    def draft(self, taps, tokens, length):
        if self.flags.get("fc_norm"):
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        state, t = self.fc(torch.cat(taps, -1))[None], len(tokens) - 2
        ids, positions = torch.tensor([tokens[1:]]), torch.arange(t + 1)[None]
        cache, drafted, logits_seen = DynamicCache(), [], []
        for k in range(1, length + 1):
            state, logits = self.step(state, ids, positions, cache)
            i = int(logits[0, -1].argmax())
            drafted.append(i + int(self.d2t[i]))
            logits_seen.append(logits[0, -1])
            state, ids, positions = state[:, -1:], torch.tensor([[drafted[-1]]]), torch.tensor([[t + k]])
        return drafted, logits_seen


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("rope", ["base", "llama3"])
def test_drafts_equal_a_cached_drafter(tmp_path, target, options, rope):
    """Cases 12, 13 and 32: chain, GQA, norms, rotary positions and the map, from transformers' own parts."""
    folder = export(tmp_path, ROPES[rope], **options)
    ours, theirs = ReadDrafter(folder, target), CachedDrafter(folder, target.get_input_embeddings())
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for length in (2, 3, 9, 40):
            tokens = torch.randint(V, (length,), generator=g).tolist()
            _, taps = read_target(target, tokens[:-1], LAYERS)
            expected, logits = theirs.draft(taps, tokens, 5)
            assert ours.draft(taps, tokens, 5) == expected
            _, output = ours.step(ours.combine(taps), tokens[1:])
            # transformers' norms and softmax are float32, and two layers with weights of size 1 enlarge its rounding
            torch.testing.assert_close(ours.linear("lm_head", output[-1]), logits[0], rtol=1e-4, atol=1e-4)


# A target that counts: next = (current + 1) mod 32, from one-hot states that no block changes.
RULE_V = 32


def counting_target() -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=RULE_V, hidden_size=RULE_V, intermediate_size=RULE_V, num_hidden_layers=L,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128)
    model = LlamaForCausalLM(config).eval()
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.copy_(torch.eye(RULE_V))
    model.lm_head.weight.data.copy_(torch.eye(RULE_V).roll(1, 0))  # row j + 1 reads component j
    return model


def counting_drafter(folder, draft_ids: list[int]):
    """A perfect drafter of the counting target, but for the ids it does not have.

    Its MLP moves the one-hot state x to x + 1, its head reads x + 1 as the token x + 2: at position t the
    state is x[t] and the draft x[t] + 2, which is what follows x[t + 1]. Each chain step moves on by one.
    """
    n, D = RULE_V, len(draft_ids)
    meta = make_meta()
    meta["shape"] |= {"hidden_size": n, "target_hidden_size": n, "intermediate_size": n, "vocab_size": n,
                      "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
                      "draft_vocab_size": D, "max_position_embeddings": 128}
    eye, shift = torch.eye(n), torch.eye(n).roll(1, 0)
    scale = n ** 0.5  # of a one-hot state after RMSNorm
    step = torch.nn.functional.silu(torch.tensor(scale)) * scale
    square = torch.zeros(n, n)
    ids = torch.tensor(draft_ids)
    names = {f"midlayer.self_attn.{p}_proj.weight": torch.zeros(n, 2 * n) for p in "qkv"}
    tensors = names | {
        "fc.weight": torch.cat([square, square, eye], 1), "midlayer.self_attn.o_proj.weight": square.clone(),
        "midlayer.mlp.gate_proj.weight": eye.clone(), "midlayer.mlp.up_proj.weight": eye.clone(),
        "midlayer.mlp.down_proj.weight": (shift - eye) / step, "lm_head.weight": shift[ids],
        "d2t": ids - torch.arange(D), "t2d": torch.zeros(n, dtype=torch.bool).index_fill(0, ids, True),
    }
    tensors |= {f"{name}.weight": torch.ones(n) for name in (
        "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")}
    return write_native(folder, native_config(meta, "float32"), tensors)


class TestCounting:
    """Formats.md section 7, case 12: drafts that ran, accepted tokens before any trimming, by hand."""

    def read(self, tmp_path, missing=(), prompt=(3, 4), max_tokens=8, end_ids=(), K=3) -> Reading:
        folder = counting_drafter(tmp_path / "native", [i for i in range(RULE_V) if i not in missing])
        return read_acceptance(folder, counting_target(), [list(prompt)], K, max_tokens, list(end_ids))

    def test_full_acceptance(self, tmp_path):
        # prefill 5 | 6 7 8 +9 | 10 11 12 +13, cut at 8 tokens after 12
        assert self.read(tmp_path) == Reading(2, [2, 2, 2], [[5, 6, 7, 8, 9, 10, 11, 12]])

    def test_a_token_outside_the_draft_vocabulary_is_a_miss(self, tmp_path):
        """Case 56: a non-contiguous map is decoded right on both sides of the gap."""
        # prefill 5 | 6 7 8 +9 | miss at 10, +10 | 11 12 13 +14
        reading = self.read(tmp_path, missing=[10, 20], max_tokens=9)
        assert reading == Reading(3, [2, 2, 2], [[5, 6, 7, 8, 9, 10, 11, 12, 13]])

    def test_miss_inside_a_draft(self, tmp_path):
        # prefill 5 | 6 then a miss at 7, +7 | 8 9 10 +11
        reading = self.read(tmp_path, missing=[7], max_tokens=6)
        assert reading == Reading(2, [2, 1, 1], [[5, 6, 7, 8, 9, 10]])

    def test_end_token_inside_an_accepted_draft(self, tmp_path):
        """Case 22: nothing after it shows, yet the draft counts whole, as the engine counts it."""
        assert self.read(tmp_path, end_ids=[7]) == Reading(1, [1, 1, 1], [[5, 6, 7]])

    def test_no_draft_is_needed(self, tmp_path):
        assert self.read(tmp_path, end_ids=[5]) == Reading(0, [0, 0, 0], [[5]])
        assert self.read(tmp_path, max_tokens=1) == Reading(0, [0, 0, 0], [[5]])

    def test_other_draft_lengths(self, tmp_path):
        assert self.read(tmp_path, K=1, max_tokens=5) == Reading(2, [2], [[5, 6, 7, 8, 9]])
        assert self.read(tmp_path, K=6, max_tokens=5) == Reading(1, [1] * 6, [[5, 6, 7, 8, 9]])

    def test_too_long(self, tmp_path):
        """Case 33: the drafter's own limit counts, and nothing is cut silently."""
        with pytest.raises(RunError, match="does not fit 1..128"):
            self.read(tmp_path, max_tokens=124)


def test_damaged_folders_are_refused(tmp_path, target):
    """Cases 13 and 56: the reader fills in nothing and skips nothing."""
    folder = export(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gone = "midlayer.hidden_norm.weight"
    damages = {
        gone: {name: tensor for name, tensor in tensors.items() if name != gone},
        "midlayer.extra": {**tensors, "midlayer.extra": torch.ones(2)},
        "ids not in 0..63": {**tensors, "d2t": tensors["d2t"] + V},
        "repeated ids": {**tensors, "d2t": torch.arange(len(tensors["d2t"])).neg()},
    }
    for named, damaged in damages.items():
        save_file(damaged, folder / "model.safetensors")
        with pytest.raises(RunError, match=named):
            ReadDrafter(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(RunError, match="cannot be read"):
        ReadDrafter(folder, target)


def test_unknown_rope_type_is_refused(tmp_path, target):
    """Case 32: a scaling that the reader cannot compute is never read as none."""
    folder = export(tmp_path, {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0})
    with pytest.raises(RunError, match="rope_type = yarn"):
        ReadDrafter(folder, target)
