"""`make eval` with `eval.server.base_url`: measures a running server and writes its report.

Writes runs/<name>/eval/<label>/: report.json, report.html, report.md as every evaluation, requests.jsonl (figures of
each request) and sent.jsonl (each prompt's ids, where the server gives them).
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from data.backends.stream import unknown_to
from data.evalsets import read_sets
from eval.earlier import read_report, sets_sha256
from eval.live import Level, Live, Side, asks_of, check_settings
from eval.live_figures import Measured, Record
from eval.live_found import GREEDY, Earlier, Found
from eval.live_page import write_live
from eval.live_report import ids_sha256, report_of
from eval.live_texts import Texts, asked_greedily, classify, compared, proving
from eval.settings import AT, sampling_of, written
from eval.track import check_tracker, log_figures
from recipes.cli import run_folder, write_resolved
from recipes.errors import ConfigError
from recipes.files import sha256_file, write_text
from recipes.schema import Recipe

REQUESTS = "requests.jsonl"


def read_earlier(path: Path, settings: dict[str, Any]) -> Earlier:
    """A report of this command as baseline. Raises ConfigError where it is none, drafted, asked other prompts, or lacks
    its requests. `settings`: what has to be the same."""
    field = f"eval.server.baseline_report = {path}"
    report = read_report(path)
    if "server" not in report:
        raise ConfigError(f"{field}: is of no running server; name the report of `make eval` with eval.server.base_url")
    if report["server"]["drafting"]:
        raise ConfigError(f"{field}: that server drafted; measure it without a drafter")
    for name, value in settings.items():
        before = report["settings"].get(name, AT.get(name))
        if before != value:
            raise ConfigError(f"{field}: {name} was {before!r}, now {value!r}; measure it again")
    requests = path.with_name(REQUESTS)
    try:
        if sha256_file(requests) != report["server"]["requests_sha256"]:
            raise ConfigError(f"{requests}: is not the one that {path} was written with; measure it again")
        lines = [json.loads(line) for line in requests.read_text(encoding="utf-8").splitlines()]
        levels = {int(name): Measured(level["speculative"], records_in(lines, int(name), "speculative"))
                  for name, level in report["server"]["levels"].items()}
        greedy = records_in(lines, 1, GREEDY)
    except OSError as error:
        raise ConfigError(f"{requests}: cannot be read ({error.strerror}); it belongs to {path}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error!r}: made by another version; measure it again") from None
    return Earlier(path, sha256_file(path), report, levels, greedy)


def records_in(lines: list[dict[str, Any]], concurrency: int, side: str) -> list[Record]:
    """The requests of one server at one concurrency out of requests.jsonl."""
    return [Record(**{key: value for key, value in line.items() if key not in ("concurrency", "side")})
            for line in lines if (line["concurrency"], line["side"]) == (concurrency, side)]


def check_same(side: Side, earlier: Earlier) -> None:
    """Raises ConfigError where the earlier report is of another model or engine version (case 50)."""
    report = earlier.report
    now = {"model": side.client.server.model, "version": side.version}
    then = {"model": report["target"]["model"], "version": report["server"]["version"]}
    if now != then:
        raise ConfigError(f"eval.server.baseline_report = {earlier.path}: is of {then['model']} on version "
                          f"{then['version']}, the server now has {now['model']} on {now['version']}; measure it again")


async def measured(live: Live, earlier: Earlier | None) -> tuple[Side, Side | None, list[Level], Level, Texts]:
    """All concurrencies on one server, or on two in turns; greedy answers, which are the smallest concurrency's where
    nothing is sampled, and what differs between their texts."""
    section = live.server
    async with live.opened("base_url", section.metrics_urls) as side:
        if earlier:
            check_same(side, earlier)
        if not section.baseline_url:
            levels = await live.levels(side, None)
            return side, None, levels, (await proof(live, side, None, levels))[1], Texts()
        async with live.opened("baseline_url", []) as other:
            levels = await live.levels(side, other)
            asking, greedy = await proof(live, side, other, levels)
            texts = compared(greedy, bool(live.section.stop))
            await classify(asking, other, texts)
            return side, other, levels, greedy, texts


async def proof(live: Live, side: Side, other: Side | None, levels: list[Level]) -> tuple[Live, Level]:
    """Greedy answers, and what asks for them."""
    if live.sampling.greedy:
        return live, levels[0]
    asking = proving(live.section, live.works)
    return asking, await asked_greedily(asking, side, other)


def place_of(recipe: Recipe) -> Path:
    """The folder that the recipe's evaluation writes its report to; a running server has one of its own, so that one
    may be measured beside another. ConfigError for settings that name none."""
    check_tracker(recipe.eval.tracker)
    if not of_a_server(recipe):
        return run_folder(recipe) / "eval"
    check_settings(recipe.eval.server)
    if recipe.eval.acceptance != "exact":
        raise ConfigError(f"eval.acceptance = {recipe.eval.acceptance}: is a rule of the loop here; a server has its "
                          "own: set it to exact")
    kind = recipe.eval.server.kind
    unknown = unknown_to(kind, sampling_of(recipe.eval))
    if unknown:
        raise ConfigError(f"eval.sampling.{unknown[0]} = {getattr(recipe.eval.sampling, unknown[0])}: a server of "
                          f"eval.server.kind = {kind} has no field for it; leave it at its default")
    return run_folder(recipe) / "eval" / recipe.eval.server.label


def of_a_server(recipe: Recipe) -> bool:
    """Whether a running server is evaluated, and nothing decoded here."""
    server = recipe.eval.server
    return bool(server.base_url or server.baseline_url or server.baseline_report)


def evaluated_live(recipe: Recipe) -> tuple[dict[str, Any], Path]:
    """The report of the server that the recipe names, and its folder. Always measured anew: a server has no state that
    could be recognised. `place_of` has accepted its settings."""
    section = recipe.eval
    folder = run_folder(recipe) / "eval"
    out = folder / section.server.label
    sets = read_sets(section, folder / "sets", recipe.prompts.max_bad_share)
    works, dropped = asks_of(sets)
    earlier = None
    if section.server.baseline_report:
        path = Path(section.server.baseline_report)
        if path.resolve().parent == out.resolve():
            raise ConfigError(f"eval.server.baseline_report = {path}: would be overwritten by this report; give one of "
                              "the two another eval.server.label")
        earlier = read_earlier(path, {"prompts_sha256": sets_sha256(sets), "max_tokens": section.max_tokens,
                                      **written(sampling_of(section), section.stop)})
    found = Found(recipe, sets, dropped, earlier, *asyncio.run(measured(Live(section, works), earlier)))
    write_resolved(recipe, ["eval"])
    report, lines = report_of(found, folder)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / REQUESTS, "".join(json.dumps(line) + "\n" for line in lines))
    report["server"]["requests_sha256"] = sha256_file(out / REQUESTS)
    write_sent(found, out)
    write_live(report, out)
    log_figures(recipe, report, folder.parent)
    return report, out


def write_sent(found: Found, folder: Path) -> None:
    """sent.jsonl: the ids of every prompt as the server's own template made them, or the checksum of its messages
    where it does not give them (case 53)."""
    lines = []
    for reply in found.levels[0].speculative.replies:
        if reply.work.repeat == 0:
            ids = reply.stream.prompt_ids
            lines.append({"set": reply.work.set, "id": reply.work.question.id, "round": reply.round,
                          **({"ids": ids} if ids else {"messages_sha256": ids_sha256(reply)})})
    write_text(folder / "sent.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
