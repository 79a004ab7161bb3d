"""The report of a running server: the form of docs/report.schema.json, null where a server cannot tell.

Acceptance by kind of prompt and its interval come from the smallest concurrency; with 1 the counters were read behind
every request. The part that only a server's report has is `server`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eval.earlier import SCHEMA, sets_sha256
from eval.figures import arrivals
from eval.live import Level, Reply
from eval.live_figures import (
    Measured,
    acceptance_block,
    accepted_of,
    as_acceptance,
    lines_of,
    measured,
    record,
    speed_between,
)
from eval.live_found import GREEDY, NO_BASELINE, Found, baseline_block, greedy_block, offline_block
from eval.metrics import bootstrap, repeated_share
from eval.server_counters import Counters, drafting, summed
from eval.settings import measured_at, sampling_of, written
from eval.verdict import decide_server
from recipes.files import sha256_json
from recipes.provenance import stamp

UNKNOWN = {"p50": None, "p95": None, "p99": None, "n": 0}


def acceptance(replies: list[Reply], counted: Counters | None, seed: int) -> dict[str, Any]:
    """`total.acceptance` of these answers. The interval resamples conversations, where each request was counted."""
    tokens = sum(reply.stream.tokens for reply in replies)
    found, by_position = acceptance_block(counted, tokens, len(replies)), counted and as_acceptance(counted)
    sums: dict[tuple[str, str], list[int]] = {}
    for reply in replies:
        own = sums.setdefault(reply.key, [0, 0])
        if reply.counted is not None and reply.counted.drafts is not None:
            own[0] += accepted_of(reply.counted, reply.stream.tokens, 1) or 0
            own[1] += reply.counted.drafts
    accepted, drafts = (np.array([own[i] for own in sums.values()], dtype=float) for i in (0, 1))
    known = all(reply.counted is not None for reply in replies) and np.count_nonzero(drafts) > 1
    return {"rate": found["rate"], "mean_length": found["mean_length"], "per_position": found["per_position"],
            "conditional_per_position": by_position.conditional if by_position else None,
            "by_context_bucket": [], "by_answer_position": [],
            "ci95": [1 + x for x in bootstrap(accepted, drafts, seed)] if known else None}


def block(replies: list[Reply], counted: Counters | None, seed: int) -> dict[str, Any]:
    """The statistics of some answers; passes of the target and the draft vocabulary are not known here."""
    tokens, ids = sum(r.stream.tokens for r in replies), [r.stream.ids for r in replies]
    repeated = (sum(repeated_share(one) * len(one) for one in ids) / tokens if tokens and None not in ids else None)
    return {"prompts": len(replies), "tokens": tokens, "drafts": counted.drafts if counted else None,
            "acceptance": acceptance(replies, counted, seed), "tokens_per_target_pass": None, "target_passes": None,
            "repetition": {"share": repeated, "tokens_per_target_pass_without": None},
            "vocabulary_misses": {"rejections": None, "outside_draft_vocabulary": None, "share": None}}


def each_counted(replies: Iterable[Reply]) -> Counters | None:
    """The sum of what was counted request by request; None where one of them was not."""
    found = [reply.counted for reply in replies]
    return summed(found) if found and None not in found else None


def sets_of(found: Found, replies: list[Reply]) -> dict[str, Any]:
    """Block, origin and categories of each set."""
    seed, sets = found.recipe.eval.seed, {}
    for one in found.sets:
        own = [reply for reply in replies if reply.work.set == one.name]
        parts: dict[str, list[Reply]] = {}
        for reply in own:
            parts.setdefault(reply.work.question.category or "all", []).append(reply)
        came = arrivals([question.arrival for question in one.questions])
        sets[one.name] = block(own, each_counted(own), seed) | {
            "categories": {name: block(part, each_counted(part), seed) for name, part in parts.items()},
            "origin": one.origin, "sha256": one.sha256, "questions": len({reply.key for reply in own}),
            "dropped": dict(found.dropped[one.name]), "untemplated": 0,
            "turns_after_cut_answers": sum(
                reply.stream.finish == "length" and reply.round + 1 < len(reply.work.question.rounds) for reply in own),
            **({"arrivals": came} if came else {})}
    return sets


def ids_sha256(reply: Reply) -> str:
    """Checksum of the prompt's ids; of its messages, where the server does not give them."""
    return sha256_json(reply.stream.prompt_ids or reply.messages)


def prompts_of(found: Found, level: Level, sides: dict[str, Measured | None]) -> list[dict[str, Any]]:
    """Counts of each answer at the smallest concurrency, repeats of a request summed: what `make compare` resamples."""
    sums: dict[str, dict[tuple, list[float]]] = {}
    for name, side in sides.items():
        sums[name] = {}
        for one in side.records if side else []:
            own = sums[name].setdefault((one.set, one.id, one.round), [0, 0.0])
            own[0], own[1] = own[0] + one.tokens, own[1] + one.seconds
    entries = []
    for reply in (r for r in level.speculative.replies if r.work.repeat == 0):
        stream, key = reply.stream, (*reply.key, reply.round)
        counted = reply.counted or Counters()
        entry: dict[str, Any] = {
            "set": reply.work.set, "id": reply.work.question.id, "category": reply.work.question.category,
            "round": reply.round, "ids_sha256": ids_sha256(reply)[:16], "prompt_tokens": stream.prompt_tokens,
            "tokens": stream.tokens, "passes": None, "drafts": counted.drafts,
            "accepted": accepted_of(counted, stream.tokens, 1)}
        if found.recipe.eval.texts:
            entry |= {"prompt": "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in reply.messages),
                      "answer": stream.text}
        entry |= dict(zip(("timed_tokens", "timed_s"), sums["speculative"][key]))
        if key in sums["baseline"]:
            entry |= dict(zip(("baseline_tokens", "baseline_s"), sums["baseline"][key]))
        entries.append(entry)
    return entries


def level_block(level: Level, sides: dict[str, Measured | None], seed: int) -> dict[str, Any]:
    run, base = level.speculative, sides["baseline"]
    counted = summed(run.counted)
    tokens = sum(reply.stream.tokens for reply in run.replies)
    strange = list(run.foreign) + [f"baseline: {sign}" for sign in (level.baseline.foreign if level.baseline else [])]
    known = counted is not None and counted.looked_up and counted.cached is not None
    cached = counted.cached / counted.looked_up if known else None
    return {"concurrency": level.concurrency, "repeats": level.repeats, "turns": level.turns,
            "speculative": sides["speculative"].block, "baseline": base.block if base else None,
            **speed_between(sides["speculative"].records, base.records if base else None, seed),
            "acceptance": acceptance_block(counted, tokens, len(run.replies)), "prefix_cached": cached,
            "foreign": strange}


def settings_of(found: Found, replies: list[Reply], K: int | None) -> dict[str, Any]:
    section, sets = found.recipe.eval, found.sets
    levels = [level.concurrency for level in found.levels]
    settings = {"draft_length": K, **written(sampling_of(section), section.stop), "max_tokens": section.max_tokens,
                "batch_size": levels[0],
                "prompts": ", ".join(s.name for s in sets) if section.sets else section.prompts,
                "prompts_sha256": sets_sha256(sets),
                "prompt_ids_sha256": sha256_json([ids_sha256(reply) for reply in replies]), "seed": section.seed,
                "turns": dict(Counter(str(reply.round + 1) for reply in replies)), "concurrency": levels,
                "arrivals": "closed loop"}
    return settings | {"key": sha256_json([settings, found.recipe.eval.server.base_url, found.side.version])}


def speed_of(levels: dict[str, Any], engine: str | None) -> dict[str, Any]:
    """`total.speed`: the smallest concurrency, and all of them as batches."""
    rows = [{"batch": one["concurrency"], "baseline_tok_s": one["baseline"] and one["baseline"]["steady_tok_s"],
             "speculative_tok_s": one["speculative"]["steady_tok_s"], "speedup": one["speedup"]}
            for one in levels.values()]
    first, rates = next(iter(levels.values())), rows[0]
    engines = {"with the drafter": rates["speculative_tok_s"], engine: rates["baseline_tok_s"]}
    return {"baseline_tok_s": rates["baseline_tok_s"], "baseline_engine": engine,
            "speculative_tok_s": rates["speculative_tok_s"], "speedup": first["speedup"], "ci95": first["ci95"],
            "predicted_speedup": None, "prompts": first["prompts"], "by_batch": rows, "draft_step_ms": None,
            "target_step_ms": None, "verify_ms": None,
            "engines": {name: rate for name, rate in engines.items() if rate is not None and name},
            "cycle": {"cycles": 0, "cycle_ms": None, "reason": "a server does not say what its cycles take"}}


def measured_parts(greedy: dict[str, Any], sides: dict[str, Measured | None], levels: dict[str, Any],
                   engine: str | None) -> dict[str, Any]:
    """What of `total` is of the two servers together: texts, speed, latency. `sides`: the smallest concurrency;
    `engine`: the baseline's name."""
    known = engine is not None
    blocks = {name: sides[name] and sides[name].block for name in ("baseline", "speculative")}
    return {
        "rejections": {"entropy": None, "frequent": []},
        "lossless": {"greedy": {"prompts": greedy["prompts"], "tokens": greedy["tokens"],
                                "mismatches": greedy["differ"] - greedy["near_ties"] if known else None,
                                "near_ties": greedy["near_ties"] if known else None, "tie_gap": greedy["tie_gap"]},
                     "sampling": {"tests": 0, "max_tv": None, "p_value": None}},
        "speed": speed_of(levels, engine), "memory": {"peak_bytes": None},
        "latency": {key: {name: one[key] if one else UNKNOWN | {"reason": NO_BASELINE} for name, one in blocks.items()}
                    for key in ("ttft_ms", "itl_ms")}}


def report_of(found: Found, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report without its checksum of requests.jsonl, and the lines of that file. `folder`: the evaluation's own,
    where a report without a server may be."""
    recipe, section, first = found.recipe, found.recipe.eval, found.levels[0]
    sides: dict[int, dict[str, Measured | None]] = {}
    for level in found.levels:
        base = measured(level.baseline, level.concurrency) if level.baseline else (
            found.earlier.levels.get(level.concurrency) if found.earlier else None)
        sides[level.concurrency] = {"speculative": measured(level.speculative, level.concurrency), "baseline": base}
    levels = {str(level.concurrency): level_block(level, sides[level.concurrency], section.seed)
              for level in found.levels}
    counted, own = summed(first.speculative.counted), sides[first.concurrency]
    every = first.speculative.replies
    replies = [reply for reply in every if reply.work.repeat == 0]
    total = block(every, counted, section.seed)
    greedy = greedy_block(found, own)
    baseline = baseline_block(found)
    engine = f"{found.side.engine or 'server'} {baseline['version']} without a drafter" if own["baseline"] else None
    total |= measured_parts(greedy, own, levels, engine)
    settings = settings_of(found, replies, len(counted.per_position) or None if counted else None)
    origin, sets = stamp(asdict(recipe)), sets_of(found, every)
    server = {"url": section.server.base_url, "kind": section.server.kind, "engine": found.side.engine or None,
              "version": found.side.version, "arrivals": "closed loop", "drafting": drafting(counted),
              "counters": found.side.watch.reason or None, "restless": found.side.watch.restless,
              "token_ids": all(reply.stream.counts is not None for reply in every),
              "baseline": baseline, "greedy": greedy,
              "offline": offline_block(folder / "report.json", settings, total["acceptance"]), "levels": levels}
    report = {
        "schema": SCHEMA, "name": recipe.name,
        "target": {"model": found.side.client.server.model,
                   "fingerprint": {"served_model": found.side.client.server.model}, "layers": []},
        "drafter": {"kind": None, "checkpoint": None, "parameters": None, "draft_vocab_size": None, "options": {}},
        "stack": {"versions": {found.side.engine or "server": found.side.version}, "dtype": None, "device": None,
                  "threads": None, "git": origin["git"], "time": origin["time"], "OMP_WAIT_POLICY": None,
                  "load_1m": origin["machine"]["load_1m"]},
        "settings": settings, "total": total, "sets": sets, "prompts": prompts_of(found, first, own),
        "verdict": decide_server(total, sets, server, measured_at(settings)), "server": server}
    lines = [line for level in found.levels for line in lines_of(level, sides[level.concurrency])]
    apart = found.greedy.speculative.replies if found.sampled else []
    return report, lines + [{"concurrency": 1, "side": GREEDY, **asdict(record(reply))} for reply in apart]
