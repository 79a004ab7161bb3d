"""The child process that reads a Hub data set (data/hub.py): `python -m data.hub_reader SETTINGS`, a JSON object."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import httpx
import pyarrow as pa

from recipes.errors import USAGE
from recipes.files import replacing

UNREACHABLE = 3


def rows(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first rows of the data set that `settings` names (data/hub.py), as `datasets` yields them."""
    found = datasets.load_dataset(settings["name"], settings["config"] or None, split=settings["split"],
                                  revision=settings["revision"] or None, streaming=settings["streaming"])
    return islice(found, settings["rows"] or None)


def write_rows(settings: dict[str, Any]) -> None:
    """Writes the rows to settings["path"], whole or not at all; a value that JSON has not becomes its text."""
    with replacing(Path(settings["path"])) as f:
        for row in rows(settings):
            f.write(json.dumps(row, default=str).encode() + b"\n")


def main(settings: dict[str, Any]) -> int:
    """The child's work; its exit status, after one line on stdout where it is not 0."""
    try:
        write_rows(settings)
    except (ConnectionError, httpx.TransportError) as error:
        print(f"cannot reach the Hub ({_line(error)}); check the connection and HF_HUB_OFFLINE, or use a local copy "
              "(kind parquet or jsonl)")
        return UNREACHABLE
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, pa.ArrowException,
            datasets.exceptions.DatasetsError) as error:
        print(_line(error))
        return USAGE
    return 0


def _line(error: BaseException) -> str:
    """The first line of an error and, where there is one, of what caused it first."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [str(e).strip().split("\n")[0] or type(e).__name__ for e in dict.fromkeys((error, cause))]
    return "; ".join(lines)


if __name__ == "__main__":
    datasets.disable_progress_bars()
    sys.exit(main(json.loads(sys.argv[1])))
