"""Rows of a Hub data set through `datasets`, copied once into the run: a second run reads the copy, offline too.

The library writes part of its downloads to folders that only the environment of a process can name (case 61). So it
runs in a child process, `python -m data.hub SETTINGS`, whose folders are all below the source's `cache_dir`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from recipes.errors import USAGE, ConfigError, RunError
from recipes.files import sha256_json
from recipes.schema import PromptSource

FOLDERS = {"HF_HUB_CACHE": "hub", "HF_XET_CACHE": "xet", "HF_ASSETS_CACHE": "assets", "HF_DATASETS_CACHE": "datasets",
           "HF_MODULES_CACHE": "modules"}
REQUEST = " thrown while requesting "  # how huggingface_hub logs a request that failed
FIELDS = ("name", "config", "split", "revision", "streaming", "rows", "cache_dir")


def copy_of(source: PromptSource, where: str, folder: Path) -> Path:
    """The data set's rows as a JSONL file in `folder`, made where it is not there yet.

    Raises ConfigError where the data set, configuration or split does not exist, RunError where the Hub cannot be
    reached; nothing but the library's own cache is left behind then.
    """
    if not source.name:
        raise ConfigError(f"{where}: kind hub needs `name`, a data set's id")
    if source.streaming and not source.rows:
        raise ConfigError(f"{where}: streaming needs `rows`, how many are read; without a bound all of the data set is")
    settings = {name: getattr(source, name) for name in FIELDS}
    path = folder / f"hub-{sha256_json({k: v for k, v in settings.items() if k != 'cache_dir'})[:16]}.jsonl"
    if path.is_file():
        return path
    cache = Path(source.cache_dir).resolve()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=cache) as temporary:
            folders = {name: str(cache / part) for name, part in FOLDERS.items()} | {"TMPDIR": temporary}
            command = [sys.executable, "-m", "data.hub_reader", json.dumps(settings | {"path": str(path.resolve())})]
            root = str(Path(__file__).resolve().parent.parent)
            child = subprocess.run(command, capture_output=True, text=True,
                                   env=os.environ | folders | {"PYTHONPATH": root, "USE_TORCH": "0"})
    except OSError as error:
        raise ConfigError(f"{where}: cache_dir = {source.cache_dir!r}: cannot write there: {error.strerror}") from None
    if child.returncode:
        lines = [line for line in (child.stdout or child.stderr).strip().split("\n") if line.strip()]
        kind = ConfigError if child.returncode == USAGE else RunError
        failed = [line for line in child.stderr.split("\n") if REQUEST in line]  # the library's error does not tell
        raise kind(f"{where}: data set {source.name!r} ({source.config or 'default'}, {source.split}): "
                   f"{lines[-1] if lines else f'reading stopped with status {child.returncode}'}"
                   + (f"; the last request: {failed[-1].strip()}" if failed and kind is RunError else ""))
    return path
