"""Where the accounts of eval/witnesses.py differ by more than their precision explains, stage by stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from data.codec import DTYPES, error_bound
from data.compare import NOISE
from eval.witnesses import Evidence

# Largest difference of a draft's probability by the coarsest precision at work.
DRAFT_NOISE = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.1, "int8": 0.1, "float8_e4m3": 0.2}
ORDER = tuple(DRAFT_NOISE)
EXACT = ("float64", "float32")
TOLERANCE = 0.02  # of an acceptance per position, as make serve-check


@dataclass
class Finding:
    """One comparison. `difference` and `allowed` are in the unit of the stage; text says where the largest one is."""

    stage: str
    between: str
    difference: float
    allowed: float
    text: str = ""

    @property
    def departs(self) -> bool:
        return not self.difference <= self.allowed


def compare_all(evidence: list[Evidence], tie_gap: float) -> list[Finding]:
    """Every stage between each neighbouring pair of witnesses that know it, in the order of the pipeline."""
    found: list[Finding] = []
    for stage, (field, compare) in STAGES.items():
        knowing = [one for one in evidence if known(one, field)]
        if field == "dtypes":
            found += compare(knowing)
            continue
        pairs = pairwise(knowing) if field not in ("ids", "teacher", "acceptance") else (
            (a, b) for i, a in enumerate(knowing) for b in knowing[i + 1 :]
            if getattr(a, field).keys() & getattr(b, field).keys())
        for a, b in pairs:
            for part in compare(getattr(a, field), getattr(b, field), a, b, tie_gap):
                found.append(Finding(stage + part.stage, f"{a.name} and {b.name}", part.difference, part.allowed,
                                     part.text))
    return found


def known(one: Evidence, field: str) -> bool:
    value = getattr(one, field)
    return bool(len(value)) if isinstance(value, list | dict | str | torch.Tensor) else value is not None


def alone(findings: list[Finding]) -> list[str]:
    """The stages that nothing was compared at: at most one witness knew them."""
    return [stage for stage in STAGES if not any(f.stage.startswith(stage) for f in findings)]


def coarsest(*dtypes: str) -> str:
    return max((dtype for dtype in dtypes if dtype), key=ORDER.index)


def precision(*witnesses: Evidence) -> str:
    """The coarsest precision that the drafts of these witnesses went through."""
    return coarsest(*(part for one in witnesses for part in (one.precision, one.stored, one.weights)))


def same_dtypes(knowing: list[Evidence]) -> Iterator[Finding]:
    """Traces and target in one precision (case 48); an export in a lower one is a choice, and said."""
    said = [(one.name, what, dtype) for one in knowing for what, dtype in one.dtypes.items()]
    for (a, what_a, x), (b, what_b, y) in pairwise(said):
        chosen = "export" in (what_a, what_b)
        yield Finding("dtype", f"{a} and {b}", float(x != y), float(chosen), f"{what_a}: {x}, {what_b}: {y}")


def same_checkpoint(a: str, b: str, *_) -> Iterator[Finding]:
    """The drafter that is looked at is the one that was exported (case 36)."""
    text = "" if a == b else f"weights {a[:12]} and {b[:12]}: run `make export` again"
    yield Finding("", "", float(a != b), 0.0, text)


def same_list(a: list, b: list, *_) -> Iterator[Finding]:
    places = [i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]]
    text = f"first at {places[0]}: {a[places[0] : places[0] + 1]} and {b[places[0] : places[0] + 1]}" if places else ""
    yield Finding("", "", float(len(places)), 0.0, text)


def close_frequencies(a: torch.Tensor, b: torch.Tensor, *_) -> Iterator[Finding]:
    """Rotary inverse frequencies, as a share (case 32)."""
    if a.shape != b.shape:
        yield Finding("", "", float("inf"), 1e-5, f"{len(a)} and {len(b)} rotated pairs")
        return
    yield Finding("", "", float(((a - b).abs() / a.abs().clamp_min(1e-12)).max()), 1e-5)


def same_rows(a: dict[str, list[int]], b: dict[str, list[int]], *_) -> Iterator[Finding]:
    """Token ids of the rows or prompts that both know (case 45)."""
    for name in (name for name in a if name in b):
        part = next(same_list(a[name], b[name]))
        if part.difference:
            yield Finding("", "", part.difference, 0.0, f"row {name}: {part.text}")
            return
    yield Finding("", "", 0.0, 0.0)


def close_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], first: Evidence, second: Evidence,
                 gap: float) -> Iterator[Finding]:
    """States entering the tapped layers, or the final one, each relative to its layer's largest number in the row
    (cases 01, 08). What storage costs is allowed to the witness that read stored states."""
    allowed = NOISE.get(getattr(torch, coarsest(first.precision, second.precision)), 1e-6)
    allowed += sum(float(error_bound(torch.ones(1, 1), 1, DTYPES[one.stored])) for one in (first, second) if one.stored)
    layers = first.layers or second.layers or ["final"]
    n = len(layers)
    worst, text = 0.0, ""
    for name in (name for name in a if name in b):
        if a[name].shape != b[name].shape:
            yield Finding("", "", float("inf"), allowed, f"row {name}: {[*a[name].shape]} and {[*b[name].shape]}")
            return
        ours, theirs = (x.unflatten(1, (n, -1)) for x in (a[name], b[name]))  # [T, n, H]
        share = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1).clamp_min(1e-12)  # [T, n]
        if not float(share.max()) <= worst:
            worst = float(share.max())
            token, tap = divmod(int(share.argmax()), n)
            text = f"row {name}, token {token}, tap {tap} (layer {layers[tap]})"
    yield Finding("", "", worst, allowed, text)


def same_teacher(a: dict[str, list[int]], b: dict[str, list[int]], first: Evidence, second: Evidence,
                 gap: float) -> Iterator[Finding]:
    """Greedy tokens; a first difference where the target's top two are closer than `gap` is a near-tie (case 59)."""
    for name in (name for name in a if name in b):
        at = next((i for i, pair in enumerate(zip(a[name], b[name])) if pair[0] != pair[1]), None)
        if at is None and len(a[name]) == len(b[name]):
            continue
        gaps = first.gaps.get(name) or second.gaps.get(name) or []
        if at is not None and at < len(gaps) and gaps[at] < gap:
            continue
        at = min(len(a[name]), len(b[name])) if at is None else at
        yield Finding("", "", 1.0, 0.0, f"row {name}, answer token {at}: {a[name][at : at + 1]} and "
                                        f"{b[name][at : at + 1]}")
        return
    yield Finding("", "", 0.0, 0.0)


def close_drafts(a: dict, b: dict, first: Evidence, second: Evidence, gap: float) -> Iterator[Finding]:
    """Probabilities of each step; a step is compared where all earlier ones drafted alike."""
    K = len(next(iter(a.values())))
    for k in range(K):
        worst, text = 0.0, ""
        for key in (key for key in a if key in b):
            one, two = a[key], b[key]
            if one.shape != two.shape:
                text = f"{one.shape[1]} and {two.shape[1]} draft ids"
                yield Finding(f" at step {k + 1}", "", float("inf"), 0.0, text)
                return
            if k and not torch.equal(one[:k].argmax(-1), two[:k].argmax(-1)):
                continue
            difference = float((one[k].exp() - two[k].exp()).abs().max())
            if not difference <= worst:
                worst, text = difference, f"row {key[0]}, position {key[1]}"
        yield Finding(f" at step {k + 1}", "", worst, DRAFT_NOISE[precision(first, second)], text)


def close_acceptance(a: dict, b: dict, first: Evidence, second: Evidence, gap: float) -> Iterator[Finding]:
    """Acceptance per position on the rows or prompts that both decoded (case 12). Where a precision rounds, one draft
    may go the other way; where answers differ, which only a near-tie may do, other drafts were counted."""
    for what in (what for what in a if what in b):
        names = first.counted.get(what, []) or second.counted.get(what, [])
        if any(first.teacher.get(name) != second.teacher.get(name) for name in names
               if name in first.teacher and name in second.teacher):
            yield Finding("", "", 0.0, TOLERANCE, f"on {what}: not compared, since answers part at a near-tie")
            continue
        one, two = a[what], b[what]
        text = f"on {what}: {[round(x, 3) for x in one.per_position]} and {[round(x, 3) for x in two.per_position]}"
        same_length = len(one.accepted) == len(two.accepted)
        worst = max((abs(x - y) for x, y in zip(one.per_position, two.per_position)), default=0.0)
        rounds = precision(first, second) not in EXACT
        allowed = TOLERANCE + rounds / max(1, min(one.drafts, two.drafts))
        yield Finding("", "", worst if same_length else float("inf"), allowed, text)


STAGES = {  # in the order in which numbers are made: stage -> field of an Evidence, its comparison
    "checkpoint": ("checkpoint", same_checkpoint), "dtype": ("dtypes", same_dtypes),
    "vocabulary": ("vocabulary", same_list), "layers": ("layers", same_list),
    "positions": ("frequencies", close_frequencies), "token ids": ("ids", same_rows),
    "layer states": ("states", close_states), "teacher": ("teacher", same_teacher),
    "drafter logits": ("drafts", close_drafts), "acceptance": ("acceptance", close_acceptance),
}
