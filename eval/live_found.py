"""What was measured of a running server, and what stands beside it: baseline, greedy texts, `make eval` without one."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.evalsets import Questions
from eval.earlier import read_report
from eval.live import Level, Side
from eval.live_figures import Measured, Record, record
from eval.live_texts import Texts, unsteady
from eval.settings import read, sampling_of
from recipes.errors import ConfigError
from recipes.files import sha256_file
from recipes.schema import Recipe

GREEDY = "greedy"  # side of requests.jsonl: greedy requests of the server that is measured, where the others sample
NO_BASELINE = ("no baseline: name a server without a drafter in eval.server.baseline_url, or its report in "
               "eval.server.baseline_report")


@dataclass
class Earlier:
    """The baseline of an earlier report: each concurrency's figures, and what the texts were. greedy: its requests of
    side GREEDY."""

    path: Path
    sha256: str
    report: dict[str, Any]
    levels: dict[int, Measured]
    greedy: list[Record]


@dataclass
class Found:
    """All that was measured. `sets`: what was read; `dropped`: of each set what was not asked; `greedy`: greedy
    answers, those of the smallest concurrency where nothing is sampled; `texts`: what differs between them."""

    recipe: Recipe
    sets: list[Questions]
    dropped: dict[str, Counter]
    earlier: Earlier | None
    side: Side
    other: Side | None
    levels: list[Level]
    greedy: Level
    texts: Texts

    @property
    def sampled(self) -> bool:
        return not sampling_of(self.recipe.eval).greedy


def greedy_records(found: Found, sides: dict[str, Measured | None]) -> tuple[list[Record], list[Record]]:
    """Greedy requests of the server and of an earlier report. sides: the smallest concurrency."""
    if found.sampled:
        return [record(reply) for reply in found.greedy.speculative.replies], found.earlier.greedy
    return sides["speculative"].records, sides["baseline"].records


def greedy_block(found: Found, sides: dict[str, Measured | None]) -> dict[str, Any]:
    """Whether the two servers' greedy texts are equal, and whether each agrees with itself, which of sampled ones is
    not asked. sides: the smallest concurrency."""
    tolerance, texts = found.recipe.eval.gap_tolerance, found.texts
    gaps = [one.gap for one in texts.differences]
    first, differ, prompts, tokens = None, len(gaps), texts.prompts, texts.tokens
    if texts.differences:
        one = texts.differences[0]
        first = {"set": one.speculative.work.set, "id": one.speculative.work.question.id,
                 "round": one.speculative.round, "place": one.place, "gap": one.gap,
                 "unit": "token" if one.by_token else "character"}
    if found.earlier and sides["baseline"]:  # its texts are known by their checksums alone
        asked, before = greedy_records(found, sides)
        theirs = {(r.set, r.id, r.round): r for r in before if r.repeat == 0}
        pairs = [(r, theirs[r.set, r.id, r.round]) for r in asked
                 if r.repeat == 0 and r.round == 0 and (r.set, r.id, r.round) in theirs]
        other = [a for a, b in pairs if a.text_sha256 != b.text_sha256]
        prompts, tokens, differ, gaps = len(pairs), sum(b.tokens for _, b in pairs), len(other), [None] * len(other)
        if other:
            first = {"set": other[0].set, "id": other[0].id, "round": 0, "place": None, "unit": None, "gap": None}
    near = sum(gap is not None and gap < tolerance for gap in gaps)
    levels = [] if found.sampled else found.levels
    ours = unsteady(level.speculative for level in levels)
    theirs_own = unsteady(level.baseline for level in levels if level.baseline)
    return {"prompts": prompts, "tokens": tokens, "equal": prompts - differ, "differ": differ, "near_ties": near,
            "gap_unknown": gaps.count(None), "tie_gap": tolerance, "first_difference": first,
            "unsteady": {name: {"prompts": n, "differ": m}
                         for name, (n, m) in (("speculative", ours), ("baseline", theirs_own))}}


def offline_block(path: Path, settings: dict[str, Any], found: dict[str, Any]) -> dict[str, Any] | None:
    """Acceptance of `make eval` without a server for the same prompts, answer length, sampling and stop strings, beside
    this one; None where there is no such report, or one of lossy acceptance, which servers do not have."""
    try:
        report = read_report(path)
    except ConfigError:
        return None
    same = all(report["settings"].get(key) == settings[key] for key in ("prompts_sha256", "max_tokens"))
    if not same or read(report["settings"]) != read(settings) or report["settings"].get("lossy"):
        return None
    own, rates = report["total"]["acceptance"], found["per_position"]
    apart = (max(abs(a - b) for a, b in zip(own["per_position"], rates))
             if rates and len(rates) == len(own["per_position"]) else None)
    return {"sha256": sha256_file(path), "mean_length": own["mean_length"], "per_position": own["per_position"],
            "largest_difference": apart}


def baseline_block(found: Found) -> dict[str, Any]:
    if found.other:
        return {"from": "server", "url": found.recipe.eval.server.baseline_url, "version": found.other.version,
                "model": found.other.client.server.model, "time": None, "sha256": None, "reason": None}
    if found.earlier:
        report = found.earlier.report
        return {"from": "report", "url": report["server"]["url"], "version": report["server"]["version"],
                "model": report["target"]["model"], "time": report["stack"]["time"], "sha256": found.earlier.sha256,
                "reason": "from an earlier report: the two were not measured in turns"}
    return {"from": None, "url": None, "version": None, "model": None, "time": None, "sha256": None,
            "reason": NO_BASELINE}
