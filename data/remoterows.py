"""Rows behind a URL: shards fetched when one of their rows is read, into a local folder of bounded size.

The least recently used shard makes room for the next one. Processes of one machine share the folder: a lock is held
while a shard is fetched, and the time of a file says when any of them used it last.
"""

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from data.remote import Remote, read_json
from data.store import Listed, TraceReader, TraceRow, check_mode, list_intact, read_manifest
from recipes.errors import ConfigError, RunError
from recipes.files import locked, sha256_file, written

READ = ("manifest.json", "shards/")  # what a reader needs


@dataclass
class Place:
    """Where a row is: its shard, its number among that shard's rows, and its entry in the list."""

    shard: str
    inside: int
    listed: dict[str, Any]


class RemoteRows(Listed):
    """A RowReader (data/reader.py) of the shards behind a URL, of which at most `limit` bytes are here."""

    def __init__(self, remote: Remote, limit: int, mode: str) -> None:
        """Fetches manifest and lists into the remote's local folder. Raises RunError where they are not a complete
        store or the disk has no room, ConfigError where it is of another mode or its largest shard above the limit."""
        self.remote, self.limit, self.mode = remote, limit, mode
        self.folder, self.shards = remote.folder, remote.folder / "shards"
        with ExitStack() as held:
            with written(self.folder):
                self.shards.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(self.folder))
            remote.pull(READ)
        names = remote.objects
        if "manifest.json" not in names:
            raise RunError(f"{remote.url}: holds no manifest.json; run `make trace` first, or check trace.url")
        self.manifest = read_manifest(self.folder)
        check_mode(self.folder, self.manifest, mode)
        self.lists = {name: self.listed(name, names) for name in self.manifest["shards"]}
        self.readers: dict[str, TraceReader] = {}
        self.places = [Place(name, inside, row) for name, listed in self.lists.items()
                       for inside, row in enumerate(listed["rows"])]
        if not self.places:
            raise RunError(f"{remote.url}: holds no rows")
        largest = max(listed["bytes"] for listed in self.lists.values())
        if largest > limit:
            raise ConfigError(f"trace.cache_gb = {limit / 1e9:g}: the largest shard of {remote.url} has "
                              f"{largest / 1e9:.3g} GB, and it has to fit")
        held = sum(path.stat().st_size for path in self.shards.glob("*.safetensors"))
        needed = min(limit, sum(listed["bytes"] for listed in self.lists.values())) - held
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise RunError(f"{self.folder}: shards need {needed / 1e6:.0f} MB more, {free / 1e6:.0f} MB are free; "
                           "lower trace.cache_gb, or name another trace.cache_dir")

    def listed(self, name: str, names: dict[str, int]) -> dict[str, Any]:
        """The list of a shard whose object has the size that it says."""
        file = f"{self.remote.url}/shards/{name}.safetensors"
        again = "run `make trace` again to write it"
        listed = read_json(self.shards / f"{name}.json") if f"shards/{name}.json" in names else None
        if listed is None or f"shards/{name}.safetensors" not in names:
            raise RunError(f"{file}: missing or torn; {again}")
        if not list_intact(listed, name) or listed.get("key") != self.manifest["key"]:
            raise RunError(f"{file}: belongs to another trace set, or its list was edited; {again}")
        if names[f"shards/{name}.safetensors"] != listed["bytes"]:
            raise RunError(f"{file}: holds {names[f'shards/{name}.safetensors']} bytes of {listed['bytes']}; {again}")
        return listed

    def reader(self, name: str) -> TraceReader:
        """The shard's reader, fetched where it is not here; its checksum is verified (cases 35, 30)."""
        path = self.shards / f"{name}.safetensors"
        if name in self.readers:
            try:
                os.utime(path)
                return self.readers[name]
            except FileNotFoundError:
                del self.readers[name]  # another process needed the room
        with locked(self.folder):
            wanted = self.lists[name]["sha256"]
            if not path.exists() or sha256_file(path) != wanted:  # absent, torn, or of an earlier set
                path.unlink(missing_ok=True)
                self.make_room(self.lists[name]["bytes"])
                self.remote.get([f"shards/{name}.safetensors"])
                if sha256_file(path) != wanted:
                    path.unlink()
                    raise RunError(f"{self.remote.url}/shards/{name}.safetensors: checksum differs from its list; "
                                   "`make inspect ARGS=--repair` writes it again")
            os.utime(path)
            self.readers[name] = TraceReader(self.folder, [name], self.mode)
        # The space of a file is free only when no process has it open.
        self.readers = {n: r for n, r in self.readers.items() if (self.shards / f"{n}.safetensors").exists()}
        return self.readers[name]

    def make_room(self, size: int) -> None:
        """Deletes the shards used longest ago until one of `size` bytes fits."""
        held = sorted(self.shards.glob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns)
        used = sum(path.stat().st_size for path in held)
        while held and used + size > self.limit:
            path = held.pop(0)
            used -= path.stat().st_size
            self.readers.pop(path.stem, None)
            path.unlink()

    def __getitem__(self, index: int) -> TraceRow:
        place = self.places[index]
        return self.reader(place.shard)[place.inside]
