"""What the planner refuses to say, and why. Each function returns where the statement may be made and raises Refusal
otherwise; the numbers are those of the list in docs/roi.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.errors import ConfigError
from recipes.model_shape import ModelShape

WIDEST = 2.0  # times the largest measured step, in verified tokens
TAIL_REQUESTS = 1000
SPOT_DAYS = 30


class Refusal(ConfigError):
    """The planner would have to guess. `number` is the rule's."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"refused ({number}): {why}")
        self.number = number


@dataclass(frozen=True)
class Conditions:
    """Under which an acceptance was measured, or traffic runs. context: (shortest, longest) tokens; target: what names
    its weights, fine-tuning and quantisation included."""

    domain: str = ""
    temperature: float = 0.0
    context: tuple[float, float] = (0.0, float("inf"))
    target: str = ""
    weight_bits: float = 0.0
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # of its weights, config, tokenizer, template


def moved_acceptance(measured: Conditions, traffic: Conditions) -> None:
    """1: acceptance of one domain, temperature, context length or target says nothing about another."""
    carried = "carried over, acceptance was off by 18 % in the median and 129 % at worst"
    for name, unit in (("domain", ""), ("temperature", ""), ("target", ""), ("weight_bits", " bits")):
        here, there = getattr(measured, name), getattr(traffic, name)
        if (round(here) != round(there)) if name == "weight_bits" else here != there:  # scales add parts of a bit
            raise Refusal(1, f"acceptance was measured with {name} {here!r}{unit}, the traffic has {there!r}{unit}; "
                             f"{carried}: measure it there")
    for part in sorted({*measured.fingerprint} & {*traffic.fingerprint}):
        if measured.fingerprint[part] != traffic.fingerprint[part]:
            raise Refusal(1, f"acceptance was measured on a target of other {part} than the measured steps; {carried}: "
                             "measure both on one target")
    low, high = measured.context
    if not low <= traffic.context[0] <= traffic.context[1] <= high:
        raise Refusal(1, f"acceptance was measured at contexts of {low:,.0f} to {high:,.0f} tokens, the traffic has "
                         f"{traffic.context[0]:,.0f} to {traffic.context[1]:,.0f}; {carried}: measure it there")


def unmeasured_steps(step_times: int, of: str = "") -> None:
    """2: no dollars and no GPU counts without a measured step time; `of`: what was not timed where others were."""
    if not step_times:
        time = f"measured step time of {of}" if of else "measured step time"
        raise Refusal(2, f"dollars and GPU counts need a {time}, there is none; run make roi ARGS=measure, then "
                         "ARGS=calibrate")


def other_engine(plain: Mapping[str, Any], speculative: Mapping[str, Any]) -> None:
    """3: a speedup is of one engine, version and set of flags."""
    for key in sorted({*plain, *speculative}):
        if plain.get(key) != speculative.get(key):
            raise Refusal(3, f"the plain figure is of {key} {plain.get(key)!r}, the speculative one of "
                             f"{speculative.get(key)!r}: a speedup across engines, versions or flags is none")


def other_place(field: str, measured: Any, planned: Any) -> None:
    """3: steps say nothing of another GPU, or of sums over another number of them."""
    if measured != planned:
        raise Refusal(3, f"{field} = {planned}, the steps were measured with {measured}, which says nothing of it: "
                         f"set it to {measured}, or measure with {planned}")


def beyond_bounds(speedup: float | None = None, kept: float | None = None, tok_s: float | None = None,
                  bound: float | None = None, where: str = "") -> None:
    """4: no speedup above the acceptance length, no rate above what reading the weights allows; `where` begins the
    reason."""
    of = f"{where}: " if where else ""
    if speedup is not None and kept is not None and speedup > kept * (1 + 1e-9):
        raise Refusal(4, f"{of}a speedup of {speedup:.2f} is above the acceptance length of {kept:.2f}: each cycle "
                         "takes at least one pass of the target; the two figures are not of the same run")
    if tok_s is not None and bound is not None and tok_s > bound * (1 + 1e-9):
        raise Refusal(4, f"{of}{tok_s:,.0f} tokens/s is above {bound:,.0f}, what reading the weights once a step "
                         "allows")


def beyond_measured(verified: float, largest: float) -> None:
    """5: no step of more than twice the tokens of the largest measured one."""
    if verified > WIDEST * largest:
        raise Refusal(5, f"a step of {verified:,.0f} verified tokens is beyond {WIDEST:.0f} times the largest measured "
                         f"one, {largest:,.0f}: measure a larger one")


def made_up_acceptance(mode: str, prompts: str = "chat") -> None:
    """6: synthetic acceptance is good for step times only, and so is that of prompts that nobody sends (case 53)."""
    if prompts != "chat":
        raise Refusal(6, f"acceptance was measured on {prompts} prompts: without the target's chat template, or on "
                         "random tokens, it is not that of the traffic")
    if mode != "measured":
        raise Refusal(6, f"acceptance is {mode}, not measured: it may serve for step times, never for what a drafter "
                         "is worth")


def thin_tail(requests: int, by_request: bool) -> None:
    """7: a p99 needs 1,000 requests and each one's acceptance length."""
    if not by_request:
        raise Refusal(7, "p99 needs the acceptance length of each request: the slowest ones make it, not the mean")
    if requests < TAIL_REQUESTS:
        raise Refusal(7, f"p99 of {requests:,} requests: at least {TAIL_REQUESTS:,} are needed")


def split_replica(replicas: float, ranks: int, shape: ModelShape | None = None) -> None:
    """8: whole replicas, and as many GPUs each as divide the heads of the target, where it is known."""
    if replicas != int(replicas):
        raise Refusal(8, f"{replicas:.2f} replicas of {ranks} GPUs: a replica runs whole or not at all")
    if shape is None:
        return
    kv = shape.attention.kv_heads
    undivided = [f"{n} {what}" for n, what in ((shape.attention.heads, "heads"), (kv, "key/value heads"))
                 if n and n % ranks and not (what != "heads" and ranks % n == 0)]
    if undivided:
        raise Refusal(8, f"tensor parallelism of {ranks} divides neither the target's {' nor its '.join(undivided)}"
                      if len(undivided) > 1 else
                      f"tensor parallelism of {ranks} does not divide the target's {undivided[0]}")


def unfair_saving(best_plain: float | None, slo_plain: float | None, slo_speculative: float | None) -> None:
    """9: a saving is against the best plain configuration under the same SLO, not at one batch."""
    if best_plain is None:
        raise Refusal(9, "a saving at a fixed batch: plain decoding may reach as much with another; give the best "
                         "plain configuration under the same SLO")
    if slo_plain != slo_speculative:
        raise Refusal(9, f"plain decoding is held to {slo_plain} ms a token, speculation to {slo_speculative}: a "
                         "saving needs the same SLO on both sides")


def size_crossover(sizes_alone: bool) -> None:
    """10: no size of target from which speculation begins to pay."""
    if sizes_alone:
        raise Refusal(10, "a crossover by the target's size alone: targets of 1.7B and 32B measured the same gain at "
                          "batch 1; batch, context, acceptance and hardware decide")


def no_room(needed: float, memory: float, gpus: int, headroom: float) -> None:
    """11: GPUs are left out only where weights, drafter and cache fit into the others and headroom is planned."""
    if needed > memory:
        raise Refusal(11, f"{gpus} GPUs hold {memory / 1e9:,.1f} GB each, weights, drafter and cache need "
                          f"{needed / 1e9:,.1f} GB")
    if not 0 < headroom < 1:
        raise Refusal(11, f"headroom = {headroom:g}: fewer GPUs need headroom; plan with a share below 1 of a "
                          "replica's rate")


def constant_spot(kind: str, days: float, said: bool) -> None:
    """12: a spot price is not a year's price unless that is said."""
    if kind == "spot" and days > SPOT_DAYS and not said:
        raise Refusal(12, f"a spot price held constant over {days:,.0f} days: it is not; plan up to {SPOT_DAYS} days, "
                          "or say so with roi.spot_held: true, and the plan repeats it")
