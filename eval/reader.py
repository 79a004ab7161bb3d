"""An independent reader of exported EAGLE-3 and parallel folders: plain torch, no cache, from the format alone.

It shares no code with training, decoding or export, so that an error there cannot hide in here too (case 12).
Slow on purpose: every draft step recomputes the drafter's whole sequence; the target's text comes from transformers'
own cache. Source: formats.md sections 1, 4, 7, eagle3.md.
S tokens of one sequence, H draft hidden size, Ht target hidden size, V target vocabulary, D draft vocabulary,
K draft length, nh heads, nkv key/value heads, hd head dimension, n taps.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eval.reader_lm import ReadLM
from eval.reader_medusa import ReadMedusa
from recipes.errors import RunError


@dataclass
class Reading:
    """What decoding gave."""

    drafts: int
    accepted_per_position: list[int]  # [K]; entry i: drafts whose first i + 1 tokens were accepted
    tokens: list[list[int]]  # the answers, without their prompts


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def inverse_frequencies(config: dict) -> Tensor:
    """Rotary inverse frequencies, float32 [rotated dimensions / 2], from the top-level keys of config.json.

    Raises RunError for a rope_type other than default, linear and llama3.
    """
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    kind = scaling["rope_type"]
    dims = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    plain = 1.0 / config["rope_theta"] ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / scaling["factor"]
    if kind != "llama3":
        raise RunError(f"config.json: rope_scaling.rope_type = {kind}: the reader knows default, linear and "
                       f"llama3; set export.check to false to ship without this check")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the trained context
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow, divided by the factor; 1: fast, kept
    return kept * plain + (1 - kept) * plain / scaling["factor"]


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Llama's half-rotation of x [heads, S, hd] by `positions` [S]; dimensions beyond those stay."""
    half = len(frequencies)
    angles = positions[:, None].float() * frequencies  # [S, half]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class ReadDrafter:
    """The drafter of an exported folder beside its target; computes in the target's precision."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        """Raises RunError for unreadable files, missing or unexpected tensors, a map outside the target."""
        try:
            self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self.weights = load_file(folder / "model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise RunError(f"{folder}: cannot be read: {error}; export again") from None
        if "speculators_model_type" in self.config:
            self.read_speculators()
        if self.config.get("draft_vocab_size") == self.config["vocab_size"]:  # a full vocabulary has no maps
            self.weights.setdefault("d2t", torch.zeros(self.config["vocab_size"], dtype=torch.long))
            self.weights.setdefault("t2d", torch.ones(self.config["vocab_size"], dtype=torch.bool))
        self.layers = self.config["eagle_aux_hidden_state_layer_ids"]
        self.mask = self.config.get("ptd_token_id")  # token of the places to come; None: one token a pass
        self.further = [f"layers.{i}" for i in range(1, self.config["num_hidden_layers"])]
        self.check_names(folder)
        d2t, _ = self.weights.pop("d2t"), self.weights.pop("t2d")
        self.target_ids = (torch.arange(len(d2t)) + d2t).tolist()  # offsets, not absolute ids
        V = model.config.vocab_size
        if len(set(self.target_ids)) != len(d2t) or not all(0 <= i < V for i in self.target_ids):
            raise RunError(f"{folder}: d2t decodes to repeated ids or ids not in 0..{V - 1}; export again")
        self.weights = {name: t.to(model.device, model.dtype) for name, t in self.weights.items()}
        if self.mask is not None and not 0 <= self.mask < V:
            raise RunError(f"{folder}: ptd_token_id = {self.mask} is not in 0..{V - 1}; export again")
        own = self.weights.get("embed_tokens.weight")
        self.embedding = model.get_input_embeddings().weight if own is None else own  # [V, H]
        self.frequencies = inverse_frequencies(self.config).to(model.device)

    @property
    def limit(self) -> int:
        """Positions that it was trained for."""
        return self.config["max_position_embeddings"]

    def read_speculators(self) -> None:
        """Takes the other layout's config (formats.md section 2) and names for the native ones: the decoder has a
        config of its own, and its layer is layers.0."""
        outer, inner = self.config, self.config["transformer_layer_config"]
        self.config = {**inner, **{key: outer[key] for key in (
            "norm_before_residual", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size")},
                       "ptd_token_id": outer.get("mask_token_id")}
        self.weights = {name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
                        for name, tensor in self.weights.items()}

    def check_names(self, folder: Path) -> None:
        """Raises RunError where a tensor is missing, or is one that this reader leaves unused (case 13)."""
        parts = [*(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "input_layernorm", "post_attention_layernorm"]
        wanted = {f"{layer}.{part}.weight" for layer in ("midlayer", *self.further) for part in parts}
        wanted |= {"midlayer.hidden_norm.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
        if self.config.get("fc_norm"):
            wanted |= {f"fc_norm.{i}.weight" for i in range(len(self.layers))}
        if self.mask is not None:
            wanted |= {"mask_hidden", "embed_tokens.weight"}  # the masks' embedding is a row of that table
        wrong = wanted ^ (self.weights.keys() - ({"embed_tokens.weight"} - wanted))
        if wrong:
            raise RunError(f"{folder}: missing or unexpected: {', '.join(sorted(wrong))}; export again")

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def combine(self, taps: list[Tensor]) -> Tensor:
        """States entering the tapped layers, n of [S, Ht], to the drafter's own state [S, H]."""
        if self.config.get("fc_norm"):
            taps = [self.norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)]
        return self.linear("fc", torch.cat(taps, dim=-1))

    def attend(self, layer: str, x: Tensor) -> Tensor:
        """Causal self-attention over x [S, 2H], in a further layer [S, H], at positions 0..S-1, returns [S, H]."""
        S, hd = len(x), self.config["head_dim"]
        positions = torch.arange(S, device=x.device)
        q, k, v = (self.linear(f"{layer}.self_attn.{p}_proj", x) for p in "qkv")
        q, k, v = (t.view(S, -1, hd).transpose(0, 1) for t in (q, k, v))
        q, k = (rotate(t, positions, self.frequencies) for t in (q, k))
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        k, v = (t.repeat_interleave(group, dim=0) for t in (k, v))  # [nh, S, hd]
        scores = q @ k.transpose(1, 2) * hd ** -0.5
        scores = scores.masked_fill(positions[None, :] > positions[:, None], float("-inf"))
        wide = torch.promote_types(x.dtype, torch.float32)
        out = scores.softmax(-1, dtype=wide).to(x.dtype) @ v  # [nh, S, hd]
        return self.linear(f"{layer}.self_attn.o_proj", out.transpose(0, 1).reshape(S, -1))

    def block(self, layer: str, residual: Tensor, x: Tensor) -> Tensor:
        """One decoder layer, whose attention reads x, over states residual [S, H]."""
        h = residual + self.attend(layer, x)
        x = self.norm(f"{layer}.post_attention_layernorm", h)
        gated = F.silu(self.linear(f"{layer}.mlp.gate_proj", x)) * self.linear(f"{layer}.mlp.up_proj", x)
        return h + self.linear(f"{layer}.mlp.down_proj", gated)

    def step(self, state: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """All layers over states [S, H] and, for each, the token that FOLLOWS its position.

        Returns the state to feed back [S, H] and the normed output that the head reads [S, H].
        """
        embedded = self.embedding[torch.tensor(tokens, device=state.device)]
        normed = self.norm("midlayer.hidden_norm", state)
        residual = normed if self.config.get("norm_before_residual") else state
        both = torch.cat([self.norm("midlayer.input_layernorm", embedded), normed], dim=-1)  # [S, 2H]
        h = self.block("midlayer", residual, both)
        for layer in self.further:
            h = self.block(layer, h, self.norm(f"{layer}.input_layernorm", h))
        output = self.norm("norm", h)
        return (output if self.config.get("norm_output") else h), output

    def draft(self, taps: list[Tensor], tokens: list[int], length: int) -> list[int]:
        """K target ids that follow `tokens` (t + 2 of them), from the target states at positions 0..t.

        Step k adds one row at position t + k: the state fed back by the step before and the token it drafted.
        A layer's keys and values depend on nothing but their own row and, behind the first layer, earlier ones:
        so a causal pass over all rows is the chain, the rows of positions <= t being the real target states.
        """
        return [self.target_ids[int(logits.argmax())] for logits in self.draft_logits(taps, tokens, length)]

    def draft_logits(self, taps: list[Tensor], tokens: list[int], length: int) -> list[Tensor]:
        """Logits [D] of each step of `draft`; of a parallel drafter one pass has them all."""
        if self.mask is not None:
            return self.parallel_logits(taps, tokens, length)
        state, following, found = self.combine(taps), tokens[1:], []
        for _ in range(length):
            feedback, output = self.step(state, following)
            found.append(self.linear("lm_head", output[-1]))  # [D]
            state = torch.cat([state, feedback[-1:]])
            following = [*following, self.target_ids[int(found[-1].argmax())]]
        return found

    def parallel_logits(self, taps: list[Tensor], tokens: list[int], length: int) -> list[Tensor]:
        """K logits [D] of one causal pass: behind the target's states come K - 1 rows of the learned state and the
        mask's token, at the positions that follow."""
        learned = self.weights["mask_hidden"].reshape(1, -1).chunk(len(self.layers), dim=-1)
        state = torch.cat([self.combine(taps), self.combine(list(learned)).expand(length - 1, -1)])
        _, output = self.step(state, [*tokens[1:], *[self.mask] * (length - 1)])
        return list(self.linear("lm_head", output[-length:]))


def read_target(model: nn.Module, tokens: list[int], layers: list[int]) -> tuple[list[int], list[Tensor]]:
    """One pass of the target: its greedy token after every position, and n states [S, Ht] ENTERING `layers`; L + 1 is
    what the final norm gives.

    transformers gives its last hidden state after the final norm, engines tap id L before it: hence the hook.
    """
    last = {}
    hook = model.get_decoder().norm.register_forward_pre_hook(lambda module, args: last.update(state=args[0]))
    try:
        out = model(torch.tensor([tokens], device=model.device), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    entering = [*out.hidden_states[:-1], last["state"], out.hidden_states[-1]]  # the last is behind the norm
    return out.logits[0].argmax(-1).tolist(), [entering[k][0] for k in layers]


def open_reader(folder: Path, model: nn.Module) -> "ReadDrafter | ReadMedusa | ReadLM":
    """The reader of an exported folder. RunError as they raise it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: cannot be read: {error}; export again") from None
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return ReadMedusa(folder, model)
    whole = (config.get("drafthouse") or {}).get("kind") == "small_lm"
    return (ReadLM if whole else ReadDrafter)(folder, model)


def continuation(model: nn.Module, prompt: list[int], max_tokens: int, end_ids: list[int], further: int) -> list[int]:
    """The target's own greedy tokens behind `prompt`, one a pass, with transformers' own cache: the answer, which ends
    with its first end token (kept) or at `max_tokens`, and `further` more."""
    tokens, entering, cache, size = [], prompt, None, max_tokens
    while len(tokens) < size + further:
        out = model(torch.tensor([entering], device=model.device), cache=cache, use_cache=True)
        entering, cache = [int(out.logits[0, -1].argmax())], out.cache
        tokens += entering
        if tokens[-1] in end_ids:
            size = min(size, len(tokens))
    return tokens


@torch.inference_mode()
def read_acceptance(folder: Path, model: nn.Module, prompts: list[list[int]], draft_length: int,
                    max_tokens: int, end_ids: list[int]) -> Reading:
    """Greedy decoding of `prompts` (token ids) with the exported drafter, counted as vLLM counts.

    The first token comes from the prefill, without a draft. Each further cycle drafts K = draft_length tokens
    and counts the prefix that equals the target's own greedy tokens, BEFORE the answer is trimmed at an end
    token or at max_tokens (formats.md section 7). model: a causal LM of transformers.
    Raises RunError for an unusable folder or a prompt that does not fit.
    """
    drafter = open_reader(folder, model)
    limit = min(drafter.limit, model.config.max_position_embeddings)
    reading = Reading(0, [0] * draft_length, [])
    for prompt in prompts:
        if not prompt or len(prompt) + max_tokens + draft_length > limit:
            raise RunError(f"a prompt of {len(prompt)} tokens with max_tokens = {max_tokens} and "
                           f"draft_length = {draft_length} does not fit 1..{limit} positions; shorten it")
        reading.tokens.append(decode(drafter, model, prompt, max_tokens, end_ids, reading))
    return reading


def decode(drafter: ReadDrafter, model: nn.Module, prompt: list[int], max_tokens: int, end_ids: list[int],
           reading: Reading) -> list[int]:
    """One answer; adds its drafts to `reading`.

    Greedy speculation gives the target's own text, and no state depends on a later token: so one pass over that text
    holds the states of every cycle, and what the target would choose at each drafted place stands in it.
    """
    K = len(reading.accepted_per_position)
    text = continuation(model, prompt, max_tokens, end_ids, K)
    _, taps = read_target(model, prompt + text, drafter.layers)
    done, size = 1, len(text) - K
    while done < size:
        known = prompt + text[:done]  # the last one is the target's choice, whose own state is not known yet
        drafted, accepted = drafter.draft([tap[: len(known) - 1] for tap in taps], known, K), 0
        while accepted < K and drafted[accepted] == text[done + accepted]:
            accepted += 1
        reading.drafts += 1
        for i in range(accepted):
            reading.accepted_per_position[i] += 1
        done += accepted + 1
    return text[:size]
