"""Accelerators and their datasheet figures (recipes/hardware.json), and those that a recipe adds in `plan.custom`.

FLOP/s are dense, links one way. A price is never in here: it is an input (roi.price_per_gpu_hour).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from recipes.errors import ConfigError
from recipes.loader import parse_into
from recipes.schema import opt

TABLE = Path(__file__).resolve().parent / "hardware.json"
THIS_MACHINE = "this-machine"
Peak = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass
class Hardware:
    """One accelerator. `measured`: the figures are reached, not peaks, and `layer_us` was measured with them."""

    memory_gb: PositiveFloat = opt(1.0, "memory of one GPU, GB of 1e9 bytes")
    bandwidth_tb_s: PositiveFloat = opt(1.0, "its memory's bandwidth")
    tflops: dict[str, Peak] = field(default_factory=dict)  # dense, by dtype: float32, bfloat16, float16, fp8
    link_gb_s: PositiveFloat = opt(32.0, "one way to another GPU of the machine")
    measured: bool = opt(False, "figures that were reached, not a datasheet's")
    cpu: bool = opt(False, "the memory is the machine's main one, where a process and packed weights count too")
    layer_us: float = opt(0.0, "measured microseconds that a layer of a pass costs beside its arithmetic")
    note: str = opt("", "what the figures are of")
    source: str = opt("", "where they are from")
    quoted_by: str = opt("", "where the source was read, if not there")
    date: str = opt("", "when")

    def flops(self, dtype: str) -> float:
        """FLOP/s of products in this dtype. ConfigError where the entry names none."""
        if dtype not in self.tflops:
            raise ConfigError(f"plan.hardware: no tflops for {dtype}; it has {', '.join(self.tflops) or 'none'}")
        return self.tflops[dtype] * 1e12


def known(custom: dict[str, Any]) -> dict[str, Hardware]:
    """Every accelerator by name; a recipe's own entry goes before one of the table. ConfigError for one that is no
    entry."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    found = {name: parse_into(Hardware, entry, TABLE.name) for name, entry in table.items()}
    for name, entry in custom.items():
        where = f"plan.custom.{name}"
        found[name] = parse_into(Hardware, entry, where)
        for needed in ("memory_gb", "bandwidth_tb_s", "tflops"):
            if needed not in entry:
                raise ConfigError(f"{where}: {needed} is missing")
    return found


def find(name: str, custom: dict[str, Any]) -> Hardware:
    """The accelerator of this name. ConfigError names the known ones."""
    table = known(custom)
    if name not in table:
        raise ConfigError(f"plan.hardware = {name}: unknown; known: {THIS_MACHINE}, {', '.join(table)}; or describe it "
                          "in plan.custom")
    return table[name]
