"""`make eval ARGS="--gate FILE"`: do the numbers of a report stay within the bounds of a gate file?"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.earlier import check_origins, read_report
from eval.settings import AT
from recipes.errors import ConfigError
from recipes.gates import ABSOLUTE, RELATIVE, Bound, Gates, read_gates
from recipes.provenance import differences
from recipes.schema import opt

# Settings that must agree with the reference's, and what a report that does not state one was made with.
SAME_SETTINGS = {"max_tokens": None, "acceptance": "exact", "typical": None, **AT}
HELD, BROKEN, SKIPPED = "held", "broken", "not judged"
LOSSY = "max 0: typical acceptance, not the target's own answers"


@dataclass
class Options:
    gate: str = opt("", "gate file, e.g. recipes/gates.yaml: exit code 1 where a bound is broken (docs/evaluation.md)")
    reference: str = opt("", "with --gate: the earlier report.json, in place of the one that the file names")
    report: str = opt("", "with --gate: judge this report.json instead of evaluating")


@dataclass
class Judged:
    """One bound of one metric: what it says, and whether it held."""

    metric: str
    value: float | None
    bound: str
    state: str


@dataclass
class Gate:
    """A gate file ready to judge, its reference read."""

    path: Path
    gates: Gates
    reference_path: str
    reference: dict[str, Any] | None

    @classmethod
    def read(cls, options: Options) -> "Gate | None":
        """None where no gate is asked for. Raises ConfigError for a wrong file or combination of options."""
        if not options.gate:
            for name in ("reference", "report"):
                if getattr(options, name):
                    raise ConfigError(f"--{name} = {getattr(options, name)}: needs --gate FILE")
            return None
        path = Path(options.gate)
        gates = read_gates(path)
        named = options.reference or gates.reference
        if not named and gates.require_reference:
            raise ConfigError(f"{path}: require_reference is set and no report is named: set `reference` or give "
                              "--reference")
        return cls(path, gates, named, read_report(Path(named)) if named else None)

    def judge(self, report: dict[str, Any]) -> list[Judged]:
        """Every bound; a lossy report breaks one that no file has to set. Raises ConfigError for a metric that the
        report does not have, and for a reference of another target, stack, prompts, answer length, sampling, stop
        strings or rule of acceptance unless `across` allows it (case 50)."""
        if self.reference is not None:
            check_origins(self.reference, report, (self.reference_path, "this report"),
                          f"set across: true in {self.path}", self.gates.across)
            other = differences(*({key: r["settings"].get(key, default) for key, default in SAME_SETTINGS.items()}
                                  for r in (self.reference, report)))
            other += asked_otherwise(self.reference, report)
            if other and not self.gates.across:
                raise ConfigError(f"{self.reference_path}: answers to other prompts, of another length, at other "
                                  f"settings or by another rule than this report: {'; '.join(other)}; set across: "
                                  f"true in {self.path} to judge all the same")
        judged = [Judged("settings.lossy", 1.0, LOSSY, BROKEN)] if report["settings"].get("lossy") else []
        return judged + [one for number, bound in enumerate(self.gates.bounds)
                         for one in self.one(number, bound, report)]

    def one(self, number: int, bound: Bound, report: dict[str, Any]) -> Iterator[Judged]:
        where = f"{self.path}: bounds[{number}].metric"
        value = number_at(report, bound.metric, f"{where} = {bound.metric!r}: the report")
        empty = SKIPPED if bound.missing == "skip" else BROKEN
        for name in bound.set_bounds(ABSOLUTE):
            limit = getattr(bound, name)
            state = empty if value is None else HELD if within(name, value, limit) else BROKEN
            yield Judged(bound.metric, value, f"{name} {limit:g}", state)
        relative = bound.set_bounds(RELATIVE)
        if relative and self.reference is None:
            yield Judged(bound.metric, value, f"{relative[0]}, no reference named", SKIPPED)
            return
        for name in relative:
            before = number_at(self.reference, bound.metric, f"{where} = {bound.metric!r}: {self.reference_path}")
            label = f"{name} {getattr(bound, name):g} of {'null' if before is None else f'{before:.4g}'}"
            if value is None or before is None:
                yield Judged(bound.metric, value, label, empty)
                continue
            change = getattr(bound, name) * (abs(before) if name.endswith("_share") else 1.0)
            limit = before - change if "drop" in name else before + change
            state = HELD if within("min" if "drop" in name else "max", value, limit) else BROKEN
            yield Judged(bound.metric, value, label, state)


def asked_otherwise(reference: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """How the questions of two reports differ, by the ids sent: one file of prompts gives several sets of questions,
    by eval.limit and by what fits the context. Later turns follow the answers, which may differ."""
    before, after = ({(p["set"], p["id"], p["ids_sha256"]) for p in one["prompts"] if not p["round"]}
                     for one in (reference, report))
    if before == after:
        return []
    name, number, _ = min(before ^ after)
    return [f"{len(before)} questions were asked, now {len(after)}, {len(before & after)} of them the same (not {name} "
            f"{number})"]


def within(name: str, value: float, limit: float) -> bool:
    """A bound itself is held; so is what differs from it by rounding alone."""
    return (value >= limit if name == "min" else value <= limit) or math.isclose(value, limit, rel_tol=1e-12)


def number_at(report: dict[str, Any], path: str, where: str) -> float | None:
    """The number at a dotted path; names of sets may hold dots. None for null. Raises ConfigError where the path leads
    to no number, naming the nearest one that does."""
    known = dict(numbers(report))
    if path not in known:
        close = difflib.get_close_matches(path, known, n=1)
        raise ConfigError(f"{where} has no such number{f'; did you mean {close[0]}?' if close else ''}")
    return known[path]


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number or null below `value` with its path, items of lists by their index; counts by prompt left out."""
    if value is None or isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if path or key != "prompts":
                yield from numbers(item, f"{path}.{key}" if path else str(key))


def lines(judged: list[Judged]) -> list[str]:
    """One line a bound, for the terminal."""
    width = max(len(one.metric) for one in judged)
    return [f"{one.state:10}  {one.metric:{width}}  {shown(one.value):>9}  {one.bound}" for one in judged]


def broken(judged: list[Judged]) -> list[str]:
    """What is broken, in words."""
    return [f"{one.metric} = {shown(one.value)} ({one.bound})" for one in judged if one.state == BROKEN]


def shown(value: float | None) -> str:
    return "null" if value is None else f"{value:.4g}"
