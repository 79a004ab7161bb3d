"""Where a run's traces are: in a local folder, or behind a URL with a local folder to work in (data/remote.py)."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

from fsspec.core import url_to_fs

from data.remote import Remote
from data.store import shard_complete
from recipes.schema import Trace

LOCAL = ("file", "local")


class LocalPlace:
    """Traces in a folder of this machine: what is written there is where it belongs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, str(folder)

    def pull(self) -> None:
        """Nothing is elsewhere."""

    def share(self, path: Path) -> None:
        """Nothing is elsewhere."""

    def share_all(self) -> None:
        """Nothing is elsewhere."""

    def finish_shard(self, name: str) -> None:
        """Nothing is elsewhere."""

    def complete(self, name: str, ids: list[str], key: str) -> bool:
        """True where the shard is finished, whole and of exactly these rows."""
        return shard_complete(self.folder / "shards", name, ids, key)

    def room_for(self, sizes: list[int]) -> int:
        """Bytes of this disk that shards of these sizes take while they are written."""
        return sum(sizes)

    def empty(self) -> bool:
        """True where no run has begun."""
        return not self.folder.is_dir()

    def borrowed(self, name: str) -> AbstractContextManager:
        """Has a shard's tensors in the folder while the block runs."""
        return nullcontext()

    def unnamed(self, shards: list[str]) -> list[str]:
        """Shards that are elsewhere only and not among these."""
        return []

    def shard_bytes(self, names: list[str]) -> int:
        """Bytes of these shards' tensors as they are kept."""
        files = (self.folder / "shards" / f"{name}.safetensors" for name in names)
        return sum(path.stat().st_size for path in files if path.is_file())

    def delete(self, name: str) -> bool:
        """Deletes a file; False where there was none."""
        there = (self.folder / name).is_file()
        (self.folder / name).unlink(missing_ok=True)
        return there


def behind_url(section: Trace) -> bool:
    """True where the traces are not in a local folder."""
    return bool(section.url) and urlsplit(section.url).scheme not in LOCAL


def open_place(section: Trace, run: Path) -> LocalPlace | Remote:
    """Where the run's traces are. Raises ConfigError where trace.url cannot be used."""
    if behind_url(section):
        return Remote(section.url, run / "traces")
    return LocalPlace(Path(url_to_fs(section.url)[1]) if section.url else run / "traces")
