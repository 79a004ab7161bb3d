"""A claim: the figures of an offer or an article, as YAML or key=value words (eval/roi_check.py judges them)."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from recipes import money
from recipes.cost import Format
from recipes.errors import ConfigError
from recipes.loader import parse_into
from recipes.model_shape import ModelShape
from recipes.named_shapes import named, short_shape
from recipes.schema import Share, opt


@dataclass
class Claim:
    """Figures as claimed; `_after` is with the drafter. None: not claimed."""

    name: str = opt("claim", "what the output calls it")
    model: str = opt("", "target, a name of recipes/shapes.json")
    weight_bits: NonNegativeFloat = opt(0.0, "bits a weight; 0 is the model's own")
    gpu: str = opt("", "a name of recipes/hardware.json")
    tensor_parallel: PositiveInt = opt(1, "GPUs a replica")
    batch: PositiveFloat | None = opt(None, "rows decoded together")
    tok_s: PositiveFloat | None = opt(None, "plain tokens/s of one replica")
    tok_s_after: PositiveFloat | None = opt(None, "tokens/s with the drafter")
    price_per_gpu_hour: PositiveFloat | None = opt(None, "$ of one GPU hour")
    dollars_per_million: PositiveFloat | None = opt(None, "$ per million output tokens, plain")
    dollars_per_million_after: PositiveFloat | None = opt(None, "the same with the drafter")
    saved_share: Share | None = opt(None, "share of the cost that is saved")
    speedup: PositiveFloat | None = opt(None, "claimed speedup of the whole")
    speedup_batch: PositiveFloat | None = opt(None, "batch at which it was measured")
    speedup_at_load: PositiveFloat | None = opt(None, "speedup at the batch that is served")
    decode_speedup: PositiveFloat | None = opt(None, "speedup of decoding alone")
    decode_share: Share | None = opt(None, "share of the time that is decoding")
    alpha: Share | None = opt(None, "probability that a draft token is accepted")
    acceptance_length: PositiveFloat | None = opt(None, "tokens a cycle, bonus token included")
    draft_length: PositiveInt | None = opt(None, "K")
    draft_times_faster: PositiveFloat | None = opt(None, "target's step over the drafter's")
    gpu_hours: PositiveFloat | None = opt(None, "GPU hours a month")
    gpus_of_hours: PositiveFloat | None = opt(None, "GPUs that these hours are said to be")
    saved_a_month: PositiveFloat | None = opt(None, "$ saved a month")
    demand_tok_s: PositiveFloat | None = opt(None, "tokens/s that are served")
    gpus: PositiveInt | None = opt(None, "GPUs without the drafter")
    gpus_after: PositiveInt | None = opt(None, "GPUs with it")
    gpus_matched: PositiveInt | None = opt(None, "GPUs without it that gpus_after are said to match")
    dollars_per_hour: PositiveFloat | None = opt(None, "$ an hour without the drafter")
    dollars_per_hour_after: PositiveFloat | None = opt(None, "$ an hour with it")
    headroom: Share | None = opt(None, "share of a replica's rate that is planned with")
    drafter_gb: NonNegativeFloat | None = opt(None, "memory that speculation is said to take")
    crossover_billions: PositiveFloat | None = opt(None, "size of target from which speculation is said to pay")
    engine: str = opt("", "engine of the plain figure")
    engine_after: str = opt("", "engine of the figure with the drafter")
    acceptance_mode: str = opt("measured", "measured or synthetic")
    acceptance_domain: str = opt("", "domain where acceptance was measured")
    traffic_domain: str = opt("", "domain that is served")
    best_plain: bool | None = opt(None, "false: the saving is at one batch, not against the best plain configuration")
    price_kind: str = opt("", "spot, on-demand, reserved")
    days: NonNegativeFloat = opt(0.0, "days over which the price is held")
    month_hours: PositiveFloat = opt(money.HOURS_A_MONTH, "hours a month")

    @property
    def shape(self) -> ModelShape:
        return short_shape(named(self.model), f"model {self.model}")

    @property
    def keep(self) -> Format:
        return Format(self.weight_bits or named(self.model).get("bits", 16), 16, 16, self.tensor_parallel)

    def has(self, *names: str) -> bool:
        return all(getattr(self, name) not in (None, "") for name in names)


def claims_of(words: list[str]) -> list[Claim]:
    """Claims from a YAML file, or from words key=value. ConfigError for neither, for an unknown key, a bad value."""
    if not words:
        raise ConfigError("check: needs a YAML file or key=value words; keys: "
                          + ", ".join(f.name for f in fields(Claim)))
    if all("=" in word for word in words):
        values = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in words)}
        return [parse_into(Claim, values, "command line")]
    found = []
    for word in words:
        for number, values in enumerate(_read(Path(word))):
            found.append(parse_into(Claim, values, f"{word}: claim {number}"))
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: no claim can be read: {getattr(error, 'strerror', None) or error}") from None
    return values if isinstance(values, list) else [values]
