"""A trace folder behind an fsspec URL. See docs/store.md.

The URL holds what a local trace folder holds, under the same names. Work is done in a local folder: at the start every
small object is fetched into it (the URL is the truth), and each finished file is put as one whole object. A shard goes
before its list and leaves the local folder then, so that one shard at a time is on the disk. Credentials come from
fsspec's own configuration and from what the protocol's client reads, never from the recipe.
"""

import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import url_to_fs

from data.settings import explicit
from data.store import list_intact, shard_complete
from recipes.errors import ConfigError, RunError
from recipes.provenance import difference

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs")  # without folders: making one would make a bucket
CLIENT_ERRORS = {  # what a protocol's client raises beside OSError: (module, class)
    "s3": [("botocore.exceptions", "BotoCoreError")], "s3a": [("botocore.exceptions", "BotoCoreError")],
    "gs": [("gcsfs.retry", "HttpError"), ("google.auth.exceptions", "GoogleAuthError")],
    "gcs": [("gcsfs.retry", "HttpError"), ("google.auth.exceptions", "GoogleAuthError")],
    "az": [("azure.core.exceptions", "AzureError")], "abfs": [("azure.core.exceptions", "AzureError")],
}


class Remote:
    """Objects below a URL and the local folder that stands for them. Every method raises RunError, naming the URL and
    what to do, where the store refuses or does not answer."""

    def __init__(self, url: str, folder: Path) -> None:
        """Raises ConfigError where the URL's protocol is not known or its package is not installed."""
        self.url, self.folder = url.rstrip("/"), folder
        self.protocol = urlsplit(url).scheme
        if not self.protocol:
            raise ConfigError(f"trace.url = {url}: not a URL; write protocol://..., or leave it empty")
        try:
            self.fs, self.root = url_to_fs(self.url)
            found = CLIENT_ERRORS.get(self.protocol, [])
            self.errors = (OSError, ValueError, *(getattr(importlib.import_module(m), c) for m, c in found))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"trace.url = {url}: {error}") from None
        self.objects: dict[str, int] = {}  # name below the URL -> size, as of the last pull
        self.shared: dict[str, tuple[int, int]] = {}  # name -> what the local file was when the URL had the same

    @contextmanager
    def reached(self, name: str) -> Iterator[None]:
        """Turns what the store's client raises into one message. FileNotFoundError passes: it may be expected."""
        place = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise RunError(f"{place}: no permission ({error}); check the credentials in fsspec's configuration or the "
                           "environment, and what they may do there") from None
        except self.errors as error:
            raise RunError(f"{place}: {str(error).strip() or type(error).__name__}; check trace.url and whether the "
                           "store can be reached; what was finished is kept: run the same command again") from None

    def names(self) -> dict[str, int]:
        """Name below the URL -> size of every object there now."""
        with self.reached(""):
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(self.root, detail=True)
            except FileNotFoundError:
                return {}
        start = len(self.root.rstrip("/")) + 1
        return {path[start:]: info["size"] for path, info in found.items() if info["type"] == "file"}

    def put(self, name: str) -> None:
        """Puts the local file of this name, whole; what had the name is replaced."""
        path, place = str(self.folder / name), f"{self.root}/{name}"
        with self.reached(name):
            try:
                self.fs.put_file(path, place)
            except FileNotFoundError as error:
                if self.protocol in OBJECT_STORES:
                    raise RunError(f"{self.url}: does not exist ({error}); create the bucket first") from None
                self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
                self.fs.put_file(path, place)

    def get(self, names: list[str]) -> None:
        """Fetches objects into the local folder, each renamed into place when it is whole. Raises RunError where one
        does not exist."""
        if not names:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".get-", dir=self.folder) as temporary:
            paths = [Path(temporary) / str(number) for number in range(len(names))]
            try:
                with self.reached(names[0] if len(names) == 1 else ""):
                    self.fs.get([f"{self.root}/{name}" for name in names], [str(path) for path in paths])
            except FileNotFoundError as error:
                raise RunError(f"{self.url}: an object is missing: {error}") from None
            for name, path in zip(names, paths):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, self.folder / name)

    def delete(self, name: str) -> bool:
        """Deletes an object and the local file; False where there was no object."""
        (self.folder / name).unlink(missing_ok=True)
        if name in self.objects:
            with self.reached(name):
                self.fs.rm_file(f"{self.root}/{name}")
        return name in self.objects

    def room_for(self, sizes: list[int]) -> int:
        """Bytes of this disk that shards of these sizes take while they are written: each leaves before the next."""
        return 2 * max(sizes, default=0)

    def empty(self) -> bool:
        """True where no run has begun."""
        return not self.objects

    def unnamed(self, shards: list[str]) -> list[str]:
        """Shards that are there and not among these; their lists are seen in the local folder."""
        return [name for name in self.objects
                if name.endswith(".safetensors") and name.split("/")[-1].removesuffix(".safetensors") not in shards]

    def shard_bytes(self, names: list[str]) -> int:
        """Bytes of these shards' tensors."""
        return sum(self.objects.get(f"shards/{name}.safetensors", 0) for name in names)

    def pull(self, parts: tuple[str, ...] = ("",)) -> None:
        """Looks up all objects and fetches those whose name begins with one of `parts`, the shards' tensors aside.
        A manifest or list that the URL has no more goes here too, but for a shard that was not put yet.
        ConfigError where the local folder holds traces of other settings, with which they would be mixed."""
        for left in self.folder.glob(".get-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        names = self.objects = self.names()
        small = [name for name in names if not name.endswith(".safetensors") and name.startswith(parts)]
        here = read_json(self.folder / "settings.json")
        if here is not None and "settings.json" in small:
            with self.reached("settings.json"):
                there = parsed(self.fs.cat_file(f"{self.root}/settings.json"))
            if there is None:
                raise RunError(f"{self.url}/settings.json: is not the JSON object that it was written as, so what is "
                               f"there cannot be known; put {self.folder / 'settings.json'} in its place, or use "
                               "another trace.url")
            changed = difference(explicit(here), explicit(there))
            if changed:
                raise ConfigError(f"{self.folder}: holds traces of other settings than {self.url}: {changed}; delete "
                                  "that folder, or use another `name`")
        self.get(small)
        self.shared = {name: state(self.folder / name) for name in small}
        for path in (self.folder / "manifest.json", *(self.folder / "shards").glob("*.json")):
            if path.relative_to(self.folder).as_posix() not in names and not path.with_suffix(".safetensors").exists():
                path.unlink(missing_ok=True)

    def share(self, path: Path) -> None:
        """Puts a finished local file, unless the URL has it as it is."""
        name = path.relative_to(self.folder).as_posix()
        if self.shared.get(name) != state(path):
            self.put(name)
            self.shared[name] = state(path)

    def share_all(self) -> None:
        """Shares every finished file but shards; what waits or is in work stays here."""
        for pattern in ("*.json", "prompts/*.json", "prompts/hub-*.jsonl", "answers/*.json"):
            for path in sorted(self.folder.glob(pattern)):
                if not path.name.startswith("."):
                    self.share(path)

    def finish_shard(self, name: str) -> None:
        """Puts a shard, then its list, and removes the local tensors."""
        path = self.folder / "shards" / f"{name}.safetensors"
        self.put(f"shards/{name}.safetensors")
        self.share(path.with_suffix(".json"))
        path.unlink()

    def complete(self, name: str, ids: list[str], key: str) -> bool:
        """True where the URL holds exactly these rows as a shard of this set, by its list and size; a shard that is
        whole here is put first. `make inspect --verify` reads its bytes too."""
        file, names = f"shards/{name}.safetensors", self.objects
        listed = read_json(self.folder / "shards" / f"{name}.json") if f"shards/{name}.json" in names else None
        whole = listed is not None and fits(listed, name, ids, key) and names.get(file) == listed["bytes"]
        if not whole and shard_complete(self.folder / "shards", name, ids, key):
            self.finish_shard(name)
            return True
        (self.folder / file).unlink(missing_ok=True)
        return whole

    @contextmanager
    def borrowed(self, name: str) -> Iterator[None]:
        """The shard's tensors in the local folder while the block runs; absent where the URL has none."""
        file = f"shards/{name}.safetensors"
        if file not in self.objects:
            yield
            return
        self.get([file])
        try:
            yield
        finally:
            (self.folder / file).unlink(missing_ok=True)


def state(path: Path) -> tuple[int, int]:
    """What changes when a file is written anew: (inode time, size)."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where the file is missing or not one."""
    try:
        return parsed(path.read_bytes())
    except OSError:
        return None


def parsed(content: bytes) -> dict[str, Any] | None:
    """The JSON object in these bytes, or None."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def fits(listed: dict[str, Any], name: str, ids: list[str], key: str) -> bool:
    """True where a shard's list is intact, of this set, and of exactly these rows (bad ones counted)."""
    try:
        present = sorted([row["id"] for row in listed["rows"]] + list(listed["bad"]))
        return list_intact(listed, name) and listed["key"] == key and present == sorted(ids)
    except (KeyError, TypeError):
        return False
