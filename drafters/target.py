"""The target model: loading, fingerprint, hidden-state taps, cached forward passes.

Layer ids follow Hugging Face: `hidden_states[k]` is the state ENTERING layer k. The final state is the one
after the final norm, applied once. Legend: B rows, q tokens a row, H target hidden size, V vocabulary.
"""

import json
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from drafters.cache import RowCache
from drafters.embedded import materialise
from drafters.fast_cpu import GROUPED, use_skinny_linear
from drafters.placement import check_map, device_of, loading_options, pick_device, weight_of
from drafters.registry import FINAL
from drafters.visible import Branches, masks, windows_of
from recipes.errors import ConfigError
from recipes.files import sha256_file, sha256_json
from recipes.launched import local_processes
from recipes.schema import Target as TargetSection

SHARED = 4  # tokens; a shorter beginning is not worth a pass of its own


@dataclass
class States:
    """What one forward pass of the target yields."""

    final: Tensor  # [B, q, H] after the final norm
    taps: Tensor | None  # [B, q, n*H] what the drafter reads: states entering the tapped layers, or the final one
    logits: Tensor | None  # [B, q, V]


@dataclass
class Prefix:
    """How several rows begin alike, computed once: `length` tokens (0: nothing worth sharing)."""

    length: int = 0
    cache: RowCache | None = None
    states: States | None = None  # [1, length, ...]

    def fill(self, cache: RowCache) -> RowCache:
        """The empty cache, every row beginning with the shared tokens."""
        if self.length:
            cache.begin_with(self.cache, self.length)
        return cache


def default_layers(layers: int) -> list[int]:
    """EAGLE-3's taps [2, L//2, L-3]; ConfigError where a shallow target makes them collide (case 63)."""
    chosen = [2, layers // 2, layers - 3]
    if not (0 <= chosen[0] < chosen[1] < chosen[2]):
        raise ConfigError(
            f"trace.layers: the default [2, L//2, L-3] = {chosen} is not three distinct ascending layers for a "
            f"target of {layers}; set trace.layers to three of 0..{layers}"
        )
    return chosen


def resolve_model(section: TargetSection) -> str:
    """A path or Hub id that transformers can load; materialises an embedded target."""
    if section.model.startswith("embedded:"):
        return str(materialise(section.model.removeprefix("embedded:"), Path(section.cache_dir)))
    return section.model


def use_threads(threads: int) -> None:
    """Sets torch's CPU threads; `accelerate launch` would otherwise leave one (it sets OMP_NUM_THREADS=1). 0: the cores
    of this process, divided by the processes of a launch."""
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_processes()))


class Target:
    """A loaded target. `layers` are the tapped layer ids (empty: no layer is tapped)."""

    def __init__(self, section: TargetSection, layers: list[int] | str | None = None) -> None:
        """Loads model and tokenizer. Raises ConfigError naming `target.model` for anything unusable."""
        use_threads(section.threads)
        transformers_logging.disable_progress_bar()
        self.section = section
        self.path = resolve_model(section)
        self.dtype = getattr(torch, section.dtype)
        options = {"trust_remote_code": section.trust_remote_code}
        try:
            self.config = AutoConfig.from_pretrained(self.path, **options).get_text_config()
            self.tokenizer = AutoTokenizer.from_pretrained(self.path, **options)
            placed = self.placement()
            device = None if placed else pick_device(section.device)
            model, report = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=self.dtype, use_safetensors=True, output_loading_info=True, **options, **placed)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            said = textwrap.shorten(str(error), 300)
            raise ConfigError(f"target.model = {section.model}: cannot be loaded: {said}") from None
        if report["missing_keys"]:  # transformers would go on with random numbers in their place (case 13)
            raise ConfigError(f"target.model = {section.model}: its files hold no {sorted(report['missing_keys'])[0]}")
        check_map(section, model)
        self.model = (model if placed else model.to(device)).eval().requires_grad_(False)
        self.device = device_of(self.model.get_output_embeddings())  # where states are gathered
        self.depth = self.config.num_hidden_layers
        self.hidden = self.config.hidden_size
        self.groups = self.config.num_attention_heads // self.config.num_key_value_heads
        self.max_length = self.config.max_position_embeddings
        self.grouped = self.device.type == "cpu" and section.skinny_linear and not section.tp_plan
        if self.grouped:
            use_skinny_linear(self.model)
            self.model.set_attn_implementation(GROUPED)
        self.windows = windows_of(self.model, self.config, section.model, self.device)
        self.seen: dict[int, Tensor] = {}
        self.hooks: list[RemovableHandle] = []
        self.tap(layers)
        self.check_head()

    def placement(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that say where the weights go; empty: to `target.device`."""
        options = loading_options(self.section)
        if self.section.tp_plan:
            raise ConfigError("target.tp_plan: this stage runs in one process; use target.device_map here")
        return options

    @property
    def head(self) -> nn.Linear:
        """The vocabulary projection, to be called; its weight is `head_weight`."""
        return self.model.get_output_embeddings()

    def project(self, states: Tensor) -> Tensor:
        """Logits [..., V] of final states [..., H], as part of a pass."""
        return self.model.get_output_embeddings()(states)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the vocabulary projection [V, H], wherever it is kept."""
        return weight_of(self.model.get_output_embeddings())

    @property
    def embedding(self) -> Tensor:
        """Input embedding table [V, H], wherever it is kept."""
        return weight_of(self.model.get_input_embeddings())

    @property
    def vocab_size(self) -> int:
        """V as in the config, padding rows included."""
        return self.config.vocab_size

    @property
    def end_ids(self) -> list[int]:
        """Every id that ends a turn: generation config, model config and the tokenizer's own."""
        found = set()
        for value in (self.model.generation_config.eos_token_id, self.config.eos_token_id,
                      self.tokenizer.eos_token_id):
            found |= set(value) if isinstance(value, (list, tuple)) else {value}
        return sorted(found - {None})

    def check_layers(self, layers: list[int] | None) -> list[int]:
        if layers is None:
            return []
        chosen = list(layers) or default_layers(self.depth)
        if len(set(chosen)) != len(chosen) or chosen != sorted(chosen) or not all(0 <= k <= self.depth for k in chosen):
            raise ConfigError(f"trace.layers = {chosen}: must be distinct, ascending and within 0..{self.depth}")
        return chosen

    def tap(self, layers: list[int] | str | None) -> None:
        """Passes give the states entering these layers from now on (empty: the default ones; None: none); id L is what
        enters the final norm. FINAL: they give the state after it. Raises ConfigError as check_layers does."""
        self.shows_final = layers == FINAL
        self.layers, base = self.check_layers(None if self.shows_final else layers), self.model.get_decoder()
        for hook in self.hooks:
            hook.remove()
        self.seen.clear()
        modules = {k: base.layers[k] if k < self.depth else base.norm for k in self.layers}
        self.hooks = [m.register_forward_pre_hook(self.keeper(k), with_kwargs=True) for k, m in modules.items()]

    def keeper(self, k: int):
        def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.seen[k] = args[0] if args else kwargs["hidden_states"]

        return keep

    def check_head(self) -> None:
        """The teacher is head(final state): refuses a target whose logits are anything else."""
        ids = torch.tensor([[1, 2, 3]], device=self.device) % self.vocab_size
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits
            ours = self.project(self.model.get_decoder()(ids, use_cache=False).last_hidden_state)
        if not torch.allclose(logits.float(), ours.float(), rtol=1e-3, atol=1e-3):
            kind = type(self.model).__name__
            raise ConfigError(f"target.model = {self.section.model}: {kind} scales or caps its logits; not supported")

    def new_cache(self, rows: int, capacity: int) -> RowCache:
        """An empty cache of `rows` rows with room for `capacity` tokens each."""
        return RowCache(self.depth, rows, capacity)

    def prefix(self, rows: Sequence[list[int]]) -> Prefix:
        """The tokens that all rows begin with (a chat template's system message), through the target once.
        Every row keeps at least one token of its own."""
        length = min([len(commonprefix(rows)), *(len(row) - 1 for row in rows)])
        if len(rows) < 2 or length < SHARED:
            return Prefix()
        cache = self.new_cache(1, length)
        ids = torch.tensor([rows[0][:length]], device=self.device)
        positions = torch.arange(length, device=self.device)[None]
        return Prefix(length, cache, self.forward(ids, positions, cache, logits=False))

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, cache: RowCache | None = None, rows: Tensor | None = None,
                logits: bool = True, branches: Branches | None = None) -> States:
        """One pass over `ids` [B, q] at `positions` [B, q]: each sees the cache's columns up to its own position.

        rows: the cache rows these belong to (None: all). Without a cache the q tokens see one another,
        causally by position. Padding goes at the end of a row, at positions not used yet. branches: where the tokens
        of a draft tree are kept and what they see of one another.
        """
        if cache is not None:
            cache.aim(rows, positions if branches is None else branches.columns)
        mask = masks(self.windows, positions, cache.width if cache is not None else None, branches, self.dtype,
                     self.groups if self.grouped else 1)
        self.seen.clear()
        final = self.model.get_decoder()(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=cache is not None,
        ).last_hidden_state.to(self.device)
        taps = final if self.shows_final else None
        if self.layers:
            taps = torch.cat([self.seen[k].to(self.device) for k in self.layers], dim=-1)
        return States(final, taps, self.project(final) if logits else None)

    def fingerprint(self) -> dict[str, str]:
        """What must agree between traces, drafter and serving: weights, config, dtype, tokenizer, template."""
        return dict(self.identity)

    @cached_property
    def identity(self) -> dict[str, str]:
        """The fingerprint, worked out once: it reads every weight file."""
        return fingerprint_of(self.path, self.config, self.tokenizer, self.section.dtype)

    def weights_digest(self) -> str:
        return weights_digest(self.path)


def fingerprint_of(path: str, config: Any, tokenizer: PreTrainedTokenizerBase, dtype: str) -> dict[str, str]:
    """See Target.fingerprint."""
    return {
        "weights": weights_digest(path),
        "config": sha256_json({k: v for k, v in config.to_dict().items() if not k.startswith("_")
                               and k not in ("transformers_version", "dtype", "name_or_path")}),
        "dtype": dtype,
        "tokenizer": sha256_json(tokenizer_state(tokenizer)),
        "template": sha256_json(tokenizer.chat_template or ""),
    }


def unloaded_fingerprint(section: TargetSection) -> dict[str, str]:
    """The fingerprint of a target without loading its weights. ConfigError as Target raises it."""
    path, options = resolve_model(section), {"trust_remote_code": section.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **options).get_text_config()
        return fingerprint_of(path, config, AutoTokenizer.from_pretrained(path, **options), section.dtype)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"target.model = {section.model}: cannot be read: {first}") from None


def weights_digest(path: str) -> str:
    """Digest of the safetensors files, in a local folder or in the Hub's cache; the same wherever they are loaded
    to."""
    folder, digest = Path(path), sha256_file
    if not folder.is_dir():
        folder, digest = Path(cached_file(path, "config.json", local_files_only=True)).parent, blob_sha256
    return sha256_json({f.name: digest(f) for f in sorted(folder.glob("*.safetensors"))})


def blob_sha256(path: Path) -> str:
    """SHA-256 of a large file of the Hub's cache, which is a link to a file of that name."""
    name = path.resolve().name
    return name if re.fullmatch("[0-9a-f]{64}", name) else sha256_file(path)


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> dict:
    """All that decides how text becomes ids: vocabulary, merges, normaliser, splitting, added tokens (case 30).
    A tokenizer without the fast library's description counts by its vocabulary and added tokens."""
    if not tokenizer.is_fast:
        return {"vocab": tokenizer.get_vocab(), "added": sorted(map(str, tokenizer.added_tokens_decoder.values()))}
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in state.items() if key not in ("version", "truncation", "padding")}


def require_chat_template(target: Target) -> None:
    """ConfigError where the tokenizer cannot render a chat."""
    if not target.tokenizer.chat_template:
        raise ConfigError(f"target.model = {target.section.model}: its tokenizer has no chat template")
