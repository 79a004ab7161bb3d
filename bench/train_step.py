"""One optimizer step of training EAGLE-3: ours against the training cores of peers, each in a process of its own.

All read the same random data, have the same sizes and start from the same weights; before anything is timed their
losses are compared. `ratio` compares forward and backward, `ratio_step` the whole step with clipping and optimizer.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import PositiveFloat
from safetensors.torch import save_file

from bench.rows import Result, Row, bench_folder, ratio_rows
from bench.sides import OWN, Peers, Side, interpreters, opened, python_of
from bench.step_cases import (
    Tables,
    case,
    compared,
    dense,
    differing,
    drafter_of,
    entropies,
    half,
    shape_of,
    write_tables,
)
from bench.turns import in_turns
from drafters import eagle3
from drafters.target import use_threads
from recipes.errors import ConfigError
from recipes.schema import PositiveInt, Recipe, opt

LR = 1e-5  # what is timed does not depend on it; small, so that no side diverges
SHARE = 0.7
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # name: case, options of our side
    "half_r07": ("half", {"depth_share": SHARE}),
    "half": ("half", {"depth_share": 1.0}),
    "frozen_head": ("dense", {"depth_share": 1.0, "train_head": False}),
    "dense": ("dense", {"depth_share": 1.0, "train_head": True}),
}  # the smallest first: memory that a step took stays with a process
FREEZES_HEAD = "speculators"  # so `frozen_head` is the same work as this peer's dense step


@dataclass
class Options(Peers):
    compile: bool = opt(True, "specforge: let it compile what it marks for it; needs a C++ compiler")
    sequence: PositiveInt = opt(1024, "tokens of a step, one conversation")
    depth: PositiveInt = opt(7, "unrolled steps")
    hidden: PositiveInt = opt(576, "hidden size of target and drafter")
    heads: PositiveInt = opt(9, "query heads")
    kv_heads: PositiveInt = opt(3, "key/value heads")
    head_dim: PositiveInt = opt(64, "size of a head")
    intermediate: PositiveInt = opt(1536, "width of the MLP")
    vocabulary: PositiveInt = opt(49152, "the target's vocabulary")
    draft_vocabulary: PositiveInt = opt(8192, "the draft vocabulary")
    lengths: list[PositiveInt] = opt([512, 1024, 2048, 4096, 8192], "sequences of our cost a token; [] leaves it out")
    length_repeats: PositiveInt = opt(2, "steps of each of these lengths")
    tolerance: PositiveFloat = opt(1e-4, "largest relative difference of a step's loss from ours")
    seed: int = opt(0, "seed of data and first weights")


@dataclass(frozen=True)
class Peak:
    """Resident memory of a process at its peak, and what its modules take, in bytes; None: the system cannot tell."""

    whole: int | None
    imported: int | None

    @property
    def work(self) -> int | None:
        return None if self.whole is None or self.imported is None else self.whole - self.imported


def measure(recipe: Recipe, options: Options, repeats: int) -> Result:
    """Rows of `make bench ARGS="--only train_step"`.

    Raises ConfigError where no peer is given, RunError where one dies or answers nonsense.
    """
    found = interpreters("train_step", options.pythons)
    if options.sequence < 8 * (options.depth + 2):
        raise ConfigError(f"train_step.sequence = {options.sequence}: eight spans of it must be longer than "
                          f"train_step.depth = {options.depth} and two")
    use_threads(recipe.target.threads)
    with TemporaryDirectory(prefix=".train_step-", dir=bench_folder(recipe)) as name, ExitStack() as held:
        work = Work(Path(name), options, asdict(replace(recipe.train, optimizer="adamw")))
        sides = {side: held.enter_context(work.side(side, python_of(side, found))) for side in (*found, OWN)}
        losses, faults = work.same_losses(sides)
        memory = {pair: work.memory(sides[pair[0]], pair[1]) for pair in pairs(sides)}
        timed = in_turns({f"{side} {variant}": work.timed(sides[side], variant) for side, variant in pairs(sides)},
                         range(repeats))
        times = dict(zip(pairs(sides), timed.values()))
        rows = step_rows(sides, times, memory, options.sequence)
        held.close()  # the longest sequences need the memory
        rows += work.length_rows()
    trained = {name: side.trained for name, side in sides.items()}
    left_out = [name for name, python in options.pythons.items() if not python]
    return Result(rows, faults, {"losses": losses, "trained_parameters": trained, "left_out": left_out})


def pairs(sides: dict[str, Side]) -> list[tuple[str, str]]:
    """(side, variant) of every step that is timed; a peer knows no variants of the same case."""
    return [(side, variant) for variant in VARIANTS for side in sides if side == OWN or variant in ("half", "dense")]


class Work:
    """The files of one measurement and the processes that read them."""

    def __init__(self, folder: Path, options: Options, train: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.shape = shape_of(options)
        self.tables = Tables.random(self.shape, options.seed)
        own = eagle3.Options(draft_vocab_size=options.draft_vocabulary, depth=options.depth, deepen_at=0.0,
                             start="random")
        weights = drafter_of(own, self.shape, self.tables, options.seed).state_dict()
        write_tables(folder / "tables.safetensors", self.tables, weights)
        self.opening = {
            "tables": str(folder / "tables.safetensors"), "threads": torch.get_num_threads(), "seed": options.seed,
            "shape": asdict(self.shape), "depth": options.depth, "compile": options.compile, "style": "plain",
            "optimizer": "adamw", "options": asdict(own), "layers": [0, 1, 2], "train": train}
        dense_case = case(dense(options.sequence), self.shape, options.seed)
        self.cases = {"half": self.write("half", case(half(options.sequence), self.shape, options.seed)),
                      "dense": self.write("dense", dense_case)}
        self.write("compared", compared(dense_case))
        self.entropy = entropies(dense_case, self.tables, options.depth)

    def write(self, name: str, content: dict[str, torch.Tensor]) -> str:
        save_file(content, self.folder / f"{name}.safetensors")
        return str(self.folder / f"{name}.safetensors")

    def side(self, name: str, python: str) -> AbstractContextManager[Side]:
        return opened(name, python, self.opening)

    def same_losses(self, sides: dict[str, Side]) -> tuple[dict[str, list[float]], list[str]]:
        """The mean loss of every step from the same weights, and where a peer's differs from ours."""
        path = str(self.folder / "compared.safetensors")
        losses = {name: side.ask("losses", do="losses", case=path)[0] for name, side in sides.items()}
        faults = []
        for name in losses.keys() - {OWN}:
            wrong = differing(name, losses[name], losses[OWN], self.entropy, self.options.tolerance)
            if wrong:
                faults.append(f"{sides[name].reference}: another loss than ours from the same weights ({wrong[0]}); "
                              "speeds of different work say nothing")
        return losses, faults

    def message(self, variant: str) -> dict[str, Any]:
        name, own = VARIANTS[variant]
        return {"case": self.cases[name], "lr": LR, "options": own}

    def memory(self, side: Side, variant: str) -> Peak:
        """The peak of a step, behind one that warms up."""
        side.ask(do="step", **self.message(variant))
        peak, = side.ask("peak_bytes", do="memory", **self.message(variant))
        return Peak(peak, side.imported)

    def timed(self, side: Side, variant: str) -> Callable[[int], list[float]]:
        return lambda turn: side.ask("forward_backward", "optimizer", do="step", **self.message(variant))

    def length_rows(self) -> list[Row]:
        """What a token costs us in longer and longer sequences: one conversation, and conversations of the shortest
        length packed, which leave the attention term out."""
        if not self.options.lengths:
            return []
        shortest, rows = min(self.options.lengths), []
        with self.side(OWN, python_of(OWN, {})) as own:
            for length in sorted(self.options.lengths):
                kinds = {"length": None} | ({"packed": shortest} if length > shortest else {})
                for kind, conversation in kinds.items():
                    path = self.write("length", case(dense(length), self.shape, self.options.seed, conversation))
                    message = {"case": path, "lr": LR, "options": VARIANTS["dense"][1]}
                    own.ask(do="step", **message)
                    peak, = own.ask("peak_bytes", do="memory", **message)
                    seconds = [sum(own.ask("forward_backward", "optimizer", do="step", **message))
                               for _ in range(self.options.length_repeats)]
                    rows += cost_rows(f"{kind}_{length}", length, seconds, Peak(peak, own.imported))
        return rows


def cost_rows(variant: str, tokens: int, seconds: list[float], peak: Peak) -> list[Row]:
    return [Row(variant, "ms_per_token", statistics.median(seconds) / tokens * 1e3, "ms"),
            Row(variant, "peak_bytes", peak.whole, "bytes"), Row(variant, "work_bytes", peak.work, "bytes")]


Times = dict[tuple[str, str], list[list[float]]]  # (side, variant): (forward and backward, optimizer) of each turn
Memory = dict[tuple[str, str], Peak]


def step_rows(sides: dict[str, Side], times: Times, memory: Memory, tokens: int) -> list[Row]:
    """Rows of all variants."""
    rows = []
    for variant in ("dense", "half", "half_r07", "frozen_head"):
        peers = [name for name in sides if name != OWN and variant in ("dense", "half", "half_r07")]
        if variant == "frozen_head":
            peers = [name for name in sides if name == FREEZES_HEAD]
        if peers:
            rows += variant_rows(variant, {name: sides[name].reference for name in peers}, times, memory, tokens)
    return rows


def variant_rows(variant: str, peers: dict[str, str], times: Times, memory: Memory, tokens: int) -> list[Row]:
    """One variant against peers (name to reference); `ratio` is against the fastest, `ratio_NAME` against each.

    tokens_per_s and ratio count forward and backward, X_step the whole optimizer step; ratio_memory is the least
    memory that a peer works with over ours.
    """
    same = VARIANTS[variant][0]
    passes = {name: [turn[0] for turn in times[name, same]] for name in peers}
    wholes = {name: [sum(turn) for turn in times[name, same]] for name in peers}
    ours, whole = [turn[0] for turn in times[OWN, variant]], [sum(turn) for turn in times[OWN, variant]]
    fastest = min(peers, key=lambda name: statistics.median(passes[name]))
    quickest = min(peers, key=lambda name: statistics.median(wholes[name]))
    rows = ratio_rows(variant, rates(ours), rates(passes[fastest]), peers[fastest])
    rows += [Row(variant, "ratio_step", statistics.median(b / a for a, b in zip(whole, wholes[quickest])), "x",
                 peers[quickest])]
    rows += figures(variant, "", None, ours, whole, tokens)
    for name, reference in peers.items():
        ratio = statistics.median(b / a for a, b in zip(ours, passes[name]))
        rows += [Row(variant, f"ratio_{name}", ratio, "x", reference),
                 *figures(variant, "reference_", reference, passes[name], wholes[name], tokens)]
    return rows + memory_rows(variant, peers, memory)


def rates(seconds: list[float]) -> list[float]:
    return [1 / s for s in seconds]


def figures(variant: str, prefix: str, reference: str | None, passes: list[float], wholes: list[float], tokens: int,
            ) -> list[Row]:
    return [Row(variant, f"{prefix}tokens_per_s", tokens / statistics.median(passes), "tokens/s", reference),
            Row(variant, f"{prefix}step_tokens_per_s", tokens / statistics.median(wholes), "tokens/s", reference),
            Row(variant, f"{prefix}forward_backward_s", statistics.median(passes), "s", reference),
            Row(variant, f"{prefix}step_s", statistics.median(wholes), "s", reference)]


def memory_rows(variant: str, peers: dict[str, str], memory: Memory) -> list[Row]:
    """Peaks of the processes, and what of them is not their modules: tables, drafter, optimizer, the step's own."""
    same = VARIANTS[variant][0]
    peaks = {OWN: memory[OWN, variant], **{name: memory[name, same] for name in peers}}
    rows = []
    for name, peak in peaks.items():
        prefix, reference = ("", None) if name == OWN else ("reference_", peers[name])
        rows += [Row(variant, f"{prefix}peak_bytes", peak.whole, "bytes", reference),
                 Row(variant, f"{prefix}work_bytes", peak.work, "bytes", reference)]
    if None not in [peak.work for peak in peaks.values()]:
        least = min(peers, key=lambda name: peaks[name].work)
        rows.append(Row(variant, "ratio_memory", peaks[least].work / peaks[OWN].work, "x", peers[least]))
    return rows
