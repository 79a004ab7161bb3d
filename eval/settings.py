"""At which settings answers are sampled and ended: out of a recipe, in a report, in words.

Everything that `make eval` measures is measured at them, a baseline too. A report made before there were any says
nothing of them: it was made with those of AT.
"""

from dataclasses import asdict, replace
from typing import Any

from data.sampling import Sampling
from eval.verify import Typical
from recipes.errors import ConfigError
from recipes.schema import Eval

AT: dict[str, Any] = {**asdict(Sampling()), "stop": []}  # names in a report's settings, and what is off
WORDS = {"top_k": "top-k", "top_p": "top-p", "min_p": "min-p", "repetition_penalty": "repetition penalty"}


def sampling_of(section: Eval) -> Sampling:
    """How the target's tokens are chosen. ConfigError where typical acceptance, which has a temperature of its own, is
    asked for at other settings too."""
    chosen = Sampling(**asdict(section.sampling))
    if section.acceptance == "exact":
        return chosen
    if chosen != Sampling():
        raise ConfigError(f"eval.acceptance = {section.acceptance}: samples at eval.typical.temperature: leave "
                          "eval.sampling at its defaults")
    return Sampling(section.typical.temperature)


def how_of(section: Eval) -> dict[str, Any]:
    """What a Decoder is told of seed, sampling, stop strings and acceptance."""
    how = {"seed": section.seed, "sampling": sampling_of(section), "stop": tuple(section.stop)}
    if section.acceptance == "exact":
        return how
    return how | {"typical": Typical(section.typical.epsilon, section.typical.delta)}


def greedy_of(section: Eval) -> dict[str, Any]:
    """The same for the proof on greedy text, which a repetition penalty and stop strings act on too."""
    lossy = section.acceptance != "exact"
    greedy = Sampling() if lossy else replace(sampling_of(section), temperature=0.0)
    return {"seed": section.seed, "sampling": greedy, "stop": tuple(section.stop)}


def exact_of(section: Eval) -> dict[str, Any]:
    """What a Decoder is told where a lossy rule has no say: of typical acceptance, greedy text."""
    return how_of(section) if section.acceptance == "exact" else greedy_of(section)


def written(sampling: Sampling, stop: list[str]) -> dict[str, Any]:
    """The part of a report's settings that is named in AT."""
    return {**asdict(sampling), "stop": list(stop)}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    """The same part of any report's settings."""
    return {name: settings.get(name, off) for name, off in AT.items()}


def measured_at(settings: dict[str, Any]) -> str:
    """What a report was measured at, e.g. 'temperature 0.7, top-p 0.9, 2 stop strings'."""
    at = read(settings)
    found = [f"temperature {at['temperature']:g}" + (" (greedy)" if not at["temperature"] else "")]
    acting = WORDS if at["temperature"] else {"repetition_penalty": WORDS["repetition_penalty"]}
    found += [f"{word} {at[name]:g}" for name, word in acting.items() if at[name] != AT[name]]
    if at["stop"]:
        found.append(f"{len(at['stop'])} stop string{'s' if len(at['stop']) > 1 else ''}")
    return ", ".join(found)


def beyond_greedy(settings: dict[str, Any]) -> str:
    """In words what a report was measured at, empty where that is plain greedy decoding: no sampling, no penalty, no
    stop strings."""
    at = read(settings)
    greedy = not at["temperature"] and at["repetition_penalty"] == AT["repetition_penalty"] and not at["stop"]
    return "" if greedy else measured_at(settings)
