"""What each stage of a recipe takes on given hardware: memory per GPU, disk and seconds. Arithmetic only.

Every function computes one case; a plan computes two, the best and the worst of its assumptions (eval/plan.py).
"""

from dataclasses import dataclass, field
from math import ceil, lcm

from recipes import draft_cost as draft
from recipes.cost import Format, Pass, Speed, cache_per_gpu, pass_seconds, weights_per_gpu
from recipes.draft_cost import DraftSize
from recipes.model_shape import ModelShape
from recipes.storage import STORED, checkpoint_bytes, export_bytes, row_bytes


@dataclass(frozen=True)
class Machine:
    """The rented GPUs in one case: `eager` is the speed of this project's loops, `engine` a serving engine's,
    `training` that of training products."""

    gpus: int
    eager: Speed
    engine: Speed
    training: Speed
    disk: float  # B/s
    start_s: float  # of a process: imports and loading code
    base: float  # bytes that a process takes before anything is loaded


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much there is to do. Lengths are means in tokens; `longest` is of one row, prompt and answer."""

    written: float = 0.0  # prompts that the target writes itself, tries included
    written_tokens: float = 0.0
    opening: float = 0.0  # tokens before such a prompt
    answers: float = 0.0  # answers that the target gives
    rows: float = 0.0
    validation: float = 0.0
    prompt: float = 0.0
    answer: float = 0.0
    user: float = 0.0  # tokens of the user turn that is learnt from, 0: none
    longest: float = 0.0
    accepted: float = 1.0  # mean acceptance length that evaluation meets
    judged: float = 0.0  # evaluation prompts
    judged_prompt: float = 0.0

    @property
    def tokens(self) -> float:
        """Of all stored rows."""
        return self.rows * (self.prompt + self.answer)

    @property
    def finals(self) -> float:
        """Positions with a stored final state."""
        return self.rows * (self.answer + self.user)


@dataclass(frozen=True)
class Stage:
    """One stage in one case. disk: bytes that stay; peak: bytes on disk at most while it runs, earlier ones aside."""

    seconds: float
    memory: float = 0.0
    disk: float = 0.0
    peak: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # seconds


def stage(parts: dict[str, float], memory: float = 0.0, disk: float = 0.0, peak: float = 0.0) -> Stage:
    return Stage(sum(parts.values()), memory, disk, max(disk, peak), parts)


def decode_seconds(shape: ModelShape, keep: Format, speed: Speed, rows: float, prompt: float, new: float,
                   batch: float) -> float:
    """Seconds to answer so many prompts, `batch` at a time: prompts run an eighth of the batch together, then one
    token a pass, in as many waves as it takes."""
    if rows <= 0 or new <= 0:
        return 0.0
    together = min(rows, max(8, batch // 8))
    filling = ceil(rows / together) * pass_seconds(shape, Pass(together, prompt), keep, speed)
    waves = ceil(rows / batch)
    return filling + waves * new * pass_seconds(shape, Pass(rows / waves, 1, prompt + new / 2), keep, speed)


def states_seconds(shape: ModelShape, keep: Format, speed: Speed, rows: float, tokens: float, limit: float) -> float:
    """Seconds to run rows of so many tokens once, at most `limit` tokens a pass, without logits."""
    if rows <= 0 or tokens <= 0:
        return 0.0
    together = max(1.0, limit // tokens)
    return rows / together * pass_seconds(shape, Pass(together, tokens, heads=0), keep, speed)


def activations(shape: ModelShape, tokens: float, keep: Format) -> float:
    """Bytes of one pass's intermediate states beside cache and weights: a few widths of one layer."""
    width = max(m.out * (m.chosen or 1) for m in shape.matrices)
    return tokens * (6 * shape.hidden + 3 * width) * keep.other_bits / 8


@dataclass(frozen=True)
class Tracing:
    """What the recipe says of tracing."""

    batch: int
    states: str  # with: they come with the answers; apart: a pass of their own; none: not stored
    stored: str  # a key of recipes.storage.STORED
    taps: int
    batch_tokens: int
    staged: bool  # states wait on this disk until the last answer, in parts that go as their shards come
    shard: float
    unit_rows: int  # rows whose parts go together
    answering: str = "eager"  # eager, engine, or none where answers are given
    capturing: str = "eager"  # eager or engine


def trace(shape: ModelShape, keep: Format, capture: Format, machine: Machine, load: Load, section: Tracing) -> Stage:
    """Prompts that the target writes, answers, states. `keep` and `capture`: how the target is kept for answers and for
    states; each group of GPUs that shares one takes its part of the rows."""
    speed = machine.engine if section.answering == "engine" else machine.eager
    parts = {"start and loading": machine.start_s + weights_per_gpu(shape, keep) * keep.gpus / machine.disk}
    share, answered = max(1, machine.gpus // keep.gpus), section.answering != "none"
    parts["prompts"] = decode_seconds(shape, keep, speed, ceil(load.written / share), load.opening,
                                      load.written_tokens, section.batch)
    parts["answers"] = decode_seconds(shape, keep, speed, ceil(load.answers / share), load.prompt, load.answer,
                                      section.batch) if answered else 0.0
    itemsize, scaled = STORED[section.stored]
    taps = section.taps if section.states != "none" else 0
    disk = row_bytes(load.tokens, load.finals, taps, shape.hidden, itemsize, scaled)
    waiting = row_bytes(load.tokens, load.finals, taps, shape.hidden, 4 if scaled else itemsize, False)
    memory = answering_memory(shape, keep, load, section) if answered or load.written else 0.0
    parts["states and storing"] = (disk + waiting * section.staged) / machine.disk
    if section.states == "apart":
        rows = load.rows / max(1, machine.gpus // capture.gpus)
        parts["states and storing"] += states_seconds(
            shape, capture, machine.engine if section.capturing == "engine" else machine.eager, rows,
            load.prompt + load.answer, section.batch_tokens)
        memory = max(memory, weights_per_gpu(shape, capture) + activations(shape, section.batch_tokens, capture))
    together = min(1.0, (2 * share - 1) * section.unit_rows / max(1.0, load.rows))  # data.staging.Staging.returns
    peak = max(waiting, disk + together * waiting) if section.staged else disk
    return stage(parts, machine.base + memory, disk, peak + 2 * share * section.shard)


def answering_memory(shape: ModelShape, keep: Format, load: Load, section: Tracing) -> float:
    """Bytes a GPU of weights, cache, recorded states, logits and a pass over new prompts."""
    rows = min(section.batch, max(1.0, load.answers))
    recorded = load.longest * (section.taps + 1) * shape.hidden * keep.other_bits / 8 * (section.states == "with")
    return (weights_per_gpu(shape, keep) + cache_per_gpu(shape, rows, load.longest, keep)
            + rows * (recorded + 2 * 4 * shape.vocab)
            + activations(shape, load.prompt * max(8, section.batch // 8), keep))


@dataclass(frozen=True)
class Training:
    """What the recipe says of training."""

    size: DraftSize
    unroll: tuple[tuple[float, int], ...]  # from which share of the run on how many steps
    share: float
    epochs: float
    batch_rows: int
    accumulation: int
    validate_every: int
    save_every: int
    validation_length: int
    keep: int
    zero_stage: int
    half: bool  # bfloat16 autocast
    states: str = "stored"  # computed: by the target in every epoch
    cached: float = 0.0  # share of the rows that a cache keeps after the first epoch
    stored: str = "float32"  # how their states are stored, a key of recipes.storage.STORED
    floor: float = 0.0  # share of the chains that every step has at least


def saves(steps: int, validate_every: int, save_every: int) -> int:
    """Checkpoints that a run writes: at each validation, at each multiple of save_every, and at the end."""
    at = (steps // n for n in (validate_every, save_every))
    return sum(at) - steps // lcm(validate_every, save_every) + bool(steps % validate_every and steps % save_every)


def train(shape: ModelShape, keep: Format, machine: Machine, load: Load, section: Training) -> Stage:
    """All epochs with validation and checkpoints."""
    size, speed, ranks = section.size, machine.training, machine.gpus
    learnt, length = max(1.0, load.rows - load.validation), load.prompt + load.answer
    steps = draft.optimizer_steps(learnt, section.epochs, section.batch_rows, ranks, section.accumulation)
    spans = [load.answer, load.user] if load.user else [load.answer]
    a_row = draft.mean_train_flops(size, length, spans, section.unroll, section.share, section.floor)
    depth = max(steps for _, steps in section.unroll)
    passes = 1 if size.parallel else depth
    micro = ceil(section.epochs * learnt / ranks / section.batch_rows)
    moved = 3 * 4 * size.moved(passes)  # weights and their gradients pass the memory in each step
    busy = micro * (section.batch_rows * a_row / speed.flops + moved / speed.bandwidth
                    + 3 * (passes + 1) * speed.layer_s)
    forward = draft.forward_flops(size, length, draft.worked([load.answer], section.validation_length))
    each = forward / speed.flops + (1 if size.parallel else section.validation_length) * speed.layer_s
    checks = ceil(steps / section.validate_every)
    parts = {"start and loading": machine.start_s + weights_per_gpu(shape, keep) * keep.gpus / machine.disk,
             "passes": busy, "updates": steps * draft.update_seconds(size, ranks, section.zero_stage, speed),
             "validation": checks * ceil(load.validation / ranks) * each}
    one = checkpoint_bytes(size.trained, size.parameters - size.trained, size.draft_vocab, size.vocab)
    parts["checkpoints"] = saves(steps, section.validate_every, section.save_every) * one / machine.disk
    held = row_bytes(load.tokens, load.finals, size.taps, size.target_hidden, *STORED[section.stored])
    again = max(0.0, section.epochs - 1)
    read = section.epochs if section.states == "stored" else again * section.cached
    parts["reading states"] = read * held / machine.disk
    wanted = weights_per_gpu(shape, keep)
    itemsize = 2 if section.half else 4
    positions = draft.worked([load.longest, 0.0], depth, section.share, section.floor)
    working = (draft.optimizer_bytes(size, ranks, section.zero_stage) + size.borrowed * keep.other_bits / 8
               + (2 * size.parameters if section.half else 0)
               + draft.activation_bytes(size, section.batch_rows, load.longest, positions, itemsize, section.share))
    if section.states == "computed":
        epochs = min(1.0, section.epochs) + again * (1 - section.cached)
        rows = load.rows / max(1, machine.gpus // keep.gpus) * epochs
        parts["computing states"] = states_seconds(shape, keep, machine.eager, rows, length, length)
        memory = machine.base + working + wanted + activations(shape, load.longest, keep)
    else:
        memory = machine.base + max(working, wanted + size.borrowed * keep.other_bits / 8)
    disk = (section.keep + 1) * one + held * section.cached
    return stage(parts, memory, disk, disk + one)


@dataclass(frozen=True)
class Judging:
    """What the recipe says of export and evaluation."""

    size: DraftSize
    K: int
    max_tokens: int
    batch: int
    lossless: int
    timed: int
    timed_tokens: int
    batch_sizes: tuple[int, ...]
    contexts: int
    draws: int
    formats: tuple[str, ...]  # layouts
    itemsize: int
    check: bool
    check_prompts: int
    check_tokens: int
    apart: bool = False  # greedy text is decoded for the lossless proof alone


def export(shape: ModelShape, keep: Format, machine: Machine, load: Load, section: Judging) -> Stage:
    """Files, and the check: our loop on a few prompts, and an independent reader on these and on as many validation
    rows. It decodes plainly, reads the whole text once, and drafts without a cache, over the whole text where the
    drafter attends."""
    weights, size, speed = weights_per_gpu(shape, keep), section.size, machine.eager
    written = sum(export_bytes(size.exported(layout), section.itemsize, size.draft_vocab, size.vocab)
                  for layout in section.formats)
    parts = {"start and loading": machine.start_s + weights * keep.gpus / machine.disk, "files": written / machine.disk}
    length = load.judged_prompt + section.check_tokens + section.K
    if section.check:
        passes = section.check_tokens / load.accepted
        read = length if size.every else 1
        whole = draft.draft_seconds(size, read, 1, 1, keep.other_bits / 8, speed) * (1 if size.parallel else section.K)
        reading = (decode_seconds(shape, keep, speed, 1, load.judged_prompt, section.check_tokens + section.K, 1)
                   + pass_seconds(shape, Pass(1, length, heads=length), keep, speed) + passes * whole)
        ours = passes * cycle_seconds(shape, keep, machine, section.check_prompts, length, section)
        parts["check"] = len(section.formats) * (2 * section.check_prompts * reading + ours)
    memory = machine.base + weights + 4 * size.parameters + 4 * length * shape.vocab + activations(shape, length, keep)
    return stage(parts, memory, written)


def cycle_seconds(shape: ModelShape, keep: Format, machine: Machine, rows: float, context: float,
                  section: Judging) -> float:
    """One speculative step: a draft of K tokens and the pass that verifies it."""
    verify = Pass(rows, section.K + 1, context, heads=section.K + 1)
    return (draft.draft_seconds(section.size, rows, section.K, context, keep.other_bits / 8, machine.eager)
            + pass_seconds(shape, verify, keep, machine.eager))


def evaluate(shape: ModelShape, keep: Format, machine: Machine, load: Load, section: Judging) -> Stage:
    """Acceptance in batches, the lossless proof, timed prompts at batch 1 with three engines and once more for the
    parts of a cycle, sampling."""
    weights, size, speed = weights_per_gpu(shape, keep), section.size, machine.eager
    prompt, context = load.judged_prompt, load.judged_prompt + section.max_tokens / 2

    def plain(rows: float, new: float, batch: float) -> float:
        return decode_seconds(shape, keep, speed, rows, prompt, new, batch)

    def speculative(rows: float, new: float, batch: float) -> float:
        if not rows:
            return 0.0
        waves = ceil(rows / batch)
        at_once = rows / waves
        filling = waves * pass_seconds(shape, Pass(at_once, prompt), keep, speed)
        return filling + waves * new / load.accepted * cycle_seconds(shape, keep, machine, at_once, context, section)

    timed, proven = section.timed + 1, min(section.lossless, load.judged)  # one more warms up
    # Of each batch size all timed prompts; twice where they are fewer than two batches, repeated where fewer than one.
    batches = [(b, section.timed if section.timed >= 2 * b else 2 * max(section.timed, b)) for b in section.batch_sizes]
    parts = {
        "start and loading": machine.start_s + weights * keep.gpus / machine.disk,
        "acceptance": speculative(load.judged, section.max_tokens, section.batch),
        "lossless": plain(proven, section.max_tokens, section.batch)
        + (speculative(proven, section.max_tokens, section.batch) if section.apart else 0.0),
        "speed": 2 * plain(timed, section.timed_tokens, 1) + 2 * speculative(timed, section.timed_tokens, 1)
        + sum(plain(rows, section.timed_tokens, b) + speculative(rows, section.timed_tokens, b) for b, rows in batches),
        "sampling": section.contexts * (pass_seconds(shape, Pass(1, prompt), keep, speed)
                                        + pass_seconds(shape, Pass(1, 1, prompt), keep, speed)
                                        + 40 * section.draws * shape.vocab / 8 / speed.bandwidth)}
    rows = min(section.batch, max(1.0, load.judged))
    memory = (machine.base + weights + 4 * size.parameters + cache_per_gpu(shape, rows, load.longest, keep)
              + 2 * 4 * rows * (section.K + 1) * shape.vocab
              + activations(shape, max(rows * (section.K + 1), prompt * rows), keep))
    return stage(parts, memory)
