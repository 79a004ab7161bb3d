"""HTTP with patience: a bounded rate, retries with back-off, Retry-After, one limit of time a request."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from data.backends.base import Fault
from recipes.errors import ConfigError, RunError
from recipes.schema import Server

T = TypeVar("T")
PASSING = {408, 425, 429}  # besides 5xx: statuses that another attempt may not meet
ABSENT = {404, 405, 501}  # a path that this server does not have
LONGEST_BACKOFF = 60.0  # seconds
LONGEST_WAIT = 600.0  # seconds a server may ask to wait before the run gives up
SECTION = "generation.server"  # of the recipe, where no other is named
LATE = "no whole answer in time"


def backoff(attempt: int, base: float, draw: float) -> float:
    """Seconds before attempt + 1: doubled each time, half of it at random (`draw` in [0, 1))."""
    return min(LONGEST_BACKOFF, base * 2.0**min(attempt, 30)) * (0.5 + 0.5 * draw)


def retry_after(headers: Mapping[str, str], now: datetime) -> float:
    """Seconds that a Retry-After header asks for, given as a number or as a date; 0 where there is none."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())


class Pace:
    """When requests may begin: at most `rate` a second (0: no limit), and none before the end of a pause."""

    def __init__(self, rate: float) -> None:
        self.gap = 1.0 / rate if rate else 0.0
        self.next = 0.0

    def reserve(self, now: float) -> float:
        """The time at which the caller may begin."""
        start = max(now, self.next)
        self.next = start + self.gap
        return start

    def pause(self, until: float) -> None:
        self.next = max(self.next, until)


def api_key(server: Server, section: str = SECTION) -> str:
    """The secret, which is in no file. Raises ConfigError where the variable that the recipe names is not set.
    `section`: where the recipe says so."""
    if not server.api_key_env:
        return ""
    key = os.environ.get(server.api_key_env, "").strip()
    if not key or not key.isascii():
        raise ConfigError(f"{section}.api_key_env = {server.api_key_env}: this environment variable holds no key")
    return key


def checked_url(address: str, field: str) -> httpx.URL:
    """The address that a field of the recipe gives. Raises ConfigError where it is none or carries a secret."""
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{field} = {address!r}: {error}") from None
    if url.userinfo or url.query:
        raise ConfigError(f"{field} holds a password or a query; name a variable in {field.rpartition('.')[0]}."
                          "api_key_env instead, since the recipe is written beside every output")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{field} = {address!r}: must be like http://localhost:8000")
    return url


def server_url(server: Server, field: str = f"{SECTION}.base_url") -> str:
    """The server's address without `/v1`; see checked_url."""
    checked_url(server.base_url, field)
    return server.base_url.rstrip("/").removesuffix("/v1")


def message_of(response: httpx.Response) -> str:
    """What a server says of an error: OpenAI's form, FastAPI's, or the first characters."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        found = body.get("error", body)
        if isinstance(found, dict):
            found = found.get("message") or found.get("detail")
        if found:
            return str(found)[:500]
    return response.text[:300].strip() or "no message"


class Client:
    """One connection pool. Use within `async with`; nothing but the recipe configures it, no proxy variable either.
    `field`: what of the recipe names the server's address."""

    def __init__(self, server: Server, seed: int, field: str = f"{SECTION}.base_url") -> None:
        self.server, self.seed = server, seed
        self.url, self.key = server_url(server, field), api_key(server, field.rpartition(".")[0])
        self.pace = Pace(server.requests_per_s)

    async def __aenter__(self) -> "Client":
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=None, trust_env=False,
            limits=httpx.Limits(max_connections=self.server.concurrency))
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.http.aclose()

    def hide(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text

    async def call(self, method: str, path: str, body: Any, read: Callable[[Any], T], row: str,
                   count: Callable[[str], None], optional: bool = False) -> T:
        """`read` of the decoded answer; see `tried`. `optional`: `read` gets None where the server has no such path."""
        async def once() -> T:
            return read(await self.send(method, path, body, optional))

        return await self.tried(once, row, count)

    async def models(self) -> list[str]:
        """Names under which the server serves models. Raises Fault where it does not answer with a list of them."""
        def read(value: Any) -> list[str]:
            rows = value.get("data") if isinstance(value, dict) else None
            if not isinstance(rows, list):
                raise Fault("/v1/models is no list of models")
            return [str(row.get("id")) for row in rows if isinstance(row, dict)]

        return await self.call("GET", "/v1/models", None, read, "models", lambda reason: None)

    async def tried(self, once: Callable[[], Awaitable[T]], row: str, count: Callable[[str], None]) -> T:
        """What `once` gives, tried 1 + retries times as long as it raises a Fault that is not final.

        `count` gets the reason of each failed attempt. Raises the last Fault, or RunError for what no further attempt
        can mend.
        """
        for attempt in range(self.server.retries + 1):
            now = time.monotonic()
            await asyncio.sleep(self.pace.reserve(now) - now)
            try:
                return await once()
            except Fault as fault:
                count(fault.reason)
                if fault.final or attempt == self.server.retries:
                    raise
                if fault.wait > LONGEST_WAIT:
                    raise RunError(f"{self.url}: {fault.reason}: asks to wait {fault.wait:.0f} s; run again "
                                   "later") from None
                self.pace.pause(time.monotonic() + fault.wait)
                draw = random.Random(f"{self.seed}:{row}:{attempt}").random()
            await asyncio.sleep(backoff(attempt, self.server.backoff_s, draw))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def send(self, method: str, path: str, body: Any, optional: bool) -> Any:
        """The decoded JSON of one attempt. Raises Fault for what may pass, RunError for what will not."""
        try:
            async with asyncio.timeout(self.server.timeout_s):
                response = await self.http.request(method, path, json=body)
        except TimeoutError:
            raise Fault(LATE) from None
        except httpx.RequestError as error:  # refused, reset, cut off in the body, not HTTP
            raise Fault(f"connection: {type(error).__name__}") from None
        if optional and response.status_code in ABSENT:
            return None
        self.check_status(response, path)
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise Fault("body is not JSON") from None

    def check_status(self, response: httpx.Response, path: str) -> None:
        """Raises Fault for a status that another attempt may not meet, RunError for any other that is no success."""
        status = response.status_code
        if status in PASSING or status >= 500:
            raise Fault(f"HTTP {status}", retry_after(response.headers, datetime.now(UTC)))
        if status != 200:
            raise RunError(f"{self.url}{path}: HTTP {status}: {self.hide(message_of(response))}")
