"""A claim: the figures of an offer or an article, as YAML or key=value words (eval/roi_check.py judges them)."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat

from eval.roi_names import draft_of, hardware_named
from recipes import money
from recipes.cost import Format
from recipes.errors import ConfigError
from recipes.hardware import Hardware
from recipes.loader import of_flag, parse_into, yaml_value
from recipes.model_shape import ModelShape
from recipes.named_shapes import named, short_shape
from recipes.schema import NonNegativeInt, PositiveInt, Share, opt
from recipes.speculation import Draft, kept_if_independent

Kept = Annotated[float, Field(ge=1)]
Planned = Annotated[float, Field(gt=0, le=1)]
Span = NonNegativeFloat | Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]


@dataclass
class Claim:
    """Figures as claimed; `_after` is with the drafter. None: not claimed."""

    name: str = opt("claim", "what the output calls it")
    model: str = opt("", "target, a name of recipes/shapes.json")
    weight_bits: NonNegativeFloat = opt(0.0, "bits a weight; 0 is the model's own")
    cache_bits: PositiveFloat = opt(8.0, "bits of keys and values; the default is the fewest that are usual")
    gpu: str = opt("", "a name of recipes/hardware.json")
    tensor_parallel: PositiveInt = opt(1, "GPUs a replica")
    batch: PositiveFloat | None = opt(None, "rows decoded together")
    context: PositiveFloat | None = opt(None, "tokens of a row in the cache")
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
    draft: str = opt("eagle3", "kind of drafter, or the model that drafts")
    alpha: Share | None = opt(None, "probability that a draft token is accepted")
    acceptance_length: Kept | None = opt(None, "tokens a cycle, bonus token included")
    draft_length: PositiveInt | None = opt(None, "K")
    draft_times_faster: PositiveFloat | None = opt(None, "target's step over the drafter's")
    gpu_hours: PositiveFloat | None = opt(None, "GPU hours a month")
    gpus_of_hours: PositiveFloat | None = opt(None, "GPUs that these hours are said to be")
    saved_a_month: float | None = opt(None, "$ saved a month")
    saved_a_year: float | None = opt(None, "$ saved a year")
    demand_tok_s: PositiveFloat | None = opt(None, "tokens/s that are served")
    gpus: PositiveFloat | None = opt(None, "GPUs without the drafter")
    gpus_after: PositiveFloat | None = opt(None, "GPUs with it")
    gpus_matched: PositiveFloat | None = opt(None, "GPUs without it that gpus_after are said to match")
    dollars_per_hour: PositiveFloat | None = opt(None, "$ an hour without the drafter")
    dollars_per_hour_after: PositiveFloat | None = opt(None, "$ an hour with it")
    headroom: Planned | None = opt(None, "share of a replica's rate that is planned with")
    drafter_gb: NonNegativeFloat | None = opt(None, "memory that speculation is said to take")
    crossover_billions: PositiveFloat | None = opt(None, "size of target from which speculation is said to pay")
    engine: str = opt("", "engine of the plain figure")
    engine_after: str = opt("", "engine of the figure with the drafter")
    engine_version: str = opt("", "its version")
    engine_version_after: str = opt("", "the version of that one")
    flags: str = opt("", "flags that the engine was started with")
    flags_after: str = opt("", "flags of that one")
    acceptance_mode: str = opt("measured", "measured or synthetic")
    acceptance_prompts: str = opt("chat", "prompts that acceptance was measured on: chat, completion, random")
    acceptance_domain: str = opt("", "domain where acceptance was measured")
    traffic_domain: str = opt("", "domain that is served")
    acceptance_temperature: NonNegativeFloat | None = opt(None, "temperature where acceptance was measured")
    traffic_temperature: NonNegativeFloat | None = opt(None, "temperature that is served")
    acceptance_context: Span | None = opt(None, "context where acceptance was measured: tokens, or [shortest, longest]")
    traffic_context: Span | None = opt(None, "context that is served, likewise")
    acceptance_target: str = opt("", "target that acceptance was measured on")
    traffic_target: str = opt("", "target that is served, fine-tuned or not; empty is model")
    acceptance_bits: PositiveFloat | None = opt(None, "bits of the target's weights when acceptance was measured")
    step_times: NonNegativeInt | None = opt(None, "step times that were measured")
    measured_tokens: PositiveFloat | None = opt(None, "tokens verified in the largest step that was measured")
    p99_ms: PositiveFloat | None = opt(None, "ms a token that 99 of 100 requests keep")
    requests: NonNegativeInt | None = opt(None, "requests that this is from")
    by_request: bool | None = opt(None, "whether the acceptance length of each request was recorded")
    best_plain: bool | None = opt(None, "whether the saving is against the best plain configuration")
    slo_ms: PositiveFloat | None = opt(None, "longest ms a token without the drafter")
    slo_ms_after: PositiveFloat | None = opt(None, "longest ms a token with it")
    price_kind: str = opt("", "spot, on-demand, reserved")
    spot_held: bool = opt(False, "whether the claim says that it holds a spot price constant")
    days: NonNegativeFloat = opt(0.0, "days over which the price is held")
    month_hours: PositiveFloat = opt(money.HOURS_A_MONTH, "hours a month")

    @property
    def shape(self) -> ModelShape:
        return short_shape(named(self.model), f"model {self.model}")

    @property
    def hardware(self) -> Hardware:
        return hardware_named(self.gpu)

    @property
    def keep(self) -> Format:
        """The narrowest that the claim allows: all weights at the layers' bits."""
        bits = self.weight_bits or named(self.model).get("bits", 16)
        return Format(bits, bits, self.cache_bits, self.tensor_parallel)

    def drafting(self) -> Draft:
        return draft_of(self.draft, self.shape)

    def kept(self) -> float | None:
        """Most tokens a cycle: as claimed, from alpha, or all of a draft; None where nothing of it is said."""
        if self.acceptance_length:
            return self.acceptance_length
        if not self.draft_length:
            return None
        return self.draft_length + 1.0 if self.alpha is None else kept_if_independent(self.alpha, self.draft_length)

    def has(self, *names: str) -> bool:
        return all(getattr(self, name) not in (None, "") for name in names)


def claims_of(words: list[str]) -> list[Claim]:
    """Claims from a YAML file, or from words key=value. ConfigError for neither, for an unknown key, a bad value."""
    if not words:
        raise ConfigError("check: needs a YAML file or key=value words; keys: "
                          + ", ".join(f.name for f in fields(Claim)))
    if all("=" in word for word in words):
        return [parse_into(Claim, _of_words(words), "command line")]
    found = []
    for word in words:
        for number, values in enumerate(_read(Path(word))):
            found.append(parse_into(Claim, values, f"{word}: claim {number}"))
    return found


def _of_words(words: list[str]) -> dict[str, Any]:
    """Values of key=value words: YAML, but a name is what it is, whatever signs are in it."""
    texts = {f.name for f in fields(Claim) if f.type is str}
    found: dict[str, Any] = {}
    for key, _, text in (word.partition("=") for word in words):
        if key in found:
            raise ConfigError(f"command line: {key}: given twice")
        found[key] = text if key in texts else of_flag(key, text)
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    values = yaml_value(path, "claim")
    if not isinstance(values, (list, dict)) or not values:
        raise ConfigError(f"{path}: holds no claim; it must be a mapping of figures, or a list of such mappings")
    return values if isinstance(values, list) else [values]
