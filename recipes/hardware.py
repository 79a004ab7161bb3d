"""Accelerators and their datasheet figures (recipes/hardware.json), and those that a recipe adds in `plan.custom`.

FLOP/s are dense, links one way. A price is never in here: it is an input (roi.price_per_gpu_hour).
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from recipes.errors import ConfigError
from recipes.loader import parse_into
from recipes.schema import opt

TABLE = Path(__file__).resolve().parent / "hardware.json"
THIS_MACHINE = "this-machine"
NEEDED = ("memory_gb", "bandwidth_tb_s", "tflops")
NO_CHIP = re.compile(r"nvidia|amd|geforce|rtx|instinct|tesla|hgx|dgx|gpu|oam|nvl72|tensor|core|hbm\d?e?|sxm\d?")
SAME_MEMORY = 0.1  # sellers round: 180 GB of a B200 are 192 elsewhere
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


def described(entry: dict[str, Any], where: str) -> Hardware:
    """Hardware that a user describes. ConfigError for a key that is none, and for a peak that is missing: a default
    would be another GPU's."""
    found = parse_into(Hardware, entry, where)
    for needed in NEEDED:
        if not entry.get(needed):
            raise ConfigError(f"{where}: {needed} is missing")
    return found


def known(custom: dict[str, Any]) -> dict[str, Hardware]:
    """Every accelerator by name; a recipe's own entry goes before one of the table. ConfigError for one that is no
    entry."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    found = {name: parse_into(Hardware, entry, TABLE.name) for name, entry in table.items()}
    return found | {name: described(entry, f"plan.custom.{name}") for name, entry in custom.items()}


def find(name: str, custom: dict[str, Any]) -> Hardware:
    """The accelerator of this name. ConfigError names the known ones."""
    table = known(custom)
    if name not in table:
        raise ConfigError(f"plan.hardware = {name}: unknown; known: {THIS_MACHINE}, {', '.join(table)}; or describe it "
                          "in plan.custom")
    return table[name]


def chip_of(name: str) -> tuple[str, float | None]:
    """(what names the chip, GB where the name says them) of a name as people and tools spell it: 'NVIDIA H100 80GB
    HBM3' is ('h100', 80)."""
    memory, kept = None, []
    for word in re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+(gi?b?)\b", r"\1\2", name.lower())):
        if size := re.fullmatch(r"(\d+)gi?b?", word):
            memory = float(size[1])
        elif not NO_CHIP.fullmatch(word):
            kept.append(re.sub(r"^rtx|sxm\d?$", "", word))
    return "".join(kept), memory


def spelt(name: str, custom: dict[str, Any], field: str = "hw") -> tuple[str, Hardware]:
    """(its name in the table, the accelerator) of a name in any usual spelling: 'H100 SXM', 'A100 80G', 'RTX 3090'.
    Other boards of a chip (PCIe, NVL) are others; where a name leaves the memory open, the largest is meant.
    ConfigError names the known ones."""
    table = known(custom)
    if name in table:
        return name, table[name]
    chip, memory = chip_of(name)
    alike = [key for key, entry in table.items() if chip and chip_of(key)[0] in (chip, f"{chip}{entry.memory_gb:g}")
             and (memory is None or abs(entry.memory_gb / memory - 1) <= SAME_MEMORY)]
    if not alike:
        raise ConfigError(f"{field} = {name}: unknown; known: {', '.join(table)}; or describe it in plan.custom")
    key = max(alike, key=lambda one: table[one].memory_gb)
    return key, table[key]
