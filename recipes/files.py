"""Atomic files: written to a temporary name in the same folder, fsynced, renamed."""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from recipes.errors import NO_SPACE, ConfigError, RunError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends: a reader sees the old content or the new,
    never a part. Nothing is left where the block raises; an OSError of the file names `path`."""
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")  # processes of two machines may have one number
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # A write that fails (a full disk) names no file; what the block reads elsewhere fails by its own name.
        elsewhere = error.errno is None or isinstance(error, (ConnectionError, TimeoutError))
        if not (elsewhere or error.filename):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """ConfigError where a folder of the run cannot be written, unless the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        raise ConfigError(f"{folder}: cannot write the run's folder: {error.strerror or error}; make it writable, or "
                          "name another place with runs_dir or name") from None


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Held by one process of this machine at a time; a process that dies lets go. name: of the file that is locked,
    another one than `alone` holds in the same folder."""
    with open(folder / name, "wb") as f:
        _lock(f, fcntl.LOCK_EX)
        yield


@contextmanager
def alone(folder: Path, several: bool = False) -> Iterator[None]:
    """Held while a run writes into the folder. RunError where another process holds it; one that dies lets go.
    ConfigError where the folder cannot be written.
    several: other processes of this run hold it too (`beside`), so it is free only when all of them have ended.
    A file system without locks guards nothing."""
    path = folder / ".lock"
    with ExitStack() as held:
        while True:
            with written(folder):
                f = held.enter_context(open(path, "wb"))
            try:
                _lock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{folder}: another run is at work there; wait for it or end it, or use another `name`"
                               ) from None
            with suppress(FileNotFoundError):  # deleted by a run that has ended since the file was opened here
                if os.path.samestat(os.fstat(f.fileno()), os.stat(path)):
                    break
        if several:
            _lock(f, fcntl.LOCK_SH)
        done = False
        try:
            yield
            done = True
        finally:
            if done or not several:  # those that are left where one has failed are found by this file
                path.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """`alone` for a stage whose output a folder is: the folder is made, and goes again where nothing was written.
    ConfigError where it cannot be."""
    with written(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone(folder):
            yield
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Held by the other processes of a run, after one of them holds `alone`."""
    with open(folder / ".lock", "rb") as f:
        _lock(f, fcntl.LOCK_SH)
        yield


def _lock(f: BinaryIO, how: int) -> None:
    """flock, where the file system has locks."""
    try:
        fcntl.flock(f, how)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file as `replacing` does."""
    with replacing(path) as f:
        f.write(content)


def sync_folder(folder: Path) -> None:
    """Makes a rename in this folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in pieces."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
