"""Figures of one server at one concurrency: rates, latencies, acceptance. Definitions in docs/report.md."""

from dataclasses import asdict, dataclass
from typing import Any

from eval.live import Level, Reply, Run
from eval.metrics import Acceptance
from eval.server_counters import Counters
from eval.timing import Timing, percentiles, speedup
from recipes.files import sha256_json


@dataclass(frozen=True)
class Record:
    """One answered request as requests.jsonl keeps it: no text, its checksum alone."""

    set: str
    id: str
    round: int
    repeat: int
    prompt_tokens: int
    tokens: int
    pieces: int
    seconds: float
    ttft_ms: float
    text_sha256: str


@dataclass
class Measured:
    """One server at one concurrency as the report shows it, and its requests."""

    block: dict[str, Any]
    records: list[Record]


def record(reply: Reply) -> Record:
    stream = reply.stream
    return Record(*reply.key, reply.round, reply.work.repeat, stream.prompt_tokens, stream.tokens, len(stream.times),
                  stream.seconds, 1e3 * (stream.times[0] - stream.began), sha256_json(stream.text)[:16])


def token_gaps(reply: Reply) -> list[float]:
    """Milliseconds between tokens: n tokens that come together are n intervals of a n-th of the time since the piece
    before. Where the server gives no ids, every piece holds as many as the answer's mean."""
    stream, found, waited = reply.stream, [], 0.0
    even = stream.tokens / len(stream.times)
    for place in range(1, len(stream.times)):
        waited += 1e3 * (stream.times[place] - stream.times[place - 1])
        count = stream.counts[place] if stream.counts is not None else even
        if count:  # a piece of text alone ends no token
            found += [waited / count] * max(1, round(count))
            waited = 0.0
    return found


def side_block(run: Run, clients: int) -> dict[str, Any]:
    """Throughput, latencies and faults."""
    streams = [reply.stream for reply in run.replies]
    tokens, pieces = sum(s.tokens for s in streams), sum(len(s.times) for s in streams)
    busy = sum(s.seconds for s in streams)
    gaps = [1e3 * (b - a) for s in streams for a, b in zip(s.times, s.times[1:])]
    return {
        "requests": len(streams), "tokens": tokens, "seconds": run.wall_s,
        "tok_s": tokens / run.wall_s if run.wall_s else None, "steady_tok_s": clients * tokens / busy if busy else None,
        "tokens_per_piece": tokens / pieces if pieces else None,
        "ttft_ms": percentiles([1e3 * (s.times[0] - s.began) for s in streams]),
        "itl_ms": percentiles([gap for reply in run.replies for gap in token_gaps(reply)], len(gaps)),
        "piece_ms": percentiles(gaps), "request_ms": percentiles([1e3 * s.seconds for s in streams]),
        "faults": dict(run.faults), "timeouts": run.timeouts, "retries": run.retries, "lost": len(run.lost),
        "client_busy": run.cpu_s / run.client_s if run.client_s else 0.0,
    }


def measured(run: Run, clients: int) -> Measured:
    return Measured(side_block(run, clients), [record(reply) for reply in run.replies])


def accepted_of(counted: Counters, tokens: int, requests: int) -> int | None:
    """Accepted draft tokens. Where the engine counts verifications alone (SGLang): the tokens behind the first of each
    answer, less one a verification; what was cut at an answer's end is not among them."""
    if counted.accepted is not None or counted.drafts is None:
        return counted.accepted
    return max(0, tokens - requests - counted.drafts)


def as_acceptance(counted: Counters) -> Acceptance | None:
    """The counts by position, where the engine has them."""
    if not counted.drafts or not counted.per_position:
        return None
    K = len(counted.per_position)
    return Acceptance(K, counted.drafts, list(counted.per_position),
                      counted.drafts * K if counted.drafted is None else counted.drafted)


def acceptance_block(counted: Counters | None, tokens: int, requests: int) -> dict[str, Any]:
    """What the engine says of drafting at a concurrency; null is not known. `source`: of the mean length."""
    if counted is None:
        return dict.fromkeys(("source", "drafts", "drafted", "accepted", "mean_length", "rate", "per_position"))
    accepted = accepted_of(counted, tokens, requests)
    found: dict[str, Any] = {"drafts": counted.drafts, "drafted": counted.drafted, "accepted": accepted}
    by_position = as_acceptance(counted)
    if counted.drafts and accepted is not None:
        source = "counters" if counted.accepted is not None else "verifications"
        found |= {"source": source, "mean_length": 1 + accepted / counted.drafts}
    elif counted.gauge and counted.gauge >= 1 and counted.drafts is None:
        found |= {"source": "gauge", "mean_length": counted.gauge}
    else:
        found |= {"source": None, "mean_length": None}
    rate = accepted / counted.drafted if counted.drafted and accepted is not None else None
    return found | {"rate": rate, "per_position": by_position.per_position if by_position else None}


def paired(fast: list[Record], base: list[Record]) -> tuple[Timing, Timing]:
    """Tokens and seconds of each conversation that both servers had as often, one entry a conversation: the unit that
    the interval resamples."""
    sums: list[dict[tuple[str, str], list[float]]] = []
    for side in (fast, base):
        own: dict[tuple[str, str], list[float]] = {}
        for one in side:
            total = own.setdefault((one.set, one.id), [0, 0.0, 0])
            total[0], total[1], total[2] = total[0] + one.tokens, total[1] + one.seconds, total[2] + 1
        sums.append(own)
    keys = [key for key, total in sums[0].items() if key in sums[1] and sums[1][key][2] == total[2]]
    return tuple(Timing([own[key][1] for key in keys], [own[key][0] for key in keys]) for own in sums)


def speed_between(fast: list[Record], base: list[Record] | None, seed: int) -> dict[str, Any]:
    """Ratio of the tokens a second of a client's requests, with its 95 % interval over conversations."""
    ours, theirs = paired(fast, base or [])
    if len(ours.tokens) < 2:
        return {"speedup": None, "ci95": None, "prompts": len(ours.tokens)}
    ratio, ci95 = speedup(theirs, ours, seed)
    return {"speedup": ratio, "ci95": ci95, "prompts": len(ours.tokens)}


def lines_of(level: Level, sides: dict[str, Measured | None]) -> list[dict[str, Any]]:
    """Lines of requests.jsonl."""
    return [{"concurrency": level.concurrency, "side": name, **asdict(one)}
            for name, found in sides.items() if found for one in found.records]
