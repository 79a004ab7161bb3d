"""The requests of `make eval` with `eval.server.base_url`: a running server is measured with and without its drafter.

At each concurrency so many clients work through the recipe's evaluation prompts, each sending its next request when
its last one is answered (closed loop). Two servers take turns, so that both meet the same hour. What is made of the
answers: eval/live_report.py.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from data.backends.base import Fault
from data.backends.client import LATE, Client, checked_url
from data.backends.stream import Stream, chat_body, streamed
from data.chat import Message
from data.evalsets import Question, Questions
from eval.server_counters import Counters, Watch, drafting, foreign, summed
from eval.settings import sampling_of
from recipes.errors import ConfigError, RunError
from recipes.schema import Eval, LiveServer, Server

FILL = 3  # requests of each client in a turn, at least: the end of a turn, where clients fall idle, stays small
VERSIONS = ("/version", "/server_info", "/get_server_info")  # vLLM; SGLang, new and old
NO_MESSAGES = "token ids, which a chat request cannot carry"


@dataclass(frozen=True)
class Work:
    """One conversation to have; `repeat` tells apart those with the same question at one concurrency."""

    set: str
    question: Question
    repeat: int


@dataclass
class Reply:
    """One answered request. `messages`: what was sent. `counted`: what the server counted for it alone, if known."""

    work: Work
    round: int
    messages: list[Message]
    stream: Stream
    counted: Counters | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Names the conversation."""
        return self.work.set, self.work.question.id


@dataclass
class Run:
    """One server at one concurrency, all its turns. Seconds: `wall_s` in which its requests ran; `client_s` and
    `cpu_s` of this client beside them. `counted`: the server's counters by turn. `foreign`: signs of other clients."""

    requests: int = 0
    replies: list[Reply] = field(default_factory=list)
    wall_s: float = 0.0
    client_s: float = 0.0
    cpu_s: float = 0.0
    faults: Counter = field(default_factory=Counter)
    lost: dict[str, str] = field(default_factory=dict)
    counted: list[Counters] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def timeouts(self) -> int:
        return self.faults[LATE]

    @property
    def retries(self) -> int:
        """Attempts behind a failed one of the same request."""
        return sum(self.faults.values()) - len(self.lost)


@dataclass
class Level:
    """Both servers at one concurrency."""

    concurrency: int
    repeats: int
    turns: int
    speculative: Run
    baseline: Run | None


@dataclass
class Side:
    """One server that is measured. `field`: what of the recipe names it. `counts`: it has counters; `last`: their last
    reading."""

    field: str
    client: Client
    watch: Watch
    counts: bool = False
    version: str = "unknown"
    engine: str = ""
    last: Counters = Counters()

    async def tally(self, done: Reply | None) -> None:
        """Gives a request that ran alone what the server counted since the last one."""
        now = await self.watch.settled(lambda now: fresh(now, self.last, done))
        self.last, counted = now, now - self.last
        if done is not None:
            done.counted = counted


def asks_of(sets: list[Questions]) -> tuple[list[Work], dict[str, Counter]]:
    """The conversations of all sets, and of each set what is not asked, by reason. ConfigError for a set of which
    nothing is left."""
    works, dropped = [], {one.name: Counter(one.dropped) for one in sets}
    for one in sets:
        found = [Work(one.name, question, 0) for question in one.questions if question.ids is None]
        if len(found) < len(one.questions):
            dropped[one.name][NO_MESSAGES] += len(one.questions) - len(found)
        if not found:
            raise ConfigError(f"evaluation set {one.name}: no question is left ({dict(dropped[one.name])} dropped)")
        works += found
    return works, dropped


def check_settings(section: LiveServer) -> None:
    """Raises ConfigError for addresses and names that cannot work, before anything is written or sent."""
    if not section.base_url:
        raise ConfigError("eval.server.base_url is empty: name the server with the drafter there")
    checked_url(section.base_url, "eval.server.base_url")
    for number, url in enumerate(section.metrics_urls):
        checked_url(url, f"eval.server.metrics_urls[{number}]")
    if section.baseline_url:
        checked_url(section.baseline_url, "eval.server.baseline_url")
        if section.baseline_url.rstrip("/") == section.base_url.rstrip("/"):
            raise ConfigError("eval.server.baseline_url: is the server that is measured; name one without a drafter")
        if section.baseline_report:
            raise ConfigError("eval.server: baseline_url and baseline_report are both set; set one of them")
    if section.label in ("", ".", "..", "sets") or "/" in section.label:
        raise ConfigError(f"eval.server.label = {section.label!r}: must be a plain folder name, and not `sets`")


def turns_of(count: int, clients: int) -> list[range]:
    """`count` conversations in an even number of turns, of at least FILL for each client and as long as each other: so
    each server begins as often as the other."""
    parts = max(1, count // (FILL * clients) // 2 * 2)
    return [range(i * count // parts, (i + 1) * count // parts) for i in range(parts)]


class Live:
    """Measures the servers of a recipe at its sampling. `works`: the conversations of a pass over the prompts."""

    def __init__(self, section: Eval, works: list[Work]) -> None:
        self.section, self.server, self.works = section, section.server, works
        self.sampling = sampling_of(section)
        self.salt = secrets.token_hex(16)  # prompts of an earlier run are not found in a prefix cache
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                            TimeRemainingColumn(), console=Console(stderr=True))

    @asynccontextmanager
    async def opened(self, field: str, urls: list[str]) -> AsyncIterator[Side]:
        """The server that a field of `eval.server` names. Raises ConfigError where it serves another model, RunError
        where it does not answer."""
        section = self.server
        given = Server(getattr(section, field), section.model, section.kind, section.api_key_env,
                       max(section.concurrency) + 1, 0.0, section.timeout_s, section.retries, section.backoff_s)
        async with Client(given, self.section.seed, f"eval.server.{field}") as client:
            side = Side(f"eval.server.{field} = {given.base_url}", client, Watch(client, urls))
            try:
                served = await client.models()
            except Fault as fault:
                raise RunError(f"{side.field}: {fault.reason}, after {section.retries + 1} attempts") from None
            name = section.model or (served[0] if len(served) == 1 else "")
            if name not in served:
                raise ConfigError(f"eval.server.model = {section.model!r}: the server at {given.base_url} serves "
                                  f"{', '.join(served) or 'no model'}; name one of them")
            client.server = replace(given, model=name)
            side.version = await version_of(client)
            yield side

    async def levels(self, side: Side, other: Side | None) -> list[Level]:
        """Every concurrency of the recipe, from the smallest up."""
        sides = [one for one in (other, side) if one]
        for one in sides:
            await self.turn(one, Run(1), self.works[:1], 1, "first")  # some counters appear with the first request
            one.engine = (await one.watch.open()).engine
            one.counts = not one.watch.reason
        found = []
        with self.bar:
            for clients in sorted(set(self.server.concurrency)):
                found.append(await self.level(clients, sides))
                if other and drafting(summed(found[-1].baseline.counted)):
                    raise ConfigError(f"{other.field}: this server drafts too; start it without a drafter")
        return found

    async def level(self, clients: int, sides: list[Side]) -> Level:
        """One concurrency: a warm-up of each server, then the turns; who begins changes from turn to turn."""
        repeats = max(1, -(-2 * FILL * clients // len(self.works)))
        works = [replace(work, repeat=repeat) for repeat in range(repeats) for work in self.works]
        parts = turns_of(len(works), clients) if len(sides) > 1 else [range(len(works))]
        requests = sum(len(work.question.rounds) for work in works)
        runs = {one.field: Run(requests) for one in sides}
        task = self.bar.add_task(f"concurrency {clients}", total=requests * len(sides))
        for one in sides:
            warm = works[:clients]
            await self.turn(one, Run(sum(len(w.question.rounds) for w in warm)), warm, clients, f"warm {clients}")
        for number, part in enumerate(parts):
            for one in sides if number % 2 == 0 else sides[::-1]:
                await self.turn(one, runs[one.field], [works[i] for i in part], clients, f"{clients}", task)
        return Level(clients, repeats, len(parts), runs[sides[-1].field],
                     runs[sides[0].field] if len(sides) > 1 else None)

    async def turn(self, side: Side, run: Run, works: list[Work], clients: int, salt: str,
                   task: TaskID | None = None) -> None:
        """`clients` at work until all of `works` are done; without a `task` nothing is counted. One client has the
        counters read behind every request, outside its time."""
        counts, alone = side.counts and task is not None, clients == 1
        start = side.last = await side.watch.settled() if counts else Counters()
        first, failed = len(run.replies), sum(run.faults.values())
        queue, began, busy = iter(works), time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(clients, len(works))):
                    group.create_task(self.converse(side, run, queue, clients, salt, counts and alone, task))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        own, spent = run.replies[first:], time.perf_counter() - began
        run.client_s, run.cpu_s = run.client_s + spent, run.cpu_s + time.process_time() - busy
        run.wall_s += sum(reply.stream.seconds for reply in own) if alone else spent
        if counts:
            run.counted.append(await side.watch.settled(lambda now: fresh(now, start, *own)) - start)
            run.foreign += foreign(run.counted[-1], [reply.stream.tokens for reply in own],
                                   sum(run.faults.values()) - failed, self.section.max_tokens, bool(self.section.stop))

    async def converse(self, side: Side, run: Run, queue: Iterator[Work], clients: int, salt: str, each: bool,
                       task: TaskID | None) -> None:
        """One client: whole conversations, whose later turns follow this server's own answers. `each`: the server's
        counters are read behind every request."""
        for work in queue:
            messages: list[Message] = []
            for number, asked in enumerate(work.question.rounds):
                messages = [*messages, *asked]
                done = await self.ask(side, run, work, number, messages, f"{self.salt} {salt} {work.repeat}", clients)
                if each:
                    await side.tally(done)
                if task is not None:
                    self.bar.advance(task)
                if done is None:
                    break
                messages = [*messages, {"role": "assistant", "content": done.stream.content}]

    async def ask(self, side: Side, run: Run, work: Work, number: int, messages: list[Message], salt: str,
                  clients: int) -> Reply | None:
        """One request, its further attempts included; None where it is lost. RunError where too many are."""
        body = chat_body(self.server.kind, side.client.server.model, messages, work.question.tools,
                         self.section.max_tokens, salt, self.sampling, self.section.stop)
        row = f"{work.set} {work.question.id} {number} {work.repeat}"

        def count(reason: str) -> None:
            run.faults[reason] += 1

        try:
            stream = await side.client.tried(lambda: streamed(side.client, body), row, count)
        except Fault as fault:
            run.lost[row] = fault.reason
            allowed = int(self.server.max_lost_share * run.requests)
            if len(run.lost) > allowed:
                raise RunError(f"{side.field}: {len(run.lost)} of {run.requests} requests at concurrency {clients} "
                               f"have no answer ({reasons(run.lost)}); eval.server.max_lost_share allows {allowed}; "
                               "mend the server and run again") from None
            return None
        run.replies.append(Reply(work, number, messages, stream))
        return run.replies[-1]


def fresh(now: Counters, before: Counters, *replies: Reply | None) -> bool:
    """True where the server has counted the tokens of these answers since `before`."""
    if now.generated is None or None in replies:
        return False
    return now.generated - (before.generated or 0) == sum(reply.stream.tokens for reply in replies)


def reasons(lost: dict[str, str]) -> str:
    return ", ".join(f"{reason}: {n}" for reason, n in Counter(lost.values()).most_common(3))


async def version_of(client: Client) -> str:
    """The engine's own version, where it says one."""
    for path in VERSIONS:
        try:
            found = await client.send("GET", path, None, True)
        except (Fault, RunError):
            continue
        if isinstance(found, dict) and isinstance(found.get("version"), str):
            return found["version"]
    return "unknown"
