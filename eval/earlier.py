"""Finished reports: read strictly, and what has to be equal before their figures may stand beside each other."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.evalsets import Questions
from recipes.errors import ConfigError
from recipes.files import sha256_json
from recipes.provenance import differences
from recipes.schema import Eval

SCHEMA = "drafthouse.report/1"
STACK = ("versions", "dtype", "device", "threads")
PARTS = {"name": str, "target": dict, "drafter": dict, "stack": dict, "settings": dict, "total": dict, "sets": dict,
         "prompts": list, "verdict": dict}


def read_report(path: Path) -> dict[str, Any]:
    """A report.json. Raises ConfigError naming the file where it is none, or lacks a part of the form."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this report: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise ConfigError(f"{path}: not a report of form {SCHEMA}; name an eval/report.json")
    missing = [key for key, kind in PARTS.items() if not isinstance(report.get(key), kind)]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} missing or not of its form: made by an earlier version; "
                          "evaluate again")
    return report


def sets_sha256(sets: list[Questions]) -> str:
    """Checksum of the set's file; of several sets, of all their checksums."""
    return sets[0].sha256 if len(sets) == 1 else sha256_json({one.name: one.sha256 for one in sets})


def key_of(drafter: str, section: Eval, sets: list[Questions], fingerprint: dict[str, str]) -> str:
    """Digest of all that decides the figures of an evaluation, times aside: what a finished one is recognised by.

    drafter: digest of what decides its drafts, for a checkpoint checkpoint.digest_of.
    """
    settings = {k: v for k, v in asdict(section).items() if k not in ("tracker", "server")}
    for name in ("sampling", "stop"):  # reports of before they existed were made with their defaults
        if settings[name] == asdict(Eval())[name]:
            del settings[name]
    return sha256_json([drafter, settings, sets_sha256(sets), fingerprint])


def origin(report: dict[str, Any]) -> dict[str, Any]:
    """Target and stack of a report: what acceptance and speed may depend on beside the drafter (case 50)."""
    return {"target": report["target"]["fingerprint"], "stack": {key: report["stack"].get(key) for key in STACK}}


def origins_differ(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Every difference of target or stack, as 'name was X, now Y'."""
    return differences(origin(a), origin(b))


def check_origins(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str], allow: str, allowed: bool) -> list[str]:
    """The differences of target and stack. Raises ConfigError where there are any and they are not `allowed`; `allow`
    is what the user does to allow them."""
    found = origins_differ(a, b)
    if found and not allowed:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(f"{names[1]}: measured on another target or stack than {names[0]}: "
                          f"{'; '.join(found[:3])}{more}; such figures say nothing of the drafters alone; {allow} to "
                          "put them side by side all the same")
    return found
