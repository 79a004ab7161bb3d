"""What serving engines read of a drafter, as a table: which layout, flag and number of layers means the same there as
in training.

Source: the engines' own loaders, in the version named with each entry: vLLM `vllm/model_executor/models/
llama_eagle3.py`, SGLang `python/sglang/srt/models/llama_eagle3.py`, TensorRT-LLM
`tensorrt_llm/_torch/models/modeling_speculative.py`; formats.md sections 1, 2, 3 and 8.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from drafters.export.kinds import VARIANTS, kind_of
from drafters.layers import MOST_PARALLEL_LAYERS


@dataclass(frozen=True)
class Engine:
    """What one engine makes of an export. `flags`: keys of VARIANTS that it reads, and since when; one that is not
    here is skipped there without a message, and the drafter is served as another one than was trained."""

    title: str
    versions: str  # whose sources the entry was read from
    layouts: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict)
    layers: int = 1  # decoder layers whose second and further ones it computes as the drafter here does
    lowest_tap: int = 0  # smallest id of a state entering a layer that it can capture
    last_tap: bool = True  # whether it can capture what enters the final norm
    more_layers: str = ""  # what it does with a further layer
    parallel: str = ""  # whether it drafts in one pass, and since when


# What vLLM calls the method of a layout; all that is not here is EAGLE-3.
METHODS = {"medusa": "medusa", "medusa-original": "medusa", "plain": "draft_model"}


def method_of(layout: str) -> str:
    """vLLM's `method` for a drafter in this layout."""
    return METHODS.get(layout, "eagle3")


ENGINES = {
    "vllm": Engine(
        "vLLM", "0.32", ("native", "speculators", "medusa", "plain"),
        {"fc_norm": "pull request 42764 (May 2026)",
         "norm_output": "pull request 42764, in the speculators layout 46488 (June 2026)",
         "norm_before_residual": "all versions that read the speculators layout"},
        layers=MOST_PARALLEL_LAYERS, parallel="pull request 32887 (January 2026)"),
    "sglang": Engine(
        "SGLang", "main of May 2026, pull request 24663", ("native",),
        {"fc_norm": "pull request 24663 (May 2026)", "norm_output": "pull request 24663 (May 2026)"},
        last_tap=False, more_layers="norms the second layer's input by hidden_norm, not by input_layernorm"),
    "tensorrt-llm": Engine(
        "TensorRT-LLM", "main of June 2026, pull request 14988", ("native",),
        {"fc_norm": "pull request 14988 (June 2026)", "norm_output": "pull request 14988 (June 2026)"},
        lowest_tap=1, more_layers="norms the second layer's input by hidden_norm, not by input_layernorm"),
}


def departures(engine: str, layout: str, config: dict[str, Any], target_layers: int | None) -> Iterator[str]:
    """Why this engine would serve another drafter than was trained, a sentence each; nothing where it serves it.

    config: config.json of the native layout, or the same keys of another one. target_layers: L, None if not known.
    """
    reader = ENGINES[engine]
    if layout not in reader.layouts:
        others = [name for name in reader.layouts if method_of(name) == method_of(layout)]
        yield (f"{reader.title} does not load the {layout} layout" + (f"; export {' or '.join(others)}" if others else
                                                                      ", nor another one of such a drafter"))
        return
    if kind_of(config).own_row and not reader.parallel:
        yield f"{reader.title} does not draft in parallel: it would draft token by token, which was not trained"
    for flag in VARIANTS:
        if config.get(flag) and flag not in reader.flags:
            yield f"{reader.title} does not read {flag}: it would serve another drafter than was trained"
    if config.get("num_hidden_layers", 1) > reader.layers:
        yield f"{reader.title} {reader.more_layers}: two layers serve another drafter than was trained"
    taps = config.get("eagle_aux_hidden_state_layer_ids") or [reader.lowest_tap]
    if taps[0] < reader.lowest_tap:
        yield (f"{reader.title} cannot capture what enters layer {taps[0]}; trace.layers must begin at "
               f"{reader.lowest_tap}")
    if not reader.last_tap and taps[-1] == target_layers:
        yield f"{reader.title} cannot capture what enters the final norm (id {taps[-1]})"


def serving(layout: str, config: dict[str, Any], target_layers: int | None) -> dict[str, list[str]]:
    """Each engine's departures, empty for those that serve the drafter as it was trained."""
    return {name: list(departures(name, layout, config, target_layers)) for name in ENGINES}


def since(engine: str, config: dict[str, Any]) -> list[str]:
    """Which flags of the drafter need a recent engine: 'flag: since when'."""
    reader = ENGINES[engine]
    found = [f"{flag}: {when}" for flag, when in reader.flags.items() if config.get(flag)]
    return [*found, f"parallel drafting: {reader.parallel}"] if kind_of(config).own_row else found
