"""What a live server says of itself, and whether two of its runs belong into one steps.json."""

import json
import os

import httpx

from eval.roi_files import Steps
from recipes.errors import ConfigError
from recipes.schema import Server

VERSIONS = {"vllm": "/version", "sglang": "/get_server_info"}
PATIENCE = 10.0  # seconds


def version_of(section: Server) -> dict[str, str]:
    """{"version": ...} of the engine; empty where it tells none."""
    path = VERSIONS.get(section.kind)
    key = os.environ.get(section.api_key_env, "") if section.api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(section.base_url.rstrip("/") + path, headers=headers, timeout=PATIENCE) if path else None
        found = answer.json() if answer is not None and answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):  # a proxy that does not pass it, or an older server: told by what is missing
        found = {}
    version = found.get("version") if isinstance(found, dict) else None
    return {"version": str(version)} if version else {}


def require_same_run(before: Steps | None, fresh: Steps) -> None:
    """ConfigError where steps that are there were measured with something else: a calibration would mix both."""
    for name in ("profile", "engine", "hardware", "tensor_parallel", "target", "drafter") if before else ():
        was, now = (json.loads(json.dumps(getattr(steps, name))) for steps in (before, fresh))  # as the file holds them
        if was != now:
            parts = [k for k in {*was, *now} if was.get(k) != now.get(k)] if isinstance(now, dict) else []
            about = f"{name} ({', '.join(sorted(parts))})" if parts else name
            raise ConfigError(f"steps.json: holds steps of another {about}; move it away, or measure with that again")
