"""Atomic writes: a reader sees the old file or the new one."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import files
from recipes.errors import ConfigError, RunError
from recipes.files import alone, replacing, sha256_file, sha256_json, write_bytes, write_json, write_text


def no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, step):
    """A disk that fills up while writing leaves the old content and no temporary file."""
    path = tmp_path / "a.txt"
    write_text(path, "old")
    monkeypatch.setattr(os, step, no_space)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new and longer")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error, named", [
    (OSError(errno.ENOSPC, "full"), True), (ConnectionError("no way to the host"), False),
    (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False), (TimeoutError(errno.ETIMEDOUT, "late"), False),
    (OSError("no number"), False)])
def test_only_an_error_of_the_file_names_it(tmp_path, error, named):
    """A block may fail to read from elsewhere what it writes: that is not the file's fault."""
    before = str(error)
    with pytest.raises(OSError) as raised, replacing(tmp_path / "a"):
        raise error
    assert raised.value is error and error.filename == (str(tmp_path / "a") if named else None)
    assert named or str(error) == before
    assert not list(tmp_path.iterdir())


def test_content_is_complete_before_the_name_appears(tmp_path, monkeypatch):
    """Data first, fsynced, then the rename, then the folder's fsync."""
    seen, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(("fsync", os.fstat(handle).st_size)), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(("replace", os.path.exists(b))), replace(a, b)))
    write_bytes(tmp_path / "a", b"12345")
    assert seen[:2] == [("fsync", 5), ("replace", False)] and len(seen) == 3 and seen[2][0] == "fsync"


def test_temporary_name_is_hidden_and_in_the_same_folder(tmp_path, monkeypatch):
    """A rename is atomic within one folder only; a glob for results never meets a half-written file."""
    names, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (names.append(a), replace(a, b)))
    write_json(tmp_path / "a.json", {"é": 1})
    assert names[0].parent == tmp_path and names[0].name.startswith(".a.json.")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"é": 1}


def test_two_writers_of_one_file_do_not_meet(tmp_path, monkeypatch):
    """Processes of two machines with the same number write one file at the same time: each has a temporary file of its
    own, and what is there in the end is whole."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with replacing(tmp_path / "a") as first:
        with replacing(tmp_path / "a") as second:
            assert len(list(tmp_path.iterdir())) == 2
            first.write(b"first, and longer")
            second.write(b"second")
        assert (tmp_path / "a").read_bytes() == b"second"
    assert (tmp_path / "a").read_bytes() == b"first, and longer" and os.listdir(tmp_path) == ["a"]


def test_digests(tmp_path):
    """Known SHA-256 of 'abc'; the digest of a mapping does not depend on its order."""
    write_bytes(tmp_path / "a", b"abc")
    assert sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 2, "b": 1})


HOLD = """
import sys
from pathlib import Path
from recipes.files import alone, beside
with {"alone": alone, "beside": beside}[sys.argv[2]](Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path, how: str) -> subprocess.Popen:
    """A process that holds the folder until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), how], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    """A second run is refused while the first one lives, and let in when that was killed (kill -9 leaves no lock)."""
    with hold(tmp_path, "alone") as first:
        with pytest.raises(RunError, match="another run is at work there"), alone(tmp_path):
            pass
        first.kill()
        first.wait()
        with alone(tmp_path):
            pass
    with alone(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number, raised", [(errno.EROFS, ConfigError), (errno.EACCES, ConfigError),
                                            (errno.ENOSPC, OSError), (errno.EDQUOT, OSError)])
def test_a_folder_that_cannot_be_held(tmp_path, monkeypatch, number, raised):
    """A folder that cannot be written is the user's to mend; a full disk keeps its own message."""
    def failing(path, mode):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "open", failing, raising=False)
    with pytest.raises(raised, match=os.strerror(number)) as error, alone(tmp_path):
        pass
    if raised is ConfigError:
        assert str(error.value).startswith(f"{tmp_path}: cannot write the run's folder: ")


def test_a_folder_is_free_when_the_last_process_of_a_run_has_ended(tmp_path):
    """A run of several whose first process has failed keeps the folder while another one is at work."""
    with pytest.raises(ValueError, match="failed"), alone(tmp_path, several=True):
        second = hold(tmp_path, "beside")
        raise ValueError("failed")
    with second:
        with pytest.raises(RunError, match="another run is at work there"), alone(tmp_path):
            pass
        second.kill()
    with alone(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
