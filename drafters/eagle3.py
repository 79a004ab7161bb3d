"""EAGLE-3 drafter (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration ... via Training-Time Test").

One decoder layer, or two, over fused target states. Position t takes the target's states at t and the embedding of
x[t+1], and predicts x[t+2]. Parameter names are those of the native layout that engines load: midlayer.*, and
layers.1.* as vLLM has it.
Legend: B rows, S sequence, P loss positions, H hidden, Ht target hidden, n taps, D draft vocabulary, K steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafters import vocab
from drafters.base import Batch, LossOutput, loss_mask, take
from drafters.head_loss import DraftHead
from drafters.layers import MOST_LAYERS, GatedMLP, RMSNorm, Shape
from drafters.propose import ChainSession, UnrollMemory, unroll
from drafters.unrolled import Aim, Chains, gather, greedy_drafts, unrolled_loss
from recipes.draft_cost import chain_flops
from recipes.errors import ConfigError
from recipes.schema import NonNegativeInt, PositiveInt, opt

Share = Annotated[float, Field(gt=0, le=1)]


@dataclass
class Shared:
    """`drafter.options` of every kind with EAGLE-3's layers and losses."""

    draft_vocab_size: PositiveInt = opt(4096, "D: target tokens the drafter can propose")
    loss: Literal["kl", "reverse_kl", "tv", "lk"] = opt("kl", "divergence from the target, or its acceptance: tv, and "
                                                              "lk, which goes from kl to tv as acceptance grows")
    labels: Literal["distribution", "greedy", "token"] = opt(
        "distribution", "what teaches: the target's distribution, its first choice, or the token that the trace has")
    lk_eta: NonNegativeFloat = opt(3.0, "lk: the share of kl is exp(-lk_eta * acceptance)")
    step_decay: PositiveFloat = opt(0.8, "weight of step k is step_decay^k")
    step_weights: Literal["fixed", "prefix"] = opt("fixed", "prefix: times the acceptance of the chain's earlier steps")
    start: Literal["target_layer", "random"] = opt("target_layer", "copy the target's last layers, or start at random")
    outside_vocabulary: Literal["keep", "drop"] = opt("keep", "loss where the target's token is not in D")
    hidden_noise: NonNegativeFloat = opt(0.0, "standard deviation of noise on the fused states, relative to their own")
    feature_loss: NonNegativeFloat = opt(0.0, "weight of the distance to the target's final state")
    train_head: bool = opt(True, "train the output head (it starts as the target's)")
    tap_norms: bool = opt(False, "a norm for each tap before fusing (EAGLE-3.1; docs/export.md says which engines)")
    norm_before_residual: bool = opt(False, "residual takes the normed state (vLLM only)")
    intermediate_size: NonNegativeInt = opt(0, "MLP width; 0 is the target's")

    def __post_init__(self) -> None:
        if self.loss == "reverse_kl" and self.labels != "distribution":
            raise ValueError(f"reverse_kl is infinite by labels: {self.labels}; use labels: distribution, or loss: kl")


@dataclass
class Options(Shared):
    """`drafter.options` of a recipe with kind eagle3."""

    depth: PositiveInt = opt(3, "K: unrolled steps of the training-time test")
    first_depth: PositiveInt = opt(1, "unrolled steps at the start of the run")
    deepen_at: float = opt(0.25, "share of the run after which all `depth` steps are unrolled")
    deepen: list[tuple[Share, PositiveInt]] = opt([], "further pairs of a share of the run and the steps unrolled from "
                                                      "there on, e.g. [[0.6, 5], [0.8, 7]]")
    depth_share: Share = opt(1.0, "share of the chains that goes on from each step, at random")
    feedback: Literal["pre_norm", "post_norm"] = opt("pre_norm", "state fed to the next step (post_norm: EAGLE-3.1)")
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = opt(1, "decoder layers, 1 or 2 (2: vLLM only)")

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = [self.deepen_at, *(share for share, _ in self.deepen)]
        if shares != sorted(shares):
            raise ValueError(f"the shares of deepen_at and deepen must rise: {shares}")

    @property
    def stages(self) -> list[tuple[float, int]]:
        """From which share of the run on how many steps are unrolled."""
        return [(0.0, min(self.first_depth, self.depth)), (self.deepen_at, self.depth), *self.deepen]


class Attention(nn.Module):
    """Projections of a draft layer's attention over inputs of `width`."""

    def __init__(self, s: Shape, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, s.num_attention_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(width, s.num_key_value_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(width, s.num_key_value_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_attention_heads * s.head_dim, s.hidden_size, bias=False)


class DecoderLayer(nn.Module):
    """Parameters of a decoder layer; `Eagle3.step` says how they are used. The first one's attention reads embedding
    and state, that of a further one the state."""

    def __init__(self, s: Shape, first: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        if first:
            self.hidden_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s, 2 * s.hidden_size if first else s.hidden_size)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = GatedMLP(s)


class Eagle3(nn.Module):
    """The drafter. Embedding and teacher head are the target's: frozen, never saved, never optimised."""

    kind = "eagle3"
    vocabulary_modules = ("lm_head",)

    def __init__(self, options: Options, shape: Shape, tapped: list[int], ids: Tensor, embedding: Tensor,
                 teacher_head: Tensor) -> None:
        """tapped: layers whose entering states are read; ids [D]: target ids of the draft vocabulary; embedding [V, H];
        teacher_head [V, Ht]."""
        super().__init__()
        self.options, self.shape, self.tapped = options, shape, tapped
        if shape.hidden_size != embedding.shape[1]:
            raise ConfigError(f"drafter hidden size {shape.hidden_size} differs from the target's embedding width "
                              f"{embedding.shape[1]}")
        if options.tap_norms:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.target_hidden_size, shape.rms_norm_eps) for _ in tapped)
        self.fc = nn.Linear(len(tapped) * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.midlayer = DecoderLayer(shape, first=True)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(shape, first=False) for i in range(1, options.num_layers)})
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = DraftHead(shape.hidden_size, shape.draft_vocab_size)
        self.lm_head.weight.requires_grad_(options.train_head)
        rope = LlamaConfig(hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads,
                           head_dim=shape.head_dim, max_position_embeddings=shape.max_position_embeddings,
                           rope_parameters=shape.rope_parameters)
        self.rotary = LlamaRotaryEmbedding(rope)
        d2t, t2d = vocab.maps(ids, shape.vocab_size)
        for name, value in {"d2t": d2t, "t2d": t2d, "draft_ids": ids}.items():
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("teacher_head", teacher_head[ids], persistent=False)
        wants_all = Aim.wants_all(options.loss, options.labels, options.step_weights == "prefix")
        self.register_buffer("full_head", teacher_head if wants_all else None, persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True) -> "Eagle3":
        """Moves and casts as usual, except that rotary frequencies stay float32, as engines keep them."""
        frequencies = self.rotary.inv_freq
        super()._apply(fn, recurse)
        self.rotary.inv_freq = frequencies.to(self.rotary.inv_freq.device)
        return self

    # --- the recursion's parts, called by drafters.propose.unroll ---

    @property
    def stack(self) -> list[DecoderLayer]:
        """The decoder layers, in order."""
        return [self.midlayer, *self.layers.values()]

    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped target states [B, S, n*Ht] to drafter states [B, S, H]."""
        if self.options.tap_norms:
            parts = taps.chunk(len(self.tapped), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(taps)

    def embed(self, tokens: Tensor) -> Tensor:
        """Target ids [B, q] to the target's own embeddings [B, q, H]."""
        return F.embedding(tokens, self.embedding)

    def step(self, state: Tensor, embedded: Tensor, positions: Tensor, memory, select: Tensor | None) -> Tensor:
        """One draft step: state [B, q, H] at `positions` [B, q] with the embedding of the token that follows.

        Every layer writes keys for every position. Outputs [B, p, H] (before the norm) are computed for `select`
        [B, p]; those of a layer before the last for all, since the next layer's keys are made of them.
        """
        s, first, stack = self.shape, self.midlayer, self.stack
        normed = first.hidden_norm(state)
        residual = normed if self.options.norm_before_residual else state
        x = torch.cat([first.input_layernorm(embedded), normed], dim=-1)  # [B, q, 2H]
        for i, layer in enumerate(stack):
            if layer is not first:
                x, residual = layer.input_layernorm(state), state  # [B, q, H]
            keys = layer.self_attn.k_proj(x).unflatten(-1, (s.num_key_value_heads, s.head_dim))
            values = layer.self_attn.v_proj(x).unflatten(-1, (s.num_key_value_heads, s.head_dim))
            memory.write(i, self.rotate(keys, positions), values, positions)
            if select is not None and layer is stack[-1]:
                x, residual, positions = take(x, select), take(residual, select), positions.gather(1, select)
            queries = layer.self_attn.q_proj(x).unflatten(-1, (s.num_attention_heads, s.head_dim))
            h = residual + layer.self_attn.o_proj(memory.attend(i, self.rotate(queries, positions), positions))
            state = h + layer.mlp(layer.post_attention_layernorm(h))
        return state

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of [B, q, heads, hd] at positions [B, q]."""
        cos, sin = self.rotary(x, positions)
        return apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0]

    def logits(self, state: Tensor) -> Tensor:
        """Draft logits [..., D] of step outputs [..., H]."""
        return self.lm_head(self.norm(state))

    def feedback(self, state: Tensor) -> Tensor:
        """What the next step takes as its state."""
        return self.norm(state) if self.options.feedback == "post_norm" else state

    # --- training ---

    def count(self, batch: Batch) -> int:
        return int(loss_mask(batch.turns, 0).sum())

    def depth_at(self, progress: float) -> int:
        """Unrolled steps at this share of the run."""
        return [steps for share, steps in self.options.stages if progress >= share][-1]

    def forward(self, batch: Batch, progress: float = 1.0, seed: int = 0) -> LossOutput:
        """Loss of the training-time test (drafters/unrolled.py). Only positions that carry loss get
        queries and MLP of the last layer, and the head; the rest lend their step-0 keys."""
        depth = self.depth_at(progress)
        chains = Chains(batch, self.options.depth_share, seed + 1)
        unrolled = unroll(self, self.noisy(self.fuse(batch.taps), seed), F.pad(batch.ids[:, 1:], (0, 1)),
                          batch.positions, UnrollMemory(chains.at, batch.starts, self.options.num_layers), depth,
                          choose=lambda k, output: chains.token(k), select=chains.at,
                          thin=chains.thin if self.options.depth_share < 1 else None)
        steps = gather((chains, output) for output in unrolled)
        return unrolled_loss(steps, self.norm(steps.outputs), self.lm_head, self.aim(), batch.final,
                             self.options.feature_loss)

    def aim(self) -> Aim:
        """What the options say a step learns."""
        o = self.options
        return Aim(o.loss, o.labels, o.step_decay, o.step_weights == "prefix", o.lk_eta,
                   o.outside_vocabulary == "drop", self.draft_ids, self.t2d, self.teacher_head, self.full_head)

    def flops(self, tokens: float, worked: Sequence[float]) -> float:
        """Model FLOPs of training on `tokens` with worked[k] positions of loss at depth k: what the loss
        needs, without attention, and not what a machine spent on it."""
        def size(module: nn.Module) -> int:
            return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))

        last = self.stack[-1]
        step = size(last.self_attn.q_proj) + size(last.self_attn.o_proj) + size(last.mlp)
        return chain_flops(tokens, worked, worked, fuse=size(self.fc), every=sum(map(size, self.stack)) - step,
                           step=step, head=size(self.lm_head), teacher=self.teacher_head.numel(),
                           train_head=self.options.train_head)

    def noisy(self, state: Tensor, seed: int) -> Tensor:
        """Adds seeded Gaussian noise to the fused states, scaled by each position's own spread."""
        if not self.options.hidden_noise or not self.training:
            return state
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(state.shape, generator=generator).to(state)
        return state + self.options.hidden_noise * state.detach().std(-1, keepdim=True) * noise

    @torch.no_grad()
    def chain_logits(self, batch: Batch, K: int) -> Iterator[Tensor]:
        """Logits [B, P, D] of each of K steps of the greedy drafts from every position that can start one."""
        chains = Chains(batch, 1.0, 0)
        drafted: list[Tensor] = []
        steps = unroll(self, self.fuse(batch.taps), F.pad(batch.ids[:, 1:], (0, 1)), batch.positions,
                       UnrollMemory(chains.at, batch.starts, self.options.num_layers), K,
                       choose=lambda k, output: drafted[-1], select=chains.at)
        for output in steps:
            logits = self.logits(output)
            drafted.append(self.draft_ids[logits.argmax(-1)])
            yield logits

    def chains(self, batch: Batch, K: int) -> tuple[Tensor, Tensor, Tensor]:
        """Greedy drafts from every position that can start one: tokens [B, P, K], at [B, P], valid [B, P]."""
        return greedy_drafts(batch, self.draft_ids, self.chain_logits(batch, K))

    # --- decoding ---

    def session(self, rows: int, capacity: int) -> ChainSession:
        return ChainSession(self, rows, capacity, self.options.num_layers)

    # --- saving ---

    def meta(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self.options), "shape": asdict(self.shape), "layers": self.tapped}

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds: trained parameters and the vocabulary maps."""
        return {**self.state_dict(), "d2t": self.d2t, "t2d": self.t2d}
