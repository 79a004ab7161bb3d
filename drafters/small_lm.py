"""A standalone small language model as a drafter, distilled on the target's own answers.

Zhou et al. 2023, "DistillSpec: Improving Speculative Decoding via Knowledge Distillation": the draft model learns the
target's distribution along the target's text, and with `on_policy` along its own. It begins as some of the target's
layers, or as a small model of the same tokenizer. It reads tokens alone: at position t+1 it has read x[t+1] and
predicts x[t+2], as depth 0 of the other drafters does, taught by the target's state at t+1.
Legend: B rows, S sequence, P loss positions of a row (padded), Ht hidden size of the target, H of the drafter,
V vocabulary, K draft length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from drafters.base import Batch, LossOutput, loss_mask, take
from drafters.cache import RowCache
from drafters.export.plain import facing
from drafters.fast_cpu import GROUPED
from drafters.head_loss import heads_loss
from drafters.layer_cut import StandaloneLM
from drafters.layers import check_sizes
from drafters.unrolled import Aim, Chains, gather, greedy_drafts, unrolled_loss
from drafters.visible import additive, windows_of
from recipes.errors import ConfigError
from recipes.schema import NonNegativeInt, PositiveInt, Share, opt


@dataclass
class Options:
    """`drafter.options` of a recipe with kind small_lm."""

    sibling: str = opt("", "begin as this small model of the target's tokenizer, a folder or a Hub id; empty: as some "
                           "of the target's layers")
    layers: NonNegativeInt = opt(0, "layers of the target that it begins as; 0 is a third of them")
    pick: Literal["spread", "first"] = opt("spread", "which these are: evenly spread, the first and the last among "
                                                     "them, or the first ones")
    keep: list[NonNegativeInt] = opt([], "these layers of the target, by number, rising; empty: as layers and pick say")
    train_vocabulary: bool = opt(False, "train the embedding and the head too")
    loss: Literal["kl", "reverse_kl", "tv", "lk"] = opt("kl", "divergence from the target, or its acceptance: tv, and "
                                                              "lk, which goes from kl to tv as acceptance grows")
    labels: Literal["distribution", "greedy", "token"] = opt(
        "distribution", "what teaches: the target's distribution, its first choice, or the token that the trace has")
    lk_eta: NonNegativeFloat = opt(3.0, "lk: the share of kl is exp(-lk_eta * acceptance)")
    on_policy: Share = opt(0.0, "share of the micro-batches that learn along the drafter's own text, which the target "
                                "then reads: it stays loaded")
    on_policy_tokens: PositiveInt = opt(32, "tokens that the drafter writes for that behind a place of each row")

    def __post_init__(self) -> None:
        if self.loss == "reverse_kl" and self.labels != "distribution":
            raise ValueError(f"reverse_kl is infinite by labels: {self.labels}; use labels: distribution, or loss: kl")
        if self.on_policy and self.labels == "token":
            raise ValueError("on_policy: its own tokens would teach it; use labels: distribution or greedy")
        if self.sibling and self.layers:
            raise ValueError(f"layers = {self.layers}: are those of the target; leave it 0 with a sibling")
        if self.keep and (self.sibling or self.layers):
            raise ValueError(f"keep = {self.keep}: names the layers itself; leave layers 0 and sibling empty with it")
        if self.keep != sorted(set(self.keep)):
            raise ValueError(f"keep = {self.keep}: must rise; name each layer once, from the first on")

    @property
    def borrows(self) -> bool:
        """Whether embedding and head are the target's own and stay so."""
        return not (self.sibling or self.train_vocabulary)

    @property
    def depth(self) -> int:
        """Steps that a position is taught: one, since a chain of more is the model read on."""
        return 1

    @property
    def stages(self) -> list[tuple[float, int]]:
        """From which share of the run on how many steps a position is taught."""
        return [(0.0, 1)]

    @property
    def depth_share(self) -> float:
        """Share of the positions that goes on from each step to the next."""
        return 1.0


@dataclass
class Sizes:
    """The whole numbers of Shape."""

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layers: int


@dataclass
class Shape(Sizes):
    """What drafter.json stores of a drafter: the sizes of its target, and its own config.json."""

    config: dict[str, Any]

    @classmethod
    def read(cls, values: Any) -> "Shape":
        """ConfigError naming the first field that is missing, unknown or not of its form."""
        config = values.get("config") if isinstance(values, dict) else None
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ConfigError(f"shape.config = {config!r:.80}: must be the config.json of a language model")
        sizes = {name: value for name, value in values.items() if name != "config"}
        check_sizes(Sizes, sizes)
        return cls(**sizes, config=config)

    @property
    def max_position_embeddings(self) -> int:
        return self.config["max_position_embeddings"]


class SmallLM(StandaloneLM):
    """The drafter. The target's head, which teaches, is frozen and never saved; neither is a vocabulary that is the
    target's own and stays so."""

    def __init__(self, options: Options, shape: Shape, model: nn.Module, target: Any) -> None:
        """model: a causal LM of transformers in float32, whose weights are this drafter's own."""
        grouped = target.grouped and model.config.num_attention_heads % model.config.num_key_value_heads == 0
        groups = model.config.num_attention_heads // model.config.num_key_value_heads if grouped else 1
        super().__init__("small_lm", options, model, groups, windows_of(model, model.config, "the drafter",
                                                                        torch.device("cpu")))
        if grouped:
            model.set_attn_implementation(GROUPED)
        self.shape = shape
        vocabulary = self.vocabulary()
        self.vocabulary_modules = tuple(sorted({name.rpartition(".")[0] for name in vocabulary}))
        model.requires_grad_(True)
        if not options.train_vocabulary:
            for name in vocabulary:
                self.get_parameter(name).requires_grad_(False)
        own = None if options.borrows else target.head_weight.detach().float().cpu().clone()
        self.register_buffer("target_head", own, persistent=False)
        self.register_buffer("d2t", torch.zeros_like(self.draft_ids), persistent=False)
        self.reader = [target] if options.on_policy else []  # in a list: its weights are none of this module's

    def vocabulary(self) -> list[str]:
        """Names of the parameters with a row for each token; a head tied to the embedding has none of its own."""
        return [f"model.{name}" for name in sorted(set(facing(self.model)))]

    @property
    def teacher_head(self) -> Tensor:
        """[V, Ht], frozen; the drafter's own head where that is the target's."""
        return self.model.get_output_embeddings().weight.detach() if self.options.borrows else self.target_head

    # --- training ---

    def count(self, batch: Batch) -> int:
        return int(loss_mask(batch.turns, 0).sum())

    def read(self, batch: Batch) -> Tensor:
        """Final states [B, S, H] at every position; no conversation sees another one that is packed beside it."""
        return self.model.get_decoder()(input_ids=batch.ids, attention_mask=self.packed(batch), use_cache=False,
                                        position_ids=batch.positions).last_hidden_state

    def packed(self, batch: Batch) -> Tensor | dict[str, Tensor] | None:
        """Masks [B, 1, S, S] of packed conversations, one for each kind of layer where there are two; None where each
        row is one conversation, which transformers masks itself."""
        if batch.starts is None or not bool(batch.starts.any()):
            return None
        columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        back = columns[:, None] - columns  # [S, S] how far behind a query a key lies
        visible = (back >= 0) & (batch.starts[:, :, None] == batch.starts[:, None])
        return additive({kind: visible & (back < window) if window else visible
                         for kind, window in self.windows.items()}, self.model.dtype, self.groups)

    def forward(self, batch: Batch, progress: float = 1.0, seed: int = 0) -> LossOutput:
        """Sum of the loss over the supervised positions; `on_policy` of the micro-batches have as many in weight, but
        along text of the drafter's own."""
        generator = torch.Generator().manual_seed(seed)
        if self.options.on_policy and float(torch.rand((), generator=generator)) < self.options.on_policy:
            written = self.own_text(batch, generator)
            if written is not None:
                out = self.loss(written)
                share = self.count(batch) / max(1, self.count(written))
                return LossOutput(out.loss_sum * share, out.depth_loss, out.depth_hits, out.depth_count)
        return self.loss(batch)

    def loss(self, batch: Batch) -> LossOutput:
        chains = Chains(batch, 1.0, 0)
        states = take(self.read(batch), self.last(chains))
        steps = gather([(chains, states)])
        head = partial(heads_loss, weights=[self.model.get_output_embeddings().weight])
        return unrolled_loss(steps, steps.outputs, head, self.aim(), batch.final)

    @staticmethod
    def last(chains: Chains) -> Tensor:
        """Place [B, P] of the last token that each chain has read."""
        return (chains.at + 1).clamp(max=chains.batch.ids.shape[1] - 1)

    def aim(self) -> Aim:
        """What the options say a position learns; there is no token outside of the draft vocabulary."""
        o, head = self.options, self.teacher_head
        everywhere = Aim.wants_all(o.loss, o.labels, False)
        return Aim(o.loss, o.labels, 1.0, False, o.lk_eta, False, self.draft_ids, self.t2d, head,
                   head if everywhere else None)

    @torch.no_grad()
    def own_text(self, batch: Batch, generator: torch.Generator) -> Batch | None:
        """A batch of the conversations, each up to a supervised place drawn at random, and what the drafter writes
        behind it at temperature 1, with the target's final states; None where none has such a place."""
        prefixes = self.prefixes(batch, generator)
        if not prefixes:
            return None
        N, places = self.options.on_policy_tokens, [len(ids) - 1 for ids in prefixes]
        ids = torch.zeros(len(prefixes), max(places) + 1 + N, dtype=torch.long, device=batch.ids.device)
        turns = torch.zeros_like(ids)
        for r, (prefix, place) in enumerate(zip(prefixes, places)):
            ids[r, : place + 1] = prefix
            turns[r, place : place + 1 + N] = 1
        self.write(ids, torch.tensor(places, device=ids.device), N, generator)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
        target, = self.reader
        with torch.autocast(target.device.type, enabled=False):  # in the precision that it is traced and served in
            final = target.forward(ids.to(target.device), positions.to(target.device), logits=False).final
        final = final.clone().to(batch.final.device, batch.final.dtype)
        return Batch(ids, turns, batch.taps[:1, :1].expand(*ids.shape, -1), final)

    def prefixes(self, batch: Batch, generator: torch.Generator) -> list[Tensor]:
        """Ids of each conversation of a batch up to one of the places from which it drafts."""
        chains, found = Chains(batch, 1.0, 0), []
        begins = torch.zeros_like(batch.ids) if batch.starts is None else batch.starts
        for ids, starts, last, valid in zip(batch.ids, begins, self.last(chains), chains.valid):
            places = last[valid]
            for start in starts[places].unique().tolist():
                own = places[starts[places] == start]
                place = int(own[int(torch.randint(len(own), (), generator=generator))])
                found.append(ids[start : place + 1])
        return found

    def write(self, ids: Tensor, places: Tensor, N: int, generator: torch.Generator) -> None:
        """Fills ids [R, W] with N tokens drawn behind places [R]."""
        cache = RowCache(self.model.config.num_hidden_layers, *ids.shape)
        positions = torch.arange(int(places.max()) + 1, device=ids.device).expand(len(ids), -1).contiguous()
        states = take(self.states(ids[:, : positions.shape[1]], positions, cache), places[:, None])
        for n in range(1, N + 1):
            chances = self.logits(states)[:, 0].float().softmax(-1).cpu()
            drawn = torch.multinomial(chances, 1, generator=generator).to(ids.device)  # [R, 1]
            ids.scatter_(1, (places + n)[:, None], drawn)
            if n < N:
                states = self.states(drawn, (places + n)[:, None], cache)

    def flops(self, tokens: float, worked: Sequence[float]) -> float:
        """Model FLOPs, forward and backward, of reading `tokens` with worked[0] positions of loss."""
        vocabulary = self.vocabulary()
        layers = sum(p.numel() for name, p in self.named_parameters() if p.dim() > 1 and name not in vocabulary)
        head = self.model.get_output_embeddings().weight.numel()
        teacher = 2 * self.teacher_head.numel() if self.options.labels != "token" else 0
        return 6 * layers * tokens + ((6 if self.options.train_vocabulary else 4) * head + teacher) * worked[0]

    @torch.no_grad()
    def chain_logits(self, batch: Batch, K: int) -> Iterator[Tensor]:
        """Logits [B, P, V] of each of K steps of the greedy drafts from every position that can start one (Chains):
        the drafts lie side by side behind the sequence, each sees the text up to its start and itself."""
        chains = Chains(batch, 1.0, 0)
        at, (B, S) = self.last(chains), batch.ids.shape
        P, columns = at.shape[1], torch.arange(S, device=at.device)
        cache = RowCache(self.model.config.num_hidden_layers, B, S + (K - 1) * P)
        states = take(self.states(batch.ids, columns.expand(B, S).contiguous(), cache), at)
        for k in range(K):
            logits = self.logits(states)
            yield logits
            if k + 1 == K:
                return
            tokens, position = logits.argmax(-1), at + k + 1
            block = torch.arange(S + k * P, S + (k + 1) * P, device=at.device).expand(B, P).contiguous()
            cache.aim(None, block)
            mask = additive({kind: self.beside(at, S, k + 1, window) for kind, window in self.windows.items()},
                            self.model.dtype, self.groups)
            states = self.model.get_decoder()(input_ids=tokens, attention_mask=mask, position_ids=position, cache=cache,
                                              use_cache=True).last_hidden_state

    @staticmethod
    def beside(at: Tensor, S: int, k: int, window: int) -> Tensor:
        """What the k-th token of each draft from at [B, P] sees: [B, P, S + k P]; window 0: all that is before it."""
        B, P = at.shape
        columns = torch.arange(S, device=at.device)
        back = (at + k)[..., None] - columns  # [B, P, S]
        text = columns <= at[..., None]
        own = torch.eye(P, dtype=torch.bool, device=at.device).repeat(1, k).expand(B, P, k * P)
        if window:
            text = text & (back < window)
            far = k - 1 - torch.arange(k, device=at.device).repeat_interleave(P)  # [k P] places back
            own = own & (far < window)
        return torch.cat([text, own], dim=-1)

    def chains(self, batch: Batch, K: int) -> tuple[Tensor, Tensor, Tensor]:
        """Greedy drafts from every position that can start one: tokens [B, P, K], at [B, P], valid [B, P]."""
        return greedy_drafts(batch, self.draft_ids, self.chain_logits(batch, K))

    # --- saving ---

    def meta(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": asdict(self.options), "shape": asdict(self.shape), "layers": []}

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds: all but what is the target's own, and the vocabulary maps."""
        borrowed = set(self.vocabulary()) if self.options.borrows else set()
        own = {name: p for name, p in self.named_parameters() if name not in borrowed}
        return own | {"d2t": self.d2t, "t2d": self.t2d}
