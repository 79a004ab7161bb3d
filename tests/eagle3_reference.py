"""EAGLE-3's training-time test the slow way: every chain on its own, one vector at a time, plain attention.

Shares no code with drafters/: norms, rotary embedding, attention and loss are written out from eagle3's paper.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.chat import loss_positions
from drafters.base import Batch
from drafters.eagle3 import Eagle3, Options


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


@dataclass
class SlowEagle3:
    """Reads a drafter's parameters by their names and does everything else itself."""

    drafter: Eagle3

    def weight(self, name: str) -> Tensor:
        return self.drafter.get_parameter(name + ".weight")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.weight(name), self.drafter.shape.rms_norm_eps)

    def rotated(self, heads: Tensor, position: int) -> Tensor:
        """[heads, hd] turned pairwise (i, i + hd/2) by position * theta^(-2i/hd)."""
        half = heads.shape[-1] // 2
        theta = self.drafter.shape.rope_parameters["rope_theta"]
        angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = heads[:, :half], heads[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def fused(self, tap: Tensor) -> Tensor:
        parts = tap.chunk(len(self.drafter.tapped))
        if self.drafter.options.tap_norms:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return self.weight("fc") @ torch.cat(tuple(parts))

    def first_inputs(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads, and its residual."""
        normed = self.norm(state, "midlayer.hidden_norm")
        x = torch.cat([self.norm(self.embedded(token), "midlayer.input_layernorm"), normed])
        return x, normed if self.drafter.options.norm_before_residual else state

    def embedded(self, token: int) -> Tensor:
        return self.drafter.embedding[token]

    def key_value(self, layer: str, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        n = self.drafter.shape.num_key_value_heads
        key = (self.weight(f"{layer}.self_attn.k_proj") @ x).reshape(n, -1)
        return self.rotated(key, position), (self.weight(f"{layer}.self_attn.v_proj") @ x).reshape(n, -1)

    def output(self, layer: str, residual: Tensor, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]
               ) -> Tensor:
        """A decoder layer for one query that sees exactly `seen`."""
        s = self.drafter.shape
        query = (self.weight(f"{layer}.self_attn.q_proj") @ x).reshape(s.num_attention_heads, -1)
        query = self.rotated(query, position)
        mixed = []
        for head in range(s.num_attention_heads):
            group = head // (s.num_attention_heads // s.num_key_value_heads)
            keys = torch.stack([key[group] for key, _ in seen])
            values = torch.stack([value[group] for _, value in seen])
            scores = (keys @ query[head] / s.head_dim**0.5).exp()
            mixed.append(scores / scores.sum() @ values)
        h = residual + self.weight(f"{layer}.self_attn.o_proj") @ torch.cat(mixed)
        inner = self.norm(h, f"{layer}.post_attention_layernorm")
        gate = silu(self.weight(f"{layer}.mlp.gate_proj") @ inner)
        return h + self.weight(f"{layer}.mlp.down_proj") @ (gate * (self.weight(f"{layer}.mlp.up_proj") @ inner))

    def passed(self, state: Tensor, token: int, position: int, seen: list[list[tuple[Tensor, Tensor]]],
               wanted: bool = True) -> Tensor | None:
        """One position through all layers, its keys added to what each has `seen`; its output where it is wanted."""
        x, residual = self.first_inputs(state, token)
        names = ["midlayer", *(f"layers.{i}" for i in range(1, self.drafter.options.num_layers))]
        for name, known in zip(names, seen, strict=True):
            if name != "midlayer":
                x, residual = self.norm(state, f"{name}.input_layernorm"), state
            known.append(self.key_value(name, x, position))
            if name == names[-1] and not wanted:
                return None
            state = self.output(name, residual, x, position, known)
        return state

    def chain(self, ids: list[int], taps: Tensor, start: int, following: list[int]) -> list[Tensor]:
        """Outputs (before the norm) of the chain from `start`; following[k]: the token that step k is given."""
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.drafter.options.num_layers)]
        for i in range(start):
            self.passed(self.fused(taps[i]), ids[i + 1], i, seen, wanted=False)
        state, outputs = self.fused(taps[start]), []
        for k, token in enumerate(following):
            outputs.append(self.passed(state, token, start + k, seen))
            post = self.drafter.options.feedback == "post_norm"
            state = self.norm(outputs[-1], "norm") if post else outputs[-1]
        return outputs

    def logits(self, output: Tensor) -> Tensor:
        return self.weight("lm_head") @ self.norm(output, "norm")


class SlowParallel(SlowEagle3):
    """The parallel drafter: what follows a chain's start is the mask, one place after another."""

    def embedded(self, token: int) -> Tensor:
        own = token == self.drafter.options.mask_token
        return self.drafter.get_parameter("mask_embedding") if own else self.drafter.embedding[token]

    def chain(self, ids: list[int], taps: Tensor, start: int, following: list[int]) -> list[Tensor]:
        """Outputs (before the norm) of as many depths as `following` is long; of its tokens only the first is seen."""
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.drafter.options.num_layers)]
        for i in range(start):
            self.passed(self.fused(taps[i]), ids[i + 1], i, seen, wanted=False)
        outputs = [self.passed(self.fused(taps[start]), following[0], start, seen)]
        mask = self.fused(self.drafter.get_parameter("mask_hidden").flatten())
        for k in range(1, len(following)):
            outputs.append(self.passed(mask, self.drafter.options.mask_token, start + k, seen))
        return outputs


def step_loss(options: Options, log_q: Tensor, head: Tensor, final: Tensor, draft_ids: list[int], label: int
              ) -> tuple[Tensor, float]:
    """One step's loss and how much of it the target would accept, from the definitions: log_q [D], head [V, Ht]."""
    scores = head @ final
    full = scores.softmax(-1)
    q = {token: log_q[i].exp() for i, token in enumerate(draft_ids)}
    if options.labels != "distribution":
        token = int(scores.argmax()) if options.labels == "greedy" else label
        full = torch.zeros_like(full)
        full[token] = 1.0
    accepted = sum((torch.minimum(full[token], q[token]) for token in draft_ids), torch.zeros(()).double())
    mass = full[draft_ids].sum()
    inside = full[draft_ids] / mass if mass > 0 else full[draft_ids]
    divergence = -(inside * log_q).sum()
    if options.loss == "reverse_kl":
        divergence = sum(q[token] * (q[token].log() - inside[i].log()) for i, token in enumerate(draft_ids))
    share = {"kl": 1.0, "reverse_kl": 1.0, "tv": 0.0, "lk": math.exp(-options.lk_eta * accepted.item())}[options.loss]
    return share * divergence + (1 - share) * (1 - accepted), accepted.item()


def slow_loss(drafter: Eagle3, batch: Batch, head: Tensor, slowly: type[SlowEagle3] = SlowEagle3,
              ) -> tuple[Tensor, list[float], list[int], list[int]]:
    """(weighted sum, then per depth: loss sum, hits, positions); head [V, Ht] is the target's own."""
    slow, depth, options = slowly(drafter), drafter.options.depth, drafter.options
    draft_ids = [v for v in range(drafter.shape.vocab_size) if drafter.t2d[v]]
    total, losses, hits, counts = torch.zeros((), dtype=torch.float64), [0.0] * depth, [0] * depth, [0] * depth
    for b in range(len(batch.ids)):
        ids, turns = batch.ids[b].tolist(), batch.turns[b].tolist()
        for t in loss_positions(turns, 0):
            deep = [k for k in range(depth) if t in loss_positions(turns, k)]
            reached = 1.0
            for k, output in zip(deep, slow.chain(ids, batch.taps[b], t, [ids[t + 1 + k] for k in deep])):
                log_q, final, label = slow.logits(output).log_softmax(-1), batch.final[b, t + 1 + k], ids[t + 2 + k]
                loss, accepted = step_loss(options, log_q, head, final, draft_ids, label)
                if options.outside_vocabulary == "drop" and label not in draft_ids:
                    loss = loss * 0
                weight = options.step_decay**k * (reached if options.step_weights == "prefix" else 1.0)
                reached *= accepted
                total = total + weight * loss
                if options.feature_loss:
                    gap = (slow.norm(output, "norm") - final).square().sum() / final.square().sum()
                    total = total + weight * options.feature_loss * gap
                losses[k] += loss.item()
                hits[k] += draft_ids[int(log_q.argmax())] == label
                counts[k] += 1
    return total, losses, hits, counts
