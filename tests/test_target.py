"""The target wrapper against transformers' own full forward: caches, rollback, taps, loading."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import H, L, V, chat_tokenizer, llama, load_target, write_target
from tokenizers import Tokenizer, models
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.target import Target, default_layers, pick_device, tokenizer_state
from recipes.errors import ConfigError
from recipes.schema import Target as TargetSection

TAPS = [0, 3, L - 1, L]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference(folder):
    # sdpa: transformers' eager attention takes its softmax in float32
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    entering_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, args: entering_norm.append(args[0]))

    @torch.inference_mode()
    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(final [T, H], taps [T, 4H], logits [T, V]) of one whole sequence, by transformers alone."""
        out = model(torch.tensor([ids]), output_hidden_states=True)
        taps = [out.hidden_states[k] for k in TAPS[:-1]] + [entering_norm.pop()]
        return out.hidden_states[L][0], torch.cat(taps, -1)[0], out.logits[0]

    return states


def section(folder, dtype: str, skinny: bool) -> Target:
    return Target(TargetSection(model=str(folder), dtype=dtype, device="cpu", threads=1, skinny_linear=skinny), TAPS)


@pytest.fixture(scope="module")
def targets(folder):
    return {(dtype, skinny): section(folder, dtype, skinny)
            for dtype in ("float64", "float32") for skinny in (True, False)}


class Rows:
    """Sequences of their own lengths in one cache; `run` appends a block to some rows and checks what comes back."""

    def __init__(self, target: Target, reference, tolerance: float, rows: int, seed: int) -> None:
        self.target, self.reference, self.tolerance = target, reference, tolerance
        self.random = torch.Generator().manual_seed(seed)
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self.cache = target.new_cache(rows, 40)

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.random))

    def run(self, lengths: list[int], rows: list[int] | None = None) -> None:
        """Real tokens of each row, padded at the end to the longest with arbitrary ones."""
        chosen = list(range(len(self.held))) if rows is None else rows
        ids = torch.randint(0, V, (len(chosen), max(lengths)), generator=self.random)
        starts = torch.tensor([len(self.held[r]) for r in chosen])
        positions = starts[:, None] + torch.arange(max(lengths))
        states = self.target.forward(ids, positions, self.cache, None if rows is None else torch.tensor(rows))
        for b, (r, n) in enumerate(zip(chosen, lengths)):
            self.held[r] += ids[b, :n].tolist()
            final, taps, logits = (x[-n:] for x in self.reference(self.held[r]))
            for ours, expected in ((states.final, final), (states.taps, taps), (states.logits, logits)):
                torch.testing.assert_close(ours[b, :n].double(), expected, rtol=self.tolerance, atol=self.tolerance)

    def rollback(self) -> None:
        """Forgets some last tokens of every row: nothing in the cache changes."""
        self.held = [h[: self.number(1, len(h) + 1)] for h in self.held]

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(torch.tensor(rows))
        self.held = [self.held[r] for r in rows]


@pytest.mark.parametrize("dtype,skinny,tolerance", [("float64", True, 1e-5), ("float64", False, 1e-5),
                                                    ("float32", True, 1e-3), ("float32", False, 1e-3)])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_cached_ragged_forward_equals_a_full_one(targets, reference, dtype, skinny, tolerance, seed):
    """Prefill, blocks, rollback, row subsets and keep() equal transformers' full forward; norms round in float32."""
    rows = Rows(targets[dtype, skinny], reference, tolerance, rows=3, seed=seed)
    rows.run([rows.number(1, 8) for _ in range(3)])
    rows.run([4, 4, 4])
    rows.rollback()
    rows.run([rows.number(1, 4)] * 2, rows=[2, 0])
    rows.keep([2, 1])
    rows.run([1, 1])
    rows.rollback()
    rows.run([5, 2])
    rows.keep([1])
    rows.run([3])


def test_no_cache_equals_transformers_and_logits_are_optional(targets, reference):
    """Without a cache the tokens see one another causally by position; logits only where asked."""
    ids = [5, 9, 9, 30, 2, 61, 7]
    states = targets["float64", True].forward(torch.tensor([ids]), torch.arange(7)[None], logits=False)
    final, taps, _ = reference(ids)
    assert states.logits is None
    torch.testing.assert_close(states.final[0], final, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.taps[0], taps, rtol=1e-5, atol=1e-5)


def test_beyond_the_cache_is_an_error(targets):
    """A position outside the cache is refused, never wrapped or dropped."""
    target = targets["float64", True]
    with pytest.raises(ValueError, match="position 8 is beyond the cache of 8"):
        target.forward(torch.ones(1, 9, dtype=torch.long), torch.arange(9)[None], target.new_cache(1, 8))


def test_taps_of_blocks_that_add_a_known_constant(tmp_path):
    """Case 01: where block i adds 10^i, id k is the sum of the blocks below k, for first, middle, last and L."""
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=L, mlp_bias=True,
                         num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, bos_token_id=None)
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data.zero_()
    for i, block in enumerate(model.model.layers):
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
        block.mlp.down_proj.bias.data.fill_(10.0**i)
    model.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    taps = load_target(tmp_path, "float32", [0, 1, 3, 5, 6]).forward(torch.tensor([[4, 5]]), torch.arange(2)[None]).taps
    assert [taps[0, 1, i * H].item() for i in range(5)] == [0, 1, 111, 11111, 111111]
    assert taps.shape == (1, 2, 5 * H)


@pytest.mark.parametrize("layers,expected", [(1, None), (2, None), (3, None), (4, None), (5, None), (6, None),
                                             (7, [2, 3, 4]), (8, [2, 4, 5]), (30, [2, 15, 27]), (32, [2, 16, 29])])
def test_default_layers(layers, expected):
    """Case 63: three distinct valid layers, or an error that names the option."""
    if expected:
        assert default_layers(layers) == expected
        return
    with pytest.raises(ConfigError, match=r"trace\.layers"):
        default_layers(layers)


@pytest.mark.parametrize("layers", [[1, 1, 2], [3, 2, 1], [0, 1, L + 1], [-1, 1, 2], []])
def test_bad_layers_are_refused(folder, layers):
    """Case 63: taps are distinct, ascending and within 0..L; the default ([]) collides at six layers."""
    with pytest.raises(ConfigError, match=r"trace\.layers"):
        load_target(folder, "float32", layers)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_tied_untied_single_and_sharded_targets_load(tmp_path, tied, shard):
    """Case 58: the head is the embedding where tied and its own tensor where not, from one file or several."""
    config = llama().config
    config.tie_word_embeddings = tied
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).double().eval()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    chat_tokenizer().save_pretrained(tmp_path)
    target = load_target(tmp_path, layers=[1, 2, 3])
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    assert torch.equal(target.head.weight, model.lm_head.weight)
    assert torch.equal(target.embedding, model.model.embed_tokens.weight)
    assert torch.equal(target.head.weight, target.embedding) == tied
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(target.forward(ids, torch.arange(3)[None]).logits, model(ids).logits)


@pytest.mark.parametrize("names", ["without a prefix", "of the head"])
def test_a_target_whose_embedding_has_another_name(tmp_path, names):
    """Case 58: a tied table that a file holds under its base model's name, or as the head, is the embedding; what is
    found under no name is refused, never random."""
    config = llama().config
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).double().eval()
    model.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    renamed = {"without a prefix": lambda name: name.removeprefix("model."),
               "of the head": lambda name: name.replace("model.embed_tokens", "lm_head")}[names]
    save_file({renamed(name): t for name, t in held.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    target = load_target(tmp_path, layers=[1, 2, 3])
    assert torch.equal(target.embedding, model.model.embed_tokens.weight)
    assert torch.equal(target.head_weight, target.embedding)


def damage(folder, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no weights":
        weights.unlink()
    elif how == "torn weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif how == "empty weights":
        weights.write_bytes(b"")
    elif how == "torn config":
        (folder / "config.json").write_text('{"model_type": "lla')
    elif how == "unknown architecture":
        (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    elif how == "missing tensor":
        tensors = load_file(weights)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif how == "other shape":
        tensors = load_file(weights)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 3)
        save_file(tensors, weights, {"format": "pt"})
    elif how == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()


@pytest.mark.parametrize("how", ["no weights", "torn weights", "empty weights", "torn config", "unknown architecture",
                                 "missing tensor", "other shape", "no tokenizer"])
def test_damaged_model_is_a_config_error(tmp_path, how):
    """An unusable target folder names target.model; a missing tensor is never filled with random numbers (case 13)."""
    write_target(tmp_path)
    damage(tmp_path, how)
    with pytest.raises(ConfigError, match=r"target\.model"):
        load_target(tmp_path)


@pytest.mark.parametrize("model", ["/no/such/folder", "no-such-owner/no-such-model", "embedded:no-such-model"])
def test_missing_model_is_a_config_error(model):
    """A model that is nowhere is a ConfigError, offline too."""
    with pytest.raises(ConfigError, match=r"target\.model"):
        Target(TargetSection(model=model, threads=1))


def test_scaled_logits_are_refused(tmp_path):
    """The teacher is head(final state): a target that scales its logits would teach another distribution."""
    torch.manual_seed(0)
    config = GraniteConfig(vocab_size=V, hidden_size=H, intermediate_size=H, num_hidden_layers=2, logits_scaling=8.0,
                           num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, eos_token_id=2)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="scales or caps its logits"):
        load_target(tmp_path)


def test_unknown_device_is_a_config_error():
    """A device that does not exist names the option."""
    for name in ("gpu0", "cuda:99"):
        with pytest.raises(ConfigError, match=r"target\.device"):
            pick_device(name)


def test_fingerprint_names_what_changed(folder, tmp_path):
    """Case 36: other weights, template or dtype change exactly that part; the same folder changes none."""
    own = load_target(folder, "float32").fingerprint()

    def changed(target: Target) -> set[str]:
        return {part for part, value in target.fingerprint().items() if own[part] != value}

    assert changed(load_target(folder, "float32")) == set()
    assert changed(load_target(write_target(tmp_path / "w", seed=1), "float32")) == {"weights"}
    assert changed(load_target(write_target(tmp_path / "t", template="{{ messages }}"), "float32")) == {"template"}
    assert changed(load_target(folder, "float64")) == {"dtype"}
    longer = write_target(tmp_path / "c")
    values = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 1e-3}))
    assert changed(load_target(longer, "float32")) == {"config"}


@pytest.mark.parametrize("change", [
    {"normalizer": None},
    {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
    {"post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
], ids=["normalizer", "pre_tokenizer", "post_processor"])
def test_a_tokenizer_that_splits_otherwise_is_another(folder, tmp_path, change):
    """Case 30: the vocabulary is the same and the ids of a text may not be: that is another tokenizer."""
    other = write_target(tmp_path / "m")
    path = other / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    own, found = load_target(folder, "float32").fingerprint(), load_target(other, "float32").fingerprint()
    assert {part for part, value in found.items() if own[part] != value} == {"tokenizer"}


def test_merges_count_and_padding_does_not():
    """Case 30: a changed merge is another tokenizer; padding that a caller switched on is not."""
    plain, merged = (PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, merges)))
                     for merges in ([], [("a", "b")]))
    before = tokenizer_state(plain)
    assert before != tokenizer_state(merged)
    plain.backend_tokenizer.enable_padding(length=4, pad_id=0, pad_token="a")
    plain.backend_tokenizer.enable_truncation(3)
    assert tokenizer_state(plain) == before
