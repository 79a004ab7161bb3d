"""Uploads a folder as one commit of a Hub model repository, through huggingface_hub.

A repeated upload sends nothing twice: large files are known there by their checksum, and the commit is made once.
The token goes to the endpoint and nowhere else: no message that leaves this module holds it.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

from recipes.errors import ConfigError, RunError

ATTEMPTS, FIRST_WAIT = 5, 1.0  # of a commit; huggingface_hub repeats the other requests itself
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".py", ".index.json", ".gguf")  # that a reader may load or run
T = TypeVar("T")


def check_endpoint(endpoint: str) -> None:
    """ConfigError where a token would travel in the clear, or the endpoint is none."""
    parts = urlsplit(endpoint)
    if parts.scheme == "https" and parts.hostname and not parts.username:
        return
    if parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1"):
        return
    raise ConfigError("--endpoint: must be https://HOST, without a user: a token is sent there")


class Uploader:
    """One repository. `wait` sleeps between attempts at a commit."""

    def __init__(self, repo: str, token: str, endpoint: str, lfs: bool = False,
                 wait: Callable[[float], None] = time.sleep) -> None:
        """lfs: upload through Git LFS although Xet is installed, for servers that have no Xet storage."""
        check_endpoint(endpoint)
        self.repo, self.token, self.wait = repo, token, wait
        constants.HF_HUB_DISABLE_XET = lfs or constants.HF_HUB_DISABLE_XET
        self.api = HfApi(endpoint=endpoint.rstrip("/"), token=token)

    def upload(self, folder: Path, private: bool, message: str, owned: Iterable[str] = ()) -> tuple[str, bool]:
        """Uploads every file of the folder; returns the repository's address and whether it is private.

        owned: names that an earlier publication may have left there; those that the folder has not are deleted in the
        same commit.

        Raises ConfigError where the token may not write there, or the repository is public and should be private;
        RunError where the server fails for good, or the repository has weights that the folder has not.
        """
        files = sorted(path for path in folder.iterdir())
        repo = self.call(lambda: self.api.create_repo(self.repo, private=private, exist_ok=True))
        before = self.call(lambda: self.api.model_info(self.repo))
        if private and before.private is False:
            raise ConfigError(f"REPO={self.repo}: exists and is public; pass --public to publish there")
        names = {path.name for path in files}
        strays = sorted(s.rfilename for s in before.siblings or []
                        if s.rfilename.endswith(WEIGHTS) and s.rfilename not in names)
        if strays:
            raise RunError(f"REPO={self.repo}: holds {', '.join(strays)}, which an engine may load beside or instead "
                           "of this drafter; delete them there, or choose another name")
        there = {sibling.rfilename for sibling in before.siblings or []}
        self.commit(files, sorted(there & set(owned) - names), message, before.sha)
        return str(repo), before.private is not False

    def commit(self, files: list[Path], stale: list[str], message: str, parent: str | None) -> None:
        """One commit on top of `parent`, tried again until it is there: an answer that was lost may have made it."""
        for attempt in range(ATTEMPTS):
            operations = [*(CommitOperationAdd(path.name, path) for path in files),
                          *(CommitOperationDelete(name) for name in stale)]
            try:
                self.call(lambda made=operations: self.api.create_commit(
                    self.repo, made, commit_message=message, parent_commit=parent))
                return
            except Unfinished as error:
                if attempt + 1 == ATTEMPTS:
                    raise RunError(f"REPO={self.repo}: {error}; run the same command again to go on: what was uploaded "
                                   "is not sent again") from None
            self.wait(FIRST_WAIT * 2**attempt)
            if self.landed(message, parent):
                return

    def landed(self, message: str, parent: str | None) -> bool:
        """Whether the head is no longer `parent`, but a commit with this message, which names the files' digest."""
        try:
            head = self.call(lambda: self.api.model_info(self.repo)).sha
            return head != parent and self.call(lambda: self.api.list_repo_commits(self.repo))[0].title == message
        except Unfinished:
            return False

    def call(self, request: Callable[[], T]) -> T:
        """A request's result. Raises Unfinished for what may pass, ConfigError and RunError for what will not; the
        library's own message, which names a URL and headers, is left out."""
        try:
            return request()
        except OfflineModeIsEnabled:
            raise ConfigError("HF_HUB_OFFLINE is set: unset it to publish") from None
        except HFValidationError:
            raise ConfigError(f"REPO={self.repo}: is no repository name") from None
        except RepositoryNotFoundError:
            raise ConfigError(f"REPO={self.repo}: not there, or the token may not see it") from None
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403):
                raise ConfigError(f"REPO={self.repo}: the server refuses the token ({status}): it needs write access "
                                  "there; set HF_TOKEN or run `hf auth login`") from None
            if status == 409 or status == 412:
                raise RunError(f"REPO={self.repo}: somebody else changed it meanwhile ({status}); run again") from None
            if status >= 500 or status in (0, 408, 429):
                raise Unfinished(f"the server answers {status or 'nothing'}") from None
            raise RunError(f"REPO={self.repo}: the server refuses the upload ({status})") from None
        except httpx2.HTTPError as error:
            raise Unfinished(f"the connection failed ({type(error).__name__})") from None
        except ValueError:  # the library's word for answers that make no sense
            raise RunError(f"REPO={self.repo}: the server's answer is not the Hub's") from None


class Unfinished(RunError):
    """A failure that another attempt may not have."""
