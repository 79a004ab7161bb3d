"""What produced a result: versions, machine, git revision, time, recipe. Written beside every output."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recipes.files import sha256_json

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "safetensors", "tokenizers")


def versions() -> dict[str, str]:
    """Installed versions of the packages that can change a number; 'absent' where one is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def git_revision() -> str:
    """The checkout's commit with '+changes' where it is dirty; 'unknown' outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def stamp(recipe: dict[str, Any]) -> dict[str, Any]:
    """Provenance of a stage that starts now. `recipe` is the resolved recipe as plain values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_revision(),
        "versions": versions(),
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "load_1m": os.getloadavg()[0],
                    "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "unset")},
        "recipe_sha256": sha256_json(recipe),
    }


def difference(earlier: Any, now: Any) -> str:
    """The first setting that differs, as 'name was X, now Y'; empty where none does."""
    return next(iter(differences(earlier, now)), "")


def differences(earlier: Any, now: Any, path: str = "") -> list[str]:
    """Every setting that differs, as 'name was X, now Y'; lists of as many mappings are compared one by one."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        return [found for key in {**earlier, **now}
                for found in differences(earlier.get(key), now.get(key), f"{path}.{key}" if path else key)]
    if isinstance(earlier, list) and isinstance(now, list) and len(earlier) == len(now) and all(
            isinstance(item, dict) for item in earlier + now):
        return [found for i, (a, b) in enumerate(zip(earlier, now)) for found in differences(a, b, f"{path}[{i}]")]
    return [] if earlier == now else [f"{path} was {earlier!r}, now {now!r}"]
