"""What a training run measured of itself, for its report."""

import json
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError

LARGEST = 10**15  # of a whole number that is a step or a count of tokens


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Validations of the training run in this folder; empty for a drafter that was trained elsewhere. ConfigError where
    checkpoints/curve.json is damaged."""
    path = folder / "checkpoints" / "curve.json"
    mend = "damaged; run `make train` again, which writes it anew, or delete it: the report then draws no curve"
    if not path.exists():
        return []
    try:
        curve = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}): {mend}") from None
    if not isinstance(curve, list) or not all(map(is_point, curve)):
        raise ConfigError(f"{path}: not a list of validations: {mend}")
    return curve


def is_point(value: Any) -> bool:
    """Whether a value has what the report draws and says of a validation."""
    return (isinstance(value, dict) and all(is_number(value.get(key)) for key in ("step", "tokens", "mean_length"))
            and (is_number(value.get("train_loss")) or value.get("train_loss", 0) is None))


def is_number(value: Any) -> bool:
    return isinstance(value, float) or type(value) is int and abs(value) < LARGEST
