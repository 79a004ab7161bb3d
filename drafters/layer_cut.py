"""A standalone language model cut from the target's first layers, with its final norm and head. Nothing is trained.

It shows what the loop costs and gains with any small model of the target's vocabulary (Leviathan et al. 2023).
Legend: B rows, q tokens a row, p tokens of a level that are grown further, H hidden, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import take
from drafters.cache import RowCache
from drafters.export import serving
from drafters.export.plain import write_model
from drafters.fast_cpu import GROUPED
from drafters.growth import growth
from drafters.tree import Draft, Plan, planned
from drafters.visible import Branches, Paths, masks, windows_of
from recipes.errors import ConfigError
from recipes.schema import NonNegativeInt, opt


@dataclass
class Options:
    """`drafter.options` of a recipe with kind layer_cut."""

    layers: NonNegativeInt = opt(0, "layers kept from the target's first ones; 0 is a third of them")


class StandaloneLM(nn.Module):
    """A causal LM of the target's vocabulary as a drafter, whatever its layers are."""

    vocabulary_modules = ()

    def __init__(self, kind: str, options: Any, model: nn.Module, groups: int, windows: dict[str, int]) -> None:
        """groups: query heads a key/value head where attention is grouped (drafters/fast_cpu.py), else 1."""
        super().__init__()
        self.kind, self.options, self.model, self.groups, self.windows = kind, options, model, groups, windows
        ids = torch.arange(model.config.vocab_size, device=model.get_input_embeddings().weight.device)
        self.register_buffer("draft_ids", ids, persistent=False)
        self.register_buffer("t2d", torch.ones_like(ids, dtype=torch.bool), persistent=False)

    def states(self, ids: Tensor, positions: Tensor, cache: RowCache, branches: Branches | None = None) -> Tensor:
        """Final states [B, q, H] of ids [B, q]; each token sees the cache's columns up to its position, or along
        `branches`."""
        cache.aim(None, positions if branches is None else branches.columns)
        mask = masks(self.windows, positions, cache.width, branches, self.model.dtype, self.groups)
        return self.model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache,
                                        use_cache=True).last_hidden_state

    def logits(self, states: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(states)

    def session(self, rows: int, capacity: int) -> "LMSession":
        return LMSession(self, RowCache(self.model.config.num_hidden_layers, rows, capacity))

    def meta(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self.options)}


class LMSession:
    """A standalone model in the decoding loop. At position t it reads x[t] and predicts x[t+1]."""

    def __init__(self, drafter: StandaloneLM, cache: RowCache) -> None:
        self.drafter, self.cache = drafter, cache
        self.first: Tensor | None = None  # [B, 1] tokens of the prompts that no position's following token names

    def begin(self, prompts: list[list[int]]) -> None:
        self.first = torch.tensor([prompt[:1] for prompt in prompts], device=self.drafter.draft_ids.device)

    def observe(self, taps: Tensor | None, tokens: Tensor, positions: Tensor, last: Tensor) -> None:
        positions = positions + 1
        if self.first is not None:
            tokens, last = torch.cat([self.first, tokens], dim=1), last + 1
            positions = torch.cat([torch.zeros_like(self.first), positions], dim=1)
            self.first = None
        self.pending = tokens, positions, last[:, None]

    def propose(self, plan: Plan | int, sample: Callable[[Tensor], Tensor] | None = None) -> Draft:
        plan, drafter = planned(plan), self.drafter
        tokens, positions, last = self.pending
        grown = growth(plan, len(tokens), drafter.draft_ids, len(drafter.draft_ids), sample)
        states = take(drafter.states(tokens, positions, self.cache), last)  # [B, 1, H]
        at = positions.gather(1, last)  # [B, 1]
        paths = Paths(at[:, 0])
        while not grown.take(drafter.logits(states)):
            at, branches = at[:, :1] + 1, None
            if not plan.narrow:
                paths.go_on(grown.follows)
                branches = paths.branches()
            states = drafter.states(grown.frontier, at.expand_as(grown.frontier).contiguous(), self.cache, branches)
        return grown.draft()

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        self.pending = tuple(part[rows] for part in self.pending)

    def join(self, other: "LMSession") -> None:
        """Joining prompts are run first, so that their last token alone is pending; this session's own too, where a
        row ended with its first token, before anything was drafted."""
        if not self.cache.width:
            self.settle()
        other.settle()
        self.cache.join(other.cache)
        width = self.pending[0].shape[1]
        tokens, positions, last = other.pending
        settled = tokens.expand(-1, width), positions.expand(-1, width), last
        self.pending = tuple(torch.cat(pair) for pair in zip(self.pending, settled))

    def settle(self) -> None:
        """Runs what is pending and leaves each row's last token alone pending."""
        tokens, positions, last = self.pending
        self.drafter.states(tokens, positions, self.cache)
        self.pending = take(tokens, last), take(positions, last), torch.zeros_like(last)


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> StandaloneLM:
    """The drafter for a loaded target, which shares its weights; counts and seed do not matter. ConfigError where the
    target has too few layers, is spread over devices, or is no plain language model."""
    kept = options.layers or max(1, target.depth // 3)
    if kept >= target.depth:
        raise ConfigError(f"drafter.options.layers = {kept}: must be fewer than the target's {target.depth}")
    name = target.section.model
    if target.section.device_map or target.section.tp_plan:
        raise ConfigError(f"drafter.kind = layer_cut: target.model = {name} is spread over devices; use one device")
    if target.model.config.model_type != target.config.model_type:
        raise ConfigError(f"drafter.kind = layer_cut: target.model = {name} is more than a language model; use another "
                          "drafter")
    model = cut(target.model, target.depth, list(range(kept)))
    if target.grouped:
        model.set_attn_implementation(GROUPED)
    return StandaloneLM("layer_cut", options, model, target.groups if target.grouped else 1,
                        windows_of(model, model.config, name, target.device)).eval()


def cut(model: nn.Module, depth: int, kept: list[int]) -> nn.Module:
    """Those of the model's `depth` layers that are `kept`, its embedding, norm and head: its own tensors under a new
    module."""
    config = copy.deepcopy(model.config)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth:  # one entry a layer
            setattr(config, key, [value[i] for i in kept])
    config.num_hidden_layers = len(kept)
    with torch.device("meta"):
        small = type(model)(config)
    theirs = {**dict(model.named_buffers()), **model.state_dict()}
    small.load_state_dict({name: theirs[earlier_name(small, name, kept)] for name in small.state_dict()}, assign=True)
    for name, buffer in list(small.named_buffers()):  # those that no checkpoint keeps: rotary frequencies
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            setattr(small.get_submodule(owner), leaf, theirs[name].clone())
    return small.eval().requires_grad_(False)


def earlier_name(small: nn.Module, name: str, kept: list[int]) -> str:
    """What the model that it was cut from calls a tensor of the small one."""
    decoder = small.get_decoder()
    place = next(name for name, module in small.named_modules() if module is decoder)
    layers = next(name for name, part in decoder.named_children()
                  if isinstance(part, nn.ModuleList) and len(part) == len(kept))
    start = f"{place}.{layers}."
    if not name.startswith(start):
        return name
    number, _, rest = name.removeprefix(start).partition(".")
    return f"{start}{kept[int(number)]}.{rest}"


def speculation(drafter: StandaloneLM, drafted: int, folder: Path) -> dict[str, Any]:
    """vLLM's speculative_config that drafts the same (`vllm/v1/spec_decode/draft_model.py`, 0.32); the model that it
    loads is written to `folder`. RunError where that is not what drafts here."""
    write_model(drafter.model, folder)
    return serving.speculation(str(folder.resolve()), drafted, "draft_model")
