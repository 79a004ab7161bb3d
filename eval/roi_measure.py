"""`make roi ARGS=measure`: step times of this project's own loop on this machine, as steps.json.

A cycle is timed where it runs, in the decoding loop: from one set of kept tokens to the next, all rows alike so that
none ends early. Passes of the target and drafts are timed beside it. Every round meets all of them in turn, and the
median over the rounds counts.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from drafters import checkpoint, imported
from drafters.base import Drafter
from drafters.fast_cpu import use_skinny_linear
from drafters.placement import on_one_process
from drafters.registry import entry, options_of
from drafters.small_lm_build import kept_layers
from drafters.target import Target
from eval.decode import Decoder, Output, Rows
from eval.plan import draft_size, read_config
from eval.plan_machine import BITS
from eval.plans import check_longest
from eval.probe import measure as probe
from eval.roi_files import Steps, Timed
from recipes.errors import ConfigError
from recipes.model_shape import shape_of
from recipes.provenance import stamp
from recipes.schema import Recipe

UNSIZED = ("lookup", "layer_cut", "medusa", "small_lm")  # whose cost follows from the target and an option or two
CYCLES = 8  # of one run; the first, after the prompts, is not counted


class Short(Decoder):
    """The loop, ended after CYCLES steps whatever was accepted."""

    left = CYCLES + 2  # prefill and the loop behind it retire rows too

    def retire(self, rows: Rows, outputs: list[Output]) -> None:
        self.left -= 1
        if self.left:
            super().retire(rows, outputs)
        else:
            rows.index = []


@dataclass
class Loop:
    """What is measured: the target, a drafter, one row's context."""

    target: Target
    drafter: Drafter | None
    fresh: bool  # the drafter is untrained: it shows what drafting costs and nothing else

    def sync(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def cycles(self, prompt: list[int], rows: int, K: int) -> tuple[float, float]:
        """(median seconds of a cycle, or of a plain step where K is 0; tokens kept a row and cycle)."""
        decoder = Short(self.target, CYCLES * (K + 1) + 2, end_ids=[])
        out = (decoder.speculative([prompt] * rows, self.drafter, K) if K else decoder.plain([prompt] * rows))[0]
        gaps = [now - before for (before, _), (now, _) in zip(out.times, out.times[1:])]
        return statistics.median(gaps[1:]), (out.acceptance.mean_length if K else 1.0)

    def passes(self, context: int, rows: int, width: int) -> Callable[[], Any]:
        """A call that runs one pass of the target over `width` tokens a row."""
        device = self.target.device
        cache = self.target.new_cache(rows, context + width)
        ids = torch.ones(rows, context + width, dtype=torch.long, device=device)
        at = torch.arange(context + width, device=device).expand(rows, -1).contiguous()
        self.target.forward(ids[:, :context], at[:, :context], cache, logits=False)
        return lambda: self.target.forward(ids[:, context:], at[:, context:], cache)

    def drafts(self, context: int, rows: int, K: int) -> Callable[[], Any]:
        """A call that observes K+1 verified positions and drafts K tokens."""
        target = self.target
        cache = target.new_cache(rows, context + K + 1)
        ids = torch.ones(rows, context + K + 1, dtype=torch.long, device=target.device)
        at = torch.arange(context + K + 1, device=target.device).expand(rows, -1).contiguous()
        states = target.forward(ids[:, :context], at[:, :context], cache, logits=False)
        session = self.drafter.session(rows, context + 2 * K + 2)
        last = torch.full((rows,), context - 1, device=target.device)
        session.begin(ids[:, :context].tolist())
        session.observe(states.taps, ids[:, :context], at[:, :context], last)
        session.propose(K)
        taps = target.forward(ids[:, context:], at[:, context:], cache).taps

        def draft() -> None:
            session.observe(taps, ids[:, context:], at[:, context:], torch.full((rows,), 1, device=target.device))
            session.propose(K)

        return draft


def open_loop(recipe: Recipe) -> Loop:
    """The target and the drafter of drafter.path or of the run; a fresh one where nothing is trained yet."""
    target = Target(on_one_process(recipe.target), entry(recipe.drafter.kind).shown(recipe.trace.layers))
    folder = Path(recipe.runs_dir) / recipe.name / "checkpoints"
    section = recipe.drafter
    fresh = entry(section.kind).trained and not section.path and not (folder / checkpoint.BEST).exists()
    drafter = (imported.fresh(section, target, recipe.train.seed) if fresh
               else imported.open_drafter(section, target, folder.parent).drafter)
    if target.grouped:
        use_skinny_linear(drafter)
    return Loop(target, drafter, fresh)


def prompt_of(recipe: Recipe, target: Target, context: int) -> list[int]:
    """A rendered evaluation prompt of exactly `context` tokens: several of them one after the other, cut."""
    prompts, _ = evaluation_prompts(recipe.eval.prompts, recipe.eval.limit)
    ids: list[int] = []
    for prompt in prompts * (1 + context // 8):
        ids += prompt_ids(target.tokenizer, prompt.messages, prompt.tools)
        if len(ids) >= context:
            return ids[-context:]
    raise ConfigError(f"roi.contexts: {context} tokens cannot be made of the evaluation prompts")


def grid(recipe: Recipe) -> list[tuple[int, int, int, bool]]:
    """(context, rows, K, held out) of every step."""
    s = recipe.roi
    lengths = [(0, False), *((K, False) for K in s.draft_lengths), *((K, True) for K in s.held_out)]
    return [(context, rows, K, out) for context in s.contexts for rows in s.batches for K, out in lengths]


@torch.inference_mode()
def measure(recipe: Recipe, progress: Callable[[str], None], parts: bool = True) -> Steps:
    """Times everything in turns; without `parts` plain steps and cycles only. Raises ConfigError where the target's
    context is too short."""
    drafter_of(recipe)  # a kind whose cost is not known is told before anything is timed
    loop, section = open_loop(recipe), recipe.roi
    drafter = drafter_of(recipe, loop.drafter)
    for name in ("draft_lengths", "held_out"):
        check_longest(max(getattr(section, name), default=0), loop.drafter, f"roi.{name}")
    room = loop.target.max_length - CYCLES * (max([*section.draft_lengths, *section.held_out]) + 1) - 2
    if max(section.contexts) > room:
        raise ConfigError(f"roi.contexts = {section.contexts}: the target's context leaves {room}")
    machine = probe(loop.target.device, [recipe.target.dtype])
    prompts = {context: prompt_of(recipe, loop.target, context) for context in section.contexts}
    works: dict[tuple, Callable[[], tuple[float, float]]] = {}
    for context, rows, K, held_out in grid(recipe):
        works["step", context, rows, K, held_out] = lambda c=context, b=rows, k=K: loop.cycles(prompts[c], b, k)
    for context in section.contexts if parts else []:
        for rows in (section.batches[0], section.batches[-1]):
            for K in section.draft_lengths:
                works["target", context, rows, K + 1, False] = timed(loop, loop.passes(context, rows, K + 1))
                works["draft", context, rows, K, False] = timed(loop, loop.drafts(context, rows, K))
    found: dict[tuple, list[tuple[float, float]]] = {key: [] for key in works}
    for turn in range(section.rounds + 1):
        for key, work in works.items():
            result = work()
            if turn:
                found[key].append(result)
        progress(f"round {turn} of {section.rounds}")
    return Steps(profile="loop", engine={"name": "drafthouse loop", "device": str(loop.target.device)},
                 hardware={"name": "this-machine", **asdict(machine)}, target=target_of(recipe, loop.target),
                 drafter=drafter, acceptance="synthetic" if loop.fresh else "measured",
                 points=[point(key, values) for key, values in found.items()], machine=stamp(asdict(recipe)))


def timed(loop: Loop, work: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
    """The call as (seconds, 1)."""
    def once() -> tuple[float, float]:
        loop.sync()
        began = time.perf_counter()
        work()
        loop.sync()
        return time.perf_counter() - began, 1.0

    return once


def point(key: tuple, values: list[tuple[float, float]]) -> Timed:
    what, context, rows, number, held_out = key
    ms = 1e3 * statistics.median(v[0] for v in values)
    return Timed(what, rows, 0 if what == "target" else number, number if what == "target" else 0, context, ms,
                 max(1.0, statistics.mean(v[1] for v in values)), held_out=held_out)


def target_of(recipe: Recipe, target: Target) -> dict[str, Any]:
    bits = BITS[recipe.target.dtype]
    return {"model": recipe.target.model, "config": read_config(recipe), "weight_bits": bits, "other_bits": bits,
            "cache_bits": bits, "dtype": recipe.target.dtype, "expanded": True, "fingerprint": target.fingerprint()}


def drafter_of(recipe: Recipe, opened: Drafter | None = None) -> dict[str, Any]:
    """The drafter as steps.json names it; `opened`: itself, which may be another's (drafter.path) and knows its draft
    vocabulary. ConfigError for a kind whose cost is not known."""
    kind, bits = recipe.drafter.kind, BITS[recipe.target.dtype]
    if kind in UNSIZED:
        options = options_of(kind, recipe.drafter.options)
        found = {"kind": kind, "bits": bits}
        if kind == "medusa":
            vocab = opened.shape.draft_vocab_size if opened else options.draft_vocab_size
            return found | {"vocab": vocab, "blocks": (opened.options if opened else options).num_layers}
        if kind == "small_lm":
            own = opened.options if opened else options
            if own.sibling:
                raise ConfigError(f"drafter.options.sibling = {own.sibling}: the planner knows the cost of a drafter "
                                  "that began as layers of its target; fill in steps.json by hand, with a named shape "
                                  "as drafter.kind (docs/roi.md)")
            shape = shape_of(read_config(recipe), f"target.model = {recipe.target.model}")
            return found | {"layers": len(kept_layers(own, shape.layers))}
        layers = getattr(options, "layers", 0)
        return found | ({"layers": layers} if layers else {})
    config = read_config(recipe)
    size = draft_size(recipe, shape_of(config, f"target.model = {recipe.target.model}"), config)
    return {"kind": kind, "size": asdict(size), "bits": bits}
