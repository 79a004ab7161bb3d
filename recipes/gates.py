"""The gate's file: bounds on numbers of a report, typed and strict like a recipe (docs/evaluation.md)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes.errors import ConfigError
from recipes.loader import parse_into, read_yaml
from recipes.schema import opt

ABSOLUTE = ("min", "max")
RELATIVE = ("max_drop", "max_rise", "max_drop_share", "max_rise_share")


@dataclass
class Bound:
    metric: str = opt("", "a number of report.json by its path, e.g. total.acceptance.mean_length")
    min: float | None = opt(None, "broken below this")
    max: float | None = opt(None, "broken above this")
    max_drop: float | None = opt(None, "broken if it lies further than this below the reference's, in its own unit")
    max_rise: float | None = opt(None, "broken if it lies further than this above the reference's")
    max_drop_share: float | None = opt(None, "the same as a share of the reference's value: 0.1 is 10 %")
    max_rise_share: float | None = opt(None, "the same as a share of the reference's value")
    missing: Literal["fail", "skip"] = opt("fail", "what to do where the report has null, e.g. a percentile of too few")

    def set_bounds(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]


@dataclass
class Gates:
    reference: str = opt("", "earlier report.json that relative bounds are measured against")
    require_reference: bool = opt(False, "no reference is an error instead of relative bounds that are not judged")
    across: bool = opt(False, "judge although target, stack, prompts or answer length of the reference differ")
    bounds: list[Bound] = field(default_factory=list, metadata={"help": "what has to hold"})


def read_gates(path: Path) -> Gates:
    """Raises ConfigError naming file, field and value for anything that is not exactly a gate file with bounds."""
    gates = parse_into(Gates, read_yaml(path, "gate file"), str(path))
    if not gates.bounds:
        raise ConfigError(f"{path}: bounds is empty: a gate without a bound would hold for any report")
    for number, bound in enumerate(gates.bounds):
        where = f"{path}: bounds[{number}]"
        if not bound.metric:
            raise ConfigError(f"{where}.metric = '': name a number of report.json")
        if not bound.set_bounds(ABSOLUTE + RELATIVE):
            raise ConfigError(f"{where}: {bound.metric} has no bound; set one of {', '.join(ABSOLUTE + RELATIVE)}")
        for name in bound.set_bounds(RELATIVE):
            if not getattr(bound, name) >= 0:
                raise ConfigError(f"{where}.{name} = {getattr(bound, name)}: must be 0 or more")
    return gates
