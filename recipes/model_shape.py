"""Sizes of a target from its config.json: parameters, operations and cache bytes of each of its matrices.

Arithmetic only: a dict in, numbers out. A model type that no reader knows is refused by name: a guess would be a wrong
bill. Legend: H hidden, V vocabulary, L layers, E experts, k experts a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recipes.errors import ConfigError


@dataclass(frozen=True)
class Matrix:
    """One kind of weight matrix: [out, in], `count` of them, all of which a token uses unless it belongs to experts."""

    name: str
    out: int
    inp: int
    count: int = 1
    experts: int = 0  # E, where a router chooses among as many copies
    chosen: int = 0  # k

    @property
    def weights(self) -> int:
        return self.out * self.inp * self.count * max(self.experts, 1)

    @property
    def active(self) -> int:
        """Weights that one token uses."""
        return self.out * self.inp * self.count * (self.chosen if self.experts else 1)


@dataclass(frozen=True)
class Attention:
    """What a layer's cache holds of a token, and what a query does with it. `cached`, `on_cached`: as engines keep it;
    `expanded`, `on_expanded`: as transformers does and as a prompt is run, which differs for MLA alone."""

    heads: int
    kv_heads: int  # 0: one latent vector shared by all heads (MLA)
    cached: int  # numbers a token
    expanded: int
    on_cached: int  # multiplications and additions of one query with one cached position, all heads
    on_expanded: int


@dataclass(frozen=True)
class ModelShape:
    """A target's sizes. `matrices` are those of all layers; embedding and head stand apart."""

    kind: str
    layers: int
    hidden: int
    vocab: int
    attention: Attention
    matrices: tuple[Matrix, ...]
    small: int  # norms and biases: counted as parameters, free in time
    tied: bool  # the head is the embedding
    windowed: int = 0  # layers that attend to `window` positions only
    window: int = 0

    @property
    def parameters(self) -> int:
        return sum(m.weights for m in self.matrices) + self.small + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Parameters that one token uses, as model cards count them (embedding and head included)."""
        return sum(m.active for m in self.matrices) + self.small + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def head(self) -> int:
        """Weights of the vocabulary projection."""
        return self.vocab * self.hidden

    def weight_bytes(self, bits: float, other_bits: float) -> float:
        """Bytes of all weights: layer matrices at `bits`, embedding, head and norms at `other_bits`, which quantised
        checkpoints leave alone."""
        layers = sum(m.weights for m in self.matrices)
        return layers * bits / 8 + (self.parameters - layers) * other_bits / 8

    def attended(self, context: float) -> float:
        """Positions that one query reads, summed over the layers."""
        short = min(context, self.window) if self.window else context
        return (self.layers - self.windowed) * context + self.windowed * short

    def cache_bytes(self, context: float, bits: float, expanded: bool = False) -> float:
        """Bytes of keys and values of one row of this length. expanded: as transformers keeps MLA's."""
        numbers = self.attention.expanded if expanded else self.attention.cached
        return self.attended(context) * numbers * bits / 8

    def flops(self, context: float = 0.0, head: bool = True, expanded: bool = False) -> float:
        """Operations of one token behind `context` cached ones; `head`: with the vocabulary projection."""
        products = sum(m.active for m in self.matrices) + (self.head if head else 0)
        each = self.attention.on_expanded if expanded else self.attention.on_cached
        return 2 * products + self.attended(context) * each

    def prefill_flops(self, tokens: float, heads: float = 1.0) -> float:
        """Operations of a row of `tokens` run at once, each attending to itself and those before; `heads` of them are
        projected to the vocabulary."""
        return tokens * self.flops((tokens + 1) / 2, head=False, expanded=True) + 2 * heads * self.head

    def check_split(self, ranks: int, where: str, copies: bool = True) -> None:
        """ConfigError where `ranks` processes cannot share the heads. copies: key/value heads may be held several
        times, as engines do; transformers' plan wants them divided."""
        kv = self.attention.kv_heads
        if self.attention.heads % ranks:
            raise ConfigError(f"{where} = {ranks}: does not divide the target's {self.attention.heads} heads")
        if kv and kv % ranks and not (copies and ranks % kv == 0):
            raise ConfigError(f"{where} = {ranks}: does not divide the target's {kv} key/value heads")


def shape_of(config: dict[str, Any], where: str = "target.model") -> ModelShape:
    """The sizes of a transformers config.json, of the language part where there are others. Raises ConfigError for a
    model type that is not known and for a size that is missing, each by name; `where` begins the message."""
    config = config.get("text_config", config)
    kind = config.get("model_type")
    if kind not in READERS:
        raise ConfigError(f"{where}: model_type {kind!r} is not known to the cost model; known: {', '.join(READERS)}")
    try:
        return READERS[kind](config)
    except KeyError as error:
        raise ConfigError(f"{where}: its config.json has no {error.args[0]}") from None


def quantised_bits(config: dict[str, Any], where: str = "target.model") -> float:
    """Bits a weight of a quantised checkpoint's layer matrices, scales included; 0 where the config names no
    quantisation. ConfigError for one that is not known."""
    found = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if not found:
        return 0.0
    method = found.get("quant_method")
    if method == "fp8":
        block = found.get("weight_block_size")
        return 8 + (32 / (block[0] * block[1]) if block else 0.0)
    if method in ("gptq", "awq"):
        bits, group = found["bits"], found.get("group_size", 128)
        return bits + ((16 + bits) / group if group > 0 else 0.0)  # a scale and a zero point for each group
    if method == "bitsandbytes":
        return 8.0 if found.get("load_in_8bit") else 4 + 32 / 64  # nf4: a float32 scale for 64 weights
    raise ConfigError(f"{where}: quantisation {method!r} is not known to the cost model; known: fp8, gptq, awq, "
                      "bitsandbytes; set plan.weight_bits")


def _heads(c: dict[str, Any]) -> tuple[int, int, int]:
    heads = c["num_attention_heads"]
    return heads, c.get("num_key_value_heads") or heads, c.get("head_dim") or c["hidden_size"] // heads


def _grouped(c: dict[str, Any]) -> tuple[Attention, list[Matrix]]:
    """Attention with groups of query heads, and its matrices in one layer."""
    heads, kv, dim = _heads(c)
    H = c["hidden_size"]
    cached = 2 * kv * dim
    return Attention(heads, kv, cached, cached, 4 * heads * dim, 4 * heads * dim), [
        Matrix("q", heads * dim, H), Matrix("kv", kv * dim, H, 2), Matrix("o", H, heads * dim)]


def _windows(c: dict[str, Any]) -> tuple[int, int]:
    """(layers with a window, its size)."""
    types, window = c.get("layer_types"), c.get("sliding_window") or 0
    if types:
        return sum(t == "sliding_attention" for t in types), window
    if window and c["model_type"] in ("mistral", "mixtral"):
        return c["num_hidden_layers"], window
    if window and c["model_type"] == "gemma2":
        return (c["num_hidden_layers"] + 1) // 2, window
    if window and c["model_type"] == "gemma3_text":
        pattern = c.get("sliding_window_pattern", 6)
        return c["num_hidden_layers"] - c["num_hidden_layers"] // pattern, window
    return 0, 0


def _assemble(c: dict[str, Any], attention: Attention, per_layer: list[Matrix], extra: list[Matrix], small: int,
              tied: bool) -> ModelShape:
    """`per_layer` matrices stand in each of the L layers; `extra` are counted as they are."""
    L = c["num_hidden_layers"]
    matrices = [Matrix(m.name, m.out, m.inp, m.count * L, m.experts, m.chosen) for m in per_layer]
    windowed, window = _windows(c)
    return ModelShape(c["model_type"], L, c["hidden_size"], c["vocab_size"], attention, (*matrices, *extra),
                      small + c["hidden_size"], c.get("tie_word_embeddings", tied), windowed, window)


def _mlp(c: dict[str, Any], width: int, count: int = 1, name: str = "mlp") -> list[Matrix]:
    H = c["hidden_size"]
    return [Matrix(f"{name} in", width, H, 2 * count), Matrix(f"{name} out", H, width, count)]


def _dense(norms: int, head_norms: bool = False, qkv_bias: bool = False, tied: bool = False) -> Callable:
    """A reader of decoders with one gated MLP a layer: `norms` of width H a layer."""
    def read(c: dict[str, Any]) -> ModelShape:
        heads, kv, dim = _heads(c)
        H, I, L = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
        attention, matrices = _grouped(c)
        small = norms * H + (2 * dim if head_norms else 0)
        if qkv_bias or c.get("attention_bias"):
            small += (heads + 2 * kv) * dim + (0 if qkv_bias else H)
        if c.get("mlp_bias"):
            small += 2 * I + H
        return _assemble(c, attention, [*matrices, *_mlp(c, I)], [], L * small, tied)

    return read


def _experts(c: dict[str, Any], E: int, k: int, width: int, layers: int) -> list[Matrix]:
    """Router and experts of `layers` layers."""
    H = c["hidden_size"]
    return [Matrix("router", E, H, layers), Matrix("expert in", width, H, 2 * layers, E, k),
            Matrix("expert out", H, width, layers, E, k)]


def _mixtral(c: dict[str, Any]) -> ModelShape:
    attention, matrices = _grouped(c)
    L = c["num_hidden_layers"]
    return _assemble(c, attention, matrices, _experts(c, c["num_local_experts"], c["num_experts_per_tok"],
                                                      c["intermediate_size"], L), 2 * c["hidden_size"] * L, False)


def _qwen3_moe(c: dict[str, Any]) -> ModelShape:
    heads, kv, dim = _heads(c)
    attention, matrices = _grouped(c)
    L, plain, every = c["num_hidden_layers"], set(c.get("mlp_only_layers") or []), c.get("decoder_sparse_step", 1)
    sparse = sum(i not in plain and (i + 1) % every == 0 for i in range(L))
    experts = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]  # transformers renames it
    extra = _experts(c, experts, c["num_experts_per_tok"], c["moe_intermediate_size"], sparse)
    if sparse < L:
        extra += _mlp(c, c["intermediate_size"], L - sparse)
    bias = (heads + 2 * kv) * dim + c["hidden_size"] if c.get("attention_bias") else 0
    return _assemble(c, attention, matrices, extra, L * (2 * c["hidden_size"] + 2 * dim + bias), False)


def _deepseek(c: dict[str, Any]) -> ModelShape:
    """Multi-head latent attention: the cache holds one latent and one rotary key a token, whatever the heads."""
    H, L, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    latent, rope, nope, value = c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    query, small = c.get("q_lora_rank"), 2 * H + latent
    attention = Attention(heads, 0, latent + rope, heads * (nope + rope + value), 2 * heads * (2 * latent + rope),
                          2 * heads * (nope + rope + value))
    per_layer = [Matrix("kv down", latent + rope, H), Matrix("kv up", heads * (nope + value), latent),
                 Matrix("o", H, heads * value)]
    if query:
        per_layer += [Matrix("q down", query, H), Matrix("q up", heads * (nope + rope), query)]
        small += query
    else:
        per_layer.append(Matrix("q", heads * (nope + rope), H))
    first, E = min(c.get("first_k_dense_replace", 0), L), c["n_routed_experts"]
    moe, width = L - first, c["moe_intermediate_size"]
    extra = _mlp(c, c["intermediate_size"], first) if first else []
    if moe:
        extra += _experts(c, E, c["num_experts_per_tok"], width, moe)
        extra += _mlp(c, width * c["n_shared_experts"], moe, "shared") if c.get("n_shared_experts") else []
    return _assemble(c, attention, per_layer, extra, L * small, False)


# What each model type is; a new one is a line here, or a reader above.
READERS: dict[str, Callable[[dict[str, Any]], ModelShape]] = {
    "llama": _dense(2), "mistral": _dense(2), "qwen2": _dense(2, qkv_bias=True), "qwen3": _dense(2, head_norms=True),
    "phi3": _dense(2), "gemma": _dense(2, tied=True), "gemma2": _dense(4, tied=True),
    "gemma3_text": _dense(4, head_norms=True, tied=True), "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek, "kimi_k2": _deepseek,
}
