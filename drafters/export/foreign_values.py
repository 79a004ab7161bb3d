"""Values of a config that somebody else wrote, taken only in the form that they must have."""

from typing import Any

from drafters.export.check import ROPE_NEEDS
from drafters.export.native import canonical_rope
from recipes.errors import ConfigError


def mapping(config: dict[str, Any], key: str, where: str = "config.json: ") -> dict[str, Any]:
    """A section of a config, empty where it is absent or null. ConfigError where it is anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{where}{key} = {value!r:.80}: must be a mapping")
    return value or {}


def target_of(ours: dict[str, Any]) -> dict[str, Any]:
    """Model and fingerprint of what an export of this project was made for; empty where it does not say."""
    target = mapping(ours, "target", "config.json: drafthouse.")
    if not target:
        return {}
    fingerprint = mapping(target, "fingerprint", "config.json: drafthouse.target.")
    if not all(isinstance(value, str) for value in fingerprint.values()):
        raise ConfigError(f"config.json: drafthouse.target.fingerprint = {fingerprint!r:.80}: must hold digests")
    return {"model": str(target.get("model", "an unnamed target")), "fingerprint": fingerprint}


def rope_of(decoder: dict[str, Any], default_base: float, notes: list[str],
            where: str = "config.json: ") -> dict[str, Any]:
    """Rotary settings in transformers 5's form. Raises ConfigError for those that the drafter here cannot have."""
    rope = {key: given for key in ("rope_parameters", "rope_scaling") if (given := mapping(decoder, key, where))}
    if decoder.get("rope_theta") is not None:
        rope["rope_theta"] = decoder["rope_theta"]
    if "rope_theta" not in rope and "rope_theta" not in rope.get("rope_parameters", {}):
        rope["rope_theta"] = default_base
        notes.append(f"rope_theta is not stated: {default_base:g}, as engines take it")
    settings = canonical_rope(rope)
    kind, partial = settings["rope_type"], settings.pop("partial_rotary_factor", None)
    if partial not in (None, 1.0):
        raise ConfigError(f"{where}partial_rotary_factor = {partial}: the drafter here rotates whole heads")
    kind = kind if isinstance(kind, str) else repr(kind)
    needs = ROPE_NEEDS.get(kind, ())
    lacking = [key for key in needs if key not in settings]
    for key, value in settings.items():
        if key != "rope_type" and not (is_positive(value) if key in ("rope_theta", *needs) else is_plain(value)):
            raise ConfigError(f"{where}{key} = {value!r:.80}: must be a number above 0")
    if kind not in ROPE_NEEDS or lacking:
        raise ConfigError(f"{where}rope_type = {kind!r} in {rope}: "
                          f"{f'{lacking[0]} is missing' if lacking else 'known are ' + ', '.join(ROPE_NEEDS)}")
    return settings


def is_positive(value: Any) -> bool:
    """A finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def is_plain(value: Any) -> bool:
    """What further settings of a rotary kind may be: numbers, switches, nothing."""
    return value is None or isinstance(value, int | float)
