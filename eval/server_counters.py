"""What serving engines count of speculative decoding, read from their /metrics pages (docs/evaluation.md).

Counters run since the server started, over all its clients: a figure is a difference of two readings.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import httpx

from data.backends.client import Client
from recipes.errors import RunError

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$", re.MULTILINE)
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
NAMES: dict[str, dict[str, str]] = {  # engine -> field of Counters -> metric
    "vllm": {"drafts": "vllm:spec_decode_num_drafts_total", "drafted": "vllm:spec_decode_num_draft_tokens_total",
             "accepted": "vllm:spec_decode_num_accepted_tokens_total",
             "per_position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
             "generated": "vllm:generation_tokens_total", "finished": "vllm:request_success_total",
             "looked_up": "vllm:prefix_cache_queries_total", "cached": "vllm:prefix_cache_hits_total"},
    "sglang": {"drafts": "sglang:spec_verify_calls_total", "gauge": "sglang:spec_accept_length",
               "generated": "sglang:generation_tokens_total", "finished": "sglang:num_requests_total",
               "looked_up": "sglang:prompt_tokens_total", "cached": "sglang:cached_tokens_total"},
    "tensorrt-llm": {"drafted": "trtllm_spec_decode_num_draft_tokens_total",
                     "accepted": "trtllm_spec_decode_num_accepted_tokens_total",
                     "gauge": "trtllm_spec_decode_acceptance_length", "finished": "trtllm_request_success_total"},
}
PAUSE, READS = 0.1, 20  # seconds between two readings of counters that have to come to rest, and how many at most
PAGE_S = 30.0  # longest time of one page
FOREIGN_SHARE = 0.02  # of the tokens that this client got; more on the server's count are another client's


@dataclass(frozen=True)
class Counters:
    """Counts of one server, summed over its replicas (case 55). None: it does not say.

    drafts: verifications of a draft; drafted, accepted: draft tokens; per_position: drafts whose first i tokens were
    accepted; generated, finished: answer tokens and requests of all clients; looked_up, cached: prompt tokens, and
    those found in the prefix cache. gauge: mean acceptance length of the engine's own last moments, which is no count.
    """

    engine: str = ""
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    per_position: tuple[int, ...] = ()
    generated: int | None = None
    finished: int | None = None
    looked_up: int | None = None
    cached: int | None = None
    gauge: float | None = field(default=None, compare=False)

    def joined(self, other: "Counters", sign: int) -> "Counters":
        """Field by field self + sign * other. A count that only one of them has is 0 in the other: some engines write a
        counter when it first counts."""
        values: dict[str, Any] = {"engine": self.engine or other.engine, "gauge": self.gauge}
        for one in fields(self):
            a, b = getattr(self, one.name), getattr(other, one.name)
            if one.name == "per_position":
                wide = max(len(a), len(b))
                a, b = (side + (0,) * (wide - len(side)) for side in (a, b))
                values[one.name] = tuple(x + sign * y for x, y in zip(a, b))
            elif one.name not in values:
                values[one.name] = None if a is None and b is None else (a or 0) + sign * (b or 0)
        return Counters(**values)

    def __add__(self, other: "Counters") -> "Counters":
        return self.joined(other, 1)

    def __sub__(self, before: "Counters") -> "Counters":
        """What was counted since `before`. Raises RunError where a count fell: the server was started anew."""
        found = self.joined(before, -1)
        counts = [getattr(found, one.name) for one in fields(found) if one.name not in ("engine", "gauge")]
        if any(n is not None and n < 0 for n in [*found.per_position, *(c for c in counts if isinstance(c, int))]):
            raise RunError("the server's counters fell while it was measured: it was started anew; measure again")
        return found


def counters_of(page: str) -> Counters:
    """The counts of one /metrics page, over all its labels but `position`. `engine` is empty where no engine that is
    known here wrote it."""
    sums: dict[str, float] = {}
    gauges: dict[str, list[float]] = {}
    positions: dict[tuple[str, int], float] = {}
    for name, labels, text in SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        sums[name] = sums.get(name, 0.0) + value
        gauges.setdefault(name, []).append(value)
        place = POSITION.search(labels)
        if place:
            positions[name, int(place[1])] = positions.get((name, int(place[1])), 0.0) + value
    for engine, names in NAMES.items():
        if not any(name in sums for name in names.values()):
            continue
        found: dict[str, Any] = {key: int(sums[name]) for key, name in names.items()
                                 if name in sums and key not in ("per_position", "gauge")}
        own = {place: value for (name, place), value in positions.items() if name == names.get("per_position")}
        found["per_position"] = tuple(int(own.get(i, 0)) for i in range(max(own, default=-1) + 1))
        if names.get("gauge") in gauges:
            found["gauge"] = sum(gauges[names["gauge"]]) / len(gauges[names["gauge"]])
        return Counters(engine, **found)
    return Counters()


def summed(found: Iterable[Counters]) -> Counters | None:
    """The sum; None of nothing."""
    total = None
    for one in found:
        total = one if total is None else total + one
    return total


def drafting(counted: Counters | None) -> bool | None:
    """Did the server draft? None: it does not say."""
    if counted is None:
        return None
    if counted.drafts or counted.drafted:
        return True
    if counted.drafts is None and counted.drafted is None and counted.engine != "vllm":
        return None if counted.gauge is None else counted.gauge > 1
    return False  # vLLM has these counters only where it drafts


def foreign(counted: Counters, tokens: list[int], failed: int, max_tokens: int, stops: bool = False) -> list[str]:
    """Signs of requests that are not this client's, whose answers had so many `tokens`. `failed` attempts may have left
    up to max_tokens each on the counters. stops: answers end at stop strings too, which an engine finds in the text,
    behind the step that wrote it: that step and one more may be on the counters whole.

    A draft gives its accepted tokens and one more; only the last one of an answer may be cut.
    """
    own, room, requests = sum(tokens), failed * max_tokens, len(tokens) + failed
    found = []
    drafts, accepted = counted.drafts or 0, counted.accepted or 0
    longest = len(counted.per_position) or (-(-(counted.drafted or 0) // drafts) if drafts else 0)
    room += 2 * (longest + 1) * len(tokens) * stops
    if drafts and drafts + accepted > own + room + requests * (longest + 1):
        found.append(f"{drafts} drafts with {accepted} accepted tokens were counted, which are more than the {own} "
                     "tokens that this client got")
    if counted.generated is not None and counted.generated - own > room + FOREIGN_SHARE * own:
        found.append(f"{counted.generated} answer tokens were counted, this client got {own}")
    if counted.finished is not None and counted.finished > requests:
        found.append(f"{counted.finished} requests were counted, this client made {requests}")
    return found


class Watch:
    """Reads a server's counters. `urls`: its pages, one a replica; empty is /metrics of its address.

    `reason`: why there are no counters, after `open`; empty where there are. `restless`: they moved while this client
    had no request in flight.
    """

    def __init__(self, client: Client, urls: list[str]) -> None:
        self.client, self.urls = client, urls or [f"{client.url}/metrics"]
        self.reason, self.restless = "", False

    async def open(self) -> Counters:
        """The first reading; an empty one, with `reason`, where the server offers no counters."""
        pages = []
        for url in self.urls:
            try:
                page = await self.page(url)
            except RunError as error:
                self.reason = str(error)
                return Counters()
            pages.append(counters_of(page))
            if not pages[-1].engine:
                self.reason = f"{url} has no counters of an engine that is known here ({', '.join(NAMES)})"
                return Counters()
        return sum_of(pages)

    async def page(self, url: str) -> str:
        """The text of one page. The key goes to no other address than the server's own. RunError where there is none,
        after further attempts for what may pass."""
        request = self.client.http.build_request("GET", url, timeout=PAGE_S)
        own, server = httpx.URL(self.client.url), self.client.server
        if (request.url.scheme, request.url.host, request.url.port) != (own.scheme, own.host, own.port):
            request.headers.pop("Authorization", None)
        for attempt in range(server.retries + 1):
            try:
                answer = await self.client.http.send(request)
            except httpx.RequestError as error:
                reason = type(error).__name__
            else:
                if answer.status_code == 200:
                    return answer.text
                reason = f"HTTP {answer.status_code}"
                if answer.status_code < 500:
                    break
            if attempt < server.retries:
                await asyncio.sleep(server.backoff_s)
        raise RunError(f"{url}: {reason}")

    async def read(self) -> Counters:
        """The counters now. Raises RunError where a page that was there is gone."""
        return sum_of([counters_of(await self.page(url)) for url in self.urls])

    async def settled(self, enough: Callable[[Counters], bool] = lambda now: False) -> Counters:
        """The counters when they are `enough`, or when two readings are equal: an engine counts a moment after it has
        sent the last token. Sets `restless` where they do not come to rest."""
        last = await self.read()
        if self.restless or enough(last):
            return last
        for _ in range(READS):
            await asyncio.sleep(PAUSE)
            now = await self.read()
            if now == last or enough(now):
                return now
            last = now
        self.restless = True
        return last


def sum_of(pages: list[Counters]) -> Counters:
    """All pages of one server; the gauge is their mean."""
    found = summed(pages) or Counters()
    gauges = [page.gauge for page in pages if page.gauge is not None]
    return Counters(**{one.name: getattr(found, one.name) for one in fields(found) if one.name != "gauge"},
                    gauge=sum(gauges) / len(gauges) if gauges else None)
